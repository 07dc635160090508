"""Machines of one's own for tests and benchmarks: a real OpenSSH sshd for each, on 127.1.0.N, with a home, a tmux and a
host key of its own.

A machine can be powered off, frozen, booted again and unplugged. What a login starts there carries an environment
variable that names the machine, so that everything on it is found, whatever its parent. At the end nothing may be left.
"""

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import pytest

from train.tools.process import die_with_parent

MARK = "IMGNET_TESTBED"
SECONDS = 20.0  # for what takes a tenth of a second on a quiet computer

SSHD = """\
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
{more}SetEnv {variables}
"""


def _wait(condition: Callable[[], Any], what: str, seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not after {seconds:g} s: {what}")
        time.sleep(0.01)


def _table() -> dict[int, tuple[int, str, str]]:
    """Every process that is not a zombie: its parent, its state, the name of its program."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                before, _, after = (entry / "stat").read_text().rpartition(")")
                state, parent = after.split()[:2]
                if state not in "ZX":
                    found[int(entry.name)] = (int(parent), state, before.partition("(")[2])
    return found


def _signal(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def command_line(pid: int) -> str:
    """The words of a process, "" when it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def marked(mark: str, table: Mapping[int, Any]) -> set[int]:
    """The processes among these whose environment has this machine's mark, or one below it."""
    found, head = set(), f"{MARK}={mark}".encode()
    for pid in table:
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                if entry == head or entry.startswith(head + b"/"):
                    found.add(pid)
    return found - {os.getpid()}


class TestMachine:
    """One machine of a testbed. `env` is the environment of a login there."""

    __test__ = False  # not a test class

    def __init__(self, bed: "Testbed", number: int, port: int) -> None:
        self.bed, self.number, self.port = bed, number, port
        self.address = f"127.1.0.{number + 1}"
        self.folder = bed.folder / str(number)
        self.home = self.folder / "home"
        self.home.mkdir(parents=True)
        tmux = bed.sockets / str(number)
        tmux.mkdir()
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        own = {"HOME": str(self.home), "TMUX_TMPDIR": str(tmux), "PATH": path, MARK: str(self.folder), **bed.env}
        strange = ("TMUX", "PYTHONPATH", "SSH_AUTH_SOCK", "IMGNET_RUNS")
        self.env = {**{name: text for name, text in os.environ.items() if name not in strange}, **own}
        self._sshd: subprocess.Popen[bytes] | None = None
        _new_key(self.folder / "host_key")
        self.write_config(own)

    def write_config(self, variables: Mapping[str, str], more: str = "") -> None:
        """Write sshd's configuration; `more` is lines of it, which hold from the next boot."""
        self._variables = dict(variables)
        words = " ".join('"{}={}"'.format(*one) for one in variables.items())
        text = SSHD.format(
            port=self.port,
            address=self.address,
            folder=self.folder,
            keys=self.bed.folder / "authorized_keys",
            more=more,
            variables=words,
        )
        (self.folder / "sshd_config").write_text(text)

    def configure(self, more: str) -> None:
        """Boot with these further lines of sshd_config(5)."""
        self.write_config(self._variables, more)
        self.unplug()
        self.plug()

    @property
    def host_key(self) -> str:
        """The public host key, as a known_hosts line has it: type and key."""
        return " ".join((self.folder / "host_key.pub").read_text().split()[:2])

    @property
    def log(self) -> str:
        """What sshd said."""
        return (self.folder / "sshd.log").read_text(errors="replace")

    # --- power -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start sshd, without waiting until it listens."""
        if self._sshd and self._sshd.poll() is None:
            return
        # A test run that is killed leaves no sshd. By parent the kernel means the thread, not the process.
        dies = die_with_parent if threading.current_thread() is threading.main_thread() else None
        with (self.folder / "sshd.log").open("ab") as log:
            self._sshd = subprocess.Popen(
                [_sshd_path(), "-D", "-e", "-f", str(self.folder / "sshd_config")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**self.env, **self._variables},
                start_new_session=True,
                preexec_fn=dies,
            )

    def listens(self) -> bool:
        """Whether the port is open."""
        if self._sshd is None or self._sshd.poll() is not None:
            raise RuntimeError(f"sshd of machine {self.number} has ended: {self.log[-500:]}")
        with socket.socket() as one:
            one.settimeout(1)
            return one.connect_ex((self.address, self.port)) == 0

    def boot(self) -> None:
        """Power on: sshd listens again, with the same address and host key; of what ran before nothing runs."""
        self.start()
        _wait(self.listens, f"sshd of machine {self.number} listens")

    plug = boot

    def power_off(self) -> None:
        """Kill everything on the machine at once, as a power cut does."""

        def dead() -> bool:
            self._reap()
            _signal(self.freeze(), signal.SIGKILL)
            self._reap()
            return not self.processes()

        _wait(dead, f"machine {self.number} is off")

    def unplug(self) -> None:
        """End sshd and its connections; whatever else runs there goes on."""

        def dead() -> bool:
            pids = [pid for pid in self.processes() if pid in self.sshd_pids()]
            _signal(pids, signal.SIGSTOP)
            if set(pids) == self.sshd_pids():
                _signal(pids, signal.SIGKILL)
            self._reap()
            return not self.sshd_pids()

        _wait(dead, f"machine {self.number} is unplugged")

    def cut(self) -> int:
        """End the connections that there are, not the sshd that takes new ones. Returns how many there were."""
        listener = self._sshd.pid if self._sshd else 0
        pids = [pid for pid in self.sshd_pids() if pid != listener]
        _signal(pids, signal.SIGKILL)
        return len(pids)

    def freeze(self) -> list[int]:
        """Stop everything on the machine: connections stay open and nobody answers. Returns the pids."""
        before: list[int] = []
        while (pids := self.processes()) != before:  # one may have had a child just now
            _signal(pids, signal.SIGSTOP)
            before = pids
        return pids

    def thaw(self) -> None:
        """Let everything on the machine go on."""
        _signal(self.processes(), signal.SIGCONT)

    def _reap(self) -> None:
        if self._sshd:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._sshd.wait(0.2 if self._sshd.pid not in _table() else 0)

    # --- processes -------------------------------------------------------------------------------------------------

    def sshd_pids(self) -> set[int]:
        """sshd and the processes of its connections; their titles cover their environment, so by descent."""
        table = _table()
        found = {self._sshd.pid} & table.keys() if self._sshd else set()
        while more := {pid for pid, (parent, _, name) in table.items() if parent in found and name == "sshd"} - found:
            found |= more
        return found

    def processes(self, *words: str) -> list[int]:
        """All that is alive on the machine, sshd too; with `words`, those whose command line has them all."""
        table = _table()
        found = marked(str(self.folder), table) | self.sshd_pids()
        while more := {pid for pid, (parent, _, _) in table.items() if parent in found} - found:
            found |= more
        return sorted(pid for pid in found if all(word in command_line(pid) for word in words))

    def left(self) -> list[int]:
        """What is alive on the machine beside sshd and its connections."""
        sshd = self.sshd_pids()
        return [pid for pid in self.processes() if pid not in sshd]


class Testbed:
    """`count` machines that listen, in a folder. `env` is added to the environment of every login."""

    __test__ = False  # not a test class

    def __init__(self, folder: Path, count: int, env: Mapping[str, str] | None = None) -> None:
        self.folder, self.env = folder.resolve(), dict(env or {})
        self.sockets = Path(tempfile.mkdtemp(prefix="imgb-", dir="/tmp"))  # a socket's path has 107 characters at most
        self.shared = self.folder / "shared"
        self.shared.mkdir(parents=True)
        self.key = self.folder / "user_key"
        _new_key(self.key)
        self.authorize(self.key)
        port = _free_port(count)
        self.machines = [TestMachine(self, number, port) for number in range(count)]
        try:
            for one in self.machines:
                one.start()
            for one in self.machines:
                one.boot()
        except BaseException:
            self.close(0)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        left = self.close()
        if left and not kind:
            raise AssertionError(f"still running on the testbed: {left}")

    def authorize(self, key: Path) -> None:
        """Let whoever has this key in, on all machines."""
        with (self.folder / "authorized_keys").open("a") as file:
            file.write(key.with_name(f"{key.name}.pub").read_text())

    def new_key(self, name: str, passphrase: str = "") -> Path:
        """Make a key pair of this name that opens no machine."""
        _new_key(self.folder / name, passphrase)
        return self.folder / name

    def known_hosts(self, path: Path) -> Path:
        """Write the host keys of all machines as a known_hosts file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"[{one.address}]:{one.port} {one.host_key}\n" for one in self.machines))
        return path

    def write_hosts_toml(self, path: Path, count: int | None = None, **extra: Any) -> Path:
        """Write a hosts file of the first `count` machines; `extra` are further keys for all, None leaves one out."""
        user = Path("~").expanduser().owner() if os.geteuid() else "root"
        top = {"shared": str(self.shared), "user": user, "key": str(self.key), "python": sys.executable, **extra}
        lines = [f"{key} = {_toml(value)}" for key, value in top.items() if value is not None]
        for one in self.machines[:count]:
            lines += ["[[machines]]", f'host = "{one.address}"', f"port = {one.port}", f'address = "{one.address}"']
            lines += [f'host_key = "{one.host_key}"', f'folder = "{one.home}/.imgnet"']
        path.write_text("\n".join([*lines, ""]))
        return path

    def leaks(self) -> list[str]:
        """The command lines of whatever runs on the machines beside sshd and its connections."""
        sshd = {pid for one in self.machines for pid in one.sshd_pids()}
        return [line for pid in sorted(marked(str(self.folder), _table()) - sshd) if (line := command_line(pid))]

    def close(self, grace: float = 5.0) -> list[str]:
        """End everything. Returns what was still running on the machines after `grace` seconds."""
        left: list[str] = []
        for one in getattr(self, "machines", []):
            one.thaw()
        with contextlib.suppress(TimeoutError):
            _wait(lambda: not self.leaks(), "nothing is left", grace)
        left = self.leaks()
        for one in getattr(self, "machines", []):
            one.power_off()
        _signal(sorted(marked(str(self.folder), _table())), signal.SIGKILL)
        _wait(lambda: not marked(str(self.folder), _table()), "everything has ended")
        shutil.rmtree(self.sockets, ignore_errors=True)
        return left


def _toml(value: Any) -> str:
    if isinstance(value, bool | int | float):
        return str(value).lower()
    return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'


def _new_key(path: Path, passphrase: str = "") -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-C", "", "-f", str(path)], check=True)


def _sshd_path() -> str:
    found = shutil.which("sshd", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/usr/local/sbin")
    if not found:
        raise RuntimeError("sshd is missing; install it: sudo apt-get install openssh-server")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # where it locks itself in before anybody has logged in
    return str(Path(found).resolve())  # it starts itself anew for each connection, by its whole path


def _free_port(count: int) -> int:
    """A port that is free on all addresses, below those that the kernel gives to outgoing connections."""
    while True:
        port = random.randrange(20000, 32000)
        with contextlib.ExitStack() as sockets, contextlib.suppress(OSError):
            for number in range(count):
                sockets.enter_context(socket.socket()).bind((f"127.1.0.{number + 1}", port))
            return port


@pytest.fixture
def testbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Testbed]]:
    """Make testbeds: `testbed(3)` is three machines that listen. They end with the test, which fails on a leak."""
    made: list[Testbed] = []

    def make(count: int = 1, env: Mapping[str, str] | None = None) -> Testbed:
        made.append(Testbed(tmp_path_factory.mktemp("testbed") / "bed", count, env))
        return made[-1]

    yield make
    left = [line for one in made for line in one.close()]
    assert not left, f"still running on the testbed: {left}"
