"""The arithmetic: from a schedule and machines to seconds, epoch by epoch and term by term."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from train.recipe.components import Comm
from train.recipe.schedule import Epoch, Schedule
from train.recipe.schema import Phase
from train.recipe.validation_policy import should_validate

from . import hardware
from .constants import DEFAULT_CONSTANTS, Constants, seconds_for_size
from .hardware import (
    DEVICES,
    EFA_MIN_GBIT,
    EFA_NETWORK,
    MODEL_COSTS,
    NVLINK_GBIT,
    RECTANGLE_PIXEL_RATIO,
    TCP_NETWORK,
    DeviceSpec,
)

STEP_TERMS = ("compute", "all-reduce", "optimizer", "logging", "loader")  # the parts of a step
TERMS = (*STEP_TERMS, "validation", "fixed")


@dataclass(frozen=True)
class EpochCost:
    """Seconds of one epoch by term; `phase` is the number of its row in the recipe."""

    number: int
    phase_index: int
    term_seconds: dict[str, float]

    @property
    def total_seconds(self) -> float:
        """All parts together."""
        return sum(self.term_seconds.values())


@dataclass(frozen=True)
class Forecast:
    """What each epoch takes, and the start by part: "boot", "setup", "fetch", "trainers". `source` says by whose
    constants.
    """

    epochs: tuple[EpochCost, ...]
    startup_seconds: dict[str, float]
    schedule: Schedule
    source: str = ""

    @property
    def term_seconds(self) -> dict[str, float]:
        """Seconds by term, "start" among them."""
        return {**sum_by_term(one.term_seconds for one in self.epochs), "start": sum(self.startup_seconds.values())}

    @property
    def total_seconds(self) -> float:
        """All together."""
        return sum(self.term_seconds.values())

    @property
    def total_minutes(self) -> float:
        """All together."""
        return self.total_seconds / 60

    @property
    def training_seconds(self) -> float:
        """Seconds without what comes before the trainers' start: what records of others tell."""
        return self.total_seconds - sum(self.startup_seconds.values()) + self.startup_seconds.get("trainers", 0.0)

    @property
    def longest_term(self) -> str:
        """The part that takes longest."""
        return longest_term_of(self.term_seconds)

    def seconds_until(self, epochs: int | None) -> float:
        """Return the seconds until so many epochs are done, all of them for None."""
        return sum(self.startup_seconds.values()) + sum(one.total_seconds for one in self.epochs[:epochs])

    def phase_rows(self) -> list[dict[str, Any]]:
        """Return a row for each phase: epochs, size, batch, seconds, the term that takes longest, and all terms."""
        found = []
        for number, costs in groupby(self.epochs, key=lambda one: one.phase_index):
            some = list(costs)
            phase, parts = self.schedule.recipe.phases[number], sum_by_term(one.term_seconds for one in some)
            found.append({
                "start": some[0].number, "end": some[-1].number + 1, "size": phase.size, "batch": phase.batch,
                "copy": phase.copy, "seconds": sum(parts.values()), "most": longest_term_of(parts), "terms": parts,
            })  # fmt: skip
        return found

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data, seconds by term; minutes are of all."""
        return {
            "minutes": self.total_minutes, "terms": self.term_seconds, "phases": self.phase_rows(), "start": self.startup_seconds,
            "source": self.source,
        }  # fmt: skip


def sum_by_term(term_seconds: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the sums of each term."""
    total = dict.fromkeys(TERMS, 0.0)
    for one in term_seconds:
        total = {name: total[name] + one.get(name, 0.0) for name in total}
    return total


def longest_term_of(term_seconds: Mapping[str, float]) -> str:
    """Return the term that takes longest."""
    return max(term_seconds, key=lambda name: term_seconds[name])


@dataclass(frozen=True, kw_only=True)
class MachineSpec:
    """The machines of a forecast: `count` of `gpus` GPUs named `gpu` each, `gbit` Gbit/s between them, `vcpus` of
    each; None: not known, and no limit.
    """

    count: int
    gpus: int
    gpu: str
    gbit: float
    vcpus: float | None = None


