"""The windows of a running agent: its trainers' log, and the machine. They end with the agent."""

import contextlib
import os
from pathlib import Path

from cluster.connectors import tmux

# It asks for more than `kill -0` does: tmux loses the SIGCHLDs of commands that end at the same moment (it ignores the
# signal while utempter runs) and leaves a dead agent as a zombie until another window ends. So this one must.
GPU_MONITOR_SCRIPT = """
while grep -qs '^State:.[^ZX]' "/proc/$1/status"; do
    clear
    if command -v nvidia-smi >/dev/null; then nvidia-smi; else ps -o pid,pcpu,rss,etime,args --ppid "$1"; fi
    sleep 2
done
"""


class TmuxWindows:
    """The windows "train" and "gpu" of an agent in its session, with the machine's number where several share it.

    Nothing happens without tmux: a picture of the job must never end the job.
    """

    def __init__(self, session: str, log_link: Path, machine: str = "") -> None:
        self.session, self.log_link, self.is_open = session, log_link, False
        self.name_suffix, self.is_shown_first = f"-{machine}" if machine else "", machine in ("", "0")

    def follow_log(self, log_path: Path) -> None:
        """Show another log, of the next attempt: `tail -F` follows the link's name."""
        self.log_link.unlink(missing_ok=True)
        self.log_link.symlink_to(log_path)
        if self.is_open:
            return
        self.is_open, me = True, str(os.getpid())
        with contextlib.suppress(Exception):
            words = ["tail", "-n", "+1", "-F", f"--pid={me}", str(self.log_link)]
            tmux.add_window(self.session, f"train{self.name_suffix}", words, in_front=self.is_shown_first)
            tmux.add_window(self.session, f"gpu{self.name_suffix}", ["sh", "-c", GPU_MONITOR_SCRIPT, "gpu", me])
