"""Status files of a job's agents. Each agent rewrites its own about once a heartbeat; the change is the heartbeat.

    <shared>/status/2.json      the `MachineStatus` of machine 2

The age of a status is measured by the reader's clock since it last saw it change. No two machines' clocks are compared.
"""

import contextlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median_high
from typing import Self

from infra.costs import Traffic
from train.tools.agent_protocol import Fault, TrainingNumbers
from train.tools.files import is_locked, read_file
from train.tools.records import DamagedRecord, damaged, decode, decode_json, decode_line, require_unix_time
from train.tools.text_files import parse_json

from .states import AgentPhase, MachineState

SLOWEST_BUSY_MARGIN = 0.10  # share of the time by which the slowest rank must be busier than the others
MAX_STATUS_BYTES = 1_000_000


def machine_name(agent_id: str) -> str:
    """Return the name of an agent's machine: its id without the random part that is new at each start."""
    return agent_id.partition(".")[0]


@dataclass(frozen=True, kw_only=True)
class GpuLoad:
    """The load of one GPU. None: the GPU does not report the value."""

    use: float | None = None  # percent
    memory_gb: float | None = None
    temperature: float | None = None  # degrees Celsius
    watts: float | None = None


@dataclass(frozen=True, kw_only=True)
class MachineLoad:
    """The load of a machine since its last status. A GB is 1e9 bytes. None: the value is unknown."""

    cpu: float | None = None  # percent of all cores
    memory_gb: float | None = None
    memory_total_gb: float | None = None
    net_in_gbit: float | None = None  # Gbit/s
    net_out_gbit: float | None = None
    gpus: tuple[GpuLoad, ...] = ()


@dataclass(frozen=True, kw_only=True)
class MachineStatus(TrainingNumbers):
    """Status published by one agent and read by its peers, who agree by it on the members of the next attempt.

    `id` is the machine's name with a random part that is new at each start of its agent. `host` is its name where only
    the machine knows it, as in a Slurm job. Others reach the machine at `address`; `addresses` are all those from which
    it may reach others. `is_standby_ready` says whether the machine could start new trainers at once. `last_step` is
    the last step that the current attempt has made, -1 before its first. `kept_step` is the step whose state its
    trainers keep while they wait for the next attempt; None: they keep none, as `not_in_place` says. `leave_reason` is
    why the machine has to leave, "" when it does not; `risk_reason` is why it may have to soon. `fault` says whose
    fault a failure was, which rank (None: not known), and when it was seen. With `asks_exit` the processes are to exit.

    The other fields are for people and for the supervisor. `launch` is the ID of the launch, `time` the moment of
    writing by the machine's own steady clock (seconds since 1970); `boot_id` is the ID of its last boot, `clock_offset`
    the time of that boot by this clock, and `clock_jump` what the wall clock was set forward since. `doing` and
    `progress` describe what the agent does before it trains. `limit` names the time limit, of which `limit_share` has
    passed; None: there is none. `elapsed_seconds` have passed of the launch's time. `traffic` is what a rented machine
    has moved since its boot. With `holds_lock` its agent has locked this file; the kernel unlocks it when the agent
    dies. The numbers of training stay until later ones replace them.
    """

    id: str
    host: str = ""
    address: str = "127.0.0.1"
    addresses: tuple[str, ...] = ()
    port: int = 0
    attempt: int = 0
    phase: AgentPhase = AgentPhase.WARMING
    last_step: int = -1
    kept_step: int | None = None
    not_in_place: str = ""
    is_standby_ready: bool = True
    leave_reason: str = ""
    risk_reason: str = ""
    fault: Fault = Fault.NONE
    failed_rank: int | None = None
    failed_at: float = 0.0
    asks_exit: bool = False
    state: MachineState = MachineState.SETUP
    reason: str = ""
    launch: str = ""
    ended: bool = False
    pid: int | None = None
    doing: str = ""
    progress: str = ""
    limit: str = ""
    limit_share: float | None = None
    elapsed_seconds: float = 0.0
    use: MachineLoad | None = None
    traffic: Traffic | None = None
    time: float = 0.0
    boot_id: str = ""
    clock_offset: float = 0.0
    clock_jump: float = 0.0
    holds_lock: bool = False

    @property
    def machine_name(self) -> str:
        """The machine's name: the id without its random part."""
        return machine_name(self.id)

    @property
    def finished_step(self) -> int:
        """The last step that the attempt is known to have made here, -1 before its first."""
        return max(self.last_step, -1 if self.kept_step is None else self.kept_step)

    def with_numbers(self, numbers: TrainingNumbers) -> Self:
        """Return the status with newer numbers. Earlier ones stay where there is no newer one."""
        known = {field.name: getattr(numbers, field.name) for field in fields(TrainingNumbers)}
        return replace(self, **{name: value for name, value in known.items() if value is not None})


@dataclass(frozen=True, kw_only=True)
class SlowestRank:
    """The rank that the others wait for. `busy` and `busy_others`, their median, are shares of the time of a step."""

    machine: str
    local_rank: int
    ranks_here: int  # on this machine
    busy: float
    busy_others: float

    def __str__(self) -> str:
        rank = f", GPU {self.local_rank}" if self.ranks_here > 1 else ""
        return (
            f"machine {self.machine}{rank}: waits {1 - self.busy:.0%} of a step for others, "
            f"the others {1 - self.busy_others:.0%}"
        )


