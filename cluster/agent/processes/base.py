"""What trainers and the processes of a user's command have in common: their exit codes, and how they are ended."""

import contextlib
import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from cluster.state.attempts import Attempt
from cluster.state.spec import JobSpec
from cluster.state.states import AgentPhase
from train.distributed import network
from train.tools import process
from train.tools.agent_protocol import Fault, KeptStateReport, TrainerProgress, rank_log_file
from train.tools.process_log import log_end

from . import guard

KILL_TIMEOUT_SECONDS = 20.0
OWNER_VARIABLE = "IMGNET_AGENT"  # in the environment of all that an agent's processes start: its temporary folder
LOG_END_BYTES = 16_000  # of the log of a process, in which the reason for its end is looked for


class UnkillableProcess(Exception):
    """A process was killed and does not end: it hangs in the kernel. Only a restart of the machine helps."""


@dataclass(frozen=True)
class ProcessesExit:
    """How an attempt's processes ended on this machine.

    `phase` is SAVED, FAILED or FINISHED. `fault` is NONE when another machine failed, `rank` None if it is not known.
    """

    phase: AgentPhase
    reason: str = ""
    fault: Fault = Fault.NONE
    rank: int | None = None


class AttemptProcesses(ABC):
    """Starts, watches and ends the processes of attempts on one machine, one attempt after the other."""

    def __init__(self, spec: JobSpec, shared: Path, work: Path, temp_folder: Path) -> None:
        self.spec = spec
        self.shared = shared
        self.work = work
        self.environment: dict[str, str] = {OWNER_VARIABLE: str(temp_folder), "TMPDIR": str(temp_folder)}
        self.attempt_number = 0
        self.first_rank = 0
        self.exit_requested_at: float | None = None  # None: no signal has asked the processes to exit
        self.processes: list[subprocess.Popen[bytes]] = []
        self.standby_processes: list[subprocess.Popen[bytes]] = []

    @abstractmethod
    def start(self, attempt: Attempt, machine_rank: int, goes_on_in_place: bool = False) -> Path:
        """Start the processes of an attempt, and return the log of this machine's first rank.

        `machine_rank` is this machine's index among the members. With `goes_on_in_place` the processes of the last
        attempt, which have kept their state (`read_kept_states`), take part in this one. Raises `UnkillableProcess`.
        """

    def begin_attempt(self, attempt: Attempt, machine_rank: int) -> tuple[Path, list[dict[str, str]]]:
        """Make an attempt's log folder. Returns the log of the first rank here, and the variables of each rank here."""
        procs = self.spec.procs
        self.attempt_number = attempt.number
        self.first_rank = machine_rank * procs
        self.exit_requested_at = None
        first_log = rank_log_file(self.work, attempt.number, self.first_rank)
        first_log.parent.mkdir(parents=True, exist_ok=True)
        of_network = network.interface_variables(attempt.master_address) | network.efa_variables()
        of_ranks = process.rank_environments(
            procs, self.first_rank, procs * len(attempt.members), attempt.master_address, attempt.master_port
        )
        return first_log, [of_network | of_rank for of_rank in of_ranks]

    def ensure_standby(self) -> bool:
        """Prepare for the next attempt. Returns whether this machine is ready for it. Raises `UnkillableProcess`."""
        return True

    @abstractmethod
    def request_save_and_exit(self) -> None:
        """Ask the processes to save and to exit."""

    def request(self, file: str) -> None:
        """Make a request of train/tools/agent_protocol.py, by its file, once in each attempt. A command knows none."""
        return

    @abstractmethod
    def read_progress(self) -> TrainerProgress | None:
        """Return the last report of this machine's first rank, None before its first."""

    @abstractmethod
    def collect_exit(self, exit_codes: list[int | None]) -> ProcessesExit | None:
        """Return how the processes ended, None while they run. May block for a moment when only some have ended."""

    def dump_stacks(self) -> None:
        """Make each process write the stacks of its threads to its log, if it can."""
        return

    def problem(self) -> str:
        """Return one line about what goes wrong beside the processes, which go on meanwhile; "" for nothing."""
        return ""

    def read_kept_states(self) -> list[KeptStateReport]:
        """Return the reports of the processes that keep their state for the next attempt."""
        return []

    def exit_codes(self) -> list[int | None]:
        """Return the exit codes of the processes, None for those that run."""
        return [child.poll() for child in self.processes]

    def wait_for_exit(self, seconds: float) -> None:
        """Wait until all processes have ended by themselves, at most `seconds`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and None in self.exit_codes():
            time.sleep(0.02)

    def log_end(self, rank: int) -> str:
        """Return the last lines of a rank's log of this attempt."""
        with contextlib.suppress(OSError):
            return log_end(rank_log_file(self.work, self.attempt_number, rank), LOG_END_BYTES)
        return ""

    def kill(self) -> None:
        """Kill the processes without waiting for their end.

        Needed where this process exits in another thread than the one that started them: the kernel kills them only
        when that thread has ended.
        """
        for child in self.processes:
            with contextlib.suppress(OSError):
                os.killpg(child.pid, signal.SIGKILL)

    def stop(self, include_standby: bool = False) -> None:
        """Kill all that the attempt has started, with `include_standby` the standby too. Raises `UnkillableProcess`."""
        killed, self.processes = self.processes, []
        if include_standby:
            killed, self.standby_processes = killed + self.standby_processes, []
        kill_process_groups(killed)
        # What the processes have left behind are children of this process now (`adopt_orphans`).
        standby_pids = [child.pid for child in self.standby_processes]
        spared_pids = {pid for own_pid in standby_pids for pid in (own_pid, *process.descendant_pids(own_pid))}
        for pid in set(process.descendant_pids(os.getpid())) - spared_pids:
            with contextlib.suppress(OSError):  # also ChildProcessError: the process is not our child, or is gone
                if guard.has_variable(pid, f"{OWNER_VARIABLE}={self.environment[OWNER_VARIABLE]}"):
                    os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)  # also reaps processes that an earlier call has killed


def write_heading(log_path: Path, attempt: Attempt) -> None:
    """Begin the log of an attempt after the first with the reason of the attempt and its machines."""
    heading = f"attempt {attempt.number}: {attempt.reason}; machines: {', '.join(attempt.machine_names)}\n"
    if attempt.number > 1:
        with contextlib.suppress(OSError):  # the disk is full: the processes will say so
            log_path.write_bytes(heading.encode(errors="replace"))


def kill_process_groups(processes: "list[subprocess.Popen[bytes]]") -> None:
    """Kill processes with all that they started, and wait until they are gone. Raises `UnkillableProcess`."""
    try:
        process.kill_process_groups(processes, KILL_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        raise UnkillableProcess(
            "a process cannot be killed: it hangs in the kernel, in a driver or on a file system"
        ) from None
