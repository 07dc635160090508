"""Backend `local`: this computer acts as the job's machine, or as several of them.

Each machine is an agent, whose output is in a window of the job's tmux session.
"""

import contextlib
import os
import shutil
import signal
from pathlib import Path

from cluster.connectors import tmux
from cluster.connectors.local import GPUS_VARIABLE, visible_gpus
from cluster.errors import BadInput, ClusterError
from cluster.machines import requirements
from cluster.state.run_folder import AGENT_LOCK, AGENT_OUTPUT, lock_holder
from cluster.state.spec import JobSpec, UserProject
from train.recipe.schedule import Schedule
from train.recipe.schema import Recipe
from train.tools.files import is_locked

from .backend_options import LocalOptions
from .planner import MachinePlanner, Plan, SourceAccess, checkpoint_bytes
from .shared_folder import SharedFolderBackend, agent_argv

# Models and optimizers of other packages have no known size; a ViT-B/16 with 86 million parameters serves as the guess.
UNKNOWN_CHECKPOINT_BYTES = 693_000_000
# Two are kept while a third is written; beside them two of the best networks and the last one, each half as large.
CHECKPOINTS_ON_DISK = 5
LOGS_BYTES = 50_000_000


class LocalPlanner(MachinePlanner):
    """Plans a job whose machines all are this computer."""

    default_fetch_folder = None
    is_this_computer = True
    default_access = SourceAccess.REQUIRED  # this computer is the machine that fetches

    @property
    def machine_count(self) -> int:
        """One machine, unless the user asks for several."""
        return self.request.machines or 1

    def default_procs(self, machines: int) -> int:
        """Return the number of processes by which the machines share this computer's GPUs."""
        return max(1, len(visible_gpus()) // (machines + self.request.spares))

    def requirement_notes(self, recipe: Recipe, project: UserProject | None) -> list[str]:
        """Return nothing: a launch that lacks a requirement is refused."""
        return []

    def complete(self, spec: JobSpec, schedule: Schedule | None) -> Plan:
        """Add a note on too few GPUs."""
        notes = []
        if 0 < len(visible_gpus()) < spec.trainer_count:
            notes.append(
                f"THE JOB TRAINS ON THE CPU: its {spec.trainer_count} trainer processes need a GPU each, and this "
                f"computer has {len(visible_gpus())}; use fewer --machines, --spares or --procs"
            )
        return Plan(spec=spec, schedule=schedule, notes=tuple(notes))


class LocalBackend(SharedFolderBackend):
    """This computer as the job's machines."""

    name = "local"
    description = "this computer"
    options = LocalOptions
    planner_class = LocalPlanner
    agents_open_session = True

    @classmethod
    def check(cls, spec: JobSpec, runs_folder: Path) -> None:
        """Check tmux, the recipe's requirements, the data and the disk space. Raises `BadInput`, `ClusterError`."""
        tmux.require_tmux()
        if spec.own_command:
            check_disk_space(0, runs_folder)
            return
        for line in requirements.missing_requirements(spec.recipe, spec.user_project):
            raise BadInput(line)
        if not spec.generate_data and not spec.data_source:  # data that is fetched was checked when the job was planned
            from train.data.index.open import DataError, check_layout  # imports numpy, which `ls` does without

            try:
                check_layout(Path(spec.train.data), spec.recipe.data.val_fraction)
            except DataError as error:
                is_missing = not Path(spec.train.data).exists()
                hint = "; pass --data DIR, or --data sample for the built-in set" if is_missing else ""
                raise ClusterError(f"{error}{hint}") from error
            if spec.train.copies not in (f"{spec.train.data}-sz", "") and not Path(spec.train.copies).is_dir():
                raise BadInput(f"--copies {spec.train.copies}: there is no such folder")
        check_disk_space(checkpoint_bytes(spec.recipe) or UNKNOWN_CHECKPOINT_BYTES, runs_folder)

    def launch(self) -> None:
        """Start the tmux session with the supervisor and one agent per machine. Agents add further windows."""
        self.start_session()
        for machine in self.run.spec.machine_names:
            self._start_agent(machine)

    def _start_agent(self, machine: str, elapsed_seconds: float = 0.0) -> None:
        """Start the agent of a machine in its own window; its time limit counts from `elapsed_seconds` ago."""
        spec, folder = self.run.spec, self.run.folder
        work = folder.work_folder(machine)
        window = "agent" if len(spec.machine_names) == 1 else f"agent-{machine}"
        gpus = spec.gpus_of_machine(machine)
        environment = {} if gpus is None else {GPUS_VARIABLE: ",".join(gpus)}
        work.mkdir(parents=True, exist_ok=True)
        argv = agent_argv(folder, machine, elapsed_seconds, environment)
        window_argv = tmux.followed_argv(argv, work / AGENT_OUTPUT)
        if tmux.is_owned_by(folder.tmux_session, folder.path):
            tmux.add_window(folder.tmux_session, window, window_argv, index=tmux.FIRST_AGENT_WINDOW + int(machine))
        else:  # somebody killed the tmux server
            tmux.start_session(folder.tmux_session, folder.path, window, window_argv)

    def has_agent(self, machine: str) -> bool:
        """Whether the agent of a machine is running: it holds a lock that the kernel releases when it dies."""
        return is_locked(self.run.folder.work_folder(machine) / AGENT_LOCK)

    def replace(self, machine: str) -> None:
        """Start the agent again. It joins as a new machine under the old name."""
        self._start_agent(machine, self.run.clock() - self.run.folder.launch_path.stat().st_mtime)

    def kill_agent(self, machine: str) -> None:
        """Kill the agent. The processes that it started end with it."""
        if not self._signal_agent(machine, signal.SIGKILL):
            raise ClusterError(f"machine {machine} of {self.run.spec.name} is just starting; try again in a moment")

    def _signal_agent(self, machine: str, signal_number: signal.Signals) -> bool:
        """Send a signal to the agent of a machine. Returns whether there is one."""
        pid = lock_holder(self.run.folder.work_folder(machine) / AGENT_LOCK)
        with contextlib.suppress(ProcessLookupError):
            if pid:
                os.kill(pid, signal_number)
        return pid is not None

    def terminate(self) -> list[str]:
        """Ask the agents to save and end, and end the tmux session. The processes of the agents end with them."""
        for machine in self.run.spec.machine_names:
            self._signal_agent(machine, signal.SIGTERM)
        tmux.kill_session(self.run.folder.tmux_session, self.run.folder.path)
        return []

    def attach_command(self, machine: str) -> list[str]:
        """Return the command that shows the job's tmux session, at the machine's trainer or agent if it has one."""
        name, folder = self.run.spec.name, self.run.folder
        if not tmux.is_owned_by(folder.tmux_session, folder.path):
            raise ClusterError(f"{name} has no tmux session; see: imgnet-cluster status {self.run.handle}")
        window_names = tmux.window_names(folder.tmux_session)
        own_windows = [window for window in (f"train-{machine}", f"agent-{machine}") if window in window_names]
        return tmux.attach_argv(folder.tmux_session, own_windows[0] if own_windows else "")


def check_disk_space(checkpoint_size: int, runs_folder: Path) -> None:
    """Raise `ClusterError` when the disk of the runs folder has too little space for checkpoints (bytes) and logs."""
    folder = next(path for path in [runs_folder, *runs_folder.parents] if path.is_dir())
    free_bytes = shutil.disk_usage(folder).free
    needed_bytes = CHECKPOINTS_ON_DISK * checkpoint_size + LOGS_BYTES
    if free_bytes < needed_bytes:
        raise ClusterError(
            f"{folder}: the disk has {free_bytes / 1e6:.0f} MB free; the run needs {needed_bytes / 1e6:.0f} MB for "
            "checkpoints and logs; free some space there, or set IMGNET_RUNS to a folder on another disk"
        )
