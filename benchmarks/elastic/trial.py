"""One trial of trials.py: a job of real agents and trainers on this computer, what is done to it, and the judgement.

The agents are started directly, without a supervisor: a machine that died is started again here, a while later.
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

from benchmarks.elastic.bench import TRAIN_IMAGES, TrialBench, last_checkpoint
from benchmarks.elastic.fault_plan import MAX_TRAINER_KILLS, TrialOutcome, TrialPlan
from cluster.state import attempts
from cluster.state.locks import AGENT_LOCK, is_locked
from cluster.state.run_folder import RunFolder
from cluster.state.spec import JobSpec
from train.data.order import usage_log
from train.recipe.schedule import Schedule
from train.tools import process
from train.tools.filesystem import read_json, to_json_bytes, write_atomic

DEADLINE_SECONDS = 180.0  # a trial lasts a sixth of it
BATCH_NORM_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class Trial:
    """One job and its schedule."""

    def __init__(self, bench: TrialBench, plan: TrialPlan) -> None:
        self.bench, self.plan = bench, plan
        self.folder = bench.folder / f"trial-{plan.seed}"
        self.folders = RunFolder(self.folder / "run")
        self.outcome = TrialOutcome(plan, self.folder)
        self.rng = random.Random(plan.seed + 1_000_000)
        self.spec = JobSpec(
            name="trial", recipe=bench.recipe, recipe_file="", data=str(bench.data), copies=f"{bench.data}-sz",
            machines=plan.machines, procs=plan.procs, schedule_gpus=plan.machines * plan.procs, standby=plan.standby,
            save_seconds=0.5, lost_seconds=2.0, stall_seconds=30.0, workers=0, log_ids=True, exact=True, probe=False,
        )  # fmt: skip
        self.restart_times: dict[str, float] = {}  # when a dead machine is started again
        self.frozen: dict[str, tuple[float, list[int]]] = {}  # until when, and its processes
        self.noticed: set[str] = set()
        self.trainer_kills: Counter[str] = Counter()
        self.kill_note = self.folder / "note"
        self.start_time = time.monotonic()

    # --- what we see -------------------------------------------------------------------------------------------------

    def add_log_line(self, text: str) -> None:
        """Keep a line of the story."""
        self.outcome.log_lines.append(f"{time.strftime('%H:%M:%S')} +{time.monotonic() - self.start_time:.1f} {text}")

    def processes(self) -> list[int]:
        """Return all that runs in the trial's folder, whoever its parent is; no zombies."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and (entry / "cwd").readlink() == self.folder:
                    found.append(int(entry.name))
        return found

    def is_agent_alive(self, name: str) -> bool:
        """Whether the agent of a machine is there."""
        return is_locked(self.folders.work_folder(name) / AGENT_LOCK)

    def machine_status(self, name: str) -> dict[str, Any]:
        """Return a machine's last word."""
        return read_json(self.folders.status_path(name)) or {}

    def agent_pid(self, name: str) -> int:
        """Return a machine's agent. Raises `OSError` when it is gone: its number may be another's."""
        pid = int(self.machine_status(name)["pid"])
        if Path(f"/proc/{pid}/cwd").readlink() != self.folder:
            raise ProcessLookupError(f"the agent of machine {name} is gone")
        return pid

    def members(self) -> list[str]:
        """Return who trains, the head first."""
        newest = attempts.newest_attempt(self.folders.shared)
        return list(newest.machine_names) if newest else []

    def machines_about_to_die(self) -> set[str]:
        """Return who may die at any moment."""
        return {"0"} if self.plan.kill_point and not self.kill_note.exists() else set()

    def leaves_a_healthy_member(self, *doomed: str) -> bool:
        """Whether a member is left that nothing is done to: when all are gone, no job can go on."""
        down = {*doomed, *self.noticed, *self.frozen, *self.machines_about_to_die()}
        return any(one not in down and self.is_agent_alive(one) for one in self.members())

    def is_done(self) -> bool:
        """Whether the job has its result."""
        return (self.folders.shared / "result.json").exists()

    def is_training(self) -> bool:
        """Whether the newest attempt has made a step."""
        head = (self.members() or ["0"])[0]
        said, newest = self.machine_status(head), attempts.newest_attempt(self.folders.shared)
        return bool(newest and said.get("attempt") == newest.number and said.get("last_step", -1) >= 0)

    # --- what we do --------------------------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        """Start a machine's agent."""
        kill = {}
        if name == "0" and self.machines_about_to_die():
            kill = {"TRIAL_KILL": self.plan.kill_point, "TRIAL_NOTE": str(self.kill_note)}
        environment = self.bench.environment(self.folder, TRIAL_SLOW="0.04", **kill)
        argv = [str(self.folders.shared), str(self.folders.work_folder(name)), name]
        self.bench.start(argv, self.folder, self.folder / f"agent-{name}.log", environment)
        self.noticed.discard(name)
        for _ in poll_until(
            lambda: self.is_done() or self.is_agent_alive(name), 30
        ):  # where all is done it ends at once
            pass

    def thaw_and_restart(self) -> None:
        """Thaw whom it is time for, and start dead machines again, each a while after its death."""
        now = time.monotonic()
        for name, (at, pids) in list(self.frozen.items()):
            if now >= at:
                self.thaw(name, pids)
        for name in self.spec.machine_names:
            if self.is_agent_alive(name) or self.is_done():
                self.restart_times.pop(name, None)
            elif name not in self.restart_times:
                self.restart_times[name] = now + self.rng.uniform(0.2, 4.0)
            elif now >= self.restart_times[name] and self.machine_status(name).get("state") != "failed":
                self.add_log_line(f"start {name}")
                self.start(name)
                self.outcome.event_counts["join"] += 1

    def thaw(self, name: str, pids: list[int]) -> None:
        """Let a machine go on."""
        del self.frozen[name]
        for pid in reversed(pids):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGCONT)

    def inject_event(self, kind: str, random_number: float) -> bool:
        """Do what the schedule says. False when it cannot be done without ending the job."""
        taken = {*self.frozen, *self.machines_about_to_die()}  # who waits for a link or a save shall come to it
        there = [one for one in self.members() if self.is_agent_alive(one) and one not in taken]
        if kind == "kill head" and "0" not in self.machines_about_to_die():
            there = [one for one in there[:1] if one == self.members()[0]]
        if not there or not self.is_training():
            return False
        first = int(random_number * len(there))
        chosen = [there[first]] if kind != "kill two" else list({there[0], there[-1 - first % max(1, len(there) - 1)]})
        if kind == "kill trainer":
            return self.kill_trainer(chosen[0], random_number)
        if not self.leaves_a_healthy_member(*chosen) or (kind == "kill two" and len(chosen) < 2):
            return False
        self.add_log_line(f"{kind} {' '.join(chosen)}, members {' '.join(self.members())}")
        for name in chosen:
            if kind == "notice":
                self.noticed.add(name)
                write_atomic(
                    self.folders.work_folder(name) / "notice", to_json_bytes({"reason": "a trial", "seconds": 20})
                )
            elif kind == "freeze":
                self.freeze(name, 1 + 7 * (random_number * 10 % 1))
            else:
                os.kill(self.agent_pid(name), signal.SIGKILL)
        return True

    def freeze(self, name: str, seconds: float) -> None:
        """Stop all of a machine, the agent first: it cannot start anything then."""
        agent = self.agent_pid(name)
        os.kill(agent, signal.SIGSTOP)
        pids = [agent, *process.descendant_pids(agent)]
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGSTOP)
        self.frozen[name] = time.monotonic() + seconds, pids

    def kill_trainer(self, name: str, random_number: float) -> bool:
        """Kill one trainer of a machine; too many would end the job."""
        found = [one for one in process.descendant_pids(self.agent_pid(name)) if is_trainer(one)]
        mine = " trainer" in self.plan.kill_point
        if not found or self.trainer_kills.total() + mine >= MAX_TRAINER_KILLS:
            return False
        self.trainer_kills[name] += 1
        self.add_log_line(f"kill trainer of {name}")
        os.kill(found[int(random_number * 100) % len(found)], signal.SIGKILL)
        return True

    # --- from the first agent to the last ----------------------------------------------------------------------------

    def run(self) -> TrialOutcome:
        """Carry it out, and judge it."""
        self.folders.shared.mkdir(parents=True)
        for name in self.spec.machine_names:
            self.folders.work_folder(name).mkdir(parents=True)
        self.folders.write_spec(self.spec)
        write_atomic(self.folders.launch_path, b"trial")
        try:
            for name in self.spec.machine_names:
                self.start(name)
            self.run_events()
            self.check_outcome()
        except Exception as error:
            self.outcome.problems.append(f"{type(error).__name__}: {error}")
        finally:
            self.clean_up()
        return self.outcome

    def run_events(self) -> None:
        """Let the schedule happen, then wait for the end. Raises `TimeoutError` when it hangs."""
        events, at = list(self.plan.events), 0.0
        for _ in poll_until(
            lambda: self.is_done() and not any(map(self.is_agent_alive, self.spec.machine_names)), DEADLINE_SECONDS
        ):
            self.thaw_and_restart()
            now = time.monotonic()
            if not self.is_training() or self.is_done():
                at = now + (events[0][0] if events else 0)
            elif events and now >= at:
                _, kind, number = events[0]
                event = events.pop(0)
                struck = False
                with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it has just died by itself
                    struck = self.inject_event(kind, number)
                if struck:
                    self.outcome.event_counts[kind] += 1
                else:
                    events.append(event)
                at = now + (events[0][0] if events else 0)
            if any(
                self.machine_status(one).get("state") == "failed" and self.machine_status(one).get("ended")
                for one in self.spec.machine_names
            ):
                break
        self.outcome.seconds = time.monotonic() - self.start_time

    def check_outcome(self) -> None:
        """Say what is wrong."""
        history, wrong = attempts.history(self.folders.shared), self.outcome.problems
        self.outcome.attempts = len(history)
        if self.kill_note.exists():
            point = self.kill_note.read_text()
            where = "in link" if point.startswith(("attempt", "resume")) else f"in {point.split()[0]}"
            self.outcome.event_counts["kill at result" if "result" in point else f"kill {where}"] += 1
            self.add_log_line(f"machine 0 died at {self.plan.kill_point}")
        for name in self.spec.machine_names:
            said = self.machine_status(name)
            if said.get("ended") and said["state"] not in ("done", "left"):
                wrong.append(f"machine {name} ended as {said['state']}: {said.get('reason')}")
        if not self.is_done():
            wrong.append("the job has no result")
            return
        schedule = Schedule(self.spec.recipe, TRAIN_IMAGES, self.spec.schedule_gpus)
        lines = self.folder / "ids"
        lines.mkdir()
        for path in self.folder.glob("run/machine/work/*/ids/*.jsonl"):
            shutil.copy(path, lines)
        first_steps = {one.number: one.first_step for one in history if one.members}
        wrong += usage_log.find_usage_errors(
            lines, first_steps, TRAIN_IMAGES, {one.number: one.steps for one in schedule.epochs}
        )
        final = last_checkpoint(self.folders.shared, max(first_steps))
        wrong += checkpoint_differences(final, self.bench.reference_checkpoint(self.spec.schedule_gpus))
        with contextlib.suppress(TimeoutError):
            for _ in poll_until(lambda: not self.processes(), 10):
                pass
        wrong += [f"still running: {pid}" for pid in self.processes()]

    def clean_up(self) -> None:
        """Leave nothing running, and no folder when all was well."""
        for pid in self.processes():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        (self.folder / "story.txt").write_text(
            "\n".join([str(self.plan), *self.outcome.log_lines, *self.outcome.problems])
        )
        if not self.outcome.problems:
            shutil.rmtree(self.folder, ignore_errors=True)


