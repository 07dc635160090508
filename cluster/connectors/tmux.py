"""tmux sessions on this computer, through libtmux: one private tmux server, one session per job.

A window runs its command as its process; nothing is typed into a shell. The user's ~/.tmux.conf applies, so that an
attached session behaves as usual. `new_session_argv` and `new_window_argv` are commands for other machines.
"""

import functools
import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.errors import ClusterError

if TYPE_CHECKING:
    from libtmux import Server

SOCKET_NAME = "imgnet"
SERVER_TIMEOUT_SECONDS = 10.0
SERVER_ENDED = "server exited unexpectedly"  # printed by tmux when the server ends before it answers
# How tmux says that there is no server, or no session of a name.
NOTHING_THERE = re.compile(
    r"no server running|error connecting to .*\((No such file or directory|Connection refused)\)|can't find"
    rf"|no such session|lost server|{SERVER_ENDED}"
)
NO_SOCKET_FOLDER = ("couldn't create directory", "error creating")  # printed by tmux for the folder of its socket
USAGE = "usage: new-session"  # printed by a tmux that knows no `new-session -e`
NO_VARIABLE = "unknown variable"  # printed by tmux for a session that lacks it
DETACH_KEYS = "Ctrl-b d"
NESTED_DETACH_KEYS = "Ctrl-b Ctrl-b d"  # inside a tmux of the user's own, which takes the first Ctrl-b
# These override the user's configuration: a session lives while nobody is attached, and ends with its commands. The
# status line shows whole names, and how to leave: "#{prefix}" is the key that the user has set.
SESSION_OPTIONS = {
    "destroy-unattached": "off",
    "exit-unattached": "off",
    "remain-on-exit": "off",
    "status-left-length": "40",
    "status-right": "leave: #{prefix} d (in your own tmux: #{prefix} #{prefix} d)",
    "status-right-length": "60",
}
# Shows a file that grows, and no keys. Ctrl-C, by which people try to leave a session, has no effect on it.
TAIL_SCRIPT = 'stty -echo 2>/dev/null; trap "" INT QUIT TSTP; exec tail -n +1 -F "$@" 2>/dev/null'
# The places of windows in the status line: those of many machines in the order of their numbers, the trainers first.
FIRST_TRAIN_WINDOW = 1
FIRST_AGENT_WINDOW = 100
MONITOR_WINDOW = 200
# Set in a session's environment to the run folder of its job.
OWNER_VARIABLE = "IMGNET_RUN"
DETACHED_SIZE = ("-x", "200", "-y", "50")  # columns and rows until a terminal attaches
# Starts the command "$@" in a session of processes of its own, and shows what it writes to the log "$0".
FOLLOWED_COMMAND_SCRIPT = f'setsid "$@" </dev/null >>"$0" 2>&1 & set -- --pid=$! "$0"; {TAIL_SCRIPT}'


# Attaches to the session "$1" of the server "$0". A terminal type that this computer does not know becomes a usual one.
ATTACH_SCRIPT = (
    'infocmp "$TERM" >/dev/null 2>&1 || TERM=xterm-256color; export TERM; exec tmux -L "$0" attach-session -t "$1"'
)


def require_tmux() -> None:
    """Raise `ClusterError` when tmux is not installed, or its server cannot be asked."""
    _require_program()
    session_names()


def _require_program() -> None:
    if not shutil.which("tmux"):
        raise ClusterError(
            "tmux is missing; install it: sudo apt-get install tmux (Debian, Ubuntu), brew install tmux (macOS)"
        )


