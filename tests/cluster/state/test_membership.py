"""Tests of the membership protocol: what one agent knows, and what it has to do. No files, clocks or processes."""

import math
from dataclasses import replace
from typing import Any

import pytest

from cluster.state.attempts import Attempt
from cluster.state.heartbeats import MachineStatus
from cluster.state.membership import Action, ActionKind, ClusterView, MembershipRules, decide
from cluster.state.states import AgentPhase, MachineState
from train.tools.agent_protocol import Fault

RULES = MembershipRules(machine_names=("0", "1", "2"), target_size=3)
FOUR = replace(RULES, machine_names=("0", "1", "2", "3"))
TWO = replace(RULES, target_size=2)
COMMAND_RULES = replace(RULES, has_progress=False, max_crashes=1)  # commands of the user report no steps
IN_PLACE_RULES = replace(RULES, goes_on_in_place=True)
FIRST = Attempt(number=1, members=("0.a", "1.b", "2.c"), reason="start")
PAIR = Attempt(number=1, members=("0.a", "1.b"), fault_counts={"0": 1})
SECOND = Attempt(number=2, members=("0.a", "1.b"))
SILENT = 3.0
RESUMED = replace(FIRST, resume="checkpoints/000001/resume-00000005-ab.pt")


def status(machine_id: str, phase: str = "running", attempt: int = 1, last_step: int = 8, **more: Any) -> MachineStatus:
    """Return the status of a machine that trains in attempt 1 and has made step 8, unless told otherwise."""
    return MachineStatus(id=machine_id, phase=AgentPhase(phase), attempt=attempt, last_step=last_step, **more)


def choose(
    statuses: list[MachineStatus],
    rules: MembershipRules = RULES,
    own_id: str = "0.a",
    attempt: Attempt | None = FIRST,
    silent: dict[str, float] | None = None,
    **more: Any,
) -> Action:
    """Return what the agent `own_id` does. Statuses are fresh but those in `silent`, which gives ages in seconds."""
    statuses_by_id = {status.id: status for status in statuses}
    phase, ages = statuses_by_id[own_id].phase, dict.fromkeys(statuses_by_id, 0.1) | (silent or {})
    known: Any = {"own_id": own_id, "phase": phase, "attempt": attempt, "statuses": statuses_by_id}
    return decide(ClusterView(**known, status_ages=ages, **more), rules)


def propose(statuses: list[MachineStatus], **seen: Any) -> Attempt:
    """Return the attempt that an agent proposes that sees these statuses; fail when it proposes none."""
    action = choose(statuses, **seen)
    assert action.kind == "propose" and action.attempt is not None, action
    return action.attempt


def all_of(phase: str = "running", **more: Any) -> list[MachineStatus]:
    return [status(member, phase, **more) for member in FIRST.members]


def ready(*ids: str) -> list[MachineStatus]:
    return [status(machine_id, "spare", attempt=0, last_step=-1) for machine_id in ids]


def ended(machine_id: str, reason: str) -> MachineStatus:
    return status(machine_id, "ended", attempt=0, last_step=-1, state="failed", reason=reason)


def crashed(culprit: str = "1.b", last_step: int = 8, fault: str = "own") -> list[MachineStatus]:
    """Return the statuses after a failure of all members: the culprit by its own fault, the others because of it."""
    return [
        status(member, "failed", last_step=last_step, fault=fault, reason="a bad step")
        if member == culprit
        else status(member, "failed", last_step=last_step)
        for member in FIRST.members
    ]


def failed_rank(machine_id: str, rank: int, at: float) -> MachineStatus:
    reason = f"rank {rank} ended with code 1"
    return status(machine_id, "failed", 1, -1, reason=reason, failed_rank=rank, failed_at=at, fault=Fault.OWN)


