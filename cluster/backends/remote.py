"""Backends whose machines are reached over ssh. Only the supervisor talks to them."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from cluster.connectors import tmux
from cluster.connectors.ssh import SSHConnector
from cluster.connectors.ssh_config import openssh_argv
from cluster.errors import ClusterError
from cluster.machines import trained_files
from cluster.machines.fleet import Fleet
from train.tools.process_log import Progress, no_progress

from .base import Backend

AnswerT = TypeVar("AnswerT")


class RemoteBackend(Backend):
    """A backend of machines that the supervisor reaches over ssh, and whose small files it copies to the run folder."""

    is_remote = True

    @abstractmethod
    def open_fleet(self) -> Fleet:
        """Return connections to the machines, for one command. Raises `ClusterError` when there are no machines yet."""

    @property
    @abstractmethod
    def supervised_fleet(self) -> Fleet | None:
        """The supervisor's connections; None in other processes, and before they are open."""

    def agents_alive(self) -> bool:
        """Whether an agent is at work. Only the supervisor, which has the connections open, can tell."""
        fleet = self.supervised_fleet
        return fleet is not None and fleet.agents_alive()

    def explain_end(self) -> str:
        """Return why nothing is known about the job when its machines broke the rules, else ""."""
        fleet = self.supervised_fleet
        return fleet.explain_end() if fleet else ""

    def launch(self) -> None:
        """Start the supervisor in the job's tmux session. The supervisor does all the rest."""
        if not self.is_supervised():  # `start_session` first ends a leftover session of a supervisor that died
            self.start_session()

    def attach_command(self, machine: str) -> list[str]:
        """Return the OpenSSH command that attaches to the job's session on a machine."""
        return self.shell_command(machine, tmux.attach_argv(self.run.spec.tmux_session))

    def shell_command(self, machine: str, argv: Sequence[str] = (), tty: bool = True) -> list[str]:
        """Return the OpenSSH command for a machine, with the job's own configuration file."""
        config = self.run.folder.path / "ssh_config"
        if not config.exists():
            name = self.run.spec.name
            raise ClusterError(f"{name} has no machines to log in to yet; see: imgnet-cluster status {self.run.handle}")
        return openssh_argv(config, int(machine), argv, tty)

    def download_checkpoint(self, progress: Progress) -> Path | None:
        """Copy the newest complete checkpoint, of a command its checkpoint folder, from the first that answers."""
        download = trained_files.download_version if self.run.spec.own_command else trained_files.download_checkpoint
        return self._ask_machines(
            lambda machine, job_folder: download(machine, job_folder, self.run.folder.shared, progress)
        )

    def fetch_network(self, progress: Progress = no_progress) -> None:
        """Copy the network, or the checkpoints of a command, from the first machine that answers."""
        spec, home = self.run.spec, self.run.folder
        self._ask_machines(
            lambda machine, job_folder: trained_files.download_final_files(spec, machine, job_folder, home, progress)
        )

    def _ask_machines(self, ask: Callable[[SSHConnector, str], AnswerT]) -> AnswerT:
        """Return what the first machine says that answers. Raises the `ClusterError` of the last one when none does."""
        fleet = self.supervised_fleet or self.open_fleet()
        last_error = ClusterError("no machine is known yet")
        for name, connector in fleet.connectors.items():
            try:
                return ask(connector, fleet.provisioner.job_folder(name))
            except KeyError:  # the machine was never set up
                continue
            except ClusterError as error:
                last_error = error
        raise last_error
