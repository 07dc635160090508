"""The schedule of a recipe: how many steps, how many images in each, at which learning rate. A pure function.

A schedule depends on (recipe, training images, GPUs) only. It is computed for a number of GPUs, whatever number of
processes carries it out. One step takes `global_batch` images as `gpus` chunks of `batch` images each. A chunk is what
one GPU sees at once, so batch-norm statistics are the same on any number of processes (Goyal et al. 2017, section 2.3).
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise

from .schema import REFERENCE_BATCH, Phase, Recipe

ONE_CYCLE_PEAK = 0.3  # part of the steps before the peak: the default of torch's OneCycleLR
POLYNOMIAL_POWER = 2  # You et al. 2017 (LARS), and MLPerf's reference
# With fewer steps per epoch, a step takes too large a part of the data set for the linear rule. In Goyal et al. 2017,
# figure 3, the rule holds up to 8,192 of ImageNet's images a step (156 steps an epoch); at 65,536 (20 steps) the error
# rises from 23.6 to 34.0 %. Smith et al. 2018 derive it for batches much smaller than the data set. Where it fails
# between the two depends on network and data (Shallue et al. 2018), so nothing is changed: the user is warned.
MIN_STEPS_PER_EPOCH = 20
SCALING_RULE_NAMES = {"linear": "linear scaling rule", "sqrt": "square-root scaling rule", "none": "recipe"}


def scaled_image_count(images: int, scale: float) -> int:
    """Return how many images a rehearsal with `--scale` takes of a data set. `data.order.subset` takes as many."""
    return max(1, math.ceil(images * scale))


@dataclass(frozen=True)
class ScheduledPhase:
    """A phase of the recipe on a given number of GPUs: its learning rates times `lr_factor`, and its number of steps.

    A phase whose image size grows has several: a `ScheduledPhase` for each `size`, with the `epochs` of that size.
    """

    phase: Phase
    gpus: int
    lr_factor: float
    steps_per_epoch: int
    epochs: tuple[int, int]
    size: int

    @property
    def global_batch(self) -> int:
        """Images per step, on all GPUs together."""
        return self.phase.batch * self.gpus

    @property
    def steps(self) -> int:
        """Steps of these epochs."""
        return self.steps_per_epoch * (self.epochs[1] - self.epochs[0])

    @property
    def first_step(self) -> int:
        """The number of steps of the phase before this part of it, at its smaller image sizes."""
        return self.steps_per_epoch * (self.epochs[0] - self.phase.epochs[0])

    @property
    def steps_of_phase(self) -> int:
        """Steps of the phase with all its sizes. The learning rate has one course over all of them."""
        return self.steps_per_epoch * (self.phase.epochs[1] - self.phase.epochs[0])

    @property
    def scaled_lr_endpoints(self) -> tuple[float, float]:
        """The learning rates of the first and last step of these epochs."""
        return self.lr_at(self.first_step), self.lr_at(self.first_step + self.steps - 1)

    @property
    def lr_endpoints_per_256(self) -> tuple[float, float]:
        """The learning rates of the first and last step of these epochs, per 256 images of the global batch."""
        first, last = self.scaled_lr_endpoints
        return first * REFERENCE_BATCH / self.global_batch, last * REFERENCE_BATCH / self.global_batch

    @property
    def peak_lr(self) -> float:
        """The highest learning rate of these epochs: at one of their ends, or the peak of a cycle."""
        peak_step = ONE_CYCLE_PEAK * (self.steps_of_phase - 1)
        if self.phase.shape == "one_cycle" and self.first_step <= peak_step < self.first_step + self.steps:
            return max(*self.scaled_lr_endpoints, self.phase.lr_endpoints[1] * self.lr_factor)
        return max(self.scaled_lr_endpoints)

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from the start of the phase with all its sizes.

        The first step has the first learning rate that is stated, a single one too, and the last step the last one.
        """
        first, last = (lr * self.lr_factor for lr in self.phase.lr_endpoints)
        done = step / (self.steps_of_phase - 1) if self.steps_of_phase > 1 else 0.0
        # Goyal et al. 2017, section 2.2: warm-up starts at the learning rate of 256 images, and there is none below.
        k = max(1.0, self.global_batch / REFERENCE_BATCH)
        match self.phase.shape:
            case "cosine":
                return last + (first - last) * (1 + math.cos(math.pi * done)) / 2
            case "polynomial":
                return last + (first - last) * (1 - done) ** POLYNOMIAL_POWER
            case "one_cycle":
                return one_cycle_lr(last, done)
            case "gradual_warmup":
                return last / k + (last - last / k) * done
            case "constant_warmup":
                return last / k
        return first if first == last else first * (1 - done) + last * done  # a constant rate, to the last bit


