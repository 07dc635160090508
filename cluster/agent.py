"""The small program on every machine: sets up, starts the trainers, reports, ends them. `python -m cluster.agent RUN`.

    shared/status/<machine>.json    what it last said: attempt, state, step, exit codes; replaced about once a second
    shared/logs/agent-<machine>.jsonl   each change of state with its time
    shared/stop                     a request to save and end; whoever writes it waits for the status

The trainers die with it, whatever kills it. It ends all of them when one dies, and at the job's time limit.
"""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

from train import spawn
from train.files import as_json, locked, read_json, replace

from . import attempts, tmux
from .machine import python
from .spec import Folders, Spec

TICK = 0.1  # seconds
BEAT = 1.0
GRACE = 30.0  # seconds for a save before a stop becomes a kill
SAVED = 3  # the trainer's exit code after it was asked to end


class Ended(Exception):
    """The job is over on this machine: a state, and the reason in one line."""

    def __init__(self, state: str, reason: str = "") -> None:
        super().__init__(reason)
        self.state, self.reason = state, reason


class Agent:
    """One machine's part of a job."""

    def __init__(self, run: Path, machine: str = "0") -> None:
        self.folders, self.machine = Folders(run), machine
        self.spec = Spec.from_json(json.loads(self.folders.spec.read_text()))
        self.shared, self.work = self.folders.shared, self.folders.work
        self.logs = self.shared / "logs"
        for folder in (self.shared / "status", self.logs, self.work):
            folder.mkdir(parents=True, exist_ok=True)
        self.children: list[subprocess.Popen[bytes]] = []
        self.said: dict[str, Any] = {}
        self.temp = Path(tempfile.mkdtemp(prefix="imgnet-", dir="/tmp"))  # short: the loaders' sockets lie in it
        self.beaten = 0.0
        self.started = time.monotonic()
        self.stopping: tuple[float, str] | None = None  # since when, and why
        self.signalled = ""

    def run(self) -> int:
        """Live until the job is over here. Returns 0 when it is done or stopped, 1 when it failed."""
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, self._signal)
        try:
            self.close_the_last()
            self.say("setup", pid=os.getpid(), launch=self.folders.mark)
            self.set_up()
            self.train()
        except Ended as end:
            state, reason = end.state, end.reason
        except Exception as error:
            traceback.print_exc()
            state, reason = "failed", f"the agent: {type(error).__name__}: {error}"
        finally:
            spawn.kill(self.children)
            shutil.rmtree(self.temp, ignore_errors=True)
        with contextlib.suppress(OSError):  # a full disk: who reads the status finds the lock free and says so
            self.say(state, reason=reason, ended=True)
        return int(state == "failed")

    def close_the_last(self) -> None:
        """Note when an agent before this one, that could not say so, was last alive."""
        said = read_json(self.folders.status(self.machine)) or {"ended": True}
        if not said.get("ended"):
            self.note({"time": said["time"], "attempt": said.get("attempt", 0), "state": "gone"})

    def note(self, line: dict[str, Any]) -> None:
        """Append a change of state to the log."""
        with (self.logs / f"agent-{self.machine}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _signal(self, number: int, _: FrameType | None) -> None:
        self.signalled = signal.Signals(number).name

    # --- what it says --------------------------------------------------------------------------------------------

    def say(self, state: str, **more: Any) -> None:
        """Replace the status when something changed or a beat has passed; note each change of state with its time."""
        before, now = self.said.get("state"), time.monotonic()
        said = {**self.said, "state": state, **more}
        if said == self.said and now - self.beaten < BEAT:
            return
        self.said, self.beaten = said, now
        replace(self.folders.status(self.machine), as_json({**said, "time": time.time()}), durable=False)
        if state != before:
            line = {"time": time.time(), "attempt": said.get("attempt", 0), "state": state}
            line |= {"reason": said["reason"]} if said.get("reason") else {}
            self.note(line)
            print(time.strftime("%H:%M:%S"), state, said.get("reason", ""), flush=True)

    # --- before the training -------------------------------------------------------------------------------------

    def set_up(self) -> None:
        """Draw the built-in set where the job wants it, with the copies its phases read."""
        if not self.spec.draw:
            return
        self.command("drawing the built-in set", "data", "sample", self.spec.data)
        sizes = ",".join(map(str, self.spec.recipe.copies))
        if sizes and self.spec.scale == 1:  # a rehearsal on a part of the images does as well without
            self.command(
                f"making copies of {sizes} pixels", "data", "resize", self.spec.data, self.spec.copies, "--sizes", sizes
            )

    def command(self, doing: str, *words: str) -> None:
        """Run one of our own commands, its output to logs/setup; hear stop and limit meanwhile."""
        log = self.logs / f"setup-{self.machine}.log"
        self.children = [spawn.start(python("cluster", *words), log)]
        while (code := self.children[0].poll()) is None:
            self.say("setup", doing=doing, progress=_last_line(log))
            self.check_end()
            time.sleep(TICK)
        if code:
            raise Ended("failed", f"{doing}: {_last_line(log) or f'exit code {code}'}")

    # --- the training --------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Make the next attempt, start its trainers and see them to their end. Always raises `Ended`."""
        attempt = attempts.propose(self.shared, (self.machine,), "resume" if attempts.newest(self.shared) else "start")
        for old in [self.work / "ask", self.work / "progress.json", *self.work.glob("failed-*.json")]:
            old.unlink(missing_ok=True)
        logs = self.logs / f"{attempt.number:06d}"
        logs.mkdir(exist_ok=True)
        self.say("starting", attempt=attempt.number, resume=attempt.resume, doing="", progress="")
        self.children = spawn.spawn(
            self.trainer(attempt),
            self.spec.procs,
            port=spawn.free_port(),
            logs=logs,
            environment={"IMGNET_WORK": str(self.work), "TMPDIR": str(self.temp)},
        )
        self.windows(logs)
        while True:
            codes = [one.poll() for one in self.children]  # asked first: what they reported is final then
            progress = read_json(self.work / "progress.json") or {"state": "starting"}
            if all(code is not None for code in codes) or any(codes):
                self.judge(codes)
            state = "stopping" if self.stopping else progress.pop("state")
            self.say(state, codes=codes, **{key: one for key, one in progress.items() if key != "state"})
            self.check_end()
            time.sleep(TICK)

    def trainer(self, attempt: attempts.Attempt) -> list[str]:
        """Return the trainers' command."""
        spec = self.spec
        words = ["--data", spec.data, "--copies", spec.copies, "--out", str(self.shared), "--gpus", str(spec.gpus)]
        words += [
            "--attempt",
            str(attempt.number),
            "--scale",
            str(spec.scale),
            "--save-seconds",
            str(spec.save_seconds),
        ]
        words += ["--resume", str(self.shared / attempt.resume) if attempt.resume else "none"]
        words += ["--max-steps", str(spec.max_steps)] if spec.max_steps else []
        words += ["--workers", str(spec.workers)] if spec.workers is not None else []
        words += ["--skip-bad"] if spec.skip_bad else []
        return python("train", str(self.folders.recipe), *words)

    def judge(self, codes: list[int | None]) -> None:
        """Raise `Ended` for trainers that ended. Done is what has a result: exit code 0 is not enough, nor needed."""
        if (self.shared / "result.json").exists():
            self.wait_for_children(10)
            raise Ended("done")
        if any(code == SAVED for code in codes) and self.stopping:
            self.wait_for_children(10)
            raise Ended("stopped", self.stopping[1])
        time.sleep(2 * TICK)  # the one that failed first may still be writing why
        codes = [one.poll() for one in self.children]
        for rank, code in enumerate(codes):  # killed from outside; what the others say is about its silence
            if code in (-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS):
                raise Ended("failed", f"the trainer of rank {rank} was killed by {signal.Signals(-code).name}")
        words = [read_json(path) for path in self.work.glob("failed-*.json")]
        told = sorted((one for one in words if one), key=lambda one: float(one["time"]))
        if told:
            raise Ended("failed", told[0]["reason"])
        rank, code = next(((i, c) for i, c in enumerate(codes) if c), (0, 0))
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code} and no result"
        raise Ended("failed", f"the trainer of rank {rank} {how}")

    def wait_for_children(self, seconds: float) -> None:
        """Give the others a moment to end by themselves."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(one.poll() is None for one in self.children):
            time.sleep(TICK)

    def windows(self, logs: Path) -> None:
        """Show the trainers' log and the machine in windows that end with this process. Without tmux there are none."""
        name, me = self.spec.name, str(os.getpid())
        with contextlib.suppress(Exception):  # a picture of the job must never end the job
            tmux.add(name, "train", ["tail", "-n", "+1", "-F", f"--pid={me}", str(logs / "rank-0.log")], show=True)
            tmux.add(name, "gpu", ["sh", "-c", GPU_WINDOW, "gpu", me])

    def check_end(self) -> None:
        """Hear a stop request, a signal and the time limit; ask the trainers to save, and after a while insist."""
        hours = (time.monotonic() - self.started) / 3600
        if not self.stopping:
            if (self.shared / "stop").exists():
                self.stop("stopped by the user")
            elif self.signalled:
                self.stop(f"the agent got {self.signalled}")
            elif self.spec.max_hours is not None and hours > self.spec.max_hours:
                self.stop(f"the limit of {self.spec.max_hours:g} hours (--max-hours) was reached")
        elif time.monotonic() - self.stopping[0] > GRACE or not self.can_save():
            raise Ended("stopped", self.stopping[1])

    def can_save(self) -> bool:
        """Whether there is anything to wait for: before the first step there is nothing to save."""
        return (read_json(self.work / "progress.json") or {}).get("state") in ("training", "validating", "saved")

    def stop(self, reason: str) -> None:
        """Begin to end: the trainers agree on a step, save, and go."""
        self.stopping = (time.monotonic(), reason)
        (self.work / "ask").touch()


