"""Membership protocol: decides, from one agent's view, who takes part in the next attempt. Pure functions.

There is no access to files, clocks or processes here. While steps advance no machine is lost: training is synchronous,
so progress is a heartbeat of every machine. Silence counts only when trainers have failed or stalled. Then the members
that still respond form the next attempt. The first of them proposes it at once; each later one waits half a
second longer than the one before it, in case all before it are dead.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from train.tools.agent_protocol import Fault

from .attempts import Attempt
from .heartbeats import MachineStatus, machine_name
from .states import AgentPhase, AttemptReason, MachineState

FINAL_FAULTS = (Fault.FINAL, Fault.INPUT)
MAX_CRASHES = 3  # by the same members at the same step, or by one machine's own fault
MAX_FAULTS_AMONG_OTHERS = 2  # own failures of a machine while others had none, until it is left out
# A pause is no stall until it is this many times the longest pause that ended without a restart.
STALL_GAP_FACTOR = 3
MAX_FAILED_REGROUPS = 2  # attempts in place that fail before their first step, until all trainers start again
IN_PLACE_PATIENCE = 2  # factor on the timeout for a loss, before the first step of an attempt in place
WAITING_PHASES = (AgentPhase.FAILED, AgentPhase.SAVED)  # of a machine that waits for the next attempt
STALL = "no progress"  # how the reason of a failure begins that a machine has noticed itself
IDLE_PHASES = (*WAITING_PHASES, AgentPhase.FINISHED)  # of a member whose processes have all ended


@dataclass(frozen=True, kw_only=True)
class MembershipRules:
    """The sizes and timeouts of a job. Times are in seconds.

    The job starts with `target_size` machines and grows back to that number after losses. It goes on with at least
    `min_size` machines, and waits below that. The steps of a user's command prove nothing (`has_progress`): a machine
    is lost when it is silent, and each failure of the command itself counts, whatever its step.
    """

    machine_names: tuple[str, ...]
    target_size: int
    min_size: int = 1
    heartbeat_timeout: float = 2.5  # a machine is silent after this time without a new status
    loss_timeout: float = 5.0  # longest time without progress when a member is silent
    startup_loss_timeout: float = 15.0  # the same, before the first step of an attempt
    stall_timeout: float = 120.0  # longest time without progress when all members respond
    startup_stall_timeout: float = 300.0  # the same, before the first step
    handover_timeout: float = 30.0  # the same, while the trainers of an attempt in place form their group
    orphan_timeout: float = 60.0  # silence of all members until a spare takes over: they may only have lost the folder
    proposal_delay: float = 0.5  # delay between the proposals of two machines
    has_progress: bool = True
    max_crashes: int = MAX_CRASHES
    goes_on_in_place: bool = False  # trainers that have kept their state go on with it
    is_rented: bool = False  # machines that leave are replaced by new ones, also when all leave at once


@dataclass(frozen=True, kw_only=True)
class ClusterView:
    """What one agent knows about the job at one moment. Ages and durations are in seconds.

    The keys of `statuses` and `status_ages` are machine IDs. `longest_progress_gap` is the longest pause of the attempt
    that ended without a restart. `is_deadline_near` means that this machine will be terminated soon and must leave now.
    `can_keep_state`, `have_all_started` and `is_regrouping` are those of `AttemptState`, which knows the trainers.
    `seen_changing` are the machines whose status has changed while this agent watched; None means all machines. Any
    other machine may have died long ago and left its status file behind.
    """

    own_id: str
    phase: AgentPhase
    attempt: Attempt | None
    statuses: Mapping[str, MachineStatus]
    status_ages: Mapping[str, float]
    seconds_without_progress: float = 0.0
    seconds_in_phase: float = 0.0
    longest_progress_gap: float = 0.0
    is_deadline_near: bool = False
    can_keep_state: bool = False
    have_all_started: bool = False
    is_regrouping: bool = False
    seen_changing: Collection[str] | None = None


class ActionKind(StrEnum):
    """What an agent has to do."""

    NOTHING = "nothing"
    ASK = "ask"  # ask the trainers to save and exit
    FAIL = "fail"  # kill the trainers
    PROPOSE = "propose"  # propose an attempt


@dataclass(frozen=True, kw_only=True)
class Action:
    """What an agent has to do, and why. `attempt` is the one to propose.

    With `dump_stacks` the trainers have stalled and first write the stacks of their threads to their logs.
    """

    kind: ActionKind = ActionKind.NOTHING
    reason: str = ""
    dump_stacks: bool = False
    attempt: Attempt | None = None


NO_ACTION = Action()


def decide(view: ClusterView, rules: MembershipRules) -> Action:
    """Return what this agent has to do now."""
    attempt = view.attempt
    if attempt is None:
        return _decide_first_attempt(view, rules)
    if view.own_id not in attempt.members:
        return _decide_as_spare(view, rules, attempt)
    if view.phase == AgentPhase.RUNNING:
        return _decide_while_training(view, rules, attempt)
    if view.phase in WAITING_PHASES:
        return _propose_next(view, rules, attempt)
    if view.phase == AgentPhase.FINISHED:
        return _decide_when_finished(view, rules, attempt)
    return NO_ACTION


def is_responsive(view: ClusterView, rules: MembershipRules, machine_id: str) -> bool:
    """Return whether a machine's status changed within the heartbeat timeout. Always true for the own machine."""
    if machine_id == view.own_id:
        return True
    was_seen = machine_id in view.status_ages and (view.seen_changing is None or machine_id in view.seen_changing)
    return was_seen and view.status_ages[machine_id] < rules.heartbeat_timeout


