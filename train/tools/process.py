"""Start one trainer process per GPU with the environment variables that torchrun would set. Imports no torch.

The agent uses it on every machine, and `python -m train --procs N` on its own. A child dies with its parent, whatever
kills the parent (prctl(2), PR_SET_PDEATHSIG). Each child leads a process group, to which its loader workers belong.
"""

import contextlib
import ctypes
import fcntl
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO

from .agent_protocol import TOKEN_VARIABLE
from .files import PROJECT_ROOT, open_regular

POLL_SECONDS = 0.05  # of `launch_ranks`
PORTS = range(20000, 32768)  # Linux gives outgoing connections those from 32768 on, macOS and Windows from 49152 on
_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1  # of prctl(2)
_PR_SET_CHILD_SUBREAPER = 36
_M_TRIM_THRESHOLD = -1  # of mallopt(3)
_M_MMAP_MAX = -4


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel, on Linux, to kill this process when its parent ends. If `parent` has ended before, exit."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent not in (None, os.getppid()):
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent has ended, so that `descendant_pids` finds them. Linux only."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def leave_terminal() -> None:
    """Let no program that this process will start ask a question on its terminal: one in tmux that nobody sees.

    Such a program, of AWS's credential_process or of ssh, then fails instead of waiting for ever. On macOS the first
    process of a session cannot leave.
    """
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # which the kernel sends to who leaves
    with contextlib.suppress(OSError), Path("/dev/tty").open() as terminal:  # there may be none
        fcntl.ioctl(terminal, termios.TIOCNOTTY)
    signal.signal(signal.SIGHUP, handler)


def disable_malloc_trim() -> None:
    """Let malloc keep the memory that this process frees instead of returning it to the kernel.

    On a CPU each training step frees and allocates the same gigabyte: steps are 18 % faster (LOG.md). A loader worker
    does so with the memory of one image after the other.
    """
    if sys.platform == "linux":
        for option, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1)):
            _LIBC.mallopt(option, value)


def descendant_pids(pid: int) -> list[int]:
    """Return the ids of all descendants of a process, whichever of its threads started them."""
    pids = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (thread / "children").read_text().split()):
                pids += [child, *descendant_pids(child)]
    return pids


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGTERM; most of the signals for real time have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def command_line(pid: int) -> str:
    """Return the command line of a process, its words separated by spaces; "" when there is no such process."""
    argv = ["ps", "-ww", "-o", "args=", "-p", str(pid)]
    env = os.environ | {"LC_ALL": "C.UTF-8"}  # in other locales it prints ? for an umlaut
    completed = subprocess.run(argv, capture_output=True, text=True, errors="surrogateescape", env=env)
    return completed.stdout.strip()


def free_port() -> int:
    """Return a TCP port that is free, and not among those given to outgoing connections, so that it stays so."""
    for port in random.SystemRandom().sample(PORTS, 20):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("", port))
            return port
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def project_search_path() -> str:
    """Return the PYTHONPATH of this process, with this project's folder before all others."""
    return os.pathsep.join(filter(None, [str(PROJECT_ROOT), os.environ.get("PYTHONPATH", "")]))


def rank_environments(
    process_count: int, first_rank: int, world_size: int, master_address: str, master_port: int
) -> list[dict[str, str]]:
    """Return the environment variables that torchrun would set for each process of one machine."""
    common = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(process_count),
        "MASTER_ADDR": master_address,
        "MASTER_PORT": str(master_port),
    }
    local_ranks = range(process_count)
    return [{**common, "RANK": str(first_rank + local), "LOCAL_RANK": str(local)} for local in local_ranks]


def start_process(
    argv: Sequence[str],
    log: Path | None,
    environment: Mapping[str, str] | None = None,
    stdin: int = subprocess.DEVNULL,
    output: IO[bytes] | int | None = None,
    *,
    folder: Path | None = None,
    without: Collection[str] = (),
) -> subprocess.Popen[bytes]:
    """Start a process in its own session that dies with this one. Raises `OSError`.

    Its output is appended to `log`, or goes to `output` as for `Popen`, or where the output of this process goes. It
    runs in `folder`, by default in that of this process. `environment` is added to that of this process, of which it
    does not get the variables in `without`.
    """
    with contextlib.ExitStack() as files:
        output = files.enter_context(open_regular(log, "ab")) if log else output
        return subprocess.Popen(
            argv,
            stdin=stdin,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),
            cwd=folder,
            env={**{name: value for name, value in os.environ.items() if name not in without}, **(environment or {})},
        )


def kill_process_groups(processes: Sequence[subprocess.Popen[bytes]], timeout_seconds: float | None = None) -> None:
    """Kill processes together with the groups that they lead, and wait until they are gone.

    Raises `subprocess.TimeoutExpired` when a process is still there after `timeout_seconds`: stuck in a driver.
    """
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.wait(timeout_seconds)


def launch_ranks(argv: list[str], procs: int) -> int:
    """Start `procs` processes of a command as ranks of one run, and wait until all have ended.

    In these processes, this project's packages precede all of PYTHONPATH. When one fails, the others are killed.
    SIGTERM is passed on: they write a checkpoint. Returns the first non-zero exit code, 130 after Ctrl-C, else 0.
    """
    environment = {"PYTHONPATH": project_search_path(), TOKEN_VARIABLE: secrets.token_hex(16)}
    ranks: list[subprocess.Popen[bytes]] = []

    def forward_signal(number: int, _: object) -> None:
        for rank in ranks:
            rank.send_signal(number)

    signal.signal(signal.SIGTERM, forward_signal)
    try:
        for rank_environment in rank_environments(procs, 0, procs, "127.0.0.1", free_port()):
            ranks.append(start_process(argv, None, {**environment, **rank_environment}))
        while True:
            exit_codes = [rank.poll() for rank in ranks]
            failures = [code for code in exit_codes if code]
            if failures:
                return abs(failures[0])
            if None not in exit_codes:
                return 0
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        return 130
    finally:
        kill_process_groups(ranks)
