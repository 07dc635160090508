"""The arithmetic: from a schedule and machines to seconds, epoch by epoch and term by term."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from train.recipe.components import Comm
from train.recipe.schedule import Epoch, Schedule
from train.recipe.schema import Phase
from train.recipe.validation_policy import validates

from . import hardware
from .constants import OURS, Constants, by_size
from .hardware import CARDS, EFA, EFA_GBIT, MODELS, NVLINK, RECTANGLE, TCP, Card

STEP = ("compute", "all-reduce", "optimizer", "logging", "loader")  # the parts of a step
TERMS = (*STEP, "validation", "fixed")


@dataclass(frozen=True)
class Cost:
    """Seconds of one epoch by term; `phase` is the number of its row in the recipe."""

    number: int
    phase: int
    parts: dict[str, float]

    @property
    def seconds(self) -> float:
        """All parts together."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Forecast:
    """What each epoch takes, and the start by part: "boot", "setup", "fetch", "trainers". `source` says by whose
    constants.
    """

    epochs: tuple[Cost, ...]
    start: dict[str, float]
    schedule: Schedule
    source: str = ""

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by term, "start" among them."""
        return {**added(one.parts for one in self.epochs), "start": sum(self.start.values())}

    @property
    def seconds(self) -> float:
        """All together."""
        return sum(self.parts.values())

    @property
    def minutes(self) -> float:
        """All together."""
        return self.seconds / 60

    @property
    def training(self) -> float:
        """Seconds without what comes before the trainers' start: what records of others tell."""
        return self.seconds - sum(self.start.values()) + self.start.get("trainers", 0.0)

    @property
    def most(self) -> str:
        """The part that takes longest."""
        return largest(self.parts)

    def until(self, epochs: int | None) -> float:
        """Return the seconds until so many epochs are done, all of them for None."""
        return sum(self.start.values()) + sum(one.seconds for one in self.epochs[:epochs])

    def phases(self) -> list[dict[str, Any]]:
        """Return a row for each phase: epochs, size, batch, seconds, the term that takes longest, and all terms."""
        found = []
        for number, costs in groupby(self.epochs, key=lambda one: one.phase):
            some = list(costs)
            phase, parts = self.schedule.recipe.phases[number], added(one.parts for one in some)
            found.append({
                "start": some[0].number, "end": some[-1].number + 1, "size": phase.size, "batch": phase.batch,
                "copy": phase.copy, "seconds": sum(parts.values()), "most": largest(parts), "terms": parts,
            })  # fmt: skip
        return found

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data, seconds by term; minutes are of all."""
        return {
            "minutes": self.minutes, "terms": self.parts, "phases": self.phases(), "start": self.start,
            "source": self.source,
        }  # fmt: skip


def added(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the sums of each term."""
    total = dict.fromkeys(TERMS, 0.0)
    for one in parts:
        total = {name: total[name] + one.get(name, 0.0) for name in total}
    return total


def largest(parts: Mapping[str, float]) -> str:
    """Return the term that takes longest."""
    return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True, kw_only=True)
class Machines:
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
    constants: Constants = OURS,
    val: int | None = None,
) -> Forecast | None:
    """Return how long a schedule takes on `machines` of `gpus` GPUs each, of the name `gpu`, with `gbit` Gbit/s
    between them and `vcpus` each, validated on `val` images, None: the recipe's number; None when nothing is known of
    such cards.
    """
    card, model = CARDS.get(gpu), MODELS.get(schedule.recipe.model.name)
    measured = constants.images is not None or bool(constants.chunks)
    if model is None or (card is None and not measured):
        return None
    there = Machines(count=machines, gpus=gpus, gpu=gpu, gbit=gbit, vcpus=vcpus)
    images = schedule.recipe.data.val if val is None else val
    return _Model(schedule, there, card or Card(0.0, NVLINK), model, constants, images).forecast()


