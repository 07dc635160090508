"""Backend `slurm`: nodes of a Slurm cluster that share the run folder with this computer, a login node.

One job of Slurm starts on all nodes together and has a step for each machine, which runs its agent. A machine that is
lost gets a new step on a node that is still ours, or a job of its own with one node. All these jobs have names that
follow from the uid of our job: Slurm's queue is the only record of them, and so none is forgotten in a crash.
"""

import contextlib
import math
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.backends.backend_options import SlurmOptions
from cluster.backends.local import LocalBackend
from cluster.backends.planner import MachinePlanner, SourceAccess
from cluster.backends.shared_folder import SharedFolderBackend, give_notice
from cluster.connectors import tmux
from cluster.errors import BadInput, ClusterError
from cluster.state import status as state_status
from cluster.state.heartbeats import MachineStatus
from cluster.state.run_folder import Run, RunFolder
from cluster.state.spec import JobSpec
from train.tools.records import decode

from . import slurm_commands
from .batch_script import (
    LIMIT_REASON,
    NOTICE_SECONDS,
    STEP_PREFIX,
    agent_step,
    batch_arguments,
    batch_script,
    gpu_arguments,
)
from .slurm_commands import SlurmError, SlurmJob, SlurmStep

QUEUE_CACHE_SECONDS = 3.0  # Slurm's controller serves all users: a process does not ask it more often
FRESH_HEARTBEATS = 4  # a machine whose last heartbeat is not older than these is alive, and Slurm is not asked
STATUS_POLL_SECONDS = 0.2
SILENCE_SECONDS = 20.0  # a step whose agent has sent no heartbeat for so long has lost its node
START_SECONDS = 120.0  # from the start of Slurm's job to that of its steps
REPLACEMENT_START_SECONDS = 15.0  # for a step that was just requested to be listed
END_SECONDS = 6.0  # for Slurm to end a job whose processes have ended or were killed
END_POLL_SECONDS = 0.5
LIMIT_POLL_SECONDS = 20.0
WRONG_OPTION = re.compile("(invalid|unrecognized|unknown)(?! (auth|error))", re.IGNORECASE)  # in what sbatch says


class SlurmPlanner(MachinePlanner):
    """Plans a job on nodes that see the file systems of this computer."""

    default_fetch_folder = None
    default_access = SourceAccess.OPTIONAL  # the nodes may have access that this computer lacks

    def default_procs(self, machines: int) -> int:
        """Return a process for each GPU of a node, else the recipe's number."""
        assert isinstance(self.request.options, SlurmOptions)
        return self.request.options.gpus_per_node or self.request.workload.gpus


@dataclass(frozen=True)
class SlurmQueue:
    """What Slurm says of our jobs and their steps at one moment. `main` is the job that started all machines."""

    jobs: tuple[SlurmJob, ...] = ()
    steps: tuple[SlurmStep, ...] = ()
    main: SlurmJob | None = None

    @property
    def living_jobs(self) -> list[SlurmJob]:
        """The jobs that have not ended, including jobs of earlier launches."""
        return [job for job in self.jobs if job.is_living]

    def jobs_of(self, name: str) -> list[SlurmJob]:
        """Return the living jobs that may run a machine: the main job, and replacement jobs called `name` after it."""
        later = [job for job in self.jobs if job.name == name and self.main and int(job.id) > int(self.main.id)]
        return [job for job in [self.main, *later] if job and job.is_living]

    def steps_of(self, machine: str) -> list[SlurmStep]:
        """Return the steps of a machine, the newest first. Some may be on nodes that are lost."""
        own_steps = [step for step in self.steps if step.name == f"{STEP_PREFIX}{machine}"]
        return sorted(own_steps, key=lambda step: step.elapsed)


