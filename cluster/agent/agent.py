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
from cluster.state.heartbeats import MachineStatus, PeerStatuses
from cluster.state.membership import ClusterView
from cluster.state.run_folder import RunFolder, stop_reason
from cluster.state.spec import JobSpec
from train.tools import process

from . import tmux_windows
from .data import DataPreparationError, prepare_data
from .status_writer import StatusWriter
from .trainers import Trainers, make_temp_folder
from .watchdog import SAVE_GRACE_SECONDS, Watchdog

TICK_SECONDS = 0.1  # seconds
LOG_SYNC_SECONDS = 0.5
SUSPENDED_GAP_SECONDS = 1.0
SHARED_FOLDER_TIMEOUT_SECONDS = 20.0  # with a shared folder that cannot be written
FIRST_REPORT_TIMEOUT_SECONDS = 30.0  # for the first word of trainers, which they say before they load anything


class JobFinished(Exception):
    """The job is over on this machine: a state ("done", "failed", "stopped", "left"), and the reason in one line."""

    def __init__(self, state: str, reason: str = "") -> None:
        super().__init__(reason)
        self.state, self.reason = state, reason


class Agent:
    """One machine's part of a job."""

    def __init__(self, shared: Path, work: Path, machine: str, address: str, elapsed_seconds: float = 0.0) -> None:
        self.shared, self.work, self.machine, self.address = shared, work, machine, address
        self.spec = JobSpec.from_json(json.loads((shared / "job.json").read_text())).resolved_on_machine(shared)
        self.launch_id = RunFolder.read_launch_id(shared)
        self.id = f"{machine}.{uuid4().hex[:6]}"  # a restarted agent is a new machine
        self.temp_folder = make_temp_folder()
        self.trainers = Trainers(self.spec, shared, work, self.temp_folder)
        self.rules = self.spec.membership_rules
        self.peers = PeerStatuses(shared, self.spec.machine_names, self.launch_id)
        self.log_shipper = log_sync.LogShipper(work, shared)
        self.watchdog = Watchdog(
            work,
            self.spec.max_hours,
            elapsed_seconds,
            self.spec.metadata_address,
            self.hard_exit,
            *self.spec.poweroff_settings,
        )
        self.status_writer = StatusWriter(shared, machine, self.launch_id, self.spec.heartbeat_seconds)
        self.attempt: attempts.Attempt | None = None
        self.rendezvous_port = process.free_port()
        self.phase, self.fault = "warming", ""
        self.is_standby_ready, self.has_made_steps, self.last_step = (
            False,
            False,
            -1,
        )  # a standby is ready; this attempt has made steps, up to `at`
        now = time.monotonic()
        self.phase_since = self.last_progress_time = self.last_tick_time = now
        self.longest_progress_gap = self.last_peer_poll_time = self.last_log_sync_time = 0.0
        self.trainer_progress: dict[str, Any] = {}
        self.tmux_windows: tmux_windows.TmuxWindows | None = None
        self.stop_request: tuple[float, str] | None = None  # since when, and why

    def run(self) -> int:
        """Live until the job is over here. Returns 0 when it is done or stopped, 1 when it failed."""
        process.adopt_orphans()
        self.watchdog.start()
        state, reason = "failed", ""
        try:
            self.write_status("setup", pid=os.getpid())
            self.set_up()
            self.main_loop()
        except JobFinished as end:
            state, reason = end.state, end.reason
        except subprocess.TimeoutExpired as error:
            reason = f"a process does not die, stuck in the kernel: {error.cmd}"
        except Exception as error:
            traceback.print_exc()
            reason = f"the agent: {type(error).__name__}: {error}"
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.trainers.stop(include_standby=True)
            shutil.rmtree(self.temp_folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # a full disk: who reads the status finds the lock free and says so
            self.log_shipper.ship_new_bytes()
            self.enter_phase("ended")
            self.write_status(
                state, reason=reason, ended=True, **({"step": self.last_step} if self.last_step >= 0 else {})
            )
        self.status_writer.close()
        self.watchdog.stop()
        return int(state == "failed")

    def hard_exit(self) -> None:
        """End without another word: the limit has passed, and the main thread hangs."""
        self.trainers.kill()
        os._exit(1)

    def own_status(self) -> MachineStatus:
        """Return what the others must know of us."""
        return MachineStatus(
            id=self.id, address=self.address, port=self.rendezvous_port, attempt=self.attempt.number if self.attempt else 0,
            phase=self.phase, last_step=self.last_step, is_standby_ready=self.is_standby_ready, leave_reason=self.watchdog.leave_reason, fault=self.fault,
        )  # fmt: skip

    def write_status(self, state: str, **extra_fields: Any) -> None:
        """Say how we stand."""
        self.status_writer.write(self.own_status(), state, **extra_fields)

    def enter_phase(self, phase: str, fault: str = "") -> None:
        """Begin a phase."""
        self.phase, self.fault, self.phase_since = phase, fault, time.monotonic()

    def set_up(self) -> None:
        """Draw or fetch the images where the job wants it; hear stop, limit and the job's end meanwhile."""

        def going_on(doing: str, progress: str) -> None:
            self.write_status("fetching" if self.spec.data_source else "setup", doing=doing, progress=progress)
            self.follow_latest_attempt()
            self.check_stop_conditions()
            time.sleep(TICK_SECONDS)

        try:
            prepare_data(self.spec, self.shared / "logs" / f"setup-{self.machine}.log", going_on)
        except DataPreparationError as error:
            raise JobFinished("failed", str(error)) from error

    def main_loop(self) -> None:
        """Train, wait, agree, until the job is over. Always raises `Ended`."""
        self.enter_phase("warming")
        while True:
            now = time.monotonic()
            self.discount_suspension(now)
            self.poll_peers(now)
            self.follow_latest_attempt()
            self.check_trainers(now)
            self.check_stop_conditions()
            self.peers.statuses[self.id], self.peers.changed_at[self.id] = self.own_status_with_reason(), now
            self.execute(membership.decide(self.cluster_view(now), self.rules), now)
            self.report_status()
            if now - self.last_log_sync_time > LOG_SYNC_SECONDS:
                self.last_log_sync_time = now
                with contextlib.suppress(OSError):  # the shared folder is full for a while, or away: the next time
                    self.log_shipper.ship_new_bytes()
            time.sleep(TICK_SECONDS)

    def poll_peers(self, now: float) -> None:
        """Read what the others say: twice a beat, and at every tick while all wait for it."""
        if self.phase in ("failed", "saved") or now - self.last_peer_poll_time > self.spec.heartbeat_seconds / 2:
            self.last_peer_poll_time = now
            if attempts.has_newer_launch(self.shared, self.launch_id):
                raise JobFinished("left", "a later launch of the job has begun")
            self.peers.refresh(now)

    def own_status_with_reason(self) -> MachineStatus:
        """Return our word with the reason, as the others will read it."""
        return replace(self.own_status(), state=self.status_writer.state, reason=self.status_writer.reason)

    def cluster_view(self, now: float) -> ClusterView:
        """Return what we know."""
        return ClusterView(
            own_id=self.id, phase=self.phase, attempt=self.attempt, statuses=self.peers.statuses, status_ages=self.peers.ages(now),
            seen_changing=self.peers.seen_changing, seconds_without_progress=now - self.last_progress_time, seconds_in_phase=now - self.phase_since, longest_progress_gap=self.longest_progress_gap,
            is_deadline_near=self.watchdog.is_deadline_near(),
        )  # fmt: skip

    def discount_suspension(self, now: float) -> None:
        """When we were frozen, it is not the others who were silent."""
        gap, self.last_tick_time = now - self.last_tick_time, now
        if gap > SUSPENDED_GAP_SECONDS:
            self.peers.discount_pause(gap)
            self.last_progress_time += gap

    def follow_latest_attempt(self) -> None:
        """Join, or leave, what the newest attempt of this launch says."""
        newest = attempts.newest_attempt(self.shared, self.attempt)
        if newest is None or newest == self.attempt or newest.launch_id != self.launch_id:
            return
        self.trainers.stop()
        self.attempt = newest
        self.has_made_steps, self.last_step, self.longest_progress_gap, self.is_standby_ready = False, -1, 0.0, False
        if not newest.members:
            raise JobFinished(newest.end_state, newest.reason)
        if self.id in newest.members:
            self.trainer_progress = {}
            self.last_progress_time = time.monotonic()
            log = self.trainers.start(newest, newest.members.index(self.id))
            self.enter_phase("running")
            self.write_status(
                "starting", resume=newest.resume, doing="", progress="", members=list(newest.machine_names)
            )
            self.show_tmux_windows(log)
        elif self.watchdog.leave_reason:
            raise JobFinished("left", self.watchdog.leave_reason)
        else:
            self.enter_phase("warming")

    def check_trainers(self, now: float) -> None:
        """See how trainers and standby are."""
        if self.phase in ("warming", "spare"):  # a newcomer announces itself only when it is warm
            ready = "spare" if self.trainers.ensure_standby() else "warming"
            if ready != self.phase:
                self.enter_phase(ready)
        if self.phase != "running":
            return
        codes = self.trainers.exit_codes()  # asked first: what they reported is final then
        progress = self.trainers.read_progress()
        if (
            not progress and now - self.phase_since > FIRST_REPORT_TIMEOUT_SECONDS
        ):  # a standby that was frozen, or is stuck
            return self.stop_trainers(
                "failed", f"no word from the trainers in {FIRST_REPORT_TIMEOUT_SECONDS:.0f} s", "own"
            )
        if progress != self.trainer_progress:
            self.longest_progress_gap = (
                max(self.longest_progress_gap, now - self.last_progress_time) if self.has_made_steps else 0.0
            )
            self.trainer_progress, self.last_progress_time = progress, now
        if progress.get("state") in ("training", "validating", "saved"):
            if self.has_made_steps:  # not while the trainers start: they need the processors
                self.is_standby_ready = self.trainers.ensure_standby()
            self.has_made_steps, self.last_step = True, progress.get("step", self.last_step)
        self.status_writer.last_status["codes"] = codes
        if (self.shared / "result.json").exists() and any(code is not None for code in codes):
            self.trainers.wait_for_exit(10)
            raise JobFinished("done")
        ending = self.trainers.collect_exit(codes)
        if ending:
            if (self.shared / "result.json").exists():
                raise JobFinished("done")
            self.stop_trainers(ending.phase, ending.reason, ending.fault)

    def stop_trainers(self, phase: str, reason: str, fault: str = "") -> None:
        """End the trainers; the next attempt is due."""
        self.trainers.stop()
        if phase == "saved" and self.stop_request:
            raise JobFinished("stopped", self.stop_request[1])
        self.enter_phase(phase, fault)
        self.write_status(phase, reason=reason)

    def execute(self, action: membership.Action, now: float) -> None:
        """Do what was decided."""
        if action.kind == "ask":
            self.trainers.request_save_and_exit()
        elif action.kind == "fail":
            if action.dump_stacks:
                self.trainers.dump_stacks()
            self.stop_trainers("failed", action.reason)
        elif action.kind == "propose" and action.attempt:
            head = next((self.peers.statuses[one] for one in action.attempt.members), self.own_status())
            whole = replace(
                action.attempt,
                launch_id=self.launch_id,
                proposer=self.id,
                master_address=head.address,
                master_port=head.port,
                time=time.time(),
            )
            try:
                attempts.propose(self.shared, self.attempt, whole)
                self.rendezvous_port = process.free_port()
            except OSError:  # the shared folder is full, or away: perhaps for a moment
                if now - self.phase_since > SHARED_FOLDER_TIMEOUT_SECONDS:
                    raise

    def report_status(self) -> None:
        """Say what is going on, in the words of the trainers where they are at work."""
        if self.phase == "running":
            numbers = {key: one for key, one in self.trainer_progress.items() if key not in ("state", "ticks")}
            state = "stopping" if self.stop_request else self.trainer_progress.get("state", "starting")
            self.write_status(state, **numbers)
        elif self.phase in ("failed", "saved"):
            self.write_status(self.phase, reason=self.status_writer.reason)
        else:
            state = "waiting" if self.phase == "spare" else "warming"
            ready = sum(one.phase == "spare" for one in self.peers.statuses.values())
            more = self.attempt is None and state == "waiting" and len(self.spec.machine_names) > 1
            self.write_status(
                state, doing=f"waiting: {ready} of {self.spec.machines} machines are ready" if more else ""
            )

    def check_stop_conditions(self) -> None:
        """Hear that the job is done, a stop request, the time limit, and that this machine has to go."""
        if self.phase != "running" and (self.shared / "result.json").exists():
            raise JobFinished("done")
        if not self.stop_request:
            reason = stop_reason(self.shared) or self.watchdog.limit_reason
            if reason:
                self.stop_request = time.monotonic(), reason
            elif self.watchdog.leave_reason:
                self.leave_when_safe()
        if self.stop_request:
            if (
                not self.has_made_steps
                or self.phase != "running"
                or time.monotonic() - self.stop_request[0] > SAVE_GRACE_SECONDS
            ):
                raise JobFinished("stopped", self.stop_request[1])
            self.trainers.request_save_and_exit()

    def leave_when_safe(self) -> None:
        """Wait until the others have what we know; before the first step of an attempt that is nothing."""
        waiting = self.phase in ("failed", "saved") or (self.phase == "running" and self.has_made_steps)
        if not waiting or self.watchdog.seconds_left() <= 0:
            alone = len(self.spec.machine_names) == 1 and not self.spec.cloud
            raise JobFinished("stopped" if alone else "left", self.watchdog.leave_reason)

    def show_tmux_windows(self, log_path: Path) -> None:
        """Show the trainers' log and the machine in tmux windows."""
        shared = len(self.spec.machine_names) > 1 and not self.spec.hosts
        if self.tmux_windows is None:
            self.tmux_windows = tmux_windows.TmuxWindows(
                self.spec.tmux_session, self.work / "train.log", self.machine if shared else ""
            )
        self.tmux_windows.follow_log(log_path)
