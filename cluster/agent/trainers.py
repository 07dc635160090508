"""The trainers of one machine: those of the current attempt, and a warm standby for the next.

    <work>/000007/          of attempt 7: progress.json, failed-3.json, ask (train/engine/agent_channel.py)
    <work>/logs/000007/     rank-3.log

A standby has loaded torch and waits on its stdin (train/engine/standby.py): after a loss nobody waits for imports.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.connectors.local import python
from cluster.state.attempts import Attempt
from cluster.state.spec import Spec
from train.distributed import network
from train.tools import process
from train.tools.filesystem import read_json

SAVED = 3  # a trainer's exit code after it was asked to end
ENDING_SECONDS = 10.0  # for the other trainers to follow the first that ended well
KILL_SECONDS = 20.0
STANDBY_GB = 0.6  # of memory for each process, and 1 GB that must stay free


@dataclass(frozen=True)
class Ending:
    """How an attempt's trainers ended here: "saved" or "failed", why, and whose fault it was ("own", "final", "")."""

    phase: str
    reason: str = ""
    fault: str = ""


def temporary() -> Path:
    """Make a folder for what trainers keep for a while; short, for the loaders' sockets lie in it.

    What the agents of this computer that were killed have left is removed.
    """
    for old in Path("/tmp").glob("imgnet-[0-9]*-*"):
        if not Path(f"/proc/{old.name.split('-')[1]}").exists():
            shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"imgnet-{os.getpid()}-", dir="/tmp"))


