"""What a job has run, from its run folder, for the benchmark records.

It only reads, and asks no machine. Only epochs and steps that count are included: steps that an attempt made beyond the
checkpoint from which the next attempt resumed are left out. The rows of the epochs come from the metrics, or from the
trainers' own history where a machine was lost together with its last lines.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from pathlib import Path

from cluster.backends import machine_types
from cluster.backends.base import BilledBackend
from cluster.errors import ClusterError
from cluster.jobs.job import Job
from cluster.state import attempts, timeline
from cluster.state.result import first_launch_time
from infra.costs import JobCost
from train.metrics.records import EpochRow, RowT, StartRow, StepRow, check_metrics_file, read_metrics_file
from train.metrics.step_search import first_and_last_step, last_step_until
from train.recipe.history import EpochResult
from train.recipe.schema import Recipe
from train.recipe.target import CLOCK_JUMPED, TargetOutcome
from train.tools.agent_protocol import metrics_file, metrics_files

AttemptsByNumber = Mapping[int, attempts.Attempt]


@dataclass(frozen=True, kw_only=True)
class RunEpoch(EpochResult):
    """An epoch that has ended, with what the metrics tell beyond its result.

    `step` is that of the run at the end of the epoch, `attempt` the one in which it ended, `first_lr` and `last_lr` the
    measured learning rates of its first and last step. Unix times: `began_at`, `trained_at` (after its last step) and
    `noted_at` (when its line was written). What is not known is None.
    """

    step: int
    attempt: int | None
    first_lr: float | None
    last_lr: float | None
    began_at: float | None
    trained_at: float | None
    noted_at: float | None


@dataclass(frozen=True, kw_only=True)
class RunAttempt(timeline.AttemptRow):
    """An attempt: its processes, and the seconds of the clock that it cost to resume. None where no metrics tell."""

    processes: int | None
    seconds_lost: float | None


@dataclass(frozen=True, kw_only=True)
class RunMachine:
    """A machine until the end of the run. Of a machine that is not rented, only the name is known.

    `price` is in dollars an hour; `dollars` are of the machine alone, `total_dollars` with its disk and address.
    """

    name: str
    type: str | None = None
    market: str | None = None
    zone: str | None = None
    price: float | None = None
    seconds: float | None = None
    dollars: float | None = None
    total_dollars: float | None = None


@dataclass(frozen=True, kw_only=True)
class RunData:
    """A run as a record describes it. What is not known is None. Names that end in `_at` are Unix times.

    `at_work` are the names of the machines of the last attempt; `billed` is in dollars.
    """

    job: str
    uid: str
    state: str
    backend: str
    is_rented: bool
    recipe: Recipe
    gpus: int
    max_steps: int | None
    scale: float
    commit: str | None
    launched_at: float
    attempt_began_at: float
    loading_began_at: float
    train_images: int
    val_images: int
    device: str
    processor: str | None
    precision: str
    versions: dict[str, str]
    target: TargetOutcome | None
    epochs: tuple[RunEpoch, ...]
    attempts: tuple[RunAttempt, ...]
    machines: tuple[RunMachine, ...]
    gpus_by_type: dict[str, str]
    at_work: tuple[str, ...]
    billed: float | None

    @property
    def validated_epochs(self) -> list[RunEpoch]:
        """The epochs that have accuracies."""
        return [epoch for epoch in self.epochs if epoch.top1 is not None]

    @property
    def seconds_to_first_step(self) -> float | None:
        """The seconds from the start of loading to the first step."""
        first_step_at = next((epoch.began_at for epoch in self.epochs if epoch.began_at is not None), None)
        return None if first_step_at is None else first_step_at - self.loading_began_at

    @property
    def cost_per_hour(self) -> float | None:
        """The dollars an hour of the machines at work, None where a price is not known."""
        price_by_name = {machine.name: machine.price for machine in self.machines}
        prices = [price_by_name.get(name) for name in self.at_work]
        known_prices = [price for price in prices if price is not None]
        return sum(known_prices) if known_prices and len(known_prices) == len(prices) else None

    @property
    def has_succeeded(self) -> bool:
        """Whether the run reached its target or, without a target, ran to its end."""
        return self.target.reached if self.target else self.state == "done"


def collect_run_data(job: Job) -> RunData:
    """Return what a job has run.

    Raises `ClusterError` when the job has not ended, when no epoch was validated, or when the version that trained it
    was too old, and `DamagedRecord` for a damaged line of the metrics.
    """
    if not job.has_ended:
        raise ClusterError(f"{job.name} is {job.state}; a record can only be made of a job that has ended")
    spec = job.spec
    result = job.result
    assert result  # the job has ended
    for path in metrics_files(job.path):
        check_metrics_file(path)  # a record must not leave out what cannot be read
    attempts_by_number = {attempt.number: attempt for attempt in job.run_folder.attempts.all() if attempt.members}
    start_rows = list(effective_metrics(job, attempts_by_number, StartRow))
    epochs = epoch_rows(
        list(effective_metrics(job, attempts_by_number, EpochRow)),
        effective_metrics(job, attempts_by_number, StepRow),
        result.epochs,
    )
    if not any(epoch.top1 is not None for epoch in epochs):
        status = job.status()
        reason = f": {status.reason}" if status.reason else ""
        raise ClusterError(
            f"{job.name} has validated no epoch, so there is nothing to record; it is {status.state}{reason}"
        )
    if not start_rows:
        raise ClusterError(f"{job.name} was trained by an older version, which did not note when loading began")
    if any(epoch.clock is None for epoch in epochs):
        raise ClusterError(
            f"{job.name} cannot be recorded: {CLOCK_JUMPED} between two of its attempts, so its time is not known; "
            "run it again"
        )
    first_start, last_start = start_rows[0], start_rows[-1]
    first_attempt = attempts_by_number.get(first_start.attempt)  # in which trainers began for the first time
    cost = job.backend.job_cost() if isinstance(job.backend, BilledBackend) else None
    machines = run_machines(job, cost, epochs[-1].at or math.inf)
    types = {machine.type for machine in machines if machine.type}
    return RunData(
        job=job.name,
        uid=spec.uid,
        state=job.state,
        backend=spec.backend,
        is_rented=cost is not None,
        recipe=spec.recipe,
        gpus=last_start.gpus,
        max_steps=spec.train.max_steps,
        scale=spec.train.scale,
        commit=spec.git_commit,
        launched_at=first_launch_time(job.run),
        attempt_began_at=(first_attempt and first_attempt.time) or first_start.begun,
        loading_began_at=first_start.begun,
        train_images=last_start.train_images,
        val_images=last_start.val_images,
        device=last_start.device,
        processor=last_start.processor or None,
        precision=last_start.precision,
        versions=last_start.versions,
        target=result.target,
        epochs=epochs,
        attempts=run_attempts(job, start_rows, attempts_by_number),
        machines=machines,
        gpus_by_type={type_name: describe_gpus(type_name) for type_name in sorted(types)},
        at_work=attempts_by_number[max(attempts_by_number)].machine_names if attempts_by_number else (),
        billed=None if cost is None or cost.unknown else cost.dollars,
    )


def effective_metrics(job: Job, attempts_by_number: AttemptsByNumber, row_type: type[RowT]) -> Iterator[RowT]:
    """Yield the rows of the metrics that count, in order: none beyond the step from which a later attempt resumed."""
    last_steps = last_effective_steps(job, attempts_by_number)
    for path in metrics_files(job.path):
        for row in read_metrics_file(path, row_type):
            if isinstance(row, StartRow) or row.step <= last_steps[int(path.stem)]:
                yield row


def last_effective_steps(job: Job, attempts_by_number: AttemptsByNumber) -> dict[int, float]:
    """Return the last step that counts of each attempt with metrics or members: later attempts repeat those after it.

    It is infinity where there are none.
    """
    last_steps: dict[int, float] = {}
    last_step = math.inf
    for number in sorted({*map(_attempt_number, metrics_files(job.path)), *attempts_by_number}, reverse=True):
        last_steps[number] = last_step
        if number in attempts_by_number:
            last_step = min(last_step, attempts_by_number[number].first_step)
    return last_steps


def _attempt_number(path: Path) -> int:
    return int(path.stem)


def epoch_rows(
    epoch_metrics: Sequence[EpochRow], step_metrics: Iterable[StepRow], result_epochs: Sequence[EpochResult]
) -> tuple[RunEpoch, ...]:
    """Return a row for each epoch that has ended. Of the steps, which may be millions, few are kept."""
    # Of two lines about the same epoch, the one of the later attempt counts; of an epoch without a line, its result.
    line_by_epoch = {row.epoch: row for row in epoch_metrics}
    result_by_epoch = {row.epoch: row for row in result_epochs} | line_by_epoch
    epoch_ends = list(accumulate((result.steps for _, result in sorted(result_by_epoch.items())), initial=0))
    wanted_steps = {step for end in epoch_ends for step in (end, end + 1)}
    training_row_by_step = {row.step: row for row in step_metrics if row.step in wanted_steps}
    epochs: list[RunEpoch] = []
    steps_done = 0
    for number, result in sorted(result_by_epoch.items()):
        line = line_by_epoch.get(number)
        first_step = training_row_by_step.get(steps_done + 1)
        steps_done += result.steps
        last_step = training_row_by_step.get(steps_done)
        # The first line is written after the first step, so the epoch began one step's time before.
        images_per_second = first_step.scalars.get("times/images_per_second") if first_step else None
        images_of_step = min(result.global_batch, result.train_images)
        epochs.append(
            RunEpoch(
                **{field.name: getattr(result, field.name) for field in fields(EpochResult)},
                step=steps_done,
                attempt=line.attempt if line else None,
                first_lr=first_step.scalars.get("sizes/lr") if first_step else None,
                last_lr=last_step.scalars.get("sizes/lr") if last_step else None,
                began_at=first_step.time - images_of_step / images_per_second
                if first_step and images_per_second
                else None,
                trained_at=last_step.time if last_step else None,
                noted_at=line.time if line else None,
            )
        )
    return tuple(epochs)


def run_attempts(
    job: Job, start_rows: Sequence[StartRow], attempts_by_number: AttemptsByNumber
) -> tuple[RunAttempt, ...]:
    """Return the attempts that had machines.

    The seconds that an attempt after the first cost are those of the wall clock from the checkpoint that it loaded
    until its own first step was done.
    """
    processes = {row.attempt: row.world for row in start_rows}
    last_steps = last_effective_steps(job, attempts_by_number)
    paths = {_attempt_number(path): path for path in metrics_files(job.path)}
    numbers = sorted(paths)
    run_attempts: list[RunAttempt] = []
    for row in timeline.attempt_rows(job.run_folder):
        if row.machines:
            earlier_steps = (
                last_step_until(paths[number], int(min(row.first_step, last_steps[number])))
                for number in reversed(numbers[: bisect_left(numbers, row.attempt)])
            )
            loaded = next(filter(None, earlier_steps), None)
            checkpoint_time = loaded.time if loaded else start_rows[0].begun
            own_steps = first_and_last_step(metrics_file(job.path, row.attempt))
            seconds_lost = None
            if run_attempts and own_steps and own_steps.first.step <= last_steps[row.attempt]:
                seconds_lost = own_steps.first.time - checkpoint_time
            run_attempts.append(
                RunAttempt(**vars(row), processes=processes.get(row.attempt), seconds_lost=seconds_lost)
            )
    return tuple(run_attempts)


def run_machines(job: Job, cost: JobCost | None, end_time: float) -> tuple[RunMachine, ...]:
    """Return the machines that were launched until `end_time`."""
    if cost is None:
        # Names only: the addresses of somebody's own machines do not belong in a public record.
        return tuple(RunMachine(name=name) for name in job.spec.machine_names)
    return tuple(
        RunMachine(
            name=machine.name,
            type=machine.type,
            market=machine.market,
            zone=machine.zone,
            price=machine.price,
            seconds=machine.seconds,
            dollars=machine.dollars,
            total_dollars=machine.total_dollars,
        )
        for machine in cost.machines
        if machine.launched <= end_time
    )


def describe_gpus(type_name: str) -> str:
    """Return the GPUs of a machine type, such as "8 x A100"; empty when it has none, or is not known."""
    machine_type = machine_types.find_machine_type(type_name)
    return f"{machine_type.gpus} x {machine_type.gpu}" if machine_type and machine_type.gpu != "CPU" else ""