def poll_until(condition: Callable[[], bool], seconds: float) -> Iterator[None]:
    """Yield every tenth of a second until a condition is true. Raises `TimeoutError`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not after {seconds:g} s")
        yield
        time.sleep(0.1)


def is_trainer(pid: int) -> bool:
    """Whether a process is a trainer: its output goes to the log of a rank."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/fd/1").readlink().name.startswith("rank-")
    return False


def checkpoint_differences(path: Path, other_path: Path) -> list[str]:
    """Return what of weights and momentum differs in any bit; batch-norm statistics belong to a process."""
    import torch

    from train.tools import checkpoint_io

    mine, theirs = checkpoint_io.load_checkpoint(path), checkpoint_io.load_checkpoint(other_path)
    wrong = [] if (mine["epoch"], mine["step"]) == (theirs["epoch"], theirs["step"]) else ["another last step"]
    pairs = {
        name: (mine["model"][name], value)
        for name, value in theirs["model"].items()
        if not name.endswith(BATCH_NORM_STATISTICS)
    }
    for number, value in theirs["optimizer"]["state"].items():
        pairs[f"momentum {number}"] = mine["optimizer"]["state"][number]["momentum_buffer"], value["momentum_buffer"]
    return wrong + [f"{name} differs" for name, (a, b) in pairs.items() if not torch.equal(a, b)]
