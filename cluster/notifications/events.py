"""What users are told of while a job runs: its end, lost machines and those that came back, and its limits."""

import contextlib
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from cluster.connectors.untrusted import one_line
from cluster.state import status, timeline
from cluster.state.attempts import Attempt
from cluster.state.heartbeats import machine_name
from cluster.state.run_folder import Run, stop_reason
from cluster.state.states import JobState
from cluster.state.status import JobResult
from cluster.state.timeline import describe_members
from train.metrics.text import format_duration
from train.tools.agent_protocol import TrainingNumbers
from train.tools.records import DamagedRecord, encode

NEAR_LIMIT_SHARE = 0.9  # of the time or the price, as Slurm's TIME_LIMIT_90
LIMIT_WORDS = " was reached"  # the end of the reason of every stop at a limit
MAX_TEXT_CHARACTERS = 600


class EventKind(StrEnum):
    """What happened. Those of a job's end are named as its states."""

    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"
    MACHINE_LOST = "machine_lost"
    MACHINE_BACK = "machine_back"
    LIMIT_NEAR = "limit_near"
    LIMIT_REACHED = "limit_reached"
    TEST = "test"


# Kinds that may happen any number of times in a launch.
REPEATED_KINDS = (EventKind.MACHINE_LOST, EventKind.MACHINE_BACK, EventKind.LIMIT_NEAR)


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that users are told once: `text`, and its `machines`. Its `keys` name parts that never happen again."""

    kind: EventKind
    keys: tuple[str, ...]
    text: str
    machines: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Notification:
    """What is sent about an event. Nothing in it is secret. `time` is in seconds since 1970."""

    id: str
    event: EventKind
    text: str
    time: float
    job: str = ""
    uid: str = ""
    recipe: str = ""
    backend: str = ""
    machines: tuple[str, ...] = ()
    step: int | None = None
    steps: int | None = None
    top1: float | None = None
    top5: float | None = None
    dollars: float | None = None

    def payload(self) -> dict[str, object]:
        """Return the JSON that is sent. Slack and Mattermost show "text", Discord "content", which mentions nobody."""
        return {**encode(self), "content": self.text, "allowed_mentions": {"parse": []}}


@dataclass(frozen=True, kw_only=True)
class SupervisorView:
    """What only the supervisor knows: the machines that it is about to replace, and what the job has cost."""

    dead_machines: tuple[str, ...] = ()
    dollars: float = 0.0


def describe(event: Event, run: Run, notification_id: str, now: float, dollars: float | None) -> Notification:
    """Return what is sent about an event of a job. Parts of the text may be from its machines."""
    spec = run.spec
    numbers = TrainingNumbers()
    with contextlib.suppress(DamagedRecord):
        numbers = status.best_informed_status(run) or numbers
    text = one_line(f"{spec.title} ({spec.workload.name}, {spec.backend}): {event.text}", MAX_TEXT_CHARACTERS)
    return Notification(
        id=notification_id,
        event=event.kind,
        text=text.replace("<", "(").replace(">", ")"),  # "<!channel>" would call everybody in Slack
        time=now,
        job=spec.name,
        uid=spec.uid,
        recipe=spec.workload.name,
        backend=spec.backend,
        machines=event.machines,
        step=numbers.step,
        steps=numbers.steps,
        top1=numbers.top1,
        top5=numbers.top5,
        dollars=dollars,
    )


def end_key(launch_id: str) -> str:
    """Return the key of the end of a launch."""
    return f"end {launch_id}"


def find_events(run: Run, view: SupervisorView, result: JobResult | None, told: Set[str]) -> Iterator[Event]:
    """Yield what has happened in the last launch of a job and was not told, in the order of its telling."""
    launch_id = run.folder.launch_id
    try:
        events = [*_machine_events(run, view, launch_id, told), *_limit_events(run, view, launch_id)]
    except DamagedRecord:
        if result is None:
            raise
        events = []  # a file of a machine that nobody can read does not hide the end
    for event in events:
        if not set(event.keys) <= told:
            yield event
    if result is not None and end_key(launch_id) not in told:
        yield Event(kind=EventKind(result.state), keys=(end_key(launch_id),), text=_describe_end(run, result))


def _describe_end(run: Run, result: JobResult) -> str:
    if result.state != JobState.DONE:
        verb = "failed" if result.state == JobState.FAILED else "stopped"
        reason = f": {result.reason}" if result.reason else ""
        return f"{verb}{reason}; to continue: imgnet-cluster resume {run.spec.name}"
    top5 = f"top-5 {result.top5:.2f} %, " if result.top5 else ""
    accuracy = f"top-1 {result.top1:.2f} %, {top5}" if result.top1 else ""
    price = f", ${result.dollars:,.2f}" if run.spec.cloud else ""
    return f"done: {accuracy}{format_duration(result.seconds.get('total', 0.0))}{price}"


# --- machines ------------------------------------------------------------------------------------------------------


def _machine_events(run: Run, view: SupervisorView, launch_id: str, told: Set[str]) -> Iterator[Event]:
    """Yield the losses of machines that trained, and their returns. Keys are the ids of agents, which are used once."""
    if run.spec.cloud and launch_id in timeline.moved_launches(run.folder):
        key = f"moved {launch_id}"
        text = "all machines were lost; new ones take their place"
        yield Event(kind=EventKind.MACHINE_LOST, keys=(key,), text=text, machines=run.spec.machine_names)
    attempts = [attempt for attempt in run.folder.attempts.all() if attempt.launch_id == launch_id and attempt.members]
    lost_ids: list[str] = []
    joined_ids: list[str] = []
    known = set(run.spec.machine_names)  # a machine that lies may invent others
    members = [[member for member in attempt.members if machine_name(member) in known] for attempt in attempts]
    for before, after in pairwise(members):
        lost_ids += [member for member in before if member not in after]
        joined_ids += [member for member in after if member not in before]
    newest = attempts[-1] if attempts else None
    if newest:
        lost_ids += [member for member in newest.members if machine_name(member) in view.dead_machines]
    if lost := [member for member in lost_ids if f"lost {member}" not in told]:
        yield Event(
            kind=EventKind.MACHINE_LOST,
            keys=tuple(f"lost {member}" for member in dict.fromkeys(lost)),
            text=_describe_loss(run, lost, newest),
            machines=tuple(dict.fromkeys(map(machine_name, lost))),
        )
    if newest and (joined := [member for member in joined_ids if f"back {member}" not in told]):
        names = tuple(dict.fromkeys(map(machine_name, joined)))
        count = f"{len(newest.members)} of {run.spec.machines} machines"
        training = f"{count} train from step {newest.first_step}"
        if run.spec.own_command:  # of whose steps nothing certain is known
            training = f"the command starts anew on {count}"
        yield Event(
            kind=EventKind.MACHINE_BACK,
            keys=tuple(f"back {member}" for member in dict.fromkeys(joined)),
            text=f"{describe_members(names)} joined; {training}",
            machines=names,
        )


def _describe_loss(run: Run, lost_ids: Sequence[str], newest: Attempt | None) -> str:
    names = list(dict.fromkeys(map(machine_name, lost_ids)))
    reasons = {
        own.leave_reason or own.reason
        for own in status.machine_statuses(run).values()
        if own.id in lost_ids and own.ended
    }
    reason = f" ({'; '.join(sorted(reasons))})" if any(reasons) else ""
    remaining = [member for member in newest.members if member not in lost_ids] if newest else []
    consequence = f"{len(remaining)} of {run.spec.machines} machines are left" if remaining else "no machine is left"
    return f"{describe_members(names)} {'were' if len(names) > 1 else 'was'} lost{reason}; {consequence}"


# --- limits --------------------------------------------------------------------------------------------------------


def _limit_events(run: Run, view: SupervisorView, launch_id: str) -> Iterator[Event]:
    """Yield that the job nears a limit or has reached one. A limit that is changed is another one."""
    limits = [
        (own.limit, own.limit_share) for own in status.machine_statuses(run).values() if own.limit_share is not None
    ]
    written = run.folder.read_limits() if run.spec.cloud else None
    if written and written.cloud and (max_dollars := written.cloud.max_dollars):
        limits.append((f"the limit of ${max_dollars:,.2f} (--max-price-total)", view.dollars / max_dollars))
    limit, share = max(limits, key=lambda pair: pair[1], default=("", 0.0))
    reason = stop_reason(run.folder.shared)
    if share >= 1 or reason.endswith(LIMIT_WORDS):
        text = reason if reason.endswith(LIMIT_WORDS) else f"{limit}{LIMIT_WORDS}"
        key = f"limit reached {launch_id}"
        yield Event(kind=EventKind.LIMIT_REACHED, keys=(key,), text=f"{text}; it saves and stops")
    elif share >= NEAR_LIMIT_SHARE:
        text = f"{share:.0%} of {limit} is used; to raise it: imgnet-cluster extend {run.spec.name}"
        if not run.spec.cloud:
            text = f"{share:.0%} of {limit} is used; then it saves and stops"
        yield Event(kind=EventKind.LIMIT_NEAR, keys=(f"limit near {launch_id} {limit}",), text=text)
