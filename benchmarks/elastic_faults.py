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

ROOT = Path(__file__).resolve().parent.parent
AGENT = "cluster.agent"
TRAINERS = ("train", "train.engine.standby")
# Attempt files and their checkpoints are linked by agents, the others are the trainers' of rank 0. "in": half written.
POINTS = (
    "attempt before", "attempt after", "resume before", "resume after",
    "save in", "save before", "save after", "result before", "result after",
)  # fmt: skip

_seen: Counter[str] = Counter()


def arm() -> None:
    """Do what the environment asks of this process."""
    if "TRIAL_SLOW" in os.environ:
        _slow_down(float(os.environ["TRIAL_SLOW"]))
    if "TRIAL_KILL" in os.environ:
        _watch_files()


def _slow_down(seconds: float) -> None:
    from train.data.order.usage_log import Ids

    note = Ids.note

    def slowed(*words: Any) -> None:
        note(*words)
        time.sleep(seconds)

    Ids.note = slowed  # type: ignore[method-assign]


def _watch_files() -> None:
    link, sync, rename = os.link, os.fsync, os.replace

    def watched_link(source: Any, target: Any, **more: Any) -> None:
        name = _linked(str(target))
        _pass(f"{name} before")
        link(source, target, **more)
        _pass(f"{name} after")

    def watched_sync(file: Any) -> None:
        if Path(f"/proc/self/fd/{file}").readlink().name.startswith(".step-"):
            _pass("save in", file)
        sync(file)

    def watched_rename(source: Any, target: Any, **more: Any) -> None:
        name = "save" if Path(target).name.startswith("step-") else ""
        _pass(f"{name} before")
        rename(source, target, **more)
        _pass(f"{name} after")

    os.link, os.fsync, os.replace = watched_link, watched_sync, watched_rename  # type: ignore[assignment]


def _linked(target: str) -> str:
    return next((name for name in ("attempt", "resume", "result") if f"/{name}" in target), "")


def _pass(point: str, half: int | None = None) -> None:
    """Go through a point, or die there when it is its turn; a file that is being written is left half."""
    wanted, place, turn, who = os.environ["TRIAL_KILL"].split()
    _seen[point] += 1
    if point != f"{wanted} {place}" or _seen[point] != int(turn):
        return
    try:
        note = os.open(os.environ["TRIAL_NOTE"], os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:  # another trainer of this machine was killed here before
        return
    os.write(note, point.encode())
    if half is not None:
        os.ftruncate(half, os.fstat(half).st_size // 2)
    if who == "machine" and wanted not in ("attempt", "resume"):
        os.kill(os.getppid(), signal.SIGKILL)  # the agent; the others of the machine die with it
    os.killpg(0, signal.SIGKILL)


# --- starting by a fork ------------------------------------------------------------------------------------------


def serve() -> None:
    """For each line of JSON on stdin ({"argv", "environment", "folder", "log"}) fork an agent, and print its pid."""
    from train.tools import process

    _load()
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
            _streams(os.open(os.devnull, os.O_RDONLY), log, log)
            subprocess.Popen._execute_child = _fork_trainer  # type: ignore[attr-defined]
            os.environ.clear()
            os.environ.update(asked["environment"])
            arm()
            _become(AGENT, asked["argv"], {})
        print(pid, flush=True)


def _load() -> None:
    import libtmux  # noqa: F401
    import torch

    import train.engine.run  # noqa: F401

    torch.optim.SGD([torch.zeros(1)], lr=0.0)  # imports torch._dynamo


_execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]


def _fork_trainer(self: Any, args: Sequence[str], executable: Any, preexec_fn: Any, *rest: Any) -> None:
    """Be `Popen._execute_child`: fork the trainers, start anything else as usual."""
    words = [str(one) for one in args]
    module = words[words.index("-m") + 1] if "-m" in words else ""
    if module not in TRAINERS:
        _execute(self, args, executable, preexec_fn, *rest)
        return
    env, pipes = rest[3], rest[7:13]
    pid = os.fork()
    if not pid:
        os.setsid()
        _streams(pipes[0], pipes[3], pipes[5])
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        preexec_fn()
        _seen.clear()
        _become(module, words[words.index("-m") + 2 :], env)
    self.pid, self._child_created = pid, True
    self._close_pipe_fds(*pipes)


def _streams(*files: int) -> None:
    """Take these files as stdin, stdout and stderr, and close all others, locks among them."""
    kept = [os.dup(one) for one in files]
    for number, one in enumerate(kept):
        os.dup2(one, number)
    os.closerange(3, 4096)


def _become(module: str, words: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Run a module as `python -m` does, and end."""
    os.environ.update(environment)
    sys.argv = [module, *words]
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
    serve()
