"""The arithmetic of the forecast: from a schedule and machines to seconds, phase by phase and term by term."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from train.recipe.components import Comm
from train.recipe.schedule import Schedule, ScheduledPhase
from train.recipe.validation_policy import should_validate

from . import hardware
from .hardware import DeviceSpec, NetworkSpec

TERMS = ("compute", "all-reduce", "optimizer", "loader", "validation", "fixed")
BACKWARD_SHARE = 2 / 3  # of a step's compute
OVERLAP_SHARE = 0.8  # of the backward pass has gradients to send
LAST_BUCKET_SHARE = 0.1  # of an all-reduce: the last bucket has nothing to hide behind
GRADIENT_BYTES = 4  # of a gradient value, whatever the layers compute in, where the comm hook does not make it smaller


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

        Between two measured sizes the seconds of an image are linear in its pixels, beyond them in proportion to them.
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
        """Return seconds on the line through the two nearest measured batches, or in proportion to the nearest."""
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


@dataclass(frozen=True, kw_only=True)
class PhaseForecast:
    """The seconds of a phase by term. The phase has `steps` steps, in epochs `start` to `end`."""

    start: int
    end: int
    steps: int
    size: int
    batch: int
    terms: dict[str, float]

    @property
    def seconds(self) -> float:
        """Seconds of all terms."""
        return sum(self.terms.values())


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The forecast of a run: minutes of the whole run, seconds by term, by phase and by part of the start.

    The terms include "start". Its parts are "boot", "setup", "fetch" and "trainers". `source` names the constants.
    """

    minutes: float
    terms: dict[str, float]
    phases: list[PhaseForecast] = field(default_factory=list)
    start: dict[str, float] = field(default_factory=dict)
    source: str = ""

    @classmethod
    def sum_up(cls, phases: Sequence[PhaseForecast], start: Mapping[str, float], source: str) -> "Forecast":
        """Return the forecast of a run with these phases."""
        terms = {term: sum(phase.terms[term] for phase in phases) for term in TERMS} | {"start": sum(start.values())}
        return cls(minutes=sum(terms.values()) / 60, terms=terms, phases=list(phases), start=dict(start), source=source)

    @property
    def training_minutes(self) -> float:
        """Minutes from the trainers' start to the end, which is what records of others count."""
        return self.minutes - (self.terms["start"] - self.start["trainers"]) / 60

    def of_steps(self, first: int, end: int | None = None) -> "Forecast":
        """Return the forecast of the steps from `first` to `end` (None: all later ones), with the whole start."""
        parts = []
        phase_end = 0
        for phase in self.phases:
            phase_start, phase_end = phase_end, phase_end + phase.steps
            steps = min(phase_end, phase_end if end is None else end) - max(phase_start, first)
            share = max(0, steps) / phase.steps
            parts.append(replace(phase, terms={term: share * seconds for term, seconds in phase.terms.items()}))
        return Forecast.sum_up(parts, self.start, self.source)


def longest_term(terms: Mapping[str, float]) -> str:
    """Return the term with most seconds."""
    return max(terms, key=lambda term: terms[term])


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
    """Return how long a schedule takes on `machines` machines with `gpus` GPUs of type `gpu` each.

    `gbit` is the Gbit/s of a machine's network. `vcpus` are those of one machine; None: unknown, and then the loader is
    no limit. `val_images` is the number of validation images; None: the recipe's. Returns None when nothing is known
    about the model, or about the card and the constants have no measured speed either.
    """
    device = hardware.device_in_precision(gpu, schedule.recipe.precision)
    is_model_measured = bool(constants.batch_timings)  # the cost is then not asked for
    model_cost = hardware.MODEL_COSTS.get(schedule.recipe.model.name, (0.0, 0) if is_model_measured else None)
    if model_cost is None or (device is None and constants.images_per_second is None and not is_model_measured):
        return None
    return _ForecastModel(
        schedule=schedule,
        machines=machines,
        gpus=gpus,
        gbit=gbit,
        vcpus=vcpus,
        device=device or DeviceSpec(0.0, hardware.NVLINK_GBIT),
        model_cost=model_cost,
        constants=replace(constants, host_seconds=0.0) if gpu == "CPU" else constants,
        val_images=schedule.recipe.data.val if val_images is None else val_images,
    ).forecast()