class SlurmBackend(SharedFolderBackend):
    """Nodes of a Slurm cluster."""

    name = "slurm"
    description = "nodes of a Slurm cluster, which share the run folder"
    options = SlurmOptions
    planner_class = SlurmPlanner
    detach_keys = "Ctrl-C"  # ends `tail`

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._cached_queue: SlurmQueue | None = None
        self._cache_time = -math.inf
        self._replacement_times: dict[str, float] = {}
        self._last_limit_poll = time.monotonic()
        self._watch_end = math.inf  # until then a status that looks old gets time to change: clocks may differ
        self._status_times: dict[str, tuple[float, float]] = {}  # of the last statuses: by their clock, and by ours

    @classmethod
    def check(cls, spec: JobSpec, runs_folder: Path) -> None:
        """Check this computer as for a local job, because it shares data and Python with the nodes; then the options.

        That the nodes see the run folder shows only when they start.
        """
        if missing := [program for program in slurm_commands.PROGRAMS if not shutil.which(program)]:
            raise ClusterError(f"{', '.join(missing)} missing; launch with --slurm on a login node of a Slurm cluster")
        LocalBackend.check(spec, runs_folder)
        check_partition(read_options(spec), len(spec.machine_names))
        check_submission(spec, runs_folder)

    # --- Slurm's view ---------------------------------------------------------------------------------------------

    @property
    def settings(self) -> SlurmOptions:
        """The options for Slurm of this job."""
        return read_options(self.run.spec)

    @property
    def _job_name(self) -> str:
        return self.run.spec.uid or self.run.spec.name

    def _replacement_name(self, machine: str) -> str:
        return f"{self._job_name}.{machine}"

    def queue(self, max_age_seconds: float = QUEUE_CACHE_SECONDS) -> SlurmQueue:
        """Return what Slurm says of this job, at most `max_age_seconds` old. Raises `SlurmError` without an answer."""
        if not self.run.folder.launch_path.exists():  # nothing was ever submitted
            return SlurmQueue()
        if self._cached_queue is None or time.monotonic() - self._cache_time > max_age_seconds:
            names = [self._job_name, *map(self._replacement_name, self.run.spec.machine_names)]
            jobs = slurm_commands.find_jobs(names)
            main_jobs = [job for job in jobs if job.name == self._job_name]
            running_ids = [job.id for job in jobs if job.is_living and not job.is_waiting]
            steps = slurm_commands.find_steps(running_ids) if running_ids else []
            self._cached_queue = SlurmQueue(tuple(jobs), tuple(steps), main_jobs[-1] if main_jobs else None)
            self._cache_time = time.monotonic()
        return self._cached_queue

    def _last_status(self, machine: str) -> tuple[MachineStatus | None, float]:
        """Return the last status of a machine and the seconds since it came; None and inf without one.

        They count by the clock of this process, but for a status that was there before it looked.
        """
        status = state_status.read_agent_status(self.run.folder, machine)
        now, written_at = time.monotonic(), status.time if status else 0.0
        if machine not in self._status_times:
            age = max(0.0, time.time() - status.time - status.clock_jump) if status else math.inf
            self._status_times[machine] = written_at, now - age
        elif self._status_times[machine][0] != written_at:
            self._status_times[machine] = written_at, now
        return status, now - self._status_times[machine][1] if status else math.inf

    def has_agent(self, machine: str) -> bool:
        """Whether the agent of a machine is running, or may be: its job waits, or Slurm does not answer."""
        status, silence = self._last_status(machine)
        fresh_seconds = FRESH_HEARTBEATS * max(1.0, self.run.spec.heartbeat_seconds)
        self._watch_end = min(self._watch_end, time.monotonic() + fresh_seconds)
        while status and not status.ended and silence >= fresh_seconds and time.monotonic() < self._watch_end:
            time.sleep(STATUS_POLL_SECONDS)
            status, silence = self._last_status(machine)
        has_ended = status is not None and status.ended
        if not has_ended and silence < fresh_seconds:
            return True
        if time.monotonic() - self._replacement_times.get(machine, -math.inf) < REPLACEMENT_START_SECONDS:
            return True
        try:
            queue = self.queue()
        except SlurmError:
            return not has_ended
        is_ending = bool(self.run.folder.end_reason())
        return any(
            may_run_agent(job, [step for step in queue.steps_of(machine) if step.job_id == job.id], silence, has_ended)
            for job in queue.jobs_of(self._replacement_name(machine))
            if job == queue.main or not (is_ending and job.is_waiting)  # a replacement that came now would do nothing
        )

    def waits_for(self) -> str:
        """Return why Slurm has not started the job yet, "" when it has."""
        with contextlib.suppress(SlurmError):
            main = self.queue().main
            if main and main.is_waiting:
                reason = main.state.lower() if main.reason == "None" else main.reason
                return f"waiting for Slurm to start its job {main.id}: {reason}"
        return ""

    def explain_end(self) -> str:
        """Return how Slurm ended the job, "" when it ended by itself or was stopped."""
        if self.run.folder.stop_path.exists():
            return ""
        with contextlib.suppress(SlurmError):
            queue = self._wait_for_end()
            if queue.main and not queue.main.is_living and queue.main.state != "COMPLETED":
                return f"Slurm ended its job {queue.main.id}: {queue.main.state.lower()}"
            if not state_status.machine_statuses(self.run):
                folder = self.run.folder.path
                return f"no agent started; all nodes must see {folder} and the same Python; see {folder}/slurm/*.log"
        return ""

    def _wait_for_end(self) -> SlurmQueue:
        """Return what Slurm says when the jobs have ended, or after a while: a job with a lost node does not end."""
        deadline = time.monotonic() + END_SECONDS
        while (queue := self.queue(0)).living_jobs and time.monotonic() < deadline:
            time.sleep(END_POLL_SECONDS)
        return queue

    # --- the life of a job ----------------------------------------------------------------------------------------

    def launch(self) -> None:
        """Submit the job, and start the tmux session with the supervisor. A job that is in the queue is left alone."""
        if not any(job.state != "COMPLETING" for job in self.queue(0).living_jobs):
            self._submit(self._job_name, self.run.spec.machine_names, 0.0)
        try:
            self.start_session()
        except ClusterError:
            self.terminate()
            raise

    def _submit(
        self, name: str, machines: Sequence[str], elapsed_seconds: float, seconds_left: float | None = None
    ) -> None:
        """Submit a job that starts the agents of some machines. Raises `SlurmError`, with nothing left in the queue."""
        spec, folder = self.run.spec, self.run.folder
        (folder.path / "slurm").mkdir(exist_ok=True)
        arguments = batch_arguments(spec, self.settings, folder, name, len(machines), seconds_left)
        script = batch_script(spec, self.settings, folder, machines, elapsed_seconds)
        self._cached_queue = None
        try:
            slurm_commands.submit(arguments, script)
        except SlurmError:
            with contextlib.suppress(SlurmError):  # it may be in the queue although its id did not arrive
                slurm_commands.cancel([job.id for job in self.queue(0).living_jobs if job.name == name])
            raise

    def poll(self) -> bool:
        """Copy new log lines, and announce the end of Slurm's time limit in case that the batch script is lost."""
        if time.monotonic() - self._last_limit_poll > LIMIT_POLL_SECONDS:
            self._last_limit_poll = time.monotonic()
            with contextlib.suppress(SlurmError):
                self._announce_time_limit(self.queue())
        return super().poll()

    def _announce_time_limit(self, queue: SlurmQueue) -> None:
        for job in queue.living_jobs:
            if job.seconds_left is not None and job.seconds_left < NOTICE_SECONDS and job.state == "RUNNING":
                for step in queue.steps:
                    machine = step.name.removeprefix(STEP_PREFIX)
                    if step.job_id == job.id and machine in self.run.spec.machine_names:
                        give_notice(self.run.folder, machine, LIMIT_REASON, job.seconds_left)

    def replace(self, machine: str) -> None:
        """Start the agent on a free node of our allocations that answers; without one, submit a job of one node."""
        folder = self.run.folder
        queue = self.queue(0)
        self._replacement_times[machine] = time.monotonic()
        for step in queue.steps_of(machine):
            with contextlib.suppress(SlurmError):
                slurm_commands.kill_step(step.id)
        main = queue.main
        launched = self.run.clock() - folder.launch_path.stat().st_mtime
        elapsed_seconds = main.elapsed if main and main.is_living else launched
        free_node = self._find_free_node(queue, machine)
        if free_node and tmux.is_owned_by(folder.tmux_session, folder.path):
            job, node = free_node
            agent = agent_step(self.settings, folder, machine, elapsed_seconds)
            argv = slurm_commands.without_outer_job([*slurm_commands.step_argv(job.id, node), *agent])
            tmux.add_window(folder.tmux_session, f"agent-{machine}", argv)
        else:
            seconds_left = main.seconds_left if main and main.is_living else None
            self._submit(self._replacement_name(machine), [machine], elapsed_seconds, seconds_left)
        self._cached_queue = None

    def _find_free_node(self, queue: SlurmQueue, machine: str) -> tuple[SlurmJob, str] | None:
        others = [name for name in self.run.spec.machine_names if name != machine and self.has_agent(name)]
        busy_nodes = {step.node for name in others for step in queue.steps_of(name)[:1]}
        for job in queue.living_jobs:
            if job.state == "RUNNING" and job.nodes:
                for node in slurm_commands.run("scontrol", "show", "hostnames", job.nodes).split():
                    if node not in busy_nodes and slurm_commands.does_node_answer(job.id, node):
                        return job, node
        return None

    def kill_agent(self, machine: str) -> None:
        """Kill all processes of the machine's newest step."""
        slurm_commands.kill_step(self._find_step(machine).id)
        self._cached_queue = None

    def terminate(self) -> list[str]:
        """Cancel all jobs in Slurm's queue, and end the tmux session."""
        silent_machines: list[str] = []
        try:
            if living_ids := [job.id for job in self.queue(0).living_jobs]:
                slurm_commands.cancel(living_ids)
                self._wait_for_end()
        except SlurmError:
            silent_machines = list(self.run.spec.machine_names)
        self._cached_queue = None
        tmux.kill_session(self.run.folder.tmux_session, self.run.folder.path)
        return silent_machines

    # --- access ---------------------------------------------------------------------------------------------------

    def _find_step(self, machine: str) -> SlurmStep:
        """Return the newest step of a machine. Raises `ClusterError` when it has none."""
        name = self.run.spec.name
        steps = self.queue(0).steps_of(machine)
        if not steps:
            reason = self.waits_for() or "it has no running agent"
            raise ClusterError(f"machine {machine} of {name}: {reason}; see: imgnet-cluster status {self.run.handle}")
        return steps[0]

    def attach_command(self, machine: str) -> list[str]:
        """Return the command that follows the trainers' log on the node of a machine."""
        log = self.run.folder.work_folder(machine) / "train.log"
        return self.shell_command(machine, ["tail", "-n", "+1", "-F", str(log)])

    def shell_command(self, machine: str, argv: Sequence[str] = (), tty: bool = True) -> list[str]:
        """Return the command that opens a shell on the node of a machine, beside its agent."""
        step = self._find_step(machine)
        terminal = ["--pty"] if tty else []
        return slurm_commands.without_outer_job(
            [
                *slurm_commands.step_argv(step.job_id, step.node),
                "--job-name=shell",
                *gpu_arguments(self.settings),
                *terminal,
                *(argv or ["bash", "-l"]),
            ]
        )