class Trainers:
    """Starts, watches and ends a machine's trainers."""

    def __init__(self, spec: Spec, shared: Path, work: Path, temp: Path) -> None:
        self.spec, self.shared, self.work = spec, shared, work
        self.environment = {"TMPDIR": str(temp)}
        self.folder, self.first_rank, self.asked = work / "000000", 0, False
        self.running: list[subprocess.Popen[bytes]] = []
        self.standby: list[subprocess.Popen[bytes]] = []

    # --- standing by ---------------------------------------------------------------------------------------------

    def warm(self) -> bool:
        """Keep a set of processes that have loaded torch. True when they have, or when there is to be none."""
        if not self.spec.standby or not (self.standby or _memory_gb() > 1 + STANDBY_GB * self.spec.procs):
            return True
        if not self.standby or any(one.poll() is not None for one in self.standby):
            process.kill(self.standby)
            self.standby = [self._stand_by(number) for number in range(self.spec.procs)]
        return self.is_warm

    @property
    def is_warm(self) -> bool:
        """Whether the whole standby is ready."""
        alive = [one for one in self.standby if one.poll() is None]
        return len(alive) == self.spec.procs and all(self._ready(one).exists() for one in range(self.spec.procs))

    def _ready(self, number: int) -> Path:
        return self.work / f"ready-{number}"

    def _stand_by(self, number: int) -> "subprocess.Popen[bytes]":
        self._ready(number).unlink(missing_ok=True)
        words = python("train.engine.standby", str(self._ready(number)), *self.arguments())
        return process.start(words, self.work / "standby.log", self.environment, stdin=subprocess.PIPE)

    # --- an attempt ----------------------------------------------------------------------------------------------

    def start(self, attempt: Attempt, place: int) -> Path:
        """Start the trainers of an attempt of which this machine is number `place`. Returns the first one's log."""
        procs, logs = self.spec.procs, self.work / "logs" / f"{attempt.number:06d}"
        for old in self.work.glob("[0-9]*"):
            shutil.rmtree(old, ignore_errors=True)
        self.folder, self.first_rank = self.work / f"{attempt.number:06d}", place * procs
        self.asked = False
        self.folder.mkdir()
        logs.mkdir(parents=True, exist_ok=True)
        argv = self.arguments() + self.of_attempt(attempt)
        common = {**self.environment, "IMGNET_WORK": str(self.folder), **network.towards(attempt.address)}
        world = procs * len(attempt.members)
        each = process.variables(procs, self.first_rank, world, attempt.address, attempt.port)
        warm, waiting, self.standby = self.is_warm, self.standby, []
        for number, variables in enumerate(each):
            log, environment = logs / f"rank-{variables['RANK']}.log", {**common, **variables}
            if warm and _tell(waiting[number], {"argv": argv, "environment": environment, "log": str(log)}):
                self.running.append(waiting[number])
            else:
                self.running.append(process.start(python("train", *argv), log, environment))
        process.kill([one for one in waiting if one not in self.running])
        return logs / f"rank-{self.first_rank}.log"

    def of_attempt(self, attempt: Attempt) -> list[str]:
        """Return the trainers' words that only an attempt knows."""
        resume = str(self.shared / attempt.resume) if attempt.resume else "none"
        return ["--attempt", str(attempt.number), "--resume", resume]

    def arguments(self) -> list[str]:
        """Return the trainers' other words after `python -m train`."""
        spec = self.spec
        valued: dict[str, Any] = {
            "--data": spec.data, "--copies": spec.copies, "--out": self.shared, "--local": self.work,
            "--gpus": spec.gpus, "--scale": spec.scale, "--save-seconds": spec.save_seconds,
            "--max-steps": spec.max_steps, "--workers": spec.loader_workers, "--threads": spec.threads,
            "--target": spec.target or None,
        }  # fmt: skip
        flags = {"--skip-bad": spec.skip_bad, "--log-ids": spec.log_ids, "--exact": spec.exact}
        words = [str(word) for name, value in valued.items() if value is not None for word in (name, value)]
        return [str(self.shared / "recipe.json"), *words, *(name for name, wanted in flags.items() if wanted)]

    def ask(self) -> None:
        """Ask them to save at a step that all agree on, and to end."""
        if not self.asked:
            (self.folder / "ask").touch()
            self.asked = True

    def progress(self) -> dict[str, Any]:
        """Return what the first of them said last, {} before its first word."""
        said = read_json(self.folder / "progress.json")
        return said if isinstance(said, dict) else {}

    def codes(self) -> list[int | None]:
        """Return the exit codes, None for those that run."""
        return [one.poll() for one in self.running]

    def ending(self, codes: list[int | None]) -> Ending | None:
        """Return how they ended, None while all run. Blocks for a moment when some have ended and some not."""
        if all(code is None for code in codes):
            return None
        if SAVED in codes:
            self.wait(ENDING_SECONDS)
            return Ending("saved")
        if any(codes):
            time.sleep(0.2)  # the one that failed first may still be writing why
        elif None in codes:
            self.wait(ENDING_SECONDS)
        codes = self.codes()
        for rank, code in enumerate(codes, self.first_rank):  # killed from outside; the others' words are about that
            if code in (-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS):
                name = signal.Signals(-code).name
                return Ending("failed", f"the trainer of rank {rank} was killed by {name}", "own")
        words = [read_json(path) for path in self.folder.glob("failed-*.json")]
        told = sorted((one for one in words if one), key=lambda one: float(one["time"]))
        for kind in ("final", "own", "peer"):
            for one in told:
                if one.get("fault", "own") == kind:
                    return Ending("failed", one["reason"], "" if kind == "peer" else kind)
        rank, code = next(((i, c) for i, c in enumerate(codes, self.first_rank) if c), (self.first_rank, 0))
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code} and no result"
        # NCCL's watchdog aborts those who wait for somebody that is gone: no fault of theirs.
        fault = "" if code == -signal.SIGABRT else "own"
        return Ending("failed", f"the trainer of rank {rank} {how}", fault)

    def wait(self, seconds: float) -> None:
        """Give them a moment to end by themselves."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and None in self.codes():
            time.sleep(0.02)

    def stacks(self) -> None:
        """Let each write the stacks of its threads into its log."""
        for one in self.running:
            if (self.folder / "progress.json").exists() and one.poll() is None:  # by then it listens
                one.send_signal(signal.SIGUSR1)
        time.sleep(0.3)

    def kill(self) -> None:
        """Kill them without waiting. The kernel does it for us only when the thread that started them has ended."""
        for one in self.running:
            with contextlib.suppress(OSError):
                os.killpg(one.pid, signal.SIGKILL)

    def stop(self, everything: bool = False) -> None:
        """End the trainers and all that they started, and with `everything` the standby.

        Raises `subprocess.TimeoutExpired` when one does not die: stuck in a driver or on a file system.
        """
        doomed, spared = self.running, [] if everything else self.standby
        if everything:
            doomed = [*doomed, *self.standby]
            self.standby = []
        self.running = []
        process.kill(doomed, KILL_SECONDS)
        kept = {pid for one in spared for pid in (one.pid, *process.descendants(one.pid))}
        for pid in set(process.descendants(os.getpid())) - kept:  # what a trainer left behind: it has come to us
            with contextlib.suppress(OSError):  # ChildProcessError is one: not ours, or gone
                if _has(pid, f"TMPDIR={self.environment['TMPDIR']}"):
                    os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)  # what has died, and an earlier call has killed


def _has(pid: int, variable: str) -> bool:
    """Whether a process was started with a variable."""
    with contextlib.suppress(OSError):
        return variable.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def _tell(one: "subprocess.Popen[bytes]", what: dict[str, Any]) -> bool:
    """Tell a standby who to be; False when it is gone."""
    assert one.stdin is not None
    try:
        one.stdin.write(json.dumps(what).encode() + b"\n")
        one.stdin.close()
    except OSError:
        return False
    return one.poll() is None


def _memory_gb() -> float:
    """Memory in GB that can still be had."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) / 1e6
    return 0.0
