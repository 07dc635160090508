"""What a trainer adds to the arithmetic, as presets of two trainers, or as a run has measured it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

from .hardware import REFERENCE_PIXELS, NetworkSpec

SecondsBySize = tuple[tuple[int, float], ...]  # (largest size, seconds), ascending; the last holds beyond


def seconds_for_size(table: SecondsBySize, size: int) -> float:
    """Return the seconds that hold for a size, 0 of an empty table."""
    return next((seconds for most, seconds in table if size <= most), table[-1][1] if table else 0.0)


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What a forecast is made of beside the machine; `source` says whose they are.

    `images`: a GPU's images of 224 pixels a second, None: its card's. `chunks`: measured (size, batch, seconds of one
    GPU's batch); they come before `images`. `optimizer` and `logging`: seconds in each step that no batch changes.
    `forward`: a forward pass beside a whole step. `feed`: images/s of one vCPU at any size; `feeds`: (copy or 0, size,
    images/s of a machine); both None or empty: the presets'. `epoch`: seconds of each epoch that no machine divides,
    `switch`: of the first with a new size, batch or copy, the run's first too, both by size. `start`: from the
    trainers' start to the first step; `boot`, `setup`: seconds before; `fetch`: bytes/s of a machine, 0: nothing is
    fetched.
    """

    source: str
    images_per_second: float | None = None
    batch_timings: tuple[tuple[int, int, float], ...] = ()
    network: NetworkSpec | None = None  # None: by the network's speed
    bus_gbit: float | None = None  # Gbit/s in a machine; None: its card's
    gradient_bytes: int = 4
    overlap: bool = True  # whether gradients travel while others are still computed
    optimizer_seconds: float = 0.0
    logging_seconds: float = 0.0
    forward_share: float = 1 / 3
    vcpu_images_per_second: float | None = None
    loader_speeds: tuple[tuple[int, int, float], ...] = ()
    epoch_seconds: SecondsBySize = ()
    switch_seconds: SecondsBySize = ()
    startup_seconds: float = 0.0
    boot_seconds: float = 0.0
    setup_seconds: float = 0.0
    fetch_bytes_per_second: float = 0.0

    def batch_seconds(self, size: int, batch: int, images_per_second: float, relative_work: float) -> float:
        """Return the seconds of one GPU's batch: as measured, else between what was measured, else by the formula.

        `images` and `work` are the card's and the model's, for the formula. Between sizes an image's seconds go with
        its pixels; beyond them they are in proportion, as in the formula.
        """
        if not self.batch_timings:
            return (
                batch * (size / REFERENCE_PIXELS) ** 2 * relative_work / (self.images_per_second or images_per_second)
            )
        sizes = sorted({one for one, _, _ in self.batch_timings})
        below = max((one for one in sizes if one <= size), default=sizes[0])
        above = min((one for one in sizes if one >= size), default=sizes[-1])
        if below == above:
            return self._measured_batch_seconds(below, batch) * (size / below) ** 2
        share = (size**2 - below**2) / (above**2 - below**2)
        return (1 - share) * self._measured_batch_seconds(below, batch) + share * self._measured_batch_seconds(
            above, batch
        )

    def _measured_batch_seconds(self, size: int, batch: int) -> float:
        """Seconds of a batch at a measured size: on the line through the two nearest batches, else in proportion."""
        known = dict(sorted((one[1], one[2]) for one in self.batch_timings if one[0] == size))
        if batch in known:
            return known[batch]
        near = sorted(sorted(known, key=lambda one: abs(one - batch))[:2])
        if len(near) == 2:
            slope = (known[near[1]] - known[near[0]]) / (near[1] - near[0])
            at = known[near[0]] + slope * (batch - near[0])
            if slope > 0 and at > 0:
                return at
        nearest = min(known, key=lambda one: abs(one - batch))
        return known[nearest] * batch / nearest

    def to_json(self) -> dict[str, Any]:
        """Return plain data from which `from_json` makes equal constants."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Return what `to_json` described; keys of a later version are left out. Raises `TypeError`, `ValueError`."""
        known = {one.name for one in fields(cls)}
        found = {key: one for key, one in value.items() if key in known}
        for name in ("chunks", "feeds", "epoch", "switch"):
            found[name] = tuple(tuple(row) for row in found.get(name, ()))
        if found.get("network"):
            found["network"] = NetworkSpec(**found["network"])
        return cls(**found)


# All from the log of the run on 8 machines (sanjeevm0/imagenet18, dawn/logs/single_machine/verbose.log).
#   images, optimizer   steps of five shapes as printed: batch/835 x (size/224)^2 + 79 ms, of which the network's 64 ms
#                       by half of 25 Gbit/s; its meter shows 2 x 63/64 x 51.1 MB a step
#   bus                 the log does not tell what of the 79 ms is the network's; one machine is forecast with them too
#   logging             the mean step is 33 ms longer than the printed ones, whatever the shape: rank 0 writes to the
#                       shared file system after every fifth step, and all wait for it
#   feed                16,384 images in 0.180 s on 8 machines of 64 vCPUs without waiting: so much at least
#   epoch, switch       what an epoch took beyond its mean steps and validation; what first epochs took beyond the next
IMAGENET18_CONSTANTS = Constants(
    source="imagenet18 on 8 machines, its log", images_per_second=835.0, network=NetworkSpec(0.5, 0.0), bus_gbit=12.5, gradient_bytes=2,
    overlap=False, optimizer_seconds=0.0146, logging_seconds=0.033, vcpu_images_per_second=16384 / 0.180 / 8 / 64,
    epoch_seconds=((128, 2.6), (224, 5.2), (288, 11.4)), switch_seconds=((128, 7.5), (224, 16.0), (288, 54.0)), startup_seconds=8.0,
)  # fmt: skip

# No run of ours on GPUs stands behind these: the optimizer is 2018's; a second an epoch, the start, boot and set-up are
# assumed until one tells. fetch: 1500 MiB/s, what EFS gives one machine (AWS, EFS performance).
DEFAULT_CONSTANTS = Constants(
    source="presets", optimizer_seconds=0.0146, epoch_seconds=((REFERENCE_PIXELS, 1.0),), startup_seconds=30.0, boot_seconds=120.0, setup_seconds=60.0, fetch_bytes_per_second=1.5e9,
)  # fmt: skip

# 2018's machines had to boot too; its images came with them, ours do not.
TRAINER_CONSTANTS = {
    "ours": DEFAULT_CONSTANTS, "imagenet18": replace(IMAGENET18_CONSTANTS, boot_seconds=DEFAULT_CONSTANTS.boot_seconds, setup_seconds=DEFAULT_CONSTANTS.setup_seconds, fetch_bytes_per_second=DEFAULT_CONSTANTS.fetch_bytes_per_second),
}  # fmt: skip
