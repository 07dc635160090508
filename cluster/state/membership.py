"""Who trains next: pure decisions from what one agent knows. No files, no clock, no processes.

While steps advance nobody is lost: training is synchronous, so progress is everyone's heartbeat. Silence counts only
when trainers have failed or stand still; then the members that still speak make the next attempt, the first of them at
once, each later one half a second after the one before it, in case those are dead.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from .attempts import Attempt
from .heartbeats import MachineStatus

MAX_CRASHES = 3  # by the same members at the same step, or by one machine's own fault


@dataclass(frozen=True, kw_only=True)
class MembershipRules:
    """What was asked of the job; seconds. `want` machines to start with and to grow back to, `least` to go on with."""

    machine_names: tuple[str, ...]
    target_size: int
    min_size: int = 1
    heartbeat_timeout: float = 2.5  # without a new word from a machine
    loss_timeout: float = 5.0  # without progress, and some member is silent
    startup_loss_timeout: float = 15.0  # the same, before the first step of an attempt
    stall_timeout: float = 120.0  # without progress, though all speak
    startup_stall_timeout: float = 300.0  # the same, before the first step
    orphan_timeout: float = 60.0  # all members silent, a spare alone: they may only have lost the shared folder
    proposal_delay: float = 0.5
    is_rented: bool = False  # who leaves is replaced by others, also when all leave at once


@dataclass(frozen=True, kw_only=True)
class ClusterView:
    """What one agent knows. Ages and `quiet`, `down` in seconds; `pace` is the longest it ever was quiet in this
    attempt and went on; `hurry`: this machine has been told to leave, and has no time to wait for a better moment.
    `moving`: whose words we saw change; None: all. A word that was found once may be of a machine that is long dead.
    """

    own_id: str
    phase: str
    attempt: Attempt | None
    statuses: Mapping[str, MachineStatus]
    status_ages: Mapping[str, float]
    seconds_without_progress: float = 0.0
    seconds_in_phase: float = 0.0
    longest_progress_gap: float = 0.0
    is_deadline_near: bool = False
    seen_changing: Collection[str] | None = None


@dataclass(frozen=True, kw_only=True)
class Action:
    """What to do: "nothing", "ask" the trainers to save and end, "fail" them, or "propose" an attempt.

    `stacks`: they stand still, and should write down where.
    """

    kind: str = "nothing"
    reason: str = ""
    dump_stacks: bool = False
    attempt: Attempt | None = field(default=None)


NO_ACTION = Action()


def decide(view: ClusterView, rules: MembershipRules) -> Action:
    """Return what this agent has to do now."""
    attempt = view.attempt
    if attempt is None:
        return _decide_first_attempt(view, rules)
    if view.own_id not in attempt.members:
        return _decide_as_spare(view, rules, attempt)
    if view.phase == "running":
        return _decide_while_training(view, rules, attempt)
    if view.phase in ("failed", "saved"):
        return _propose_next(view, rules, attempt)
    return NO_ACTION


def is_responsive(view: ClusterView, rules: MembershipRules, machine_id: str) -> bool:
    """Whether a machine speaks."""
    heard = machine_id in view.status_ages and (view.seen_changing is None or machine_id in view.seen_changing)
    return machine_id == view.own_id or (heard and view.status_ages[machine_id] < rules.heartbeat_timeout)


def ready_spares(view: ClusterView, rules: MembershipRules) -> list[str]:
    """Return the machines that are ready and in no attempt, by number; none that failed by itself again and again."""
    members = view.attempt.members if view.attempt else ()
    faults = view.attempt.fault_counts if view.attempt else {}
    found = [
        one
        for one, word in view.statuses.items()
        if word.phase == "spare" and not word.leave_reason and one not in members and is_responsive(view, rules, one)
    ]
    return sorted((one for one in found if faults.get(_machine_name(one), 0) < MAX_CRASHES), key=_sort_key)


def _machine_name(machine_id: str) -> str:
    return machine_id.partition(".")[0]


def _sort_key(machine_id: str) -> tuple[int, str]:
    return int(_machine_name(machine_id)), machine_id


def _decide_first_attempt(view: ClusterView, rules: MembershipRules) -> Action:
    """Before the first attempt: wait until all are ready, or cannot be."""
    ready = ready_spares(view, rules)
    if view.own_id not in ready:
        return NO_ACTION
    dead = [word for word in view.statuses.values() if word.phase == "ended" and word.state == "failed"]
    if len(rules.machine_names) - len(dead) < rules.target_size:
        why = "; ".join(
            f"machine {word.machine_name}: {word.reason}" if rules.target_size > 1 else word.reason for word in dead
        )
        return _propose_on_turn(view, ready, Attempt(end_state="failed", reason=why), rules)
    if len(ready) < rules.target_size and not _can_start_smaller(view, rules, ready):
        return NO_ACTION
    return _propose_on_turn(view, ready, Attempt(members=tuple(ready[: rules.target_size]), reason="start"), rules)


def _can_start_smaller(view: ClusterView, rules: MembershipRules, ready_ids: list[str]) -> bool:
    """Whether to begin with fewer: they have waited for long, and nobody else is on the way."""
    coming = [
        one
        for one, word in view.statuses.items()
        if one not in ready_ids and word.phase != "ended" and is_responsive(view, rules, one)
    ]
    return len(ready_ids) >= rules.min_size and not coming and view.seconds_in_phase > rules.orphan_timeout


def _decide_as_spare(view: ClusterView, rules: MembershipRules, attempt: Attempt) -> Action:
    """A spare: it takes over only when the members have all been silent for long."""
    ready = ready_spares(view, rules)
    if view.own_id not in ready or not attempt.members:
        return NO_ACTION
    silent = min(view.status_ages.get(one, rules.orphan_timeout) for one in attempt.members)
    ended = all(one in view.statuses and view.statuses[one].phase == "ended" for one in attempt.members)
    if (silent < rules.orphan_timeout and not ended) or len(ready) < rules.min_size:
        return NO_ACTION
    following = Attempt(
        members=tuple(ready[: rules.target_size]), reason="all members were lost",
        fault_counts=attempt.fault_counts,
    )  # fmt: skip
    return _propose_on_turn(view, ready, following, rules)


def _decide_while_training(view: ClusterView, rules: MembershipRules, attempt: Attempt) -> Action:
    """Our trainers are at work: do they have to end?"""
    peers = {one: view.statuses[one] for one in attempt.members if one in view.statuses and one != view.own_id}
    phases = {one: word.phase for one, word in peers.items() if word.attempt == attempt.number}
    gone = [one for one in attempt.members if one != view.own_id and one not in peers]
    down = [one for one, phase in phases.items() if phase in ("failed", "ended")]
    if down:
        return Action(
            kind="fail",
            reason=f"{_describe_machines(down)} failed",
            dump_stacks=view.seconds_without_progress > rules.loss_timeout,
        )
    if gone and any(_machine_name(one) in map(_machine_name, view.statuses) for one in gone):
        return Action(kind="fail", reason=f"{_describe_machines(gone)} started anew")
    if "saved" in phases.values() and view.seconds_without_progress > rules.loss_timeout:
        return Action(kind="fail", reason="the others have saved and ended")
    silent = [one for one in attempt.members if not is_responsive(view, rules, one)]
    me = view.statuses.get(view.own_id)
    begun = me is not None and me.last_step >= 0
    patience = (
        (rules.loss_timeout if begun else rules.startup_loss_timeout)
        if silent
        else (rules.stall_timeout if begun else rules.startup_stall_timeout)
    )
    if view.seconds_without_progress > max(patience, 3 * view.longest_progress_gap):
        why = f"{_describe_machines(silent)} silent" if silent else "nobody silent"
        return Action(
            kind="fail", reason=f"no progress for {view.seconds_without_progress:.0f} s, {why}", dump_stacks=not silent
        )
    calm = begun and all(one in view.statuses and view.statuses[one].is_standby_ready for one in attempt.members)
    if me and me.leave_reason and (calm or view.is_deadline_near or len(attempt.members) == 1):
        return Action(kind="ask", reason=f"{_describe_machines([view.own_id])} leaving")
    joining = ready_spares(view, rules) if calm and len(attempt.members) < rules.target_size else []
    if joining:
        return Action(kind="ask", reason=f"{_describe_machines(joining)} joins")
    return NO_ACTION


def _propose_next(view: ClusterView, rules: MembershipRules, attempt: Attempt) -> Action:
    """Our trainers have ended: propose the next attempt once all that speak are as far."""
    here = [one for one in attempt.members if one in view.statuses and is_responsive(view, rules, one)]
    said = {one: view.statuses[one] for one in here}
    for one, word in said.items():
        if word.attempt != attempt.number or (one != view.own_id and word.phase in ("warming", "spare", "running")):
            return NO_ACTION
    here = [one for one in here if said[one].phase in ("failed", "saved")]
    return _propose_on_turn(view, here, next_attempt(view, rules, attempt, here), rules)


def next_attempt(
    view: ClusterView, rules: MembershipRules, attempt: Attempt, responsive_ids: list[str]
) -> Attempt | None:
    """Return the attempt after this one, without members when the job must end; None while there are too few."""
    said = {one: view.statuses[one] for one in responsive_ids}
    final = [word for word in said.values() if word.fault == "final"]
    if final:
        return Attempt(end_state="failed", reason=final[0].reason)
    own = [word for word in said.values() if word.fault == "own"]
    faults = dict(attempt.fault_counts)
    for word in own:
        faults[word.machine_name] = faults.get(word.machine_name, 0) + 1
    step = max((word.last_step for word in said.values()), default=-1)
    crashes = 0
    if len(responsive_ids) == len(attempt.members) and any(word.phase == "failed" for word in said.values()):
        crashes = 1 + (attempt.crash_count if attempt.crash_step == step else 0)
    why = "; ".join(
        f"machine {word.machine_name}: {word.reason}" if rules.target_size > 1 else word.reason for word in own
    )
    if crashes >= MAX_CRASHES:
        why = why or next((word.reason for word in said.values() if word.phase == "failed"), "")
        return Attempt(end_state="failed", reason=f"{why} ({MAX_CRASHES} times at step {max(step, 0)})")
    leaving = [word for word in said.values() if word.leave_reason]
    banned = {name for name, count in faults.items() if count >= MAX_CRASHES}
    stay = [one for one in responsive_ids if not said[one].leave_reason and _machine_name(one) not in banned]
    joining = [one for one in ready_spares(view, rules) if one not in stay][: max(0, rules.target_size - len(stay))]
    members = tuple(stay + joining)
    lost = [one for one in attempt.members if one not in responsive_ids]
    if not members:
        if leaving and not banned:
            return Attempt(end_state="left" if rules.is_rented else "stopped", reason=leaving[0].leave_reason)
        return Attempt(end_state="failed", reason=f"{why} ({MAX_CRASHES} times)")
    if len(members) < rules.min_size:
        return None
    parts = [why] if why else []
    parts += [f"{_describe_machines(lost)} lost"] if lost else []
    parts += [f"{_describe_machines([one.id for one in leaving])} left"] if leaving else []
    parts += [f"{_describe_machines(joining)} joined"] if joining else []
    first = next((word.reason for word in said.values() if word.phase == "failed"), "")
    reason = "; ".join(parts) or first
    return Attempt(members=members, reason=reason, crash_step=step, crash_count=crashes, fault_counts=faults)


def _propose_on_turn(
    view: ClusterView, proposer_ids: list[str], attempt: Attempt | None, rules: MembershipRules
) -> Action:
    """Propose when it is our turn; those before us may be faster."""
    if (
        attempt is None
        or view.own_id not in proposer_ids
        or view.seconds_in_phase < rules.proposal_delay * proposer_ids.index(view.own_id)
    ):
        return NO_ACTION
    return Action(kind="propose", attempt=attempt)


def _describe_machines(machine_ids: list[str]) -> str:
    """Return "machine 2" or "machines 1, 2"."""
    names = [_machine_name(one) for one in sorted(machine_ids, key=_sort_key)]
    return f"machine{'s' * (len(names) > 1)} {', '.join(names)}"
