"""The trainer processes of one machine: those of the current attempt, and a standby for the next.

    <work>/options.json     what the trainers of all attempts obey (TrainOptions in train/engine/options.py)
    <work>/000007/          of attempt 7: progress.json, failed-3.json, ask (train/tools/agent_protocol.py)
    <work>/logs/000007/     rank-3.log

A standby process has loaded torch and waits on its stdin (train/engine/standby.py): no loss costs time for imports.
"""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from cluster.connectors.local import module_command
from cluster.state.attempts import Attempt
from cluster.state.spec import JobSpec
from cluster.state.states import AgentPhase
from train.distributed import network
from train.tools import agent_protocol, host, process
from train.tools.agent_protocol import Fault, KeptStateReport, StandbyRequest, TrainerProgress, rank_log_file
from train.tools.errors import find_gpu_failure
from train.tools.files import write_atomic
from train.tools.records import encode, read_intact
from train.tools.text_files import to_json_bytes
from train.trackers.tracker_process import JOB_VARIABLE

from .processes.base import AttemptProcesses, ProcessesExit, kill_process_groups, write_heading

EXIT_WAIT_SECONDS = 10.0  # for the other trainers to follow the first one that ended well
FAILURE_REPORT_SECONDS = 0.2  # for the trainer that failed first to write its reason
STACK_DUMP_SECONDS = 0.3
# Memory of a standby process on a CPU, without what others share: ResNet-50 at 224 pixels 0.66 GB, quickstart's network
# 0.26, ResNet-152 1.03 (torch 2.13).
STANDBY_GB_PER_PROCESS = 0.7
RESERVED_MEMORY_GB = 1.0  # memory that must stay free beside the standby
MAX_FAILED_STANDBYS = 3  # that died while they loaded
COMPILE_CACHE = Path("~/.imgnet/cache").expanduser()  # outlives jobs; what torch.compile has made


