"""A process that has imported torch and forks programs: like `python -m train`, without the seconds of the import.

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
from train.engine.main import main
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


def run_trainer(argv: list[str]) -> None:
    """Run the trainer. Does not return."""
    exit_code: Any = 1
    try:
        exit_code = main(argv)
    except SystemExit as error:
        exit_code = error.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code if isinstance(exit_code, int) else bool(exit_code))


def run_module(module: str, argv: list[str]) -> None:
    """Run `python -m MODULE`. The interpreter ends with what the module raises, as it always does. Does not return."""
    sys.argv = [module, *argv]
    sys.modules.pop(module, None)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit(0)


def start(argv: list[str], environment: dict[str, str], folder: str, log: str) -> int:
    """Fork a trainer and return its process. Both its streams go to `log`."""
    pid = os.fork()
    if not pid:
        become_child(environment, folder, log, log)
        run_trainer(argv)
    return pid


def start_module(module: str, argv: list[str], environment: dict[str, str], folder: str, out: str, err: str) -> int:
    """Fork `python -m MODULE` and return its process."""
    pid = os.fork()
    if not pid:
        become_child(environment, folder, out, err)
        run_module(module, argv)
    return pid


def poll(pid: int) -> int | None:
    """Return the exit code of a trainer, None while it runs."""
    ended_pid, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended_pid else None


if __name__ == "__main__":
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        commands: dict[str, Callable[..., Any]] = {"start": start, "start_module": start_module, "poll": poll}
        answer = commands[command](*arguments)
        print(json.dumps(answer), flush=True)