# It asks for more than `kill -0` does: tmux loses the SIGCHLDs of commands that end at the same moment (it ignores the
# signal while utempter runs) and leaves a dead agent as a zombie until another window ends. So this one must.
GPU_WINDOW = """
while grep -qs '^State:.[^ZX]' "/proc/$1/status"; do
    clear
    if command -v nvidia-smi >/dev/null; then nvidia-smi; else ps -o pid,pcpu,rss,etime,args --ppid "$1"; fi
    sleep 2
done
"""


def _last_line(path: Path) -> str:
    """The last line of a log; a progress bar's last state."""
    with contextlib.suppress(OSError, IndexError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 500))
        return file.read().decode(errors="replace").replace("\r", "\n").strip().splitlines()[-1]
    return ""


def main() -> int:
    """Run the agent of a run folder. Returns its exit code; 1 at once when another agent has the folder."""
    folders = Folders(Path(sys.argv[1]))
    folders.work.mkdir(parents=True, exist_ok=True)
    try:
        with locked(folders.work / "agent.lock", 2.0):  # someone may just be asking whether we live
            return Agent(folders.run).run()
    except BlockingIOError:
        print(f"{folders.run}: another agent is at work here", file=sys.stderr)
        return 1


def alive(folders: Folders) -> bool:
    """Whether an agent of this machine is at work on the run: it holds a lock, which dies with it."""
    with contextlib.suppress(FileNotFoundError), (folders.work / "agent.lock").open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


if __name__ == "__main__":
    sys.exit(main())
