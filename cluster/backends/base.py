"""The interface of a backend, the source of a job's machines.

Callers ask for a capability, such as `is_billed`, never for a backend's name.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from cluster.connectors import tmux
from cluster.connectors.local import module_command
from cluster.errors import ClusterError
from cluster.machines.host_check import HostReport
from cluster.state.run_folder import SUPERVISOR_LOCK, Run
from cluster.state.spec import JobSpec
from infra.costs import JobCost
from train.tools.files import is_locked
from train.tools.process_log import Progress, no_progress

from .backend_options import BackendOptions
from .planner import ElsewherePlanner, MachinePlanner
from .rentals import RentalLimit, RentedNow


class Backend(ABC):
    """The source of a job's machines. An object belongs to one run and to one process.

    Class methods answer what is needed before a run exists.
    """

    name: ClassVar[str]  # as it is registered, and as job.json has it
    description: ClassVar[str]  # one line: where the machines are
    # True if the machines are reached over a network. Then only the supervisor talks to them, and all other commands
    # read the files that it has copied to the local run folder.
    is_remote: ClassVar[bool] = False
    is_billed: ClassVar[bool] = False  # its machines cost money while they exist
    options: ClassVar[type[BackendOptions]] = BackendOptions
    planner_class: ClassVar[type[MachinePlanner]] = ElsewherePlanner

    def __init__(self, run: Run) -> None:
        self.run = run

    # --- before a run exists ------------------------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def check(cls, spec: JobSpec, runs_folder: Path) -> None:
        """Check that a job can start here.

        Raises `ClusterError` when a program, a folder or disk space is missing, and its subclass `BadInput` when an
        option has to change.
        """

    @classmethod
    def check_machines(cls, spec: JobSpec) -> Sequence[HostReport]:
        """Check the machines of a job as a launch would; return a report for each, none where they do not exist yet."""
        return ()

    # --- the life of a job --------------------------------------------------------------------------------------------

    @abstractmethod
    def launch(self) -> None:
        """Start the supervisor, the agents and what they need. What already runs is left alone."""

    @abstractmethod
    def poll(self) -> bool:
        """Do one round of the supervisor's work: copy new files to the run folder and handle changes of the machines.

        Returns whether an agent is at work, or may be. Raises `OSError` when the local disk is full, `ClusterError`
        when the job cannot start.
        """

    def is_supervised(self) -> bool:
        """Whether a supervisor of this run is at work on this computer."""
        return is_locked(self.run.folder.path / SUPERVISOR_LOCK)

    def check_access(self, ask_cloud: bool = False) -> None:
        """Raise `NoCredentials` when a supervisor that this process starts could not use the source of the machines.

        Without `ask_cloud`, nothing is sent: the credentials are only looked for.
        """
        return

    def access_error(self) -> str:
        """Return why the source of the machines refuses this supervisor at present, while the job goes on; else ""."""
        return ""

    def replacement_error(self) -> str:
        """Return why a lost machine could not be replaced when that was tried last, else ""."""
        return ""

    def leader(self) -> str:
        """Return which other computer has launched the job since, if agents of that launch are at work; else ""."""
        return ""

    @abstractmethod
    def agents_alive(self) -> bool:
        """Whether an agent is at work. Of machines elsewhere only the supervisor can tell; others say False."""

    @abstractmethod
    def dead_machines(self) -> list[str]:
        """Return the machines that certainly have no running agent. An unreachable machine is not among them."""

    @abstractmethod
    def replace(self, machine: str) -> None:
        """Start the agent of a lost machine again, or get another machine under the same name."""

    @abstractmethod
    def kill_machine(self, machine: str, notice_seconds: float | None) -> None:
        """Take a machine away to rehearse a failure.

        `notice_seconds` is the advance notice in seconds, as with a spot interruption; None acts like a power cut.
        Raises `ClusterError` when no agent is at work there.
        """

    @abstractmethod
    def terminate(self) -> list[str]:
        """End everything that belongs to the job at once. Idempotent. Returns the machines that did not answer."""

    def waits_for(self) -> str:
        """Return what the job waits for before its machines can start, such as its turn in a scheduler, else ""."""
        return ""

    def explain_end(self) -> str:
        """Return why the agents are gone when the source of the machines ended them, else ""."""
        return ""

    # --- access -------------------------------------------------------------------------------------------------------

    @property
    def detach_keys(self) -> str:
        """The keys that end `attach_command` without ending the job."""
        return tmux.detach_keys()

    @abstractmethod
    def attach_command(self, machine: str) -> list[str]:
        """Return the command that shows a machine's session on this terminal. Raises `ClusterError`."""

    def shell_command(self, machine: str, argv: Sequence[str] = (), tty: bool = True) -> list[str]:
        """Return the command that opens a shell on a machine, or runs `argv` there. Raises `ClusterError`."""
        raise ClusterError(f"{self.run.spec.name} runs on this computer; there is nothing to log in to")

    def download_checkpoint(self, progress: Progress) -> Path | None:
        """Copy the newest complete checkpoint from the machines to the run folder and return its path.

        None when the machines have none, or when their shared folder is on this computer. Raises `ClusterError` when no
        machine answers.
        """
        return None

    def fetch_network(self, progress: Progress = no_progress) -> None:
        """Bring the files of a finished run's network into the run folder, unless they are there."""
        return

    # --- cost ---------------------------------------------------------------------------------------------------------

    def job_cost(self, moment: float | None = None) -> JobCost:
        """Return what each machine has cost until `moment` (seconds since 1970; None: until now)."""
        return JobCost()

    def rented_now(self) -> RentedNow | None:
        """Return which machines the job rents now, None if none. Reads the run folder and does not ask the cloud."""
        return None

    def rental_limit(self, hours: float | None = None, dollars: float | None = None) -> RentalLimit:
        """Return the limit of this launch's machines, or what `extend_limits` would make of it, if `is_billed`."""
        raise NotImplementedError

    def extend_limits(self, hours: float | None, dollars: float | None) -> float | None:
        """Set the job's time limit in hours since the first machine of this launch, its price limit, or both.

        Only where `is_billed`. Returns the hours after which the machines end, which the price limit may shorten; None
        for a job that has ended, of which only the price limit can be set, for its next launch. Raises `BadInput` when
        the time or the money is already over, `ClusterError` with the machines on which the new limits could not be
        set.
        """
        raise NotImplementedError

    # --- for implementations ------------------------------------------------------------------------------------------

    def supervisor_argv(self) -> list[str]:
        """Return the command that runs the supervisor."""
        return module_command("cluster.jobs.supervisor", str(self.run.folder.path))

    def start_session(self) -> None:
        """Start the job's tmux session, with the supervisor in its first window."""
        folder = self.run.folder
        tmux.start_session(folder.tmux_session, folder.path, "supervisor", self.supervisor_argv())
