"""A Slurm cluster on this computer for tests: munged, slurmctld and one slurmd for each node.

It needs no systemd, no cgroups and no root: all daemons run as the current user, who can then run jobs of his own. The
nodes have more processors than this computer, because Slurm need not know. A node can lose its power and boot again.
When a cluster is closed, none of its processes is left.
"""

import contextlib
import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.ssh_machines import MARK_VARIABLE, command_line, marked_pids, process_table, send_signal
from support.waiting import wait_for

from train.tools.process import descendant_pids, free_port, start_process

HOSTNAME = socket.gethostname().partition(".")[0]
SEARCH_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/usr/local/sbin"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo")
WAIT_SECONDS = 60.0  # for what takes a second on a computer with nothing else to do

SLURM_CONF = """\
ClusterName=rehearsal
SlurmctldHost={hostname}({address})
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={munge_socket}
StateSaveLocation={folder}/controller
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/%n/spool
SlurmdPidFile={folder}/%n/slurmd.pid
SlurmdLogFile={folder}/%n/slurmd.log
SlurmctldDebug=verbose
SlurmdDebug=verbose
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
SlurmdTimeout=4
KillWait=5
MinJobAge=600
MessageTimeout=5
ReturnToService=2
PropagateResourceLimits=NONE
NodeName=DEFAULT CPUs=8 RealMemory=100000 State=UNKNOWN
{node_lines}
PartitionName=main Nodes=ALL MaxTime=INFINITE State=UP OverSubscribe=NO Default=YES
"""


class SlurmNode:
    """One node of a cluster: a slurmd and what it started."""

    def __init__(self, cluster: "SlurmCluster", name: str) -> None:
        self.cluster = cluster
        self.name = name
        self.folder = cluster.folder / name
        (self.folder / "spool").mkdir(parents=True)
        self._holder: subprocess.Popen[bytes] | None = None

    def boot(self) -> None:
        slurmd = ["slurmd", "-D", "-N", self.name, "-f", str(self.cluster.config_path)]
        holder = [sys.executable, str(Path(__file__).with_name("slurm_node.py"))]
        self._holder = self.cluster.start_daemon(self.folder / "output.log", [*holder, *slurmd])

    def pids(self) -> list[int]:
        """Return the processes of the node, slurmd and slurmstepd too, without the tool that holds them all."""
        return sorted(descendant_pids(self._holder.pid)) if self._holder else []

    def power_off(self) -> None:
        """Kill slurmd and everything that it started at once, as a power cut does."""
        if self._holder is None:
            return

        def is_off() -> bool:
            pids = self.pids()
            send_signal(pids, signal.SIGSTOP)
            if self.pids() == pids:  # children first: the kernel wakes stopped processes whose parent has ended
                send_signal(pids[::-1], signal.SIGKILL)
            return not process_table().keys() & {*self.pids()}

        wait_for(is_off, WAIT_SECONDS, describe=lambda: f"{self.name} is off")
        self._holder.terminate()
        self._holder.wait()
        self._holder = None


