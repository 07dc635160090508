"""What an agent says: its status file, rewritten each beat, and a log of its changes of state.

SHARED/status/<machine>.json        the word that the others need (words.py), and numbers for people
SHARED/logs/agent-<machine>.jsonl   {"time", "attempt", "state", "reason", "step"}
"""

import contextlib
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cluster.state.heartbeats import Word
from train.tools.filesystem import as_json, overwrite, read_json

from .host_metrics import Sampler

NEWS = ("phase", "state", "attempt", "leaving", "fault", "doing", "ended")  # are told at once, all else with the beat


class Voice:
    """The words of one machine's agent in one launch."""

    def __init__(self, shared: Path, machine: str, launch: str, beat: float) -> None:
        self.status = shared / "status" / f"{machine}.json"
        self.log = shared / "logs" / f"agent-{machine}.jsonl"
        for path in (self.status, self.log):
            path.parent.mkdir(parents=True, exist_ok=True)
        self.launch, self.beat, self.beaten = launch, beat, 0.0
        self.said: dict[str, Any] = {}
        self.sampler = Sampler()
        self._close_the_last()

    @property
    def state(self) -> str:
        """The state that was said last."""
        return str(self.said.get("state", ""))

    @property
    def reason(self) -> str:
        """The reason that was given for it."""
        return str(self.said.get("reason", ""))

    def say(self, word: Word, state: str, reason: str = "", **more: Any) -> None:
        """Rewrite the status when there is news or a beat has passed; note each change of state with its time."""
        before, now = self.said, time.monotonic()
        own = {**asdict(word), "launch": self.launch, "state": state, "reason": reason}
        said = self.said = {**before, **own, **more}
        if all(said.get(name) == before.get(name) for name in NEWS) and now - self.beaten < self.beat:
            return
        said["use"], self.beaten = self.sampler.sample(), now
        with contextlib.suppress(OSError):  # full or away: trainers that cannot save will say so, a hiccup passes
            overwrite(self.status, as_json({**said, "time": time.time()}))
        if state != before.get("state"):
            step = {"step": word.at} if word.at >= 0 else {}
            self._note({"time": time.time(), "attempt": word.attempt, "state": state, "reason": reason, **step})
            print(time.strftime("%H:%M:%S"), state, reason, flush=True)

    def _close_the_last(self) -> None:
        """Note when an agent before this one, that could not say so, was last alive."""
        said = read_json(self.status) or {"ended": True}
        if not said.get("ended") and "time" in said:
            self._note({"time": said["time"], "attempt": said.get("attempt", 0), "state": "gone"})

    def _note(self, line: dict[str, Any]) -> None:
        with contextlib.suppress(OSError), self.log.open("a") as file:
            file.write(json.dumps({key: one for key, one in line.items() if one != ""}) + "\n")

    def close(self) -> None:
        """End what samples the GPUs."""
        self.sampler.close()
