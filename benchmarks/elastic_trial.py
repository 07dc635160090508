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

from elastic_bench import IMAGES, Bench, last_checkpoint
from elastic_plan import OWN_FAULTS, Outcome, Plan

from cluster.state import attempts
from cluster.state.locks import AGENT, held
from cluster.state.run_folder import Folders
from cluster.state.spec import Spec
from train.data.order import usage_log
from train.recipe.schedule import Schedule
from train.tools import process
from train.tools.filesystem import as_json, read_json, replace

DEADLINE = 180.0  # a trial lasts a sixth of it
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class Trial:
    """One job and its schedule."""

    def __init__(self, bench: Bench, plan: Plan) -> None:
        self.bench, self.plan = bench, plan
        self.folder = bench.folder / f"trial-{plan.seed}"
        self.folders = Folders(self.folder / "run")
        self.outcome = Outcome(plan, self.folder)
        self.dice = random.Random(plan.seed + 1_000_000)
        self.spec = Spec(
            name="trial", recipe=bench.recipe, recipe_file="", data=str(bench.data), copies=f"{bench.data}-sz",
            machines=plan.machines, procs=plan.procs, gpus=plan.machines * plan.procs, standby=plan.standby,
            save_seconds=0.5, lost_seconds=2.0, stall_seconds=30.0, workers=0, log_ids=True, exact=True, probe=False,
        )  # fmt: skip
        self.due: dict[str, float] = {}  # when a dead machine is started again
        self.frozen: dict[str, tuple[float, list[int]]] = {}  # until when, and its processes
        self.noticed: set[str] = set()
        self.faults: Counter[str] = Counter()
        self.note = self.folder / "note"
        self.begun = time.monotonic()

    # --- what we see -------------------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """Keep a line of the story."""
        self.outcome.story.append(f"{time.strftime('%H:%M:%S')} +{time.monotonic() - self.begun:.1f} {text}")

    def processes(self) -> list[int]:
        """Return all that runs in the trial's folder, whoever its parent is; no zombies."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and (entry / "cwd").readlink() == self.folder:
                    found.append(int(entry.name))
        return found

    def alive(self, name: str) -> bool:
        """Whether the agent of a machine is there."""
        return held(self.folders.work(name) / AGENT)

    def said(self, name: str) -> dict[str, Any]:
        """Return a machine's last word."""
        return read_json(self.folders.status(name)) or {}

    def agent(self, name: str) -> int:
        """Return a machine's agent. Raises `OSError` when it is gone: its number may be another's."""
        pid = int(self.said(name)["pid"])
        if Path(f"/proc/{pid}/cwd").readlink() != self.folder:
            raise ProcessLookupError(f"the agent of machine {name} is gone")
        return pid

    def members(self) -> list[str]:
        """Return who trains, the head first."""
        newest = attempts.newest(self.folders.shared)
        return list(newest.names) if newest else []

    def armed(self) -> set[str]:
        """Return who may die at any moment."""
        return {"0"} if self.plan.kill and not self.note.exists() else set()

    def safe(self, *doomed: str) -> bool:
        """Whether a member is left that nothing is done to: when all are gone, no job can go on."""
        down = {*doomed, *self.noticed, *self.frozen, *self.armed()}
        return any(one not in down and self.alive(one) for one in self.members())

    def done(self) -> bool:
        """Whether the job has its result."""
        return (self.folders.shared / "result.json").exists()

    def training(self) -> bool:
        """Whether the newest attempt has made a step."""
        head = (self.members() or ["0"])[0]
        said, newest = self.said(head), attempts.newest(self.folders.shared)
        return bool(newest and said.get("attempt") == newest.number and said.get("at", -1) >= 0)

    # --- what we do --------------------------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        """Start a machine's agent."""
        kill = {}
        if name == "0" and self.armed():
            kill = {"TRIAL_KILL": self.plan.kill, "TRIAL_NOTE": str(self.note)}
        environment = self.bench.environment(self.folder, TRIAL_SLOW="0.04", **kill)
        argv = [str(self.folders.shared), str(self.folders.work(name)), name]
        self.bench.start(argv, self.folder, self.folder / f"agent-{name}.log", environment)
        self.noticed.discard(name)
        for _ in until(lambda: self.done() or self.alive(name), 30):  # where all is done it ends at once
            pass

    def tend(self) -> None:
        """Thaw whom it is time for, and start dead machines again, each a while after its death."""
        now = time.monotonic()
        for name, (at, pids) in list(self.frozen.items()):
            if now >= at:
                self.thaw(name, pids)
        for name in self.spec.names:
            if self.alive(name) or self.done():
                self.due.pop(name, None)
            elif name not in self.due:
                self.due[name] = now + self.dice.uniform(0.2, 4.0)
            elif now >= self.due[name] and self.said(name).get("state") != "failed":
                self.say(f"start {name}")
                self.start(name)
                self.outcome.done["join"] += 1

    def thaw(self, name: str, pids: list[int]) -> None:
        """Let a machine go on."""
        del self.frozen[name]
        for pid in reversed(pids):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGCONT)

    def strike(self, kind: str, number: float) -> bool:
        """Do what the schedule says. False when it cannot be done without ending the job."""
        taken = {*self.frozen, *self.armed()}  # who waits for a link or a save shall come to it
        there = [one for one in self.members() if self.alive(one) and one not in taken]
        if kind == "kill head" and "0" not in self.armed():
            there = [one for one in there[:1] if one == self.members()[0]]
        if not there or not self.training():
            return False
        first = int(number * len(there))
        chosen = [there[first]] if kind != "kill two" else list({there[0], there[-1 - first % max(1, len(there) - 1)]})
        if kind == "kill trainer":
            return self.kill_trainer(chosen[0], number)
        if not self.safe(*chosen) or (kind == "kill two" and len(chosen) < 2):
            return False
        self.say(f"{kind} {' '.join(chosen)}, members {' '.join(self.members())}")
        for name in chosen:
            if kind == "notice":
                self.noticed.add(name)
                replace(self.folders.work(name) / "notice", as_json({"reason": "a trial", "seconds": 20}))
            elif kind == "freeze":
                self.freeze(name, 1 + 7 * (number * 10 % 1))
            else:
                os.kill(self.agent(name), signal.SIGKILL)
        return True

    def freeze(self, name: str, seconds: float) -> None:
        """Stop all of a machine, the agent first: it cannot start anything then."""
        agent = self.agent(name)
        os.kill(agent, signal.SIGSTOP)
        pids = [agent, *process.descendants(agent)]
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGSTOP)
        self.frozen[name] = time.monotonic() + seconds, pids

    def kill_trainer(self, name: str, number: float) -> bool:
        """Kill one trainer of a machine; too many would end the job."""
        found = [one for one in process.descendants(self.agent(name)) if is_trainer(one)]
        mine = " trainer" in self.plan.kill
        if not found or self.faults.total() + mine >= OWN_FAULTS:
            return False
        self.faults[name] += 1
        self.say(f"kill trainer of {name}")
        os.kill(found[int(number * 100) % len(found)], signal.SIGKILL)
        return True

    # --- from the first agent to the last ----------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Carry it out, and judge it."""
        self.folders.shared.mkdir(parents=True)
        for name in self.spec.names:
            self.folders.work(name).mkdir(parents=True)
        self.folders.describe(self.spec)
        replace(self.folders.launch, b"trial")
        try:
            for name in self.spec.names:
                self.start(name)
            self.drive()
            self.judge()
        except Exception as error:
            self.outcome.wrong.append(f"{type(error).__name__}: {error}")
        finally:
            self.end()
        return self.outcome

    def drive(self) -> None:
        """Let the schedule happen, then wait for the end. Raises `TimeoutError` when it hangs."""
        events, at = list(self.plan.events), 0.0
        for _ in until(lambda: self.done() and not any(map(self.alive, self.spec.names)), DEADLINE):
            self.tend()
            now = time.monotonic()
            if not self.training() or self.done():
                at = now + (events[0][0] if events else 0)
            elif events and now >= at:
                _, kind, number = events[0]
                event = events.pop(0)
                struck = False
                with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it has just died by itself
                    struck = self.strike(kind, number)
                if struck:
                    self.outcome.done[kind] += 1
                else:
                    events.append(event)
                at = now + (events[0][0] if events else 0)
            if any(self.said(one).get("state") == "failed" and self.said(one).get("ended") for one in self.spec.names):
                break
        self.outcome.seconds = time.monotonic() - self.begun

    def judge(self) -> None:
        """Say what is wrong."""
        history, wrong = attempts.history(self.folders.shared), self.outcome.wrong
        self.outcome.attempts = len(history)
        if self.note.exists():
            point = self.note.read_text()
            where = "in link" if point.startswith(("attempt", "resume")) else f"in {point.split()[0]}"
            self.outcome.done["kill at result" if "result" in point else f"kill {where}"] += 1
            self.say(f"machine 0 died at {self.plan.kill}")
        for name in self.spec.names:
            said = self.said(name)
            if said.get("ended") and said["state"] not in ("done", "left"):
                wrong.append(f"machine {name} ended as {said['state']}: {said.get('reason')}")
        if not self.done():
            wrong.append("the job has no result")
            return
        schedule = Schedule(self.spec.recipe, IMAGES, self.spec.gpus)
        lines = self.folder / "ids"
        lines.mkdir()
        for path in self.folder.glob("run/machine/work/*/ids/*.jsonl"):
            shutil.copy(path, lines)
        first_steps = {one.number: one.first_step for one in history if one.members}
        wrong += usage_log.check(lines, first_steps, IMAGES, {one.number: one.steps for one in schedule.epochs})
        final = last_checkpoint(self.folders.shared, max(first_steps))
        wrong += different(final, self.bench.undisturbed(self.spec.gpus))
        with contextlib.suppress(TimeoutError):
            for _ in until(lambda: not self.processes(), 10):
                pass
        wrong += [f"still running: {pid}" for pid in self.processes()]

    def end(self) -> None:
        """Leave nothing running, and no folder when all was well."""
        for pid in self.processes():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        (self.folder / "story.txt").write_text("\n".join([str(self.plan), *self.outcome.story, *self.outcome.wrong]))
        if not self.outcome.wrong:
            shutil.rmtree(self.folder, ignore_errors=True)


def until(condition: Callable[[], bool], seconds: float) -> Iterator[None]:
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


def different(one: Path, other: Path) -> list[str]:
    """Return what of weights and momentum differs in any bit; batch-norm statistics belong to a process."""
    import torch

    from train.tools import checkpoint_io

    mine, theirs = checkpoint_io.load(one), checkpoint_io.load(other)
    wrong = [] if (mine["epoch"], mine["step"]) == (theirs["epoch"], theirs["step"]) else ["another last step"]
    pairs = {
        name: (mine["model"][name], value) for name, value in theirs["model"].items() if not name.endswith(STATISTICS)
    }
    for number, value in theirs["optimizer"]["state"].items():
        pairs[f"momentum {number}"] = mine["optimizer"]["state"][number]["momentum_buffer"], value["momentum_buffer"]
    return wrong + [f"{name} differs" for name, (a, b) in pairs.items() if not torch.equal(a, b)]