@dataclass(frozen=True, kw_only=True)
class PhaseRow:
    """A scheduled phase as plans, results and reports show it: epochs `start` to `end`, counted from 0, `end` excluded.

    `steps` are those that are run, `lr` the rates at the ends (`lr_per_256`: per 256 images), `peak` the highest one.
    """

    start: int
    end: int
    size: int
    batch: int
    global_batch: int
    lr: tuple[float, float]
    lr_per_256: tuple[float, float]
    peak: float
    shape: str
    steps: int
    copy: int | None
    min_scale: float
    augment: bool | str
    rect_train: bool
    rect_val: bool
    validate: str


@dataclass(frozen=True)
class Epoch:
    """One pass over the training images, or the part of it that a shortened run makes.

    `number` counts from 0 over the recipe, also where a shortened run leaves epochs out; `first_step` counts from 0
    over the run; `steps` are those that are run; `dataset_size` is the number of training images.
    """

    number: int
    scheduled_phase: ScheduledPhase
    steps: int
    first_step: int
    dataset_size: int

    def images_in_step(self, step: int) -> int:
        """Return how many images all GPUs take together in a step: the global batch, or what the epoch has left."""
        return min(self.scheduled_phase.global_batch, self.dataset_size - step * self.scheduled_phase.global_batch)

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from the start of the epoch."""
        return self.scheduled_phase.lr_at(
            (self.number - self.scheduled_phase.phase.epochs[0]) * self.scheduled_phase.steps_per_epoch + step
        )


@dataclass(frozen=True)
class Schedule:
    """All steps of a run over `images` training images on `gpus` GPUs.

    `max_steps` shortens the run. The steps are shared out over the phases in proportion to their length, at least one
    step each, so that a short rehearsal still meets every phase. Raises `ValueError` for fewer steps than phases.
    """

    recipe: Recipe
    images: int
    gpus: int
    max_steps: int | None = None

    def __post_init__(self) -> None:
        if self.images < 1 or self.gpus < 1:
            raise ValueError("a schedule needs at least one image and one GPU")
        count = len(self.scheduled_phases)
        if self.max_steps is not None and self.max_steps < count:
            sizes_note = "" if count == len(self.recipe.phases) else " (each size of a phase counts)"
            raise ValueError(
                f"--max-steps {self.max_steps} is too few; the recipe has {count} phases{sizes_note}, "
                "and each makes at least one step"
            )

    @property
    def lr_factor(self) -> float:
        """The factor on the stated learning rates by the recipe's scaling rule (`Optim.scaling`): k, its root, or 1."""
        k = self.gpus / self.recipe.nominal_gpus
        return {"linear": k, "sqrt": math.sqrt(k), "none": 1.0}[self.recipe.optim.scaling]

    @property
    def ema_decay(self) -> float | None:
        """The recipe's decay of averaged weights to the power k if learning rates are scaled; None without average.

        Busbridge et al. 2023 ("How to scale your EMA"), definition 1.2: a step of k times the images counts as k steps.
        """
        optim = self.recipe.optim
        if optim.ema is None or optim.scaling == "none":
            return optim.ema
        return float(optim.ema ** (self.gpus / self.recipe.nominal_gpus))

    @property
    def scaling_note(self) -> str:
        """One line on how batch and learning rate differ from the recipe's; empty on the nominal number of GPUs."""
        nominal = self.recipe.nominal_gpus
        if self.gpus == nominal:
            return ""
        rule = SCALING_RULE_NAMES[self.recipe.optim.scaling]
        processes = "1 process" if self.gpus == 1 else f"{self.gpus} processes"
        return (
            f"learning rates are stated for {nominal} GPU{'s' * (nominal > 1)}; on {processes} the global batch is "
            f"multiplied by {self.gpus / nominal:g} and, by the {rule}, the learning rate by {self.lr_factor:g}; "
            "--keep-batch keeps both"
        )

    @property
    def small_set_note(self) -> str:
        """One line if more than the nominal GPUs leave fewer than `MIN_STEPS_PER_EPOCH` steps an epoch; else empty.

        Recipes on their nominal number of GPUs are taken as they are: batches and learning rates were chosen together.
        """
        factor = self.gpus / self.recipe.nominal_gpus
        shortest = min(self.scheduled_phases, key=lambda phase: phase.steps_per_epoch)
        if factor <= 1 or shortest.steps_per_epoch >= MIN_STEPS_PER_EPOCH:
            return ""
        epochs = "epochs {}-{}".format(*shortest.epochs)
        return (
            f"few steps: with the batch multiplied by {factor:g}, {epochs} have {shortest.steps_per_epoch} steps each, "
            f"and below {MIN_STEPS_PER_EPOCH} the accuracy is likely to fall; --keep-batch keeps the recipe's batch "
            f"and learning rate, on {self.recipe.nominal_gpus} of the {self.gpus} processes; to use all, lower `batch` "
            "in the recipe"
        )

    @cached_property
    def scheduled_phases(self) -> tuple[ScheduledPhase, ...]:
        """The phases in order. A phase whose image size grows is divided: an entry for each size."""
        return tuple(
            ScheduledPhase(
                phase, self.gpus, self.lr_factor, math.ceil(self.images / (phase.batch * self.gpus)), epochs, size
            )
            for phase in self.recipe.phases
            for size, epochs in epochs_by_size(phase)
        )

    @cached_property
    def epochs(self) -> tuple[Epoch, ...]:
        """The epochs that are run, in order. A shortened run leaves out epochs of which it makes no step."""
        epochs: list[Epoch] = []
        first_step = 0
        for phase, steps_left in zip(self.scheduled_phases, self._steps_per_phase(), strict=True):
            for number in range(*phase.epochs):
                steps = min(phase.steps_per_epoch, steps_left)
                steps_left -= steps
                if steps:
                    epochs.append(Epoch(number, phase, steps, first_step, self.images))
                    first_step += steps
        return tuple(epochs)

    def _steps_per_phase(self) -> list[int]:
        full = [phase.steps for phase in self.scheduled_phases]
        total = sum(full)
        if self.max_steps is None or self.max_steps >= total:
            return full
        steps = [max(1, self.max_steps * count // total) for count in full]
        while sum(steps) > self.max_steps:  # phases were raised to one step: take it from the longest phase
            steps[steps.index(max(steps))] -= 1
        while sum(steps) < self.max_steps:  # rounding down left steps over: they go where most steps are missing
            missing = [wanted - count for wanted, count in zip(full, steps, strict=True)]
            steps[missing.index(max(missing))] += 1
        return steps

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self.epochs[-1].first_step + self.epochs[-1].steps

    def steps_at(self, epoch: int, step: int) -> int:
        """Return the steps done after `epoch` complete epochs and `step` steps of the next."""
        return self.epochs[epoch].first_step + step if epoch < len(self.epochs) else self.steps

    def images_at(self, epoch: int, step: int) -> int:
        """Return the training images seen after `epoch` complete epochs and `step` steps of the next."""
        steps_done = [(complete, complete.steps) for complete in self.epochs[:epoch]]
        steps_done += [(current, step) for current in self.epochs[epoch : epoch + 1]]
        return sum(min(steps * each.scheduled_phase.global_batch, self.images) for each, steps in steps_done)

    def table(self) -> list[PhaseRow]:
        """Return a row for each scheduled phase, for plans, results and reports."""
        steps_run = {phase.epochs: 0 for phase in self.scheduled_phases}
        for epoch in self.epochs:
            steps_run[epoch.scheduled_phase.epochs] += epoch.steps
        return [
            PhaseRow(
                start=row.epochs[0],
                end=row.epochs[1],
                size=row.size,
                batch=row.phase.batch,
                global_batch=row.global_batch,
                lr=row.scaled_lr_endpoints,
                lr_per_256=row.lr_endpoints_per_256,
                peak=row.peak_lr,
                shape=row.phase.shape,
                steps=steps_run[row.epochs],
                copy=row.phase.copy,
                min_scale=row.phase.min_scale,
                augment=row.phase.augment,
                rect_train=row.phase.rect_train,
                rect_val=row.phase.rect_val,
                validate=row.phase.validate,
            )
            for row in self.scheduled_phases
        ]


def with_more_epochs(schedule: Schedule, count: int, lr: float | None = None) -> Recipe:
    """Return the recipe of a schedule with a further phase of `count` epochs, which trains as the last one does.

    Its learning rate is constant: `lr`, stated as those of the recipe are, or else that of the schedule's last step. A
    longer last phase would change the steps before, of which a cosine is stretched, so it stays as it is.
    """
    recipe, last = schedule.recipe, schedule.scheduled_phases[-1]
    last_lr = replace(last, lr_factor=1.0).lr_at(last.steps_of_phase - 1)
    added = replace(
        last.phase,
        epochs=(recipe.epochs, recipe.epochs + count),
        size=last.size,
        lr=last_lr if lr is None else lr,
        shape="linear",
    )
    return replace(recipe, phases=(*recipe.phases, added), tables={})


def epochs_by_size(phase: Phase) -> list[tuple[int, tuple[int, int]]]:
    """Return the image sizes of a phase in order, each with its epochs (start, end)."""
    if isinstance(phase.size, int):
        return [(phase.size, phase.epochs)]
    groups = groupby(range(*phase.epochs), key=phase.size_in_epoch)
    epochs_of_sizes = [(size, list(epochs)) for size, epochs in groups]
    return [(size, (epochs[0], epochs[-1] + 1)) for size, epochs in epochs_of_sizes]


def one_cycle_lr(peak_lr: float, progress: float) -> float:
    """Return the learning rate of a one-cycle schedule after a fraction `progress` of its steps.

    From peak / 25 to the peak at 3/10, then to peak / 250,000, by half cosines (Smith and Topin 2017; torch's numbers).
    """
    first_lr, last_lr, peak_at = peak_lr / 25, peak_lr / 25 / 1e4, ONE_CYCLE_PEAK
    if progress < peak_at:
        start, end, part = first_lr, peak_lr, progress / peak_at
    else:
        start, end, part = peak_lr, last_lr, (progress - peak_at) / (1 - peak_at)
    return end + (start - end) * (1 + math.cos(math.pi * part)) / 2


def split_step(image_count: int, max_chunk: int) -> list[slice]:
    """Split the images of a step into the fewest chunks of at most `max_chunk` images; sizes differ by one at most.

    A step that is not full thus has fewer chunks of nearly full size, not many small ones: batch norm sees one chunk.
    """
    count = math.ceil(image_count / max_chunk)
    edges = [image_count * i // count for i in range(count + 1)]
    return [slice(start, stop) for start, stop in pairwise(edges)]
