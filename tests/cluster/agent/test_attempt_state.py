"""What an agent knows of its current attempt, from made-up reports of its trainers."""

from cluster.agent.attempt_state import AttemptState
from train.tools.trainer_reports import TrainerProgress, TrainerState


def report(state: TrainerState, step: int | None = None, ticks: int = 0) -> TrainerProgress:
    return TrainerProgress(state=state, step=step, ticks=ticks)


def test_note_progress_first_step_is_made_once_the_trainers_train() -> None:
    current = AttemptState(last_progress_time=0.0)
    current.note_progress(None, 1.0)
    current.note_progress(report(TrainerState.WARMING, step=8), 2.0)
    assert (current.has_made_steps, current.is_training, current.last_step) == (False, False, -1)
    current.note_progress(report(TrainerState.TRAINING, step=9), 3.0)
    assert (current.has_made_steps, current.is_training, current.last_step) == (True, True, 9)
    current.note_progress(report(TrainerState.VALIDATING), 4.0)
    assert current.last_step == 9
    current.note_progress(report(TrainerState.DONE, step=10), 5.0)
    assert (current.has_made_steps, current.is_training, current.last_step) == (True, False, 9)


def test_note_progress_gap_counts_from_the_first_step_on() -> None:
    current = AttemptState(last_progress_time=0.0)
    current.note_progress(report(TrainerState.TRAINING, step=1), 100.0)
    assert (current.last_progress_time, current.longest_progress_gap) == (100.0, 0.0)
    current.note_progress(report(TrainerState.TRAINING, step=2), 103.0)
    current.note_progress(report(TrainerState.TRAINING, step=2), 110.0)  # no change is no progress
    assert (current.last_progress_time, current.longest_progress_gap) == (103.0, 3.0)
    current.note_progress(report(TrainerState.TRAINING, step=2, ticks=1), 111.0)
    assert (current.last_progress_time, current.longest_progress_gap) == (111.0, 8.0)
