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
from typing import Self

import pytest
from support.ssh_machines import MARK_VARIABLE, command_line, marked_pids, process_table, send_signal
from support.waiting import wait_for

from train.tools.process import descendant_pids, die_with_parent, free_port

HOSTNAME = socket.gethostname().partition(".")[0]
SEARCH_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/usr/local/sbin"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo")
SLURMD_TIMEOUT_SECONDS = 4  # a node that is silent for this time is down
KILL_WAIT_SECONDS = 5  # from SIGTERM to SIGKILL, when a job is cancelled or has reached its time limit
ENDED_STATES = ("CANCELLED", "COMPLETED", "FAILED", "NODE_FAIL", "PREEMPTED", "TIMEOUT")
WAIT_SECONDS = 60.0  # for what takes a second on a computer with nothing else to do
COMMAND_TIMEOUT_SECONDS = 60.0

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
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
SlurmdParameters=config_overrides
SlurmdTimeout={slurmd_timeout}
KillWait={kill_wait}
MinJobAge=600
MessageTimeout=5
ReturnToService=2
PropagateResourceLimits=NONE
NodeName=DEFAULT CPUs={cpus} RealMemory=100000 State=UNKNOWN
{node_lines}
PartitionName=DEFAULT Nodes=ALL MaxTime=INFINITE State=UP OverSubscribe=NO
PartitionName=main Default=YES PriorityTier=1 PreemptMode=CANCEL GraceTime={grace_seconds}
PartitionName=requeued PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace_seconds}
PartitionName=urgent PriorityTier=10 PreemptMode=OFF
"""


def why_unavailable() -> str:
    """Return why there can be no Slurm cluster on this computer, "" when there can."""
    missing = [program for program in PROGRAMS if not shutil.which(program, path=SEARCH_PATH)]
    if not missing:
        return ""
    return (
        f"slurm is not installed: {', '.join(missing)} missing; "
        "install it: sudo apt-get install slurmctld slurmd slurm-client munge (Debian, Ubuntu)"
    )


class SlurmNode:
    """One node of a cluster: a slurmd and what it started."""

    def __init__(self, cluster: "SlurmCluster", name: str, port: int) -> None:
        self.cluster = cluster
        self.name = name
        self.port = port
        self.folder = cluster.folder / name
        (self.folder / "spool").mkdir(parents=True)
        self._holder: subprocess.Popen[bytes] | None = None

    @property
    def config_line(self) -> str:
        """The node's line of slurm.conf."""
        return f"NodeName={self.name} NodeHostname={HOSTNAME} NodeAddr={_own_address()} Port={self.port}"

    def boot(self) -> None:
        """Start slurmd, unless it runs."""
        if self._holder and self._holder.poll() is None:
            return
        slurmd = [_program("slurmd"), "-D", "-N", self.name, "-f", str(self.cluster.config_path)]
        holder = [sys.executable, str(Path(__file__).with_name("slurm_node.py"))]
        self._holder = self.cluster.start_daemon(self.folder / "output.log", [*holder, *slurmd])

    def pids(self, *words: str) -> list[int]:
        """Return the processes of the node, slurmd and slurmstepd too; with `words`, those whose command line has them.

        The node's own tool that holds them all is not among them.
        """
        pids = descendant_pids(self._holder.pid) if self._holder else []
        return sorted(pid for pid in pids if all(word in command_line(pid) for word in words))

    def power_off(self) -> None:
        """Kill slurmd and everything that it started at once, as a power cut does."""
        if self._holder is None:
            return

        def is_off() -> bool:
            pids = self.pids()
            send_signal(pids, signal.SIGSTOP)
            if self.pids() == pids:  # children first: the kernel wakes stopped processes whose parent has ended
                send_signal(pids[::-1], signal.SIGKILL)
            return not any(pid in process_table() for pid in self.pids())

        wait_for(is_off, WAIT_SECONDS, describe=lambda: f"{self.name} is off")
        self._holder.terminate()
        self._holder.wait()
        self._holder = None


