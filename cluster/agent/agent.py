"""The small program on every machine: sets up, trains, reports, ends. `python -m cluster.agent SHARED WORK MACHINE`.

    SHARED/status/<machine>.json    what it last said: phase, attempt, state, step, exit codes; rewritten each beat
    SHARED/stop                     a request to save and end the job
    SHARED/logs/agent-<machine>.jsonl   each change of state with its time
    WORK/{logs,metrics,events,ids}  what the trainers write, on this machine's disk; twice a second brought to SHARED

Agents agree on who trains next by attempt files (attempts.py) and the rules of membership.py. The trainers die with
their agent, whatever kills it.
"""

import contextlib
import json
import os
import shutil
import subprocess
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from cluster.connectors import log_sync
from cluster.state import attempts, membership
from cluster.state.heartbeats import Peers, Word
from cluster.state.membership import View
from cluster.state.run_folder import Folders, stop_reason
from cluster.state.spec import Spec
from train.tools import process

from . import tmux_windows
from .data import DrawError, prepare
from .status_writer import Voice
from .trainers import Trainers, temporary
from .watchdog import GRACE, Guard

TICK = 0.1  # seconds
BRING_SECONDS = 0.5
FROZEN_SECONDS = 1.0
PATIENCE = 20.0  # with a shared folder that cannot be written
SILENT_SECONDS = 30.0  # for the first word of trainers, which they say before they load anything


class Ended(Exception):
    """The job is over on this machine: a state ("done", "failed", "stopped", "left"), and the reason in one line."""

    def __init__(self, state: str, reason: str = "") -> None:
        super().__init__(reason)
        self.state, self.reason = state, reason


