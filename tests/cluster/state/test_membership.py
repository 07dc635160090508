"""Tests of the membership protocol: what one agent knows, and what it has to do. No files, clocks or processes."""

from dataclasses import replace
from typing import Any

import pytest

from cluster.state.attempts import Attempt
from cluster.state.heartbeats import MachineStatus
from cluster.state.membership import Action, ActionKind, ClusterView, MembershipRules, decide
from cluster.state.states import AgentPhase, MachineState
from train.tools.trainer_reports import Fault

NAMES = ("0", "1", "2")
RULES = MembershipRules(
    machine_names=NAMES,
    target_size=3,
    loss_timeout=5.0,
    heartbeat_timeout=2.5,
    startup_loss_timeout=15.0,
    stall_timeout=120.0,
    startup_stall_timeout=300.0,
    orphan_timeout=60.0,
)
FIRST = Attempt(number=1, members=("0.a", "1.b", "2.c"), reason="start")
SILENT = 3.0


def status(machine_id: str, phase: str = "running", attempt: int = 1, last_step: int = 8, **more: Any) -> MachineStatus:
    """Return the status of a machine that trains in attempt 1 and has made step 8, unless told otherwise."""
    return MachineStatus(id=machine_id, phase=AgentPhase(phase), attempt=attempt, last_step=last_step, **more)


def view(
    statuses: list[MachineStatus],
    own_id: str = "0.a",
    attempt: Attempt | None = FIRST,
    silent: dict[str, float] | None = None,
    **more: Any,
) -> ClusterView:
    """Return the view of machine `own_id`. Statuses are fresh but those in `silent`, which gives ages in seconds."""
    statuses_by_id = {status.id: status for status in statuses}
    return ClusterView(
        own_id=own_id,
        phase=statuses_by_id[own_id].phase,
        attempt=attempt,
        statuses=statuses_by_id,
        status_ages=dict.fromkeys(statuses_by_id, 0.1) | (silent or {}),
        **more,
    )


def choose(statuses: list[MachineStatus], rules: MembershipRules = RULES, **seen: Any) -> Action:
    """Return what an agent does that sees these statuses."""
    return decide(view(statuses, **seen), rules)


def all_of(phase: str = "running", **more: Any) -> list[MachineStatus]:
    """Return the statuses of all members of the first attempt."""
    return [status(member, phase, **more) for member in FIRST.members]


def proposed(action: Action) -> Attempt:
    """Return the attempt that an action proposes; fail when it proposes none."""
    assert action.kind == "propose" and action.attempt is not None, action
    return action.attempt


def propose(statuses: list[MachineStatus], rules: MembershipRules = RULES, **seen: Any) -> Attempt:
    """Return the attempt that an agent proposes that sees these statuses."""
    return proposed(choose(statuses, rules, **seen))


def ready(*ids: str) -> list[MachineStatus]:
    """Return the statuses of machines that are ready and in no attempt."""
    return [status(machine_id, "spare", attempt=0, last_step=-1) for machine_id in ids]


# --- the start ------------------------------------------------------------------------------------------------------


def test_decide_first_attempt_waits_for_all_machines() -> None:
    assert choose(ready("0.a", "1.b"), attempt=None).kind == "nothing"
    warming = [*ready("0.a", "1.b"), status("2.c", "warming", attempt=0, last_step=-1)]
    assert choose(warming, attempt=None).kind == "nothing"
    assert choose(ready("0.a", "1.b", "2.c"), attempt=None, silent={"2.c": SILENT}).kind == "nothing"
    leaving = [*ready("0.a", "1.b"), replace(ready("2.c")[0], leave_reason="a notice")]
    assert choose(leaving, attempt=None).kind == "nothing"
    first = propose(ready("2.c", "0.a", "1.b"), attempt=None)
    assert (first.members, first.reason, first.end_state) == (("0.a", "1.b", "2.c"), "start", None)


def test_decide_first_attempt_orders_ranks_by_machine_number() -> None:
    rules = replace(RULES, machine_names=tuple(map(str, range(12))), target_size=3)
    statuses = ready("10.x", "2.y", "9.z")
    assert propose(statuses, own_id="2.y", attempt=None, rules=rules).members == ("2.y", "9.z", "10.x")


