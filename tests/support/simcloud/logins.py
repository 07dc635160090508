"""A user of simulated machines: key pairs, the user data of a machine, and logins with OpenSSH."""

import subprocess
import time
from pathlib import Path

from support.ssh_machines import generate_key

from infra.aws.instances.user_data import build_user_data

SSH_OPTIONS = (
    "HostKeyAlias=imgnet",
    "StrictHostKeyChecking=yes",
    "BatchMode=yes",
    "IdentitiesOnly=yes",
    "LogLevel=ERROR",
)


class Keys:
    """The key pairs of a user and of the machines' boot, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("user", "host"):
            generate_key(folder / name)

    def user_data(self, limit_seconds: int = 600) -> str:
        """Return the user data of a machine that powers off in `limit_seconds`."""
        private_key, public_key = ((self.folder / name).read_text() for name in ("host", "host.pub"))
        return build_user_data(
            poweroff_seconds=limit_seconds,
            private_key=private_key,
            public_key=public_key,
            file_system="fs-0123",
            access_point="fsap-0123",
            ssh_user="ubuntu",
            python="",
        )

    def ssh(self, address: str, user: str, port: int, *words: str) -> "subprocess.CompletedProcess[str]":
        """Run a command on a machine. Only the host key of the boot is trusted."""
        known_hosts = self.folder / f"known-{time.monotonic_ns()}"
        trusted_key = " ".join((self.folder / "host.pub").read_text().split()[:2])
        known_hosts.write_text(f"imgnet {trusted_key}\n")
        argv = ["ssh", "-F", "none", "-i", str(self.folder / "user"), "-p", str(port)]
        argv += [f"-o{option}" for option in (*SSH_OPTIONS, f"UserKnownHostsFile={known_hosts}")]
        return subprocess.run([*argv, f"{user}@{address}", *words], capture_output=True, text=True, timeout=120)
