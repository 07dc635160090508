"""The constants of a forecast that belong to the trainer, not to the machine: presets, or measured by a run."""

from dataclasses import dataclass

from .hardware import NetworkSpec


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What a forecast needs to know beside the machine and the model."""

    source: str  # "presets", or the job that measured them
    images_per_second: float | None = None  # ResNet-50, 224 pixels, one GPU; None: the preset of its card
    # Measured (size, batch, seconds of one GPU's batch). They count before `images_per_second`, and contain the time
    # in which a step sends gradients.
    batch_timings: tuple[tuple[int, int, float], ...] = ()
    network: NetworkSpec | None = None  # between machines; None: by the network's speed
    optimizer_seconds: float = 0.0  # of each step, whatever its images
    host_seconds: float = 0.0  # of a GPU's batch at least: the host starts its kernels one by one
    forward_share: float = 1 / 3  # time of a forward pass over the time of a whole step
    loader_speeds: tuple[tuple[int, int, float], ...] = ()  # measured (copy, 0: full size; size; images/s of a machine)
    epoch_seconds: float = 0.0  # of each epoch; more machines do not divide them
    switch_seconds: float = 0.0  # of the first epoch with a new size, batch or copy, the run's first epoch included
    startup_seconds: float = 0.0  # from the trainers' start to the first step
    boot_seconds: float = 0.0
    setup_seconds: float = 0.0
    fetch_bytes_per_second: float = 0.0  # of one machine; 0: nothing is fetched

    def measured_batch_seconds(self, size: int, batch: int) -> float:
        """Return the seconds of one GPU's batch: as measured, or between what was measured.

        Between two measured sizes the seconds of an image are linear in its pixels; beyond them they are in proportion
        to the pixels.
        """
        sizes = sorted({measured_size for measured_size, _, _ in self.batch_timings})
        below = max((measured for measured in sizes if measured <= size), default=sizes[0])
        above = min((measured for measured in sizes if measured >= size), default=sizes[-1])
        seconds_below = self._seconds_at_measured_size(below, batch)
        if below == above:
            return seconds_below * (size / below) ** 2
        share = (size**2 - below**2) / (above**2 - below**2)
        return (1 - share) * seconds_below + share * self._seconds_at_measured_size(above, batch)

    def _seconds_at_measured_size(self, size: int, batch: int) -> float:
        """Return the seconds of a batch on the line through the two nearest measured batches of this size.

        With a single one, or where the line falls, the seconds are in proportion to the batch.
        """
        timings = [timing for timing in self.batch_timings if timing[0] == size]
        (_, nearest, seconds), *others = sorted(timings, key=lambda timing: abs(timing[1] - batch))
        if others:
            _, second_nearest, second_seconds = others[0]
            slope = (second_seconds - seconds) / (second_nearest - nearest)
            seconds_on_line = seconds + slope * (batch - nearest)
            if slope > 0 and seconds_on_line > 0:
                return seconds_on_line
        return seconds * batch / nearest


# Measured on one H100 with 16 processors (LOG.md, 2026-11-26): the host takes 20 to 30 ms to start the kernels of a
# ResNet-50's step; imports take 6 s, CUDA's start 7.5 s, the first pass of a shape 0.3 s. The optimizer passes 20 bytes
# of each of 25.6 million parameters: 0.6 ms at a V100's 900 GB/s. The second of each epoch, boot and set-up are assumed
# until a run measures them. Fetching: 1500 MiB/s, what EFS gives one machine (AWS, EFS performance).
DEFAULT_CONSTANTS = Constants(
    source="presets",
    optimizer_seconds=0.0006,
    host_seconds=0.025,
    epoch_seconds=1.0,
    switch_seconds=0.3,
    startup_seconds=15.0,
    boot_seconds=120.0,
    setup_seconds=60.0,
    fetch_bytes_per_second=1.5e9,
)