def test_decide_prefers_machines_that_are_not_at_risk_but_exchanges_none() -> None:
    at_risk, *others = ready("0.a", "1.b", "2.c")
    statuses = [replace(at_risk, risk_reason="EC2 may interrupt it soon"), *others]
    two_of_three = replace(RULES, target_size=2)
    assert propose(statuses, own_id="1.b", attempt=None, rules=two_of_three).members == ("1.b", "2.c")
    assert propose(statuses, own_id="1.b", attempt=None).members == ("1.b", "2.c", "0.a")
    training = all_of(risk_reason="EC2 may interrupt it soon", is_standby_ready=True)
    rules = replace(RULES, machine_names=("0", "1", "2", "3"))
    assert choose([*training, *ready("3.d")], rules=rules).kind == "nothing"


def test_decide_staggers_proposals_by_half_a_second() -> None:
    statuses = ready("0.a", "1.b", "2.c")
    for own_id, turn in (("0.a", 0.0), ("1.b", 0.5), ("2.c", 1.0)):
        assert propose(statuses, own_id=own_id, attempt=None, seconds_in_phase=turn).members == FIRST.members
        if turn:
            assert choose(statuses, own_id=own_id, attempt=None, seconds_in_phase=turn - 0.01).kind == "nothing"


def ended(machine_id: str, reason: str, state: str = "failed") -> MachineStatus:
    return status(machine_id, "ended", attempt=0, last_step=-1, state=state, reason=reason)


def test_decide_machine_failed_before_start_ends_job() -> None:
    statuses = [*ready("0.a", "2.c"), ended("1.b", "no such data folder")]
    end = propose(statuses, attempt=None)
    assert (end.members, end.end_state, end.reason) == ((), "failed", "machine 1: no such data folder")
    both = [*ready("0.a"), ended("1.b", "one"), ended("2.c", "two")]
    assert propose(both, attempt=None).reason == "machine 1: one; machine 2: two"


def test_decide_spare_replaces_machine_failed_before_start() -> None:
    rules = replace(RULES, target_size=2)
    statuses = [*ready("0.a"), ended("1.b", "no such data folder")]
    assert choose(statuses, attempt=None, rules=rules).kind == "nothing"
    statuses += ready("2.c")
    assert propose(statuses, attempt=None, rules=rules).members == ("0.a", "2.c")


# --- while the trainers run -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("age", [0.0, 2.4, 2.6, 60.0, 1e6])
@pytest.mark.parametrize("has_made_steps", [True, False])
def test_decide_silent_machine_is_kept_while_steps_advance(age: float, has_made_steps: bool) -> None:
    statuses = all_of(last_step=8 if has_made_steps else -1)
    timeout = 5.0 if has_made_steps else 15.0
    silent = {"1.b": age, "2.c": age}
    assert choose(statuses, silent=silent, seconds_without_progress=0.0).kind == "nothing"
    assert choose(statuses, silent=silent, seconds_without_progress=timeout).kind == "nothing"
    stuck = choose(statuses, silent=silent, seconds_without_progress=timeout + 0.1)
    assert stuck.kind == ("fail" if age > RULES.heartbeat_timeout else "nothing")
    if age > RULES.heartbeat_timeout:
        assert "machines 1, 2 silent" in stuck.reason


def test_decide_stall_with_all_responsive_waits_longer() -> None:
    for step, timeout in ((8, 120.0), (-1, 300.0)):
        statuses = all_of(last_step=step)
        assert choose(statuses, seconds_without_progress=timeout - 0.1).kind == "nothing"
        stuck = choose(statuses, seconds_without_progress=timeout + 0.1)
        assert stuck.kind == "fail" and "all machines respond" in stuck.reason


def test_decide_long_steps_extend_timeout_to_three_gaps() -> None:
    for seconds, kind in ((29.0, "nothing"), (31.0, "fail")):
        late = view(all_of(), silent={"1.b": SILENT}, seconds_without_progress=seconds, longest_progress_gap=10.0)
        assert decide(late, RULES).kind == kind


def test_decide_member_without_status_counts_as_silent() -> None:
    statuses = all_of(last_step=-1)[:2]
    assert choose(statuses, seconds_without_progress=14.9).kind == "nothing"
    assert choose(statuses, seconds_without_progress=15.1).kind == "fail"


