"""The tmux windows of a running agent: its trainers' log, and its machine's processes. They close with the agent.

Windows only show what runs. When the tmux server was killed, the agent opens the session and the windows again.
"""

import contextlib
import os
import subprocess
import threading
from pathlib import Path

from cluster.connectors import tmux
from cluster.state.run_folder import AGENT_OUTPUT

CHECK_SECONDS = 5.0  # between two looks whether the windows are still there

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
    """The windows "train" and "gpu" of an agent in the job's session, and the session, if it is gone.

    Where several machines share a session, the machine's number is part of the windows' names. Without tmux nothing
    happens: failing to open a window must not fail the job. The windows are opened by a thread, because a frozen tmux
    server does not answer for seconds.
    """

    def __init__(self, session: str, work: Path, machine: str = "") -> None:
        self.session = session
        self.work = work
        self.log_link = work / "train.log"
        self.owner = os.environ.get(tmux.OWNER_VARIABLE, "")  # only on the computer that launched the job
        self.name_suffix = f"-{machine}" if machine else ""
        self.is_shown_first = machine in ("", "0")
        self._thread = threading.Thread(target=self._keep_open, daemon=True)
        self._is_closed = threading.Event()

    def follow_log(self, log_path: Path) -> None:
        """Show the log of the next attempt: `tail -F` follows the name of the link, which then points to that log."""
        self.log_link.unlink(missing_ok=True)
        self.log_link.symlink_to(log_path)
        if not self._thread.ident:
            self._thread.start()

    def close(self) -> None:
        """Open no window any more."""
        self._is_closed.set()

    def _keep_open(self) -> None:
        while True:
            with contextlib.suppress(Exception):
                self._open_missing()
            if self._is_closed.wait(CHECK_SECONDS):
                return

    def _open_missing(self) -> None:
        """Open the windows that are not there, and the session, if there is none. Raises `ClusterError`, `OSError`."""
        monitor_argv = ["sh", "-c", GPU_MONITOR_SCRIPT, "gpu", str(os.getpid())]
        commands = {
            f"train{self.name_suffix}": self._tail_argv(self.log_link),
            f"gpu{self.name_suffix}": monitor_argv,
        }
        open_windows = tmux.window_names(self.session)
        missing_windows = [window for window in commands if window not in open_windows]
        if not missing_windows:
            return
        if not open_windows:
            argv = self._tail_argv(self.work / AGENT_OUTPUT)
            new_session = tmux.new_session_argv(self.session, f"agent{self.name_suffix}", argv, self.owner)
            subprocess.run(new_session, capture_output=True, timeout=tmux.SERVER_TIMEOUT_SECONDS)
        elif self.owner and not tmux.is_owned_by(self.session, Path(self.owner)):
            return  # another run folder's job of the same name
        for window in missing_windows:
            in_front = self.is_shown_first and window.startswith("train")
            tmux.add_window(self.session, window, commands[window], in_front)

    def _tail_argv(self, path: Path) -> list[str]:
        return ["tail", "-n", "+1", "-F", f"--pid={os.getpid()}", str(path)]
