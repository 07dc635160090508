"""The windows of a running agent: its trainers' log, and the machine. They end with the agent."""

import contextlib
import os
from pathlib import Path

from cluster.connectors import tmux

# It asks for more than `kill -0` does: tmux loses the SIGCHLDs of commands that end at the same moment (it ignores the
# signal while utempter runs) and leaves a dead agent as a zombie until another window ends. So this one must.
GPU = """
while grep -qs '^State:.[^ZX]' "/proc/$1/status"; do
    clear
    if command -v nvidia-smi >/dev/null; then nvidia-smi; else ps -o pid,pcpu,rss,etime,args --ppid "$1"; fi
    sleep 2
done
"""


class Windows:
    """The windows "train" and "gpu" of an agent in its session, with the machine's number where several share it.

    Nothing happens without tmux: a picture of the job must never end the job.
    """

    def __init__(self, session: str, link: Path, machine: str = "") -> None:
        self.session, self.link, self.open = session, link, False
        self.suffix, self.front = f"-{machine}" if machine else "", machine in ("", "0")

    def follow(self, log: Path) -> None:
        """Show another log, of the next attempt: `tail -F` follows the link's name."""
        self.link.unlink(missing_ok=True)
        self.link.symlink_to(log)
        if self.open:
            return
        self.open, me = True, str(os.getpid())
        with contextlib.suppress(Exception):
            words = ["tail", "-n", "+1", "-F", f"--pid={me}", str(self.link)]
            tmux.add(self.session, f"train{self.suffix}", words, show=self.front)
            tmux.add(self.session, f"gpu{self.suffix}", ["sh", "-c", GPU, "gpu", me])