@functools.cache
def server_class() -> type["Server"]:
    """Return libtmux's server, which asks tmux in a way that depends on neither our terminal nor our locale.

    The tmux client refuses a terminal whose type this computer does not know, replaces characters where the locale is
    not UTF-8 by name, and waits for ever for a stopped server. So it gets no standard input, `-u`, and a time limit.
    """
    import libtmux  # takes 0.1 s, which `imgnet-cluster --help` need not wait for
    from libtmux.common import tmux_cmd

    class QuietCommand(tmux_cmd):
        def __init__(self, *words: str) -> None:
            self.cmd = ["tmux", f"-L{SOCKET_NAME}", "-u", *words]
            completed = subprocess.run(
                self.cmd,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="surrogateescape",  # as in the paths and names with which its words are compared
                timeout=SERVER_TIMEOUT_SECONDS,
            )
            self.returncode = completed.returncode
            self.stdout = completed.stdout.splitlines()
            self.stderr = [line for line in completed.stderr.splitlines() if line]

    class QuietServer(libtmux.Server):
        def cmd(self, cmd: str, *args: str, target: str | int | None = None) -> tmux_cmd:
            """Run a tmux command. Raises `ClusterError` when the server does not answer."""
            targets = [] if target is None else ["-t", str(target)]
            try:
                return QuietCommand(cmd, *targets, *args)
            except subprocess.TimeoutExpired:
                raise ClusterError(
                    f"the tmux server {SOCKET_NAME} does not answer; resume its process, or end it (jobs continue): "
                    f"tmux -L {SOCKET_NAME} kill-server"
                ) from None

    return QuietServer


def _server() -> "Server":
    """Return the private tmux server. Its commands raise `ClusterError` if it does not answer."""
    _require_program()
    return server_class()(socket_name=SOCKET_NAME)


def _ask(*words: str) -> list[str] | None:
    """Return what a tmux command prints, None without server or session. Raises `ClusterError` for other failures."""
    completed = _server().cmd(*words)
    error = " ".join(completed.stderr)
    if NOTHING_THERE.match(error):
        return None
    if error and not error.startswith(NO_VARIABLE):
        raise _failure(completed.stderr)
    return completed.stdout


def _failure(stderr: list[str]) -> ClusterError:
    """Return the error for what tmux has printed. Its socket lies in $TMUX_TMPDIR, else in /tmp."""
    error = " ".join(stderr)
    remedy = ""
    if error.startswith(NO_SOCKET_FOLDER):
        remedy = "; name a folder that can be written: export TMUX_TMPDIR=FOLDER"
    elif USAGE in error:
        remedy = "; tmux 3.2 or newer is needed, see: tmux -V"
    return ClusterError(f"tmux -L {SOCKET_NAME}: {error}{remedy}")


def session_names() -> set[str]:
    """Return the names of all living sessions, also those of other run folders."""
    return set(_ask("list-sessions", "-F", "#{session_name}") or ())


def window_names(name: str) -> list[str]:
    """Return the names of a session's windows, [] if there is no such session."""
    return _ask("list-windows", "-t", f"={name}", "-F", "#{window_name}") or []


def session_owner(name: str) -> str | None:
    """Return the run folder that a session belongs to, "" if it has none, None if there is no such session."""
    lines = _ask("show-environment", "-t", f"={name}", OWNER_VARIABLE)
    if lines is None:
        return None
    return lines[0].partition("=")[2] if lines else ""


def is_owned_by(name: str, run_folder: Path) -> bool:
    """Whether there is a session of this name that belongs to this run folder."""
    owner = session_owner(name)
    return bool(owner) and os.path.realpath(str(owner)) == os.path.realpath(run_folder)  # links may lead to it


def start_session(name: str, run_folder: Path, window: str, argv: Sequence[str]) -> None:
    """Start a session with one window. Raises `ClusterError` if another run folder has a session of this name.

    The session gets this process's environment and none of the server's, which may be that of an earlier job.
    """
    if is_owned_by(name, run_folder):  # left by an earlier launch of this job: a window may have outlived its agent
        kill_session(name, run_folder)
    elif (owner := session_owner(name)) is not None:
        raise ClusterError(f"the tmux session {name} belongs to {owner}; end that job first, or wait for it")
    # The variables are listed by name, because a pattern such as * copies only the first match (tmux 3.3). A variable
    # that is listed but not in our environment, because it came from an earlier job, is removed from the session.
    server = _server()
    global_variables = [line.partition("=")[0].lstrip("-") for line in server.cmd("show-environment", "-g").stdout]
    options = {"update-environment": " ".join(sorted({*os.environ, *global_variables})), **SESSION_OPTIONS}
    words = _new_session(name, window, ["-c", str(Path.cwd()).replace("#", "##"), *argv], str(run_folder), options)
    deadline = time.monotonic() + SERVER_TIMEOUT_SECONDS
    while True:
        completed = server.cmd(*words)
        if not completed.stderr:
            return
        # The server ends with its last session. A command that reaches it at that moment is lost; the next one starts
        # another server.
        if SERVER_ENDED not in completed.stderr or time.monotonic() > deadline:
            raise _failure(completed.stderr)