def forecast(
    schedule: Schedule,
    *,
    gpus: int,
    gpu: str,
    gbit: float,
    machines: int,
    vcpus: float | None = None,
    constants: Constants = DEFAULT_CONSTANTS,
    val_images: int | None = None,
) -> Forecast | None:
    """Return how long a schedule takes on `machines` of `gpus` GPUs each, of the name `gpu`, with `gbit` Gbit/s
    between them and `vcpus` each, validated on `val` images, None: the recipe's number; None when nothing is known of
    such cards.
    """
    card, model = DEVICES.get(gpu), MODEL_COSTS.get(schedule.recipe.model.name)
    measured = constants.images_per_second is not None or bool(constants.batch_timings)
    if model is None or (card is None and not measured):
        return None
    there = MachineSpec(count=machines, gpus=gpus, gpu=gpu, gbit=gbit, vcpus=vcpus)
    images = schedule.recipe.data.val if val_images is None else val_images
    return _ForecastModel(schedule, there, card or DeviceSpec(0.0, NVLINK_GBIT), model, constants, images).forecast()


@dataclass(frozen=True)
class _ForecastModel:
    """One forecast in the making; `model` is its work beside ResNet-50's, and its parameters; `val` counts images."""

    schedule: Schedule
    machines: MachineSpec
    device: DeviceSpec
    model_cost: tuple[float, int]
    constants: Constants
    val_images: int

    @property
    def gpus_per_step(self) -> int:
        """How many GPUs share a step."""
        return min(self.machines.count * self.machines.gpus, self.schedule.gpus)

    def forecast(self) -> Forecast:
        """Every epoch's cost, and the start."""
        numbers = {row.phase.epochs: number for number, row in enumerate(self.schedule.scheduled_phases)}
        found, before = list[EpochCost](), None
        for place, epoch in enumerate(self.schedule.epochs):
            phase = epoch.scheduled_phase.phase
            kind = (phase.size, phase.batch, phase.copy)
            fixed = seconds_for_size(self.constants.epoch_seconds, phase.size)
            fixed += seconds_for_size(self.constants.switch_seconds, phase.size) if before != kind else 0.0
            looks = should_validate(self.schedule, place, ()) is not False  # None: nobody knows yet how near it will be
            validation = self.validation_seconds(phase) if looks else 0.0
            parts = {**self.step_terms(epoch), "validation": validation, "fixed": fixed}
            found.append(EpochCost(epoch.number, numbers[phase.epochs], parts))
            before = kind
        return Forecast(tuple(found), self.startup_seconds(), self.schedule, self.constants.source)

    def startup_seconds(self) -> dict[str, float]:
        """Seconds before the first step, by part."""
        own = self.constants
        speed = min(
            own.fetch_bytes_per_second, self.machines.gbit * 1e9 / 8
        )  # no machine takes more than its network brings
        fetch = hardware.fetch_bytes(self.schedule, self.val_images) / speed if own.fetch_bytes_per_second else 0.0
        return {"boot": own.boot_seconds, "setup": own.setup_seconds, "fetch": fetch, "trainers": own.startup_seconds}

    def batch_seconds(self, size: int, batch: int) -> float:
        """Seconds of one GPU's batch."""
        return self.constants.batch_seconds(size, batch, self.device.images_per_second, self.model_cost[0])

    def step_terms(self, epoch: Epoch) -> dict[str, float]:
        """The terms of an epoch's steps. Of a gradient that is accumulated only the last batch hides an all-reduce."""
        phase, own = epoch.scheduled_phase.phase, self.constants
        rounds = math.ceil(self.schedule.gpus / self.gpus_per_step)
        chunk = self.batch_seconds(phase.size, phase.batch)
        overlap = own.overlap and self.schedule.recipe.comm.overlap
        step = {
            "compute": rounds * chunk, "all-reduce": exposed_seconds(self.all_reduce_seconds(), chunk, overlap),
            "optimizer": own.optimizer_seconds, "logging": own.logging_seconds,
        }  # fmt: skip
        step["loader"] = max(0.0, self.loader_seconds(epoch) - sum(step.values()))
        images = min(
            1.0, epoch.dataset_size / (epoch.steps * epoch.scheduled_phase.global_batch)
        )  # the last step is not full
        return {name: epoch.steps * one * (images if name in ("compute", "loader") else 1.0)
                for name, one in step.items()}  # fmt: skip

    def loader_seconds(self, epoch: Epoch) -> float:
        """Seconds in which a machine's loader makes its part of a step; 0: not known."""
        speed = self.loader_speed(epoch.scheduled_phase.phase.copy, epoch.scheduled_phase.phase.size)
        machines = math.ceil(self.gpus_per_step / self.machines.gpus)
        return epoch.scheduled_phase.global_batch / machines / speed if speed else 0.0

    def loader_speed(self, copy: int | None, size: int) -> float:
        """Images/s that a machine's loader makes; 0: not known."""
        own, vcpus = self.constants, self.machines.vcpus
        for kept, at, speed in own.loader_speeds:
            if (kept, at) == (copy or 0, size):
                return speed
        if vcpus is None or own.loader_speeds:
            return 0.0
        if own.vcpu_images_per_second is not None:
            return own.vcpu_images_per_second * vcpus
        return hardware.loader_images_per_second(copy, size, vcpus) if hardware.has_known_images(self.schedule) else 0.0

    def validation_seconds(self, phase: Phase) -> float:
        """Seconds of one validation: the forward passes of all views, or the loader where that is slower."""
        images = self.val_images
        views = 1 + (RECTANGLE_PIXEL_RATIO if phase.rect_val else 0.0)
        passes = (
            images
            * views
            * self.batch_seconds(phase.size, phase.batch)
            / phase.batch
            * self.constants.forward_share
            / self.gpus_per_step
        )
        speed = self.loader_speed(phase.copy, phase.size) * math.ceil(self.gpus_per_step / self.machines.gpus)
        return max(passes, images * (1 + phase.rect_val) / speed if speed else 0.0)

    def all_reduce_seconds(self) -> float:
        """Seconds of an all-reduce: in a ring through all GPUs, or machine by machine and in a ring of these."""
        world, own, comm = self.gpus_per_step, self.constants, self.schedule.recipe.comm
        if world == 1:
            return 0.0
        gbit, bus = 8e-9 * self.model_cost[1], own.bus_gbit or self.device.bus_gbit  # of one byte for each parameter
        if self.machines.count == 1:
            return gbit * bytes_between_machines(comm, own.gradient_bytes, world, 1) / bus
        machines = math.ceil(world / self.machines.gpus)
        procs = math.ceil(world / machines)
        network = own.network or (EFA_NETWORK if self.machines.gbit >= EFA_MIN_GBIT else TCP_NETWORK)
        ring, inside = (machines, 2 * own.gradient_bytes) if is_hierarchical(comm, procs) else (world, 0)
        between = bytes_between_machines(comm, own.gradient_bytes, machines, procs)
        speed = self.machines.gbit * network.efficiency
        return gbit * (between / speed + inside / bus) + 2 * (ring - 1) * network.hop_seconds


