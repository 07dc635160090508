"""Who trains next, as tables: what one agent knows, and what it has to do. No files, no clock, no processes."""

from dataclasses import replace
from typing import Any

import pytest

from cluster.state.attempts import Attempt
from cluster.state.heartbeats import MachineStatus
from cluster.state.membership import Action, ClusterView, MembershipRules, decide

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


def word(one: str, phase: str = "running", attempt: int = 1, at: int = 8, **more: Any) -> MachineStatus:
    return MachineStatus(id=one, phase=phase, attempt=attempt, last_step=at, **more)


def view(
    words: list[MachineStatus],
    me: str = "0.a",
    attempt: Attempt | None = FIRST,
    silent: dict[str, float] | None = None,
    **more: Any,
) -> ClusterView:
    """What `me` knows when all spoke just now but those in `silent`, which gives their ages in seconds."""
    phase = next(one.phase for one in words if one.id == me)
    ages = {one.id: 0.1 for one in words} | (silent or {})
    return ClusterView(
        own_id=me, phase=phase, attempt=attempt, statuses={one.id: one for one in words}, status_ages=ages, **more
    )


def all_of(phase: str = "running", **more: Any) -> list[MachineStatus]:
    return [word(one, phase, **more) for one in FIRST.members]


def proposed(action: Action) -> Attempt:
    assert action.kind == "propose" and action.attempt is not None, action
    return action.attempt


def ready(*ids: str) -> list[MachineStatus]:
    return [word(one, "spare", attempt=0, at=-1) for one in ids]


# --- the start ------------------------------------------------------------------------------------------------------


def test_decide_first_attempt_waits_for_all_machines() -> None:
    assert decide(view(ready("0.a", "1.b"), attempt=None), RULES).kind == "nothing"
    warming = [*ready("0.a", "1.b"), word("2.c", "warming", attempt=0, at=-1)]
    assert decide(view(warming, attempt=None), RULES).kind == "nothing"
    silent = view(ready("0.a", "1.b", "2.c"), attempt=None, silent={"2.c": SILENT})
    assert decide(silent, RULES).kind == "nothing"
    leaving = [*ready("0.a", "1.b"), replace(ready("2.c")[0], leave_reason="a notice")]
    assert decide(view(leaving, attempt=None), RULES).kind == "nothing"
    first = proposed(decide(view(ready("2.c", "0.a", "1.b"), attempt=None), RULES))
    assert (first.members, first.reason, first.end_state) == (("0.a", "1.b", "2.c"), "start", "")


def test_decide_first_attempt_orders_ranks_by_machine_number() -> None:
    rules = replace(RULES, machine_names=tuple(map(str, range(12))), target_size=3)
    words = ready("10.x", "2.y", "9.z")
    assert proposed(decide(view(words, me="2.y", attempt=None), rules)).members == ("2.y", "9.z", "10.x")


def test_decide_staggers_proposals_by_half_a_second() -> None:
    words = ready("0.a", "1.b", "2.c")
    for place, me in enumerate(FIRST.members):
        early, late = max(0.0, 0.5 * place - 0.01), 0.5 * place
        assert proposed(decide(view(words, me=me, attempt=None, seconds_in_phase=late), RULES)).members == FIRST.members
        if place:
            assert decide(view(words, me=me, attempt=None, seconds_in_phase=early), RULES).kind == "nothing"


def ended(one: str, reason: str, state: str = "failed") -> MachineStatus:
    return word(one, "ended", attempt=0, at=-1, state=state, reason=reason)


def test_decide_machine_failed_before_start_ends_job() -> None:
    words = [*ready("0.a", "2.c"), ended("1.b", "no such data folder")]
    end = proposed(decide(view(words, attempt=None), RULES))
    assert (end.members, end.end_state, end.reason) == ((), "failed", "machine 1: no such data folder")
    both = [*ready("0.a"), ended("1.b", "one"), ended("2.c", "two")]
    assert proposed(decide(view(both, attempt=None), RULES)).reason == "machine 1: one; machine 2: two"


