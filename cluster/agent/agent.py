"""Per-machine agent: starts the trainers, watches its peers, agrees on membership and writes the machine's status.

    SHARED/status/<machine>.json    last status (cluster/state/heartbeats.py); rewritten each heartbeat
    SHARED/stop                     a request to save and end the job
    SHARED/logs/agent-<machine>.jsonl   each change of state with its time
    WORK/{logs,metrics,events,ids}  what the trainers write on this machine's disk; copied to SHARED twice a second

Agents agree on the members of the next attempt by attempt files (cluster/state/attempts.py) and the rules of
cluster/state/membership.py. The trainers die with their agent, however it is killed.
"""

import contextlib
import os
import secrets
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

from cluster.connectors import log_sync
from cluster.state import attempts, membership
from cluster.state.heartbeats import MachineStatus, PeerStatuses
from cluster.state.membership import IDLE_PHASES, ActionKind, ClusterView
from cluster.state.run_folder import RunFolder, setup_log_path
from cluster.state.spec import JobSpec
from cluster.state.states import AgentPhase, MachineState
from train.distributed import network
from train.tools import host, process
from train.tools.agent_protocol import ABORT_REQUEST_FILE, RESULT_FILE, SAVE_REQUEST_FILE, Fault
from train.tools.files import FULL_DISK_ERRORS, is_visible, read_file
from train.tools.records import DamagedRecord

from .data import DataPreparationError, count_fetch_requests, prepare_data, prepare_environment
from .ending import EndConditions, JobFinished, broken_machine_end
from .processes.attempt_state import AttemptState
from .processes.base import ProcessesExit, UnkillableProcess
from .processes.commands import CommandProcesses
from .status_writer import StatusWriter, continue_clock, elapsed_by_statuses, first_status, read_previous_status
from .temp_folder import TempFolder
from .tmux_windows import TmuxWindows
from .traffic import TrafficMeter
from .trainers import Trainers
from .watchdog import Watchdog

TICK_SECONDS = 0.1
REGROUP_TICK_SECONDS = 0.02  # while survivors wait for the next attempt: all GPUs are idle
REGROUP_SECONDS = 3.0  # after which they wait for something slow, and look at the shared folder less often
LOG_SYNC_SECONDS = 0.5
SUSPENDED_GAP_SECONDS = 1.0  # a longer time between two ticks means that this process was suspended
SHARED_FOLDER_TIMEOUT_SECONDS = 20.0  # how long a shared folder that is not full may refuse writes
FIRST_REPORT_TIMEOUT_SECONDS = 30.0  # for the trainers' first report, which they write before they load anything
RESULT_EXIT_TIMEOUT_SECONDS = 10.0  # for the other trainers to end after the result was written
MAX_MEMBER_ADDRESSES = 1000  # in the file of an attempt, and in the filter of the kernel (peer_filter.py)
MACHINE_FAULTS = (Fault.OWN, Fault.FINAL, Fault.INPUT)  # failures of trainers that a broken GPU may have caused


