"""Writes the status file of this machine, its heartbeat, and its log of state changes (cluster/state/heartbeats.py)."""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from cluster.state.heartbeats import MachineStatus, StateChange, read_status
from cluster.state.run_folder import agent_log_path
from cluster.state.states import MachineState
from train.tools import host
from train.tools.files import is_locked, make_folder_below, open_below, overwrite_below
from train.tools.records import DamagedRecord, encode
from train.tools.text_files import to_json_bytes

from .host_metrics import HostSampler
from .traffic import TrafficMeter

# A change of one of these fields is written at once, all other changes with the next heartbeat.
URGENT_FIELDS = ("phase", "state", "attempt", "leave_reason", "fault", "kept_step", "doing", "asks_exit", "ended")


def read_previous_status(shared: Path, machine: str) -> MachineStatus | None:
    """Return the last status of a machine's previous agent, None when there is none that can be read."""
    with contextlib.suppress(DamagedRecord):
        return read_status(shared / "status" / f"{machine}.json")
    return None


def continue_clock(previous: MachineStatus | None) -> None:
    """Go on from the clock of the machine's previous agent: all its agents and trainers have one, which nobody sets."""
    if previous is not None:
        host.steady_clock.go_on_from(previous.boot_id, previous.clock_offset, previous.clock_jump, previous.time)


def first_status(previous: MachineStatus | None, **identity: str) -> MachineStatus:
    """Return the status with which an agent begins. Until the next validation it has the accuracies of the last one."""
    accuracies = {"top1": previous.top1, "top5": previous.top5} if previous else {}
    return MachineStatus(**identity, **accuracies)  # type: ignore[arg-type]


def elapsed_by_statuses(shared: Path, machine: str, names: Iterable[str], launch_id: str) -> float:
    """Return how much of the launch's time limit has passed by the last statuses of its machines, 0.0 without any.

    Whoever starts an agent may not know it: another computer that adopted the job, or one whose clock was set. Call
    `continue_clock` first. The time since a status counts only where one clock tells it: on this machine, in one boot.
    """
    seconds = 0.0
    for name in names:
        status = read_previous_status(shared, name)
        if status and status.launch == launch_id:
            has_same_clock = name == machine and status.boot_id == host.boot_id()
            since = max(0.0, host.unix_time() - status.time) if has_same_clock else 0.0
            seconds = max(seconds, status.elapsed_seconds + since)
    return seconds


class StatusWriter:
    """Writes the status of one machine's agent in one launch."""

    def __init__(
        self,
        shared: Path,
        machine: str,
        launch_id: str,
        heartbeat_seconds: float,
        traffic_meter: TrafficMeter | None = None,
    ) -> None:
        self.shared = shared
        self.status_file = f"status/{machine}.json"  # relative to the shared folder
        self.state_log_file = agent_log_path(shared, machine).relative_to(shared).as_posix()
        for file in (self.status_file, self.state_log_file):
            make_folder_below(shared, str(Path(file).parent))
        self.launch_id = launch_id
        self.heartbeat_seconds = heartbeat_seconds
        self.traffic_meter = traffic_meter  # None: nobody bills the traffic
        self.last_written = 0.0
        self.last_status: MachineStatus | None = None
        self.lock = contextlib.ExitStack()
        self.holds_lock = False
        # A lock of SMB keeps others from reading the file, and one of NFS 3 may wait for ever for a server.
        mount = host.mount_of(shared.resolve())
        self.shares_locks = not mount.network or mount.type in ("nfs4", "lustre")
        self.sampler = HostSampler()
        self.boot_id = host.boot_id()
        previous = read_previous_status(shared, machine)
        if previous and not previous.ended:  # it was killed: its last heartbeat counts as its end
            self._log_change(StateChange(time=previous.time, attempt=previous.attempt, state=MachineState.LOST))

    def write(self, status: MachineStatus) -> None:
        """Write the status, with load, traffic and time, at a heartbeat or an urgent change; log each new state."""
        previous = self.last_status
        self.last_status = status
        now = time.monotonic()
        is_urgent = previous is None or any(getattr(status, name) != getattr(previous, name) for name in URGENT_FIELDS)
        if not is_urgent and now - self.last_written < self.heartbeat_seconds:
            return
        self.last_written = now
        if jump := host.steady_clock.new_jump():
            print(f"the clock jumped by {jump:+.0f} s; all times go on as before", flush=True)
        status = replace(
            status,
            launch=self.launch_id,
            use=self.sampler.sample(),
            traffic=self.traffic_meter.read() if self.traffic_meter else None,
            time=host.unix_time(),
            boot_id=self.boot_id,
            clock_offset=host.steady_clock.offset,
            clock_jump=host.steady_clock.jump(),
            holds_lock=self._lock_file(),
        )
        # A full or unreachable folder is no error here: it may recover, and trainers that cannot save report it.
        with contextlib.suppress(OSError):
            overwrite_below(self.shared, self.status_file, to_json_bytes(encode(status)))
        if previous is None or status.state != previous.state:
            step = status.last_step if status.last_step >= 0 else None
            change = StateChange(
                time=status.time, attempt=status.attempt, state=status.state, reason=status.reason, step=step
            )
            self._log_change(change)
            print(time.strftime("%H:%M:%S"), status.state, status.reason, flush=True)

    def _lock_file(self) -> bool:
        """Keep the status file locked, so that peers see this process die; anew when a server has forgotten it."""
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            if not self.shares_locks or (self.holds_lock and is_locked(self.shared / self.status_file)):
                return self.holds_lock
            self.holds_lock = False
            self.lock.close()
            file = stack.enter_context(open_below(self.shared, self.status_file, os.O_RDWR))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.lock, self.holds_lock = stack.pop_all(), True
        return self.holds_lock

    def _log_change(self, change: StateChange) -> None:
        entry = {key: value for key, value in encode(change).items() if value not in ("", None)}
        flags = os.O_WRONLY | os.O_APPEND
        with contextlib.suppress(OSError), open_below(self.shared, self.state_log_file, flags) as file:
            file.write(json.dumps(entry).encode() + b"\n")

    def close(self) -> None:
        """Stop the process that samples the GPUs, and unlock the file."""
        self.sampler.gpus.close()
        self.lock.close()