THREE_READY = ready("0.a", "1.b", "2.c")
STARTING = all_of(last_step=-1)  # they have made no step yet
AT_RISK = replace(THREE_READY[0], risk_reason="EC2 may interrupt it soon")
LEAVING = [status("0.a", leave_reason="a notice"), *all_of()[1:]]
LEAVING_SLOWLY = [*LEAVING[:2], status("2.c", is_standby_ready=False)]
JOINING = [status("0.a", attempt=2), status("1.b", attempt=2), status("2.new", "spare", attempt=2)]
LOST_FIRST = [status("0.a"), *all_of("failed")[1:]]
LOST_TWO = [status("0.a"), status("1.b"), status("2.c", "failed", fault="")]
SPARE = status("2.c", "spare")
TWO_FAILED = all_of("failed")[:2]
ALL_LEFT = [status(member, "saved", leave_reason=f"notice of {member}") for member in FIRST.members]
SAVED_PAIR = [status("1.b", "saved", attempt=2), status("2.c", "saved", attempt=2)]
FINISHED = all_of("finished", last_step=-1)
COMMAND_FAILED = [failed_rank("0.a", 0, 5.1), failed_rank("1.b", 1, 5.0), status("2.c", "failed", last_step=-1)]
KEPT = [status("0.a", "failed"), status("1.b", "failed", kept_step=11), status("2.c", "failed", kept_step=12)]
WITHOUT_FIRST = {"own_id": "2.c", "silent": {"0.a": SILENT, "1.b": SILENT}}
ALL_SILENT = {"0.a": 99.0, "1.b": 99.0}
IN_PLACE = replace(FIRST, live_step=12)
LATE_START = {"rules": IN_PLACE_RULES, "silent": {"2.c": SILENT}}
DIED = {"rules": IN_PLACE_RULES, "silent": {"2.c": math.inf}, "attempt": IN_PLACE}
REGROUP = replace(RESUMED, number=2, live_step=12, crash_step=12, crash_count=2, fault_counts={"2": 1})


