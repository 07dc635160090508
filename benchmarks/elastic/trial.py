"""One trial of trials.py: a job of real agents and trainers on this computer, its faults, and the check of its result.

The agents run without a supervisor: this module starts a machine again some time after its death.
"""

import contextlib
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.elastic.bench import TRAIN_IMAGES, TrialBench, checkpoint_differences, last_checkpoint
from benchmarks.elastic.fault_plan import KILL_IN_TURN, MAX_TRAINER_KILLS, FaultTrial, TrialOutcome, TrialPlan
from benchmarks.elastic.local_agents import is_trainer
from benchmarks.elastic.step_log import STEPS_FOLDER, check_steps
from cluster.state import attempts
from cluster.state.recovery_options import RecoveryOptions
from cluster.state.run_folder import AGENT_LOCK, RunFolder
from cluster.state.spec import JobSpec
from train.data.order import usage_log
from train.engine.options import TrainOptions
from train.recipe.schedule import Schedule
from train.tools import process
from train.tools.files import is_locked, write_atomic
from train.tools.text_files import read_json, to_json_bytes

DEADLINE_SECONDS, SECONDS_PER_EVENT = 150.0, 10.0  # a trial takes a sixth of this
EARLY_EVENT_SECONDS = 1.0  # an event so soon after another one strikes while the job recovers from that