@pytest.mark.parametrize(
    ("third", "reason"),
    [
        (status("2.c", "failed"), "machine 2 failed"),
        (status("2.c", "ended"), "machine 2 failed"),
        (status("2.new", "warming", attempt=0, last_step=-1), "machine 2 restarted"),
        (status("2.c", "failed", attempt=0), ""),  # the failure of an older attempt
    ],
)
def test_decide_failed_or_restarted_member_fails_attempt_at_once(third: MachineStatus, reason: str) -> None:
    expected = Action(kind=ActionKind.FAIL, reason=reason) if reason else Action()
    assert choose([*all_of()[:2], third]) == expected


def test_decide_missed_save_fails_after_loss_timeout() -> None:
    statuses = [*all_of()[:1], status("1.b", "saved"), status("2.c", "saved")]
    assert choose(statuses, seconds_without_progress=1.0).kind == "nothing"
    assert choose(statuses, seconds_without_progress=5.1).kind == "fail"


# --- planned changes ------------------------------------------------------------------------------------------------


def test_decide_leaving_machine_asks_for_save_when_ready_or_urgent() -> None:
    calm = [status("0.a", leave_reason="a notice"), *all_of()[1:]]
    assert choose(calm) == Action(kind=ActionKind.ASK, reason="machine 0 leaving")
    busy = [*calm[:2], status("2.c", is_standby_ready=False)]
    assert choose(busy).kind == "nothing"
    assert choose(busy, is_deadline_near=True).kind == "ask"
    early = [replace(status, last_step=-1) for status in calm]
    assert choose(early).kind == "nothing"
    alone = [status("0.a", leave_reason="a notice", is_standby_ready=False)]
    assert choose(alone, attempt=replace(FIRST, members=("0.a",))).kind == "ask"
    assert choose(calm, own_id="1.b").kind == "nothing", "only the machine that leaves asks"


def test_decide_spare_joins_only_with_standbys_and_room() -> None:
    pair = Attempt(number=2, members=("0.a", "1.b"))
    first, second, spare = status("0.a", attempt=2), status("1.b", attempt=2), status("2.new", "spare", attempt=2)
    statuses = [first, second, spare]
    assert choose(statuses, attempt=pair) == Action(kind=ActionKind.ASK, reason="machine 2 joins")
    for others in (
        [first, replace(second, is_standby_ready=False), spare],
        [replace(each, last_step=-1) for each in statuses],
        *([first, second, replace(spare, phase=AgentPhase(phase))] for phase in ("warming", "ended", "running")),
        [first, second, replace(spare, leave_reason="a notice")],
    ):
        assert choose(others, attempt=pair).kind == "nothing"
    assert choose(statuses, attempt=pair, silent={"2.new": SILENT}).kind == "nothing"
    assert choose(statuses, attempt=pair, rules=replace(RULES, target_size=2)).kind == "nothing"
    assert choose(statuses, attempt=replace(pair, fault_counts={"2": 3})).kind == "nothing"


def test_decide_after_save_adds_spares_up_to_target_size() -> None:
    rules = replace(RULES, machine_names=("0", "1", "2", "3"), target_size=3)
    pair = Attempt(number=2, members=("1.b", "2.c"), fault_counts={"1": 1}, crash_step=8, crash_count=2)
    statuses = [status("1.b", "saved", attempt=2), status("2.c", "saved", attempt=2), *ready("3.d", "0.a")]
    grown = propose(statuses, own_id="1.b", attempt=pair, rules=rules)
    assert grown.members == ("1.b", "2.c", "0.a") and grown.reason == "machine 0 joined"
    assert grown.fault_counts == {"1": 1} and grown.crash_count == 0


def test_decide_leaving_machine_is_replaced_by_spare() -> None:
    rules = replace(RULES, machine_names=("0", "1", "2", "3"))
    statuses = [replace(each, leave_reason="a notice" if each.id == "0.a" else "") for each in all_of("saved")]
    next_attempt = propose([*statuses, *ready("3.d")], own_id="0.a", rules=rules)
    assert next_attempt.members == ("1.b", "2.c", "3.d") and next_attempt.reason == "machine 0 left; machine 3 joined"