def test_decide_spare_replaces_machine_failed_before_start() -> None:
    rules = replace(RULES, target_size=2)
    words = [*ready("0.a"), ended("1.b", "no such data folder")]
    assert decide(view(words, attempt=None), rules).kind == "nothing"
    words += ready("2.c")
    assert proposed(decide(view(words, attempt=None), rules)).members == ("0.a", "2.c")


def test_decide_unready_machine_proposes_nothing() -> None:
    words = [word("0.a", "warming", attempt=0, at=-1), *ready("1.b", "2.c")]
    assert decide(view(words, attempt=None), RULES).kind == "nothing"
    dead = [word("0.a", "warming", attempt=0, at=-1), ended("1.b", "why")]
    assert decide(view(dead, attempt=None), RULES).kind == "nothing"


# --- while the trainers run -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("age", [0.0, 2.4, 2.6, 60.0, 1e6])
@pytest.mark.parametrize("begun", [True, False])
def test_decide_silent_machine_is_kept_while_steps_advance(age: float, begun: bool) -> None:
    words = all_of(at=8 if begun else -1)
    patience = 5.0 if begun else 15.0
    silent = {"1.b": age, "2.c": age}
    assert decide(view(words, silent=silent, seconds_without_progress=0.0), RULES).kind == "nothing"
    assert decide(view(words, silent=silent, seconds_without_progress=patience), RULES).kind == "nothing"
    stuck = decide(view(words, silent=silent, seconds_without_progress=patience + 0.1), RULES)
    assert stuck.kind == ("fail" if age > RULES.heartbeat_timeout else "nothing")
    if age > RULES.heartbeat_timeout:
        assert "machines 1, 2 silent" in stuck.reason


def test_decide_stall_with_all_responsive_waits_longer() -> None:
    for at, patience in ((8, 120.0), (-1, 300.0)):
        assert decide(view(all_of(at=at), seconds_without_progress=patience - 0.1), RULES).kind == "nothing"
        stuck = decide(view(all_of(at=at), seconds_without_progress=patience + 0.1), RULES)
        assert stuck.kind == "fail" and "all machines respond" in stuck.reason


def test_decide_long_steps_extend_timeout_to_three_gaps() -> None:
    silent = {"1.b": SILENT}
    assert decide(view(all_of(), silent=silent, seconds_without_progress=29.0, longest_progress_gap=10.0), RULES).kind == "nothing"
    assert decide(view(all_of(), silent=silent, seconds_without_progress=31.0, longest_progress_gap=10.0), RULES).kind == "fail"


def test_decide_member_without_status_counts_as_silent() -> None:
    words = all_of(at=-1)[:2]
    assert decide(view(words, seconds_without_progress=14.9), RULES).kind == "nothing"
    assert decide(view(words, seconds_without_progress=15.1), RULES).kind == "fail"


@pytest.mark.parametrize("phase", ["failed", "ended"])
def test_decide_failed_member_fails_attempt_at_once(phase: str) -> None:
    words = [*all_of()[:2], word("2.c", phase)]
    assert decide(view(words), RULES) == Action(kind="fail", reason="machine 2 failed")


def test_decide_failure_of_older_attempt_is_ignored() -> None:
    words = [*all_of()[:2], word("2.c", "failed", attempt=0)]
    assert decide(view(words), RULES).kind == "nothing"


def test_decide_restarted_member_fails_attempt_at_once() -> None:
    words = [*all_of()[:2], word("2.new", "warming", attempt=0, at=-1)]
    assert decide(view(words), RULES) == Action(kind="fail", reason="machine 2 restarted")


def test_decide_missed_save_fails_after_loss_timeout() -> None:
    words = [*all_of()[:1], word("1.b", "saved"), word("2.c", "saved")]
    assert decide(view(words, seconds_without_progress=1.0), RULES).kind == "nothing"
    assert decide(view(words, seconds_without_progress=5.1), RULES).kind == "fail"


# --- planned changes ------------------------------------------------------------------------------------------------


