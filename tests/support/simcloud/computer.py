"""One machine of the simulated EC2: an sshd on its own address, and fakes of the commands that need root.

It boots from its instance's user data. `runcmd` is not run: its results are made here.
"""

import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.simcloud.traffic import Moved, write_proc
from support.ssh_machines import MARK_VARIABLE, WAIT_SECONDS, TestMachine, generate_key, wait_until

from train.tools.files import write_atomic
from train.tools.host import ROOT_VARIABLE

FAKES = Path(__file__).with_name("fakes.py")
FAKE_COMMANDS = ("imgnet-limit", "imgnet-hostkey", "systemctl", "shutdown", "poweroff", "halt", "reboot")
SUDO = """\
#!/bin/sh
# Does what sudo -n does for a user who may do everything, and nothing else.
[ "$1" = -n ] || { echo "sudo: a simulated machine knows only: sudo -n COMMAND" >&2; exit 1; }
shift
[ "${1-}" = -- ] && shift
SUDO_USER=$(id -un)
export SUDO_USER
exec "$@"
"""


@dataclass(frozen=True)
class UserData:
    """The part of its user data that a simulated machine reads. `infra.aws.instances.user_data` writes user data.

    `private_key` and `public_key` are the host key. `limit_seconds` is the time until the power-off. `file_system` is
    the id of the EFS, `internet_seconds` how long the machine waits for its way to the internet, `failed_seconds` the
    time until the power-off once its set-up has failed.
    """

    private_key: str
    public_key: str
    limit_seconds: float
    file_system: str
    internet_seconds: float
    failed_seconds: float

    @classmethod
    def parse(cls, text: str) -> "UserData":
        """Parse the user data of a launch. Raises `ValueError` when a real machine could not boot with it."""
        first_line, _, rest = text.partition("\n")
        if first_line != "#cloud-config":
            raise ValueError("no cloud-config, which has no effect")
        config = json.loads(rest)
        ((*_, arm_script, _, limit),) = config["bootcmd"]
        if "--no-block" not in arm_script and "--timer-property=DefaultDependencies=no" not in arm_script:
            raise ValueError("systemd-run waits for the timer, the timer for sysinit, and sysinit for bootcmd")
        keys = config["ssh_keys"]
        _, _, setup_script, _, file_system, _, _, _, internet_seconds, _ = config["runcmd"][0]
        failed_seconds = min([math.inf, *map(float, re.findall(r"imgnet-limit (\d+)", setup_script))])
        private_key, public_key = keys["ed25519_private"], keys["ed25519_public"]
        return cls(private_key, public_key, float(limit), file_system, float(internet_seconds), failed_seconds)


class SimulatedMachine(TestMachine):
    """The machine of an instance. `number` counts the machines of a cloud. `variables` are those of its users."""

    def __init__(
        self, instance: Any, number: int, port: int, folder: Path, sockets: Path, variables: Mapping[str, str]
    ) -> None:
        self.id = instance.id
        self.number = number
        self.address = instance.private
        self.port = port
        self.user_data = UserData.parse(instance.user_data)
        self.folder = folder
        self.home = folder / "home"
        tools = folder / "bin"
        self.notices: dict[str, str] = {}  # interruption notices in its metadata, by path
        self._sshd = None
        self.start_time = 0.0  # when its sshd started
        self.has_new_host_key = False
        self.python = sys.executable
        self.failure = ""  # why its set-up failed
        for path in (self.home, tools, sockets):
            path.mkdir(parents=True)
        self.env = {
            "HOME": str(self.home),
            "TMUX_TMPDIR": str(sockets),
            ROOT_VARIABLE: str(folder / "root"),
            "PATH": os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
            MARK_VARIABLE: str(folder),
            **variables,
        }
        (folder / "authorized_keys").write_text(f"{instance.key}\n")
        self._write_fake_commands(tools)
        self._write_host_key()
        self.write_config(self.env)

    def _write_fake_commands(self, folder: Path) -> None:
        """Put fakes first in PATH: a command on a machine must never cut the power of this computer."""
        url = self.env["AWS_EC2_METADATA_SERVICE_ENDPOINT"]
        for name in FAKE_COMMANDS:
            _write_script(folder / name, _exec_script(sys.executable, "-I", "-S", str(FAKES), url, name))
        _write_script(folder / "sudo", SUDO)

    def _write_host_key(self) -> None:
        public_key = f"{self.user_data.public_key.strip()}\n"
        write_atomic(self.folder / "host_key.pub", public_key.encode(), durable=False)
        (self.folder / "host_key").touch(mode=0o600)
        (self.folder / "host_key").write_text(self.user_data.private_key.strip() + "\n")

    # --- the results of its user data --------------------------------------------------------------------------------

    def finish_setup(self, shared: Path, failure: str = "") -> None:
        """Make the results of runcmd: shared folder, Python and marker file, or the line of a failure."""
        folder = self.home / ".imgnet"
        folder.mkdir(exist_ok=True)  # the first login may have created it
        self.failure = failure
        if failure:
            write_atomic(folder / "failed", f"{failure}\n".encode(), durable=False)
            return
        file_system = shared / self.user_data.file_system
        file_system.mkdir(parents=True, exist_ok=True)
        (folder / "shared").symlink_to(file_system)
        # Not a symlink: in another folder the Python of a virtual environment does not find its packages.
        _write_script(folder / "python", _exec_script(self.python))
        write_atomic(folder / "ready", b"ready\n", durable=False)

    def write_counters(self, shared: Path, moved: Moved) -> None:
        """Write what the kernel counts of the traffic. The file system is mounted from the boot on."""
        write_proc(self.folder / "root", shared / self.user_data.file_system, moved)

    # --- logins ------------------------------------------------------------------------------------------------------

    @property
    def key_files(self) -> list[Path]:
        """The keys of the launch, those that EC2 Instance Connect admits for a minute, and those of the user."""
        return [self.folder / "authorized_keys", self._passing_keys, self.home / ".ssh" / "authorized_keys"]

    @property
    def _passing_keys(self) -> Path:
        return self.folder / "instance_connect_keys"

    def admit_keys(self, *keys: str) -> None:
        """Let these keys log in until the next call, beside those that always may."""
        write_atomic(self._passing_keys, "".join(f"{key}\n" for key in keys).encode(), durable=False)

    # --- root commands -----------------------------------------------------------------------------------------------

    def change_host_key(self) -> str:
        """Generate a new host key, once, and let sshd use it for new connections. Returns the public key."""
        if self.has_new_host_key:
            return self.host_key
        self.has_new_host_key = True
        generate_key(self.folder / "new_key")
        for suffix in ("", ".pub"):
            (self.folder / f"new_key{suffix}").replace(self.folder / f"host_key{suffix}")
        if self._sshd and self._sshd.poll() is None:
            self._sshd.send_signal(signal.SIGHUP)  # sshd restarts itself and keeps its connections
        wait_until(lambda: self.host_key in self._presented_host_key(), f"sshd of {self.id} has the new host key")
        return self.host_key

    def _presented_host_key(self) -> str:
        argv = ["ssh-keyscan", "-T", "2", "-t", "ed25519", "-p", str(self.port), self.address]
        return subprocess.run(argv, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False).stdout

    def remove(self) -> None:
        for folder in (self.folder, Path(self.env["TMUX_TMPDIR"])):
            shutil.rmtree(folder, ignore_errors=True)


def _exec_script(*words: str) -> str:
    return f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n'


def _write_script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)