def test_decide_all_leave_stops_job_unless_spare_exists() -> None:
    statuses = [status(member, "saved", leave_reason=f"notice of {member}") for member in FIRST.members]
    end = propose(statuses)
    assert (end.members, end.end_state, end.reason) == ((), "stopped", "notice of 0.a")
    rules = replace(RULES, machine_names=("0", "1", "2", "3"))
    assert propose([*statuses, *ready("3.d")], rules=rules).members == ("3.d",)


# --- after a loss ---------------------------------------------------------------------------------------------------


def test_decide_next_attempt_waits_for_all_responsive_members() -> None:
    for phase in ("running", "warming", "spare"):
        statuses = [status("0.a", "failed"), status("1.b", "failed"), status("2.c", phase)]
        assert choose(statuses).kind == "nothing"
        assert propose(statuses, silent={"2.c": SILENT}).members == ("0.a", "1.b")
    behind = [status("0.a", "failed"), status("1.b", "failed"), status("2.c", "failed", attempt=0)]
    assert choose(behind).kind == "nothing"


def test_decide_first_member_lost_second_proposes_at_once() -> None:
    statuses = [status("0.a"), status("1.b", "failed"), status("2.c", "failed")]
    silent = {"0.a": SILENT}
    next_attempt = propose(statuses, own_id="1.b", silent=silent)
    assert next_attempt.members == ("1.b", "2.c") and next_attempt.reason == "machine 0 lost"
    assert choose(statuses, own_id="2.c", silent=silent, seconds_in_phase=0.4).kind == "nothing"
    assert propose(statuses, own_id="2.c", silent=silent, seconds_in_phase=0.5).members == ("1.b", "2.c")


def test_decide_loss_counts_neither_crash_nor_fault() -> None:
    statuses = [status("0.a", "failed"), status("1.b", "failed"), status("2.c")]
    before = replace(FIRST, crash_count=2, crash_step=8)
    next_attempt = propose(statuses, attempt=before, silent={"2.c": SILENT})
    assert (next_attempt.crash_count, next_attempt.fault_counts, next_attempt.end_state) == (0, {}, None)


def test_decide_below_min_size_waits_for_spares() -> None:
    rules = replace(RULES, min_size=2)
    statuses = [status("0.a"), status("1.b"), status("2.c", "failed", fault="")]
    silent = {"0.a": SILENT, "1.b": SILENT}
    assert choose(statuses, own_id="2.c", silent=silent, seconds_in_phase=1000.0, rules=rules).kind == "nothing"
    with_spare = [statuses[2], *ready("1.new")]
    assert propose(with_spare, own_id="2.c", silent=silent, rules=rules).members == ("2.c", "1.new")


def test_decide_restarted_machine_is_lost_and_joins() -> None:
    statuses = [status("0.a", "failed"), status("1.b", "failed"), *ready("2.new")]
    next_attempt = propose(statuses)
    assert next_attempt.members == ("0.a", "1.b", "2.new") and next_attempt.reason == "machine 2 lost; machine 2 joined"


# --- a machine that is not a member ---------------------------------------------------------------------------------


PAIR = Attempt(number=1, members=("0.a", "1.b"), fault_counts={"0": 1})


def decide_of_spare(members: list[MachineStatus], silent: dict[str, float], **more: Any) -> Action:
    return choose([*members, status("2.c", "spare")], own_id="2.c", attempt=PAIR, silent=silent, **more)


def test_decide_spare_takes_over_after_orphan_timeout() -> None:
    members = [status("0.a"), status("1.b")]
    assert decide_of_spare(members, {"0.a": 59.9, "1.b": 1000.0}).kind == "nothing"
    assert decide_of_spare(members, {"0.a": 1000.0, "1.b": 0.1}).kind == "nothing"
    takeover = proposed(decide_of_spare(members, {"0.a": 60.0, "1.b": 61.0}))
    assert (takeover.members, takeover.reason, takeover.fault_counts) == (("2.c",), "all members were lost", {"0": 1})


def test_decide_spare_takes_over_when_all_members_ended() -> None:
    gone = [status("0.a", "ended", state="left"), status("1.b", "ended", state="left")]
    assert proposed(decide_of_spare(gone, {"0.a": 0.1, "1.b": 0.1})).members == ("2.c",)
    assert decide_of_spare([gone[0], status("1.b")], {"0.a": 0.1, "1.b": 0.1}).kind == "nothing"
    assert decide_of_spare([gone[0], status("1.b", "failed")], {"0.a": 0.1, "1.b": SILENT}).kind == "nothing"


