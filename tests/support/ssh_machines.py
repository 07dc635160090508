"""Machines for tests and benchmarks: a real OpenSSH sshd for each, on 127.1.0.N, with its own home, tmux and host key.

A machine can be powered off, frozen, booted again, and unplugged from the network. Whatever a login starts there has an
environment variable that names the machine, so that every process of it is found, whatever its parent. When a testbed
is closed, nothing but sshd may be running on its machines.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import pytest
from support.waiting import WaitTimeout, wait_for

from train.tools.process import die_with_parent, free_port

MARK_VARIABLE = "IMGNET_TESTBED"
WAIT_SECONDS = 20.0  # for what takes a tenth of a second on a computer with nothing else to do

SSHD_CONFIG = """\
Port {port}
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {keys}
PidFile none
UsePAM no
StrictModes no
UseDNS no
PrintMotd no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
Subsystem sftp internal-sftp
{extra_lines}SetEnv {variables}
"""


def wait_until(condition: Callable[[], Any], description: str, seconds: float = WAIT_SECONDS) -> None:
    """Wait for a condition. Raises `WaitTimeout`, which is a `TimeoutError`, after `seconds`."""
    wait_for(condition, seconds, describe=lambda: description, poll_seconds=0.01)


def process_table() -> dict[int, tuple[int, str, str]]:
    """Return parent, state and program name of every process that is not a zombie."""
    table = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                before, _, after = (entry / "stat").read_text().rpartition(")")
                state, parent_pid = after.split()[:2]
                if state not in "ZX":
                    table[int(entry.name)] = (int(parent_pid), state, before.partition("(")[2])
    return table


def send_signal(pids: Sequence[int], signal_number: int) -> None:
    """Send a signal to processes, of which some may have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal_number)


