"""The state of a job: its status, derived from its files, and its result, result.json, which result.py writes."""

import shutil
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from cluster.connectors import untrusted
from train.forecast import Constants, Forecast, StartSeconds, TermComparison
from train.metrics.records import TrainResult
from train.metrics.step_search import first_and_last_step
from train.metrics.time_table import TimeTable
from train.recipe import target
from train.tools.agent_protocol import metrics_files
from train.tools.records import decode, encode, read_record
from train.tools.text_files import last_line

from . import supervisor_records, timeline
from .attempts import Attempt
from .heartbeats import MachineStatus, find_slowest_rank, read_status
from .run_folder import AGENT_OUTPUT, Run, RunFolder, install_log_path, stop_reason
from .states import AgentPhase, AttemptReason, JobState, MachineState, SetupStep, WorkKind
from .supervisor_records import MachineSetup, SetupRecord
from .timeline import AttemptRow

# The states of a machine in which its job does not run: not yet, or not any more.
JOB_STATE_OF_INACTIVE = {
    MachineState.SETUP: JobState.SETUP,
    MachineState.FETCHING: JobState.SETUP,
    MachineState.FAILED: JobState.FAILED,
    MachineState.STOPPED: JobState.STOPPED,
}
# The steps of a start that the agent measures.
AGENT_STEPS = list(SetupStep)[list(SetupStep).index(SetupStep.SETUP) :]
# States of a machine that has gone on after a loss.
RECOVERED_STATES = (MachineState.TRAINING, MachineState.VALIDATING, MachineState.FINISHED, MachineState.DONE)
ONE_TIME_STEPS = (SetupStep.SETUP, SetupStep.INDEXING)  # done once for a data set: drawn, and its folders searched
# What a job's status has of the statuses of its machines, and in the end of its result, under the same names.
TRAINING_NUMBERS = ("step", "steps", "epoch", "epochs", "images_per_second", "lr", "top1", "top5")
OUTCOME = ("state", "reason", "images_per_second", "top1", "top5", "goodput", "where")
FULL_DISK_BYTES = 1e6  # a disk with less free space than this is full


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """The state of a job and its numbers; None for what is not known.

    `job` is the job's ID, `name` what its user called it. `warning` says what is wrong with the job's supervisor, ""
    when nothing is. `notifications` says which notifications could not be delivered. `recipe` is the name of the recipe
    or, by `work`, of the command; `command` the command as it is typed in a shell, "" for a recipe. `doing` says what
    the job does in its state, `progress` how far that is. `attempt` is the last one that has members, 0 before the
    first. `slowest` describes the rank that others wait for, `risk` the machines that may go soon. `target` is the
    accuracy to reach or, in the end, what became of it. `run` is the run folder. `created` is in seconds since 1970,
    `seconds` the time at work.
    """

    job: str
    name: str = ""
    recipe: str
    work: WorkKind = WorkKind.RECIPE
    command: str = ""
    backend: str
    machines: int
    procs: int
    created: float
    state: JobState
    doing: str = ""
    reason: str = ""
    warning: str = ""
    notifications: str = ""
    attempt: int = 0
    progress: str = ""
    step: int | None = None
    steps: int | None = None
    epoch: int | None = None
    epochs: int | None = None
    images_per_second: float | None = None
    lr: float | None = None
    top1: float | None = None
    top5: float | None = None
    slowest: str | None = None
    risk: str = ""
    where: TimeTable | None = None
    target: str | None = None
    run: str
    goodput: float | None = None
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class JobResult(TrainResult):
    """How a job ended and what its trainers measured.

    `procs` is the number of processes of each machine. `setup` has the seconds of each step of each machine up to its
    first training step. `did_not_answer` are the machines that did not answer at the end. `ids_wrong` are the errors in
    the log of used images, None without one. `is_input_wrong`: it would fail again with the same input and options.

    `constants` are the machine constants that the run measured. When a forecast was made at the launch, `forecast`
    holds it and `against` compares it with the run. They are None for a job that is not done or measured too little.
    """

    job: str = ""
    state: JobState
    reason: str
    machines: int = 1
    attempts: int
    setup: dict[str, dict[str, float]] = field(default_factory=dict)
    timeline: list[AttemptRow] = field(default_factory=list)
    dollars: float = 0.0
    backend: str = ""
    did_not_answer: list[str] = field(default_factory=list)
    is_input_wrong: bool = False
    ids_wrong: list[str] | None = None
    constants: Constants | None = None
    forecast: Forecast | None = None
    against: tuple[TermComparison, ...] | None = None

    def start_seconds(self) -> StartSeconds:
        """Return the seconds of the start of the slowest machine, without what is done once for a data set."""
        starts = [
            {step: seconds for step, seconds in steps.items() if step not in ONE_TIME_STEPS}
            for steps in self.setup.values()
        ]
        slowest = max(starts, key=lambda steps: sum(steps.values()), default={})
        steps_of_setup = list(SetupStep)[: list(SetupStep).index(SetupStep.WAITING)]
        setup_seconds = sum(slowest.get(step, 0.0) for step in steps_of_setup)
        return StartSeconds(setup=setup_seconds, trainers=sum(slowest.values()) - setup_seconds)


