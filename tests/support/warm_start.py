"""A process that has imported torch and forks trainers: like `python -m train`, without the seconds of the import.

It reads a JSON line for each command from stdin and answers with a JSON line. It computes nothing itself, so that its
children inherit no threads and no locked locks.
"""

import json
import os
import signal
import sys
from typing import Any

import torch._dynamo  # noqa: F401  # loaded before the fork

import train.engine.run  # noqa: F401  # loaded before the fork
from train.engine.main import main
from train.tools.process import die_with_parent


def run_trainer(argv: list[str], environment: dict[str, str], folder: str, log: str) -> None:
    """Turn this process into a trainer in a session of its own. Does not return."""
    os.setsid()
    die_with_parent()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    os.environ.update(environment)
    log_fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
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


def start(*arguments: Any) -> int:
    """Fork a trainer and return its process. The arguments are those of `run_trainer`."""
    pid = os.fork()
    if not pid:
        run_trainer(*arguments)
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
        print(json.dumps({"start": start, "poll": poll}[command](*arguments)), flush=True)
