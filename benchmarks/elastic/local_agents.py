"""The job of recovery.py: `launch --local` with four machines, and the losses that can be inflicted on it."""

import contextlib
import os
import re
import signal
import subprocess
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from support.ssh_machines import MARK_VARIABLE, marked_pids, process_table, send_signal, wait_until
from support.waiting import wait_for

from benchmarks.elastic.torchrun_peer import MACHINES, WAIT_SECONDS, read_train_lines
from benchmarks.measure import COMMAND
from cluster.connectors.local import module_command
from cluster.jobs.submit import Job
from cluster.state import attempts
from cluster.state.run_folder import AGENT_LOCK
from cluster.state.timeline import read_timeline
from train.recipe.schedule import Schedule
from train.tools import process
from train.tools.files import is_locked
from train.tools.text_files import read_json

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "cifar10.py"
SAVE_SECONDS = 10
STALL_SECONDS = 20


def kill_processes(environment: dict[str, str]) -> None:
    """Kill all processes with the mark of an environment. Raises `TimeoutError` when some live after five seconds."""

    def has_ended() -> bool:
        pids = marked_pids(environment[MARK_VARIABLE], process_table())
        send_signal(sorted(pids), signal.SIGKILL)
        return not pids

    wait_until(has_ended, "no process of the benchmark is left", 5.0)


