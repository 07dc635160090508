"""Faults inside a trial's own processes (trials.py): kills within a link or a save; and a fork server.

Each process of a trial installs its faults from its environment, right after its fork:

    TRIAL_KILL    "attempt before 2 machine": the machine dies right before it links an attempt file for the second time
    TRIAL_NOTE    file that the one resulting kill creates; its content is the point

`python benchmarks/elastic/faults.py` is the fork server: a process that has imported torch and from which agents and
trainers are forked. A start then costs milliseconds instead of three seconds of a processor. Agents and trainers run
from their `main`, as they do otherwise.
"""

import json
import os
import runpy
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
AGENT_MODULE = "cluster.agent"
TRAINER_MODULES = ("train", "train.engine.standby")
# Agents link attempt files and the checkpoints to resume from; the trainer of rank 0 does the rest. At "save in" the
# checkpoint is half written.
KILL_POINTS = (
    "attempt before",
    "attempt after",
    "resume before",
    "resume after",
    "save in",
    "save before",
    "save after",
    "result before",
    "result after",
)

_times_reached: Counter[str] = Counter()


def install_faults() -> None:
    """Install the faults that the environment asks for in this process."""
    if "TRIAL_KILL" in os.environ:
        _watch_files()


def _watch_files() -> None:
    """Wrap link, fsync and rename so that each passes its kill points."""
    link, fsync, replace = os.link, os.fsync, os.replace

    def watched_link(source: Any, target: Any, **options: Any) -> None:
        kind = _link_kind(str(target))
        _reach_kill_point(f"{kind} before")
        link(source, target, **options)
        _reach_kill_point(f"{kind} after")

    def watched_fsync(fd: Any) -> None:
        if Path(f"/proc/self/fd/{fd}").readlink().name.startswith(".step-"):
            _reach_kill_point("save in", fd)
        fsync(fd)

    def watched_replace(source: Any, target: Any, **options: Any) -> None:
        kind = "save" if Path(target).name.startswith("step-") else ""
        _reach_kill_point(f"{kind} before")
        replace(source, target, **options)
        _reach_kill_point(f"{kind} after")

    os.link, os.fsync, os.replace = watched_link, watched_fsync, watched_replace  # type: ignore[assignment]


def _link_kind(target: str) -> str:
    return next((kind for kind in ("attempt", "resume", "result") if f"/{kind}" in target), "")


def _reach_kill_point(point: str, half_written_fd: int | None = None) -> None:
    """Count a passage of a point, and die if it is the one of TRIAL_KILL.

    A file that is being written is first cut to half its size.
    """
    kind, place, occurrence, victim = os.environ["TRIAL_KILL"].split()
    _times_reached[point] += 1
    if point != f"{kind} {place}" or _times_reached[point] != int(occurrence):
        return
    try:
        note_fd = os.open(os.environ["TRIAL_NOTE"], os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:  # an earlier process of this machine was killed at this point already
        return
    os.write(note_fd, point.encode())
    if half_written_fd is not None:
        os.ftruncate(half_written_fd, os.fstat(half_written_fd).st_size // 2)
    if victim == "machine" and kind not in ("attempt", "resume"):
        os.kill(os.getppid(), signal.SIGKILL)  # the agent; the machine's other processes die with it
    os.killpg(0, signal.SIGKILL)


# --- the fork server ----------------------------------------------------------------------------------------------


def serve_forks() -> None:
    """For each line of JSON on stdin, {"argv", "environment", "folder", "log"}, fork an agent and print its pid."""
    from train.tools import process

    _preload_torch()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children need not be reaped
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            process.die_with_parent()
            os.setsid()
            os.chdir(request["folder"])
            log_fd = os.open(request["log"], os.O_CREAT | os.O_APPEND | os.O_WRONLY)
            _redirect_streams(os.open(os.devnull, os.O_RDONLY), log_fd, log_fd)
            subprocess.Popen._execute_child = _fork_trainer  # type: ignore[attr-defined]
            os.environ.clear()
            os.environ.update(request["environment"])
            install_faults()
            _run_module(AGENT_MODULE, request["argv"], {})
        print(pid, flush=True)


def _preload_torch() -> None:
    import libtmux  # noqa: F401 - imported for the forks
    import torch

    import train.engine.run  # noqa: F401 - imported for the forks

    torch.optim.SGD([torch.zeros(1)], lr=0.0)  # imports torch._dynamo


_original_execute_child = subprocess.Popen._execute_child  # type: ignore[attr-defined]


def _fork_trainer(self: Any, args: Sequence[str], executable: Any, preexec_fn: Any, *rest: Any) -> None:
    """Stand in for `Popen._execute_child`: fork trainers, and start any other program as usual.

    `rest` follows the private signature of CPython: rest[3] is env, rest[7:13] are the six pipe descriptors.
    """
    command = [str(argument) for argument in args]
    module = command[command.index("-m") + 1] if "-m" in command else ""
    if module not in TRAINER_MODULES:
        _original_execute_child(self, args, executable, preexec_fn, *rest)
        return
    environment = rest[3]
    pipe_fds = rest[7:13]
    pid = os.fork()
    if not pid:
        os.setsid()
        _redirect_streams(pipe_fds[0], pipe_fds[3], pipe_fds[5])
        signal.set_wakeup_fd(-1)
        for signal_number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(signal_number, signal.SIG_DFL)
        preexec_fn()
        _times_reached.clear()
        _run_module(module, command[command.index("-m") + 2 :], environment)
    self.pid, self._child_created = pid, True
    self._close_pipe_fds(*pipe_fds)


def _redirect_streams(*fds: int) -> None:
    """Make these descriptors stdin, stdout and stderr, and close all others; locks are among those."""
    duplicates = [os.dup(fd) for fd in fds]
    for stream, duplicate in enumerate(duplicates):
        os.dup2(duplicate, stream)
    os.closerange(3, 4096)


def _run_module(module: str, argv: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Run a module as `python -m` does, and end this process with its exit code."""
    os.environ.update(environment)
    sys.argv = [module, *argv]
    code: Any = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    serve_forks()