def test_decide_spare_takes_over_only_if_ready_and_enough() -> None:
    members, silent = [status("0.a"), status("1.b")], {"0.a": 99.0, "1.b": 99.0}
    statuses = [*members, status("2.c", "spare")]
    two_needed = replace(RULES, min_size=2)
    assert choose(statuses, own_id="2.c", attempt=PAIR, silent=silent, rules=two_needed).kind == "nothing"
    cold = [*members, status("2.c", "warming")]
    assert choose(cold, own_id="2.c", attempt=PAIR, silent=silent).kind == "nothing"


def test_decide_after_job_end_does_nothing() -> None:
    over = Attempt(number=4, end_state=MachineState.FAILED, reason="why")
    assert choose(ready("0.a", "1.b", "2.c"), attempt=over).kind == "nothing"


# --- crashes --------------------------------------------------------------------------------------------------------


def crashed(culprit: str = "1.b", last_step: int = 8, fault: str = "own") -> list[MachineStatus]:
    """Return the statuses after a failure of all members: the culprit by its own fault, the others because of it."""
    return [
        status(member, "failed", last_step=last_step, fault=fault, reason="a bad step")
        if member == culprit
        else status(member, "failed", last_step=last_step)
        for member in FIRST.members
    ]


def test_decide_crash_retries_with_same_members() -> None:
    again = propose(crashed())
    assert again.members == FIRST.members and again.reason == "machine 1: a bad step"
    assert (again.crash_step, again.crash_count, again.fault_counts) == (8, 1, {"1": 1})


def test_decide_third_crash_at_same_step_ends_job() -> None:
    attempt = FIRST
    for crash_count, culprit in enumerate(("0.a", "1.b"), 1):
        attempt = replace(propose(crashed(culprit), attempt=attempt), number=1)
        assert attempt.crash_count == crash_count and attempt.members == FIRST.members
    end = propose(crashed("2.c"), attempt=attempt)
    assert (end.members, end.end_state, end.reason) == ((), "failed", "machine 2: a bad step (3 times at step 8)")


def test_decide_crashes_at_different_steps_continue() -> None:
    attempt = FIRST
    for step, culprit in ((8, "0.a"), (9, "1.b"), (8, "2.c")):
        statuses = crashed(culprit, last_step=step)
        attempt = replace(propose(statuses, attempt=attempt), number=1)
        assert (attempt.members, attempt.crash_step, attempt.crash_count) == (FIRST.members, step, 1)
    assert attempt.fault_counts == {"0": 1, "1": 1, "2": 1}


def test_decide_broken_machine_is_named_and_its_faults_are_forgotten() -> None:
    """The machine that gets its name is another one."""
    statuses = [
        status("0.a", "failed"),
        status("1.b", "ended", state=MachineState.LEFT, fault="machine", reason="7 of 8 GPUs answer"),
        status("2.c", "failed"),
    ]
    attempt = replace(FIRST, fault_counts={"1": 2, "2": 1})
    following = propose(statuses, attempt=attempt)
    assert following.members == ("0.a", "2.c") and following.fault_counts == {"2": 1}
    assert following.reason == "machine 1: 7 of 8 GPUs answer; machine 1 lost"


@pytest.mark.parametrize("step", [-1, 8])
def test_decide_machine_that_fails_twice_alone_is_left_out(step: int) -> None:
    """A broken GPU fails at each attempt, at the same step, and loses its machine, not the job."""
    attempt = replace(propose(crashed("1.b", last_step=step)), number=1)
    assert attempt.members == FIRST.members and attempt.left_out == ()
    left = propose(crashed("1.b", last_step=step), attempt=attempt)
    assert left.members == ("0.a", "2.c") and left.left_out == ("1.b",) and left.end_state is None
    assert left.reason == "machine 1: a bad step; machine 1 left out" and left.crash_count == 1
    later = [status("0.a", "saved", attempt=2), status("2.c", "saved", attempt=2), status("1.new", "spare")]
    next_attempt = propose(later, attempt=replace(left, number=2))
    assert next_attempt.members == ("0.a", "2.c"), "to start the agent of machine 1 again does not change that"


