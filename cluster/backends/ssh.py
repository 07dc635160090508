"""Backend `ssh`: your own machines, those of a hosts.toml, over ssh."""

import contextlib
import logging
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from cluster.connectors import tmux
from cluster.connectors.hosts_file import read_hosts
from cluster.connectors.ssh import Unreachable
from cluster.connectors.ssh_config import require_openssh
from cluster.errors import BadInput, ClusterError
from cluster.machines.fleet import Fleet
from cluster.machines.host_check import HostCheck, HostReport
from cluster.machines.mirror import read_newer_launch
from cluster.machines.trained_files import has_final_files, run_in_time
from cluster.state.spec import JobSpec
from train.recipe.schedule import Schedule
from train.tools.files import write_atomic

from .backend_options import SshOptions
from .planner import ElsewherePlanner, MachineRequest, Plan, SourceAccess
from .remote import RemoteBackend

logger = logging.getLogger(__name__)

LOOK_SECONDS = 3.0  # for a machine to answer a command that only looks
LOOK_MACHINES = 3
FINAL_NETWORK_TIMEOUT_SECONDS = 1800.0  # for the trained network; 200 MB take so long over a link of 1 Mbit/s


class SshPlanner(ElsewherePlanner):
    """Plans a job on machines of a hosts file."""

    default_fetch_folder = None
    default_access = SourceAccess.OPTIONAL  # the machines may have access that this computer lacks

    def __init__(self, request: MachineRequest) -> None:
        """Raises `BadInput` when the hosts file is missing or wrong."""
        super().__init__(request)
        assert isinstance(request.options, SshOptions)
        if request.resumed and request.resumed.run.spec.hosts:
            self.hosts = request.resumed.run.spec.hosts
            return
        if not request.options.hosts:
            raise BadInput("the backend ssh needs the hosts file of the machines: --ssh FILE")
        self.hosts = read_hosts(Path(request.options.hosts).expanduser())

    @property
    def machine_count(self) -> int:
        """All machines of the file without the spares, unless the user asks for fewer."""
        return self.request.machines or max(1, len(self.hosts.machines) - self.request.spares)

    def data_root(self, path: Path, is_synthetic: bool) -> Path:
        """Return the data folder on the machines.

        Raises `BadInput` for a relative path, except for the synthetic set, which is in the shared folder or ~/.imgnet.
        """
        if is_synthetic:
            return Path(self.hosts.shared or "~/.imgnet") / path
        if not path.is_absolute() and path.parts[0] != "~":
            raise BadInput(
                f"--data {path}: the images are on the machines; give their absolute path there, such as /data/imagenet"
            )
        return path

    def complete(self, spec: JobSpec, schedule: Schedule | None) -> Plan:
        """Add the machines to the specification."""
        return Plan(spec=replace(spec, hosts=self.hosts), schedule=schedule)


