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

from cluster.connectors.local import module_command
from cluster.state.attempts import Attempt
from cluster.state.spec import JobSpec
from train.distributed import network
from train.tools import process
from train.tools.filesystem import read_json

EXIT_SAVED = 3  # a trainer's exit code after it was asked to end
EXIT_WAIT_SECONDS = 10.0  # for the other trainers to follow the first that ended well
KILL_TIMEOUT_SECONDS = 20.0
STANDBY_GB_PER_PROCESS = 0.6  # of memory for each process, and 1 GB that must stay free


@dataclass(frozen=True)
class TrainerExit:
    """How an attempt's trainers ended here: "saved" or "failed", why, and whose fault it was ("own", "final", "")."""

    phase: str
    reason: str = ""
    fault: str = ""


def make_temp_folder() -> Path:
    """Make a folder for what trainers keep for a while; short, for the loaders' sockets lie in it.

    What the agents of this computer that were killed have left is removed.
    """
    for old in Path("/tmp").glob("imgnet-[0-9]*-*"):
        if not Path(f"/proc/{old.name.split('-')[1]}").exists():
            shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"imgnet-{os.getpid()}-", dir="/tmp"))


class Trainers:
    """Starts, watches and ends a machine's trainers."""

    def __init__(self, spec: JobSpec, shared: Path, work: Path, temp_folder: Path) -> None:
        self.spec, self.shared, self.work = spec, shared, work
        self.environment = {"TMPDIR": str(temp_folder)}
        self.attempt_folder, self.first_rank, self.is_save_requested = work / "000000", 0, False
        self.processes: list[subprocess.Popen[bytes]] = []
        self.standby_processes: list[subprocess.Popen[bytes]] = []

    # --- standing by ---------------------------------------------------------------------------------------------

    def ensure_standby(self) -> bool:
        """Keep a set of processes that have loaded torch. True when they have, or when there is to be none."""
        if not self.spec.standby or not (
            self.standby_processes or _available_memory_gb() > 1 + STANDBY_GB_PER_PROCESS * self.spec.procs
        ):
            return True
        if not self.standby_processes or any(one.poll() is not None for one in self.standby_processes):
            process.kill_process_groups(self.standby_processes)
            self.standby_processes = [self._start_standby(number) for number in range(self.spec.procs)]
        return self.is_standby_ready

    @property
    def is_standby_ready(self) -> bool:
        """Whether the whole standby is ready."""
        alive = [one for one in self.standby_processes if one.poll() is None]
        return len(alive) == self.spec.procs and all(self._ready_marker(one).exists() for one in range(self.spec.procs))

    def _ready_marker(self, local_rank: int) -> Path:
        return self.work / f"ready-{local_rank}"

    def _start_standby(self, local_rank: int) -> "subprocess.Popen[bytes]":
        self._ready_marker(local_rank).unlink(missing_ok=True)
        words = module_command("train.engine.standby", str(self._ready_marker(local_rank)), *self.job_arguments())
        return process.start_process(words, self.work / "standby.log", self.environment, stdin=subprocess.PIPE)

    # --- an attempt ----------------------------------------------------------------------------------------------

    def start(self, attempt: Attempt, machine_rank: int) -> Path:
        """Start the trainers of an attempt of which this machine is number `place`. Returns the first one's log."""
        procs, logs = self.spec.procs, self.work / "logs" / f"{attempt.number:06d}"
        for old in self.work.glob("[0-9]*"):
            shutil.rmtree(old, ignore_errors=True)
        self.attempt_folder, self.first_rank = self.work / f"{attempt.number:06d}", machine_rank * procs
        self.is_save_requested = False
        self.attempt_folder.mkdir()
        logs.mkdir(parents=True, exist_ok=True)
        argv = self.job_arguments() + self.attempt_arguments(attempt)
        common = {
            **self.environment,
            "IMGNET_WORK": str(self.attempt_folder),
            **network.interface_variables(attempt.master_address),
        }
        world = procs * len(attempt.members)
        each = process.rank_environments(procs, self.first_rank, world, attempt.master_address, attempt.master_port)
        warm, waiting, self.standby_processes = self.is_standby_ready, self.standby_processes, []
        for number, variables in enumerate(each):
            log, environment = logs / f"rank-{variables['RANK']}.log", {**common, **variables}
            if warm and _assign_standby(waiting[number], {"argv": argv, "environment": environment, "log": str(log)}):
                self.processes.append(waiting[number])
            else:
                self.processes.append(process.start_process(module_command("train", *argv), log, environment))
        process.kill_process_groups([one for one in waiting if one not in self.processes])
        return logs / f"rank-{self.first_rank}.log"

    def attempt_arguments(self, attempt: Attempt) -> list[str]:
        """Return the trainers' words that only an attempt knows."""
        resume = str(self.shared / attempt.resume) if attempt.resume else "none"
        return ["--attempt", str(attempt.number), "--resume", resume]

    def job_arguments(self) -> list[str]:
        """Return the trainers' other words after `python -m train`."""
        spec = self.spec
        valued: dict[str, Any] = {
            "--data": spec.data, "--copies": spec.copies, "--out": self.shared, "--local": self.work,
            "--gpus": spec.schedule_gpus, "--scale": spec.scale, "--save-seconds": spec.save_seconds,
            "--max-steps": spec.max_steps, "--workers": spec.loader_workers, "--threads": spec.threads_per_process,
            "--target": spec.target or None,
        }  # fmt: skip
        flags = {"--skip-bad": spec.skip_bad, "--log-ids": spec.log_ids, "--exact": spec.exact}
        words = [str(word) for name, value in valued.items() if value is not None for word in (name, value)]
        return [str(self.shared / "recipe.json"), *words, *(name for name, wanted in flags.items() if wanted)]

    def request_save_and_exit(self) -> None:
        """Ask them to save at a step that all agree on, and to end."""
        if not self.is_save_requested:
            (self.attempt_folder / "ask").touch()
            self.is_save_requested = True

    def read_progress(self) -> dict[str, Any]:
        """Return what the first of them said last, {} before its first word."""
        said = read_json(self.attempt_folder / "progress.json")
        return said if isinstance(said, dict) else {}

    def exit_codes(self) -> list[int | None]:
        """Return the exit codes, None for those that run."""
        return [one.poll() for one in self.processes]

    def collect_exit(self, exit_codes: list[int | None]) -> TrainerExit | None:
        """Return how they ended, None while all run. Blocks for a moment when some have ended and some not."""
        if all(code is None for code in exit_codes):
            return None
        if EXIT_SAVED in exit_codes:
            self.wait_for_exit(EXIT_WAIT_SECONDS)
            return TrainerExit("saved")
        if any(exit_codes):
            time.sleep(0.2)  # the one that failed first may still be writing why
        elif None in exit_codes:
            self.wait_for_exit(EXIT_WAIT_SECONDS)
        exit_codes = self.exit_codes()
        for rank, code in enumerate(
            exit_codes, self.first_rank
        ):  # killed from outside; the others' words are about that
            if code in (-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS):
                name = signal.Signals(-code).name
                return TrainerExit("failed", f"the trainer of rank {rank} was killed by {name}", "own")
        words = [read_json(path) for path in self.attempt_folder.glob("failed-*.json")]
        told = sorted((one for one in words if one), key=lambda one: float(one["time"]))
        for kind in ("final", "own", "peer"):
            for one in told:
                if one.get("fault", "own") == kind:
                    return TrainerExit("failed", one["reason"], "" if kind == "peer" else kind)
        rank, code = next(((i, c) for i, c in enumerate(exit_codes, self.first_rank) if c), (self.first_rank, 0))
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code} and no result"
        # NCCL's watchdog aborts those who wait for somebody that is gone: no fault of theirs.
        fault = "" if code == -signal.SIGABRT else "own"
        return TrainerExit("failed", f"the trainer of rank {rank} {how}", fault)

    def wait_for_exit(self, seconds: float) -> None:
        """Give them a moment to end by themselves."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and None in self.exit_codes():
            time.sleep(0.02)

    def dump_stacks(self) -> None:
        """Let each write the stacks of its threads into its log."""
        for one in self.processes:
            if (self.attempt_folder / "progress.json").exists() and one.poll() is None:  # by then it listens
                one.send_signal(signal.SIGUSR1)
        time.sleep(0.3)

    def kill(self) -> None:
        """Kill them without waiting. The kernel does it for us only when the thread that started them has ended."""
        for one in self.processes:
            with contextlib.suppress(OSError):
                os.killpg(one.pid, signal.SIGKILL)

    def stop(self, include_standby: bool = False) -> None:
        """End the trainers and all that they started, and with `everything` the standby.

        Raises `subprocess.TimeoutExpired` when one does not die: stuck in a driver or on a file system.
        """
        doomed, spared = self.processes, [] if include_standby else self.standby_processes
        if include_standby:
            doomed = [*doomed, *self.standby_processes]
            self.standby_processes = []
        self.processes = []
        process.kill_process_groups(doomed, KILL_TIMEOUT_SECONDS)
        kept = {pid for one in spared for pid in (one.pid, *process.descendant_pids(one.pid))}
        for pid in set(process.descendant_pids(os.getpid())) - kept:  # what a trainer left behind: it has come to us
            with contextlib.suppress(OSError):  # ChildProcessError is one: not ours, or gone
                if _has_variable(pid, f"TMPDIR={self.environment['TMPDIR']}"):
                    os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)  # what has died, and an earlier call has killed


def _has_variable(pid: int, variable: str) -> bool:
    """Whether a process was started with a variable."""
    with contextlib.suppress(OSError):
        return variable.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def _assign_standby(process: "subprocess.Popen[bytes]", assignment: dict[str, Any]) -> bool:
    """Tell a standby who to be; False when it is gone."""
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(assignment).encode() + b"\n")
        process.stdin.close()
    except OSError:
        return False
    return process.poll() is None


def _available_memory_gb() -> float:
    """Memory in GB that can still be had."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) / 1e6
    return 0.0