def test_decide_rented_machine_that_is_left_out_is_forgotten() -> None:
    """The machine that gets its name is another one."""
    rules = replace(RULES, is_rented=True)
    left = propose(crashed("1.b"), attempt=replace(FIRST, fault_counts={"1": 1, "2": 1}), rules=rules)
    assert left.left_out == ("1.b",) and left.fault_counts == {"2": 1}
    later = [status("0.a", "saved", attempt=2), status("2.c", "saved", attempt=2), status("1.new", "spare")]
    grown = propose(later, attempt=replace(left, number=2), rules=rules)
    assert grown.members == ("0.a", "2.c", "1.new") and grown.left_out == ()


def test_decide_fault_that_each_machine_has_in_turn_ends_job() -> None:
    """A step that no machine survives, which only one rank meets."""
    attempt, ends = FIRST, []
    for culprit in ("0.a", "0.a", "1.b", "1.b", "2.c"):
        statuses = [replace(each, attempt=attempt.number) for each in crashed(culprit) if each.id in attempt.members]
        next_attempt = propose(statuses, own_id=statuses[-1].id, attempt=attempt, seconds_in_phase=9)
        ends.append(next_attempt.end_state)
        attempt = replace(next_attempt, number=attempt.number + 1)
    assert ends == [None, None, None, None, "failed"] and attempt.reason == "machine 2: a bad step (3 times at step 8)"


def test_decide_fault_of_all_machines_is_no_machines_fault() -> None:
    everybody = [status(member, "failed", fault="own", reason="a bug") for member in FIRST.members]
    attempt = FIRST
    for _ in range(2):
        attempt = replace(propose(everybody, attempt=attempt), number=1)
        assert attempt.members == FIRST.members and attempt.left_out == ()
    assert propose(everybody, attempt=attempt).end_state == "failed"


def test_decide_too_few_others_keep_a_failing_machine_until_its_third_fault() -> None:
    rules = replace(RULES, min_size=3)
    attempt = FIRST
    for step in (8, 9):
        attempt = replace(propose(crashed("1.b", last_step=step), attempt=attempt, rules=rules), number=1)
        assert attempt.members == FIRST.members
    end = propose(crashed("1.b", last_step=10), attempt=attempt, rules=rules)
    assert end.end_state == "failed"
    assert end.reason == "machine 1: a bad step (3 times), and the others are fewer than 3 machines"


@pytest.mark.parametrize("fault", ["final", "input"])
def test_decide_final_failure_ends_job_at_once(fault: str) -> None:
    end = propose(crashed("2.c", fault=fault))
    assert (end.members, end.end_state, end.reason, end.fault) == ((), "failed", "a bad step", fault)


def test_decide_unreadable_checkpoint_takes_an_earlier_one_at_once() -> None:
    """It is no machine's fault and no crash: an earlier checkpoint is tried as often as there is one."""
    before = replace(FIRST, resume="checkpoints/000001/resume-00000040-ab.pt", crash_step=-1, crash_count=2)
    attempt = propose(crashed("1.b", last_step=-1, fault="checkpoint"), attempt=before)
    assert (attempt.members, attempt.resume_before, attempt.end_state) == (FIRST.members, 40, None)
    assert (attempt.crash_count, attempt.fault_counts) == (0, {})
    assert propose(crashed("1.b")).resume_before is None


def test_decide_single_machine_reason_has_no_machine_name() -> None:
    rules, attempt = replace(RULES, machine_names=("0",), target_size=1), replace(FIRST, members=("0.a",))
    statuses = [status("0.a", "failed", fault="own", reason="killed")]
    for reason in ("killed", "killed", "killed (3 times at step 8)"):
        attempt = replace(propose(statuses, attempt=attempt, rules=rules), number=1)
        assert attempt.reason == reason
    assert (attempt.members, attempt.end_state) == ((), "failed")


def test_decide_third_stall_at_same_step_ends_job() -> None:
    statuses = [
        status(member, "failed", reason="no progress for 120 s, all machines respond") for member in FIRST.members
    ]
    end = propose(statuses, attempt=replace(FIRST, crash_step=8, crash_count=2))
    assert end.end_state == "failed" and end.reason == "no progress for 120 s, all machines respond (3 times at step 8)"


