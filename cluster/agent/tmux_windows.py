"""The tmux windows of a running agent: its trainers' log, and its machine's processes. They close with the agent.

They only show what runs: Ctrl-C does nothing in them. When the tmux server was killed, the agent opens them again.
"""

import contextlib
import os
import shutil
import subprocess
import threading
from pathlib import Path

from cluster.connectors import tmux
from cluster.state.run_folder import AGENT_OUTPUT, RunFolder

CHECK_SECONDS = 5.0  # between two looks whether the windows are still there

# The loop must notice that the agent is a zombie, which `kill -0` does not: tmux loses the SIGCHLD of a command that
# ends at the same moment as another (it ignores the signal while utempter runs), and leaves a dead agent as a zombie
# until another window closes. So this window must close by itself.
MONITOR_SCRIPT = """
trap "" INT QUIT TSTP
while grep -qs '^State:.[^ZX]' "/proc/$1/status"; do
    clear
    if command -v nvidia-smi >/dev/null; then nvidia-smi; else ps -o pid,pcpu,rss,etime,args --ppid "$1"; fi
    sleep 2
done
"""


class TmuxWindows:
    """The windows "train" and "gpu" of an agent in the job's session, and the session, if it is gone.

    Without GPUs, "gpu" is called "processes". Where several machines share a session, because all are this computer,
    the machine's number is part of the windows' names, and only machine 0 shows the processes. Failing to open a window
    must not fail the job. A thread opens the windows, because a frozen tmux server does not answer for seconds.
    """

    def __init__(self, session: str, work: Path, machine: str = "") -> None:
        self.work = work
        self.machine = machine
        self.log_link = work / "train.log"
        self.owner = os.environ.get(tmux.OWNER_VARIABLE, "")  # only on the computer that launched the job
        self.session = RunFolder(Path(self.owner)).tmux_session if self.owner else session
        self.name_suffix = f"-{machine}" if machine else ""
        self.is_first = machine in ("", "0")
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
        open_windows = tmux.window_names(self.session)
        train_window = f"train{self.name_suffix}"
        monitor_window = "gpu" if shutil.which("nvidia-smi") else "processes"
        wanted_windows = [train_window, *([monitor_window] if self.is_first else [])]
        if set(wanted_windows) <= set(open_windows):
            return
        if not open_windows:
            argv = self._tail_argv(self.work / AGENT_OUTPUT)
            new_session = tmux.new_session_argv(self.session, f"agent{self.name_suffix}", argv, self.owner)
            subprocess.run(new_session, capture_output=True, timeout=tmux.SERVER_TIMEOUT_SECONDS)
        if train_window not in open_windows:
            index = tmux.FIRST_TRAIN_WINDOW + int(self.machine or 0)
            tmux.add_window(self.session, train_window, self._tail_argv(self.log_link), self.is_first, index)
        if monitor_window in wanted_windows and monitor_window not in open_windows:
            argv = ["sh", "-c", MONITOR_SCRIPT, "monitor", str(os.getpid())]
            tmux.add_window(self.session, monitor_window, argv, index=tmux.MONITOR_WINDOW)

    def _tail_argv(self, path: Path) -> list[str]:
        return tmux.tail_argv(path, f"--pid={os.getpid()}")