def add_window(name: str, window: str, argv: Sequence[str], in_front: bool = False, index: int | None = None) -> None:
    """Add a window, at `index` of the status line if that is free; select it if `in_front`. Raises `ClusterError`."""
    for place in ("",) if index is None else (str(index), ""):
        new_window = ["new-window", "-t", f"={name}:{place}", "-n", window, *([] if in_front else ["-d"])]
        completed = _server().cmd(*_escape_semicolons([*new_window, *argv]))
        if not completed.stderr:
            return
    raise _failure(completed.stderr)


def _new_session(
    name: str, window: str, argv: Sequence[str], owner: str, options: Mapping[str, str] = SESSION_OPTIONS
) -> list[str]:
    """Return the words with which tmux starts its server, sets options and starts a session with one window."""
    settings = [word for name, value in options.items() for word in ("set-option", "-g", name, value, ";")]
    owner_option = ["-e", f"{OWNER_VARIABLE}={owner}"] if owner else []
    new_session = ["new-session", "-d", "-s", name, "-n", window, *DETACHED_SIZE, *owner_option, *argv]
    return ["start-server", ";", *settings, *_escape_semicolons(new_session)]


def _escape_semicolons(argv: Sequence[str]) -> list[str]:
    """Return arguments that tmux takes literally. To tmux, a semicolon at the end of an argument ends the command."""
    return [word[:-1] + r"\;" if word.endswith(";") else word for word in argv]


def tail_argv(path: Path | str, *options: str) -> list[str]:
    """Return the command of a window that shows a file while it grows. Ctrl-C does not end it."""
    return ["sh", "-c", TAIL_SCRIPT, "tail", *options, str(path)]


def followed_argv(argv: Sequence[str], log: Path | str) -> list[str]:
    """Return a window's command that starts a program, which outlives it, and follows its log until it ends."""
    return ["sh", "-c", FOLLOWED_COMMAND_SCRIPT, str(log), *argv]


def new_session_argv(name: str, window: str, argv: Sequence[str], owner: str = "") -> list[str]:
    """Return the command that starts a session with one window, for a run folder or on another machine."""
    return ["tmux", "-L", SOCKET_NAME, *_new_session(name, window, argv, owner)]


def new_window_argv(name: str, window: str, argv: Sequence[str]) -> list[str]:
    """Return the command that adds a window to a session on another machine."""
    new_window = ["new-window", "-d", "-t", f"={name}:", "-n", window]
    return ["tmux", "-L", SOCKET_NAME, *_escape_semicolons([*new_window, *argv])]


def kill_session(name: str, run_folder: Path) -> None:
    """End the session of this name with all its windows, if it exists and belongs to this run folder."""
    if shutil.which("tmux") and is_owned_by(name, run_folder):
        _server().cmd("kill-session", "-t", f"={name}")


def attach_argv(name: str, window: str = "") -> list[str]:
    """Return the command that attaches this terminal to a session, or to a window of it."""
    target = f"={name}:{window}" if window else f"={name}"
    return ["sh", "-c", ATTACH_SCRIPT, SOCKET_NAME, target]


def detach_keys() -> str:
    """Return the keys that leave a session from this terminal. Inside the user's own tmux they are different."""
    return NESTED_DETACH_KEYS if os.environ.get("TMUX") else DETACH_KEYS
