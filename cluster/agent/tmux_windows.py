"""The tmux windows of a running agent: its trainers' log, and its machine's processes. They close with the agent."""

import contextlib
import os
from pathlib import Path

from cluster.connectors import tmux

# The loop must notice that the agent is a zombie, which `kill -0` does not: tmux loses the SIGCHLD of a command that
# ends at the same moment as another (it ignores the signal while utempter runs), and leaves a dead agent as a zombie
# until another window closes. So this window must close by itself.
GPU_MONITOR_SCRIPT = """
while grep -qs '^State:.[^ZX]' "/proc/$1/status"; do
    clear
    if command -v nvidia-smi >/dev/null; then nvidia-smi; else ps -o pid,pcpu,rss,etime,args --ppid "$1"; fi
    sleep 2
done
"""


class TmuxWindows:
    """The windows "train" and "gpu" of an agent in the job's session.

    Where several machines share a session, the machine's number is part of the windows' names. Without tmux nothing
    happens: failing to open a window must not fail the job.
    """

    def __init__(self, session: str, log_link: Path, machine: str = "") -> None:
        self.session = session
        self.log_link = log_link
        self.is_open = False
        self.name_suffix = f"-{machine}" if machine else ""
        self.is_shown_first = machine in ("", "0")

    def follow_log(self, log_path: Path) -> None:
        """Show the log of the next attempt: `tail -F` follows the name of the link, which then points to that log."""
        self.log_link.unlink(missing_ok=True)
        self.log_link.symlink_to(log_path)
        if self.is_open:
            return
        self.is_open = True
        agent_pid = str(os.getpid())
        with contextlib.suppress(Exception):
            tail_command = ["tail", "-n", "+1", "-F", f"--pid={agent_pid}", str(self.log_link)]
            monitor_command = ["sh", "-c", GPU_MONITOR_SCRIPT, "gpu", agent_pid]
            tmux.add_window(self.session, f"train{self.name_suffix}", tail_command, in_front=self.is_shown_first)
            tmux.add_window(self.session, f"gpu{self.name_suffix}", monitor_command)