def may_run_agent(job: SlurmJob, steps: Sequence[SlurmStep], silence: float, has_ended: bool) -> bool:
    """Whether a job runs the agent of a machine, or is about to start it. `steps` are those of the machine in it.

    `silence` is the time in seconds since the last status of the machine, and `has_ended` whether that status says that
    its agent has ended. A status that is older than a step comes from an earlier agent.
    """
    if job.is_waiting:
        return True
    if not steps:
        return job.state == "RUNNING" and job.elapsed < min(START_SECONDS, silence)
    return any(
        step.elapsed < min(silence, SILENCE_SECONDS) or (not has_ended and silence < SILENCE_SECONDS) for step in steps
    )


def read_options(spec: JobSpec) -> SlurmOptions:
    """Return the options for Slurm in a specification. Without --gpus-per-node each process gets a GPU."""
    options = decode(SlurmOptions, spec.backend_options or {}, "backend_options")
    return options if options.gpus_per_node is not None else replace(options, gpus_per_node=spec.procs)


def check_submission(spec: JobSpec, runs_folder: Path) -> None:
    """Raise `BadInput` when sbatch says that an option is wrong. Other refusals pass: nodes may be down for a while."""
    arguments = batch_arguments(spec, read_options(spec), RunFolder(runs_folder), spec.name, len(spec.machine_names))
    try:
        slurm_commands.run("sbatch", "--test-only", *arguments, input="#!/bin/sh\n")
    except SlurmError as error:
        if WRONG_OPTION.search(str(error)):
            raise BadInput(str(error)) from error