def ready_spares(view: ClusterView, rules: MembershipRules) -> list[str]:
    """Return the ids of machines that are ready and not in the attempt, by machine number, those at risk last.

    Machines that have to leave, or that failed by their own fault too often, are left out.
    """
    members = view.attempt.members if view.attempt else ()
    spare_ids = [
        machine_id
        for machine_id, status in view.statuses.items()
        if status.phase == AgentPhase.SPARE
        and not status.leave_reason
        and machine_id not in members
        and is_responsive(view, rules, machine_id)
    ]
    fault_counts = view.attempt.fault_counts if view.attempt else {}
    reliable_ids = [spare for spare in spare_ids if fault_counts.get(machine_name(spare), 0) < MAX_CRASHES]
    return sorted(reliable_ids, key=lambda spare: (bool(view.statuses[spare].risk_reason), _sort_key(spare)))


def _sort_key(machine_id: str) -> tuple[int, str]:
    return int(machine_name(machine_id)), machine_id


def _decide_first_attempt(view: ClusterView, rules: MembershipRules) -> Action:
    """Before the first attempt: wait until enough machines are ready, or until that has become impossible."""
    ready_ids = ready_spares(view, rules)
    if view.own_id not in ready_ids:
        return NO_ACTION
    failed = [
        status
        for status in view.statuses.values()
        if status.phase == AgentPhase.ENDED and status.state == MachineState.FAILED
    ]
    if len(rules.machine_names) - len(failed) < rules.target_size:
        return _propose_on_turn(
            view, ready_ids, Attempt(end_state=MachineState.FAILED, reason=_describe_failures(failed, rules)), rules
        )
    if len(ready_ids) < rules.target_size and not _can_start_smaller(view, rules, ready_ids):
        return NO_ACTION
    first_attempt = Attempt(members=tuple(ready_ids[: rules.target_size]), reason=AttemptReason.START)
    return _propose_on_turn(view, ready_ids, first_attempt, rules)


def _can_start_smaller(view: ClusterView, rules: MembershipRules, ready_ids: list[str]) -> bool:
    """Return whether to start with fewer machines: the ready ones waited long, and no other machine is coming."""
    coming_ids = [
        machine_id
        for machine_id, status in view.statuses.items()
        if machine_id not in ready_ids and status.phase != AgentPhase.ENDED and is_responsive(view, rules, machine_id)
    ]
    return len(ready_ids) >= rules.min_size and not coming_ids and view.seconds_in_phase > rules.orphan_timeout


