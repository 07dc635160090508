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

SOCKET_NAME = "imgnet"
SERVER_TIMEOUT_SECONDS = 10.0
# Over what a user's own configuration may say: sessions live unseen, and end with their commands.
SESSION_OPTIONS = {"destroy-unattached": "off", "exit-unattached": "off", "remain-on-exit": "off"}
OWNER_VARIABLE = "IMGNET_RUN"  # in the session's environment: whose job it is, for other folders have a job-1 too


def require_tmux() -> None:
    """Raise `ClusterError` when tmux is not installed."""
    if not shutil.which("tmux"):
        raise ClusterError(
            "tmux is missing; install it: sudo apt-get install tmux (Debian, Ubuntu), brew install tmux (macOS)"
        )


def _server() -> "Server":
    """The private server, which answers. Raises `ClusterError` when it does not: libtmux would wait for ever."""
    import libtmux  # 0.1 s that --help need not wait for

    require_tmux()
    try:
        subprocess.run(
            ["tmux", "-L", SOCKET_NAME, "list-sessions"], capture_output=True, timeout=SERVER_TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise ClusterError(
            f"the tmux server does not answer; wake it up, or end it and all its jobs: tmux -L {SOCKET_NAME} kill-server"
        ) from None
    return libtmux.Server(socket_name=SOCKET_NAME)


def session_names() -> set[str]:
    """Return the names of the sessions that are alive, of whatever folder."""
    return {session.session_name or "" for session in _server().sessions}


def find_session(name: str) -> "Session | None":
    """Return the session of exactly this name, None when there is none."""
    for session in _server().sessions:
        if session.session_name == name:
            return session
    return None


def session_owner(name: str) -> str | None:
    """Return the run folder that a session belongs to, None when there is no such session."""
    session = find_session(name)
    return str(session.show_environment().get(OWNER_VARIABLE) or "") if session else None


def is_owned_by(name: str, run_folder: Path) -> bool:
    """Whether the session of this name is alive and belongs to this run folder."""
    return session_owner(name) == str(run_folder)


def start_session(name: str, run_folder: Path, window: str, argv: Sequence[str]) -> None:
    """Start a session with one window. Raises `ClusterError` when the name is taken.

    The session gets this process's environment, and nothing of the server's, where an earlier job's may be.
    """
    other = session_owner(name)
    if other == str(run_folder):  # of an earlier launch of this very job: its agent is gone, a window may have stayed
        kill_session(name, run_folder)
    elif other is not None:
        raise ClusterError(f"the tmux session {name} belongs to {other}; end that job first, or wait for it")
    # By name: a pattern such as * brings only the first variable that fits it (tmux 3.3). One that is named here but
    # not in our environment, because an earlier job brought it, is taken out of the session.
    server = _server()
    held = [line.partition("=")[0].lstrip("-") for line in server.cmd("show-environment", "-g").stdout]
    settings = {"update-environment": " ".join(sorted({*os.environ, *held})), **SESSION_OPTIONS}
    set_up = [word for name, value in settings.items() for word in ("set-option", "-g", name, value, ";")]
    words = [
        "new-session",
        "-d",
        "-s",
        name,
        "-n",
        window,
        "-x",
        "200",
        "-y",
        "50",
        "-e",
        f"{OWNER_VARIABLE}={run_folder}",
    ]
    here = os.getcwd().replace("#", "##")
    done = server.cmd("start-server", ";", *set_up, *_escape_semicolons([*words, "-c", here, *argv]))
    if done.stderr:
        raise ClusterError(f"tmux -L {SOCKET_NAME}: {' '.join(done.stderr)}")


def add_window(name: str, window: str, argv: Sequence[str], in_front: bool = False) -> None:
    """Add a window to a session, in front when `show`. Raises `ClusterError` when that fails."""
    words = ["new-window", "-t", f"={name}:", "-n", window, *([] if in_front else ["-d"])]
    done = _server().cmd(*_escape_semicolons([*words, *argv]))
    if done.stderr:
        raise ClusterError(f"tmux -L {SOCKET_NAME}: {' '.join(done.stderr)}")


def _escape_semicolons(argv: Sequence[str]) -> list[str]:
    """Words that tmux takes as they are: one that ends in a semicolon would end its command."""
    return [word[:-1] + r"\;" if word.endswith(";") else word for word in argv]


def new_session_argv(name: str, window: str, argv: Sequence[str]) -> list[str]:
    """Return the command that starts a session with one window on another machine."""
    set_up = [word for option, value in SESSION_OPTIONS.items() for word in ("set-option", "-g", option, value, ";")]
    new = ["new-session", "-d", "-s", name, "-n", window, "-x", "200", "-y", "50"]
    return ["tmux", "-L", SOCKET_NAME, "start-server", ";", *set_up, *_escape_semicolons([*new, *argv])]


def new_window_argv(name: str, window: str, argv: Sequence[str]) -> list[str]:
    """Return the command that adds a window to a session on another machine."""
    return [
        "tmux",
        "-L",
        SOCKET_NAME,
        *_escape_semicolons(["new-window", "-d", "-t", f"={name}:", "-n", window, *argv]),
    ]


def kill_session(name: str, run_folder: Path) -> None:
    """End a session of this run folder with all its windows; nothing when there is none."""
    if shutil.which("tmux") and is_owned_by(name, run_folder):
        _server().cmd("kill-session", "-t", f"={name}")


def attach_argv(name: str, window: str = "") -> list[str]:
    """Return the command that shows a session, or a window of it, on this terminal."""
    return ["tmux", "-L", SOCKET_NAME, "attach-session", "-t", f"={name}:{window}" if window else f"={name}"]