@pytest.mark.parametrize(("statuses", "seen", "expected"), [
    # the start
    pytest.param(THREE_READY, {"attempt": None, "silent": {"2.c": SILENT}}, "nothing", id="silent at the start"),
    # stalls
    pytest.param(all_of(), {"seconds_without_progress": 120.1},
                 Action(kind=ActionKind.FAIL, reason="no progress for 120 s, all machines respond",
                        dump_stacks=True), id="stalled"),
    pytest.param(STARTING, {"seconds_without_progress": 299.9}, "nothing", id="slow start"),
    pytest.param(STARTING, {"seconds_without_progress": 300.1}, "fail", id="stalled start"),
    pytest.param(STARTING[:2], {"seconds_without_progress": 15.1}, "fail", id="a member without status is silent"),
    pytest.param(all_of(), {"silent": {"1.b": 2.6, "2.c": 2.6}, "seconds_without_progress": 5.0}, "nothing",
                 id="silent machines are kept while steps advance"),
    pytest.param(all_of(), {"silent": {"1.b": 2.6, "2.c": 2.6}, "seconds_without_progress": 5.1},
                 Action(kind=ActionKind.FAIL, reason="no progress for 5 s, machines 1, 2 silent"), id="silent"),
    pytest.param(all_of(), {"silent": {"1.b": SILENT}, "seconds_without_progress": 31.0,
                            "longest_progress_gap": 10.0}, "fail", id="more than three of its long steps"),
    # failures of other members
    *(pytest.param([*all_of()[:2], third], {}, Action(kind=ActionKind.FAIL, reason=reason), id=reason + phase)
      for third, reason, phase in ((status("2.c", "failed"), "machine 2 failed", ""),
                                   (status("2.c", "ended"), "machine 2 failed", ", ended"),
                                   (status("2.new", "warming", 0, -1), "machine 2 restarted", ""))),
    pytest.param([*all_of()[:2], status("2.c", "failed", attempt=0)], {}, Action(), id="an older failure"),
    pytest.param([status("0.a"), *all_of("saved")[1:]], {"seconds_without_progress": 1.0}, "nothing", id="saving"),
    pytest.param([status("0.a"), *all_of("saved")[1:]], {"seconds_without_progress": 5.1}, "fail",
                 id="it missed that the others have saved"),
    # planned changes
    pytest.param(LEAVING, {}, Action(kind=ActionKind.ASK, reason="machine 0 leaving"), id="leaving"),
    pytest.param(LEAVING_SLOWLY, {}, "nothing", id="leaving waits for the standby"),
    pytest.param(LEAVING_SLOWLY, {"is_deadline_near": True}, "ask", id="leaving before the deadline"),
    pytest.param([replace(each, last_step=-1) for each in LEAVING], {}, "nothing", id="leaving before a step"),
    pytest.param([replace(LEAVING[0], is_standby_ready=False)], {"attempt": replace(FIRST, members=("0.a",))},
                 "ask", id="the only machine leaves"),
    pytest.param(JOINING, {"attempt": SECOND}, Action(kind=ActionKind.ASK, reason="machine 2 joins"), id="joining"),
    *(pytest.param(others, {"attempt": SECOND}, "nothing", id=f"not joining: {why}") for others, why in (
        ([JOINING[0], replace(JOINING[1], is_standby_ready=False), JOINING[2]], "a member has no standby"),
        ([*JOINING[:2], replace(JOINING[2], phase=AgentPhase.WARMING)], "warming"),
        ([*JOINING[:2], replace(JOINING[2], leave_reason="a notice")], "leaving"),
    )),
    pytest.param(JOINING, {"attempt": SECOND, "rules": TWO}, "nothing", id="no room for a spare"),
    pytest.param(JOINING, {"attempt": replace(SECOND, fault_counts={"2": 3})}, "nothing", id="unreliable spare"),
    # after a loss
    pytest.param([*TWO_FAILED, status("2.c", "warming")], {}, "nothing", id="a responsive member gets ready"),
    pytest.param([*TWO_FAILED, status("2.c", "failed", attempt=0)], {}, "nothing", id="a member is behind"),
    pytest.param(LOST_FIRST, {"own_id": "2.c", "silent": {"0.a": SILENT}, "seconds_in_phase": 0.4}, "nothing",
                 id="the second that is left proposes later"),
    pytest.param(LOST_TWO, {**WITHOUT_FIRST, "seconds_in_phase": 1000.0, "rules": replace(RULES, min_size=2)},
                 "nothing", id="too few are left"),
    # a machine that is not a member
    *(pytest.param([*members, SPARE], {"own_id": "2.c", "attempt": PAIR, "silent": silent}, "nothing",
                   id=f"a spare waits: {why}") for members, silent, why in (
        ([status("0.a"), status("1.b")], {"0.a": 59.9, "1.b": 1000.0}, "a minute"),
        ([status("0.a"), status("1.b")], {"0.a": 1000.0}, "a member responds"),
        ([status("0.a", "ended", state="left"), status("1.b")], {}, "one has left"),
    )),
    pytest.param([status("0.a"), status("1.b"), SPARE], {"own_id": "2.c", "attempt": PAIR, "silent": ALL_SILENT,
                 "rules": replace(RULES, min_size=2)}, "nothing", id="one spare is too few"),
    pytest.param(THREE_READY, {"attempt": Attempt(number=4, end_state=MachineState.FAILED, reason="why")},
                 "nothing", id="the job has ended"),
    # commands
    pytest.param(STARTING, {"seconds_without_progress": 1e6, "rules": COMMAND_RULES}, "nothing",
                 id="a command is never stalled"),
    pytest.param(STARTING, {"silent": {"2.c": 8.0}, "rules": COMMAND_RULES}, "fail", id="command, lost"),
    pytest.param([*STARTING[:2], FINISHED[2]], {"silent": {"2.c": 8.0}, "rules": COMMAND_RULES}, "nothing",
                 id="its part of the command is done"),
    pytest.param([status("0.a"), status("1.b", asks_exit=True), status("2.c")], {"rules": COMMAND_RULES}, "ask",
                 id="a command exits where another machine asks"),
    pytest.param([*FINISHED[:2], STARTING[2]], {"rules": COMMAND_RULES}, "nothing", id="the command runs on one"),
    # going on in place
    pytest.param(STARTING, {**LATE_START, "attempt": IN_PLACE, "seconds_without_progress": 11.0}, "fail",
                 id="a loss in place is noticed earlier"),
    pytest.param(STARTING, DIED, Action(kind=ActionKind.FAIL, reason="machine 2 died"), id="a death before a step"),
    pytest.param(all_of(), DIED, "nothing", id="a death while steps advance"),
    pytest.param(STARTING, {"seconds_without_progress": 120.1, "have_all_started": True}, "fail", id="hangs later"),
    pytest.param(STARTING, {"rules": IN_PLACE_RULES, "seconds_without_progress": 29.0, "is_regrouping": True},
                 Action(), id="trainers meet, 29 s"),
    pytest.param(STARTING, {"rules": IN_PLACE_RULES, "seconds_without_progress": 31.0, "can_keep_state": True,
                            "is_regrouping": True},
                 Action(kind=ActionKind.FAIL, reason="no progress for 31 s, all machines respond",
                        dump_stacks=True), id="trainers do not meet"),
    # Stacks are dumped of what is then killed. Trainers that wait for a lost one, or for a new one, keep their state.
    *(pytest.param([*members[:2], status("2.c", "failed", last_step=-1)],
                   {"rules": IN_PLACE_RULES, "seconds_without_progress": 9.0, "can_keep_state": keeps_state},
                   Action(kind=ActionKind.FAIL, reason="machine 2 failed", dump_stacks=not keeps_state),
                   id=f"failed while all wait {when}, keeps state: {keeps_state}")
      for keeps_state in (False, True) for members, when in ((STARTING, "for the first step"), (all_of(), "later"))),
])  # fmt: skip
def test_agent_waits_asks_or_fails(statuses: list[MachineStatus], seen: dict[str, Any], expected: Any) -> None:
    action = choose(statuses, **seen)
    assert action == expected or action.kind == expected