def find_slowest_rank(statuses: Mapping[str, MachineStatus]) -> SlowestRank | None:
    """Return the rank that waits least for others, None if none is clearly busier than the median of the others.

    All ranks have one step time; all but the slowest wait. Of `statuses`, by machine, only the newest attempt's count.
    """
    newest_attempt = max((status.attempt for status in statuses.values()), default=0)
    ranks = sorted(
        (share, name, local_rank, len(status.busy))
        for name, status in statuses.items()
        if status.attempt == newest_attempt and status.phase == AgentPhase.RUNNING and status.busy
        for local_rank, share in enumerate(status.busy)
        if share is not None
    )
    if len(ranks) < 2:
        return None
    *others, (busy, machine, local_rank, ranks_here) = ranks
    busy_others = median_high(share for share, *_ in others)
    if busy - busy_others < SLOWEST_BUSY_MARGIN - 1e-9:
        return None
    return SlowestRank(
        machine=machine, local_rank=local_rank, ranks_here=ranks_here, busy=busy, busy_others=busy_others
    )


@dataclass(frozen=True, kw_only=True)
class StateChange:
    """A line of an agent's state log: the state that began at `time` (seconds since 1970), and its reason."""

    time: float
    attempt: int = 0
    state: MachineState
    reason: str = ""
    step: int | None = None

    def __post_init__(self) -> None:
        require_unix_time(self.time)


def parse_state_change(line: bytes) -> StateChange | None:
    """Return the change of state in a line of a state log, None for a damaged line."""
    with contextlib.suppress(DamagedRecord):
        return decode_line(StateChange, line)
    return None


def parse_status(text: bytes) -> MachineStatus | None:
    """Return the status that a status file holds; None when the file is torn or damaged."""
    with contextlib.suppress(DamagedRecord):
        return decode_json(MachineStatus, text)
    return None


def read_status(path: Path) -> MachineStatus | None:
    """Return a file's status, None if missing or torn. Raises `DamagedRecord` if it is unreadable or no status."""
    try:
        text = read_file(path, MAX_STATUS_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise damaged(error, path) from error
    try:
        data = parse_json(text)
    except ValueError:
        return None
    return decode(MachineStatus, data, path)


class PeerStatuses:
    """The statuses of all machines of a launch, and when each was last seen to change."""

    def __init__(self, shared: Path, machine_names: Iterable[str], launch_id: str) -> None:
        self.status_folder = shared / "status"
        self.machine_names = tuple(machine_names)
        self.launch_id = launch_id
        self.last_texts: dict[str, bytes] = {}
        self.statuses: dict[str, MachineStatus] = {}  # by id; at most one for each machine name
        self.changed_at: dict[str, float] = {}
        self.read_at = 0.0  # when a file could last be read
        # IDs whose status changed while this agent watched. Any other file may be of a machine that died long ago.
        self.seen_changing: set[str] = set()
        self.locked_ids: set[str] = set()  # whose file was seen to be locked: not every file system shares locks
        self.dead_ids: set[str] = set()

    def refresh(self, now: float, tests_all_locks: bool = True) -> None:
        """Read all status files again, and test their locks, or only those that were not yet seen to be held.

        A file that is half-written, missing or of another launch is ignored; the last good status is kept.
        """
        for name in self.machine_names:
            with contextlib.suppress(OSError):
                self._read(name, now)
        for machine_id, status in list(self.statuses.items()):
            is_tested = tests_all_locks or machine_id not in self.locked_ids
            if is_tested and status.holds_lock and not status.ended:
                with contextlib.suppress(OSError):
                    self._test_lock(machine_id, status.machine_name, now)

    def _read(self, name: str, now: float) -> None:
        text = read_file(self.status_folder / f"{name}.json", MAX_STATUS_BYTES)
        self.read_at = now
        self.take(name, text, now)

    def _test_lock(self, machine_id: str, name: str, now: float) -> None:
        """Take an agent for dead whose lock was seen to be held, and is free."""
        if is_locked(self.status_folder / f"{name}.json"):
            self.locked_ids.add(machine_id)
        elif machine_id in self.locked_ids:
            self._read(name, now)  # its last words, or a sign of life after it was taken for dead
            self.dead_ids |= {machine_id} & self.locked_ids

    def take(self, name: str, text: bytes, now: float) -> None:
        """Take over the status of a machine from the text of its file, if that has changed and is of this launch."""
        if text == self.last_texts.get(name):
            return
        self.last_texts[name] = text
        status = parse_status(text)
        if status is None or status.launch != self.launch_id:
            return
        if status.id in self.statuses:
            self.seen_changing.add(status.id)
        if status.id in self.dead_ids:  # it lives: its lock proves nothing
            self.dead_ids.remove(status.id)
            self.locked_ids.discard(status.id)
        # An agent that was started again has a new id: the machine with the old id is lost.
        for replaced_id in [old for old in self.statuses if machine_name(old) == name and old != status.id]:
            del self.statuses[replaced_id], self.changed_at[replaced_id]
        self.statuses[status.id] = status
        self.changed_at[status.id] = now

    def discount_pause(self, pause_seconds: float) -> None:
        """Do not count a time in which this process was suspended as silence of the peers."""
        self.changed_at = {machine_id: seen + pause_seconds for machine_id, seen in self.changed_at.items()}

    def ages(self, now: float) -> dict[str, float]:
        """Return the seconds since each status last changed, by machine id; inf for an agent that has died."""
        return {
            machine_id: math.inf if machine_id in self.dead_ids else now - seen
            for machine_id, seen in self.changed_at.items()
        }