class LocalJob:
    """A job of `launch --local`, relaunched when it nears its end; a context manager that kills its processes.

    Methods from worker to crash are the cases of recovery.py and are called by name.
    """

    def __init__(self, folder: Path, data: Path, environment: dict[str, str], in_place: bool = True) -> None:
        self.folder, self.data, self.environment, self.in_place = folder, data, environment, in_place
        self.job: Job | None = None
        self.join_pauses: list[float] = []
        self.measured_attempts = 0  # attempts of the running job whose pauses are recorded
        self.crashed: set[str] = set()  # machines of the running job
        self.own_agent: subprocess.Popen[bytes] | None = None  # the agent of `own_machine`, if we started it
        self.own_machine = ""
        self.steps_lost = 0  # by the loss that was measured last

    def __enter__(self) -> "LocalJob":
        self.folder.mkdir()
        # Of six times the epochs: else the job would end, and be launched again, in the middle of the measurements.
        text = re.sub(
            r"epochs=\((\d+), +(\d+)\)", lambda m: f"epochs=({6 * int(m[1])}, {6 * int(m[2])})", RECIPE.read_text()
        )
        (self.folder / RECIPE.name).write_text(text)
        return self

    def __exit__(self, *_: object) -> None:
        kill_processes(self.environment)

    def launch(self) -> None:
        """Stop the running job, if there is one, and launch another. Raises `RuntimeError` if that fails."""
        if self.job and not self.job.has_ended:
            subprocess.run([COMMAND, "stop", self.job.name], env=self.environment, cwd=self.folder, check=True)
        options = ["--machines", str(MACHINES), "--data", str(self.data), "--workers", "0"]
        options += ["--in-place", "on" if self.in_place else "off"]
        options += ["--save-seconds", str(SAVE_SECONDS), "--stall-seconds", str(STALL_SECONDS), "-y", "-d", RECIPE.name]
        completed = subprocess.run(
            [COMMAND, "launch", "--local", *options],
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
        )
        if completed.returncode:
            raise RuntimeError(completed.stderr)
        # Names go on from the jobs of the same user, also from those of another folder.
        folders = (self.folder / "runs").glob("job-*")
        self.job = Job(max(folders, key=lambda folder: int(folder.name.removeprefix("job-"))))
        self.measured_attempts, self.crashed = 0, set()
        spec = self.job.spec
        self.schedule = Schedule(spec.recipe, spec.recipe.data.train, spec.schedule_gpus)

    # --- observation -------------------------------------------------------------------------------------------------

    @property
    def running_job(self) -> Job:
        """The running job; `launch` must have been called."""
        assert self.job
        return self.job

    def newest_attempt(self) -> attempts.Attempt:
        """Return the newest attempt, an empty one before the first."""
        return attempts.newest_attempt(self.running_job.run_folder.shared) or attempts.Attempt()

    def machine_status(self, name: str) -> dict[str, Any]:
        """Return the content of a machine's status file, {} before the first status."""
        return read_json(self.running_job.run_folder.status_path(name)) or {}

    def training_lines(self, number: int) -> list[tuple[int, float]]:
        """Return (step, time) of each line that an attempt's rank 0 wrote to its metrics, on any machine."""
        paths = self.running_job.run_folder.work_folder().parent.glob(f"*/metrics/{number:06d}.jsonl")
        return [line for path in paths for line in read_train_lines(path)]

    def next_attempt_with_step(self, attempt_number: int) -> tuple[attempts.Attempt, float] | None:
        """Return the next attempt after this number that has made a step, and the time of its first step."""
        for attempt in self.running_job.run_folder.attempts.all()[attempt_number:]:
            lines = self.training_lines(attempt.number)
            if lines:
                return attempt, lines[0][1]
        return None

    def all_standbys_ready(self) -> bool:
        """Return whether all machines train and have a standby that could take over at once."""
        newest = self.newest_attempt()
        statuses = [self.machine_status(name) for name in newest.machine_names]
        # A status with another id is the last one of a lost agent.
        statuses = [status for status in statuses if status.get("id") in newest.members]
        ready = [
            status.get("is_standby_ready")
            and status.get("attempt") == newest.number
            and status.get("last_step", -1) >= 0
            for status in statuses
        ]
        return len(ready) == MACHINES and all(ready)

    def is_mid_epoch(self) -> bool:
        """Return whether the last line of the metrics is neither near the start nor near the end of its epoch."""
        lines = self.training_lines(self.newest_attempt().number)
        if not lines:
            return False
        step = lines[-1][0]
        for epoch in self.schedule.epochs:
            if epoch.first_step <= step < epoch.first_step + epoch.steps:
                return 0.03 < (step - epoch.first_step) / epoch.steps < 0.85
        return False

    def wait_until_ready(self) -> None:
        """Wait until all machines train in mid-epoch with standbys ready, so that a loss measures only the recovery.

        Launches a new job if the running one is nearly done. Raises `TimeoutError`.
        """
        while True:
            last_lines = self.training_lines(self.newest_attempt().number)[-1:] if self.job else []
            is_nearly_done = bool(last_lines) and last_lines[0][0] > 0.85 * self.schedule.steps
            if self.job is None or self.running_job.has_ended or is_nearly_done:
                self.launch()
            wait_for(
                lambda: self.running_job.has_ended or (self.all_standbys_ready() and self.is_mid_epoch()), WAIT_SECONDS
            )
            if not self.running_job.has_ended:
                return self.record_join_pauses()

    def record_join_pauses(self) -> None:
        """Record for each join since the last call how long the other machines paused."""
        history = self.running_job.run_folder.attempts.all()
        for previous, attempt in list(pairwise(history))[self.measured_attempts :]:
            lines_before = self.training_lines(previous.number)
            lines_after = self.training_lines(attempt.number)
            is_join = "joined" in attempt.reason and "lost" not in attempt.reason
            if lines_before and lines_after and is_join:
                self.join_pauses.append(lines_after[0][1] - lines_before[-1][1])
        self.measured_attempts = len(history) - 1

    # --- losses; each returns the seconds until the next step ---------------------------------------------------------

    def seconds_to_next_step(self, previous_attempt: attempts.Attempt, since: float, expected_reason: str) -> float:
        """Return the seconds from a time to the first step of the attempt after `previous_attempt`.

        Raises `RuntimeError` if that attempt was made for another reason.
        """
        attempt, step_time = wait_for(lambda: self.next_attempt_with_step(previous_attempt.number), WAIT_SECONDS)
        if expected_reason not in attempt.reason:
            raise RuntimeError(
                f"the reason of attempt {attempt.number} is {attempt.reason!r}, expected {expected_reason!r} in it"
            )
        rows = read_timeline(self.running_job.run_folder).rows
        self.steps_lost = sum(row.steps_lost for row in rows if previous_attempt.number < row.attempt <= attempt.number)
        return float(step_time - since)

    def kill_agents(self, previous: attempts.Attempt, *member_indexes: int) -> float:
        """Kill the agents of these members of an attempt; all their child processes die too."""
        pids = [int(self.machine_status(previous.machine_names[index])["pid"]) for index in member_indexes]
        kill_time = time.time()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        return self.seconds_to_next_step(previous, kill_time, "lost")

    def worker(self) -> float:
        """Kill the machine after the head. A returning machine is the last member, so every machine has its turn."""
        return self.kill_agents(self.newest_attempt(), 1)

    def head(self) -> float:
        """Kill the head."""
        return self.kill_agents(self.newest_attempt(), 0)

    def two(self) -> float:
        """Kill two machines at once, one of them the head."""
        return self.kill_agents(self.newest_attempt(), 0, 1)

    def second(self) -> float:
        """Kill a machine, and another as soon as the others have agreed to go on, before they have made a step."""
        first = self.newest_attempt()
        os.kill(int(self.machine_status(first.machine_names[1])["pid"]), signal.SIGKILL)
        wait_for(lambda: self.newest_attempt().number > first.number, WAIT_SECONDS)
        return self.kill_agents(self.newest_attempt(), 1)

    def frozen(self) -> float:
        """Stop all processes of a machine. The seconds for which a machine may be silent are subtracted."""
        name = self.run_agent_outside_tmux()
        previous = self.newest_attempt()
        agent_pid = int(self.machine_status(name)["pid"])
        freeze_time = time.time()
        os.kill(agent_pid, signal.SIGSTOP)  # first, so that it cannot start other processes
        pids = [agent_pid, *process.descendant_pids(agent_pid)]
        try:
            for pid in pids[1:]:
                os.kill(pid, signal.SIGSTOP)
            seconds = self.seconds_to_next_step(previous, freeze_time, "lost")
            return seconds - self.running_job.spec.recovery.lost_seconds
        finally:
            for pid in reversed(pids):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGCONT)

    def run_agent_outside_tmux(self) -> str:
        """Return a machine whose agent is our own child process, started now unless there is one.

        tmux sends SIGCONT to a stopped process of its windows at once, so an agent in a window cannot be frozen.
        """
        if self.own_agent is None or self.own_agent.poll() is not None:
            name = self.own_machine = self.newest_attempt().machine_names[-1]
            self.rehearse_loss(name, "--for-good")
            shared = self.running_job.run_folder.shared
            work = self.running_job.run_folder.work_folder(name)
            wait_for(lambda: not is_locked(work / AGENT_LOCK), WAIT_SECONDS)
            with (self.folder / "own-agent.log").open("ab") as log:
                self.own_agent = subprocess.Popen(
                    module_command("cluster.agent", str(shared), str(work), name),
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=process.die_with_parent,
                )
            pid = self.own_agent.pid
            wait_for(lambda: self.machine_status(name).get("pid") == pid, WAIT_SECONDS)
            self.wait_until_ready()
        return self.own_machine

    def rehearse_loss(self, name: str, *options: str) -> None:
        """Let the job lose a machine, by `rehearse-loss`. Raises `CalledProcessError`."""
        argv = [COMMAND, "rehearse-loss", self.running_job.name, "--machine", name, *options]
        subprocess.run(argv, env=self.environment, cwd=self.folder, check=True, capture_output=True)

    def notice(self) -> float:
        """Give a machine a notice of 60 seconds; return how long the other machines pause when it leaves.

        Nobody would start our own agent again.
        """
        previous = self.newest_attempt()
        name = next(name for name in previous.machine_names[1:] if name != self.own_machine)
        self.rehearse_loss(name, "--notice", "60")
        next_step_time = self.seconds_to_next_step(previous, 0.0, "left")
        return next_step_time - self.training_lines(previous.number)[-1][1]

    def crash(self) -> float:
        """Kill one trainer. Each call takes another machine: after a second crash a machine is left out.

        When each has crashed once, another job is launched.
        """
        if len(self.crashed) == MACHINES:
            self.launch()
            self.wait_until_ready()
        name = next(name for name in self.newest_attempt().machine_names if name not in self.crashed)
        self.crashed.add(name)
        return self.signal_trainer(name, signal.SIGKILL, "killed by SIGKILL")

    def frozen_trainer(self) -> float:
        """Stop one trainer, whose agent lives. The seconds of --stall-seconds are subtracted."""
        name = self.newest_attempt().machine_names[1]
        return self.signal_trainer(name, signal.SIGSTOP, "no progress") - STALL_SECONDS

    def signal_trainer(self, name: str, signal_number: int, expected_reason: str) -> float:
        """Send a signal to the trainer of a machine."""
        previous = self.newest_attempt()
        agent_pid = int(self.machine_status(name)["pid"])
        trainer_pids = [pid for pid in process.descendant_pids(agent_pid) if is_trainer(pid)]
        signal_time = time.time()
        os.kill(trainer_pids[0], signal_number)
        return self.seconds_to_next_step(previous, signal_time, expected_reason)


def is_trainer(pid: int) -> bool:
    """Return whether a process is a trainer: its stdout is the log of a rank."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/fd/1").readlink().name.startswith("rank-")
    return False