class Trial(FaultTrial):
    """One job of agents and trainers on this computer, and the faults of its plan."""

    def __init__(self, bench: TrialBench, plan: TrialPlan) -> None:
        self.folder = bench.folder / f"trial-{plan.seed}"
        super().__init__(TrialOutcome(plan, self.folder, bench.in_place))
        self.bench, self.plan = bench, plan
        self.folders = RunFolder(self.folder / "run")
        self.rng = random.Random(plan.seed + 1_000_000)
        self.spec = JobSpec(
            name="trial",
            workload=bench.recipe,
            recipe_file="",
            train=TrainOptions(
                data=str(bench.data), copies=f"{bench.data}-sz", save_seconds=0.5, workers=0, log_ids=True, exact=True
            ),
            recovery=RecoveryOptions(
                standby=plan.standby, lost_seconds=2.0, stall_seconds=30.0, in_place="on" if bench.in_place else "off"
            ),
            **({"heartbeat_seconds": 0.2, "heartbeat_timeout_seconds": 1.0} if plan.kills_in_turn else {}),
            machines=plan.machines,
            procs=plan.procs,
        )
        self.restart_times: dict[str, float] = {}  # by machine: when it is started again
        self.frozen: dict[str, tuple[float, list[int]]] = {}  # by machine: until when, and its processes
        self.noticed: set[str] = set()
        self.trainer_kills: Counter[str] = Counter()
        self.hit = {"0"} if " trainer" in plan.kill_point else set()  # also by a stop of its processes
        self.kill_note = self.folder / "note"
        self.last_hit = 0  # the attempt of the last of many kills
        self.strikes_recovery = False  # the next event does not wait until the job trains again

    # --- observation -------------------------------------------------------------------------------------------------

    def processes(self) -> list[int]:
        """Return the processes whose working directory is the trial's folder, whatever their parent; no zombies."""
        pids = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and (entry / "cwd").readlink() == self.folder:
                    pids.append(int(entry.name))
        return pids

    def is_agent_alive(self, name: str) -> bool:
        """Return whether a machine has a running agent."""
        return is_locked(self.folders.work_folder(name) / AGENT_LOCK)

    def machine_status(self, name: str) -> dict[str, Any]:
        """Return the content of a machine's status file, {} before the first status."""
        return read_json(self.folders.status_path(name)) or {}

    def agent_pid(self, name: str) -> int:
        """Return the process id of a machine's agent.

        Raises `OSError` if the agent has ended; the id may then belong to another process.
        """
        pid = int(self.machine_status(name)["pid"])
        if Path(f"/proc/{pid}/cwd").readlink() != self.folder:
            raise ProcessLookupError(f"the agent of machine {name} has ended")
        return pid

    def members(self) -> list[str]:
        """Return the machines of the newest attempt, the head first."""
        newest = attempts.newest_attempt(self.folders.shared)
        return list(newest.machine_names) if newest else []

    def machines_about_to_die(self) -> set[str]:
        """Return the machines that may die at any moment: machine 0, while its kill point lies ahead."""
        return {"0"} if self.plan.kill_point and not self.kill_note.exists() else set()

    def leaves_a_healthy_member(self, *doomed: str) -> bool:
        """Return whether a member without any fault remains. If all members are lost, the job cannot continue."""
        faulty = {*doomed, *self.noticed, *self.frozen, *self.machines_about_to_die()}
        return any(name not in faulty and self.is_agent_alive(name) for name in self.members())

    def is_done(self) -> bool:
        """Return whether the job has its result."""
        return (self.folders.shared / "result.json").exists()

    def is_training(self) -> bool:
        """Return whether the newest attempt has made a step."""
        head = (self.members() or ["0"])[0]
        status = self.machine_status(head)
        newest = attempts.newest_attempt(self.folders.shared)
        return bool(newest and status.get("attempt") == newest.number and status.get("last_step", -1) >= 0)

    # --- faults ------------------------------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        """Start a machine's agent, and wait until it runs."""
        kill_environment = {}
        if name == "0" and self.machines_about_to_die():
            kill_environment = {"TRIAL_KILL": self.plan.kill_point, "TRIAL_NOTE": str(self.kill_note)}
        environment = self.bench.environment(self.folder, **kill_environment)
        argv = [str(self.folders.shared), str(self.folders.work_folder(name)), name]
        self.bench.start(argv, self.folder, self.folder / f"agent-{name}.log", environment)
        self.noticed.discard(name)
        # An agent that finds the job done ends at once.
        for _ in poll_until(lambda: self.is_done() or self.is_agent_alive(name), 30):
            pass

    def thaw_and_restart(self) -> None:
        """Thaw the machines whose time has come, and start dead machines again, each some time after its death."""
        now = time.monotonic()
        for name, (thaw_time, pids) in list(self.frozen.items()):
            if now >= thaw_time:
                self.thaw(name, pids)
        for name in self.spec.machine_names:
            if self.is_agent_alive(name) or self.is_done():
                self.restart_times.pop(name, None)
            elif name not in self.restart_times:
                self.restart_times[name] = now + self.rng.uniform(0.2, 0.3 if self.plan.kills_in_turn else 4.0)
            elif now >= self.restart_times[name] and not self.has_failed_for_good(name):
                self.add_log_line(f"start {name}")
                self.start(name)
                self.outcome.event_counts["join"] += 1

    def thaw(self, name: str, pids: list[int]) -> None:
        """Let the processes of a frozen machine continue."""
        del self.frozen[name]
        for pid in reversed(pids):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGCONT)

    def inject_event(self, kind: str, number: float) -> bool:
        """Inject an event of the plan. Return False if it would end the job, or the job or its process is not there."""
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # the process has just died by itself
            return self._inject_unless_fatal(kind, number)
        return False

    def _inject_unless_fatal(self, kind: str, random_number: float) -> bool:
        """Inject an event of the plan. Return False if that would end the job, or if the job is not training."""
        # A machine with a kill point ahead must live until it reaches that link or save.
        excluded = {*self.frozen, *self.machines_about_to_die()}
        candidates = [name for name in self.members() if self.is_agent_alive(name) and name not in excluded]
        newest = attempts.newest_attempt(self.folders.shared)
        if kind == KILL_IN_TURN:
            turn = 1 + self.outcome.event_counts[kind] % 2
            is_whole = newest and newest.number > self.last_hit and len(candidates) == len(self.spec.machine_names)
            candidates = [str(turn)] if is_whole else []
        if kind == "kill head" and "0" not in self.machines_about_to_die():
            candidates = [name for name in candidates[:1] if name == self.members()[0]]
        if not candidates or not (self.is_training() or self.strikes_recovery):
            return False
        first = int(random_number * len(candidates))
        if kind == "kill two":
            victims = list({candidates[0], candidates[-1 - first % max(1, len(candidates) - 1)]})
        else:
            victims = [candidates[first]]
        if kind == "kill trainer":
            return self.kill_trainer(victims[0], random_number)
        if not self.leaves_a_healthy_member(*victims) or (kind == "kill two" and len(victims) < 2):
            return False
        self.add_log_line(f"{kind} {' '.join(victims)}, members {' '.join(self.members())}")
        self.last_hit = newest.number if newest else 0
        for name in victims:
            if kind == "notice":
                self.noticed.add(name)
                notice = to_json_bytes({"reason": "a trial", "seconds": 20})
                write_atomic(self.folders.work_folder(name) / "notice", notice)
            elif kind == "freeze":
                self.freeze(name, 1 + 7 * (random_number * 10 % 1))
            else:
                os.kill(self.agent_pid(name), signal.SIGKILL)
        return True

    def freeze(self, name: str, seconds: float) -> None:
        """Stop all processes of a machine for some seconds; the agent first, so that it cannot start others."""
        agent_pid = self.agent_pid(name)
        os.kill(agent_pid, signal.SIGSTOP)
        pids = [agent_pid, *process.descendant_pids(agent_pid)]
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGSTOP)
        self.frozen[name] = time.monotonic() + seconds, pids
        self.hit.add(name)

    def kill_trainer(self, name: str, random_number: float) -> bool:
        """Kill one trainer of a machine. Return False if it has none, or if another kill would end the job.

        It would leave out a machine that has lost a trainer before, so that is refused too.
        """
        pids = [pid for pid in process.descendant_pids(self.agent_pid(name)) if is_trainer(pid)]
        kills_by_plan = " trainer" in self.plan.kill_point
        was_hit = self.trainer_kills[name] > 0 or (kills_by_plan and name == "0")
        if not pids or was_hit or self.trainer_kills.total() + kills_by_plan >= MAX_TRAINER_KILLS:
            return False
        self.trainer_kills[name] += 1
        self.hit.add(name)
        self.add_log_line(f"kill trainer of {name}")
        os.kill(pids[int(random_number * 100) % len(pids)], signal.SIGKILL)
        return True

    # --- the trial from start to end ---------------------------------------------------------------------------------

    def start_job(self) -> None:
        """Write the files of the job, and start its agents."""
        self.folders.shared.mkdir(parents=True)
        # Of the slow loss: gives faults time at no processor time.
        (self.folder / "pace").write_text("0 0.2" if self.plan.kills_in_turn else "0 0.04")
        for name in self.spec.machine_names:
            self.folders.work_folder(name).mkdir(parents=True)
        self.folders.write_spec(self.spec)
        write_atomic(self.folders.launch_path, b"trial")
        for name in self.spec.machine_names:
            self.start(name)

    def run_events(self) -> None:
        """Inject the planned events, then wait for the job's end. Raises `TimeoutError` if the job hangs."""
        events = list(self.plan.events)
        next_event_time = 0.0
        deadline = DEADLINE_SECONDS + SECONDS_PER_EVENT * len(events)
        for _ in poll_until(
            lambda: self.is_done() and not any(map(self.is_agent_alive, self.spec.machine_names)), deadline
        ):
            self.thaw_and_restart()
            now = time.monotonic()
            may_strike_recovery = self.outcome.event_counts.total() > 0 and not self.plan.kills_in_turn
            self.strikes_recovery = may_strike_recovery and bool(events) and events[0][0] < EARLY_EVENT_SECONDS
            if not (self.strikes_recovery or self.is_training()) or self.is_done():
                next_event_time = now + (events[0][0] if events else 0)
            elif events and now >= next_event_time:
                self.inject_next_event(events)
                next_event_time = now + (events[0][0] if events else 0)
            if self.plan.kills_in_turn and not events:
                (self.folder / "pace").unlink(missing_ok=True)
            if any(map(self.has_failed_for_good, self.spec.machine_names)):
                break
        self.outcome.seconds = time.monotonic() - self.start_time

    def has_failed_for_good(self, name: str) -> bool:
        """Return whether a machine's agent has ended in the state failed."""
        return bool(self.machine_status(name).get("state") == "failed" and self.machine_status(name).get("ended"))

    def check_outcome(self) -> None:
        """Check the job's result, and note the problems in the outcome."""
        history = attempts.AttemptHistory(self.folders.shared).all()
        problems = self.outcome.problems
        if self.kill_note.exists():
            point = self.kill_note.read_text()
            place = "in link" if point.startswith(("attempt", "resume")) else f"in {point.split()[0]}"
            self.outcome.event_counts["kill at result" if "result" in point else f"kill {place}"] += 1
            self.add_log_line(f"machine 0 died at {self.plan.kill_point}")
        for name in self.spec.machine_names:
            status = self.machine_status(name)
            if status.get("ended") and status["state"] not in ("done", "left"):
                problems.append(f"machine {name} ended as {status['state']}: {status.get('reason')}")
        if not self.is_done():
            problems.append("the job has no result")
            return
        schedule = Schedule(self.spec.recipe, TRAIN_IMAGES, self.spec.schedule_gpus)
        usage_folder = self.folder / "ids"
        usage_folder.mkdir()
        for path in self.folder.glob("run/machine/work/*/ids/*.jsonl"):
            shutil.copy(path, usage_folder)
        first_steps = {attempt.number: attempt.first_step for attempt in history if attempt.members}
        steps_per_epoch = {epoch.number: epoch.steps for epoch in schedule.epochs}
        problems += usage_log.find_usage_errors(usage_folder, first_steps, TRAIN_IMAGES, steps_per_epoch)
        reference = self.bench.reference_folder(self.spec.schedule_gpus)
        trained = [attempt for attempt in history if attempt.members]
        steps = self.folder / STEPS_FOLDER, reference / STEPS_FOLDER
        self.outcome.note(trained, check_steps(*steps, trained, self.plan.procs, self.hit))
        checkpoint = last_checkpoint(self.folders.shared, max(first_steps))
        problems += checkpoint_differences(checkpoint, last_checkpoint(reference, 1))
        with contextlib.suppress(TimeoutError):
            for _ in poll_until(lambda: not self.processes(), 10):
                pass
        problems += [f"still running: {pid}" for pid in self.processes()]

    def clean_up(self) -> None:
        """Kill all processes of the trial; remove its folder unless there were problems."""
        for pid in self.processes():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self.write_log()
        if not self.outcome.problems:
            shutil.rmtree(self.folder, ignore_errors=True)


def poll_until(condition: Callable[[], bool], seconds: float) -> Iterator[None]:
    """Yield every tenth of a second until a condition is true. Raises `TimeoutError` after some seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"a condition was not met within {seconds:g} s")
        yield
        time.sleep(0.1)