def check_partition(options: SlurmOptions, node_count: int) -> None:
    """Raise `BadInput` when the partition does not exist or is too small: sbatch would let the job wait forever.

    Of several partitions, such as a,b, Slurm takes the one that starts the job first.
    """
    output = slurm_commands.run("sinfo", "--noheader", "--all", "--format=%R|%D|%G|%P")
    rows = [line.strip().split("|", 3) for line in output.splitlines()]
    names = sorted({row[0] for row in rows})
    if options.partition and not {*options.partition.split(",")} <= {*names}:
        raise BadInput(f"--partition {options.partition}: the cluster has the partitions {', '.join(names)}")
    wanted = options.partition or next((row[0] for row in rows if row[3].endswith("*")), "")
    own_rows = [row for row in rows if row[0] in wanted.split(",")]
    if not own_rows:
        raise BadInput(f"Slurm has no default partition; give one with --partition: {', '.join(names)}")
    count = max(sum(int(row[1]) for row in own_rows if row[0] == name) for name in wanted.split(","))
    if node_count > count:
        raise BadInput(
            f"the partition {wanted} has {count} nodes, but the job needs {node_count} (--machines plus --spares)"
        )
    if options.gpus_per_node and all("gpu" not in row[2] for row in own_rows):
        raise BadInput(f"the nodes of the partition {wanted} have no GPUs; for nodes without: --gpus-per-node 0")
