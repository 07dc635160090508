"""Status files of a job's agents. Each agent rewrites its own about once a heartbeat; the change is the heartbeat.

    <shared>/status/2.json      machine 2: id, launch, attempt, phase, step, ... and numbers for people

The age of a status is measured by the reader's own clock, from the moment when the reader last saw it change. Clocks of
two machines are never compared.
"""

import contextlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# warming: getting ready; spare: ready; running: its trainers are at work; failed, saved: they have ended, and the next
# attempt is due; ended: the agent has announced its end.
AGENT_PHASES = ("warming", "spare", "running", "failed", "saved", "ended")


@dataclass(frozen=True, kw_only=True)
class MachineStatus:
    """Status published by one agent and read by its peers, who agree by it on the members of the next attempt.

    `id` is the machine's name with a random part that is new at each start of its agent. `is_standby_ready` says
    whether the machine could start new trainers at once. `last_step` is the last step that the current attempt has
    made, -1 before its first. `leave_reason` is why the machine has to leave, "" when it does not. `fault` says who
    caused a failure: "own" when this machine's trainers failed by themselves, "final" when they failed in a way that
    would occur again in every attempt, "" when another machine was the cause.
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
        """Return the status that a status file holds; unknown keys are ignored. Raises `KeyError` without an id."""
        known = {key: value[key] for key in cls.__dataclass_fields__ if key in value}
        return cls(**{**known, "id": value["id"]})


class PeerStatuses:
    """The statuses of all machines of a launch, and when each was last seen to change."""

    def __init__(self, shared: Path, machine_names: Iterable[str], launch_id: str) -> None:
        self.status_folder = shared / "status"
        self.machine_names = tuple(machine_names)
        self.launch_id = launch_id
        self.last_texts: dict[str, str] = {}
        self.statuses: dict[str, MachineStatus] = {}  # by id; at most one for each machine name
        self.changed_at: dict[str, float] = {}
        # IDs whose status changed while this agent watched. Any other file may be of a machine that died long ago.
        self.seen_changing: set[str] = set()

    def refresh(self, now: float) -> None:
        """Read all status files again.

        A file that is half-written, missing or of another launch is ignored; the last good status is kept.
        """
        for name in self.machine_names:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                text = (self.status_folder / f"{name}.json").read_text()
                if text == self.last_texts.get(name):
                    continue
                value = json.loads(text)
                self.last_texts[name] = text
                if not isinstance(value, dict) or value.get("launch") != self.launch_id:
                    continue
                status = MachineStatus.from_json(value)
                if status.id in self.statuses:
                    self.seen_changing.add(status.id)
                # An agent that was started again has a new id: the machine with the old id is lost.
                replaced_ids = [old for old in self.statuses if old.partition(".")[0] == name and old != status.id]
                for replaced_id in replaced_ids:
                    del self.statuses[replaced_id], self.changed_at[replaced_id]
                self.statuses[status.id] = status
                self.changed_at[status.id] = now

    def discount_pause(self, pause_seconds: float) -> None:
        """Do not count a time in which this process was suspended as silence of the peers."""
        self.changed_at = {machine_id: seen + pause_seconds for machine_id, seen in self.changed_at.items()}

    def ages(self, now: float) -> dict[str, float]:
        """Return the seconds since each status last changed, by machine id."""
        return {machine_id: now - seen for machine_id, seen in self.changed_at.items()}
