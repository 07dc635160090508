"""What an agent knows of the attempt in which its machine takes part."""

from collections.abc import Mapping
from dataclasses import dataclass

from cluster.state.attempts import Attempt
from cluster.state.heartbeats import MachineStatus
from cluster.state.states import MachineState
from train.tools.agent_protocol import NOT_TRAINING_YET, TrainerProgress, TrainerState

# States of the trainers that they reach only after their first step.
STATES_AFTER_FIRST_STEP = (TrainerState.TRAINING, TrainerState.VALIDATING, TrainerState.SAVED)
STARTING_STATES = {MachineState.STARTING, MachineState.INDEXING}  # may take long: torch is imported, images opened
KEEP_SECONDS = 5.0  # for the trainers to leave a broken process group with their state
MAX_KEEP_SECONDS = 20.0  # the same, where steps are slow


@dataclass(kw_only=True)
class AttemptState:
    """One attempt as seen by an agent, replaced as a whole by the next. `attempt` is None before the first.

    With `goes_on_in_place` the trainers have kept the state of the attempt before. Times are in seconds of a monotonic
    clock. `longest_progress_gap` is the longest pause after which the attempt went on by itself. `kept_step` is the
    step whose state the trainers keep after the end of the attempt. They were asked for that for the reason
    `abort_reason`, and have time for it until `abort_deadline`. `not_in_place` is why they were stopped without it.
    """

    attempt: Attempt | None = None
    goes_on_in_place: bool = False
    last_progress_time: float
    kept_step: int | None = None
    abort_reason: str = ""
    abort_deadline: float | None = None
    not_in_place: str = ""
    is_standby_ready: bool = False
    has_made_steps: bool = False
    last_step: int = -1
    progress: TrainerProgress | None = None
    peer_states: tuple[MachineState, ...] = ()
    longest_progress_gap: float = 0.0

    @property
    def number(self) -> int:
        """The number of the attempt, 0 before the first."""
        return self.attempt.number if self.attempt else 0

    @property
    def is_training(self) -> bool:
        """Whether the trainers have reported a step, and not yet the end of the run."""
        return self.progress is not None and self.progress.state in STATES_AFTER_FIRST_STEP

    @property
    def obstacle(self) -> str:
        """Why the trainers could not keep their state if another process were lost now; "" when they could."""
        if self.progress:
            return self.progress.not_in_place
        return "" if self.goes_on_in_place else NOT_TRAINING_YET

    @property
    def can_keep_state(self) -> bool:
        """Whether the trainers can leave a broken group with their state, or wait for new trainers with it."""
        return self.is_handover or not self.obstacle

    def can_go_on_in(self, newest: Attempt, own_id: str) -> bool:
        """Whether the trainers can go on with the state they have kept: not when they have missed an attempt."""
        is_next = newest.live_step is not None and newest.number == self.number + 1
        return self.kept_step is not None and is_next and own_id in newest.members

    @property
    def is_handover(self) -> bool:
        """Whether the attempt continues in place and has made no step yet. Its trainers may wait for new ones."""
        return self.attempt is not None and self.attempt.live_step is not None and not self.has_made_steps

    @property
    def have_all_started(self) -> bool:
        """Whether in a handover all trainers are ready: only the group, the state and a first pass remain."""
        states = {MachineState(self.progress.state), *self.peer_states} if self.progress else STARTING_STATES
        return self.is_handover and not states & STARTING_STATES

    @property
    def is_regrouping(self) -> bool:
        """Whether in a handover only the process group and the exchange of state remain before the first pass."""
        return self.have_all_started and self.progress is not None and self.progress.state == TrainerState.JOINING

    def note_peers(self, statuses: Mapping[str, MachineStatus], own_id: str, now: float) -> None:
        """Remember what the other members do in this attempt. In a handover a change is progress.

        A member that has not followed into this attempt yet will start its trainers.
        """
        if not self.attempt or not self.is_handover:
            return
        states = []
        for member in self.attempt.members:
            if member != own_id and (status := statuses.get(member)):
                states.append(status.state if status.attempt == self.number else MachineState.STARTING)
        if tuple(states) != self.peer_states:
            self.peer_states = tuple(states)
            self.last_progress_time = now

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

    def begin_abort(self, reason: str, now: float) -> bool:
        """Note why and until when the trainers have time to keep their state. Returns False when they were asked."""
        if self.abort_deadline is not None:
            return False
        self.abort_reason = reason
        self.abort_deadline = now + min(max(KEEP_SECONDS, 2 * self.longest_progress_gap), MAX_KEEP_SECONDS)
        return True
