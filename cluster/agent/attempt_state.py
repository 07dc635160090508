"""What an agent knows about its current attempt."""

from dataclasses import dataclass

from cluster.state.attempts import Attempt
from train.tools.trainer_reports import TrainerProgress, TrainerState

# States of the trainers that they reach only after their first step.
STATES_AFTER_FIRST_STEP = (TrainerState.TRAINING, TrainerState.VALIDATING, TrainerState.SAVED)


@dataclass(kw_only=True)
class AttemptState:
    """One attempt as seen by an agent, replaced as a whole when the next attempt begins. `attempt` is None before all.

    Times are in seconds of a monotonic clock. `longest_progress_gap` is the longest pause after which the attempt went
    on by itself.
    """

    attempt: Attempt | None = None
    last_progress_time: float
    is_standby_ready: bool = False
    has_made_steps: bool = False
    last_step: int = -1
    progress: TrainerProgress | None = None
    longest_progress_gap: float = 0.0

    @property
    def number(self) -> int:
        """The number of the attempt, 0 before the first."""
        return self.attempt.number if self.attempt else 0

    @property
    def is_training(self) -> bool:
        """Whether the trainers have reported a step, and not yet the end of the run."""
        return self.progress is not None and self.progress.state in STATES_AFTER_FIRST_STEP

    def note_progress(self, progress: TrainerProgress | None, now: float) -> None:
        """Remember the trainers' last report, and when it changed."""
        if progress != self.progress:
            gap = now - self.last_progress_time
            self.longest_progress_gap = max(self.longest_progress_gap, gap) if self.has_made_steps else 0.0
            self.progress = progress
            self.last_progress_time = now
        if progress and self.is_training:
            self.has_made_steps = True
            self.last_step = self.last_step if progress.step is None else progress.step