class SlurmCluster:
    """A cluster of `count` nodes, named node0, node1 ..., which are idle when the constructor returns.

    A job in partition `urgent` ends jobs of the partitions `main` and `requeued`, which get SIGTERM `grace_seconds`
    before SIGKILL. Slurm requeues those of `requeued`. `env` is the environment that Slurm's commands need.
    """

    def __init__(self, folder: Path, count: int, *, cpus: int = 8, grace_seconds: int = 5) -> None:
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
        while len(ports) < 1 + count:
            ports.add(free_port())
        controller_port, *node_ports = ports
        self.nodes = [SlurmNode(self, f"node{number}", port) for number, port in enumerate(node_ports)]
        (self.folder / "controller").mkdir()
        self.config_path.write_text(
            SLURM_CONF.format(
                hostname=HOSTNAME,
                address=_own_address(),
                controller_port=controller_port,
                user=_user_name(),
                munge_socket=self.sockets / "munge",
                folder=self.folder,
                slurmd_timeout=SLURMD_TIMEOUT_SECONDS,
                kill_wait=KILL_WAIT_SECONDS,
                cpus=cpus,
                grace_seconds=grace_seconds,
                node_lines="\n".join(node.config_line for node in self.nodes),
            )
        )
        try:
            self._start_munged()
            self.start_controller()
            for node in self.nodes:
                node.boot()
            self.wait_for(lambda: set(self.node_states().values()) == {"idle"})
        except BaseException:
            self.close(0)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        leaks = self.close()
        if leaks and not kind:
            raise AssertionError(f"still running on the cluster: {leaks}")

    # --- daemons ---------------------------------------------------------------------------------------------------

    def start_daemon(self, log_path: Path, argv: list[str]) -> "subprocess.Popen[bytes]":
        """Start a daemon that stays in the foreground. A test run that is killed leaves none."""
        with log_path.open("ab") as log:
            return subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.env,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def _start_munged(self) -> None:
        """Start munged, by which Slurm's programs know each other's user, with a key and a socket of its own."""
        key = self.sockets / "munge.key"
        key.write_bytes(random.randbytes(128))
        key.chmod(0o600)
        self.sockets.chmod(0o711)
        paths = {
            "socket": self.sockets / "munge", "key-file": key, "pid-file": self.sockets / "munge.pid",
            "log-file": self.sockets / "munge.log", "seed-file": self.sockets / "munge.seed",
        }  # fmt: skip
        options = [f"--{name}={path}" for name, path in paths.items()]
        argv = [_program("munged"), "--foreground", "--force", *options]
        self._daemons.append(self.start_daemon(self.folder / "munged.log", argv))
        self.wait_for((self.sockets / "munge").exists)

    def start_controller(self) -> None:
        """Start slurmctld and wait until it answers."""
        argv = [_program("slurmctld"), "-D", "-f", str(self.config_path)]
        self._daemons.append(self.start_daemon(self.folder / "slurmctld-output.log", argv))
        self.wait_for(lambda: self.run("scontrol", "ping", check=False).returncode == 0)

    def stop_controller(self) -> None:
        """End slurmctld: jobs go on, and no command of Slurm gets an answer."""
        controller = self._daemons.pop()
        controller.terminate()
        controller.wait()

    # --- commands --------------------------------------------------------------------------------------------------

    def run(self, *argv: str, check: bool = True, input: str = "") -> "subprocess.CompletedProcess[str]":
        """Run a command of Slurm to its end. Raises `AssertionError` with its output when it fails and `check`."""
        completed = subprocess.run(
            argv, input=input, capture_output=True, text=True, env=self.env, timeout=COMMAND_TIMEOUT_SECONDS
        )
        assert not check or completed.returncode == 0, f"{shlex.join(argv)}: {completed.stdout}{completed.stderr}"
        return completed

    def sbatch(self, script: str, *options: str) -> str:
        """Submit a batch script (its lines after the first) and return the job's id."""
        output = self.folder / "job-%j.log"
        argv = ["sbatch", "--parsable", f"--output={output}", *options]
        return self.run(*argv, input=f"#!/bin/bash\n{script}\n").stdout.strip()

    def output(self, job_id: str) -> str:
        """Return what the batch script of a job and its steps have printed so far."""
        path = self.folder / f"job-{job_id}.log"
        return path.read_text() if path.exists() else ""

    def job_state(self, job_id: str) -> str:
        """Return the state of a job, such as "RUNNING"."""
        return self.run("squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={job_id}").stdout.strip()

    def job_fields(self, job_id: str) -> dict[str, str]:
        """Return what `scontrol show job` knows of a job, by field."""
        words = self.run("scontrol", "--oneliner", "show", "job", job_id).stdout.split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def node_states(self) -> dict[str, str]:
        """Return the states of the nodes by name, such as "idle" and "down*"."""
        lines = self.run("sinfo", "--noheader", "--Node", "--partition=main", "--format=%N %t", check=False).stdout
        return dict(line.split() for line in lines.splitlines())

    # --- waiting ---------------------------------------------------------------------------------------------------

    def wait_for(self, condition: Callable[[], object], seconds: float = WAIT_SECONDS) -> None:
        """Wait until a condition is true. The message of the `WaitTimeout` has queue, nodes and the daemons' logs."""
        wait_for(condition, seconds, describe=self.describe, poll_seconds=0.1)

    def wait_for_end(self, job_id: str, seconds: float = WAIT_SECONDS) -> str:
        """Wait until a job has ended, and return its last state."""
        self.wait_for(lambda: self.job_state(job_id) in ENDED_STATES, seconds)
        return self.job_state(job_id)

    def describe(self) -> str:
        """Return queue, nodes, and the last lines of all logs."""
        parts = [self.run(command, check=False).stdout for command in ("squeue", "sinfo")]
        for path in sorted(self.folder.rglob("*.log")):
            lines = path.read_text(errors="replace").splitlines()[-15:]
            parts.append("\n".join([f"--- {path.relative_to(self.folder)}", *lines]))
        return "\n".join(parts)

    # --- the end ---------------------------------------------------------------------------------------------------

    def job_pids(self) -> list[int]:
        """Return the processes on the nodes, except for slurmd."""
        slurmd = "-D -N node"
        return [pid for node in self.nodes for pid in node.pids() if slurmd not in command_line(pid)]

    def close(self, grace_seconds: float = 5.0) -> list[str]:
        """Cancel all jobs and kill everything. Returns the command lines of what has outlived its job's end."""
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            if grace_seconds:
                self.run("scancel", "--user", _user_name())
                wait_for(lambda: not self.job_pids(), 2 * KILL_WAIT_SECONDS + grace_seconds)
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


def _program(name: str) -> str:
    path = shutil.which(name, path=SEARCH_PATH)
    assert path, f"{name} is not installed"
    return path


def _user_name() -> str:
    return subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()


def _own_address() -> str:
    """Return the address of this computer's name, the only one on which slurmd then listens: mostly a loopback one."""
    try:
        return socket.gethostbyname(HOSTNAME)
    except OSError:
        return "127.0.0.1"


@pytest.fixture
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., SlurmCluster]]:
    """Make clusters: `slurm(3)` has three idle nodes. They end with the test, which fails on a leak."""
    if reason := why_unavailable():
        pytest.skip(reason)
    clusters: list[SlurmCluster] = []

    def make(count: int, **options: int) -> SlurmCluster:
        clusters.append(SlurmCluster(tmp_path_factory.mktemp("slurm") / "cluster", count, **options))
        return clusters[-1]

    yield make
    leaks = [line for cluster in clusters for line in cluster.close()]
    assert not leaks, f"still running on the cluster: {leaks}"