@dataclass(frozen=True, kw_only=True)
class MachineRow:
    """One machine of a job: its host and state, its agent's last status, and the seconds of each step of its start.

    Before the agent's first status, `state` is the present step of the set-up, FAILED when it has failed, or STOPPED
    when the job ended meanwhile. `notes` are warnings of the set-up.
    """

    host: str
    state: MachineState | SetupStep
    reason: str
    status: MachineStatus | None
    notes: tuple[str, ...]
    seconds: dict[str, float]

    def to_json(self) -> dict[str, object]:
        """Return the row as plain data, with the known values of the status among the others."""
        row = encode(self)
        known = {name: value for name, value in (row.pop("status") or {}).items() if value is not None}
        return {**known, **row}


def read_agent_status(run_folder: RunFolder, machine: str = "0") -> MachineStatus | None:
    """Return the last status of a machine's agent in the last launch, None before its first."""
    status = read_status(run_folder.status_path(machine))
    return status if status and status.launch == run_folder.launch_id else None


def read_final_status(run_folder: RunFolder, machine: str, address: str) -> MachineStatus | None:
    """Return the last status of the ended agent at this address, None without one. Raises `DamagedRecord`."""
    status = read_agent_status(run_folder, machine)
    return status if status and status.ended and status.address == address else None


def read_setup_record(run_folder: RunFolder) -> SetupRecord:
    """Return the record of the machines' set-up, an empty one when there is none."""
    return read_record(run_folder.setup_record_path, SetupRecord) or SetupRecord()


def agents_start_time(run: Run) -> float:
    """Return when the agents of the last launch were started: at the launch, or when their machines were set up."""
    launch_path = run.folder.launch_path
    launch_time = launch_path.stat().st_mtime if launch_path.exists() else run.spec.created
    setup_record = read_setup_record(run.folder)
    is_of_this_launch = setup_record.launch == run.folder.launch_id
    return max(launch_time, setup_record.finished if is_of_this_launch else 0.0)


def machine_statuses(run: Run) -> dict[str, MachineStatus]:
    """Return the last status of each machine in the last launch, without machines that have not written one."""
    statuses = {name: read_agent_status(run.folder, name) for name in run.spec.machine_names}
    return {name: status for name, status in statuses.items() if status}


def best_informed_status(run: Run) -> MachineStatus | None:
    """Return the status that knows most: of a done machine, else of the newest attempt, in the latest phase."""

    def knowledge(status: MachineStatus) -> tuple[bool, int, int]:
        return status.state == MachineState.DONE, status.attempt, list(AgentPhase).index(status.phase)

    return max(machine_statuses(run).values(), key=knowledge, default=None)


