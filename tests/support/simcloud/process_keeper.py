"""Ends what is left on the machines of a simulated cloud when the cloud dies, whatever kills it.

    python -m support.simcloud.process_keeper FOLDER SOCKETS

Its stdin is a pipe from the cloud, which closes when that is gone.
"""

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

DONE = b"nothing is left"  # what the cloud says when it has ended its machines itself


def everything(folder: Path) -> set[int]:
    """What runs on the machines of this folder: marked, an sshd by its configuration, or below one of these."""
    from support.ssh_machines import command_line, marked  # late: each cloud starts a keeper, few need it

    from train.tools.process import descendant_pids

    pids = {int(one.name): None for one in Path("/proc").iterdir() if one.name.isdigit()}
    found = marked(str(folder), pids)
    found |= {pid for pid in pids if "sshd" in (line := command_line(pid)) and f" -f {folder}/" in line}
    return {pid for one in found for pid in (one, *descendant_pids(one))} - {os.getpid()}


def end(folder: Path) -> None:
    """Kill it all, and what it starts meanwhile."""
    deadline = time.monotonic() + 30
    while (pids := everything(folder)) and time.monotonic() < deadline:
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        time.sleep(0.02)


def main(folder: str, sockets: str) -> None:
    """Wait for the end of the cloud, then see to it that nothing outlives it."""
    if sys.stdin.buffer.read() != DONE:
        end(Path(folder))
    shutil.rmtree(sockets, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
