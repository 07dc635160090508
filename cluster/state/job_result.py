"""The result of a job, result.json in its run folder: that of its trainers, and how the job ended."""

from dataclasses import dataclass, field

from train.forecast import Constants, Forecast, StartSeconds, TermComparison
from train.metrics.records import TrainResult

from .states import JobState, SetupStep
from .timeline import AttemptRow

ONE_TIME_STEPS = (SetupStep.DATA, SetupStep.INDEXING)  # done once for a data set: it is drawn, its folders are searched


@dataclass(frozen=True, kw_only=True)
class JobResult(TrainResult):
    """How a job ended and what its trainers measured.

    `procs` is the number of processes of each machine. `setup` has the seconds of each step of each machine up to its
    first training step. `did_not_answer` are the machines that did not answer at the end. `ids_wrong` are the errors in
    the log of used images, None when there is no such log. `is_input_wrong`: the job failed and would fail again
    unless the recipe, the options or the images are changed.

    `constants` are the machine constants that the run measured. When a forecast was made at the launch, `forecast`
    holds it and `against` compares it with the run. They are None for a job that is not done or measured too little.
    """

    job: str = ""
    state: JobState
    reason: str
    machines: int = 1
    attempts: int
    setup: dict[str, dict[str, float]] = field(default_factory=dict)
    timeline: list[AttemptRow] = field(default_factory=list)
    dollars: float = 0.0
    backend: str = ""
    did_not_answer: list[str] = field(default_factory=list)
    is_input_wrong: bool = False
    ids_wrong: list[str] | None = None
    constants: Constants | None = None
    forecast: Forecast | None = None
    against: tuple[TermComparison, ...] | None = None

    def start_seconds(self) -> StartSeconds:
        """Return the seconds of the start of the slowest machine, without what is done once for a data set."""
        starts = [
            {step: seconds for step, seconds in steps.items() if step not in ONE_TIME_STEPS}
            for steps in self.setup.values()
        ]
        slowest = max(starts, key=lambda steps: sum(steps.values()), default={})
        steps_of_setup = list(SetupStep)[: list(SetupStep).index(SetupStep.OTHERS)]
        setup_seconds = sum(slowest.get(step, 0.0) for step in steps_of_setup)
        return StartSeconds(setup=setup_seconds, trainers=sum(slowest.values()) - setup_seconds)