@pytest.mark.parametrize(("statuses", "seen", "expected"), [
    # the start
    pytest.param([THREE_READY[2], *THREE_READY[:2]], {"attempt": None},
                 {"members": FIRST.members, "reason": "start", "end_state": None}, id="start"),
    pytest.param(ready("10.x", "2.y", "9.z"),
                 {"own_id": "2.y", "attempt": None,
                  "rules": replace(RULES, machine_names=tuple(map(str, range(12))))},
                 {"members": ("2.y", "9.z", "10.x")}, id="ranks follow the machines' numbers"),
    pytest.param([AT_RISK, *THREE_READY[1:]], {"own_id": "1.b", "attempt": None},
                 {"members": ("1.b", "2.c", "0.a")}, id="a machine at risk is used when needed"),
    pytest.param([*ready("0.a"), ended("1.b", "one"), ended("2.c", "two")], {"attempt": None},
                 {"members": (), "end_state": "failed", "reason": "machine 1: one; machine 2: two"},
                 id="machines that failed before the start end the job"),
    pytest.param([*ready("0.a", "2.c"), ended("1.b", "x")], {"attempt": None, "rules": TWO},
                 {"members": ("0.a", "2.c")}, id="a spare replaces a machine that failed before the start"),
    pytest.param(THREE_READY[:2], {"attempt": None, "seconds_in_phase": 60.1}, {"members": ("0.a", "1.b")},
                 id="fewer machines start when no other has come for a minute"),
    # planned changes
    pytest.param([replace(SAVED_PAIR[0], reason="deaf"), SAVED_PAIR[1], *ready("3.d", "0.a")],
                 {"own_id": "1.b", "rules": replace(FOUR, goes_on_in_place=True),
                  "attempt": Attempt(number=2, members=("1.b", "2.c"), fault_counts={"1": 1}, crash_step=8,
                                     crash_count=2)},
                 {"members": ("1.b", "2.c", "0.a"), "reason": "machine 0 joined; machine 1: deaf",
                  "fault_counts": {"1": 1}, "crash_count": 0}, id="spares join up to the target size"),
    pytest.param(ALL_LEFT, {}, {"members": (), "end_state": "stopped", "reason": "notice of 0.a"}, id="all leave"),
    # after a loss
    pytest.param([*TWO_FAILED, *ready("2.new")], {"attempt": replace(FIRST, crash_count=2, crash_step=8)},
                 {"members": ("0.a", "1.b", "2.new"), "reason": "machine 2 lost; machine 2 joined",
                  "crash_count": 0, "fault_counts": {}, "end_state": None},
                 id="restarted: a loss is neither a crash nor a fault"),
    pytest.param([status("0.a"), status("1.b"), SPARE],
                 {"own_id": "2.c", "attempt": PAIR, "silent": {"0.a": 60.0, "1.b": 61.0}},
                 {"members": ("2.c",), "reason": "all members were lost", "fault_counts": {"0": 1}},
                 id="a spare takes over after a minute"),
    pytest.param([status("0.a", "ended", state="left"), status("1.b", "ended", state="left"), SPARE],
                 {"own_id": "2.c", "attempt": PAIR}, {"members": ("2.c",)}, id="a spare takes over at once"),
    # crashes
    pytest.param(crashed(), {},
                 {"members": FIRST.members, "reason": "machine 1: a bad step", "crash_step": 8, "crash_count": 1,
                  "fault_counts": {"1": 1}, "resume_before": None}, id="a crash"),
    pytest.param([status("0.a", "failed"),
                  status("1.b", "ended", state=MachineState.LEFT, fault="machine", reason="7 of 8 GPUs answer"),
                  status("2.c", "failed")], {"attempt": replace(FIRST, fault_counts={"1": 2, "2": 1})},
                 {"members": ("0.a", "2.c"), "fault_counts": {"2": 1},
                  "reason": "machine 1: 7 of 8 GPUs answer; machine 1 lost"},
                 id="the machine that gets the name of a broken one has no faults"),
    pytest.param(crashed("2.c", fault="input"), {},
                 {"members": (), "end_state": "failed", "reason": "a bad step", "fault": "input"}, id="an input"),
    pytest.param(crashed("1.b", -1, "checkpoint"), {"attempt": replace(RESUMED, crash_step=-1, crash_count=2)},
                 {"members": FIRST.members, "resume_before": 5, "end_state": None, "crash_count": 0,
                  "fault_counts": {}}, id="an unreadable checkpoint is no crash, and an earlier one is tried"),
    pytest.param(all_of("failed", reason="no progress"), {"attempt": replace(FIRST, crash_step=8, crash_count=2)},
                 {"end_state": "failed", "reason": "no progress (3 times at step 8)"}, id="the third stall"),
    pytest.param([status("0.a", "failed", reason="gloo: closed"), *all_of("failed", reason="no progress for 9 s")[1:]],
                 {}, {"reason": "no progress for 9 s"}, id="who has noticed a stall says more than the others"),
    # commands
    pytest.param([replace(FINISHED[0], reason="no copy"), *FINISHED[1:]],
                 {"silent": {"2.c": 100.0}, "rules": COMMAND_RULES},
                 {"members": (), "end_state": MachineState.DONE, "reason": "no copy"},
                 id="the command has ended well everywhere"),
    pytest.param([*FINISHED[:2], STARTING[2]], {"silent": {"2.c": 8.0}, "rules": COMMAND_RULES},
                 {"members": ("0.a", "1.b"), "reason": "machine 2 lost"}, id="a loss starts the command again"),
    pytest.param(COMMAND_FAILED, {"rules": COMMAND_RULES},
                 {"end_state": MachineState.FAILED, "reason": "machine 1: rank 1 ended with code 1",
                  "failed_rank": 1}, id="the first rank that failed is named"),
    pytest.param(COMMAND_FAILED, {"rules": replace(COMMAND_RULES, max_crashes=2)},
                 {"members": FIRST.members, "crash_count": 1, "fault_counts": {}}, id="a retry of the command"),
    pytest.param(COMMAND_FAILED, {"rules": replace(COMMAND_RULES, max_crashes=2),
                                  "attempt": replace(FIRST, crash_count=1, crash_step=99)},
                 {"reason": "machine 1: rank 1 ended with code 1 (failed 2 times)", "members": ()},
                 id="no retries left"),
    pytest.param([COMMAND_FAILED[0], status("1.b", "failed", last_step=-1), STARTING[2]],
                 {"silent": {"2.c": SILENT}, "rules": COMMAND_RULES},
                 {"members": ("0.a", "1.b"), "crash_count": 0, "reason": "machine 2 lost", "fault_counts": {}},
                 id="a failure of a command after a loss does not count"),
    # going on in place
    pytest.param([*KEPT, *ready("3.d")],
                 {"own_id": "1.b", "silent": {"0.a": SILENT}, "seconds_in_phase": 9.0, "rules": IN_PLACE_RULES},
                 {"members": ("1.b", "2.c", "3.d"), "live_step": 12, "reason": "machine 0 lost; machine 3 joined"},
                 id="in place at the highest step"),
    pytest.param([*KEPT, *ready("3.d")], {"own_id": "1.b", "silent": {"0.a": SILENT}, "seconds_in_phase": 9.0},
                 {"live_step": None}, id="in place is off"),
    pytest.param([status("0.a", "failed", fault="own", reason="x"), *all_of("failed", kept_step=11)[1:]],
                 {"seconds_in_phase": 9.0, "rules": IN_PLACE_RULES},
                 {"members": ("1.b", "2.c", "0.a"), "live_step": 11}, id="the head's trainers run"),
    *(pytest.param(all_of(phase, attempt=2, last_step=-1, kept_step=kept),
                   {"attempt": replace(REGROUP, failed_regroups=failed), "seconds_in_phase": 9.0,
                    "rules": IN_PLACE_RULES, "silent": silent},
                   {"live_step": live_step, "failed_regroups": count, "reason": reason, "end_state": None}, id=why)
      for phase, kept, silent, failed, live_step, count, reason, why in (
          ("saved", 12, {}, 1, 12, 1, "", "in place has saved before a step"),
          ("failed", 12, {}, 0, 12, 1, "", "in place has failed before a step"),
          ("failed", 11, {}, 0, 11, 1, "", "the only machine that had kept step 12 has lost it"),
          ("failed", 12, {}, 1, None, 0, "not in place: 2 attempts in place have failed before their first step",
           "in place has failed twice"),
          ("failed", 12, {"2.c": SILENT}, 1, 12, 1, "machine 2 lost", "a loss explains the failure in place"),
          ("failed", 13, {}, 1, 13, 0, "", "in place has failed after a step"))),
    pytest.param([*all_of("failed", attempt=2, last_step=-1, kept_step=12)[:2],
                  status("2.c", "failed", 2, -1, fault="own", reason="x")],
                 {"attempt": replace(REGROUP, failed_regroups=1), "seconds_in_phase": 9.0, "rules": IN_PLACE_RULES},
                 {"live_step": 12, "members": ("0.a", "1.b"), "failed_regroups": 1, "left_out": ("2.c",)},
                 id="the machine that is left out explains the failure in place"),
    *(pytest.param(all_of("failed", not_in_place=why), {"rules": IN_PLACE_RULES, "silent": {"2.c": SILENT}},
                   {"live_step": None, "reason": f"machine 2 lost; not in place: {reason}"}, id=reason)
      for why, reason in (("the trainers use GPUs",) * 2, ("", "no machine that stays kept its state"))),
    pytest.param([status("0.a", "failed", fault="checkpoint"), *all_of("failed", kept_step=5)[1:]],
                 {"attempt": RESUMED, "seconds_in_phase": 9.0, "rules": IN_PLACE_RULES},
                 {"live_step": None, "resume_before": 5,
                  "reason": "not in place: a checkpoint cannot be read"},
                 id="no going on in place from an unreadable checkpoint"),
])  # fmt: skip
def test_agent_proposes(statuses: list[MachineStatus], seen: dict[str, Any], expected: dict[str, Any]) -> None:
    attempt = propose(statuses, **seen)
    assert {name: getattr(attempt, name) for name in expected} == expected


