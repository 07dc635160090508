"""A process that has imported torch and forks trainers: as `python -m train`, without the seconds of the import.

Reads one JSON line for each order from stdin and answers with one. It computes nothing itself, so that its children
find neither threads nor locks of a parent that is not theirs.
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


def become(argv: list[str], environment: dict[str, str], folder: str, log: str) -> None:
    """Be a trainer of a session of its own from here to the end."""
    os.setsid()
    die_with_parent()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    code: Any = 1
    try:
        code = main(argv)
    except SystemExit as error:
        code = error.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else bool(code))


def start(*how: Any) -> int:
    pid = os.fork()
    if not pid:
        become(*how)
    return pid


def poll(pid: int) -> int | None:
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


if __name__ == "__main__":
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in sys.stdin:
        order, *what = json.loads(line)
        print(json.dumps({"start": start, "poll": poll}[order](*what)), flush=True)