@dataclass(frozen=True)
class _Model:
    """One forecast in the making; `model` is its work beside ResNet-50's, and its parameters; `val` counts images."""

    schedule: Schedule
    machines: Machines
    card: Card
    model: tuple[float, int]
    constants: Constants
    val: int

    @property
    def world(self) -> int:
        """How many GPUs share a step."""
        return min(self.machines.count * self.machines.gpus, self.schedule.gpus)

    def forecast(self) -> Forecast:
        """Every epoch's cost, and the start."""
        numbers = {row.phase.epochs: number for number, row in enumerate(self.schedule.rows)}
        found, before = list[Cost](), None
        for place, epoch in enumerate(self.schedule.epochs):
            phase = epoch.row.phase
            kind = (phase.size, phase.batch, phase.copy)
            fixed = by_size(self.constants.epoch, phase.size)
            fixed += by_size(self.constants.switch, phase.size) if before != kind else 0.0
            looks = validates(self.schedule, place, ()) is not False  # None: nobody knows yet how near it will be
            validation = self.validation(phase) if looks else 0.0
            parts = {**self.steps(epoch), "validation": validation, "fixed": fixed}
            found.append(Cost(epoch.number, numbers[phase.epochs], parts))
            before = kind
        return Forecast(tuple(found), self.start(), self.schedule, self.constants.source)

    def start(self) -> dict[str, float]:
        """Seconds before the first step, by part."""
        own = self.constants
        speed = min(own.fetch, self.machines.gbit * 1e9 / 8)  # no machine takes more than its network brings
        fetch = hardware.fetched(self.schedule, self.val) / speed if own.fetch else 0.0
        return {"boot": own.boot, "setup": own.setup, "fetch": fetch, "trainers": own.start}

    def chunk(self, size: int, batch: int) -> float:
        """Seconds of one GPU's batch."""
        return self.constants.seconds(size, batch, self.card.images, self.model[0])

    def steps(self, epoch: Epoch) -> dict[str, float]:
        """The terms of an epoch's steps. Of a gradient that is accumulated only the last batch hides an all-reduce."""
        phase, own = epoch.row.phase, self.constants
        rounds = math.ceil(self.schedule.gpus / self.world)
        chunk = self.chunk(phase.size, phase.batch)
        overlap = own.overlap and self.schedule.recipe.comm.overlap
        step = {
            "compute": rounds * chunk, "all-reduce": seen(self.sent(), chunk, overlap),
            "optimizer": own.optimizer, "logging": own.logging,
        }  # fmt: skip
        step["loader"] = max(0.0, self.load(epoch) - sum(step.values()))
        images = min(1.0, epoch.of / (epoch.steps * epoch.row.global_batch))  # the last step is not full
        return {name: epoch.steps * one * (images if name in ("compute", "loader") else 1.0)
                for name, one in step.items()}  # fmt: skip

    def load(self, epoch: Epoch) -> float:
        """Seconds in which a machine's loader makes its part of a step; 0: not known."""
        speed = self.feed(epoch.row.phase.copy, epoch.row.phase.size)
        machines = math.ceil(self.world / self.machines.gpus)
        return epoch.row.global_batch / machines / speed if speed else 0.0

    def feed(self, copy: int | None, size: int) -> float:
        """Images/s that a machine's loader makes; 0: not known."""
        own, vcpus = self.constants, self.machines.vcpus
        for kept, at, speed in own.feeds:
            if (kept, at) == (copy or 0, size):
                return speed
        if vcpus is None or own.feeds:
            return 0.0
        if own.feed is not None:
            return own.feed * vcpus
        return hardware.feed(copy, size, vcpus) if hardware.known_images(self.schedule) else 0.0

    def validation(self, phase: Phase) -> float:
        """Seconds of one validation: the forward passes of all views, or the loader where that is slower."""
        images = self.val
        views = 1 + (RECTANGLE if phase.rect_val else 0.0)
        passes = (
            images * views * self.chunk(phase.size, phase.batch) / phase.batch * self.constants.forward / self.world
        )
        speed = self.feed(phase.copy, phase.size) * math.ceil(self.world / self.machines.gpus)
        return max(passes, images * (1 + phase.rect_val) / speed if speed else 0.0)

    def sent(self) -> float:
        """Seconds of an all-reduce: in a ring through all GPUs, or machine by machine and in a ring of these."""
        world, own, comm = self.world, self.constants, self.schedule.recipe.comm
        if world == 1:
            return 0.0
        gbit, bus = 8e-9 * self.model[1], own.bus or self.card.bus  # of one byte for each parameter
        if self.machines.count == 1:
            return gbit * between_machines(comm, own.gradient_bytes, world, 1) / bus
        machines = math.ceil(world / self.machines.gpus)
        procs = math.ceil(world / machines)
        network = own.network or (EFA if self.machines.gbit >= EFA_GBIT else TCP)
        ring, inside = (machines, 2 * own.gradient_bytes) if by_machine(comm, procs) else (world, 0)
        between = between_machines(comm, own.gradient_bytes, machines, procs)
        speed = self.machines.gbit * network.efficiency
        return gbit * (between / speed + inside / bus) + 2 * (ring - 1) * network.hop


def by_machine(comm: Comm, procs: int) -> bool:
    """Whether gradients are summed up inside machines of so many processes before they travel."""
    return comm.hook == "hierarchical" and procs > 1


def between_machines(comm: Comm, own: int, machines: int, procs: int) -> float:
    """Return the bytes that one machine's card sends for each parameter in a step. `own`: bytes of a gradient that no
    hook makes smaller.

    The hooks' are counted on network cards by tests/train/distributed/test_ddp_bytes.py; PowerSGD's go with the layers' shapes,
    which nobody knows here, and are taken to be float32.
    """
    ring = machines if by_machine(comm, procs) else machines * procs
    return 2 * (ring - 1) / ring * {"fp16": 2, "bf16": 2}.get(comm.hook, own)


def seen(sent: float, compute: float, overlap: bool) -> float:
    """Return the seconds of an all-reduce that a step is longer by: all, or what the backward pass does not hide.

    That pass is two thirds of the compute, four fifths of it have gradients to send, and the last bucket has nothing
    to hide behind.
    """
    return max(0.0, sent - 0.8 * 2 / 3 * compute) + 0.1 * sent if overlap else sent


def efficiency(rows: Sequence[tuple[int, Forecast]]) -> list[float]:
    """Return for each (machines, forecast) the images of a machine in a second of training beside the first row's."""

    def speed(machines: int, one: Forecast) -> float:
        images = sum(min(epoch.of, epoch.steps * epoch.row.global_batch) for epoch in one.schedule.epochs)
        return images / machines / sum(cost.seconds for cost in one.epochs)

    return [speed(*row) / speed(*rows[0]) for row in rows]
