"""Backends whose machines share the run folder with this computer, so that no file has to be copied to or from them."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from cluster.connectors import log_sync, tmux
from cluster.connectors.local import module_command
from cluster.errors import ClusterError
from cluster.machines import trained_files
from cluster.state.run_folder import REHEARSED_NOTICE, RunFolder
from train.tools import files
from train.tools.process_log import Progress, no_progress
from train.tools.text_files import to_json_bytes

from .base import Backend


class SharedFolderBackend(Backend):
    """A backend of agents that write straight into the run folder. The supervisor runs on this computer."""

    # Whether agents are on this computer, where they open the job's tmux session again after somebody killed it.
    agents_open_session: ClassVar[bool] = False

    @abstractmethod
    def has_agent(self, machine: str) -> bool:
        """Whether the agent of a machine is running, or may be."""

    @abstractmethod
    def kill_agent(self, machine: str) -> None:
        """Kill the agent of a machine with everything that it started. Raises `ClusterError`."""

    def poll(self) -> bool:
        """Copy new log lines and the network of a finished run to the run folder, and restart a killed supervisor."""
        spec, folder = self.run.spec, self.run.folder
        is_running = self.agents_alive()  # before the copy: everything that a dead agent wrote is then copied
        log_sync.pull_logs(folder.shared, folder.path)
        if not is_running and trained_files.has_final_files(spec, folder):
            self.fetch_network()
        # Without a supervisor, lost machines of a job with several would never be replaced, and nobody would be told.
        needs_supervisor = len(spec.machine_names) > 1 or bool(spec.notify)
        if is_running and needs_supervisor and not self.is_supervised():
            if tmux.is_owned_by(folder.tmux_session, folder.path):
                tmux.add_window(folder.tmux_session, "supervisor", self.supervisor_argv())
            elif not self.agents_open_session:
                self.start_session()
        return is_running

    def fetch_network(self, progress: Progress = no_progress) -> None:
        """Give the files of a finished run's network their names in the run folder, which is on the same disk."""
        trained_files.link_network(self.run.folder.shared, self.run.folder.path)

    def agents_alive(self) -> bool:
        """Whether an agent is running."""
        return any(self.has_agent(machine) for machine in self.run.spec.machine_names)

    def dead_machines(self) -> list[str]:
        """Return the machines whose agent is not running."""
        return [machine for machine in self.run.spec.machine_names if not self.has_agent(machine)]

    def kill_machine(self, machine: str, notice_seconds: float | None) -> None:
        """Kill the agent with all processes that it started, or give it notice first."""
        name = self.run.spec.name
        if not self.has_agent(machine):
            hint = f"see: imgnet-cluster status {self.run.handle}"
            raise ClusterError(f"machine {machine} of {name} has no running agent; {hint}")
        if notice_seconds is None:
            self.kill_agent(machine)
        else:
            give_notice(self.run.folder, machine, REHEARSED_NOTICE, notice_seconds)


def give_notice(folder: RunFolder, machine: str, reason: str, seconds: float) -> None:
    """Tell the agent of a machine that its machine will be gone in `seconds`, and why."""
    notice = {"reason": reason, "seconds": seconds}
    files.write_atomic(folder.work_folder(machine) / "notice", to_json_bytes(notice))


def agent_argv(
    folder: RunFolder, machine: str, elapsed_seconds: float, environment: Mapping[str, str] | None = None
) -> list[str]:
    """Return the command that starts the agent of a machine; its time limit counts from `elapsed_seconds` ago."""
    arguments = [str(folder.shared), str(folder.work_folder(machine)), machine, "--elapsed", f"{elapsed_seconds:.0f}"]
    arguments += ["--user-project", str(folder.user_project)]
    return module_command("cluster.agent", *arguments, environment=environment)
