"""What the agents of a job say: one small file each, rewritten about once a beat. Its change is the heartbeat.

    <shared>/status/2.json      machine 2: id, launch, attempt, phase, step, ... and numbers for people

Ages are by the reader's own clock, since it last saw a change: clocks of two machines are never compared.
"""

import contextlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# warming: getting ready; spare: ready; running: its trainers are at work; failed, saved: they have ended, and the next
# attempt is due; ended: the agent is gone, and said so.
AGENT_PHASES = ("warming", "spare", "running", "failed", "saved", "ended")


@dataclass(frozen=True, kw_only=True)
class MachineStatus:
    """What the others must know of a machine to agree on who trains next.

    `warm`: it could start again at once. `at` is the last step that this attempt has made, -1 before its first.
    `fault`: its own trainers failed by themselves ("own"), in a way that would come back at every try ("final"), or
    because of somebody else ("").
    """

    id: str
    address: str = "127.0.0.1"
    port: int = 0
    attempt: int = 0
    phase: str = "warming"
    last_step: int = -1
    is_standby_ready: bool = True
    leave_reason: str = ""
    fault: str = ""
    state: str = ""
    reason: str = ""

    @property
    def machine_name(self) -> str:
        """The machine's name: the id without its random part."""
        return self.id.partition(".")[0]

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "MachineStatus":
        """Return the word in a status file's value. Raises `KeyError` for one that has no id."""
        known = {key: value[key] for key in cls.__dataclass_fields__ if key in value}
        return cls(**{**known, "id": value["id"]})


class PeerStatuses:
    """The status files of a launch, and when each was last seen to change."""

    def __init__(self, shared: Path, machine_names: Iterable[str], launch_id: str) -> None:
        self.status_folder, self.machine_names, self.launch_id = shared / "status", tuple(machine_names), launch_id
        self.last_texts: dict[str, str] = {}
        self.statuses: dict[str, MachineStatus] = {}  # by id; one of each name
        self.changed_at: dict[str, float] = {}
        self.seen_changing: set[str] = (
            set()
        )  # seen to change: a file found for the first time may be of a machine long dead

    def refresh(self, now: float) -> None:
        """Read all files. One that is torn, gone for a moment, or of another launch leaves what was known."""
        for name in self.machine_names:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                text = (self.status_folder / f"{name}.json").read_text()
                if text == self.last_texts.get(name):
                    continue
                said = json.loads(text)
                self.last_texts[name] = text
                if not isinstance(said, dict) or said.get("launch") != self.launch_id:
                    continue
                word = MachineStatus.from_json(said)
                if word.id in self.statuses:
                    self.seen_changing.add(word.id)
                for old in [one for one in self.statuses if one.partition(".")[0] == name and one != word.id]:
                    del self.statuses[old], self.changed_at[old]  # a new start under an old name: the old one is lost
                self.statuses[word.id], self.changed_at[word.id] = word, now

    def discount_pause(self, pause_seconds: float) -> None:
        """We were frozen for so long, not they: their silence in that time does not count."""
        self.changed_at = {one: seen + pause_seconds for one, seen in self.changed_at.items()}

    def ages(self, now: float) -> dict[str, float]:
        """Return the seconds since each word changed."""
        return {one: now - seen for one, seen in self.changed_at.items()}