def _decide_as_spare(view: ClusterView, rules: MembershipRules, attempt: Attempt) -> Action:
    """This machine is not a member: take over only when all members have ended, or were silent for long."""
    ready_ids = ready_spares(view, rules)
    if view.own_id not in ready_ids or not attempt.members:
        return NO_ACTION
    shortest_silence = min(view.status_ages.get(member, rules.orphan_timeout) for member in attempt.members)
    have_all_ended = all(
        member in view.statuses and view.statuses[member].phase == AgentPhase.ENDED for member in attempt.members
    )
    are_members_alive = shortest_silence < rules.orphan_timeout and not have_all_ended
    if are_members_alive or len(ready_ids) < rules.min_size:
        return NO_ACTION
    takeover = Attempt(
        members=tuple(ready_ids[: rules.target_size]), reason=AttemptReason.ALL_LOST, fault_counts=attempt.fault_counts
    )
    return _propose_on_turn(view, ready_ids, takeover, rules)


def _decide_while_training(view: ClusterView, rules: MembershipRules, attempt: Attempt) -> Action:
    """This machine's trainers are at work: decide whether they must stop."""
    own_status = view.statuses.get(view.own_id)
    has_made_steps = own_status is not None and (own_status.last_step >= 0 or not rules.has_progress)
    failure = _find_peer_failure(view, rules, attempt)
    if rules.has_progress:
        failure = failure or _find_stall(view, rules, attempt, has_made_steps)
    else:
        failure = failure or _find_silence(view, rules, attempt)
    if failure:
        return failure
    if not rules.has_progress and (asking_ids := _members_that_exit(view, attempt)):
        return Action(kind=ActionKind.ASK, reason=f"{_describe_machines(asking_ids)} saves and exits")
    can_restart_quickly = has_made_steps and all(
        member in view.statuses and view.statuses[member].is_standby_ready for member in attempt.members
    )
    can_leave = can_restart_quickly or view.is_deadline_near or len(attempt.members) == 1
    if own_status and own_status.leave_reason and can_leave:
        return Action(kind=ActionKind.ASK, reason=f"{_describe_machines([view.own_id])} leaving")
    if can_restart_quickly and len(attempt.members) < rules.target_size:
        joining_ids = ready_spares(view, rules)
        if joining_ids:
            return Action(kind=ActionKind.ASK, reason=f"{_describe_machines(joining_ids)} joins")
    return NO_ACTION


def _find_peer_failure(view: ClusterView, rules: MembershipRules, attempt: Attempt) -> Action | None:
    """Return an action FAIL when another member failed, was started again, or has saved and ended; else None."""
    phases = {peer: status.phase for peer, status in _statuses_in(view, attempt).items() if peer != view.own_id}
    is_standing_still = view.seconds_without_progress > rules.loss_timeout
    failed_ids = [peer for peer, phase in phases.items() if phase in (AgentPhase.FAILED, AgentPhase.ENDED)]
    if failed_ids:
        reason = f"{_describe_machines(failed_ids)} failed"
        keeps_state = rules.goes_on_in_place and view.can_keep_state
        return Action(kind=ActionKind.FAIL, reason=reason, dump_stacks=is_standing_still and not keeps_state)
    missing_ids = [member for member in attempt.members if member != view.own_id and member not in view.statuses]
    present_names = {machine_name(machine_id) for machine_id in view.statuses}
    if any(machine_name(missing) in present_names for missing in missing_ids):
        return Action(kind=ActionKind.FAIL, reason=f"{_describe_machines(missing_ids)} restarted")
    if AgentPhase.SAVED in phases.values() and is_standing_still:
        return Action(kind=ActionKind.FAIL, reason="the other machines have saved and ended")
    return None


def _find_stall(view: ClusterView, rules: MembershipRules, attempt: Attempt, has_made_steps: bool) -> Action | None:
    """Return an action FAIL when there was no progress for too long, else None."""
    is_handover = attempt.live_step is not None and not has_made_steps
    silent_ids = [member for member in attempt.members if not is_responsive(view, rules, member)]
    dead_ids = [member for member in silent_ids if view.status_ages.get(member) == math.inf]
    if is_handover and dead_ids:  # no step tells the trainers of it, which wait for each other
        return Action(kind=ActionKind.FAIL, reason=f"{_describe_machines(dead_ids)} died")
    if silent_ids:
        timeout = rules.loss_timeout if has_made_steps else rules.startup_loss_timeout
        if is_handover:  # most trainers run already
            timeout = min(timeout, IN_PLACE_PATIENCE * rules.loss_timeout)
    else:
        timeout = rules.stall_timeout if has_made_steps or view.have_all_started else rules.startup_stall_timeout
        if view.is_regrouping:
            timeout = min(timeout, rules.handover_timeout)
    if view.seconds_without_progress <= max(timeout, STALL_GAP_FACTOR * view.longest_progress_gap):
        return None
    cause = f"{_describe_machines(silent_ids)} silent" if silent_ids else "all machines respond"
    reason = f"{STALL} for {view.seconds_without_progress:.0f} s, {cause}"
    return Action(kind=ActionKind.FAIL, reason=reason, dump_stacks=not silent_ids)


