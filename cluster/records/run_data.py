"""What a job has run, from its run folder, for the benchmark records. It only reads, and asks no machine."""

from dataclasses import dataclass

from cluster.errors import ClusterError
from cluster.jobs import checkpoints
from cluster.jobs.job import Job
from cluster.state.result import first_launch_time
from cluster.state.states import JobState
from cluster.state.timeline import AttemptRow
from infra.costs import MachineCost
from train.metrics.records import StartRow, read_metrics_file
from train.recipe.history import EpochResult
from train.recipe.schema import Recipe
from train.recipe.target import CLOCK_JUMPED, TargetOutcome
from train.tools.agent_protocol import metrics_files


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The data of a run that its records need. Unknown values are None.

    `starts` has a row for each attempt in which trainers began, `attempts` a row for each that had machines.
    `epoch_ends` are the seconds from the start of loading the images to the end of each epoch, `peak_lr` the highest
    learning rate of a step. Only of rented machines more than the name is known: `machines` is empty for others, and
    `billed` (dollars) None. `launched_at` is a Unix time.
    """

    job: str
    uid: str
    state: JobState
    backend: str
    is_rented: bool
    recipe: Recipe
    max_steps: int | None
    scale: float
    commit: str | None
    launched_at: float
    starts: tuple[StartRow, ...]
    epochs: tuple[EpochResult, ...]
    epoch_ends: tuple[float, ...]
    peak_lr: float | None
    target: TargetOutcome | None
    attempts: tuple[AttemptRow, ...]
    machines: tuple[MachineCost, ...]
    billed: float | None

    @property
    def loading_began_at(self) -> float:
        """When the first attempt began to load the images, as a Unix time."""
        return self.starts[0].begun

    @property
    def first_attempt_at(self) -> float:
        """When the machines agreed on the first attempt in which trainers began, as a Unix time."""
        times = [row.at for row in self.attempts if row.attempt == self.starts[0].attempt]
        return min([*times, self.loading_began_at])

    @property
    def validated_epochs(self) -> list[tuple[EpochResult, float]]:
        """The epochs that have accuracies, each with its end in seconds."""
        return [(epoch, end) for epoch, end in zip(self.epochs, self.epoch_ends, strict=True) if epoch.top1 is not None]

    @property
    def cost_per_hour(self) -> float | None:
        """The dollars an hour of the machines of the last attempt, None where a price is not known."""
        price_by_name = {machine.name: machine.price for machine in self.machines}
        names = self.attempts[-1].machines if self.attempts else ()
        prices = [price for name in names if (price := price_by_name.get(name)) is not None]
        return sum(prices) if prices and len(prices) == len(names) else None

    @property
    def has_succeeded(self) -> bool:
        """Whether the run reached its target or, without a target, ran to its end."""
        return self.target.reached if self.target else self.state == JobState.DONE


def collect_run_data(job: Job) -> RunData:
    """Return what a job has run.

    Raises `BadInput` for a job of a command, and `ClusterError` when the job has not ended, has validated no epoch, or
    lacks the times of its run.
    """
    checkpoints.require_recipe(job)
    result = job.result
    if result is None:
        raise ClusterError(f"{job.name} is {job.state.phrase}; a record can only be made of a job that has ended")
    if not any(epoch.top1 is not None for epoch in result.epochs):
        reason = f": {result.reason}" if result.reason else ""
        raise ClusterError(f"{job.name} has no validated epoch to record; it is {result.state}{reason}")
    epoch_ends = tuple(epoch.clock for epoch in result.epochs if epoch.clock is not None)
    if len(epoch_ends) < len(result.epochs):
        raise ClusterError(
            f"{job.name} cannot be recorded: {CLOCK_JUMPED} between two of its attempts, so its time is not known; "
            "run it again"
        )
    first_rows = (next(read_metrics_file(path, StartRow), None) for path in metrics_files(job.path))
    starts = tuple(row for row in first_rows if row)
    if not starts:
        raise ClusterError(f"{job.name} cannot be recorded: its metrics lack the time at which loading began")
    rates = (row.scalars.get("sizes/lr") for row in job.run_folder.steps())
    cost = job.backend.job_cost() if job.backend.is_billed else None
    spec = job.spec
    return RunData(
        job=job.name,
        uid=spec.uid,
        state=result.state,
        backend=spec.backend,
        is_rented=cost is not None,
        recipe=spec.recipe,
        max_steps=spec.train.max_steps,
        scale=spec.train.scale,
        commit=spec.git_commit,
        launched_at=first_launch_time(job.run),
        starts=starts,
        epochs=result.epochs,
        epoch_ends=epoch_ends,
        peak_lr=max((rate for rate in rates if rate is not None), default=None),
        target=result.target,
        attempts=tuple(row for row in result.timeline if row.machines),
        machines=cost.machines if cost else (),
        billed=None if cost is None or cost.unknown else cost.dollars,
    )