class SlurmCluster:
    """A cluster of four nodes, node0 to node3, which are idle when the constructor returns.

    `env` is the environment that Slurm's commands need.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.folder.mkdir(parents=True)
        self.sockets = Path(tempfile.mkdtemp(prefix="imgslurm-", dir="/tmp"))  # a socket path is short: 107 characters
        self.config_path = self.folder / "slurm.conf"
        self.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))},
            "PATH": SEARCH_PATH,
            "SLURM_CONF": str(self.config_path),
            MARK_VARIABLE: str(self.folder),
        }
        self._daemons: list[subprocess.Popen[bytes]] = []
        ports: set[int] = set()
        while len(ports) < 5:
            ports.add(free_port())
        controller_port, *node_ports = ports
        self.nodes = [SlurmNode(self, f"node{number}") for number in range(4)]
        (self.folder / "controller").mkdir()
        try:  # the address of this computer's name, the only one on which slurmd then listens: mostly a loopback one
            address = socket.gethostbyname(HOSTNAME)
        except OSError:
            address = "127.0.0.1"
        node_lines = [
            f"NodeName={node.name} NodeHostname={HOSTNAME} NodeAddr={address} Port={port}"
            for node, port in zip(self.nodes, node_ports, strict=True)
        ]
        values = {"hostname": HOSTNAME, "address": address, "controller_port": controller_port, "user": _user_name()}
        paths = {"folder": self.folder, "munge_socket": self.sockets / "munge"}
        self.config_path.write_text(SLURM_CONF.format(**values, **paths, node_lines="\n".join(node_lines)))
        try:
            self._start_munged()
            argv = ["slurmctld", "-D", "-f", str(self.config_path)]
            self._daemons.append(self.start_daemon(self.folder / "slurmctld-output.log", argv))
            for node in self.nodes:
                node.boot()
            self.wait_for(
                lambda: self.run("sinfo", "--noheader", "--Node", "--format=%t", check=False).split() == ["idle"] * 4
            )
        except BaseException:
            self.close()
            raise

    # --- daemons ---------------------------------------------------------------------------------------------------

    def start_daemon(self, log_path: Path, argv: list[str]) -> "subprocess.Popen[bytes]":
        """Start a daemon that stays in the foreground. A test run that is killed leaves none."""
        return start_process(argv, log_path, self.env, without=os.environ.keys() - self.env.keys())

    def _start_munged(self) -> None:
        """Start munged, by which Slurm's programs know each other's user, with a key and a socket of its own."""
        key = self.sockets / "munge.key"
        key.write_bytes(random.randbytes(128))
        key.chmod(0o600)
        self.sockets.chmod(0o711)
        paths = {"socket": "munge", "key-file": key.name, "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{name}={self.sockets / path}" for name, path in paths.items()]
        argv = ["munged", "--foreground", "--force", *options]
        self._daemons.append(self.start_daemon(self.folder / "munged.log", argv))
        self.wait_for((self.sockets / "munge").exists)

    def run(self, *argv: str, check: bool = True) -> str:
        """Run a command of Slurm and return what it prints. Raises `AssertionError` when it fails and `check`."""
        ended = subprocess.run(
            argv, capture_output=True, text=True, env=self.env, cwd=self.folder, timeout=WAIT_SECONDS
        )
        assert not check or ended.returncode == 0, f"{shlex.join(argv)}: {ended.stdout}{ended.stderr}"
        return ended.stdout

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Wait until a condition is true. The message of the `WaitTimeout` has queue, nodes and the daemons' logs."""
        wait_for(condition, WAIT_SECONDS, describe=self.describe, poll_seconds=0.1)

    def describe(self) -> str:
        parts = [self.run(command, check=False) for command in ("squeue", "sinfo")]
        for path in sorted(self.folder.rglob("*.log")):
            lines = path.read_text(errors="replace").splitlines()[-15:]
            parts.append("\n".join([f"--- {path.relative_to(self.folder)}", *lines]))
        return "\n".join(parts)

    # --- the end ---------------------------------------------------------------------------------------------------

    def job_pids(self) -> list[int]:
        """Return the processes on the nodes, except for slurmd."""
        slurmd = "-D -N node"
        return [pid for node in self.nodes for pid in node.pids() if slurmd not in command_line(pid)]

    def close(self) -> list[str]:
        """Cancel all jobs and kill everything. Returns the command lines of what has outlived its job's end."""
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            self.run("scancel", "--user", _user_name())
            wait_for(lambda: not self.job_pids(), 15.0)
        leaks = [command_line(pid) for pid in self.job_pids()]
        for node in self.nodes:
            node.power_off()
        for daemon in reversed(self._daemons):
            daemon.terminate()
            daemon.wait()
        own_pids = lambda: marked_pids(str(self.folder), process_table())  # noqa: E731
        leaks += [line for pid in own_pids() if (line := command_line(pid))]
        send_signal(sorted(own_pids()), signal.SIGKILL)
        wait_for(lambda: not own_pids(), WAIT_SECONDS)
        shutil.rmtree(self.sockets, ignore_errors=True)
        return leaks


def _user_name() -> str:
    return subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A cluster of four idle nodes. It ends with the test, which fails on a leak."""
    if missing := [program for program in PROGRAMS if not shutil.which(program, path=SEARCH_PATH)]:
        pytest.skip(f"slurm is not installed: {', '.join(missing)} missing; make rehearse installs it where apt may")
    cluster = SlurmCluster(tmp_path_factory.mktemp("slurm") / "cluster")
    yield cluster
    leaks = cluster.close()
    assert not leaks, f"still running on the cluster: {leaks}"
