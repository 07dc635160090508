"""How long a schedule will take on machines that nobody has yet: arithmetic, no torch.

A step is its compute, what cannot be hidden of the all-reduce, and the optimizer; an epoch has a fixed cost that more
machines do not divide; a run has a start.

    compute     T = images per GPU * (pixels / 224)^2 * the model's work / the card's ResNet-50 images per second
    all-reduce  A = 2 (P - 1) / P * bytes / (network * efficiency) + 2 (P - 1) * latency of a hop
    seen of it  A without overlap; else max(0, A - 0.8 * 2/3 T) + 0.1 A: the backward pass is two thirds of T, four
                fifths of it have gradients to send, and the last bucket has nothing to hide behind

Steps and epochs of `IN_2018` are fitted to the log of the run on 8 machines; its start is what that on 16 lost at its
beginning and its switches. Together they come to 17.0 of that run's 18.09 minutes. No run of ours on GPUs stands behind
`OURS` yet.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from .schedule import Row, Schedule

REFERENCE = 224  # pixels


@dataclass(frozen=True)
class Card:
    """`images` of 224 pixels that a GPU trains ResNet-50 on in a second; `bus` Gbit/s to the others of its machine."""

    images: float
    bus: float


NVLINK, PCIE = 1000.0, 80.0  # assumed, not measured
# Planning figures for plain PyTorch, not measured here: 50 to 60 % of what the memory's bandwidth allows at 444 MB an
# image. H200: H100's times their ratio in MLPerf. P100: fp32. CPU: one process on two cores, fitted to our CIFAR-10.
CARDS = {
    "P100": Card(140, NVLINK), "V100": Card(1000, NVLINK), "A100": Card(2400, NVLINK), "H100": Card(4200, NVLINK),
    "H200": Card(4700, NVLINK), "A10G": Card(740, PCIE), "L4": Card(370, PCIE), "L40S": Card(1200, PCIE),
    "T4": Card(390, PCIE), "CPU": Card(14, PCIE),
}  # fmt: skip

# Work of an image beside ResNet-50's, by the convolutions' output at 224 pixels, for training waits for memory; and
# parameters.
MODELS = {
    "resnet10_tiny": (0.102, 436_536),
    "resnet10_cifar": (0.406, 436_536),
    "resnet18": (0.223, 11_689_512),
    "resnet34": (0.336, 21_797_672),
    "resnet50": (1.0, 25_557_032),
    "resnet101": (1.460, 44_549_160),
    "resnet152": (2.029, 60_192_808),
}


@dataclass(frozen=True)
class Network:
    """How much of its speed a network gives to an all-reduce, and the seconds of one hop."""

    efficiency: float
    hop: float


TCP, EFA = Network(0.5, 60e-6), Network(0.65, 20e-6)
EFA_GBIT = 100  # EC2's machines with so much or more have EFA


@dataclass(frozen=True)
class Habits:
    """What a trainer adds to the arithmetic: seconds of the optimizer in each step, of an epoch (by image size), of
    the start; bytes of a gradient; whether gradients travel while others are still computed.
    """

    optimizer: float
    epoch: Callable[[int], float]
    start: float
    gradient_bytes: int
    overlap: bool
    network: Network | None = None  # None: by the network's speed


# 2018: gradients sent after the backward pass; loaders started anew in each epoch; stops when the data set changed.
IN_2018 = Habits(
    optimizer=0.0146, epoch=lambda size: 4.0 if size <= 128 else 10.0 if size <= 224 else 15.0, start=132.0,
    gradient_bytes=2, overlap=False, network=Network(0.5, 0.0),
)  # fmt: skip
# The optimizer is 2018's; a second an epoch and 30 s of start are assumed until a run on GPUs tells.
OURS = Habits(optimizer=0.0146, epoch=lambda size: 1.0, start=30.0, gradient_bytes=4, overlap=True)


@dataclass(frozen=True)
class Forecast:
    """Seconds of training, validation and start, and what they go into: "compute", "all-reduce", "optimizer",
    "fixed" (of the epochs) and "start". Nothing of renting and setting up machines.
    """

    parts: dict[str, float]

    @property
    def seconds(self) -> float:
        """All parts together."""
        return sum(self.parts.values())

    @property
    def minutes(self) -> float:
        """All parts together."""
        return self.seconds / 60

    @property
    def most(self) -> str:
        """The part that takes longest."""
        return max(self.parts, key=lambda name: self.parts[name])


def forecast(
    schedule: Schedule,
    *,
    gpus: int,
    gpu: str,
    gbit: float,
    machines: int,
    habits: Habits = OURS,
    images: float | None = None,
) -> Forecast | None:
    """Return how long a schedule takes on `machines` of `gpus` GPUs each, of the name `gpu`, with `gbit` Gbit/s
    between them; None when nothing is known of such cards. `images` is a card's measured speed instead of the table's.
    """
    card, model = CARDS.get(gpu), MODELS.get(schedule.recipe.model.name)
    if model is None or (card is None and images is None):
        return None
    card = Card(images or 0.0, NVLINK) if card is None else Card(images or card.images, card.bus)
    world = min(machines * gpus, schedule.gpus)
    sent = _all_reduce(world, model[1] * habits.gradient_bytes, machines, card, gbit, habits)
    parts = dict.fromkeys(("compute", "all-reduce", "optimizer", "fixed"), 0.0)
    for epoch in schedule.epochs:
        compute = _chunk(epoch.row, card, model[0])
        parts["compute"] += epoch.steps * compute * math.ceil(schedule.gpus / world)
        parts["all-reduce"] += epoch.steps * _seen(sent, compute, habits.overlap)
        parts["optimizer"] += epoch.steps * habits.optimizer
        parts["fixed"] += habits.epoch(epoch.row.phase.size)
    return Forecast(parts | {"start": habits.start})


def _chunk(row: Row, card: Card, work: float) -> float:
    """Seconds of one GPU's batch; of a gradient that is accumulated only the last one can hide an all-reduce."""
    return row.phase.batch * (row.phase.size / REFERENCE) ** 2 * work / card.images


def _all_reduce(world: int, size: int, machines: int, card: Card, gbit: float, habits: Habits) -> float:
    """Seconds of an all-reduce of `size` bytes in a ring through all GPUs."""
    network = habits.network or (EFA if gbit >= EFA_GBIT else TCP)
    speed, hop = (gbit * network.efficiency, network.hop) if machines > 1 else (card.bus, 0.0)
    return 2 * (world - 1) / world * size * 8e-9 / speed + 2 * (world - 1) * hop if world > 1 else 0.0


def _seen(sent: float, compute: float, overlap: bool) -> float:
    return max(0.0, sent - 0.8 * 2 / 3 * compute) + 0.1 * sent if overlap else sent
