"""Kills what a user's command has started when the agent has died: `python guard.py NAME=VALUE [LABEL]`.

The kernel kills the processes that the agent has started itself, but not their children: a command such as
`sh -c "python train.py"` would leave its trainer behind. This process reads its stdin, a pipe whose other end only the
agent has. At the end of the pipe it kills all processes that were started with the environment variable NAME=VALUE, and
removes the containers with the label of a second argument, if there is one.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

MAX_ROUNDS = 100  # a process may start others while it is looked for
ROUND_SECONDS = 0.05
DOCKER_SECONDS = 60.0


def has_variable(pid: int, assignment: str) -> bool:
    """Whether a process was started with an environment variable, given as NAME=value."""
    with contextlib.suppress(OSError):
        return os.fsencode(assignment) in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def marked_pids(assignment: str) -> list[int]:
    """Return the processes of this user, but for this one, that were started with an environment variable."""
    pids = [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdecimal()]
    return [pid for pid in pids if pid != os.getpid() and has_variable(pid, assignment)]


def remove_containers(label: str) -> None:
    """Kill and remove all containers with a label."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        listing = ["docker", "ps", "--all", "--quiet", "--filter", f"label={label}"]
        output = subprocess.run(listing, capture_output=True, text=True, timeout=DOCKER_SECONDS).stdout
        if containers := output.split():
            subprocess.run(["docker", "rm", "--force", *containers], capture_output=True, timeout=DOCKER_SECONDS)


def main() -> None:
    """Wait for the end of the agent, then kill the marked processes."""
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signal_number, signal.SIG_IGN)
    while sys.stdin.buffer.read(1):
        pass
    for _ in range(MAX_ROUNDS):
        pids = marked_pids(sys.argv[1])
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if not pids:
            break
        time.sleep(ROUND_SECONDS)
    if len(sys.argv) > 2:
        remove_containers(sys.argv[2])


if __name__ == "__main__":
    main()