def is_hierarchical(comm: Comm, processes_per_machine: int) -> bool:
    """Whether gradients are summed up inside machines of so many processes before they travel."""
    return comm.hook == "hierarchical" and processes_per_machine > 1


def bytes_between_machines(comm: Comm, gradient_bytes: int, machines: int, processes_per_machine: int) -> float:
    """Return the bytes that one machine's card sends for each parameter in a step. `own`: bytes of a gradient that no
    hook makes smaller.

    The hooks' are counted on network cards by tests/train/distributed/test_ddp_bytes.py; PowerSGD's go with the layers' shapes,
    which nobody knows here, and are taken to be float32.
    """
    ring = machines if is_hierarchical(comm, processes_per_machine) else machines * processes_per_machine
    return 2 * (ring - 1) / ring * {"fp16": 2, "bf16": 2}.get(comm.hook, gradient_bytes)


def exposed_seconds(all_reduce_seconds: float, compute_seconds: float, overlap: bool) -> float:
    """Return the seconds of an all-reduce that a step is longer by: all, or what the backward pass does not hide.

    That pass is two thirds of the compute, four fifths of it have gradients to send, and the last bucket has nothing
    to hide behind.
    """
    return (
        max(0.0, all_reduce_seconds - 0.8 * 2 / 3 * compute_seconds) + 0.1 * all_reduce_seconds
        if overlap
        else all_reduce_seconds
    )


def scaling_efficiency(rows: Sequence[tuple[int, Forecast]]) -> list[float]:
    """Return for each (machines, forecast) the images of a machine in a second of training beside the first row's."""

    def speed(machines: int, one: Forecast) -> float:
        images = sum(
            min(epoch.dataset_size, epoch.steps * epoch.scheduled_phase.global_batch) for epoch in one.schedule.epochs
        )
        return images / machines / sum(cost.total_seconds for cost in one.epochs)

    return [speed(*row) / speed(*rows[0]) for row in rows]