class Agent:
    """One machine's part of a job."""

    def __init__(
        self,
        shared: Path,
        work: Path,
        machine: str,
        address: str,
        elapsed_seconds: float = 0.0,
        user_project: Path | None = None,
        host_name: str = "",
    ) -> None:
        self.spec_path, self.spec_stamp = shared / "job.json", 0  # 0: not read by `read_machines` yet
        self.shared = shared
        self.work = work
        self.machine = machine
        self.address = address
        self.reached_at = network.resolve(address)  # the IP addresses at which other machines reach this one
        self.addresses: tuple[str, ...] = ()
        self.spec = JobSpec.parse(read_file(self.spec_path), self.spec_path).resolved_on_machine(shared)
        os.environ |= self.spec.rental_facts.environment
        self.launch_id = RunFolder.read_launch_id(shared)
        self.id = f"{machine}.{uuid4().hex[:6]}"  # an agent that is started again counts as a new machine
        previous = read_previous_status(shared, machine)
        self.traffic_meter = TrafficMeter(shared, address, previous) if self.spec.cloud else None
        continue_clock(previous)
        self.temp_folder = TempFolder(work)
        places = shared, work, self.temp_folder.path, user_project
        command = self.spec.own_command
        self.trainers = CommandProcesses(self.spec, command, *places) if command else Trainers(self.spec, *places)
        self.rules = self.spec.membership_rules
        self.peers = PeerStatuses(shared, self.spec.machine_names, self.launch_id)
        self.log_shipper = log_sync.LogShipper(work, shared)
        self.watchdog = Watchdog(
            work,
            self.spec.max_hours,
            max(elapsed_seconds, elapsed_by_statuses(shared, machine, self.spec.machine_names, self.launch_id)),
            self.spec.metadata_address,
            self.hard_exit,
            self.spec.poweroff_grace,
            self.spec.limit_name,
        )
        self.end_conditions = EndConditions(self.spec, shared, self.watchdog)
        heartbeat_seconds = self.spec.heartbeat_seconds
        self.status_writer = StatusWriter(shared, machine, self.launch_id, heartbeat_seconds, self.traffic_meter)
        self.gpus = self.status_writer.sampler.gpus
        # EC2 says how many GPUs a rented machine has; of them the job uses one for each trainer.
        self.gpus.expected = self.spec.procs if self.spec.rental_facts.gpus_per_machine else 0
        self.unexplained_failure: ProcessesExit | None = None  # of trainers, while the GPUs are checked
        is_session_shared = len(self.spec.machine_names) > 1 and self.spec.is_one_computer
        self.tmux_windows = TmuxWindows(self.spec.tmux_session, work, machine if is_session_shared else "")
        self.rendezvous_port = process.free_port()
        now = time.monotonic()
        self.phase = AgentPhase.WARMING
        self.fault = Fault.NONE
        self.phase_since = now
        self.last_tick_time = now
        self.last_peer_poll_time = 0.0
        self.last_log_sync_time = 0.0
        self.current = AttemptState(last_progress_time=now)
        self.status = first_status(previous, id=self.id, address=address, host=host_name)  # as last written

    def run(self) -> int:
        """Run until the job has ended on this machine. Returns 1 when it failed, else 0."""
        process.adopt_orphans()
        self.watchdog.start()
        end = JobFinished(MachineState.FAILED)
        try:
            self.status = replace(self.status, pid=os.getpid())
            self.gpus.start_check()
            self.write_status(MachineState.SETUP)
            self.set_up()
            self.enter_phase(AgentPhase.WARMING)
            while True:  # until a `JobFinished`, or the error that ends it
                self.tick(time.monotonic())
                is_regrouping = self.phase in IDLE_PHASES and time.monotonic() - self.phase_since < REGROUP_SECONDS
                time.sleep(REGROUP_TICK_SECONDS if is_regrouping else TICK_SECONDS)
        except JobFinished as finished:
            end = finished
        except UnkillableProcess as error:
            end = broken_machine_end(self.spec, str(error))
        except Exception as error:
            traceback.print_exc()
            end = JobFinished(MachineState.FAILED, f"error in the agent: {type(error).__name__}: {error}")
        finally:
            self.tmux_windows.close()
            with contextlib.suppress(UnkillableProcess):
                self.trainers.stop(include_standby=True)
            self.temp_folder.remove()
        with contextlib.suppress(OSError):  # a file of a script may have no place there
            self.log_shipper.ship_new_bytes()
        # On a full disk this fails. Whoever reads the status then finds that the agent's lock is free.
        with contextlib.suppress(OSError):
            self.enter_phase(AgentPhase.ENDED, end.fault)
            step = self.current.last_step if self.current.last_step >= 0 else self.status.step
            self.status = replace(self.status, ended=True, step=step)
            self.write_status(end.state, end.reason)
        self.status_writer.close()
        self.watchdog.stop()
        return int(end.state == MachineState.FAILED)

    def hard_exit(self) -> None:
        """Kill the trainers and this process: a limit has passed and the main thread hangs. Called by the watchdog."""
        self.trainers.kill()
        os._exit(1)

    def own_status(self) -> MachineStatus:
        """Return this machine's status: what was last written, brought up to date."""
        return replace(
            self.status,
            addresses=self.addresses,
            port=self.rendezvous_port,
            attempt=self.current.number,
            phase=self.phase,
            last_step=self.current.last_step,
            kept_step=self.current.kept_step,
            not_in_place=self.current.not_in_place,
            is_standby_ready=self.current.is_standby_ready,
            leave_reason=self.watchdog.leave_reason,
            risk_reason=self.watchdog.risk_reason,
            limit=self.watchdog.limit,
            limit_share=self.watchdog.limit_share,
            elapsed_seconds=self.watchdog.elapsed_seconds,
            fault=self.fault,
            asks_exit=self.trainers.exit_requested_at is not None and self.phase == AgentPhase.RUNNING,
        )

    def write_status(self, state: MachineState, reason: str = "") -> None:
        """Write this machine's status file with a state and its reason."""
        self.status = replace(self.own_status(), state=state, reason=reason)
        self.status_writer.write(self.status)

    def enter_phase(self, phase: AgentPhase, fault: Fault = Fault.NONE) -> None:
        """Begin a phase."""
        self.phase = phase
        self.fault = fault
        self.phase_since = time.monotonic()

    def set_up(self) -> None:
        """Generate or fetch the images, where the job wants it. Stop requests, limits and the job's end are obeyed."""

        def on_progress(activity: str, progress: str) -> None:
            self.status = replace(self.status, doing=activity, progress=progress)
            self.write_status(MachineState.FETCHING if self.spec.data_source else MachineState.SETUP)
            self.follow_latest_attempt()
            self.check_gpus()
            self.check_end_conditions()
            time.sleep(TICK_SECONDS)

        is_in_object_store = "://" in self.spec.data_source  # which is reached past the internet
        if self.traffic_meter and is_in_object_store:
            self.traffic_meter.count_internet()
        try:
            log_path = setup_log_path(self.shared, self.machine)
            prepare_data(self.spec, self.shared, log_path, on_progress)
            if isinstance(self.trainers, CommandProcesses):
                prepared = prepare_environment(self.spec, self.trainers.source, self.work, log_path, on_progress)
                self.trainers.use_environment(*prepared)
        except DataPreparationError as error:
            raise JobFinished(MachineState.FAILED, str(error)) from error
        if self.traffic_meter and is_in_object_store:
            self.traffic_meter.count_object_reads(count_fetch_requests(self.spec))
        elif self.traffic_meter:
            self.traffic_meter.count_internet()

    def tick(self, now: float) -> None:
        """Look at the peers, the trainers and the requests once, and do what follows. Raises `JobFinished`."""
        gap = now - self.last_tick_time
        self.last_tick_time = now
        if gap > SUSPENDED_GAP_SECONDS:  # which is no silence of the peers
            self.peers.discount_pause(gap)
            self.current.last_progress_time += gap
        self.poll_peers(now)
        self.follow_latest_attempt()
        self.check_gpus()
        self.check_trainers(now)
        self.check_end_conditions()
        self.peers.statuses[self.id] = self.own_status()
        self.peers.changed_at[self.id] = now
        if self.unexplained_failure is None:
            self.execute(membership.decide(self.cluster_view(now), self.rules), now)
        self.report_status()
        if now - self.last_log_sync_time > LOG_SYNC_SECONDS:
            self.last_log_sync_time = now
            with contextlib.suppress(OSError):  # the shared folder is full or away for a while: try again later
                self.log_shipper.ship_new_bytes()

    def poll_peers(self, now: float) -> None:
        """Read the peers' statuses twice a heartbeat, and at every tick while all wait for the next attempt.

        Raises `JobFinished` when a later launch of the job has begun.
        """
        if self.phase in IDLE_PHASES or now - self.last_peer_poll_time > self.spec.heartbeat_seconds / 2:
            self.last_peer_poll_time = now
            if attempts.has_newer_launch(self.shared, self.launch_id):
                raise JobFinished(MachineState.LEFT, "a later launch of the job has begun")
            self.read_machines()
            is_handover = self.phase == AgentPhase.RUNNING and self.current.is_handover
            self.peers.refresh(now, tests_all_locks=self.phase in IDLE_PHASES or is_handover)
            self.addresses = network.source_addresses(self.reached_at)
            self.current.note_peers(self.peers.statuses, self.id, now)

    def read_machines(self) -> None:
        """Take note of machines that were added to the job (`imgnet-cluster join`)."""
        with contextlib.suppress(OSError, DamagedRecord):
            if (stamp := self.spec_path.stat().st_mtime_ns) != self.spec_stamp:
                spec, self.spec_stamp = JobSpec.parse(read_file(self.spec_path), self.spec_path), stamp
                self.spec = replace(self.spec, machines=spec.machines, recovery=spec.recovery)
                self.end_conditions.spec, self.rules = self.spec, self.spec.membership_rules
                self.peers.machine_names = self.rules.machine_names

    def addresses_of(self, members: Sequence[str]) -> tuple[str, ...]:
        """Return the addresses from which the members of an attempt may connect; () unless those of all are known."""
        by_member = [self.peers.statuses[member].addresses for member in members]
        addresses = tuple(sorted(set().union(*by_member)))
        return addresses if all(by_member) and len(addresses) <= MAX_MEMBER_ADDRESSES else ()

    def cluster_view(self, now: float) -> ClusterView:
        """Return what this agent knows at the moment."""
        return ClusterView(
            own_id=self.id,
            phase=self.phase,
            attempt=self.current.attempt,
            statuses=self.peers.statuses,
            # A spare that cannot read the shared folder does not know whether the members are silent.
            status_ages=self.peers.ages(self.peers.read_at if self.phase == AgentPhase.SPARE else now),
            seen_changing=self.peers.seen_changing,
            seconds_without_progress=now - self.current.last_progress_time,
            seconds_in_phase=now - self.phase_since,
            longest_progress_gap=self.current.longest_progress_gap,
            is_deadline_near=self.watchdog.is_deadline_near(),
            can_keep_state=self.current.can_keep_state,
            have_all_started=self.current.have_all_started,
            is_regrouping=self.current.is_regrouping,
        )

    def follow_latest_attempt(self) -> None:
        """Join the newest attempt of this launch if this machine is a member of it.

        Raises `JobFinished` when it ends the job, or leaves this machine out as broken or because it has to leave.
        """
        newest = attempts.newest_attempt(self.shared, self.current.attempt)
        if newest is None or newest == self.current.attempt or newest.launch_id != self.launch_id:
            return
        goes_on_in_place = self.current.can_go_on_in(newest, self.id)
        if not goes_on_in_place:
            self.trainers.stop()
        self.unexplained_failure = None
        now = time.monotonic()
        self.current = AttemptState(attempt=newest, goes_on_in_place=goes_on_in_place, last_progress_time=now)
        self.rendezvous_port = process.free_port()  # a trainer that goes on in place may still hold the old one
        if newest.end_state:
            raise JobFinished(newest.end_state, newest.reason)
        if self.id in newest.members:
            log_path = self.trainers.start(newest, newest.members.index(self.id), goes_on_in_place)
            self.enter_phase(AgentPhase.RUNNING)
            self.status = replace(self.status, doing="", progress="", failed_rank=None)
            self.write_status(MachineState.STARTING)
            self.tmux_windows.follow_log(log_path)
        elif self.watchdog.leave_reason:
            raise JobFinished(MachineState.LEFT, self.watchdog.leave_reason)
        elif self.id in newest.left_out:
            raise broken_machine_end(self.spec, f"failed repeatedly, and the others did not: {self.status.reason}")
        else:
            self.enter_phase(AgentPhase.WARMING)

    def check_trainers(self, now: float) -> None:
        """Update the phase by the standby or the trainers. Raises `JobFinished` when they have written the result."""
        if self.phase in (AgentPhase.WARMING, AgentPhase.SPARE):  # a spare is a machine whose standby is ready
            phase = AgentPhase.SPARE if self.trainers.ensure_standby() else AgentPhase.WARMING
            if phase != self.phase:
                self.enter_phase(phase)
        keeps_state = self.phase in IDLE_PHASES and self.current.kept_step is not None
        if keeps_state and any(code is not None for code in self.trainers.exit_codes()):
            self.current.kept_step = None
            self.trainers.stop()
        if self.phase != AgentPhase.RUNNING or self.unexplained_failure:
            return
        exit_codes = self.trainers.exit_codes()  # read before the progress: the progress of ended trainers is final
        progress = self.trainers.read_progress()
        if not progress and now - self.phase_since > FIRST_REPORT_TIMEOUT_SECONDS:  # a standby that hangs or was frozen
            reason = f"no report from the trainers in {FIRST_REPORT_TIMEOUT_SECONDS:.0f} s"
            return self.stop_trainers(AgentPhase.FAILED, reason, Fault.OWN)
        had_made_steps = self.current.has_made_steps
        self.current.note_progress(progress, now)
        if had_made_steps and self.current.is_training:  # while the trainers start, they need the processors
            self.current.is_standby_ready = self.trainers.ensure_standby()
        if self.watchdog.risk_reason:
            self.trainers.request(SAVE_REQUEST_FILE)
        result_path = self.shared / RESULT_FILE
        if is_visible(result_path) and any(code is not None for code in exit_codes):
            self.trainers.wait_for_exit(RESULT_EXIT_TIMEOUT_SECONDS)
            raise JobFinished(MachineState.DONE)
        trainer_exit = self.trainers.collect_exit(exit_codes)
        if trainer_exit:
            if is_visible(result_path):
                raise JobFinished(MachineState.DONE)
            self.status = replace(self.status, failed_rank=trainer_exit.rank, failed_at=host.unix_time())
            self.stop_trainers(trainer_exit.phase, trainer_exit.reason, trainer_exit.fault)
        else:
            self.collect_kept_states(now)

    def collect_kept_states(self, now: float) -> None:
        """Enter FAILED or SAVED if all trainers have kept their state in time; otherwise stop them.

        Raises `JobFinished` when the job was asked to stop.
        """
        kept_states = self.trainers.read_kept_states()
        if kept_states and self.current.abort_deadline is None:
            self.request_abort(kept_states[0].reason, now)
        if self.current.abort_deadline is None:
            return
        if len(kept_states) < self.spec.procs:
            if now > self.current.abort_deadline:
                self.current.not_in_place = "the trainers did not leave their group in time"
                self.trainers.dump_stacks()
                self.stop_trainers(AgentPhase.FAILED, self.current.abort_reason, has_stalled=True)
            return
        has_saved = all(kept.has_saved for kept in kept_states)
        if has_saved and self.end_conditions.stop_reason:
            self.stop_trainers(AgentPhase.SAVED, "")
        self.current.kept_step = max(kept.step for kept in kept_states)
        phase = AgentPhase.SAVED if has_saved else AgentPhase.FAILED
        self.enter_phase(phase)
        self.write_status(MachineState(phase), "" if has_saved else self.current.abort_reason)

    def request_abort(self, reason: str, now: float) -> None:
        """Ask the trainers to leave their collectives and to keep their state."""
        if self.current.begin_abort(reason, now):
            self.trainers.request(ABORT_REQUEST_FILE)

    def stop_trainers(
        self, phase: AgentPhase, reason: str, fault: Fault = Fault.NONE, has_stalled: bool = False
    ) -> None:
        """Stop the trainers and enter the phase FAILED or SAVED, in which the machines agree on the next attempt.

        When the GPUs may be the cause of a failure, they are checked first: a broken machine is in no further attempt.
        Raises `JobFinished` when the trainers have saved for a stop, or met an error that only a broken GPU causes.
        """
        if self.gpus.is_check_needed and (has_stalled or fault in (*MACHINE_FAULTS, Fault.MACHINE)):
            reason = "; ".join(filter(None, (reason, self.gpus.newest_xid(self.phase_since))))
        self.trainers.stop()
        cause = "a trainer failed" if phase == AgentPhase.FAILED else "the trainers had ended"
        self.current.not_in_place = self.current.not_in_place or self.current.obstacle or cause
        if phase == AgentPhase.SAVED and self.end_conditions.stop_reason:
            raise JobFinished(MachineState.STOPPED, "; ".join(filter(None, (self.end_conditions.stop_reason, reason))))
        if fault == Fault.MACHINE:
            raise broken_machine_end(self.spec, reason)
        if (has_stalled or fault in MACHINE_FAULTS) and self.gpus.is_check_needed:
            self.gpus.start_check()
            self.unexplained_failure = ProcessesExit(phase, reason, fault)
            return
        self.enter_phase(phase, fault)
        self.write_status(MachineState(phase), reason)

    def check_gpus(self) -> None:
        """Go on with a failure that the GPUs do not explain. Raises `JobFinished` when a GPU does not answer."""
        problem = self.gpus.poll_check()
        if problem:
            cause = f"; before: {self.unexplained_failure.reason}" if self.unexplained_failure else ""
            raise broken_machine_end(self.spec, f"{problem}{cause}")
        if problem is not None and self.unexplained_failure:
            failure, self.unexplained_failure = self.unexplained_failure, None
            self.enter_phase(failure.phase, failure.fault)
            self.write_status(MachineState(failure.phase), failure.reason)

    def execute(self, action: membership.Action, now: float) -> None:
        """Carry out what the membership protocol decided. Raises `OSError` when writing an attempt fails too long."""
        if action.kind == ActionKind.ASK:
            self.trainers.request_save_and_exit()
        elif action.kind == ActionKind.FAIL:
            if action.dump_stacks and self.current.abort_deadline is None:
                self.trainers.dump_stacks()
            if self.spec.recovery.goes_on_in_place and not self.current.obstacle:
                self.request_abort(action.reason, now)
            else:
                self.stop_trainers(AgentPhase.FAILED, action.reason, has_stalled=action.dump_stacks)
        elif action.kind == ActionKind.PROPOSE and action.attempt:
            members = action.attempt.members
            master = self.peers.statuses[members[0]] if members else self.own_status()
            attempt = replace(
                action.attempt,
                launch_id=self.launch_id,
                master_address=master.address,
                master_port=master.port,
                token=secrets.token_hex(16),
                addresses=self.addresses_of(members),
                time=host.unix_time(),
            )
            try:
                attempts.propose(self.shared, self.current.attempt, attempt)
            except OSError as error:  # the shared folder is full or away, perhaps only for a moment
                if error.errno in FULL_DISK_ERRORS:
                    self.status = replace(self.status, doing="the shared folder is full: waiting")
                elif now - self.phase_since > SHARED_FOLDER_TIMEOUT_SECONDS:
                    raise

    def report_status(self) -> None:
        """Write this machine's status; while training, with the trainers' state and numbers."""
        if self.phase == AgentPhase.RUNNING:
            progress = self.current.progress
            state = MachineState(progress.state) if progress else MachineState.STARTING
            if progress:
                self.status = self.status.with_numbers(progress)
            problem = self.trainers.problem()
            self.status = replace(self.status, doing=f"{state}; {problem}" if problem else "")
            self.write_status(MachineState.STOPPING if self.end_conditions.stop_reason else state)
        elif self.phase in IDLE_PHASES:
            self.write_status(MachineState(self.phase), self.status.reason)
        else:
            is_spare = self.phase == AgentPhase.SPARE
            activity = ""
            if self.current.attempt is None and is_spare and len(self.spec.machine_names) > 1:
                ready_count = sum(status.phase == AgentPhase.SPARE for status in self.peers.statuses.values())
                activity = f"waiting: {ready_count} of {self.spec.machines} machines are ready"
            self.status = replace(self.status, doing=activity)
            self.write_status(MachineState.WAITING if is_spare else MachineState.WARMING)

    def check_end_conditions(self) -> None:
        """Ask the trainers to save and exit when the job has to stop. Raises `JobFinished` when it has ended here."""
        if self.end_conditions.check(self.phase, self.current.has_made_steps or self.current.is_handover):
            self.trainers.request_save_and_exit()
