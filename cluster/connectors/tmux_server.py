"""libtmux's server, asked in a way that depends on neither the terminal nor the locale of this process.

The tmux client refuses a terminal whose type this computer does not know, replaces characters where the locale is not
UTF-8 by name, and waits for ever for a server that is stopped. So it gets no standard input, `-u`, and a time limit.
"""

import subprocess
from typing import Any

from libtmux import Server
from libtmux.common import tmux_cmd

from cluster.errors import ClusterError


class QuietCommand(tmux_cmd):
    """A tmux command that has ended: `stdout` and `stderr` are its lines."""

    def __init__(self, *arguments: str, timeout_seconds: float) -> None:
        self.cmd = ["tmux", "-u", *arguments]
        completed = subprocess.run(
            self.cmd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="backslashreplace",
            timeout=timeout_seconds,
        )
        self.returncode = completed.returncode
        self.stdout = completed.stdout.splitlines()
        self.stderr = [line for line in completed.stderr.splitlines() if line]


class QuietServer(Server):
    """The tmux server of a socket name."""

    def __init__(self, socket_name: str, timeout_seconds: float) -> None:
        super().__init__(socket_name=socket_name)
        self.timeout_seconds = timeout_seconds

    def cmd(self, cmd: str, *args: Any, target: str | int | None = None) -> tmux_cmd:
        """Run a tmux command. Raises `ClusterError` if the server does not answer in time."""
        targets = [] if target is None else ["-t", str(target)]
        try:
            return QuietCommand(
                f"-L{self.socket_name}", cmd, *targets, *map(str, args), timeout_seconds=self.timeout_seconds
            )
        except subprocess.TimeoutExpired:
            raise ClusterError(
                f"the tmux server {self.socket_name} does not answer; resume its process, or end it (jobs continue): "
                f"tmux -L {self.socket_name} kill-server"
            ) from None