def job_status(run: Run, result: JobResult | None) -> JobStatus:
    """Return the job's state and numbers. `result` is its result, None while it has not ended."""
    agent_status = best_informed_status(run)
    numbers: dict[str, Any] = {name: getattr(agent_status, name, None) for name in TRAINING_NUMBERS}
    if agent_status is None and (last := read_status(run.folder.status_path())):  # of the launch before
        numbers |= {"top1": last.top1, "top5": last.top5}
    where = reported_time_table(agent_status) if result is None else None
    status = JobStatus(
        job=run.spec.name,
        name=run.spec.given_name,
        recipe=run.spec.workload.name,
        work=run.spec.work_kind,
        command=run.spec.own_command.short_text if run.spec.own_command else "",
        backend=run.spec.backend,
        machines=run.spec.machines,
        procs=run.spec.procs,
        created=run.spec.created,
        state=JobState.BOOTING,
        doing=(agent_status.doing or agent_status.state) if agent_status else "",
        reason=agent_status.reason if agent_status else "",
        attempt=run.folder.attempts.last_training_number(),
        progress=agent_status.progress if agent_status else "",
        **numbers,
        where=add_job_times(run, where) if where else None,
        target=run.spec.train.target or None,
        run=str(run.folder.path),
    )
    if result is not None:
        if status.step is None:  # the last launch ended before its first step: it is the last one of any attempt
            ends = map(first_and_last_step, reversed(metrics_files(run.folder.path)))
            status = replace(status, step=next((found.last.step for found in ends if found), None))
        return _ended_job_status(status, result)
    if agent_status:
        status = _running_job_status(run.folder, status, agent_status, run.folder.attempts.newest())
        statuses = machine_statuses(run)
        slowest = find_slowest_rank(statuses)
        warned = [each for each in statuses.values() if each.risk_reason and not each.ended]
        risk = "; ".join(f"machine {each.machine_name}: {each.risk_reason}" for each in warned)
        status = replace(status, slowest=str(slowest) if slowest else None, risk=risk)
    else:
        status = _starting_job_status(run, status)
    return replace(status, seconds=seconds_by_state(run)["total"])


def _ended_job_status(status: JobStatus, result: JobResult) -> JobStatus:
    if result.state == JobState.DONE and result.steps:
        # The number of the last epoch, as in the epochs' lines: with --max-steps, whole epochs are left out.
        last_epoch = result.epochs[-1].epoch if result.epochs else 0
        status = replace(status, step=result.steps, steps=result.steps, epoch=last_epoch, epochs=last_epoch)
    return replace(
        status,
        **{name: getattr(result, name) for name in OUTCOME},
        target=target.describe_outcome(result.target) if result.target else None,
        doing="",
        progress="",
        attempt=result.attempts,
        seconds=result.seconds["total"],
    )


def _starting_job_status(run: Run, status: JobStatus) -> JobStatus:
    """Return the status of a job whose agents have not written one: machines are rented or set up."""
    activity = supervisor_records.read_activity(run.folder.path) if run.spec.cloud else None
    if activity and activity.doing:
        return replace(status, state=JobState.ACQUIRING, doing=activity.doing)
    setup_record = read_record(run.folder.setup_record_path, SetupRecord)
    if setup_record:
        counts = Counter(
            "failed" if row.reason else str(row.step) for row in setup_record.machines.values() if row.step
        )
        steps = ", ".join(f"{count} {activity}" for activity, count in counts.items())
        doing = f"setting up: {steps}" if steps else "setting up the machines"
        logged = [
            install_log_path(run.folder.path, name)
            for name, row in setup_record.machines.items()
            if row.step == SetupStep.ENVIRONMENT and not row.reason
        ]
        progress = untrusted.one_line(last_line(logged[0])) if logged else ""
        return replace(status, state=JobState.SETUP, doing=doing, progress=progress)
    return status