# --- commands of the user, which report no steps ----------------------------------------------------------------------

COMMAND_RULES = replace(RULES, has_progress=False, max_crashes=1)


def failed_rank(machine_id: str, rank: int, at: float, **more: Any) -> MachineStatus:
    """Return the status of a machine on which a rank of a command has failed."""
    reason = f"rank {rank} ended with code 1"
    return status(machine_id, "failed", 1, -1, reason=reason, failed_rank=rank, failed_at=at, **more)


def test_decide_command_without_steps_is_never_stalled() -> None:
    running = all_of(last_step=-1)
    assert choose(running, seconds_without_progress=1e6, rules=COMMAND_RULES).kind == "nothing"


def test_decide_command_machine_that_is_silent_is_lost() -> None:
    running = all_of(last_step=-1)
    assert choose(running, silent={"2.c": 7.0}, rules=COMMAND_RULES).kind == "nothing"
    assert choose(running, silent={"2.c": 8.0}, rules=COMMAND_RULES).kind == "fail"
    finished = [*running[:2], status("2.c", "finished", last_step=-1)]
    assert choose(finished, silent={"2.c": 8.0}, rules=COMMAND_RULES).kind == "nothing"


def test_decide_command_asks_its_processes_to_exit_when_those_of_another_machine_were() -> None:
    asked = [status("0.a"), status("1.b", asks_exit=True), status("2.c")]
    assert choose(asked, rules=COMMAND_RULES).kind == "ask"
    assert choose(asked).kind == "nothing"  # trainers agree among themselves


def test_decide_command_that_has_ended_well_everywhere_is_done() -> None:
    finished = all_of("finished", last_step=-1)
    assert choose([*finished[:2], status("2.c", last_step=-1)], rules=COMMAND_RULES).kind == "nothing"
    end = propose(finished, silent={"2.c": 100.0}, rules=COMMAND_RULES)
    assert (end.members, end.end_state) == ((), MachineState.DONE)


def test_decide_command_starts_again_everywhere_when_a_machine_was_lost_before_it_finished() -> None:
    running = [*all_of("finished", last_step=-1)[:2], status("2.c", last_step=-1)]
    following = propose(running, silent={"2.c": 8.0}, rules=COMMAND_RULES)
    assert (following.members, following.reason) == (("0.a", "1.b"), "machine 2 lost")


def test_decide_command_failure_of_its_own_ends_the_job_after_the_retries() -> None:
    statuses = [
        failed_rank("0.a", 0, 5.1, fault=Fault.OWN),
        failed_rank("1.b", 1, 5.0, fault=Fault.OWN),
        status("2.c", "failed", last_step=-1),
    ]
    end = propose(statuses, rules=COMMAND_RULES)
    assert (end.end_state, end.reason) == (MachineState.FAILED, "machine 1: rank 1 ended with code 1")
    assert end.failed_rank == 1  # the first one: the other one followed it
    again = propose(statuses, rules=replace(COMMAND_RULES, max_crashes=2))
    assert (len(again.members), again.crash_count, again.fault_counts) == (3, 1, {})
    second = replace(FIRST, crash_count=1, crash_step=99)
    end = propose(statuses, attempt=second, rules=replace(COMMAND_RULES, max_crashes=2))
    assert end.reason == "machine 1: rank 1 ended with code 1 (failed 2 times)"


def test_decide_command_failure_after_a_loss_does_not_count() -> None:
    statuses = [
        failed_rank("0.a", 0, 5.1, fault=Fault.OWN),
        status("1.b", "failed", last_step=-1),
        status("2.c", last_step=-1),
    ]
    following = propose(statuses, silent={"2.c": SILENT}, rules=COMMAND_RULES)
    assert (following.members, following.crash_count) == (("0.a", "1.b"), 0)
    assert following.reason == "machine 2 lost" and following.fault_counts == {}


# --- going on in place --------------------------------------------------------------------------------------------

IN_PLACE_RULES = replace(RULES, goes_on_in_place=True)