def command_line(pid: int) -> str:
    """Return the command line of a process, "" when it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def pids_with_variable(name: str, folder: str, table: Mapping[int, Any]) -> set[int]:
    """Return the processes, without our own, whose environment names this folder or one below it."""
    marked = set()
    variable = f"{name}={folder}".encode()
    for pid in table.keys() - {os.getpid()}:
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                if entry == variable or entry.startswith(variable + b"/"):
                    marked.add(pid)
    return marked


def marked_pids(folder: str, table: Mapping[int, Any]) -> set[int]:
    """Return the processes of a table with the mark of a machine: of this folder, or of one below it."""
    return pids_with_variable(MARK_VARIABLE, folder, table)


class TestMachine:
    """One machine of a testbed. `env` is the environment of a login there."""

    __test__ = False  # not a test class

    def __init__(self, bed: "Testbed", number: int, port: int) -> None:
        self.bed = bed
        self.number = number
        self.port = port
        self.address = f"127.1.0.{number + 1}"
        self.folder = bed.folder / str(number)
        self.home = self.folder / "home"
        self.home.mkdir(parents=True)
        tmux_folder = bed.sockets / str(number)
        tmux_folder.mkdir()
        login_variables = {
            **{"HOME": str(self.home), "TMUX_TMPDIR": str(tmux_folder)},
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
            MARK_VARIABLE: str(self.folder),
            **bed.env,
        }
        uninherited = ("TMUX", "PYTHONPATH", "SSH_AUTH_SOCK", "IMGNET_RUNS")
        inherited = {name: value for name, value in os.environ.items() if name not in uninherited}
        self.env = {**inherited, **login_variables}
        self._sshd: subprocess.Popen[bytes] | None = None
        generate_key(self.folder / "host_key")
        self.write_config(login_variables)

    def write_config(self, variables: Mapping[str, str], extra_lines: str = "") -> None:
        """Write sshd's configuration, which holds from the next boot. `extra_lines` are added to it."""
        self._variables = dict(variables)
        text = SSHD_CONFIG.format(
            port=self.port,
            address=self.address,
            folder=self.folder,
            keys=" ".join(map(str, self.key_files)),
            extra_lines=extra_lines,
            variables=" ".join(f'"{name}={value}"' for name, value in variables.items()),
        )
        (self.folder / "sshd_config").write_text(text)

    def configure(self, extra_lines: str) -> None:
        """Restart sshd with further lines of sshd_config(5)."""
        self.write_config(self._variables, extra_lines)
        self.unplug()
        self.plug()

    @property
    def key_files(self) -> list[Path]:
        """The files of the public keys that may log in."""
        return [self.bed.folder / "authorized_keys"]

    @property
    def host_key(self) -> str:
        """The public host key, as a known_hosts line has it: type and key."""
        return " ".join((self.folder / "host_key.pub").read_text().split()[:2])

    @property
    def log(self) -> str:
        return (self.folder / "sshd.log").read_text(errors="replace")

    # --- power -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start sshd, without waiting until it listens."""
        if self._sshd and self._sshd.poll() is None:
            return
        # A test run that is killed leaves no sshd. By parent the kernel means the thread, not the process.
        is_main_thread = threading.current_thread() is threading.main_thread()
        with (self.folder / "sshd.log").open("ab") as log:
            self._sshd = subprocess.Popen(
                [_sshd_path(), "-D", "-e", "-f", str(self.folder / "sshd_config")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**self.env, **self._variables},
                start_new_session=True,
                preexec_fn=die_with_parent if is_main_thread else None,
            )

    def listens(self) -> bool:
        """Return whether sshd listens. Raises `RuntimeError` when it has ended."""
        if self._sshd is None or self._sshd.poll() is not None:
            raise RuntimeError(f"sshd of machine {self.number} has ended: {self.log[-500:]}")
        with socket.socket() as connection:
            connection.settimeout(1)
            return connection.connect_ex((self.address, self.port)) == 0

    def boot(self) -> None:
        """Power the machine on: sshd listens again, with the same address and host key; nothing else runs."""
        self.start()
        wait_until(self.listens, f"sshd of machine {self.number} listens")

    plug = boot

    def power_off(self) -> None:
        """Kill everything on the machine at once, as a power cut does."""

        def is_off() -> bool:
            self._reap_sshd()
            send_signal(self.freeze(), signal.SIGKILL)
            self._reap_sshd()
            return not self.processes()

        wait_until(is_off, f"machine {self.number} is off")

    def unplug(self) -> None:
        """Kill sshd and its connections. Everything else on the machine keeps running."""

        def is_unplugged() -> bool:
            pids = [pid for pid in self.processes() if pid in self.sshd_pids()]
            send_signal(pids, signal.SIGSTOP)
            if set(pids) == self.sshd_pids():
                send_signal(pids, signal.SIGKILL)
            self._reap_sshd()
            return not self.sshd_pids()

        wait_until(is_unplugged, f"machine {self.number} is unplugged")

    def cut(self) -> int:
        """Kill the open connections, but not the sshd that accepts new ones. Returns how many processes they were."""
        listener_pid = self._sshd.pid if self._sshd else 0
        pids = [pid for pid in self.sshd_pids() if pid != listener_pid]
        send_signal(pids, signal.SIGKILL)
        return len(pids)

    def freeze(self) -> list[int]:
        """Stop everything on the machine: connections stay open, and nothing answers. Returns the processes."""
        stopped_pids: list[int] = []
        while (pids := self.processes()) != stopped_pids:  # a process may have had a child just now
            send_signal(pids, signal.SIGSTOP)
            stopped_pids = pids
        return pids

    def thaw(self) -> None:
        send_signal(self.processes(), signal.SIGCONT)

    def _reap_sshd(self) -> None:
        if self._sshd:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._sshd.wait(0.2 if self._sshd.pid not in process_table() else 0)

    # --- processes -------------------------------------------------------------------------------------------------

    def sshd_pids(self) -> set[int]:
        """Return sshd and the processes of its connections.

        They are found by descent: sshd writes its process title over its environment, and the mark with it.
        """
        table = process_table()
        pids = {self._sshd.pid} & table.keys() if self._sshd else set()
        while new := {pid for pid, (parent, _, name) in table.items() if parent in pids and name == "sshd"} - pids:
            pids |= new
        return pids

    def processes(self, *words: str) -> list[int]:
        """Return all processes on the machine, sshd too; with `words`, those whose command line contains them all."""
        table = process_table()
        pids = marked_pids(str(self.folder), table) | self.sshd_pids()
        while new := {pid for pid, (parent, _, _) in table.items() if parent in pids} - pids:
            pids |= new
        return sorted(pid for pid in pids if all(word in command_line(pid) for word in words))

    def leaked_pids(self) -> list[int]:
        return sorted({*self.processes()} - self.sshd_pids())