def _running_job_status(
    run_folder: RunFolder, status: JobStatus, agent_status: MachineStatus, newest: Attempt | None
) -> JobStatus:
    state = JOB_STATE_OF_INACTIVE.get(agent_status.state, JobState.RUNNING)
    if agent_status.phase == AgentPhase.FAILED:
        state = JobState.RUNNING
    reason = agent_status.reason
    if newest and newest.launch_id == run_folder.launch_id:
        # Else it is the start of a launch, or of a resume by the user.
        is_moved = newest.launch_id in timeline.moved_launches(run_folder)
        follows_a_loss = newest.reason != AttemptReason.START or is_moved
        if follows_a_loss and state == JobState.RUNNING and agent_status.state not in RECOVERED_STATES:
            state = JobState.RECOVERING
        reason = reason or (newest.reason if follows_a_loss else "")
    return replace(status, state=state, reason=reason)


def machine_rows(run: Run) -> dict[str, MachineRow]:
    """Return a row for each machine.

    The seconds of the set-up are the supervisor's, those up to training the agent's; both since the last set-up.
    """
    statuses = machine_statuses(run)
    setup_rows = read_setup_record(run.folder).machines
    newest = run.folder.attempts.newest()
    rows = {}
    for name in run.spec.machine_names:
        setup_row = setup_rows.get(name, MachineSetup())
        status = statuses.get(name)
        state: MachineState | SetupStep = status.state if status else setup_row.step
        if not status and setup_row.reason:
            state = MachineState.FAILED
        elif not status and run.folder.result_path.exists():  # the job ended while the machine was set up
            state = MachineState.STOPPED
        if status and not status.ended:
            is_behind = newest and status.phase == AgentPhase.RUNNING and status.attempt < newest.number
            if is_behind or run.folder.result_path.exists():
                state = MachineState.LOST
        notes = [*setup_row.notes, *([status.risk_reason] if status and status.risk_reason else [])]
        if setup_row.unreachable_since and status and not status.ended and state != MachineState.LOST:
            since = time.strftime("%H:%M %Z", time.localtime(setup_row.unreachable_since))
            notes.append(f"not reachable from here since {since}; its heartbeat still comes, through another machine")
        spans = timeline.state_spans(run.folder, name) if newest is None else ()  # later, the attempts tell of a loss
        if any(span_state == MachineState.LOST for span_state, *_ in spans):
            notes.append("lost during its set-up, and started again")
        setup_seconds = {str(step): seconds for step, seconds in setup_row.seconds.items()}
        rows[name] = MachineRow(
            host=setup_row.host or (status.host if status else ""),
            state=state,
            reason=status.reason if status else setup_row.reason,
            status=status,
            notes=tuple(notes),
            seconds=setup_seconds | timeline.startup_seconds(run.folder, name, since=setup_row.restarted),
        )
    return rows


def seconds_by_state(run: Run) -> dict[str, float]:
    """Return the seconds of each state over all launches, and "total", without the time between launches.

    At each moment the furthest machine's state counts (`MachineState`); a killed agent's until its last heartbeat.
    """
    spans = [span for name in run.spec.machine_names for span in timeline.state_spans(run.folder, name)]
    seconds: dict[str, float] = {}
    edges = sorted({edge for _, *ends in spans for edge in ends})
    starting = sorted(spans, key=lambda span: span[1], reverse=True)
    active: list[tuple[MachineState, float, float]] = []
    for begin, end in pairwise(edges):
        while starting and starting[-1][1] <= begin:
            active.append(starting.pop())
        active = [span for span in active if span[2] >= end]
        states = [state for state, *_ in active if state != MachineState.LOST]
        if states:
            state = max(states, key=list(MachineState).index)
            part = "validation" if state == MachineState.VALIDATING else str(state)
            seconds[part] = seconds.get(part, 0.0) + end - begin
    return {"total": sum(seconds.values()), **seconds}