def _find_silence(view: ClusterView, rules: MembershipRules, attempt: Attempt) -> Action | None:
    """Return an action FAIL when a member whose part of the command is not done has been silent for too long."""
    not_done_ids = {*attempt.members} - {view.own_id, *_finished_members(view, attempt)}
    timeout = rules.heartbeat_timeout + rules.loss_timeout
    lost_ids = [member for member in not_done_ids if view.status_ages.get(member, view.seconds_in_phase) > timeout]
    return Action(kind=ActionKind.FAIL, reason=f"{_describe_machines(lost_ids)} silent") if lost_ids else None


def _members_that_exit(view: ClusterView, attempt: Attempt) -> list[str]:
    """Return the other members whose processes save and exit: only agents tell those of a command of it."""
    return [
        member
        for member, status in _statuses_in(view, attempt).items()
        if member != view.own_id and (status.asks_exit or status.phase == AgentPhase.SAVED)
    ]


def _finished_members(view: ClusterView, attempt: Attempt) -> list[str]:
    statuses = _statuses_in(view, attempt)
    return [member for member, status in statuses.items() if status.phase == AgentPhase.FINISHED]


def _statuses_in(view: ClusterView, attempt: Attempt) -> dict[str, MachineStatus]:
    """Return the statuses that members of an attempt have written in it, in the order of the members."""
    known = {member: view.statuses[member] for member in attempt.members if member in view.statuses}
    return {member: status for member, status in known.items() if status.attempt == attempt.number}


def _decide_when_finished(view: ClusterView, rules: MembershipRules, attempt: Attempt) -> Action:
    """The command has ended well on this machine: the job is done when it has on all; a loss starts it again."""
    finished_ids = _finished_members(view, attempt)
    if len(finished_ids) == len(attempt.members):
        responsive_ids = [member for member in finished_ids if is_responsive(view, rules, member)]
        reason = "; ".join(filter(None, (view.statuses[member].reason for member in finished_ids)))
        return _propose_on_turn(view, responsive_ids, Attempt(end_state=MachineState.DONE, reason=reason), rules)
    must_start_again = _find_peer_failure(view, rules, attempt) or _find_silence(view, rules, attempt)
    if must_start_again or _members_that_exit(view, attempt):
        return _propose_next(view, rules, attempt)
    return NO_ACTION


def _propose_next(view: ClusterView, rules: MembershipRules, attempt: Attempt) -> Action:
    """This machine's trainers have ended: propose the next attempt once those of all responsive members have too."""
    responsive_ids = [
        member for member in attempt.members if member in view.statuses and is_responsive(view, rules, member)
    ]
    for member in responsive_ids:
        status = view.statuses[member]
        is_busy = member != view.own_id and status.phase not in (*IDLE_PHASES, AgentPhase.ENDED)
        if status.attempt != attempt.number or is_busy:
            return NO_ACTION
    waiting_ids = [member for member in responsive_ids if view.statuses[member].phase in IDLE_PHASES]
    return _propose_on_turn(view, waiting_ids, next_attempt(view, rules, attempt, waiting_ids), rules)


