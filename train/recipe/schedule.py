"""From a recipe to steps: how many, how large, at which rate. A pure function of (recipe, images, GPUs).

The schedule is computed for a number of GPUs, whatever number of processes carries it out. One step takes
`global_batch` images as `gpus` chunks of `batch` each; a chunk is what one GPU sees at once, so that batch-norm
statistics are the same on any number of processes (Goyal et al. 2017, section 2.3: per-worker BN, size n unchanged).
"""

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from .schema import REFERENCE_BATCH, Phase, Recipe

POLYNOMIAL_POWER = 2  # You et al. 2017 (LARS) and MLPerf's reference
SCALING_RULE_NAMES = {"linear": "linear rule", "sqrt": "square-root rule", "none": "recipe"}


def scaled_image_count(images: int, scale: float) -> int:
    """Return how many of so many images a rehearsal takes, as `data.order.subset` does."""
    return max(1, math.ceil(images * scale))


@dataclass(frozen=True)
class ScheduledPhase:
    """A phase as it will be run: `gpus` chunks a step, rates after the recipe's rule, counts of steps."""

    phase: Phase
    gpus: int
    lr_factor: float
    steps_per_epoch: int

    @property
    def global_batch(self) -> int:
        """Images per step."""
        return self.phase.batch * self.gpus

    @property
    def steps(self) -> int:
        """Steps of the whole phase."""
        return self.steps_per_epoch * (self.phase.epochs[1] - self.phase.epochs[0])

    @property
    def scaled_lr_endpoints(self) -> tuple[float, float]:
        """The rates of the phase's first and last step."""
        return self.lr_at(0), self.lr_at(self.steps - 1)

    @property
    def peak_lr(self) -> float:
        """The phase's highest rate: of one of its ends, or the one that a cycle leads to."""
        return max(
            *self.scaled_lr_endpoints,
            self.phase.lr_endpoints[1] * self.lr_factor if self.phase.shape == "one_cycle" else 0.0,
        )

    def lr_at(self, step: int) -> float:
        """The rate of one step, counted from the phase's start. The first step has the stated first rate, the last the
        stated last one; a phase of a single step has the first.
        """
        first, last = (rate * self.lr_factor for rate in self.phase.lr_endpoints)
        done = step / (self.steps - 1) if self.steps > 1 else 0.0
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
        return first * (1 - done) + last * done


@dataclass(frozen=True)
class Epoch:
    """One pass over `of` images, or the part of it that a shortened run makes. `first_step` counts over the run."""

    number: int
    scheduled_phase: ScheduledPhase
    steps: int
    first_step: int
    dataset_size: int

    def images_in_step(self, step: int) -> int:
        """How many images all GPUs take together in a step: the global batch, or what is left."""
        return min(self.scheduled_phase.global_batch, self.dataset_size - step * self.scheduled_phase.global_batch)

    def lr_at(self, step: int) -> float:
        """The rate of the epoch's step-th step."""
        return self.scheduled_phase.lr_at(
            (self.number - self.scheduled_phase.phase.epochs[0]) * self.scheduled_phase.steps_per_epoch + step
        )