def reported_time_table(agent_status: MachineStatus | None) -> TimeTable | None:
    """Return the table of the wall time that a machine's status has from its trainers; None before their first."""
    table = agent_status.where if agent_status else None
    return decode(TimeTable, table, "the status of a machine") if table else None


def add_job_times(run: Run, table: TimeTable, total_seconds: float | None = None) -> TimeTable:
    """Return the trainers' table of the wall time with the times that they do not know.

    `pauses` are the seconds that changes of attempt cost. `start` holds the seconds of each step before the first
    training step, on the slowest machine; one that was set up again later does not count, unless all were, as by a
    resume. An agent sees the first step a moment late: when `total_seconds` of an ended job are given, that moment is
    subtracted, so that all parts add up to the total. With pauses that moment is not known.
    """
    pauses = timeline.read_timeline(run.folder).lost_seconds
    setup_rows = read_setup_record(run.folder).machines
    start_seconds = {name: dict(row.seconds) for name, row in machine_rows(run).items()}
    restarted = {name for name, row in setup_rows.items() if row.restarted}
    rows = [start_seconds[name] for name in start_seconds.keys() - restarted] or list(start_seconds.values())
    slowest = max(rows, key=lambda seconds: sum(seconds.values()), default={}) or dict(table.start)
    if total_seconds is not None and not pauses and SetupStep.WARMING in slowest:
        agent_seconds = sum(slowest.get(step, 0.0) for step in AGENT_STEPS)
        delay = max(0.0, agent_seconds - max(0.0, total_seconds - table.wall))
        first_step = str(SetupStep.WARMING)
        slowest[first_step] = max(0.0, slowest[first_step] - delay)
    return replace(table, start=slowest, pauses=pauses)


def infer_end_state(run: Run) -> tuple[JobState, str]:
    """Return state and reason of a job that has neither a result nor a living agent."""
    agreed = run.folder.attempts.agreed_end(run.folder.launch_id)
    if agreed and agreed.end_state:
        return JobState(agreed.end_state), agreed.reason
    statuses = list(machine_statuses(run).values())
    final_statuses = [status for status in statuses if status.ended]
    # A stop on request explains the end best, then a failure with its reason.
    for job_state, machine_state in ((JobState.STOPPED, MachineState.STOPPED), (JobState.FAILED, MachineState.FAILED)):
        if reasons := [status.reason for status in final_statuses if status.state == machine_state]:
            # All machines were stopped for one reason; one of them may add that it had to kill its processes.
            return job_state, max(reasons, key=len) if job_state == JobState.STOPPED else reasons[0]
    if final_statuses and len(final_statuses) == len(statuses):
        return JobState.STOPPED, final_statuses[0].reason
    if request := stop_reason(run.folder.shared):
        return JobState.STOPPED, f"{request}; the agents were ended before they could save, so later steps are lost"
    return JobState.FAILED, _explain_missing_agent(run.folder, bool(statuses))


def _explain_missing_agent(run_folder: RunFolder, has_status: bool) -> str:
    """Return the probable reason why an agent ended without writing a final status, and what to type next."""
    resume_command = f"imgnet-cluster resume {run_folder.path.name}"
    if shutil.disk_usage(run_folder.path).free < FULL_DISK_BYTES:
        return f"no space left on the disk of {run_folder.path}; free some, then type {resume_command}"
    if not has_status:
        outputs = sorted(run_folder.work_folder().parent.glob(f"*/{AGENT_OUTPUT}"))
        guess = "it was killed, its disk was full, or its Python does not work"
        said = next((line for line in map(last_line, outputs) if line), guess)
        return f"the agent ended before it wrote its first status: {said}; try again: {resume_command}"
    return f"the agent was killed or the machine went down; try again: {resume_command}"