def test_decide_leaving_machine_asks_for_save_when_ready_or_urgent() -> None:
    calm = [word("0.a", leave_reason="a notice"), *all_of()[1:]]
    assert decide(view(calm), RULES) == Action(kind="ask", reason="machine 0 leaving")
    busy = [*calm[:2], word("2.c", is_standby_ready=False)]
    assert decide(view(busy), RULES).kind == "nothing"
    assert decide(view(busy, is_deadline_near=True), RULES).kind == "ask"
    early = [replace(one, last_step=-1) for one in calm]
    assert decide(view(early), RULES).kind == "nothing"
    alone = view([word("0.a", leave_reason="a notice", is_standby_ready=False)], attempt=replace(FIRST, members=("0.a",)))
    assert decide(alone, RULES).kind == "ask"
    assert decide(view(calm, me="1.b"), RULES).kind == "nothing", "that is for the one that leaves to say"


def test_decide_spare_joins_only_with_standbys_and_room() -> None:
    pair = Attempt(number=2, members=("0.a", "1.b"))
    words = [word("0.a", attempt=2), word("1.b", attempt=2), word("2.new", "spare", attempt=2)]
    assert decide(view(words, attempt=pair), RULES) == Action(kind="ask", reason="machine 2 joins")
    cold = [words[0], replace(words[1], is_standby_ready=False), words[2]]
    assert decide(view(cold, attempt=pair), RULES).kind == "nothing"
    assert decide(view([replace(one, last_step=-1) for one in words], attempt=pair), RULES).kind == "nothing"
    assert decide(view(words, attempt=pair, silent={"2.new": SILENT}), RULES).kind == "nothing"
    assert decide(view(words, attempt=pair), replace(RULES, target_size=2)).kind == "nothing"
    for phase in ("warming", "ended", "running"):
        assert decide(view([*words[:2], word("2.new", phase, attempt=2)], attempt=pair), RULES).kind == "nothing"
    going = [*words[:2], replace(words[2], leave_reason="a notice")]
    assert decide(view(going, attempt=pair), RULES).kind == "nothing"
    banned = replace(pair, fault_counts={"2": 3})
    assert decide(view(words, attempt=banned), RULES).kind == "nothing"


def test_decide_after_save_adds_spares_up_to_target_size() -> None:
    rules = replace(RULES, machine_names=("0", "1", "2", "3"), target_size=3)
    pair = Attempt(number=2, members=("1.b", "2.c"), fault_counts={"1": 1}, crash_step=8, crash_count=2)
    words = [word("1.b", "saved", attempt=2), word("2.c", "saved", attempt=2), *ready("3.d", "0.a")]
    grown = proposed(decide(view(words, me="1.b", attempt=pair), rules))
    assert grown.members == ("1.b", "2.c", "0.a") and grown.reason == "machine 0 joined"
    assert grown.fault_counts == {"1": 1} and grown.crash_count == 0


def test_decide_leaving_machine_is_replaced_by_spare() -> None:
    rules = replace(RULES, machine_names=("0", "1", "2", "3"))
    words = [word("0.a", "saved", leave_reason="a notice"), word("1.b", "saved"), word("2.c", "saved"), *ready("3.d")]
    following = proposed(decide(view(words, me="0.a"), rules))
    assert following.members == ("1.b", "2.c", "3.d") and following.reason == "machine 0 left; machine 3 joined"


def test_decide_all_leave_stops_job_unless_spare_exists() -> None:
    words = [word(one, "saved", leave_reason=f"notice of {one}") for one in FIRST.members]
    end = proposed(decide(view(words), RULES))
    assert (end.members, end.end_state, end.reason) == ((), "stopped", "notice of 0.a")
    rules = replace(RULES, machine_names=("0", "1", "2", "3"))
    assert proposed(decide(view([*words, *ready("3.d")]), rules)).members == ("3.d",)


# --- after a loss ---------------------------------------------------------------------------------------------------


def test_decide_next_attempt_waits_for_all_responsive_members() -> None:
    for phase in ("running", "warming", "spare"):
        words = [word("0.a", "failed"), word("1.b", "failed"), word("2.c", phase)]
        assert decide(view(words), RULES).kind == "nothing"
        assert proposed(decide(view(words, silent={"2.c": SILENT}), RULES)).members == ("0.a", "1.b")
    behind = [word("0.a", "failed"), word("1.b", "failed"), word("2.c", "failed", attempt=0)]
    assert decide(view(behind), RULES).kind == "nothing"