class Testbed:
    """`count` machines that listen, in a folder. `env` is added to the environment of every login."""

    __test__ = False  # not a test class

    def __init__(self, folder: Path, count: int, env: Mapping[str, str] | None = None) -> None:
        self.folder = folder.resolve()
        self.env = dict(env or {})
        self.sockets = Path(tempfile.mkdtemp(prefix="imgb-", dir="/tmp"))  # a socket's path has 107 characters at most
        self.shared = self.folder / "shared"
        self.shared.mkdir(parents=True)
        self.key = self.folder / "user_key"
        generate_key(self.key)
        self.authorize(self.key)
        port = free_port()
        self.machines = [TestMachine(self, number, port) for number in range(count)]
        try:
            for machine in self.machines:
                machine.start()
            for machine in self.machines:
                machine.boot()
        except BaseException:
            self.close(0)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        leaks = self.close()
        assert kind or not leaks, f"still running on the testbed: {leaks}"

    def authorize(self, key: Path) -> None:
        with (self.folder / "authorized_keys").open("a") as file:
            file.write(key.with_name(f"{key.name}.pub").read_text())

    def new_key(self, name: str, passphrase: str = "") -> Path:
        generate_key(self.folder / name, passphrase)
        return self.folder / name

    def known_hosts(self, path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [f"[{machine.address}]:{machine.port} {machine.host_key}\n" for machine in self.machines]
        path.write_text("".join(lines))
        return path

    def write_hosts_toml(self, path: Path, count: int | None = None, **extra: Any) -> Path:
        """Write a hosts file of the first `count` machines. `extra` adds keys for all machines; None removes a key."""
        user = Path("~").expanduser().owner() if os.geteuid() else "root"
        common = {"shared": str(self.shared), "user": user, "key": str(self.key), "python": sys.executable, **extra}
        text = _to_toml({key: value for key, value in common.items() if value is not None})
        for machine in self.machines[:count]:
            place = {"host": machine.address, "port": machine.port, "address": machine.address}
            own = {**place, "host_key": machine.host_key, "folder": f"{machine.home}/.imgnet"}
            text += "[[machines]]\n" + _to_toml(own)
        path.write_text(text)
        return path

    def leaks(self) -> list[str]:
        """Return the command lines of all processes on the machines except for sshd and its connections."""
        sshd_pids = {pid for machine in self.machines for pid in machine.sshd_pids()}
        pids = sorted(marked_pids(str(self.folder), process_table()) - sshd_pids)
        return [line for pid in pids if (line := command_line(pid))]

    def close(self, grace_seconds: float = 5.0) -> list[str]:
        """Kill everything. Returns the command lines of what still ran on the machines after `grace_seconds`."""
        machines = getattr(self, "machines", [])  # missing when the constructor failed
        for machine in machines:
            machine.thaw()
        with contextlib.suppress(WaitTimeout):
            wait_until(lambda: not self.leaks(), "nothing is left", grace_seconds)
        leaks = self.leaks()
        for machine in machines:
            machine.power_off()
        send_signal(sorted(marked_pids(str(self.folder), process_table())), signal.SIGKILL)
        wait_until(lambda: not marked_pids(str(self.folder), process_table()), "everything has ended")
        shutil.rmtree(self.sockets, ignore_errors=True)
        return leaks


def _to_toml(table: Mapping[str, Any]) -> str:
    """Return the lines of a table. Its texts are written as in JSON, as far as TOML writes them so too."""
    return "".join(f"{key} = {json.dumps(value, ensure_ascii=False, default=str)}\n" for key, value in table.items())


def generate_key(path: Path, passphrase: str = "") -> None:
    """Generate an ed25519 key pair: `path`, and `path`.pub."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-C", "", "-f", str(path)], check=True)


def _sshd_path() -> str:
    """Return the resolved path of sshd, by which it starts itself for each connection."""
    path = shutil.which("sshd", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/usr/local/sbin")
    assert path, "sshd is missing; install it: sudo apt-get install openssh-server"
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd changes its root to it before a login
    return str(Path(path).resolve())


@pytest.fixture
def testbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Testbed]]:
    """Make testbeds: `testbed(3)` is three machines that listen. They end with the test, which fails on a leak."""
    testbeds: list[Testbed] = []

    def make(count: int = 1, env: Mapping[str, str] | None = None) -> Testbed:
        testbeds.append(Testbed(tmp_path_factory.mktemp("testbed") / "bed", count, env))
        return testbeds[-1]

    yield make
    leaks = [line for bed in testbeds for line in bed.close()]
    assert not leaks, f"still running on the testbed: {leaks}"
