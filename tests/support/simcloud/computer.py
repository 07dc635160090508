"""One machine of the fake EC2: an sshd on its own address, booted from its user data, with fakes of the commands that
need root. `runcmd` is not run; what it leaves behind is made here.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from support.ssh_machines import MARK, SECONDS, TestMachine
from support.ssh_machines import _new_key as new_key
from support.ssh_machines import _wait as wait

from train.tools.filesystem import write_atomic

FAKES = Path(__file__).with_name("fakes.py")
NAMES = ("imgnet-limit", "imgnet-hostkey", "systemctl", "shutdown", "poweroff", "halt", "reboot")
SUDO = """\
#!/bin/sh
# What sudo -n does for a user who may do everything; anything else it cannot do.
[ "$1" = -n ] || { echo "sudo: a simulated machine knows only: sudo -n COMMAND" >&2; exit 1; }
shift
[ "${1-}" = -- ] && shift
SUDO_USER=$(id -un)
export SUDO_USER
exec "$@"
"""


@dataclass(frozen=True)
class UserData:
    """What the machine's side of the contract reads of a cloud-config: host key, limit in seconds, and the id of the
    EFS, "" for none, None when there is no runcmd that would get a machine ready.
    """

    private: str = ""
    public: str = ""
    limit: float | None = None
    efs: str | None = None

    @classmethod
    def parse(cls, text: str) -> "UserData":
        """Read user data. What is no cloud-config in JSON says nothing, as on a real machine."""
        head, _, rest = text.partition("\n")
        try:
            config = json.loads(rest) if head.strip() == "#cloud-config" else {}
        except ValueError:
            config = {}
        if not isinstance(config, dict):
            config = {}
        keys = config.get("ssh_keys", {})
        boot, run = ([one for one in config.get(name, []) if isinstance(one, list)] for name in ("bootcmd", "runcmd"))
        words = [word for line in boot if "--unit=imgnet-limit" in line for word in line]
        limits = [float(word.partition("=")[2].rstrip("s")) for word in words if word.startswith("--on-active=")]
        if limits and not {"--no-block", "--timer-property=DefaultDependencies=no"} & {*words}:
            return cls("", "", None, None)  # systemd-run waits for the timer, that for sysinit, and sysinit for bootcmd
        scripts = [line for line in run if line[3:4] == ["sh"]]
        return cls(
            keys.get("ed25519_private", ""),
            keys.get("ed25519_public", ""),
            limits[0] if limits else None,
            next((str((line[4:] or [""])[0]) for line in scripts), None),
        )


class Computer(TestMachine):
    """The machine of an instance. `number` counts the machines of a cloud; `metadata` is the address of its IMDS."""

    def __init__(
        self, instance: Any, number: int, port: int, folder: Path, sockets: Path, metadata: str, env: Mapping[str, str]
    ) -> None:
        self.id, self.number, self.address, self.port = instance.id, number, instance.private, port
        self.data = UserData.parse(instance.user_data or "")
        self.folder, self.home, tools = folder, folder / "home", folder / "bin"
        self.bed = SimpleNamespace(folder=folder)  # type: ignore[assignment]  # where the keys are that open it
        self.say: dict[str, str] = {}  # what its IMDS says beside what it always says
        self._sshd, self.own_key = None, False
        for one in (self.home, tools, sockets):
            one.mkdir(parents=True)
        path = os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        own = {"HOME": str(self.home), "TMUX_TMPDIR": str(sockets), "PATH": path, MARK: str(folder)}
        self.env = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": metadata, **own, **env}
        (folder / "authorized_keys").write_text(f"{instance.key}\n")
        self._make_tools(tools, metadata)
        self._make_host_key()
        self.write_config(self.env)

    def _make_tools(self, folder: Path, metadata: str) -> None:
        """Put the fakes first in PATH: what is typed on a machine must never cut this computer's own power."""
        for name in NAMES:
            _script(folder / name, _exec(sys.executable, "-I", "-S", str(FAKES), name, metadata))
        _script(folder / "sudo", SUDO)

    def _make_host_key(self) -> None:
        """Take the host key of the user data; without one a machine makes its own (cloud-init, cc_ssh)."""
        if not self.data.private:
            return new_key(self.folder / "host_key")
        text = self.data.private.strip() + "\n"
        write_atomic(self.folder / "host_key.pub", f"{self.data.public.strip()}\n".encode(), durable=False)
        (self.folder / "host_key").touch(mode=0o600)
        (self.folder / "host_key").write_text(text)
        return None

    # --- what its user data leaves -----------------------------------------------------------------------------------

    def get_ready(self, shared: Path, python: str, failure: str = "") -> None:
        """Do what runcmd does: shared folder, Python and the marker, or the line that says why not."""
        if self.data.efs is None:
            return
        folder = self.home / ".imgnet"
        folder.mkdir(exist_ok=True)  # our first login may be here before
        if failure:
            write_atomic(folder / "failed", f"{failure}\n".encode(), durable=False)
            return
        if self.data.efs:
            home = shared / self.data.efs
            home.mkdir(parents=True, exist_ok=True)
            (folder / "shared").symlink_to(home)
        # Not a symlink: in another folder the Python of a virtual environment does not find its packages.
        _script(folder / "python", _exec(python))
        write_atomic(folder / "ready", b"", durable=False)

    # --- what is done on it as root ----------------------------------------------------------------------------------

    def change_host_key(self) -> str:
        """Make a host key of its own, once, and let sshd use it for new connections; return the public half."""
        if self.own_key:
            return self.host_key
        self.own_key = True
        new_key(self.folder / "new_key")
        for ending in ("", ".pub"):
            (self.folder / f"new_key{ending}").replace(self.folder / f"host_key{ending}")
        if self._sshd and self._sshd.poll() is None:
            self._sshd.send_signal(signal.SIGHUP)  # it starts itself anew; its connections go on
        wait(lambda: self.host_key in self._presented(), f"sshd of {self.id} has the new host key")
        return self.host_key

    def _presented(self) -> str:
        """The ed25519 host key that sshd shows to who comes now."""
        words = ["ssh-keyscan", "-T", "2", "-t", "ed25519", "-p", str(self.port), self.address]
        return subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, check=False).stdout

    def remove(self) -> None:
        """Forget a machine that is off."""
        for folder in (self.folder, Path(self.env["TMUX_TMPDIR"])):
            shutil.rmtree(folder, ignore_errors=True)


def _exec(*words: str) -> str:
    return f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n'


def _script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)