def next_attempt(
    view: ClusterView, rules: MembershipRules, attempt: Attempt, responsive_ids: list[str]
) -> Attempt | None:
    """Return the attempt after this one; without members when the job must end, None while machines are too few."""
    statuses = {machine_id: view.statuses[machine_id] for machine_id in responsive_ids}
    final_failures = [status for status in statuses.values() if status.fault in FINAL_FAULTS]
    if final_failures:
        first = final_failures[0]
        return Attempt(end_state=MachineState.FAILED, reason=first.reason, fault=first.fault)
    has_unreadable_checkpoint = any(status.fault == Fault.CHECKPOINT for status in statuses.values())
    # Where nothing but a lost connection tells a command of a loss, its failures after one say nothing about itself.
    counts_failures = rules.has_progress or len(responsive_ids) == len(attempt.members)
    own_failures = [status for status in statuses.values() if status.fault == Fault.OWN and counts_failures]
    broken = [
        status for member in attempt.members if (status := view.statuses.get(member)) and status.fault == Fault.MACHINE
    ]
    failed = [status for status in statuses.values() if status.phase == AgentPhase.FAILED]
    failed.sort(key=lambda status: not status.reason.startswith(STALL))
    first_failure_reason = failed[0].reason if failed else ""
    first_failures = own_failures if rules.has_progress else sorted(own_failures, key=lambda each: each.failed_at)[:1]
    failure_reason = _describe_failures([*broken, *first_failures], rules)
    failed_rank = next((status.failed_rank for status in [*first_failures, *statuses.values()]), None)
    broken_names = {status.machine_name for status in broken}  # another machine may get the name
    fault_counts = {name: count for name, count in attempt.fault_counts.items() if name not in broken_names}
    for status in own_failures if rules.has_progress else ():
        fault_counts[status.machine_name] = fault_counts.get(status.machine_name, 0) + 1
    left_out_ids = _machines_to_leave_out(view, rules, attempt, statuses, fault_counts)
    for name in map(machine_name, left_out_ids):
        if rules.is_rented:  # another machine will get the name
            del fault_counts[name]
        else:
            fault_counts[name] = MAX_CRASHES
    step = max((status.finished_step for status in statuses.values()), default=-1)
    crash_count = 0 if rules.has_progress else attempt.crash_count
    # A checkpoint that cannot be read is tried once: the next attempt takes an earlier one.
    # Of a command, processes that its agent has killed have not failed.
    have_failed = any(rules.has_progress or status.failed_rank is not None for status in failed)
    failed_regroups = _count_failed_regroups(attempt, statuses, left_out_ids)
    if failed_regroups > attempt.failed_regroups:  # the next ones are made in another way
        step, crash_count = attempt.crash_step, attempt.crash_count
    elif not has_unreadable_checkpoint and len(responsive_ids) == len(attempt.members) and have_failed:
        # The failure of a machine that is left out for it is none of the others'.
        has_others = 0 < len(left_out_ids) < len(attempt.members)
        has_failed_before = attempt.crash_step == step or not rules.has_progress
        crash_count = (attempt.crash_count if has_failed_before else 0) + (not has_others)
    if crash_count >= rules.max_crashes:
        reason = failure_reason or first_failure_reason
        if rules.has_progress:
            reason = f"{reason} ({MAX_CRASHES} times at step {max(step, 0)})"
        elif crash_count > 1:
            reason = f"{reason} (failed {crash_count} times)"
        return Attempt(end_state=MachineState.FAILED, reason=reason, failed_rank=failed_rank)

    leaving = [status for status in statuses.values() if status.leave_reason]
    staying_ids = [each for each, status in statuses.items() if not status.leave_reason and each not in left_out_ids]
    vacancies = max(0, rules.target_size - len(staying_ids))
    joining_ids = [spare for spare in ready_spares(view, rules) if spare not in staying_ids][:vacancies]
    keeping_ids = [machine_id for machine_id in staying_ids if statuses[machine_id].kept_step is not None]
    obstacle = "a checkpoint cannot be read" if has_unreadable_checkpoint else ""
    if failed_regroups >= MAX_FAILED_REGROUPS:
        obstacle = f"{failed_regroups} attempts in place have failed before their first step"
    keeping_ids = keeping_ids if rules.goes_on_in_place and not obstacle else []
    # The head is a machine whose trainers run already: the others find it at once.
    members = tuple(keeping_ids + [other for other in staying_ids + joining_ids if other not in keeping_ids])
    if not members:
        if leaving and not left_out_ids:
            end_state = MachineState.LEFT if rules.is_rented else MachineState.STOPPED
            return Attempt(end_state=end_state, reason=leaving[0].leave_reason)
        return Attempt(
            end_state=MachineState.FAILED, reason=f"{failure_reason} ({MAX_CRASHES} times)", failed_rank=failed_rank
        )
    if len(members) < rules.min_size:
        if not left_out_ids:
            return None
        reason = f"{failure_reason} ({MAX_CRASHES} times), and the others are fewer than {rules.min_size} machines"
        return Attempt(end_state=MachineState.FAILED, reason=reason)
    lost_ids = [member for member in attempt.members if member not in responsive_ids]
    reasons = [failure_reason] if failure_reason else []
    left_ids = [status.id for status in leaving]
    changes = ((lost_ids, "lost"), (left_ids, "left"), (left_out_ids, "left out"), (joining_ids, "joined"))
    for machine_ids, verb in changes:
        if machine_ids:
            reasons.append(f"{_describe_machines(machine_ids)} {verb}")
    told = [status for status in statuses.values() if status.phase == AgentPhase.SAVED and status.reason]
    reasons += [_describe_failures(told[:1], rules)] if told else []
    reasons = reasons or [first_failure_reason]
    if rules.goes_on_in_place and not keeping_ids and len(attempt.members) > 1 and (lost_ids or failed):
        causes = (status.not_in_place for status in statuses.values() if status.kept_step is None)
        reasons.append(
            f"not in place: {obstacle or next(filter(None, causes), 'no machine that stays kept its state')}"
        )
    return Attempt(
        members=members,
        reason="; ".join(filter(None, reasons)),
        live_step=max((statuses[machine_id].kept_step or 0 for machine_id in keeping_ids), default=None),
        resume_before=attempt.checkpoint_step if has_unreadable_checkpoint and attempt.resume else None,
        failed_regroups=failed_regroups if keeping_ids else 0,
        crash_step=step,
        crash_count=crash_count,
        fault_counts=fault_counts,
        left_out=tuple(left_out_ids),
    )


