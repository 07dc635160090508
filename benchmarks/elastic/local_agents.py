"""The job of recovery.py: `launch --local` with four machines, and what can be done to it."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.elastic.torchrun_peer import MACHINES, WAIT_SECONDS, read_train_lines
from cluster.connectors.local import module_command
from cluster.jobs.submit import Job
from cluster.state import attempts
from cluster.state.locks import AGENT_LOCK, is_locked
from train.recipe.schedule import Schedule
from train.tools import process
from train.tools.filesystem import read_json

COMMAND = str(Path(sys.executable).parent / "imgnet-cluster")
RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "cifar10.py"
SAVE_SECONDS = 10


class LocalJob:
    """A job by `launch --local`, started anew when it comes to its end; leaves nothing behind as a context manager."""

    def __init__(self, folder: Path, data: Path, environment: dict[str, str]) -> None:
        self.folder, self.data, self.environment = folder, data, environment
        self.job: Job | None = None
        self.join_pauses: list[float] = []
        self.measured_attempts = 0  # attempts whose pause is known
        self.crash_count = 0
        self.own_agent: subprocess.Popen[bytes] | None = None  # the agent of machine `own_name`, when we started it
        self.own_machine = ""

    def __enter__(self) -> "LocalJob":
        self.folder.mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(["tmux", "-L", "imgnet", "kill-server"], env=self.environment, capture_output=True)

    def launch(self) -> None:
        """Start a job."""
        if self.job and not self.job.has_ended:
            subprocess.run([COMMAND, "stop", self.job.name], env=self.environment, cwd=self.folder, check=True)
        words = ["--machines", str(MACHINES), "--data", str(self.data), "--workers", "0"]
        words += ["--save-seconds", str(SAVE_SECONDS), "-y", "-d", str(RECIPE)]
        done = subprocess.run(
            [COMMAND, "launch", "--local", *words],
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(done.stderr)
        number = len(list((self.folder / "runs").glob("job-*")))
        self.job, self.measured_attempts = Job(self.folder / "runs" / f"job-{number}"), 0
        spec = self.job.spec
        self.schedule = Schedule(spec.recipe, spec.recipe.data.train, spec.schedule_gpus)

    # --- what we see -------------------------------------------------------------------------------------------------

    @property
    def running_job(self) -> Job:
        """The job that runs."""
        assert self.job
        return self.job

    def newest_attempt(self) -> attempts.Attempt:
        """Return the attempt in force."""
        return attempts.newest_attempt(self.running_job.run_folder.shared) or attempts.Attempt()

    def machine_status(self, name: str) -> dict[str, Any]:
        """Return a machine's last word."""
        return read_json(self.running_job.run_folder.status_path(name)) or {}

    def training_lines(self, number: int) -> list[tuple[int, float]]:
        """Return (step, time) as the first trainer of an attempt noted it, on whatever machine."""
        paths = self.running_job.run_folder.work_folder().parent.glob(f"*/metrics/{number:06d}.jsonl")
        return [one for path in paths for one in read_train_lines(path)]

    def next_attempt_with_step(self, attempt_number: int) -> tuple[attempts.Attempt, float] | None:
        """Return the next attempt after this number that has made a step, and when."""
        for one in attempts.history(self.running_job.run_folder.shared)[attempt_number:]:
            lines = self.training_lines(one.number)
            if lines:
                return one, lines[0][1]
        return None

    def all_standbys_ready(self) -> bool:
        """Whether all machines train and could start again at once."""
        newest = self.newest_attempt()
        said = [self.machine_status(name) for name in newest.machine_names]
        said = [one for one in said if one.get("id") in newest.members]  # not the last words of one who was lost
        fit = [
            one.get("is_standby_ready") and one.get("attempt") == newest.number and one.get("last_step", -1) >= 0
            for one in said
        ]
        return len(fit) == MACHINES and all(fit)

    def is_mid_epoch(self) -> bool:
        """Whether an epoch has neither just begun nor is soon at its end, by the last line."""
        lines = self.training_lines(self.newest_attempt().number)
        if not lines:
            return False
        step = lines[-1][0]
        epoch = next((one for one in self.schedule.epochs if one.first_step <= step < one.first_step + one.steps), None)
        return epoch is not None and 0.03 < (step - epoch.first_step) / epoch.steps < 0.85

    def wait_until_ready(self) -> None:
        """Wait until a loss measures one thing; start a new job when this one is nearly done. Raises `TimeoutError`."""
        while True:
            last = self.training_lines(self.newest_attempt().number)[-1:] if self.job else []
            if self.job is None or self.running_job.has_ended or (last and last[0][0] > 0.85 * self.schedule.steps):
                self.launch()
            wait_for(
                lambda: self.running_job.has_ended or (self.all_standbys_ready() and self.is_mid_epoch()),
                "four warm machines",
            )
            if not self.running_job.has_ended:
                return self.record_join_pauses()

    def record_join_pauses(self) -> None:
        """Keep what the joins since the last call cost the others."""
        history = attempts.history(self.running_job.run_folder.shared)
        for before, one in list(pairwise(history))[self.measured_attempts :]:
            last, first = self.training_lines(before.number), self.training_lines(one.number)
            if last and first and one.reason.endswith("joined") and "lost" not in one.reason:
                self.join_pauses.append(first[0][1] - last[-1][1])
        self.measured_attempts = len(history) - 1

    # --- what we do --------------------------------------------------------------------------------------------------

    def seconds_to_next_step(self, previous_attempt: attempts.Attempt, since: float, expected_reason: str) -> float:
        """Return the seconds from a moment to the first step of the attempt after this one, made for this reason."""
        one, seen = wait_for(lambda: self.next_attempt_with_step(previous_attempt.number), "the next attempt")
        if expected_reason not in one.reason:
            raise RuntimeError(f"attempt {one.number} is there because: {one.reason}; expected: {expected_reason}")
        return float(seen - since)

    def kill_agents(self, *member_indexes: int) -> float:
        """Kill the agents at these places, and with them all that they started. Returns the seconds that it cost."""
        before = self.newest_attempt()
        pids = [int(self.machine_status(before.machine_names[one])["pid"]) for one in member_indexes]
        at = time.time()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        return self.seconds_to_next_step(before, at, "lost")

    def worker(self) -> float:
        """Lose the machine after the head; who comes back stands last, so that each has its turn."""
        return self.kill_agents(1)

    def head(self) -> float:
        """Lose the head."""
        return self.kill_agents(0)

    def two(self) -> float:
        """Lose two at once, one of them the head."""
        return self.kill_agents(0, 1)

    def second(self) -> float:
        """Lose one, and another as soon as the others have made a step."""
        self.kill_agents(1)
        return self.kill_agents(1)

    def frozen(self) -> float:
        """Stop all processes of a machine; without the seconds for which it may be silent."""
        name = self.run_agent_outside_tmux()
        before = self.newest_attempt()
        agent, at = int(self.machine_status(name)["pid"]), time.time()
        os.kill(agent, signal.SIGSTOP)  # first: it cannot start anything then
        pids = [agent, *process.descendant_pids(agent)]
        try:
            for pid in pids[1:]:
                os.kill(pid, signal.SIGSTOP)
            return self.seconds_to_next_step(before, at, "lost") - self.running_job.spec.lost_seconds
        finally:
            for pid in reversed(pids):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGCONT)

    def run_agent_outside_tmux(self) -> str:
        """Return a machine whose agent is our own child: tmux lets what was stopped in a window go on at once."""
        if self.own_agent is None or self.own_agent.poll() is not None:
            name = self.own_machine = self.newest_attempt().machine_names[-1]
            words = ["lose", self.running_job.name, "--machine", name, "--for-good"]
            subprocess.run([COMMAND, *words], env=self.environment, cwd=self.folder, check=True, capture_output=True)
            work = self.running_job.run_folder.work_folder(name)
            wait_for(lambda: not is_locked(work / AGENT_LOCK), "the end of an agent")
            with (self.folder / "own-agent.log").open("ab") as log:
                self.own_agent = subprocess.Popen(
                    module_command("cluster.agent", str(self.running_job.run_folder.shared), str(work), name), env=self.environment,
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                    preexec_fn=process.die_with_parent,
                )  # fmt: skip
            pid = self.own_agent.pid
            wait_for(lambda: self.machine_status(name).get("pid") == pid, "the first word of an agent")
            self.wait_until_ready()
        return self.own_machine

    def notice(self) -> float:
        """Tell a machine a minute ahead that it will be taken away: the pause of the others."""
        before = self.newest_attempt()
        words = ["lose", self.running_job.name, "--machine", before.machine_names[1], "--notice", "60"]
        subprocess.run([COMMAND, *words], env=self.environment, cwd=self.folder, check=True, capture_output=True)
        seconds = self.seconds_to_next_step(before, 0.0, "left")
        return seconds - self.training_lines(before.number)[-1][1]

    def crash(self) -> float:
        """Kill one trainer; each time another machine's, for the third crash of one would leave it out."""
        before, self.crash_count = self.newest_attempt(), self.crash_count + 1
        agent = int(self.machine_status(before.machine_names[self.crash_count % MACHINES])["pid"])
        found = [one for one in process.descendant_pids(agent) if is_trainer(one)]
        at = time.time()
        os.kill(found[0], signal.SIGKILL)
        return self.seconds_to_next_step(before, at, "killed by SIGKILL")


def is_trainer(pid: int) -> bool:
    """Whether a process is a trainer: its output goes to the log of a rank."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/fd/1").readlink().name.startswith("rank-")
    return False


def wait_for(condition: Callable[[], Any], description: str) -> Any:
    """Return what the condition gave as soon as it is true. Raises `TimeoutError`."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited in vain for {description}")
        time.sleep(0.05)
    return found
