"""The processes of a user's command on one machine: one for each rank, with the variables that torchrun sets.

    <work>/project/             this machine's copy of the user's project, in which the command runs
    <work>/logs/000007/         rank-3.log
    <work>/events/              IMGNET_EVENTS: TensorBoard events, which are brought home
    <work>/checkpoints/         IMGNET_CHECKPOINTS: copied whole, restored before each attempt (checkpoint_folder.py)
    <work>/progress             IMGNET_PROGRESS: a file that the command may touch, with its step or without

Nothing is known of what the command does. It is alive while its processes are; it is asked to save and exit by a
signal, and killed when it has not ended after `SAVE_GRACE_SECONDS`. It is started anew in each attempt.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from cluster.connectors.local import GPUS_VARIABLE
from cluster.connectors.untrusted import one_line
from cluster.errors import ClusterError
from cluster.script import container, secret_values
from cluster.script.checkpoint_folder import CheckpointFolder
from cluster.script.progress import ScriptNumbers, ScriptProgress
from cluster.state.attempts import Attempt
from cluster.state.spec import JobSpec
from cluster.state.states import AgentPhase
from train.distributed import network
from train.metrics.records import StepRow, row_line
from train.recipe.command import Command
from train.tools import host, process
from train.tools.agent_protocol import EVENTS_FOLDER, Fault, TrainerProgress, TrainerState, metrics_file, rank_log_file
from train.tools.errors import PEER_FAILURE_MARKERS, find_gpu_failure, last_line
from train.tools.files import FORMER_UTF8_VARIABLE, PROJECT_ROOT, UTF8_VARIABLE, open_regular, write_atomic

from . import guard
from .base import OWNER_VARIABLE, AttemptProcesses, ProcessesExit, kill_process_groups, write_heading

SAVE_GRACE_SECONDS = 25.0  # for a command to save and exit; less than the time that the end of a job waits for it
PROJECT_FOLDER = "project"  # below the work folder
PROJECT_LISTING = "project.names"  # the same: what was copied into that folder, separated by zeros
CHECKPOINTS_FOLDER = "checkpoints"  # below the work folder
PROGRESS_FILE = "progress"  # the same: the file IMGNET_PROGRESS
PROGRESS_SECONDS = 0.5  # between two looks at what a command has told of its progress
RESTORE_WAIT_SECONDS = 0.2  # in which a small checkpoint folder is restored
MAX_REASON_CHARACTERS = 500  # of the last line of a rank that failed
# What C++ adds where a process ends by an error while other threads of it run, as torch's do after a lost connection.
UNEXPLAINED_ABORT = "terminate called without an active exception"
# What stands around and after the text of a C++ error that ends a process, such as one of NCCL's watchdog.
CPP_STACK_PATTERN = re.compile(r"^(?:Exception raised from .*|frame #\d+: .*|  what\(\):  )", re.MULTILINE)
LAST_COPY_SECONDS = 5.0  # for the last copy of a checkpoint folder whose processes were killed
GROUP_SECONDS = 60.0  # after which a script of several ranks that has made no process group is told of
COLLATERAL_SECONDS = 0.5  # for the rank that failed first to end, when another one has lost its connection to it
ACTIVE_ENVIRONMENTS = ("VIRTUAL_ENV", "CONDA_PREFIX")  # set in a shell in which a Python environment is active
# Of the agent's own environment: with them Python would find modules of this program before those of the user, and
# would not follow the user's locale.
AGENT_VARIABLES = ("PYTHONSAFEPATH", "PYTHONPATH", UTF8_VARIABLE, FORMER_UTF8_VARIABLE)


class CommandProcesses(AttemptProcesses):
    """Starts, watches and ends the processes of a user's command on one machine."""

    def __init__(
        self, spec: JobSpec, command: Command, shared: Path, work: Path, temp_folder: Path, user_project: Path | None
    ) -> None:
        super().__init__(spec, shared, work, temp_folder)
        self.command = command
        self.source = user_project if spec.user_project else None
        self.environment |= self._job_environment()
        self.is_copied = False
        self.guard: subprocess.Popen[bytes] | None = None
        self.start_problem = ""  # why the command could not be started, "" when it could
        self.ticks = 0
        self.processes_started = False
        self.has_nvidia_runtime = False
        self.checkpoints: CheckpointFolder | None = None
        self.pending_start: Callable[[], None] | None = None  # while the checkpoint folder is being restored
        self.found_exit: ProcessesExit | None = None  # which counts when the last copy of that folder is complete
        self.secrets: dict[str, str] | None = None
        with contextlib.suppress(ClusterError, OSError):  # which is told when the command is to start
            self._receive_secrets()  # at once: a spare may never start the command, and their file would stay
        self.pattern = re.compile(command.progress) if command.progress else None  # the launch has tried it
        self.progress: ScriptProgress | None = None
        self.looked_at = 0.0
        self.last_sign = (0, 0.0)  # the number of signs of life, and when it changed
        self.logged_step: int | None = None  # the last one in the metrics of this attempt
        self.do_steps_ascend = True
        self.group_port = 0  # rank 0 listens there for its process group; 0: it has, or need not
        self.group_deadline = 0.0

    def _job_environment(self) -> dict[str, str]:
        """Return the variables that are the same for all processes of all attempts on this machine."""
        folders = {"IMGNET_CHECKPOINTS": self.work / CHECKPOINTS_FOLDER, "IMGNET_EVENTS": self.work / EVENTS_FOLDER}
        for folder in folders.values():
            with contextlib.suppress(FileExistsError):  # the script has put something else in its place
                folder.mkdir(parents=True, exist_ok=True)
        variables = {name: str(folder.absolute()) for name, folder in folders.items()}
        variables["IMGNET_PROGRESS"] = str((self.work / PROGRESS_FILE).absolute())
        if self.spec.train.data:
            variables["IMGNET_DATA"] = self.spec.train.data
        threads = self.spec.threads_per_process or (1 if self.spec.procs > 1 else None)  # torchrun sets 1 for several
        if threads and "OMP_NUM_THREADS" not in os.environ:
            variables["OMP_NUM_THREADS"] = str(threads)
        variables["PYTHONUNBUFFERED"] = "1"  # so that its lines reach the log when they are printed
        paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        if own_paths := [path for path in paths if Path(path) != PROJECT_ROOT]:
            variables["PYTHONPATH"] = os.pathsep.join(own_paths)
        if utf8 := os.environ.get(FORMER_UTF8_VARIABLE, os.environ.get(UTF8_VARIABLE)):
            variables[UTF8_VARIABLE] = utf8
        # This computer and Slurm's nodes have the variables of the user's shell, other machines have not.
        if self.spec.has_own_folders or not any(name in os.environ for name in ACTIVE_ENVIRONMENTS):
            programs = Path(sys.executable).parent
            variables["PATH"] = os.pathsep.join([str(programs), os.environ.get("PATH", os.defpath)])
        return variables | dict(self.command.env)

    def start(self, attempt: Attempt, machine_rank: int, goes_on_in_place: bool = False) -> Path:
        """Start the command once for each rank, never in place. `collect_exit` reports one that cannot be started."""
        first_log, rank_environments = self.begin_attempt(attempt, machine_rank)
        self.start_problem = ""
        shared_environment = {
            **self.environment,
            "GROUP_RANK": str(machine_rank),
            "GROUP_WORLD_SIZE": str(len(attempt.members)),
            "ROLE_NAME": "default",
            "ROLE_WORLD_SIZE": str(self.spec.procs * len(attempt.members)),
            "TORCHELASTIC_RESTART_COUNT": str(attempt.number - 1),
            "TORCHELASTIC_MAX_RESTARTS": str(self.command.retries),
            "TORCHELASTIC_RUN_ID": self.spec.uid or self.spec.name,
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }
        self.found_exit = None
        is_first = machine_rank == 0
        folder = self.work / CHECKPOINTS_FOLDER
        self.checkpoints = CheckpointFolder(
            folder, self.shared, attempt.number, attempt.resume, is_first, self.checkpoints
        )
        events, touched = self.work / EVENTS_FOLDER, self.work / PROGRESS_FILE
        pattern = self.pattern if is_first else None
        self.progress = ScriptProgress(first_log, events, touched, pattern, counts_output=self.pattern is None)
        self.pending_start = partial(self._start_processes, attempt, shared_environment, rank_environments)
        self.checkpoints.decided.wait(RESTORE_WAIT_SECONDS)
        self._start_if_restored()
        return first_log

    def _start_if_restored(self) -> None:
        """Start the processes of an attempt once its checkpoint folder is there."""
        if self.pending_start and self.checkpoints and (self.checkpoints.is_restored or self.checkpoints.has_ended):
            start, self.pending_start = self.pending_start, None
            if self.checkpoints.is_restored:
                start()
            else:
                self.start_problem = self.checkpoints.problem

    def _start_processes(
        self, attempt: Attempt, shared_environment: dict[str, str], rank_environments: list[dict[str, str]]
    ) -> None:
        first_log = rank_log_file(self.work, attempt.number, self.first_rank)
        self.last_sign = (0, time.monotonic())
        self.logged_step, self.do_steps_ascend = None, True
        has_peers = self.spec.procs * len(attempt.members) > 1
        self.group_port = attempt.master_port if has_peers and self.first_rank == 0 else 0
        self.group_deadline = time.monotonic() + GROUP_SECONDS
        try:
            self._start_guard()
            if self.command.image:
                container.remove_containers(self.machine_label)
                self.processes_started = True
            folder = self._copy_project()
            secrets = self._receive_secrets()
            for rank_environment in rank_environments:
                rank = rank_environment["RANK"]
                log_path = rank_log_file(self.work, attempt.number, int(rank))
                write_heading(log_path, attempt)
                # What the user gives counts, also where we would choose a network interface or a number of threads.
                environment = {**rank_environment, **shared_environment, **secrets, "ROLE_RANK": rank}
                argv = self._container_argv(int(rank), folder, environment) if self.command.image else self.command.argv
                self.processes.append(
                    process.start_process(argv, log_path, environment, folder=folder, without=AGENT_VARIABLES)
                )
        except OSError as error:
            self.start_problem = f"{error.filename or self.command.argv[0]}: {error.strerror or error}"
        except ClusterError as error:
            self.start_problem = str(error)
        if self.start_problem:
            with contextlib.suppress(OSError):
                first_log.write_text(f"the command cannot be started: {self.start_problem}\n")

    def _receive_secrets(self) -> dict[str, str]:
        """Return the values of the command's secret variables. Raises `ClusterError`, `OSError`."""
        if self.secrets is None:
            self.secrets = secret_values.receive(self.command.secrets, self.work, self.spec.uid, self.spec.name)
        return self.secrets

    @property
    def machine_label(self) -> str:
        """What names the containers of this machine of the job."""
        return f"{self.spec.uid or self.spec.name}-{self.work.name}-{self.shared.parent.name}"

    def use_environment(self, python: str, has_nvidia_runtime: bool) -> None:
        """Run the command with another Python first in PATH, "" for none, and with what docker can do here."""
        self.has_nvidia_runtime = has_nvidia_runtime
        if python and python != sys.executable:
            programs = Path(python).parent
            path = self.environment.get("PATH", os.environ.get("PATH", os.defpath))
            self.environment |= {"PATH": os.pathsep.join([str(programs), path]), "VIRTUAL_ENV": str(programs.parent)}

    def _container_argv(self, rank: int, folder: Path, environment: Mapping[str, str]) -> list[str]:
        data = self.spec.train.data
        return container.run_argv(
            self.command.image,
            self.command.argv,
            name=container.container_name(self.machine_label, str(self.attempt_number), rank),
            machine_label=self.machine_label,
            workdir=folder.absolute(),
            mounts=[self.work.absolute(), Path(self.environment["TMPDIR"])],
            read_only_mounts=[Path(data)] if data and Path(data).exists() else [],
            # The machine's share of a computer that several jobs use, and where it is.
            variables={*environment, GPUS_VARIABLE, *self.spec.rental_facts.environment},
            given_variables={*self.command.env, *self.command.secrets},
            has_nvidia=self.has_nvidia_runtime,
        )

    def _start_guard(self) -> None:
        """Start the process that ends what the command has started if this agent is killed. Raises `OSError`."""
        if self.guard is None or self.guard.poll() is not None:
            marker = f"{OWNER_VARIABLE}={self.environment[OWNER_VARIABLE]}"
            argv = [sys.executable, "-I", "-S", guard.__file__, marker]
            argv += [f"{container.LABEL}={self.machine_label}"] if self.command.image else []
            self.guard = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    def stop(self, include_standby: bool = False) -> None:
        """Kill the processes of the attempt and all that they started; at the end of the agent, the guard ends too.

        What the checkpoint folder had at rest before is copied. Raises `UnkillableProcess`.
        """
        self.pending_start = None
        super().stop(include_standby)
        if self.command.image and self.processes_started:
            container.remove_containers(self.machine_label)
        if self.checkpoints:
            self.checkpoints.finish(was_graceful=False)
            self.checkpoints.wait(LAST_COPY_SECONDS)
        if include_standby and self.guard and self.guard.stdin:
            self.guard.stdin.close()
            self.guard.wait()
            self.guard = None

    def _copy_project(self) -> Path:
        """Bring this machine's copy of the project up to date, and return where the command runs. Raises `OSError`."""
        copy = self.work / PROJECT_FOLDER
        copy.mkdir(parents=True, exist_ok=True)
        if self.source is None or self.spec.user_project is None:
            return copy
        paths = [] if self.is_copied else sorted(self.source.rglob("*"))  # a folder comes before what is in it
        if not self.is_copied:
            self._remove_deleted_files(copy, {os.fsencode(path.relative_to(self.source)) for path in paths})
        for path in paths:
            target = copy / path.relative_to(self.source)
            is_folder = path.is_dir() and not path.is_symlink()
            # What the command has put in its place may be read-only, or a link to a file that is not ours.
            if target.is_symlink() or not target.is_dir():
                target.unlink(missing_ok=True)
            elif not is_folder:
                shutil.rmtree(target)
            if is_folder:
                target.mkdir(exist_ok=True)
            else:
                shutil.copy(path, target, follow_symlinks=False)
        self.is_copied = True
        folder = copy / self.spec.user_project.workdir
        folder.mkdir(parents=True, exist_ok=True)  # a folder without files does not travel
        return folder

    def _remove_deleted_files(self, copy: Path, names: set[bytes]) -> None:
        """Remove files of this machine's copy that an earlier agent has copied, and that the project has no longer.

        Python would still import them. What the command has written stays. `names` are those of the project's files.
        """
        listing = self.work / PROJECT_LISTING
        known = set(listing.read_bytes().split(b"\0")) if listing.exists() else set()
        for name in known - names:
            path = copy / os.fsdecode(name)
            is_inside = path.parent.resolve().is_relative_to(copy.resolve())  # the command may have put a link there
            if is_inside and (path.is_symlink() or path.is_file()):
                path.unlink()
        write_atomic(listing, b"\0".join(names))

    def request_save_and_exit(self) -> None:
        """Send the command's signal to each of its processes, once in each attempt."""
        if self.exit_requested_at is not None:
            return
        self.exit_requested_at = time.monotonic()
        self.pending_start = None
        for child in self.processes:
            if child.poll() is None:
                child.send_signal(signal.Signals[f"SIG{self.command.save_signal}"])

    def read_progress(self) -> TrainerProgress:
        """Return that the command trains, because its processes live, with the numbers that it has told."""
        self.ticks += 1
        now = time.monotonic()
        numbers = ScriptNumbers()
        if self.progress:
            has_ended = bool(self.processes) and self.processes[0].poll() is not None
            if has_ended or now - self.looked_at > PROGRESS_SECONDS:  # nothing that it told may be missed at its end
                self.looked_at = now
                self.progress.poll()
                if self.group_port and network.is_listened_on(self.group_port):
                    self.group_port = 0
            numbers = self.progress.numbers
            if self.first_rank == 0 and numbers.step not in (None, self.logged_step):
                self._log_step(numbers)
        if numbers.signs != self.last_sign[0]:
            self.last_sign = (numbers.signs, now)
        told = {name: value for name, value in vars(numbers).items() if name != "signs"}
        return TrainerProgress(state=TrainerState.TRAINING, ticks=self.ticks, **told)

    def _log_step(self, numbers: ScriptNumbers) -> None:
        """Append a step to the metrics of the attempt, by which pauses and steps that are done again are found.

        In the place of the number of images it has the number of steps, or 0 once the script has counted them anew.
        """
        step = numbers.step or 0
        self.do_steps_ascend &= self.logged_step is None or step > self.logged_step
        self.logged_step = step
        row = StepRow(
            attempt=self.attempt_number,
            time=host.unix_time(),
            step=step,
            images=step + 1 if self.do_steps_ascend else 0,
            epoch=numbers.epoch or 1,
            scalars={},
        )
        path = metrics_file(self.work, self.attempt_number)
        with contextlib.suppress(OSError):  # the disk is full: the processes will say so
            path.parent.mkdir(exist_ok=True)
            with open_regular(path, "ab") as file:
                file.write(row_line(row).encode())

    def problem(self) -> str:
        """Return why no checkpoint is copied, no progress is looked for, or the ranks train alone; "" for none."""
        problems = [part.problem for part in (self.checkpoints, self.progress) if part and part.problem]
        if self.group_port and time.monotonic() > self.group_deadline:
            problems.append("no process listens on MASTER_PORT: without init_process_group, each rank trains alone")
        return one_line("; ".join(problems), MAX_REASON_CHARACTERS)

    def exit_codes(self) -> list[int | None]:
        """Return the exit codes of the processes, None for those that run or are to be started."""
        self._start_if_restored()
        return [None] * self.spec.procs if self.pending_start else super().exit_codes()

    def collect_exit(self, exit_codes: list[int | None]) -> ProcessesExit | None:
        """Return how the processes ended, None while they run or the last copy of the checkpoint folder is made."""
        if self.found_exit is None:
            self.found_exit = self._find_exit(exit_codes)
            if self.found_exit and self.checkpoints:
                # A signal may have ended rank 0 in the middle of a file. Python ends by SIGINT after its `finally`.
                was_killed = any(code < 0 and code != -signal.SIGINT for code in exit_codes[:1] if code)
                self.checkpoints.finish(was_graceful=not (self.found_exit.reason or was_killed))
        is_copied = self.checkpoints is None or self.checkpoints.has_ended
        if not is_copied or self.found_exit is None:
            return None
        return replace(self.found_exit, reason=self.found_exit.reason or self.problem())

    def _find_exit(self, exit_codes: list[int | None]) -> ProcessesExit | None:
        """Return how the processes ended, None while they run. Those that were asked to exit count as saved."""
        if self.start_problem:
            return ProcessesExit(AgentPhase.FAILED, f"the command cannot be started: {self.start_problem}", Fault.INPUT)
        if self.exit_requested_at is not None:
            return self._collect_requested_exit(exit_codes, self.exit_requested_at)
        if not any(exit_codes):
            return self._find_stall() if None in exit_codes else ProcessesExit(AgentPhase.FINISHED)
        time.sleep(COLLATERAL_SECONDS)
        failures = [self._failure(rank, code) for rank, code in enumerate(self.exit_codes(), self.first_rank) if code]
        return next((failure for failure in failures if failure.fault != Fault.NONE), failures[0])

    def _find_stall(self) -> ProcessesExit | None:
        """Return a failure when rank 0 has given no sign of life for the time that the user set, else None."""
        seconds = self.command.stall_seconds
        if not seconds or self.first_rank or self.pending_start or time.monotonic() - self.last_sign[1] < seconds:
            return None
        reason = f"no progress of rank 0 for {seconds:g} s (--stall-seconds)"
        return ProcessesExit(AgentPhase.FAILED, reason, Fault.OWN, self.first_rank)

    def _collect_requested_exit(self, exit_codes: list[int | None], requested_at: float) -> ProcessesExit | None:
        if None not in exit_codes:
            return ProcessesExit(AgentPhase.SAVED)
        if time.monotonic() - requested_at < SAVE_GRACE_SECONDS:
            return None
        kill_process_groups(self.processes)
        name = f"SIG{self.command.save_signal}"
        return ProcessesExit(AgentPhase.SAVED, f"killed {SAVE_GRACE_SECONDS:.0f} s after {name}, which it ignored")

    def _failure(self, rank: int, code: int) -> ProcessesExit:
        """Return the failure of a rank that ended with a code other than 0, with the last line of its log."""
        log_end = self.log_end(rank)
        line = last_line(CPP_STACK_PATTERN.sub("", log_end).rstrip().removesuffix(UNEXPLAINED_ABORT))
        if line.startswith(f"attempt {self.attempt_number}: "):  # our own heading: the rank has printed nothing
            line = ""
        if self.command.image and code == container.NOT_STARTED:
            line = container.find_error(log_end) or line
        how = f"was killed by {process.signal_name(-code)}" if code < 0 else f"ended with code {code}"
        lead = "; its last line" if code < 0 else ""  # who is killed has not printed why
        if code - 128 in signal.valid_signals():  # so shells and containers tell how a process of theirs ended
            how += f" (128 + {process.signal_name(code - 128)})"
        shown_line = one_line(line, MAX_REASON_CHARACTERS)
        reason = f"rank {rank} {how}{f'{lead}: {shown_line}' if shown_line else ''}"
        gpu_failure = find_gpu_failure(log_end, rank - self.first_rank)
        if gpu_failure:
            problem = one_line(gpu_failure[1], MAX_REASON_CHARACTERS)
            return ProcessesExit(AgentPhase.FAILED, f"{reason}; {problem}", gpu_failure[0], rank)
        is_collateral = any(marker in line for marker in PEER_FAILURE_MARKERS)
        return ProcessesExit(AgentPhase.FAILED, reason, Fault.NONE if is_collateral else Fault.OWN, rank)