def test_machines_that_keep_their_state_go_on_in_place_at_the_highest_step() -> None:
    statuses = [status("0.a", "failed"), status("1.b", "failed", kept_step=11), status("2.c", "failed", kept_step=12)]
    statuses += ready("3.d")
    seen = view(statuses, silent={"0.a": SILENT})
    seen = replace(seen, own_id="1.b", phase=AgentPhase.FAILED, seconds_in_phase=9.0)
    attempt = proposed(decide(seen, IN_PLACE_RULES))
    assert (attempt.members, attempt.live_step) == (("1.b", "2.c", "3.d"), 12)
    assert attempt.reason == "machine 0 lost; machine 3 joined"
    assert proposed(decide(seen, RULES)).live_step is None, "the option is off"


def test_the_head_of_an_attempt_in_place_is_a_machine_whose_trainers_run() -> None:
    statuses = [status("0.a", "failed", fault="own", reason="crash"), *all_of("failed", kept_step=11)[1:]]
    attempt = propose(statuses, seconds_in_phase=9.0, rules=IN_PLACE_RULES)
    assert (attempt.members, attempt.live_step) == (("1.b", "2.c", "0.a"), 11)


def test_an_attempt_in_place_that_fails_before_its_first_step_is_followed_by_a_restart() -> None:
    in_place = replace(FIRST, number=2, live_step=12, resume="checkpoints/000002/resume-00000005-ab.pt")
    statuses = all_of("failed", attempt=2, last_step=-1, kept_step=12)
    waiting = view(statuses, attempt=in_place, seconds_in_phase=9.0)
    assert proposed(decide(waiting, IN_PLACE_RULES)).live_step is None
    after_a_loss = replace(waiting, status_ages={**waiting.status_ages, "2.c": SILENT})
    assert proposed(decide(after_a_loss, IN_PLACE_RULES)).live_step == 12, "the loss explains the failure"
    one_step_later = [replace(each, kept_step=13) for each in statuses]
    assert propose(one_step_later, attempt=in_place, rules=IN_PLACE_RULES).live_step == 13


def test_a_checkpoint_that_cannot_be_read_is_followed_by_a_restart() -> None:
    resumed = replace(FIRST, resume="checkpoints/000001/resume-00000005-ab.pt")
    statuses = [status("0.a", "failed", fault="checkpoint"), *all_of("failed", kept_step=5)[1:]]
    attempt = propose(statuses, attempt=resumed, seconds_in_phase=9.0, rules=IN_PLACE_RULES)
    assert (attempt.live_step, attempt.resume_before) == (None, 5)


def test_a_loss_before_the_first_step_in_place_is_noticed_earlier_than_after_a_restart() -> None:
    statuses = all_of(last_step=-1)
    starting = view(statuses, silent={"2.c": SILENT}, seconds_without_progress=11.0)
    assert decide(starting, IN_PLACE_RULES).kind == "nothing"
    in_place = replace(starting, attempt=replace(FIRST, live_step=12))
    assert decide(in_place, IN_PLACE_RULES).kind == "fail"
    assert decide(replace(in_place, seconds_without_progress=9.0), IN_PLACE_RULES).kind == "nothing"


def test_trainers_that_all_join_in_place_and_do_not_meet_start_again_before_the_store_gives_up() -> None:
    joining = view(all_of(last_step=-1), seconds_without_progress=31.0, is_handover=True)
    assert decide(joining, IN_PLACE_RULES).kind == "nothing", "a member may still start"
    action = decide(replace(joining, is_regrouping=True), IN_PLACE_RULES)
    assert (action.kind, action.reason) == ("fail", "no progress for 31 s, all machines respond") and action.dump_stacks
    assert decide(replace(joining, is_regrouping=True, seconds_without_progress=29.0), IN_PLACE_RULES) == Action()


def test_trainers_that_wait_for_a_new_one_that_fails_keep_their_state() -> None:
    """They wait for long without any fault: a new process imports torch. Stacks are dumped of what is then killed."""
    statuses = [*all_of(last_step=-1)[:2], status("2.c", "failed", last_step=-1)]
    waiting = view(statuses, seconds_without_progress=9.0)
    assert decide(waiting, IN_PLACE_RULES).dump_stacks
    action = decide(replace(waiting, is_handover=True), IN_PLACE_RULES)
    assert (action.kind, action.dump_stacks) == ("fail", False)