class SshBackend(RemoteBackend):
    """Machines that already run."""

    name = "ssh"
    description = "your own machines over ssh"
    options = SshOptions
    planner_class = SshPlanner

    @cached_property
    def fleet(self) -> Fleet:
        """This process's connections to the machines. They are opened once and reused."""
        return Fleet(self.run.spec, self.run.folder)

    @property
    def supervised_fleet(self) -> Fleet | None:
        """The supervisor's connections; None in other processes, and before they are open."""
        return vars(self).get("fleet")

    def open_fleet(self) -> Fleet:
        """Return this process's connections to the machines."""
        return self.fleet

    @classmethod
    def check(cls, spec: JobSpec, runs_folder: Path) -> None:
        """Check that tmux and ssh are installed here (`ClusterError`) and the hosts suffice (`BadInput`)."""
        tmux.require_tmux()
        require_openssh("ssh", "ssh-keygen")
        host_count = len(spec.host_list)
        needed = len(spec.machine_names)
        if host_count < needed:
            raise BadInput(
                f"the hosts file lists {host_count} machines, but the job needs {needed} (--machines plus --spares)"
            )

    @classmethod
    def check_machines(cls, spec: JobSpec) -> Sequence[HostReport]:
        """Check the machines of the hosts file as a launch would; return a report for each. Raises `ClusterError`."""
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            return HostCheck(spec, Path(folder)).run()

    def poll(self) -> bool:
        """Set up machines that are not ready yet, push a stop request, and copy new files to the run folder."""
        self.fleet.set_up_machines()
        self.fleet.join_machines()
        try:
            self.fleet.push_stop_request()
            self.fleet.pull_files()
            self._follow_newer_launch()
            if not self.fleet.agents_alive():
                if not self.fleet.pull_last_files() or self._follow_newer_launch(is_over=True):
                    return True
                self._fetch_final_network()
                return False
        except Unreachable as error:
            logger.warning("%s", error)
        return True

    def _follow_newer_launch(self, is_over: bool = False) -> bool:
        """If another computer has resumed the job since, follow its launch: nothing more comes of the one from here.

        Returns whether it has. Asks also before there is a status of that launch when all agents of this one have ended
        (`is_over`): those of the new one may be starting. Raises `Unreachable`.
        """
        try:
            launch_id, leader = self.fleet.mirror.newer_launch(is_over)
        except Unreachable:
            raise
        except ClusterError as error:
            logger.warning("%s", error)
            return False
        if launch_id:
            write_atomic(self.run.folder.launch_path, launch_id.encode())  # first: no supervisor may write the old one
            self.run.folder.stop_path.unlink(missing_ok=True)  # it was for the old one
            self.fleet.forget_stop_request()
            self.fleet.setup_progress.follow_launch(launch_id, leader)
            for connector in self.fleet.connectors.values():
                connector.launch = launch_id
            logger.info("%s", self.fleet.setup_progress.record.leader)
        return bool(launch_id)

    def leader(self) -> str:
        """Return which other computer has launched the job since, if a machine that answers has an agent; else ""."""
        with contextlib.closing(Fleet(self.run.spec, self.run.folder, reconnect_seconds=LOOK_SECONDS)) as fleet:
            for name, connector in [*fleet.connectors.items()][:LOOK_MACHINES]:
                with contextlib.suppress(ClusterError, KeyError):  # it does not answer, or was never set up
                    job_folder, own_id = fleet.provisioner.job_folder(name), self.run.folder.launch_id
                    launch_id, leader = read_newer_launch(connector, job_folder, own_id)
                    if not launch_id:
                        return ""
                    connector.launch = launch_id  # machines refuse commands of a launch that has ended
                    if fleet.has_agent(name):
                        return leader
        return ""

    def _fetch_final_network(self) -> None:
        """Download what a job has trained, within a time, for it has no result before. An error is logged."""
        if not has_final_files(self.run.spec, self.run.folder):
            return
        try:
            run_in_time(self.fetch_network, FINAL_NETWORK_TIMEOUT_SECONDS)
        except (ClusterError, OSError) as error:
            logger.warning("what was trained stays on the machines: %s", error)

    def dead_machines(self) -> list[str]:
        """Return the machines that answered that no agent is running there."""
        return self.fleet.dead_machines()

    def replace(self, machine: str) -> None:
        """Set the machine up again and start its agent, in the background."""
        self.fleet.restart_agent(machine)

    def kill_machine(self, machine: str, notice_seconds: float | None) -> None:
        """Kill the machine's agent with all processes that it started, or give it notice first."""
        self.fleet.kill_machine(machine, notice_seconds)

    def terminate(self) -> list[str]:
        """End the job's sessions on all machines that answer, and the local supervisor."""
        silent_machines = self.fleet.terminate()
        self.fleet.close()
        del self.fleet  # a later call connects anew
        tmux.kill_session(self.run.folder.tmux_session, self.run.folder.path)
        return silent_machines
