"""A user of simulated machines: key pairs, the user data of a machine, and logins with OpenSSH."""

import json
import subprocess
import time
from pathlib import Path
from typing import Any

from support.ssh_machines import generate_key

LIMIT_COMMAND = ("systemd-run", "--no-block", "--unit=imgnet-limit")
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

    def user_data(self, limit: float = 600, **changes: Any) -> str:
        """Return the user data of a machine that powers off in `limit` seconds, with these changes."""
        config = {
            "bootcmd": [[*LIMIT_COMMAND, f"--on-active={limit:.0f}", "systemctl", "poweroff"]],
            "ssh_keys": {
                "ed25519_private": (self.folder / "host").read_text(),
                "ed25519_public": (self.folder / "host.pub").read_text(),
            },
            "ssh_deletekeys": True,
            "runcmd": [["sh", "-c", "exit 1", "sh", "fs-0123", "us-east-1"]],
            **changes,
        }
        return f"#cloud-config\n{json.dumps(config)}"

    def ssh(
        self, address: str, user: str, port: int, *words: str, host_key: str = ""
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command on a machine. Only one host key is trusted: `host_key`, or that of the boot."""
        known_hosts = self.folder / f"known-{time.monotonic_ns()}"
        trusted_key = host_key or " ".join((self.folder / "host.pub").read_text().split()[:2])
        known_hosts.write_text(f"imgnet {trusted_key}\n")
        argv = ["ssh", "-F", "none", "-i", str(self.folder / "user"), "-p", str(port)]
        argv += [f"-o{option}" for option in (*SSH_OPTIONS, f"UserKnownHostsFile={known_hosts}")]
        return subprocess.run([*argv, f"{user}@{address}", *words], capture_output=True, text=True, timeout=120)
