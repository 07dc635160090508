"""Start one trainer process per GPU with the five variables that torchrun would set. Imports no torch.

The agent uses it on every machine, and `python -m train --procs N` for itself. A child dies with its parent, whatever
kills the parent (prctl(2), PR_SET_PDEATHSIG), and is the leader of a group that its own loader workers belong to.
"""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of mallopt(3)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of whatever our children leave behind, so that `descendants` finds it."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def disable_malloc_trim() -> None:
    """Let malloc keep what this process frees: on a CPU a step frees and takes the same gigabyte (18 % faster, LOG.md),
    and a loader's worker the memory of one image after the other.
    """
    for option, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1)):
        _LIBC.mallopt(option, value)


def descendant_pids(pid: int) -> list[int]:
    """Return the processes below one, those of all its threads, however deep."""
    found = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (thread / "children").read_text().split()):
                found += [child, *descendant_pids(child)]
    return found


def free_port() -> int:
    """Return a TCP port of this machine that nothing listens on now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


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
    """Start `procs` processes of ranks `first_rank` and up of `world`; output of rank K to logs/rank-K.log."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        for each in rank_environments(
            process_count, first_rank, world_size or process_count, master_address, master_port
        ):
            log = log_dir / f"rank-{each['RANK']}.log" if log_dir else None
            started.append(start_process(argv, log, {**(environment or {}), **each}))
    except BaseException:
        kill_process_groups(started)
        raise
    return started


def rank_environments(
    process_count: int, first_rank: int, world_size: int, master_address: str, master_port: int
) -> list[dict[str, str]]:
    """Return what torchrun would tell each of a machine's processes by environment."""
    common = {
        "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(process_count), "MASTER_ADDR": master_address, "MASTER_PORT": str(master_port)
    }  # fmt: skip
    return [{**common, "RANK": str(first_rank + one), "LOCAL_RANK": str(one)} for one in range(process_count)]


def start_process(
    argv: Sequence[str],
    log: Path | None,
    environment: Mapping[str, str] | None = None,
    stdin: int = subprocess.DEVNULL,
) -> subprocess.Popen[bytes]:
    """Start one process that dies with this one, its output appended to `log`, else to where ours goes."""
    parent = os.getpid()

    def prepare() -> None:
        die_with_parent()
        if os.getppid() != parent:  # it died before the line above
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
    """Kill the processes with the groups they lead, and wait until they are gone.

    Raises `subprocess.TimeoutExpired` when one is still there after `seconds`: stuck in the kernel, in a driver.
    """
    for one in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(one.pid, signal.SIGKILL)
    for one in processes:
        one.wait(timeout_seconds)
