"""A process that has imported torch and forks programs: like `python -m MODULE`, without the seconds of the import.

It reads a JSON line for each command from stdin and answers with a JSON line. It computes nothing itself, so that its
children inherit no threads and no locked locks.
"""

import json
import os
import runpy
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch._dynamo  # noqa: F401  # loaded before the fork

import train.engine.run  # noqa: F401  # loaded before the fork
from train.tools.process import die_with_parent


def become_child(environment: dict[str, str], folder: str, out: str, err: str) -> None:
    """Give this fork a session, folder, environment and streams of its own. Output is appended to the files."""
    os.setsid()
    die_with_parent()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    os.environ.update(environment)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), stream)


def run_module(module: str, argv: list[str]) -> None:
    """Run `python -m MODULE`. The interpreter ends with what the module raises, as it always does. Does not return."""
    sys.argv = [module, *argv]
    sys.modules.pop(module, None)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit(0)


def start(module: str, argv: list[str], environment: dict[str, str], folder: str, out: str, err: str) -> int:
    """Fork `python -m MODULE` and return its process."""
    pid = os.fork()
    if not pid:
        become_child(environment, folder, out, err)
        run_module(module, argv)
    return pid


def poll(pid: int) -> int | None:
    """Return the exit code of a process, None while it runs."""
    ended_pid, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended_pid else None


if __name__ == "__main__":
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        commands: dict[str, Callable[..., Any]] = {"start": start, "poll": poll}
        answer = commands[command](*arguments)
        print(json.dumps(answer), flush=True)
