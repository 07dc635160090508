"""Writes this machine's status file (the heartbeat) and its state-change log.

SHARED/status/<machine>.json        the status that peers need (cluster/state/heartbeats.py), and numbers for people
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

# A change of one of these fields is written at once, all other changes with the next heartbeat.
URGENT_FIELDS = ("phase", "state", "attempt", "leave_reason", "fault", "doing", "ended")


class StatusWriter:
    """Writes the status of one machine's agent in one launch."""

    def __init__(self, shared: Path, machine: str, launch_id: str, heartbeat_seconds: float) -> None:
        self.status_path = shared / "status" / f"{machine}.json"
        self.state_log_path = shared / "logs" / f"agent-{machine}.jsonl"
        for path in (self.status_path, self.state_log_path):
            path.parent.mkdir(parents=True, exist_ok=True)
        self.launch_id = launch_id
        self.heartbeat_seconds = heartbeat_seconds
        self.last_written = 0.0
        self.last_status: dict[str, Any] = {}
        self.sampler = HostSampler()
        self._log_end_of_previous_agent()

    @property
    def state(self) -> str:
        """The state of the last status."""
        return str(self.last_status.get("state", ""))

    @property
    def reason(self) -> str:
        """The reason of that state."""
        return str(self.last_status.get("reason", ""))

    def write(self, status: MachineStatus, state: str, reason: str = "", **extra_fields: Any) -> None:
        """Rewrite the status file when an urgent field has changed or a heartbeat is due; log each change of state.

        Extra fields stay in the status until they are overwritten. The reason belongs to its state and does not.
        """
        previous = self.last_status
        now = time.monotonic()
        own_fields = {**asdict(status), "launch": self.launch_id, "state": state, "reason": reason}
        self.last_status = {**previous, **own_fields, **extra_fields}
        is_urgent = any(self.last_status.get(name) != previous.get(name) for name in URGENT_FIELDS)
        if not is_urgent and now - self.last_written < self.heartbeat_seconds:
            return
        self.last_status["use"] = self.sampler.sample()
        self.last_written = now
        # A folder that is full or away is no error here: trainers that cannot save report it, and a hiccup passes.
        with contextlib.suppress(OSError):
            overwrite_in_place(self.status_path, to_json_bytes({**self.last_status, "time": time.time()}))
        if state != previous.get("state"):
            step = {"step": status.last_step} if status.last_step >= 0 else {}
            entry = {"time": time.time(), "attempt": status.attempt, "state": state, "reason": reason, **step}
            self._append_to_state_log(entry)
            print(time.strftime("%H:%M:%S"), state, reason, flush=True)

    def _log_end_of_previous_agent(self) -> None:
        """If the previous agent ended without a final status, log the time of its last heartbeat as its end."""
        previous = read_json(self.status_path) or {"ended": True}
        if not previous.get("ended") and "time" in previous:
            entry = {"time": previous["time"], "attempt": previous.get("attempt", 0), "state": "gone"}
            self._append_to_state_log(entry)

    def _append_to_state_log(self, entry: dict[str, Any]) -> None:
        with contextlib.suppress(OSError), self.state_log_path.open("a") as file:
            file.write(json.dumps({key: value for key, value in entry.items() if value != ""}) + "\n")

    def close(self) -> None:
        """Stop the process that samples the GPUs."""
        self.sampler.close()
