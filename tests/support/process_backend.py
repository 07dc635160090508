"""An example of a backend in a package of its own: each machine is a background process of this computer.

docs/adding-a-backend.md refers to it, and tests/cluster/backends/test_contract.py runs the contract tests on it.
"""

import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from cluster.backends.backend_options import BackendOptions
from cluster.backends.local import LocalBackend, LocalPlanner
from cluster.backends.shared_folder import SharedFolderBackend, agent_argv
from cluster.connectors import tmux
from cluster.errors import ClusterError
from cluster.state.spec import JobSpec
from train.tools.option_fields import option_field
from train.tools.records import decode


@dataclass(frozen=True, kw_only=True)
class ProcessOptions(BackendOptions):
    """How the processes run."""

    machines_title: ClassVar[str] = "background processes"

    on_process: bool | None = option_field(
        None, "--process", group="Machines", is_fixed=True, help="Train in background processes, one per machine."
    )
    nice: int | None = option_field(
        None, metavar="N", group="Process", minimum=0, maximum=19, help="Niceness of the processes."
    )


class ProcessBackend(SharedFolderBackend):
    """Background processes of this computer as the job's machines."""

    name = "process"
    description = "background processes on this computer"
    options = ProcessOptions
    planner_class = LocalPlanner

    @classmethod
    def check(cls, spec: JobSpec, runs_folder: Path) -> None:
        """Check what the backend local checks: tmux, requirements, images, disk space."""
        LocalBackend.check(spec, runs_folder)

    def launch(self) -> None:
        """Start the supervisor in tmux, and the agents that are not running."""
        if not self.is_supervised():  # `start_session` ends the session that is there
            self.start_session()
        for machine in self.run.spec.machine_names:
            self._start_agent(machine)

    def _start_agent(self, machine: str, elapsed_seconds: float = 0.0) -> None:
        if self.has_agent(machine):
            return
        folder, work = self.run.folder, self.run.folder.work_folder(machine)
        work.mkdir(parents=True, exist_ok=True)
        settings = decode(ProcessOptions, self.run.spec.backend_options or {}, "backend_options")
        with (work / "agent.out").open("ab") as output:
            process = subprocess.Popen(
                ["nice", "-n", str(settings.nice or 0), *agent_argv(folder, machine, elapsed_seconds)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._pid_path(machine).write_text(str(process.pid))

    def _pid_path(self, machine: str) -> Path:
        return self.run.folder.work_folder(machine) / "agent.pid"

    def _pid(self, machine: str) -> int | None:
        """Return the pid of the machine's agent, None if there is none. A zombie has no command line."""
        try:
            pid = int(self._pid_path(machine).read_text())
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except (OSError, ValueError):
            return None
        return pid if str(self.run.folder.work_folder(machine)).encode() in command else None

    def has_agent(self, machine: str) -> bool:
        """Whether the process in the pid file is the machine's agent."""
        return self._pid(machine) is not None

    def kill_agent(self, machine: str) -> None:
        """Kill the agent's process group."""
        pid = self._pid(machine)
        if pid is None:
            raise ClusterError(f"machine {machine} of {self.run.spec.name} has no running agent")
        os.killpg(pid, signal.SIGKILL)

    def replace(self, machine: str) -> None:
        """Start the agent again."""
        folder = self.run.folder
        self._start_agent(machine, self.run.clock() - folder.launch_path.stat().st_mtime)

    def terminate(self) -> list[str]:
        """End the supervisor's session and kill the agents."""
        tmux.kill_session(self.run.folder.tmux_session, self.run.folder.path)
        for machine in self.run.spec.machine_names:
            if self.has_agent(machine):
                self.kill_agent(machine)
        return []

    def attach_command(self, machine: str) -> list[str]:
        """Return the command that shows the job's tmux session."""
        spec = self.run.spec
        session = self.run.folder.tmux_session
        if not tmux.is_owned_by(session, self.run.folder.path):
            raise ClusterError(f"{spec.name} has no tmux session; see: imgnet-cluster status {spec.name}")
        windows = [name for name in [f"train-{machine}"] if name in tmux.window_names(session)]
        return tmux.attach_argv(session, windows[0] if windows else "")
