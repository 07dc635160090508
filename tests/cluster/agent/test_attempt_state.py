"""What an agent knows of its current attempt, from made-up reports of its trainers and made-up statuses."""

from dataclasses import replace
from typing import Any

from cluster.agent.processes.attempt_state import AttemptState
from cluster.state.attempts import Attempt
from cluster.state.heartbeats import MachineStatus
from cluster.state.states import MachineState
from train.tools.agent_protocol import TrainerProgress, TrainerState


def report(state: TrainerState, step: int | None = None, ticks: int = 0) -> TrainerProgress:
    return TrainerProgress(state=state, step=step, ticks=ticks)


def test_note_progress_first_step_is_made_once_the_trainers_train_and_gaps_count_from_then_on() -> None:
    current = AttemptState(last_progress_time=0.0)
    current.note_progress(None, 1.0)
    current.note_progress(report(TrainerState.WARMING, step=8), 2.0)
    assert (current.has_made_steps, current.is_training, current.last_step) == (False, False, -1)
    current.note_progress(report(TrainerState.TRAINING, step=9), 100.0)
    assert (current.has_made_steps, current.is_training, current.last_step) == (True, True, 9)
    assert (current.last_progress_time, current.longest_progress_gap) == (100.0, 0.0)
    current.note_progress(report(TrainerState.TRAINING, step=10), 103.0)
    current.note_progress(report(TrainerState.TRAINING, step=10), 110.0)  # no change is no progress
    assert (current.last_progress_time, current.longest_progress_gap) == (103.0, 3.0)
    current.note_progress(report(TrainerState.VALIDATING, ticks=1), 111.0)
    assert (current.last_progress_time, current.longest_progress_gap, current.last_step) == (111.0, 8.0, 10)
    current.note_progress(report(TrainerState.DONE, step=11), 112.0)
    assert (current.has_made_steps, current.is_training, current.last_step) == (True, False, 10)


def handover(**values: Any) -> AttemptState:
    members = ("0.a", "1.b", "2.c")
    return AttemptState(attempt=Attempt(number=2, members=members, live_step=8), last_progress_time=0.0, **values)


def peers(first: str, second: str, attempt: int = 2) -> dict[str, MachineStatus]:
    states = {"1.b": (MachineState(first), 2), "2.c": (MachineState(second), attempt)}
    return {member: MachineStatus(id=member, state=state, attempt=number) for member, (state, number) in states.items()}


def test_regrouping_begins_when_no_member_starts_any_more() -> None:
    current = handover()
    current.note_peers(peers("joining", "training", attempt=1), "0.a", 1.0)
    current.note_progress(report(TrainerState.JOINING), 2.0)
    assert not current.is_regrouping, "machine 2 has not followed yet"
    for state, is_regrouping in (("starting", False), ("indexing", False), ("joining", True)):
        current.note_peers(peers("joining", state), "0.a", 3.0)
        assert (current.have_all_started, current.is_regrouping) == (is_regrouping, is_regrouping), state
    current.note_progress(report(TrainerState.WARMING), 4.0)
    assert not current.is_regrouping and current.have_all_started and current.is_handover
    current.note_progress(report(TrainerState.TRAINING, step=9), 5.0)
    assert not current.have_all_started and not current.is_handover


def test_in_a_handover_what_other_members_do_is_progress() -> None:
    current = handover()
    current.note_peers(peers("joining", "indexing"), "0.a", 100.0)
    current.note_peers(peers("joining", "indexing"), "0.a", 101.0)
    assert current.last_progress_time == 100.0
    current.note_peers(peers("joining", "joining"), "0.a", 102.0)
    assert current.last_progress_time == 102.0
    current.note_progress(report(TrainerState.TRAINING, step=9), 103.0)
    current.note_peers(peers("training", "training"), "0.a", 104.0)
    assert current.last_progress_time == 103.0


def test_trainers_that_go_on_in_place_keep_their_state_also_before_their_first_report() -> None:
    """A second machine may be lost before they have read the request to go on."""
    current = handover(goes_on_in_place=True)
    assert not current.obstacle and handover().obstacle
    current.note_progress(report(TrainerState.STARTING), 1.0)
    assert current.obstacle == "training had not begun"
    current.note_progress(replace(report(TrainerState.TRAINING, step=9), not_in_place=""), 2.0)
    assert current.can_keep_state and not current.is_handover
    current.note_progress(replace(report(TrainerState.TRAINING, step=9), not_in_place="it uses GPUs"), 3.0)
    assert not current.can_keep_state


def test_trainers_go_on_in_place_in_the_very_next_attempt_only() -> None:
    current = AttemptState(attempt=Attempt(number=1, members=("0.a", "1.b")), kept_step=8, last_progress_time=0.0)
    following = Attempt(number=2, members=("0.a", "1.b"), live_step=8)
    assert current.can_go_on_in(following, "0.a")
    assert not current.can_go_on_in(replace(following, number=3), "0.a"), "an attempt was missed"
    assert not current.can_go_on_in(replace(following, live_step=None), "0.a")
    assert not current.can_go_on_in(following, "2.c")
    current.kept_step = None
    assert not current.can_go_on_in(following, "0.a")