@pytest.mark.parametrize(("crashes", "rules", "expected"), [
    pytest.param([("0.a", 8), ("1.b", 9), ("2.c", 8)], RULES,
                 {"members": FIRST.members, "crash_step": 8, "crash_count": 1,
                  "fault_counts": {"0": 1, "1": 1, "2": 1}}, id="crashes at other steps do not"),
    pytest.param([("1.b", 8), ("1.b", 9), ("1.b", 10)], replace(RULES, min_size=3),
                 {"end_state": "failed", "reason": "machine 1: a bad step (3 times), and the others are fewer than "
                                                   "3 machines"}, id="too few others for leaving it out"),
    # A step that no machine survives, which only one rank meets.
    pytest.param([("0.a", 8), ("0.a", 8), ("1.b", 8), ("1.b", 8), ("2.c", 8)], RULES,
                 {"end_state": "failed", "reason": "machine 2: a bad step (3 times at step 8)"},
                 id="each machine in turn"),
    pytest.param([("0.a", 8)] * 3, replace(RULES, machine_names=("0",), target_size=1),
                 {"members": (), "end_state": "failed", "reason": "a bad step (3 times at step 8)"},
                 id="a single machine is not named"),
])  # fmt: skip
def test_crashes_in_a_row(crashes: list[tuple[str, int]], rules: MembershipRules, expected: dict[str, Any]) -> None:
    """Each crash is given as the machine whose own fault it is, and the step."""
    attempt = FIRST if rules.target_size > 1 else replace(FIRST, members=("0.a",))
    for culprit, step in crashes:
        assert attempt.end_state is None, "it ended too early"
        members = attempt.members
        statuses = [replace(each, attempt=attempt.number) for each in crashed(culprit, step) if each.id in members]
        proposed = propose(statuses, own_id=members[-1], attempt=attempt, rules=rules, seconds_in_phase=9)
        attempt = replace(proposed, number=attempt.number + 1)
    assert {name: getattr(attempt, name) for name in expected} == expected


@pytest.mark.parametrize("is_rented", [False, True])
def test_machine_that_was_left_out_comes_back_only_as_another_one(is_rented: bool) -> None:
    rules = replace(RULES, is_rented=is_rented)
    left = propose(crashed("1.b"), attempt=replace(FIRST, fault_counts={"1": 1, "2": 1}), rules=rules)
    assert left.left_out == ("1.b",) and left.fault_counts == ({"2": 1} if is_rented else {"1": 3, "2": 1})
    later = [status("0.a", "saved", attempt=2), status("2.c", "saved", attempt=2), status("1.new", "spare")]
    grown = propose(later, attempt=replace(left, number=2), rules=rules)
    assert grown.members == (("0.a", "2.c", "1.new") if is_rented else ("0.a", "2.c")) and grown.left_out == ()
