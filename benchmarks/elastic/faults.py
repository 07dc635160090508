"""What a trial (trials.py) does to its own processes: kills inside a link or a save, slower steps, cheap starts.

Each process of a trial arms itself from its environment, by a sitecustomize or when it is forked:

    TRIAL_KILL    "attempt before 2 machine": with its second link of an attempt file, just before it, the machine dies
    TRIAL_NOTE    made by the one kill that comes of it: what, where
    TRIAL_SLOW    seconds that each training step takes longer: time for faults costs no processor then

`python elastic_faults.py` is the process from which the others are forked, for it has loaded torch: a start costs
milliseconds instead of three seconds of a processor. Agent and trainers run as they do otherwise, from their `main`.
"""

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
AGENT_MODULE = "cluster.agent"
TRAINER_MODULES = ("train", "train.engine.standby")
# Attempt files and their checkpoints are linked by agents, the others are the trainers' of rank 0. "in": half written.
KILL_POINTS = (
    "attempt before", "attempt after", "resume before", "resume after",
    "save in", "save before", "save after", "result before", "result after",
)  # fmt: skip

_times_reached: Counter[str] = Counter()


def install_faults() -> None:
    """Do what the environment asks of this process."""
    if "TRIAL_SLOW" in os.environ:
        _slow_down(float(os.environ["TRIAL_SLOW"]))
    if "TRIAL_KILL" in os.environ:
        _watch_files()


def _slow_down(seconds: float) -> None:
    from train.data.order.usage_log import UsageLog

    note = UsageLog.record_step

    def slowed(*words: Any) -> None:
        note(*words)
        time.sleep(seconds)

    UsageLog.record_step = slowed  # type: ignore[method-assign]


def _watch_files() -> None:
    link, sync, rename = os.link, os.fsync, os.replace

    def watched_link(source: Any, target: Any, **more: Any) -> None:
        name = _link_kind(str(target))
        _reach_kill_point(f"{name} before")
        link(source, target, **more)
        _reach_kill_point(f"{name} after")

    def watched_sync(file: Any) -> None:
        if Path(f"/proc/self/fd/{file}").readlink().name.startswith(".step-"):
            _reach_kill_point("save in", file)
        sync(file)

    def watched_rename(source: Any, target: Any, **more: Any) -> None:
        name = "save" if Path(target).name.startswith("step-") else ""
        _reach_kill_point(f"{name} before")
        rename(source, target, **more)
        _reach_kill_point(f"{name} after")

    os.link, os.fsync, os.replace = watched_link, watched_sync, watched_rename  # type: ignore[assignment]


def _link_kind(target: str) -> str:
    return next((name for name in ("attempt", "resume", "result") if f"/{name}" in target), "")


def _reach_kill_point(point: str, half_written_fd: int | None = None) -> None:
    """Go through a point, or die there when it is its turn; a file that is being written is left half."""
    wanted, place, turn, who = os.environ["TRIAL_KILL"].split()
    _times_reached[point] += 1
    if point != f"{wanted} {place}" or _times_reached[point] != int(turn):
        return
    try:
        note = os.open(os.environ["TRIAL_NOTE"], os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:  # another trainer of this machine was killed here before
        return
    os.write(note, point.encode())
    if half_written_fd is not None:
        os.ftruncate(half_written_fd, os.fstat(half_written_fd).st_size // 2)
    if who == "machine" and wanted not in ("attempt", "resume"):
        os.kill(os.getppid(), signal.SIGKILL)  # the agent; the others of the machine die with it
    os.killpg(0, signal.SIGKILL)


# --- starting by a fork ------------------------------------------------------------------------------------------


def serve_forks() -> None:
    """For each line of JSON on stdin ({"argv", "environment", "folder", "log"}) fork an agent, and print its pid."""
    from train.tools import process

    _preload_torch()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody has to reap
    for line in sys.stdin:
        asked = json.loads(line)
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            process.die_with_parent()
            os.setsid()
            os.chdir(asked["folder"])
            log = os.open(asked["log"], os.O_CREAT | os.O_APPEND | os.O_WRONLY)
            _redirect_streams(os.open(os.devnull, os.O_RDONLY), log, log)
            subprocess.Popen._execute_child = _fork_trainer  # type: ignore[attr-defined]
            os.environ.clear()
            os.environ.update(asked["environment"])
            install_faults()
            _run_module(AGENT_MODULE, asked["argv"], {})
        print(pid, flush=True)


def _preload_torch() -> None:
    import libtmux  # noqa: F401
    import torch

    import train.engine.run  # noqa: F401

    torch.optim.SGD([torch.zeros(1)], lr=0.0)  # imports torch._dynamo


_original_execute_child = subprocess.Popen._execute_child  # type: ignore[attr-defined]


def _fork_trainer(self: Any, args: Sequence[str], executable: Any, preexec_fn: Any, *rest: Any) -> None:
    """Be `Popen._execute_child`: fork the trainers, start anything else as usual."""
    words = [str(one) for one in args]
    module = words[words.index("-m") + 1] if "-m" in words else ""
    if module not in TRAINER_MODULES:
        _original_execute_child(self, args, executable, preexec_fn, *rest)
        return
    env, pipes = rest[3], rest[7:13]
    pid = os.fork()
    if not pid:
        os.setsid()
        _redirect_streams(pipes[0], pipes[3], pipes[5])
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        preexec_fn()
        _times_reached.clear()
        _run_module(module, words[words.index("-m") + 2 :], env)
    self.pid, self._child_created = pid, True
    self._close_pipe_fds(*pipes)


def _redirect_streams(*fds: int) -> None:
    """Take these files as stdin, stdout and stderr, and close all others, locks among them."""
    kept = [os.dup(one) for one in fds]
    for number, one in enumerate(kept):
        os.dup2(one, number)
    os.closerange(3, 4096)


def _run_module(module: str, argv: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Run a module as `python -m` does, and end."""
    os.environ.update(environment)
    sys.argv = [module, *argv]
    code: Any = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    serve_forks()
