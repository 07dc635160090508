"""What the supervisor writes to the run folder about its work: heartbeat, set-up of the machines, activity, trouble."""

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from train.tools import host
from train.tools.files import overwrite_below, write_atomic
from train.tools.records import DamagedRecord, encode, read_record
from train.tools.text_files import to_json_bytes

from .states import SetupStep

HEARTBEAT_FILE = "supervisor.json"
CLOUD_ACTIVITY_FILE = "cloud.json"
TROUBLE_FILE = "trouble.json"


@dataclass(frozen=True, kw_only=True)
class MachineSetup:
    """The set-up of one machine: its step, why it failed ("": it has not), and what was found on it.

    `is_broken`: it failed because its GPUs do not answer, so another machine of the same type may do. `seconds` has the
    time of each step. `was_reached`: the job has logged in there, in this launch or an earlier one, so something of it
    may run there. `restarted` is when the set-up last began again during the job, on this machine or on a replacement,
    or by a resume, in seconds since 1970; 0: never. Since `unreachable_since` this computer cannot reach the machine;
    0: it can. `folder`, `work`, `code` and `python` are paths there, "" while not known, `gpus` the names of its GPUs.
    """

    host: str = ""
    step: SetupStep = SetupStep.NONE
    reason: str = ""
    is_broken: bool = False
    notes: tuple[str, ...] = ()
    seconds: dict[SetupStep, float] = field(default_factory=dict)
    was_reached: bool = False
    restarted: float = 0.0
    unreachable_since: float = 0.0
    address: str = ""
    folder: str = ""
    work: str = ""
    code: str = ""
    python: str = ""
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SetupRecord:
    """The set-up of all machines for one launch, machines.json in the run folder.

    `is_adopted`: another computer launched the job, so its agents run already. `leader` says which computer has resumed
    the job since, "" if none has. `finished` and `time` (of writing) are in seconds since 1970.
    """

    launch: str = ""
    is_ready: bool = False
    is_adopted: bool = False
    leader: str = ""
    finished: float = 0.0
    time: float = 0.0
    machines: dict[str, MachineSetup] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CloudActivity:
    """A step of the supervisor that takes long, such as renting machines: cloud.json in the run folder."""

    doing: str  # "" when nothing takes long


@dataclass(frozen=True, kw_only=True)
class SupervisorTrouble:
    """Why the supervisor cannot do its work, trouble.json in the run folder. The file is removed when that is over.

    `lacks_access`: it has no credentials that the cloud accepts, so it replaces no lost machine. `adopted_since`: from
    then on (seconds since 1970) another computer supervises the job, and this run folder never again; 0: none does.
    """

    error: str
    lacks_access: bool = False
    adopted_since: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SupervisorHeartbeat:
    """The last sign of life of the supervisor's process, supervisor.json in the run folder.

    `monotonic` is when it was written by the clock of the kernel that stands still while the computer sleeps. The rest
    is the job's clock at home, with the names of a `MachineStatus`: `time` goes on when the wall clock is set.
    """

    pid: int
    monotonic: float
    time: float
    boot_id: str
    clock_offset: float
    clock_jump: float

    @property
    def silent_seconds(self) -> float:
        """How many seconds ago this heartbeat was written, without time asleep; 0.0 if the computer rebooted since."""
        return max(0.0, time.monotonic() - self.monotonic) if self.boot_id == host.boot_id() else 0.0


def write_heartbeat(run_path: Path) -> None:
    """Write that this process, the supervisor, lives, and its clock. A full disk must not end the job."""
    heartbeat = SupervisorHeartbeat(
        pid=os.getpid(),
        monotonic=time.monotonic(),
        time=host.unix_time(),
        boot_id=host.boot_id(),
        clock_offset=host.steady_clock.offset,
        clock_jump=host.steady_clock.jump(),
    )
    with contextlib.suppress(OSError):
        overwrite_below(run_path, HEARTBEAT_FILE, to_json_bytes(encode(heartbeat)))


def read_heartbeat(run_path: Path) -> SupervisorHeartbeat | None:
    """Return the last heartbeat; None before the first, and for one that is just being overwritten."""
    with contextlib.suppress(DamagedRecord):
        return read_record(run_path / HEARTBEAT_FILE, SupervisorHeartbeat)
    return None


def home_clock(run_path: Path) -> Callable[[], float]:
    """Return the clock of the job's supervisor (seconds since 1970), or that of this process before there is one."""
    heartbeat = read_heartbeat(run_path)
    if heartbeat and heartbeat.boot_id and heartbeat.boot_id == host.boot_id():
        return host.SteadyClock(heartbeat.clock_offset).time
    return host.unix_time


def write_trouble(run_path: Path, trouble: SupervisorTrouble | None) -> bool:
    """Write the present trouble, None for none. Returns whether that worked: a full disk must not end the job."""
    path = run_path / TROUBLE_FILE
    try:
        if trouble is None:
            path.unlink(missing_ok=True)
        else:
            write_atomic(path, to_json_bytes(encode(trouble)), durable=False)
    except OSError:
        return False
    return True


def write_activity(run_path: Path, doing: str) -> None:
    """Write the present activity. A full disk must not end the job, so errors are ignored."""
    with contextlib.suppress(OSError):
        write_atomic(run_path / CLOUD_ACTIVITY_FILE, to_json_bytes(encode(CloudActivity(doing=doing))), durable=False)


def read_activity(run_path: Path) -> CloudActivity | None:
    """Return the last activity, None before the first. Raises `DamagedRecord`."""
    return read_record(run_path / CLOUD_ACTIVITY_FILE, CloudActivity)