def _count_failed_regroups(attempt: Attempt, statuses: Mapping[str, MachineStatus], left_out_ids: list[str]) -> int:
    """Return how many attempts in place in a row failed before their first step, though they lost no machine."""
    if attempt.live_step is None or any(status.finished_step > attempt.live_step for status in statuses.values()):
        return 0
    has_failed = any(status.phase == AgentPhase.FAILED for status in statuses.values())
    return attempt.failed_regroups + (has_failed and len(statuses) == len(attempt.members) and not left_out_ids)


def _machines_to_leave_out(
    view: ClusterView,
    rules: MembershipRules,
    attempt: Attempt,
    statuses: Mapping[str, MachineStatus],
    fault_counts: Mapping[str, int],
) -> list[str]:
    """Return the ids of members that failed by their own fault too often. `statuses` are those of responsive members.

    A machine that fails while others do not is left out early, if enough others remain. A fault that all members have
    is hardly one of their machines. An error in a user's command says nothing about the machine.
    """
    if not rules.has_progress:
        return []
    culprits = {
        machine_id: fault_counts[status.machine_name]
        for machine_id, status in statuses.items()
        if status.fault == Fault.OWN
    }
    if len(culprits) < len(attempt.members):
        left_out_ids = [machine_id for machine_id, count in culprits.items() if count >= MAX_FAULTS_AMONG_OTHERS]
        remaining = [
            machine_id
            for machine_id, status in statuses.items()
            if machine_id not in left_out_ids and not status.leave_reason
        ]
        if len({*remaining, *ready_spares(view, rules)}) >= rules.min_size:
            return left_out_ids
    return [machine_id for machine_id, count in culprits.items() if count >= MAX_CRASHES]


def _propose_on_turn(
    view: ClusterView, proposer_ids: list[str], attempt: Attempt | None, rules: MembershipRules
) -> Action:
    """Propose an attempt when it is this machine's turn; the machines before it in `proposer_ids` propose earlier."""
    if attempt is None or view.own_id not in proposer_ids:
        return NO_ACTION
    if view.seconds_in_phase < rules.proposal_delay * proposer_ids.index(view.own_id):
        return NO_ACTION
    return Action(kind=ActionKind.PROPOSE, attempt=attempt)


def _describe_failures(failed: Iterable[MachineStatus], rules: MembershipRules) -> str:
    """Return the reasons of failed machines, with the machine's name in jobs of several machines."""
    return "; ".join(
        f"machine {status.machine_name}: {status.reason}" if rules.target_size > 1 else status.reason
        for status in failed
    )


def _describe_machines(machine_ids: list[str]) -> str:
    names = [machine_name(machine_id) for machine_id in sorted(machine_ids, key=_sort_key)]
    return f"machine{'s' * (len(names) > 1)} {', '.join(names)}"