class Trainers(AttemptProcesses):
    """Starts, watches and stops the trainers of one machine."""

    def __init__(
        self, spec: JobSpec, shared: Path, work: Path, temp_folder: Path, user_project: Path | None = None
    ) -> None:
        super().__init__(spec, shared, work, temp_folder)
        self.options_path = work / "options.json"
        write_atomic(self.options_path, to_json_bytes(encode(spec.train)))
        self.environment |= {
            JOB_VARIABLE: spec.uid or spec.name,
            host.CLOCK_OFFSET_VARIABLE: repr(host.steady_clock.offset),
            **network.compile_cache_variables(COMPILE_CACHE),
            **network.library_variables(),
        }
        if spec.recovery.goes_on_in_place:
            self.environment[agent_protocol.IN_PLACE_VARIABLE] = spec.recovery.in_place
        # Over ssh or rented, at the price of its GPUs; or on a node of Slurm, whose GPUs are ours alone meanwhile.
        if spec.has_own_folders or slurm_gives_gpus():
            self.environment[agent_protocol.NEEDS_GPU_VARIABLE] = "1"
        if spec.user_project and user_project:
            folders = spec.user_project.search_folders(user_project.absolute())
            self.environment |= agent_protocol.module_folders_variable(folders)
        self.failed_standbys = 0
        self.attempt_folder = work / "000000"
        self.requests: set[str] = set()  # of this attempt: the names of their files

    # --- standby -------------------------------------------------------------------------------------------------

    def ensure_standby(self) -> bool:
        """Keep one standby process per trainer running. Returns whether they are ready. Raises `UnkillableProcess`.

        Returns True also when there is to be no standby: the job wants none, memory is short, or it dies again and
        again while it loads. Then the trainers fail in the same way, and report it.
        """
        if any(child.poll() is not None for child in self.standby_processes):
            self.failed_standbys += not self._is_marked_ready()
            kill_process_groups(self.standby_processes)
            self.standby_processes = []
        if not self.spec.recovery.standby or self.failed_standbys >= MAX_FAILED_STANDBYS:
            return True
        if not self.standby_processes:
            memory = host.read_memory()
            if memory is None or memory.available_gb <= RESERVED_MEMORY_GB + STANDBY_GB_PER_PROCESS * self.spec.procs:
                return True
            self.standby_processes = [self._start_standby(local_rank) for local_rank in range(self.spec.procs)]
        return self.is_standby_ready

    @property
    def is_standby_ready(self) -> bool:
        """Whether all standby processes live and are ready."""
        alive_count = sum(child.poll() is None for child in self.standby_processes)
        return alive_count == self.spec.procs and self._is_marked_ready()

    def _is_marked_ready(self) -> bool:
        return all(self._ready_marker(local_rank).exists() for local_rank in range(self.spec.procs))

    def _ready_marker(self, local_rank: int) -> Path:
        return self.work / f"ready-{local_rank}"

    def _start_standby(self, local_rank: int) -> "subprocess.Popen[bytes]":
        ready_marker = self._ready_marker(local_rank)
        ready_marker.unlink(missing_ok=True)
        argv = module_command("train.engine.standby", str(ready_marker), *self.job_arguments())
        return process.start_process(argv, self.work / "standby.log", self.environment, stdin=subprocess.PIPE)

    # --- an attempt ----------------------------------------------------------------------------------------------

    def start(self, attempt: Attempt, machine_rank: int, goes_on_in_place: bool = False) -> Path:
        """Start the trainers of an attempt as `AttemptProcesses.start` says. Ready standby processes become them."""
        old_folder = self.attempt_folder
        for folder in self.work.glob("[0-9]*"):
            if not (goes_on_in_place and folder == old_folder):
                shutil.rmtree(folder, ignore_errors=True)
        first_log, rank_environments = self.begin_attempt(attempt, machine_rank)
        self.attempt_folder = self.work / agent_protocol.attempt_name(attempt.number)
        self.attempt_folder.mkdir()
        self.requests = set()
        resume = str(self.shared / attempt.resume) if attempt.resume else "none"
        argv = [*self.job_arguments(), "--attempt", str(attempt.number), "--resume", resume]
        argv += [] if attempt.live_step is None else ["--live-step", str(attempt.live_step)]
        shared_environment = {
            **self.environment,
            agent_protocol.WORK_VARIABLE: str(self.attempt_folder),
            agent_protocol.TOKEN_VARIABLE: attempt.token,
            agent_protocol.PEERS_VARIABLE: ",".join(attempt.addresses),
        }
        use_standby = self.is_standby_ready
        standby_processes = [] if goes_on_in_place else self.standby_processes
        if not goes_on_in_place:
            self.standby_processes = []
        for local_rank, rank_environment in enumerate(rank_environments):
            log_path = rank_log_file(self.work, attempt.number, int(rank_environment["RANK"]))
            write_heading(log_path, attempt)
            environment = {**shared_environment, **rank_environment}
            request = StandbyRequest(argv=tuple(argv), environment=environment, log=str(log_path))
            if goes_on_in_place:
                path = old_folder / agent_protocol.next_request_file(local_rank)
                write_atomic(path, to_json_bytes(encode(request)), durable=False)
            elif use_standby and _start_in_standby(standby_processes[local_rank], request):
                self.processes.append(standby_processes[local_rank])
            else:
                self.processes.append(process.start_process(module_command("train", *argv), log_path, environment))
        kill_process_groups([child for child in standby_processes if child not in self.processes])
        return first_log

    def job_arguments(self) -> list[str]:
        """Return the arguments of a trainer that are the same in all attempts."""
        recipe_path = self.shared / "recipe.json"
        options = {"--options": self.options_path, "--out": self.shared, "--local": self.work}
        return [str(recipe_path), *(str(word) for option in options.items() for word in option)]

    def request(self, file: str) -> None:
        """Make a file by which the trainers learn of a request, once in each attempt."""
        if file not in self.requests:
            self.requests.add(file)
            (self.attempt_folder / file).touch()

    def request_save_and_exit(self) -> None:
        """Ask the trainers to save at a step that all ranks agree on, and to exit."""
        self.request(agent_protocol.STOP_REQUEST_FILE)

    def read_kept_states(self) -> list[KeptStateReport]:
        """Return the reports of the trainers that keep their state and wait for the next attempt."""
        ranks = range(self.first_rank, self.first_rank + self.spec.procs)
        paths = [self.attempt_folder / agent_protocol.kept_state_file(rank) for rank in ranks]
        return [report for path in paths if (report := read_intact(path, KeptStateReport))]

    def read_progress(self) -> TrainerProgress | None:
        """Return the last report of this machine's first rank, None before its first."""
        return read_intact(self.attempt_folder / agent_protocol.PROGRESS_FILE, TrainerProgress)

    def collect_exit(self, exit_codes: list[int | None]) -> ProcessesExit | None:
        """Return how the trainers ended, None while all run. Blocks for a moment when only some have ended."""
        if all(code is None for code in exit_codes):
            return None
        if agent_protocol.EXIT_SAVED in exit_codes:
            self.wait_for_exit(EXIT_WAIT_SECONDS)
            return ProcessesExit(AgentPhase.SAVED)
        if any(exit_codes):
            time.sleep(FAILURE_REPORT_SECONDS)
        elif None in exit_codes:
            self.wait_for_exit(EXIT_WAIT_SECONDS)
        codes_by_rank = dict(enumerate(self.exit_codes(), self.first_rank))
        # A trainer killed from outside explains the failures that the other ranks report.
        for rank, code in codes_by_rank.items():
            if code in (-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS):
                name = process.signal_name(-code)
                return ProcessesExit(AgentPhase.FAILED, f"the trainer of rank {rank} was killed by {name}", Fault.OWN)
        reported = self._first_reported_failure()
        if reported:
            return reported
        failed = ((rank, code) for rank, code in codes_by_rank.items() if code)
        rank, code = next(failed, (self.first_rank, 0))
        # NCCL's watchdog thread ends its process by SIGABRT, and only the log says why.
        if code == -signal.SIGABRT and (gpu_failure := find_gpu_failure(self.log_end(rank), rank - self.first_rank)):
            fault, reason = gpu_failure
            return ProcessesExit(AgentPhase.FAILED, reason, fault)
        if code < 0:
            reason = f"the trainer of rank {rank} was killed by {process.signal_name(-code)}"
        else:
            reason = f"the trainer of rank {rank} ended with code {code} and no result"
        # It also aborts ranks that wait for a rank which is gone; they are not at fault.
        fault = Fault.NONE if code == -signal.SIGABRT else Fault.OWN
        return ProcessesExit(AgentPhase.FAILED, reason, fault)

    def _first_reported_failure(self) -> ProcessesExit | None:
        """Return the earliest failure that a rank reported, own failures before those blamed on peers; else None."""
        paths = self.attempt_folder.glob(agent_protocol.FAILURE_FILE_PATTERN)
        reports = [report for path in paths if (report := read_intact(path, agent_protocol.TrainerFailure))]
        for fault in (Fault.MACHINE, Fault.INPUT, Fault.FINAL, Fault.CHECKPOINT, Fault.OWN, Fault.PEER):
            for report in sorted(reports, key=lambda report: report.time):
                if report.fault == fault:
                    return ProcessesExit(AgentPhase.FAILED, report.reason, Fault.NONE if fault == Fault.PEER else fault)
        return None

    def dump_stacks(self) -> None:
        """Make each trainer write the stacks of its threads to its log."""
        # A trainer handles the signal only after its first report; before that the signal would kill it.
        if (self.attempt_folder / agent_protocol.PROGRESS_FILE).exists():
            for child in self.processes:
                if child.poll() is None:
                    child.send_signal(signal.SIGUSR1)
        time.sleep(STACK_DUMP_SECONDS)


def slurm_gives_gpus() -> bool:
    """Return whether this process runs in a job of Slurm that has GPUs of this node."""
    count, indexes = os.environ.get("SLURM_GPUS_ON_NODE", ""), os.environ.get("SLURM_JOB_GPUS", "")
    return bool(count.strip("0") or indexes or os.environ.get("SLURM_STEP_GPUS"))


def _start_in_standby(process: "subprocess.Popen[bytes]", request: StandbyRequest) -> bool:
    """Turn a standby process into a trainer. Returns False when it has died."""
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(encode(request)).encode() + b"\n")
        process.stdin.close()
    except OSError:
        return False
    return process.poll() is None
