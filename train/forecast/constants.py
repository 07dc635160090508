"""The constants of a forecast that belong to the trainer, not to the machine: two presets, or measured by a run."""

from dataclasses import dataclass, replace

from .hardware import REFERENCE_PIXELS, NetworkSpec

SecondsBySize = tuple[tuple[int, float], ...]  # (largest image size in pixels, seconds), ascending


def seconds_for_size(table: SecondsBySize, size: int) -> float:
    """Return the seconds that a table gives for an image size: its last row for larger sizes, 0 for an empty table."""
    return next((seconds for largest, seconds in table if size <= largest), table[-1][1] if table else 0.0)


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What a forecast needs to know beside the machine and the model.

    Attributes:
        source: Where the constants come from: a preset or a job.
        images_per_second: Images of 224 pixels that one GPU trains ResNet-50 on. None: the preset of its card.
        batch_timings: Measured (size, batch, seconds of one GPU's batch). They take precedence over
            `images_per_second`.
        network: Efficiency and latency of the network between machines. None: by the network's speed.
        bus_gbit: Gbit/s between the GPUs of a machine. None: the preset of the card.
        gradient_bytes: Bytes of a gradient value on the network, where the comm hook does not make it smaller.
        overlap: Whether gradients are sent while others are still computed.
        optimizer_seconds: Seconds of the optimizer in each step.
        logging_seconds: Seconds of logging in each step.
        forward_share: Time of a forward pass over the time of a whole step.
        vcpu_images_per_second: Images/s that one vCPU loads, at any size. None: the presets by copy and size.
        loader_speeds: Measured (copy's short side or 0 for full size, size, images/s of a machine's loader).
        epoch_seconds: Seconds of each epoch that more machines do not divide, by image size.
        switch_seconds: Seconds of the first epoch with a new size, batch or copy, the run's first epoch included, by
            image size.
        startup_seconds: Seconds from the trainers' start to the first step.
        boot_seconds: Seconds until a machine has booted.
        setup_seconds: Seconds to set a machine up.
        fetch_bytes_per_second: Bytes/s at which one machine fetches the data. 0: nothing is fetched.
    """

    source: str
    images_per_second: float | None = None
    batch_timings: tuple[tuple[int, int, float], ...] = ()
    network: NetworkSpec | None = None
    bus_gbit: float | None = None
    gradient_bytes: int = 4
    overlap: bool = True
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

        `images_per_second` is the card's preset and `relative_work` the model's work over ResNet-50's, both for the
        formula. Between two measured sizes the seconds of an image are linear in its pixels; beyond them they are in
        proportion to the pixels, as in the formula.
        """
        if not self.batch_timings:
            relative_pixels = (size / REFERENCE_PIXELS) ** 2
            return batch * relative_pixels * relative_work / (self.images_per_second or images_per_second)
        sizes = sorted({measured_size for measured_size, _, _ in self.batch_timings})
        below = max((measured for measured in sizes if measured <= size), default=sizes[0])
        above = min((measured for measured in sizes if measured >= size), default=sizes[-1])
        seconds_below = self._measured_batch_seconds(below, batch)
        if below == above:
            return seconds_below * (size / below) ** 2
        share = (size**2 - below**2) / (above**2 - below**2)
        return (1 - share) * seconds_below + share * self._measured_batch_seconds(above, batch)

    def _measured_batch_seconds(self, size: int, batch: int) -> float:
        """Return the seconds of a batch at a measured size.

        It lies on the line through the two nearest measured batches. With a single one, or where the line falls, the
        seconds are in proportion to the batch.
        """
        seconds_by_batch = dict(sorted((timing[1], timing[2]) for timing in self.batch_timings if timing[0] == size))
        if batch in seconds_by_batch:
            return seconds_by_batch[batch]
        by_distance = sorted(seconds_by_batch, key=lambda measured: abs(measured - batch))
        if len(by_distance) > 1:
            low, high = sorted(by_distance[:2])
            slope = (seconds_by_batch[high] - seconds_by_batch[low]) / (high - low)
            seconds = seconds_by_batch[low] + slope * (batch - low)
            if slope > 0 and seconds > 0:
                return seconds
        nearest = by_distance[0]
        return seconds_by_batch[nearest] * batch / nearest


# All from the log of the run on 8 machines (sanjeevm0/imagenet18, dawn/logs/single_machine/verbose.log).
#   images_per_second, optimizer_seconds
#       Steps of five shapes as printed are batch/835 x (size/224)^2 + 79 ms. The network takes 64 ms of these at half
#       of 25 Gbit/s; its meter shows 2 x 63/64 x 51.1 MB a step.
#   bus_gbit
#       The log does not say how much of the 79 ms is the network's; a single machine is forecast with them too.
#   logging_seconds
#       The mean step is 33 ms longer than the printed steps, whatever the shape: rank 0 writes to the shared file
#       system after every fifth step, and all wait for it.
#   vcpu_images_per_second
#       16,384 images in 0.180 s on 8 machines of 64 vCPUs without waiting: the loader is at least this fast.
#   epoch_seconds, switch_seconds
#       What an epoch took beyond its mean steps and its validation; what first epochs took beyond the next.
IMAGENET18_CONSTANTS = Constants(
    source="imagenet18 on 8 machines, its log",
    images_per_second=835.0,
    network=NetworkSpec(0.5, 0.0),
    bus_gbit=12.5,
    gradient_bytes=2,
    overlap=False,
    optimizer_seconds=0.0146,
    logging_seconds=0.033,
    vcpu_images_per_second=16384 / 0.180 / 8 / 64,
    epoch_seconds=((128, 2.6), (224, 5.2), (288, 11.4)),
    switch_seconds=((128, 7.5), (224, 16.0), (288, 54.0)),
    startup_seconds=8.0,
)

# This project has not measured these in a run on GPUs. The optimizer is that of 2018. The second of each epoch, the
# trainers' start, boot and set-up are assumed until a run measures them. Fetching: 1500 MiB/s, what EFS gives one
# machine (AWS, EFS performance).
DEFAULT_CONSTANTS = Constants(
    source="presets",
    optimizer_seconds=0.0146,
    epoch_seconds=((REFERENCE_PIXELS, 1.0),),
    startup_seconds=30.0,
    boot_seconds=120.0,
    setup_seconds=60.0,
    fetch_bytes_per_second=1.5e9,
)

# The machines of 2018 had to boot too. Their images came with them; now they must be fetched.
TRAINER_CONSTANTS = {
    "ours": DEFAULT_CONSTANTS,
    "imagenet18": replace(
        IMAGENET18_CONSTANTS,
        boot_seconds=DEFAULT_CONSTANTS.boot_seconds,
        setup_seconds=DEFAULT_CONSTANTS.setup_seconds,
        fetch_bytes_per_second=DEFAULT_CONSTANTS.fetch_bytes_per_second,
    ),
}