@dataclass(frozen=True)
class Schedule:
    """All steps of a run over `images` training images on `gpus` GPUs, at most `max_steps` of them if that is given.

    `max_steps` is shared out over the phases by their length, at least one step each, so that a short rehearsal still
    meets every phase; raises `ValueError` when it is smaller than the number of phases.
    """

    recipe: Recipe
    images: int
    gpus: int
    max_steps: int | None = None

    def __post_init__(self) -> None:
        if self.images < 1 or self.gpus < 1:
            raise ValueError("a schedule needs at least one image and one GPU")
        if self.max_steps is not None and self.max_steps < len(self.recipe.phases):
            raise ValueError(
                f"max_steps: {self.max_steps} is too few; the recipe has {len(self.recipe.phases)} phases, "
                "and each makes at least one step"
            )

    @property
    def lr_factor(self) -> float:
        """What the recipe's rule multiplies the stated rates with: k, its root, or 1 (`Optim.scaling`)."""
        k = self.gpus / self.recipe.nominal_gpus
        return {"linear": k, "sqrt": math.sqrt(k), "none": 1.0}[self.recipe.optim.scaling]

    @property
    def scaling_note(self) -> str:
        """One line that says what the linear rule changed; empty when the GPUs are the nominal ones."""
        if self.gpus == self.recipe.nominal_gpus:
            return ""
        stated = f"{self.recipe.nominal_gpus} GPU{'s' * (self.recipe.nominal_gpus > 1)}"
        return (
            f"rates are stated for {stated}; on {self.gpus} the global batch is multiplied by "
            f"{self.gpus / self.recipe.nominal_gpus:g} and, by the {SCALING_RULE_NAMES[self.recipe.optim.scaling]}, the rate by "
            f"{self.lr_factor:g}"
        )

    @cached_property
    def scheduled_phases(self) -> tuple[ScheduledPhase, ...]:
        """The phases, in order."""
        return tuple(
            ScheduledPhase(
                phase,
                self.gpus,
                self.lr_factor,
                math.ceil(self.images / (phase.batch * self.gpus)),
            )
            for phase in self.recipe.phases
        )

    @cached_property
    def epochs(self) -> tuple[Epoch, ...]:
        """The epochs that are run, in order."""
        found: list[Epoch] = []
        for row, allowed in zip(self.scheduled_phases, self._steps_per_phase(), strict=True):
            for number in range(*row.phase.epochs):
                steps = min(row.steps_per_epoch, allowed)
                allowed -= steps
                if steps:
                    first = found[-1].first_step + found[-1].steps if found else 0
                    found.append(Epoch(number, row, steps, first, self.images))
        return tuple(found)

    def _steps_per_phase(self) -> list[int]:
        """How many steps each phase may make."""
        counts = [row.steps for row in self.scheduled_phases]
        total = sum(counts)
        if self.max_steps is None or self.max_steps >= total:
            return counts
        allowed = [max(1, self.max_steps * count // total) for count in counts]
        while sum(allowed) > self.max_steps:  # the ones that were raised to 1 are paid for by the longest
            allowed[allowed.index(max(allowed))] -= 1
        while sum(allowed) < self.max_steps:  # what rounding down left over goes where most is missing
            missing = [count - have for count, have in zip(counts, allowed, strict=True)]
            allowed[missing.index(max(missing))] += 1
        return allowed

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self.epochs[-1].first_step + self.epochs[-1].steps

    def steps_at(self, epoch: int, step: int) -> int:
        """Steps done when `epoch` epochs are complete and `step` steps of the next."""
        return self.epochs[epoch].first_step + step if epoch < len(self.epochs) else self.steps

    def images_at(self, epoch: int, step: int) -> int:
        """Images seen when `epoch` epochs are complete and `step` steps of the next."""
        done = [(one, one.steps) for one in self.epochs[:epoch]] + [
            (one, step) for one in self.epochs[epoch : epoch + 1]
        ]
        return sum(min(steps * one.scheduled_phase.global_batch, self.images) for one, steps in done)

    def table(self) -> list[dict[str, Any]]:
        """The rows as plain data; `steps` are those that are run, `lr` the rates of a whole phase's ends."""
        run = {row.phase.epochs: 0 for row in self.scheduled_phases}
        for epoch in self.epochs:
            run[epoch.scheduled_phase.phase.epochs] += epoch.steps
        return [
            {
                "start": row.phase.epochs[0],
                "end": row.phase.epochs[1],
                "size": row.phase.size,
                "batch": row.phase.batch,
                "global_batch": row.global_batch,
                "lr": list(row.scaled_lr_endpoints),
                "lr_per_256": [rate * REFERENCE_BATCH / row.global_batch for rate in row.scaled_lr_endpoints],
                "peak": row.peak_lr,
                "shape": row.phase.shape,
                "steps": run[row.phase.epochs],
                "copy": row.phase.copy,
                "min_scale": row.phase.min_scale,
                "augment": row.phase.augment,
                "rect_train": row.phase.rect_train,
                "rect_val": row.phase.rect_val,
                "validate": row.phase.validate,
            }
            for row in self.scheduled_phases
        ]


def one_cycle_lr(peak_lr: float, progress: float) -> float:
    """The rate when a part `done` of one cycle is behind us: from peak / 25 to the peak at 3 tenths, then to
    peak / 250,000, each by half a cosine (Smith and Topin 2017, with the constants of torch's OneCycleLR).
    """
    first, last, top = peak_lr / 25, peak_lr / 25 / 1e4, 0.3
    start, end, part = (
        (first, peak_lr, progress / top) if progress < top else (peak_lr, last, (progress - top) / (1 - top))
    )
    return end + (start - end) * (1 + math.cos(math.pi * part)) / 2


def split_step(image_count: int, max_chunk: int) -> list[slice]:
    """Cut a step of `length` images into chunks of at most `batch`, as equal as they can be.

    A last step that is not full is cut into fewer chunks of nearly the full size, not into as many small ones: the
    chunk is what batch norm sees.
    """
    count = math.ceil(image_count / max_chunk)
    edges = [image_count * i // count for i in range(count + 1)]
    return [slice(a, b) for a, b in pairwise(edges)]
