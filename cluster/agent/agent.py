"""Per-machine agent: starts the trainers, watches its peers, agrees on membership and writes the machine's status.

    SHARED/status/<machine>.json    last status: phase, attempt, state, step, exit codes; rewritten each heartbeat
    SHARED/stop                     a request to save and end the job
    SHARED/logs/agent-<machine>.jsonl   each change of state with its time
    WORK/{logs,metrics,events,ids}  what the trainers write on this machine's disk; copied to SHARED twice a second

Agents agree on the members of the next attempt by attempt files (cluster/state/attempts.py) and the rules of
cluster/state/membership.py. The trainers die with their agent, however it is killed.
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
from train.tools.agent_protocol import RESULT_FILE

from . import tmux_windows
from .data import DataPreparationError, prepare_data
from .status_writer import StatusWriter
from .trainers import Trainers, make_temp_folder
from .watchdog import SAVE_GRACE_SECONDS, Watchdog

TICK_SECONDS = 0.1
LOG_SYNC_SECONDS = 0.5
SUSPENDED_GAP_SECONDS = 1.0  # a longer time between two ticks means that this process was suspended
SHARED_FOLDER_TIMEOUT_SECONDS = 20.0  # how long a shared folder may refuse writes
FIRST_REPORT_TIMEOUT_SECONDS = 30.0  # for the trainers' first report, which they write before they load anything
RESULT_EXIT_TIMEOUT_SECONDS = 10.0  # for the other trainers to end after the result was written


class JobFinished(Exception):
    """The job has ended on this machine, in a state ("done", "failed", "stopped", "left") and for a one-line reason."""

    def __init__(self, state: str, reason: str = "") -> None:
        super().__init__(reason)
        self.state = state
        self.reason = reason


class Agent:
    """One machine's part of a job."""

    def __init__(self, shared: Path, work: Path, machine: str, address: str, elapsed_seconds: float = 0.0) -> None:
        self.shared = shared
        self.work = work
        self.machine = machine
        self.address = address
        self.spec = JobSpec.from_json(json.loads((shared / "job.json").read_text())).resolved_on_machine(shared)
        self.launch_id = RunFolder.read_launch_id(shared)
        self.id = f"{machine}.{uuid4().hex[:6]}"  # an agent that is started again counts as a new machine
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
        self.tmux_windows: tmux_windows.TmuxWindows | None = None
        self.rendezvous_port = process.free_port()
        self.stop_request: tuple[float, str] | None = None  # when the job was asked to stop, and why
        now = time.monotonic()
        self.phase = "warming"
        self.fault = ""
        self.phase_since = now
        self.last_tick_time = now
        self.last_peer_poll_time = 0.0
        self.last_log_sync_time = 0.0
        # Of the current attempt:
        self.attempt: attempts.Attempt | None = None
        self.is_standby_ready = False
        self.has_made_steps = False
        self.last_step = -1
        self.trainer_progress: dict[str, Any] = {}
        self.last_progress_time = now
        self.longest_progress_gap = 0.0

    def run(self) -> int:
        """Run until the job has ended on this machine. Returns 1 when it failed, else 0."""
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
            reason = f"a process cannot be killed, it hangs in the kernel: {error.cmd}; restart the machine"
        except Exception as error:
            traceback.print_exc()
            reason = f"error in the agent: {type(error).__name__}: {error}"
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.trainers.stop(include_standby=True)
            shutil.rmtree(self.temp_folder, ignore_errors=True)
        # On a full disk this fails. Whoever reads the status then finds that the agent's lock is free.
        with contextlib.suppress(OSError):
            self.log_shipper.ship_new_bytes()
            self.enter_phase("ended")
            step = {"step": self.last_step} if self.last_step >= 0 else {}
            self.write_status(state, reason=reason, ended=True, **step)
        self.status_writer.close()
        self.watchdog.stop()
        return int(state == "failed")

    def hard_exit(self) -> None:
        """Kill the trainers and this process: a limit has passed and the main thread hangs. Called by the watchdog."""
        self.trainers.kill()
        os._exit(1)

    def own_status(self) -> MachineStatus:
        """Return this machine's status for its peers."""
        return MachineStatus(
            id=self.id,
            address=self.address,
            port=self.rendezvous_port,
            attempt=self.attempt.number if self.attempt else 0,
            phase=self.phase,
            last_step=self.last_step,
            is_standby_ready=self.is_standby_ready,
            leave_reason=self.watchdog.leave_reason,
            fault=self.fault,
        )

    def own_status_with_reason(self) -> MachineStatus:
        """Return this machine's status with state and reason, as its peers read it."""
        return replace(self.own_status(), state=self.status_writer.state, reason=self.status_writer.reason)

    def write_status(self, state: str, **extra_fields: Any) -> None:
        """Write this machine's status file with a state and further fields."""
        self.status_writer.write(self.own_status(), state, **extra_fields)

    def enter_phase(self, phase: str, fault: str = "") -> None:
        """Begin a phase (AGENT_PHASES of cluster/state/heartbeats.py)."""
        self.phase = phase
        self.fault = fault
        self.phase_since = time.monotonic()

    def set_up(self) -> None:
        """Generate or fetch the images, where the job wants it. Stop requests, limits and the job's end are obeyed."""

        def on_progress(activity: str, progress: str) -> None:
            self.write_status("fetching" if self.spec.data_source else "setup", doing=activity, progress=progress)
            self.follow_latest_attempt()
            self.check_stop_conditions()
            time.sleep(TICK_SECONDS)

        try:
            prepare_data(self.spec, self.shared / "logs" / f"setup-{self.machine}.log", on_progress)
        except DataPreparationError as error:
            raise JobFinished("failed", str(error)) from error

    def main_loop(self) -> None:
        """Run the trainers, and decide on new attempts together with the other agents, until the job has ended.

        Never returns: raises `JobFinished`, or the error that ended the loop.
        """
        self.enter_phase("warming")
        while True:
            now = time.monotonic()
            self.discount_suspension(now)
            self.poll_peers(now)
            self.follow_latest_attempt()
            self.check_trainers(now)
            self.check_stop_conditions()
            self.peers.statuses[self.id] = self.own_status_with_reason()
            self.peers.changed_at[self.id] = now
            self.execute(membership.decide(self.cluster_view(now), self.rules), now)
            self.report_status()
            if now - self.last_log_sync_time > LOG_SYNC_SECONDS:
                self.last_log_sync_time = now
                with contextlib.suppress(OSError):  # the shared folder is full or away for a while: try again later
                    self.log_shipper.ship_new_bytes()
            time.sleep(TICK_SECONDS)

    def poll_peers(self, now: float) -> None:
        """Read the peers' statuses twice a heartbeat, and at every tick while all machines wait for the next attempt.

        Raises `JobFinished` when a later launch of the job has begun.
        """
        if self.phase in ("failed", "saved") or now - self.last_peer_poll_time > self.spec.heartbeat_seconds / 2:
            self.last_peer_poll_time = now
            if attempts.has_newer_launch(self.shared, self.launch_id):
                raise JobFinished("left", "a later launch of the job has begun")
            self.peers.refresh(now)

    def cluster_view(self, now: float) -> ClusterView:
        """Return what this agent knows at the moment."""
        return ClusterView(
            own_id=self.id,
            phase=self.phase,
            attempt=self.attempt,
            statuses=self.peers.statuses,
            status_ages=self.peers.ages(now),
            seen_changing=self.peers.seen_changing,
            seconds_without_progress=now - self.last_progress_time,
            seconds_in_phase=now - self.phase_since,
            longest_progress_gap=self.longest_progress_gap,
            is_deadline_near=self.watchdog.is_deadline_near(),
        )

    def discount_suspension(self, now: float) -> None:
        """If this process was suspended, do not count that time as silence of the peers."""
        gap = now - self.last_tick_time
        self.last_tick_time = now
        if gap > SUSPENDED_GAP_SECONDS:
            self.peers.discount_pause(gap)
            self.last_progress_time += gap

    def follow_latest_attempt(self) -> None:
        """Join the newest attempt of this launch, or stay out of it, as it says.

        Raises `JobFinished` when the attempt ends the job, or when this machine is not a member and has to leave.
        """
        newest = attempts.newest_attempt(self.shared, self.attempt)
        if newest is None or newest == self.attempt or newest.launch_id != self.launch_id:
            return
        self.trainers.stop()
        self.attempt = newest
        self.has_made_steps = False
        self.last_step = -1
        self.longest_progress_gap = 0.0
        self.is_standby_ready = False
        if not newest.members:
            raise JobFinished(newest.end_state, newest.reason)
        if self.id in newest.members:
            self.trainer_progress = {}
            self.last_progress_time = time.monotonic()
            log_path = self.trainers.start(newest, newest.members.index(self.id))
            self.enter_phase("running")
            members = list(newest.machine_names)
            self.write_status("starting", resume=newest.resume, doing="", progress="", members=members)
            self.show_tmux_windows(log_path)
        elif self.watchdog.leave_reason:
            raise JobFinished("left", self.watchdog.leave_reason)
        else:
            self.enter_phase("warming")

    def check_trainers(self, now: float) -> None:
        """Update the phase by the state of the standby or, while training, of the trainers.

        Raises `JobFinished` when the trainers have written their result.
        """
        if self.phase in ("warming", "spare"):  # a machine offers itself as a spare once its standby is ready
            phase = "spare" if self.trainers.ensure_standby() else "warming"
            if phase != self.phase:
                self.enter_phase(phase)
        if self.phase != "running":
            return
        exit_codes = self.trainers.exit_codes()  # read before the progress: the progress of ended trainers is final
        progress = self.trainers.read_progress()
        if not progress and now - self.phase_since > FIRST_REPORT_TIMEOUT_SECONDS:  # a standby that hangs or was frozen
            reason = f"no report from the trainers in {FIRST_REPORT_TIMEOUT_SECONDS:.0f} s"
            return self.stop_trainers("failed", reason, "own")
        self._note_progress(progress, now)
        self.status_writer.last_status["codes"] = exit_codes
        result_path = self.shared / RESULT_FILE
        if result_path.exists() and any(code is not None for code in exit_codes):
            self.trainers.wait_for_exit(RESULT_EXIT_TIMEOUT_SECONDS)
            raise JobFinished("done")
        trainer_exit = self.trainers.collect_exit(exit_codes)
        if trainer_exit:
            if result_path.exists():
                raise JobFinished("done")
            self.stop_trainers(trainer_exit.phase, trainer_exit.reason, trainer_exit.fault)

    def _note_progress(self, progress: dict[str, Any], now: float) -> None:
        """Remember the trainers' progress and when it last changed; start a standby once steps are made."""
        if progress != self.trainer_progress:
            gap = now - self.last_progress_time
            self.longest_progress_gap = max(self.longest_progress_gap, gap) if self.has_made_steps else 0.0
            self.trainer_progress = progress
            self.last_progress_time = now
        if progress.get("state") in ("training", "validating", "saved"):
            if self.has_made_steps:  # no standby is started while the trainers start: they need the processors
                self.is_standby_ready = self.trainers.ensure_standby()
            self.has_made_steps = True
            self.last_step = progress.get("step", self.last_step)

    def stop_trainers(self, phase: str, reason: str, fault: str = "") -> None:
        """Stop the trainers and enter phase "failed" or "saved", in which the machines agree on the next attempt.

        Raises `JobFinished` when the trainers have saved because the job was asked to stop.
        """
        self.trainers.stop()
        if phase == "saved" and self.stop_request:
            raise JobFinished("stopped", self.stop_request[1])
        self.enter_phase(phase, fault)
        self.write_status(phase, reason=reason)

    def execute(self, action: membership.Action, now: float) -> None:
        """Carry out what the membership protocol decided.

        Raises `OSError` when an attempt cannot be written to the shared folder for too long.
        """
        if action.kind == "ask":
            self.trainers.request_save_and_exit()
        elif action.kind == "fail":
            if action.dump_stacks:
                self.trainers.dump_stacks()
            self.stop_trainers("failed", action.reason)
        elif action.kind == "propose" and action.attempt:
            members = action.attempt.members
            master = self.peers.statuses[members[0]] if members else self.own_status()
            attempt = replace(
                action.attempt,
                launch_id=self.launch_id,
                proposer=self.id,
                master_address=master.address,
                master_port=master.port,
                time=time.time(),
            )
            try:
                attempts.propose(self.shared, self.attempt, attempt)
                self.rendezvous_port = process.free_port()
            except OSError:  # the shared folder is full or away, perhaps only for a moment
                if now - self.phase_since > SHARED_FOLDER_TIMEOUT_SECONDS:
                    raise

    def report_status(self) -> None:
        """Write this machine's status; while training, with the trainers' state and numbers."""
        if self.phase == "running":
            numbers = {key: value for key, value in self.trainer_progress.items() if key not in ("state", "ticks")}
            state = "stopping" if self.stop_request else self.trainer_progress.get("state", "starting")
            self.write_status(state, **numbers)
        elif self.phase in ("failed", "saved"):
            self.write_status(self.phase, reason=self.status_writer.reason)
        else:
            state = "waiting" if self.phase == "spare" else "warming"
            activity = ""
            if self.attempt is None and state == "waiting" and len(self.spec.machine_names) > 1:
                ready_count = sum(status.phase == "spare" for status in self.peers.statuses.values())
                activity = f"waiting: {ready_count} of {self.spec.machines} machines are ready"
            self.write_status(state, doing=activity)

    def check_stop_conditions(self) -> None:
        """Obey the job's result, a stop request, the time limit, and a notice that this machine has to leave.

        Raises `JobFinished` when the job has ended here. Otherwise trainers are asked to save and exit when the job has
        to stop.
        """
        if self.phase != "running" and (self.shared / RESULT_FILE).exists():
            raise JobFinished("done")
        if not self.stop_request:
            reason = stop_reason(self.shared) or self.watchdog.limit_reason
            if reason:
                self.stop_request = time.monotonic(), reason
            elif self.watchdog.leave_reason:
                self.leave_when_safe()
        if self.stop_request:
            request_time, reason = self.stop_request
            can_save = self.has_made_steps and self.phase == "running"
            if not can_save or time.monotonic() - request_time > SAVE_GRACE_SECONDS:
                raise JobFinished("stopped", reason)
            self.trainers.request_save_and_exit()

    def leave_when_safe(self) -> None:
        """Raise `JobFinished` as soon as the other machines can go on without this one.

        They need its last steps to be saved; before the first step of an attempt there is nothing to save.
        """
        must_wait = self.phase in ("failed", "saved") or (self.phase == "running" and self.has_made_steps)
        if not must_wait or self.watchdog.seconds_left() <= 0:
            is_only_machine = len(self.spec.machine_names) == 1 and not self.spec.cloud
            raise JobFinished("stopped" if is_only_machine else "left", self.watchdog.leave_reason)

    def show_tmux_windows(self, log_path: Path) -> None:
        """Show the trainers' log and the machine's processes in tmux windows."""
        is_session_shared = len(self.spec.machine_names) > 1 and self.spec.is_one_computer
        if self.tmux_windows is None:
            self.tmux_windows = tmux_windows.TmuxWindows(
                self.spec.tmux_session, self.work / "train.log", self.machine if is_session_shared else ""
            )
        self.tmux_windows.follow_log(log_path)
