"""Start one trainer process per GPU with the environment variables that torchrun would set. Imports no torch.

The agent uses it on every machine, and `python -m train --procs N` on its own. A child dies with its parent, whatever
kills the parent (prctl(2), PR_SET_PDEATHSIG). Each child leads a process group, to which its loader workers belong.
"""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1  # of prctl(2)
_PR_SET_CHILD_SUBREAPER = 36
_M_TRIM_THRESHOLD = -1  # of mallopt(3)
_M_MMAP_MAX = -4


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends. Only Linux can do that."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent has ended, so that `descendant_pids` finds them. Linux only."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)


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


def command_line(pid: int) -> str:
    """Return the command line of a process, its words separated by spaces; "" when there is no such process."""
    completed = subprocess.run(["ps", "-ww", "-o", "args=", "-p", str(pid)], capture_output=True, text=True)
    return completed.stdout.strip()


def free_port() -> int:
    """Return a TCP port of this machine on which nothing listens now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def spawn_ranks(
    argv: Sequence[str],
    process_count: int,
    *,
    first_rank: int = 0,
    world_size: int | None = None,
    master_address: str = "127.0.0.1",
    master_port: int,
    log_dir: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> list[subprocess.Popen[bytes]]:
    """Start the processes of ranks `first_rank` to `first_rank + process_count - 1`.

    `world_size` is the number of processes on all machines, by default those of this call. With `log_dir` the output of
    rank K goes to `log_dir`/rank-K.log. `environment` is added to the environment of this process. When a process
    cannot be started, the others are killed and the error is raised.
    """
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for variables in rank_environments(
            process_count, first_rank, world_size or process_count, master_address, master_port
        ):
            log = log_dir / f"rank-{variables['RANK']}.log" if log_dir else None
            processes.append(start_process(argv, log, {**(environment or {}), **variables}))
    except BaseException:
        kill_process_groups(processes)
        raise
    return processes


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
    return [
        {**common, "RANK": str(first_rank + local_rank), "LOCAL_RANK": str(local_rank)}
        for local_rank in range(process_count)
    ]


def start_process(
    argv: Sequence[str],
    log: Path | None,
    environment: Mapping[str, str] | None = None,
    stdin: int = subprocess.DEVNULL,
) -> subprocess.Popen[bytes]:
    """Start a process in its own session that dies with this one. Raises `OSError`.

    Its output is appended to `log`, or goes where the output of this process goes. `environment` is added to the
    environment of this process.
    """
    parent = os.getpid()

    def prepare() -> None:
        die_with_parent()
        if os.getppid() != parent:  # the parent died before the line above
            os._exit(1)

    with contextlib.ExitStack() as files:
        output = files.enter_context(log.open("ab")) if log else None
        return subprocess.Popen(
            argv,
            stdin=stdin,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=prepare,
            env={**os.environ, **(environment or {})},
        )


def kill_process_groups(processes: Sequence[subprocess.Popen[bytes]], timeout_seconds: float | None = None) -> None:
    """Kill processes together with the groups that they lead, and wait until they are gone.

    Raises `subprocess.TimeoutExpired` when a process is still there after `timeout_seconds`: it is stuck in the kernel,
    for example in a driver.
    """
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.wait(timeout_seconds)