def test_decide_first_member_lost_second_proposes_at_once() -> None:
    words = [word("0.a"), word("1.b", "failed"), word("2.c", "failed")]
    silent = {"0.a": SILENT}
    following = proposed(decide(view(words, me="1.b", silent=silent), RULES))
    assert following.members == ("1.b", "2.c") and following.reason == "machine 0 lost"
    assert decide(view(words, me="2.c", silent=silent, seconds_in_phase=0.4), RULES).kind == "nothing"
    assert proposed(decide(view(words, me="2.c", silent=silent, seconds_in_phase=0.5), RULES)).members == ("1.b", "2.c")


def test_decide_two_members_lost_at_once() -> None:
    words = [word("0.a"), word("1.b"), word("2.c", "failed")]
    following = proposed(decide(view(words, me="2.c", silent={"0.a": SILENT, "1.b": SILENT}), RULES))
    assert following.members == ("2.c",) and following.reason == "machines 0, 1 lost"


def test_decide_loss_counts_neither_crash_nor_fault() -> None:
    words = [word("0.a", "failed"), word("1.b", "failed"), word("2.c")]
    before = replace(FIRST, crash_count=2, crash_step=8)
    following = proposed(decide(view(words, attempt=before, silent={"2.c": SILENT}), RULES))
    assert (following.crash_count, following.fault_counts, following.end_state) == (0, {}, "")


def test_decide_below_min_size_waits_for_spares() -> None:
    rules = replace(RULES, min_size=2)
    words = [word("0.a"), word("1.b"), word("2.c", "failed", fault="")]
    silent = {"0.a": SILENT, "1.b": SILENT}
    assert decide(view(words, me="2.c", silent=silent, seconds_in_phase=1000.0), rules).kind == "nothing"
    more = view([words[2], *ready("1.new")], me="2.c", silent=silent)
    assert proposed(decide(more, rules)).members == ("2.c", "1.new")


def test_decide_restarted_machine_is_lost_and_joins() -> None:
    words = [word("0.a", "failed"), word("1.b", "failed"), *ready("2.new")]
    following = proposed(decide(view(words), RULES))
    assert following.members == ("0.a", "1.b", "2.new") and following.reason == "machine 2 lost; machine 2 joined"


# --- a spare, or one that was left out ------------------------------------------------------------------------------


PAIR = Attempt(number=1, members=("0.a", "1.b"), fault_counts={"0": 1})


def outside(members: list[MachineStatus], silent: dict[str, float], **more: Any) -> Action:
    return decide(view([*members, word("2.c", "spare")], me="2.c", attempt=PAIR, silent=silent, **more), RULES)


def test_decide_spare_takes_over_after_orphan_timeout() -> None:
    members = [word("0.a"), word("1.b")]
    assert outside(members, {"0.a": 59.9, "1.b": 1000.0}).kind == "nothing"
    assert outside(members, {"0.a": 1000.0, "1.b": 0.1}).kind == "nothing"
    taken = proposed(outside(members, {"0.a": 60.0, "1.b": 61.0}))
    assert (taken.members, taken.reason, taken.fault_counts) == (("2.c",), "all members were lost", {"0": 1})


def test_decide_spare_takes_over_when_all_members_ended() -> None:
    gone = [word("0.a", "ended", state="left"), word("1.b", "ended", state="left")]
    assert proposed(outside(gone, {"0.a": 0.1, "1.b": 0.1})).members == ("2.c",)
    assert outside([gone[0], word("1.b")], {"0.a": 0.1, "1.b": 0.1}).kind == "nothing"
    assert outside([gone[0], word("1.b", "failed")], {"0.a": 0.1, "1.b": SILENT}).kind == "nothing"


def test_decide_spare_takes_over_only_if_ready_and_enough() -> None:
    members, silent = [word("0.a"), word("1.b")], {"0.a": 99.0, "1.b": 99.0}
    words = [*members, word("2.c", "spare")]
    two = replace(RULES, min_size=2)
    assert decide(view(words, me="2.c", attempt=PAIR, silent=silent), two).kind == "nothing"
    cold = [*members, word("2.c", "warming")]
    assert decide(view(cold, me="2.c", attempt=PAIR, silent=silent), RULES).kind == "nothing"


