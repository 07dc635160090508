"""Kills what is left on the machines of a simulated cloud when the cloud's process ends, whatever ends it.

    python -m support.simcloud.process_keeper FOLDER SOCKETS

Its stdin is a pipe from the cloud. The pipe closes when the cloud's process has ended.
"""

import os
import shutil
import signal
import sys
import time
from pathlib import Path

KILL_SECONDS = 30.0


def process_ids(folder: Path) -> set[int]:
    """Return the processes with the mark of the machines of a folder, their sshd, and the descendants of these."""
    # Imported late: every cloud starts a keeper, and few keepers get here.
    from support.ssh_machines import command_line, marked_pids, process_table

    from train.tools.process import descendant_pids

    table = process_table()
    roots = marked_pids(str(folder), table)
    roots |= {pid for pid in table if "sshd" in (line := command_line(pid)) and f" -f {folder}/" in line}
    return {pid for root in roots for pid in (root, *descendant_pids(root))} - {os.getpid()}


def kill_all(folder: Path) -> None:
    """Kill all processes on the machines of a folder, and those that they start meanwhile."""
    from support.ssh_machines import send_signal

    deadline = time.monotonic() + KILL_SECONDS
    while (pids := process_ids(folder)) and time.monotonic() < deadline:
        send_signal([*pids], signal.SIGSTOP)
        send_signal([*pids], signal.SIGKILL)
        time.sleep(0.02)


def main(folder: str, sockets: str) -> None:
    """Wait until the cloud's process ends, then kill what outlives it and delete the tmux sockets."""
    sys.stdin.read()
    kill_all(Path(folder))
    shutil.rmtree(sockets, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
