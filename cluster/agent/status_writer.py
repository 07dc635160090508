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

from cluster.state.heartbeats import MachineStatus
from train.tools.filesystem import overwrite_in_place, read_json, to_json_bytes

from .host_metrics import HostSampler

URGENT_FIELDS = (
    "phase",
    "state",
    "attempt",
    "leave_reason",
    "fault",
    "doing",
    "ended",
)  # are told at once, all else with the beat


class StatusWriter:
    """The words of one machine's agent in one launch."""

    def __init__(self, shared: Path, machine: str, launch_id: str, heartbeat_seconds: float) -> None:
        self.status_path = shared / "status" / f"{machine}.json"
        self.state_log_path = shared / "logs" / f"agent-{machine}.jsonl"
        for path in (self.status_path, self.state_log_path):
            path.parent.mkdir(parents=True, exist_ok=True)
        self.launch_id, self.heartbeat_seconds, self.last_written = launch_id, heartbeat_seconds, 0.0
        self.last_status: dict[str, Any] = {}
        self.sampler = HostSampler()
        self._log_end_of_previous_agent()

    @property
    def state(self) -> str:
        """The state that was said last."""
        return str(self.last_status.get("state", ""))

    @property
    def reason(self) -> str:
        """The reason that was given for it."""
        return str(self.last_status.get("reason", ""))

    def write(self, status: MachineStatus, state: str, reason: str = "", **extra_fields: Any) -> None:
        """Rewrite the status when there is news or a beat has passed; note each change of state with its time."""
        before, now = self.last_status, time.monotonic()
        own = {**asdict(status), "launch": self.launch_id, "state": state, "reason": reason}
        said = self.last_status = {**before, **own, **extra_fields}
        if (
            all(said.get(name) == before.get(name) for name in URGENT_FIELDS)
            and now - self.last_written < self.heartbeat_seconds
        ):
            return
        said["use"], self.last_written = self.sampler.sample(), now
        with contextlib.suppress(OSError):  # full or away: trainers that cannot save will say so, a hiccup passes
            overwrite_in_place(self.status_path, to_json_bytes({**said, "time": time.time()}))
        if state != before.get("state"):
            step = {"step": status.last_step} if status.last_step >= 0 else {}
            self._append_to_state_log(
                {"time": time.time(), "attempt": status.attempt, "state": state, "reason": reason, **step}
            )
            print(time.strftime("%H:%M:%S"), state, reason, flush=True)

    def _log_end_of_previous_agent(self) -> None:
        """Note when an agent before this one, that could not say so, was last alive."""
        said = read_json(self.status_path) or {"ended": True}
        if not said.get("ended") and "time" in said:
            self._append_to_state_log({"time": said["time"], "attempt": said.get("attempt", 0), "state": "gone"})

    def _append_to_state_log(self, entry: dict[str, Any]) -> None:
        with contextlib.suppress(OSError), self.state_log_path.open("a") as file:
            file.write(json.dumps({key: one for key, one in entry.items() if one != ""}) + "\n")

    def close(self) -> None:
        """End what samples the GPUs."""
        self.sampler.close()