@dataclass(frozen=True, kw_only=True)
class _ForecastModel:
    """Computes one forecast. `model_cost` is the model's work over ResNet-50's, and its number of parameters."""

    schedule: Schedule
    machines: int
    gpus: int
    gbit: float
    vcpus: float | None
    device: DeviceSpec
    model_cost: tuple[float, int]
    constants: Constants
    val_images: int

    @property
    def gpus_per_step(self) -> int:
        """Number of GPUs that share a step."""
        return min(self.machines * self.gpus, self.schedule.gpus)

    @property
    def machines_per_step(self) -> int:
        """Number of machines that share a step."""
        return math.ceil(self.gpus_per_step / self.gpus)

    def forecast(self) -> Forecast:
        """Return the seconds of every phase, and of the start."""
        phases = []
        previous_shape = None
        numbered_epochs = enumerate(self.schedule.epochs)
        for scheduled_phase, group in groupby(numbered_epochs, key=lambda item: item[1].scheduled_phase):
            indexes, epochs = zip(*group, strict=True)
            steps = sum(epoch.steps for epoch in epochs)
            # The last step of an epoch is not full.
            full_steps = sum(min(epoch.steps, epoch.dataset_size / scheduled_phase.global_batch) for epoch in epochs)
            terms = {
                term: seconds * (full_steps if term in ("compute", "loader") else steps)
                for term, seconds in self.step_terms(scheduled_phase).items()
            }
            # None: whether the epoch will be near the target is not known yet; it is counted as validated.
            validations = sum(should_validate(self.schedule, index, ()) is not False for index in indexes)
            terms["validation"] = validations * self.validation_seconds(scheduled_phase)
            shape = (scheduled_phase.size, scheduled_phase.phase.batch, scheduled_phase.phase.copy)
            switches = shape != previous_shape
            terms["fixed"] = len(epochs) * self.constants.epoch_seconds + switches * self.constants.switch_seconds
            previous_shape = shape
            phases.append(
                PhaseForecast(
                    start=epochs[0].number,
                    end=epochs[-1].number + 1,
                    steps=steps,
                    size=scheduled_phase.size,
                    batch=scheduled_phase.phase.batch,
                    terms=terms,
                )
            )
        return Forecast.sum_up(phases, self.startup_seconds(), self.constants.source)

    def startup_seconds(self) -> dict[str, float]:
        """Return the seconds before the first step, by part."""
        constants = self.constants
        fetch = 0.0
        if constants.fetch_bytes_per_second:
            # A machine fetches no faster than its network.
            speed = min(constants.fetch_bytes_per_second, self.gbit * 1e9 / 8)
            fetch = hardware.fetch_bytes(self.schedule) / speed
        return {
            "boot": constants.boot_seconds,
            "setup": constants.setup_seconds,
            "fetch": fetch,
            "trainers": constants.startup_seconds,
        }

    @property
    def has_graphs(self) -> bool:
        """Whether training replays CUDA graphs, which take the host out of the way (train/distributed/cuda_graphs.py).

        That a graph can be captured is not known here.
        """
        graphs, is_alone = self.schedule.recipe.graphs, self.machines * self.gpus == 1
        return (graphs == "on" or (graphs == "auto" and is_alone)) and not self.schedule.recipe.model.compile

    def batch_seconds(self, size: int, batch: int, host_seconds: float) -> float:
        """Return the seconds of one GPU's batch, which takes the host at least `host_seconds` to start."""
        if self.constants.batch_timings:
            return self.constants.measured_batch_seconds(size, batch)
        speed = self.constants.images_per_second or self.device.images_per_second
        seconds = batch * (size / hardware.REFERENCE_PIXELS) ** 2 * self.model_cost[0] / speed
        return max(seconds, host_seconds)

    def step_terms(self, scheduled_phase: ScheduledPhase) -> dict[str, float]:
        """Return the seconds of a full step by term. The last batch's backward pass hides a part of the all-reduce."""
        batches_per_step = math.ceil(self.schedule.gpus / self.gpus_per_step)
        host_seconds = 0.0 if self.has_graphs else self.constants.host_seconds
        batch_seconds = self.batch_seconds(scheduled_phase.size, scheduled_phase.phase.batch, host_seconds)
        all_reduce = self.all_reduce_seconds()
        if self.schedule.recipe.comm.overlap:
            hidden_at_most = OVERLAP_SHARE * BACKWARD_SHARE * batch_seconds
            all_reduce = max(0.0, all_reduce - hidden_at_most) + LAST_BUCKET_SHARE * all_reduce
        step = {
            "compute": batches_per_step * batch_seconds,
            "all-reduce": all_reduce,
            "optimizer": self.constants.optimizer_seconds,
        }
        speed = self.loader_speed(scheduled_phase)
        loader_seconds = scheduled_phase.global_batch / self.machines_per_step / speed if speed else 0.0
        step["loader"] = max(0.0, loader_seconds - sum(step.values()))
        return step

    def loader_speed(self, scheduled_phase: ScheduledPhase) -> float:
        """Return the images/s that the loader of a machine makes in a phase; 0 when unknown."""
        copy, size = scheduled_phase.phase.copy, scheduled_phase.size
        if self.constants.loader_speeds:
            speeds = {(of_copy, of_size): speed for of_copy, of_size, speed in self.constants.loader_speeds}
            return speeds.get((copy or 0, size), 0.0)
        if self.vcpus is None or not hardware.has_known_images(self.schedule):
            return 0.0
        return hardware.loader_images_per_second(copy, size, self.vcpus)

    def validation_seconds(self, scheduled_phase: ScheduledPhase) -> float:
        """Return the seconds of one validation: the forward passes of all views, or the loader where that is slower."""
        phase = scheduled_phase.phase
        views_of_pixels = 1 + (hardware.RECTANGLE_PIXEL_RATIO if phase.rect_val else 0.0)
        host_seconds = self.constants.host_seconds  # no graph validates
        image_seconds = self.batch_seconds(scheduled_phase.size, phase.batch, host_seconds) / phase.batch
        gpu_seconds = self.val_images * views_of_pixels * image_seconds * self.constants.forward_share
        speed = self.loader_speed(scheduled_phase) * self.machines_per_step
        loader_seconds = self.val_images * (1 + phase.rect_val) / speed if speed else 0.0
        return max(gpu_seconds / self.gpus_per_step, loader_seconds)

    def all_reduce_seconds(self) -> float:
        """Return the seconds of an all-reduce: in a ring of all GPUs, or inside machines and in a ring of machines."""
        world_size, comm = self.gpus_per_step, self.schedule.recipe.comm
        by_speed = hardware.RDMA_NETWORK if self.gbit >= hardware.RDMA_MIN_GBIT else hardware.TCP_NETWORK
        network = self.constants.network or by_speed
        is_cpu = self.device == hardware.DEVICES["CPU"]
        if comm.hook == "auto" and self.machines_per_step > 1 and network == hardware.TCP_NETWORK and not is_cpu:
            comm = replace(comm, hook="bf16")  # as train/distributed/ddp.py does
        if world_size == 1 or self.constants.batch_timings:
            return 0.0
        gbit_per_byte = 8e-9 * self.model_cost[1]  # Gbit of the whole model, for each byte of a gradient value
        bus_gbit = self.device.bus_gbit
        if self.machines == 1:
            return gbit_per_byte * bytes_between_machines(comm, world_size, 1) / bus_gbit
        machines = self.machines_per_step
        processes = math.ceil(world_size / machines)
        if is_hierarchical(comm, processes):
            ring_size, bytes_inside = machines, 2 * GRADIENT_BYTES
        else:
            ring_size, bytes_inside = world_size, 0
        bytes_between = bytes_between_machines(comm, machines, processes)
        transfer_seconds = bytes_between / (self.gbit * network.efficiency) + bytes_inside / bus_gbit
        return gbit_per_byte * transfer_seconds + 2 * (ring_size - 1) * network.hop_seconds


def is_hierarchical(comm: Comm, processes_per_machine: int) -> bool:
    """Return whether gradients are summed inside each machine before they travel between machines."""
    return comm.hook == "hierarchical" and processes_per_machine > 1


def bytes_between_machines(comm: Comm, machines: int, processes_per_machine: int) -> float:
    """Return the bytes that one machine's network card sends for each parameter in a step.

    benchmarks/training/comm.py counts the bytes of the hooks on network cards. PowerSGD's depend on the
    shapes of the layers, which are not known here; they are taken to be those of float32.
    """
    ring_size = machines if is_hierarchical(comm, processes_per_machine) else machines * processes_per_machine
    return 2 * (ring_size - 1) / ring_size * {"fp16": 2, "bf16": 2}.get(comm.hook, GRADIENT_BYTES)
