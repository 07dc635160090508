"""tmux sessions of the machine this runs on, through libtmux: one private server, one session per job.

Windows start their command as the window's process; nothing is typed into a shell. The user's own ~/.tmux.conf holds,
so that attaching feels like home.
"""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.errors import ClusterError

if TYPE_CHECKING:
    from libtmux import Server, Session

SOCKET = "imgnet"
ANSWER_SECONDS = 10.0
# Over what a user's own configuration may say: sessions live unseen, and end with their commands.
SETTINGS = {"destroy-unattached": "off", "exit-unattached": "off", "remain-on-exit": "off"}
OWNER = "IMGNET_RUN"  # in the session's environment: whose job it is, for other folders have a job-1 too


def require() -> None:
    """Raise `ClusterError` when tmux is not installed."""
    if not shutil.which("tmux"):
        raise ClusterError(
            "tmux is missing; install it: sudo apt-get install tmux (Debian, Ubuntu), brew install tmux (macOS)"
        )


def _server() -> "Server":
    """The private server, which answers. Raises `ClusterError` when it does not: libtmux would wait for ever."""
    import libtmux  # 0.1 s that --help need not wait for

    require()
    try:
        subprocess.run(["tmux", "-L", SOCKET, "list-sessions"], capture_output=True, timeout=ANSWER_SECONDS)
    except subprocess.TimeoutExpired:
        raise ClusterError(
            f"the tmux server does not answer; wake it up, or end it and all its jobs: tmux -L {SOCKET} kill-server"
        ) from None
    return libtmux.Server(socket_name=SOCKET)


def names() -> set[str]:
    """Return the names of the sessions that are alive, of whatever folder."""
    return {session.session_name or "" for session in _server().sessions}


def find(name: str) -> "Session | None":
    """Return the session of exactly this name, None when there is none."""
    for session in _server().sessions:
        if session.session_name == name:
            return session
    return None


def owner(name: str) -> str | None:
    """Return the run folder that a session belongs to, None when there is no such session."""
    session = find(name)
    return str(session.show_environment().get(OWNER) or "") if session else None


def mine(name: str, run: Path) -> bool:
    """Whether the session of this name is alive and belongs to this run folder."""
    return owner(name) == str(run)


def start(name: str, run: Path, window: str, argv: Sequence[str]) -> None:
    """Start a session with one window. Raises `ClusterError` when the name is taken.

    The session gets this process's environment, and nothing of the server's, where an earlier job's may be.
    """
    other = owner(name)
    if other == str(run):  # of an earlier launch of this very job: its agent is gone, a window may have stayed
        kill(name, run)
    elif other is not None:
        raise ClusterError(f"the tmux session {name} belongs to {other}; end that job first, or wait for it")
    # By name: a pattern such as * brings only the first variable that fits it (tmux 3.3). One that is named here but
    # not in our environment, because an earlier job brought it, is taken out of the session.
    server = _server()
    held = [line.partition("=")[0].lstrip("-") for line in server.cmd("show-environment", "-g").stdout]
    settings = {"update-environment": " ".join(sorted({*os.environ, *held})), **SETTINGS}
    set_up = [word for name, value in settings.items() for word in ("set-option", "-g", name, value, ";")]
    words = ["new-session", "-d", "-s", name, "-n", window, "-x", "200", "-y", "50", "-e", f"{OWNER}={run}"]
    here = os.getcwd().replace("#", "##")  # noqa: PTH109  (tmux expands formats in it)
    done = server.cmd("start-server", ";", *set_up, *_plain([*words, "-c", here, *argv]))
    if done.stderr:
        raise ClusterError(f"tmux -L {SOCKET}: {' '.join(done.stderr)}")


def add(name: str, window: str, argv: Sequence[str], show: bool = False) -> None:
    """Add a window to a session, in front when `show`. Raises `ClusterError` when that fails."""
    words = ["new-window", "-t", f"={name}:", "-n", window, *([] if show else ["-d"])]
    done = _server().cmd(*_plain([*words, *argv]))
    if done.stderr:
        raise ClusterError(f"tmux -L {SOCKET}: {' '.join(done.stderr)}")


def _plain(words: Sequence[str]) -> list[str]:
    """Words that tmux takes as they are: one that ends in a semicolon would end its command."""
    return [word[:-1] + r"\;" if word.endswith(";") else word for word in words]


def session_words(name: str, window: str, argv: Sequence[str]) -> list[str]:
    """Return the command that starts a session with one window on another machine."""
    set_up = [word for option, value in SETTINGS.items() for word in ("set-option", "-g", option, value, ";")]
    new = ["new-session", "-d", "-s", name, "-n", window, "-x", "200", "-y", "50"]
    return ["tmux", "-L", SOCKET, "start-server", ";", *set_up, *_plain([*new, *argv])]


def window_words(name: str, window: str, argv: Sequence[str]) -> list[str]:
    """Return the command that adds a window to a session on another machine."""
    return ["tmux", "-L", SOCKET, *_plain(["new-window", "-d", "-t", f"={name}:", "-n", window, *argv])]


def kill(name: str, run: Path) -> None:
    """End a session of this run folder with all its windows; nothing when there is none."""
    if shutil.which("tmux") and mine(name, run):
        _server().cmd("kill-session", "-t", f"={name}")


def attach_command(name: str, window: str = "") -> list[str]:
    """Return the command that shows a session, or a window of it, on this terminal."""
    return ["tmux", "-L", SOCKET, "attach-session", "-t", f"={name}:{window}" if window else f"={name}"]