class Agent:
    """One machine's part of a job."""

    def __init__(self, shared: Path, work: Path, machine: str, address: str, elapsed: float = 0.0) -> None:
        self.shared, self.work, self.machine, self.address = shared, work, machine, address
        self.spec = Spec.from_json(json.loads((shared / "job.json").read_text())).on_machine(shared)
        self.launch = Folders.mark_of(shared)
        self.id = f"{machine}.{uuid4().hex[:6]}"  # a restarted agent is a new machine
        self.temp = temporary()
        self.trainers = Trainers(self.spec, shared, work, self.temp)
        self.rules = self.spec.rules
        self.peers = Peers(shared, self.spec.names, self.launch)
        self.courier = log_sync.Courier(work, shared)
        self.guard = Guard(work, self.spec.max_hours, elapsed, self.spec.metadata, self.die, *self.spec.after)
        self.voice = Voice(shared, machine, self.launch, self.spec.beat)
        self.attempt: attempts.Attempt | None = None
        self.port = process.free_port()
        self.phase, self.fault = "warming", ""
        self.warm, self.begun, self.at = False, False, -1  # a standby is ready; this attempt has made steps, up to `at`
        now = time.monotonic()
        self.since = self.progressed = self.ticked = now
        self.pace = self.heard = self.brought = 0.0
        self.progress: dict[str, Any] = {}
        self.windows: tmux_windows.Windows | None = None
        self.stopping: tuple[float, str] | None = None  # since when, and why

    def run(self) -> int:
        """Live until the job is over here. Returns 0 when it is done or stopped, 1 when it failed."""
        process.adopt_orphans()
        self.guard.start()
        state, reason = "failed", ""
        try:
            self.say("setup", pid=os.getpid())
            self.set_up()
            self.live()
        except Ended as end:
            state, reason = end.state, end.reason
        except subprocess.TimeoutExpired as error:
            reason = f"a process does not die, stuck in the kernel: {error.cmd}"
        except Exception as error:
            traceback.print_exc()
            reason = f"the agent: {type(error).__name__}: {error}"
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.trainers.stop(everything=True)
            shutil.rmtree(self.temp, ignore_errors=True)
        with contextlib.suppress(OSError):  # a full disk: who reads the status finds the lock free and says so
            self.courier.bring()
            self.enter("ended")
            self.say(state, reason=reason, ended=True, **({"step": self.at} if self.at >= 0 else {}))
        self.voice.close()
        self.guard.end()
        return int(state == "failed")

    def die(self) -> None:
        """End without another word: the limit has passed, and the main thread hangs."""
        self.trainers.kill()
        os._exit(1)

    def word(self) -> Word:
        """Return what the others must know of us."""
        return Word(
            id=self.id, address=self.address, port=self.port, attempt=self.attempt.number if self.attempt else 0,
            phase=self.phase, at=self.at, warm=self.warm, leaving=self.guard.leaving, fault=self.fault,
        )  # fmt: skip

    def say(self, state: str, **more: Any) -> None:
        """Say how we stand."""
        self.voice.say(self.word(), state, **more)

    def enter(self, phase: str, fault: str = "") -> None:
        """Begin a phase."""
        self.phase, self.fault, self.since = phase, fault, time.monotonic()

    def set_up(self) -> None:
        """Draw or fetch the images where the job wants it; hear stop, limit and the job's end meanwhile."""

        def going_on(doing: str, progress: str) -> None:
            self.say("fetching" if self.spec.source else "setup", doing=doing, progress=progress)
            self.obey()
            self.check_end()
            time.sleep(TICK)

        try:
            prepare(self.spec, self.shared / "logs" / f"setup-{self.machine}.log", going_on)
        except DrawError as error:
            raise Ended("failed", str(error)) from error

    def live(self) -> None:
        """Train, wait, agree, until the job is over. Always raises `Ended`."""
        self.enter("warming")
        while True:
            now = time.monotonic()
            self.forgive(now)
            self.listen(now)
            self.obey()
            self.attend(now)
            self.check_end()
            self.peers.words[self.id], self.peers.changed[self.id] = self.word_now(), now
            self.act(membership.decide(self.view(now), self.rules), now)
            self.report()
            if now - self.brought > BRING_SECONDS:
                self.brought = now
                with contextlib.suppress(OSError):  # the shared folder is full for a while, or away: the next time
                    self.courier.bring()
            time.sleep(TICK)

    def listen(self, now: float) -> None:
        """Read what the others say: twice a beat, and at every tick while all wait for it."""
        if self.phase in ("failed", "saved") or now - self.heard > self.spec.beat / 2:
            self.heard = now
            if attempts.superseded(self.shared, self.launch):
                raise Ended("left", "a later launch of the job has begun")
            self.peers.listen(now)

    def word_now(self) -> Word:
        """Return our word with the reason, as the others will read it."""
        return replace(self.word(), state=self.voice.state, reason=self.voice.reason)

    def view(self, now: float) -> View:
        """Return what we know."""
        return View(
            me=self.id, phase=self.phase, attempt=self.attempt, words=self.peers.words, ages=self.peers.ages(now),
            moving=self.peers.moving, quiet=now - self.progressed, down=now - self.since, pace=self.pace,
            hurry=self.guard.hurry(),
        )  # fmt: skip

    def forgive(self, now: float) -> None:
        """When we were frozen, it is not the others who were silent."""
        gap, self.ticked = now - self.ticked, now
        if gap > FROZEN_SECONDS:
            self.peers.forgive(gap)
            self.progressed += gap

    def obey(self) -> None:
        """Join, or leave, what the newest attempt of this launch says."""
        newest = attempts.newest(self.shared, self.attempt)
        if newest is None or newest == self.attempt or newest.launch != self.launch:
            return
        self.trainers.stop()
        self.attempt = newest
        self.begun, self.at, self.pace, self.warm = False, -1, 0.0, False
        if not newest.members:
            raise Ended(newest.state, newest.reason)
        if self.id in newest.members:
            self.progress = {}
            self.progressed = time.monotonic()
            log = self.trainers.start(newest, newest.members.index(self.id))
            self.enter("running")
            self.say("starting", resume=newest.resume, doing="", progress="", members=list(newest.names))
            self.show(log)
        elif self.guard.leaving:
            raise Ended("left", self.guard.leaving)
        else:
            self.enter("warming")

    def attend(self, now: float) -> None:
        """See how trainers and standby are."""
        if self.phase in ("warming", "spare"):  # a newcomer announces itself only when it is warm
            ready = "spare" if self.trainers.warm() else "warming"
            if ready != self.phase:
                self.enter(ready)
        if self.phase != "running":
            return
        codes = self.trainers.codes()  # asked first: what they reported is final then
        progress = self.trainers.progress()
        if not progress and now - self.since > SILENT_SECONDS:  # a standby that was frozen, or is stuck
            return self.down("failed", f"no word from the trainers in {SILENT_SECONDS:.0f} s", "own")
        if progress != self.progress:
            self.pace = max(self.pace, now - self.progressed) if self.begun else 0.0
            self.progress, self.progressed = progress, now
        if progress.get("state") in ("training", "validating", "saved"):
            if self.begun:  # not while the trainers start: they need the processors
                self.warm = self.trainers.warm()
            self.begun, self.at = True, progress.get("step", self.at)
        self.voice.said["codes"] = codes
        if (self.shared / "result.json").exists() and any(code is not None for code in codes):
            self.trainers.wait(10)
            raise Ended("done")
        ending = self.trainers.ending(codes)
        if ending:
            if (self.shared / "result.json").exists():
                raise Ended("done")
            self.down(ending.phase, ending.reason, ending.fault)

    def down(self, phase: str, reason: str, fault: str = "") -> None:
        """End the trainers; the next attempt is due."""
        self.trainers.stop()
        if phase == "saved" and self.stopping:
            raise Ended("stopped", self.stopping[1])
        self.enter(phase, fault)
        self.say(phase, reason=reason)

    def act(self, action: membership.Action, now: float) -> None:
        """Do what was decided."""
        if action.do == "ask":
            self.trainers.ask()
        elif action.do == "fail":
            if action.stacks:
                self.trainers.stacks()
            self.down("failed", action.reason)
        elif action.do == "propose" and action.attempt:
            head = next((self.peers.words[one] for one in action.attempt.members), self.word())
            whole = replace(
                action.attempt, launch=self.launch, by=self.id, address=head.address, port=head.port, time=time.time()
            )
            try:
                attempts.propose(self.shared, self.attempt, whole)
                self.port = process.free_port()
            except OSError:  # the shared folder is full, or away: perhaps for a moment
                if now - self.since > PATIENCE:
                    raise

    def report(self) -> None:
        """Say what is going on, in the words of the trainers where they are at work."""
        if self.phase == "running":
            numbers = {key: one for key, one in self.progress.items() if key not in ("state", "ticks")}
            state = "stopping" if self.stopping else self.progress.get("state", "starting")
            self.say(state, **numbers)
        elif self.phase in ("failed", "saved"):
            self.say(self.phase, reason=self.voice.reason)
        else:
            state = "waiting" if self.phase == "spare" else "warming"
            ready = sum(one.phase == "spare" for one in self.peers.words.values())
            more = self.attempt is None and state == "waiting" and len(self.spec.names) > 1
            self.say(state, doing=f"waiting: {ready} of {self.spec.machines} machines are ready" if more else "")

    def check_end(self) -> None:
        """Hear that the job is done, a stop request, the time limit, and that this machine has to go."""
        if self.phase != "running" and (self.shared / "result.json").exists():
            raise Ended("done")
        if not self.stopping:
            reason = stop_reason(self.shared) or self.guard.limit
            if reason:
                self.stopping = time.monotonic(), reason
            elif self.guard.leaving:
                self.leave()
        if self.stopping:
            if not self.begun or self.phase != "running" or time.monotonic() - self.stopping[0] > GRACE:
                raise Ended("stopped", self.stopping[1])
            self.trainers.ask()

    def leave(self) -> None:
        """Wait until the others have what we know; before the first step of an attempt that is nothing."""
        waiting = self.phase in ("failed", "saved") or (self.phase == "running" and self.begun)
        if not waiting or self.guard.seconds_left() <= 0:
            alone = len(self.spec.names) == 1 and not self.spec.cloud
            raise Ended("stopped" if alone else "left", self.guard.leaving)

    def show(self, log: Path) -> None:
        """Show the trainers' log and the machine in tmux windows."""
        shared = len(self.spec.names) > 1 and not self.spec.hosts
        if self.windows is None:
            self.windows = tmux_windows.Windows(
                self.spec.session, self.work / "train.log", self.machine if shared else ""
            )
        self.windows.follow(log)