def test_decide_after_job_end_does_nothing() -> None:
    over = Attempt(number=4, end_state="failed", reason="why")
    assert decide(view(ready("0.a", "1.b", "2.c"), attempt=over), RULES).kind == "nothing"


# --- crashes --------------------------------------------------------------------------------------------------------


def crashed(one: str = "1.b", at: int = 8, fault: str = "own") -> list[MachineStatus]:
    """All have failed: one by its own fault, the others because of it."""
    return [
        word(other, "failed", at=at, fault=fault if other == one else "", reason="a bad step" if other == one else "")
        for other in FIRST.members
    ]


def test_decide_crash_retries_with_same_members() -> None:
    again = proposed(decide(view(crashed()), RULES))
    assert again.members == FIRST.members and again.reason == "machine 1: a bad step"
    assert (again.crash_step, again.crash_count, again.fault_counts) == (8, 1, {"1": 1})


def test_decide_third_crash_at_same_step_ends_job() -> None:
    attempt = FIRST
    for number, one in enumerate(("0.a", "1.b"), 1):
        attempt = replace(proposed(decide(view(crashed(one), attempt=attempt), RULES)), number=1)
        assert attempt.crash_count == number and attempt.members == FIRST.members
    end = proposed(decide(view(crashed("2.c"), attempt=attempt), RULES))
    assert (end.members, end.end_state, end.reason) == ((), "failed", "machine 2: a bad step (3 times at step 8)")


def test_decide_crashes_at_different_steps_continue() -> None:
    attempt = FIRST
    for at, one in ((8, "0.a"), (9, "1.b"), (8, "2.c"), (12, "0.a"), (8, "1.b")):
        attempt = replace(proposed(decide(view(crashed(one, at=at), attempt=attempt), RULES)), number=1)
        assert (attempt.members, attempt.crash_step, attempt.crash_count) == (FIRST.members, at, 1)
    assert attempt.fault_counts == {"0": 2, "1": 2, "2": 1}


def test_decide_machine_with_three_faults_is_left_out() -> None:
    attempt = replace(FIRST, fault_counts={"1": 2}, crash_step=3, crash_count=1)
    left = proposed(decide(view(crashed("1.b"), attempt=attempt), RULES))
    assert left.members == ("0.a", "2.c") and left.fault_counts == {"1": 3} and left.end_state == ""
    later = [word("0.a", "saved", attempt=2), word("2.c", "saved", attempt=2), word("1.new", "spare")]
    following = proposed(decide(view(later, attempt=replace(left, number=2)), RULES))
    assert following.members == ("0.a", "2.c"), "a new start under the name of a machine that was left out"


def test_decide_final_failure_ends_job_at_once() -> None:
    end = proposed(decide(view(crashed("2.c", fault="final")), RULES))
    assert (end.members, end.end_state, end.reason) == ((), "failed", "a bad step")


def test_decide_single_machine_reason_has_no_machine_name() -> None:
    rules, alone = replace(RULES, machine_names=("0",), target_size=1), replace(FIRST, members=("0.a",))
    words = [word("0.a", "failed", fault="own", reason="killed")]
    attempt = alone
    for _ in range(2):
        attempt = replace(proposed(decide(view(words, attempt=attempt), rules)), number=1)
        assert attempt.members == ("0.a",) and attempt.reason == "killed"
    assert proposed(decide(view(words, attempt=attempt), rules)).reason == "killed (3 times at step 8)"


def test_decide_last_machine_with_three_faults_ends_job() -> None:
    rules, alone = replace(RULES, machine_names=("0",), target_size=1), replace(FIRST, members=("0.a",), fault_counts={"0": 2}, crash_step=3)
    end = proposed(decide(view([word("0.a", "failed", fault="own", reason="killed")], attempt=alone), rules))
    assert (end.members, end.end_state, end.reason) == ((), "failed", "killed (3 times)")


def test_decide_third_stall_at_same_step_ends_job() -> None:
    words = [word(one, "failed", reason="no progress for 120 s, all machines respond") for one in FIRST.members]
    end = proposed(decide(view(words, attempt=replace(FIRST, crash_step=8, crash_count=2)), RULES))
    assert end.end_state == "failed" and end.reason == "no progress for 120 s, all machines respond (3 times at step 8)"
