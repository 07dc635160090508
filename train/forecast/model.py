"""The arithmetic of the forecast: from a schedule and machines to seconds, epoch by epoch and term by term."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from train.recipe.components import Comm
from train.recipe.schedule import Epoch, Schedule, ScheduledPhase
from train.recipe.validation_policy import should_validate

from . import hardware
from .constants import DEFAULT_CONSTANTS, Constants, seconds_for_size
from .hardware import (
    MODEL_COSTS,
    NVLINK_GBIT,
    RDMA_MIN_GBIT,
    RDMA_NETWORK,
    RECTANGLE_PIXEL_RATIO,
    TCP_NETWORK,
    DeviceSpec,
)

STEP_TERMS = ("compute", "all-reduce", "optimizer", "logging", "loader")
TERMS = (*STEP_TERMS, "validation", "fixed")
BACKWARD_SHARE = 2 / 3  # of a step's compute
OVERLAP_SHARE = 0.8  # of the backward pass has gradients to send
LAST_BUCKET_SHARE = 0.1  # of an all-reduce: the last bucket has nothing to hide behind


@dataclass(frozen=True)
class EpochCost:
    """Seconds of one epoch by term. `number` counts from 0, `phase_index` is its row in the recipe."""

    number: int
    phase_index: int
    term_seconds: dict[str, float]

    @property
    def total_seconds(self) -> float:
        """Seconds of all terms."""
        return sum(self.term_seconds.values())


@dataclass(frozen=True, kw_only=True)
class PhaseForecast:
    """The forecast of a phase: epochs `start` to `end`, its seconds by term, and the longest term (`most`)."""

    start: int
    end: int
    size: int
    batch: int
    copy: int | None
    seconds: float
    most: str
    terms: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class ForecastRecord:
    """A forecast as a job stores it: minutes of the whole run, seconds by term, by phase and by part of the start.

    `source` names the constants.
    """

    minutes: float
    terms: dict[str, float]
    phases: list[PhaseForecast] = field(default_factory=list)
    start: dict[str, float] = field(default_factory=dict)
    source: str = ""


@dataclass(frozen=True)
class Forecast:
    """The forecast of a run: the cost of each epoch, and the seconds of the start by part.

    The parts of the start are "boot", "setup", "fetch" and "trainers". `source` names the constants that were used.
    """

    epochs: tuple[EpochCost, ...]
    startup_seconds: dict[str, float]
    schedule: Schedule
    source: str = ""

    @property
    def term_seconds(self) -> dict[str, float]:
        """Seconds of the whole run by term, with "start" among them."""
        return {**sum_by_term(cost.term_seconds for cost in self.epochs), "start": sum(self.startup_seconds.values())}

    @property
    def total_seconds(self) -> float:
        """Seconds of the whole run, with its start."""
        return sum(self.term_seconds.values())

    @property
    def total_minutes(self) -> float:
        """Minutes of the whole run, with its start."""
        return self.total_seconds / 60

    @property
    def training_seconds(self) -> float:
        """Seconds from the trainers' start to the end, which is what records of others count."""
        return self.total_seconds - sum(self.startup_seconds.values()) + self.startup_seconds.get("trainers", 0.0)

    @property
    def longest_term(self) -> str:
        """The term with most seconds."""
        return longest_term_of(self.term_seconds)

    def seconds_until(self, epochs: int | None) -> float:
        """Return the seconds until this many epochs are done, the start included; None: all epochs."""
        return sum(self.startup_seconds.values()) + sum(cost.total_seconds for cost in self.epochs[:epochs])

    def after(self, steps_done: int) -> "Forecast":
        """Return the forecast of the rest of the run after some steps: with its own start, and whole validations."""
        costs = []
        for epoch, cost in zip(self.schedule.epochs, self.epochs, strict=True):
            steps_left = epoch.first_step + epoch.steps - steps_done
            if steps_left > 0:
                share = min(1.0, steps_left / epoch.steps)
                term_seconds = {
                    term: seconds * share if term in STEP_TERMS else seconds
                    for term, seconds in cost.term_seconds.items()
                }
                costs.append(replace(cost, term_seconds=term_seconds))
        return replace(self, epochs=tuple(costs))

    def phase_rows(self) -> list[PhaseForecast]:
        """Return the forecast of each phase."""
        rows = []
        for phase_index, costs in groupby(self.epochs, key=lambda cost: cost.phase_index):
            phase_costs = list(costs)
            scheduled_phase = self.schedule.scheduled_phases[phase_index]
            term_seconds = sum_by_term(cost.term_seconds for cost in phase_costs)
            rows.append(
                PhaseForecast(
                    start=phase_costs[0].number,
                    end=phase_costs[-1].number + 1,
                    size=scheduled_phase.size,
                    batch=scheduled_phase.phase.batch,
                    copy=scheduled_phase.phase.copy,
                    seconds=sum(term_seconds.values()),
                    most=longest_term_of(term_seconds),
                    terms=term_seconds,
                )
            )
        return rows

    def to_record(self) -> ForecastRecord:
        """Return what a job stores of the forecast."""
        return ForecastRecord(
            minutes=self.total_minutes,
            terms=self.term_seconds,
            phases=self.phase_rows(),
            start=dict(self.startup_seconds),
            source=self.source,
        )


def sum_by_term(term_seconds: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the sum of several costs by term."""
    total = dict.fromkeys(TERMS, 0.0)
    for cost in term_seconds:
        total = {term: total[term] + cost.get(term, 0.0) for term in total}
    return total


def longest_term_of(term_seconds: Mapping[str, float]) -> str:
    """Return the term with most seconds."""
    return max(term_seconds, key=lambda term: term_seconds[term])


@dataclass(frozen=True, kw_only=True)
class MachineSpec:
    """The machines of a forecast: `count` machines with `gpus` GPUs of type `gpu` each, and `gbit` Gbit/s between them.

    `vcpus` are those of one machine; None: unknown, and then the loader is no limit.
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
    """Return how long a schedule takes on `machines` machines, described as in `MachineSpec`.

    `val_images` is the number of validation images; None: the recipe's. Returns None when nothing is known about the
    model, or about the card and the constants have no measured speed either.
    """
    device = hardware.device_in_precision(gpu, schedule.recipe.precision)
    model_cost = MODEL_COSTS.get(schedule.recipe.model.name)
    is_measured = constants.images_per_second is not None or bool(constants.batch_timings)
    if model_cost is None or (device is None and not is_measured):
        return None
    machine_spec = MachineSpec(count=machines, gpus=gpus, gpu=gpu, gbit=gbit, vcpus=vcpus)
    images = schedule.recipe.data.val if val_images is None else val_images
    device = device or DeviceSpec(0.0, NVLINK_GBIT)
    return _ForecastModel(schedule, machine_spec, device, model_cost, constants, images).forecast()


@dataclass(frozen=True)
class _ForecastModel:
    """Computes one forecast. `model_cost` is the model's work over ResNet-50's, and its number of parameters."""

    schedule: Schedule
    machines: MachineSpec
    device: DeviceSpec
    model_cost: tuple[float, int]
    constants: Constants
    val_images: int

    @property
    def gpus_per_step(self) -> int:
        """Number of GPUs that share a step."""
        return min(self.machines.count * self.machines.gpus, self.schedule.gpus)

    @property
    def machines_per_step(self) -> int:
        """Number of machines that share a step."""
        return math.ceil(self.gpus_per_step / self.machines.gpus)

    def forecast(self) -> Forecast:
        """Return the cost of every epoch, and of the start."""
        phase_indexes = {row.epochs: index for index, row in enumerate(self.schedule.scheduled_phases)}
        costs = list[EpochCost]()
        previous_shape = None
        for epoch_index, epoch in enumerate(self.schedule.epochs):
            scheduled_phase = epoch.scheduled_phase
            size = scheduled_phase.size
            shape = (size, scheduled_phase.phase.batch, scheduled_phase.phase.copy)
            fixed = seconds_for_size(self.constants.epoch_seconds, size)
            if shape != previous_shape:
                fixed += seconds_for_size(self.constants.switch_seconds, size)
            # None: whether the epoch will be near the target is not known yet; it is counted as validated.
            is_validated = should_validate(self.schedule, epoch_index, ()) is not False
            validation = self.validation_seconds(scheduled_phase) if is_validated else 0.0
            term_seconds = {**self.step_terms(epoch), "validation": validation, "fixed": fixed}
            costs.append(EpochCost(epoch.number, phase_indexes[scheduled_phase.epochs], term_seconds))
            previous_shape = shape
        return Forecast(tuple(costs), self.startup_seconds(), self.schedule, self.constants.source)

    def startup_seconds(self) -> dict[str, float]:
        """Return the seconds before the first step, by part."""
        constants = self.constants
        fetch = 0.0
        if constants.fetch_bytes_per_second:
            # A machine fetches no faster than its network.
            speed = min(constants.fetch_bytes_per_second, self.machines.gbit * 1e9 / 8)
            fetch = hardware.fetch_bytes(self.schedule, self.val_images) / speed
        return {
            "boot": constants.boot_seconds,
            "setup": constants.setup_seconds,
            "fetch": fetch,
            "trainers": constants.startup_seconds,
        }

    def batch_seconds(self, size: int, batch: int) -> float:
        """Return the seconds of one GPU's batch."""
        return self.constants.batch_seconds(size, batch, self.device.images_per_second, self.model_cost[0])

    def step_terms(self, epoch: Epoch) -> dict[str, float]:
        """Return the seconds of an epoch's steps by term.

        Where gradients are accumulated over several batches, only the last batch hides the all-reduce.
        """
        scheduled_phase, constants = epoch.scheduled_phase, self.constants
        batches_per_step = math.ceil(self.schedule.gpus / self.gpus_per_step)
        batch_seconds = self.batch_seconds(scheduled_phase.size, scheduled_phase.phase.batch)
        overlap = constants.overlap and self.schedule.recipe.comm.overlap
        step = {
            "compute": batches_per_step * batch_seconds,
            "all-reduce": exposed_seconds(self.all_reduce_seconds(), batch_seconds, overlap),
            "optimizer": constants.optimizer_seconds,
            "logging": constants.logging_seconds,
        }
        step["loader"] = max(0.0, self.loader_seconds(epoch) - sum(step.values()))
        # The last step of an epoch is not full.
        filled = min(1.0, epoch.dataset_size / (epoch.steps * epoch.scheduled_phase.global_batch))
        return {
            term: epoch.steps * seconds * (filled if term in ("compute", "loader") else 1.0)
            for term, seconds in step.items()
        }

    def loader_seconds(self, epoch: Epoch) -> float:
        """Return the seconds in which a machine loads its part of a step; 0 when its loader's speed is unknown."""
        speed = self.loader_speed(epoch.scheduled_phase.phase.copy, epoch.scheduled_phase.size)
        return epoch.scheduled_phase.global_batch / self.machines_per_step / speed if speed else 0.0

    def loader_speed(self, copy: int | None, size: int) -> float:
        """Return the images/s that the loader of a machine makes of a copy at an image size; 0 when unknown."""
        constants, vcpus = self.constants, self.machines.vcpus
        for measured_copy, measured_size, speed in constants.loader_speeds:
            if (measured_copy, measured_size) == (copy or 0, size):
                return speed
        if vcpus is None or constants.loader_speeds:
            return 0.0
        if constants.vcpu_images_per_second is not None:
            return constants.vcpu_images_per_second * vcpus
        return hardware.loader_images_per_second(copy, size, vcpus) if hardware.has_known_images(self.schedule) else 0.0

    def validation_seconds(self, scheduled_phase: ScheduledPhase) -> float:
        """Return the seconds of one validation: the forward passes of all views, or the loader where that is slower."""
        phase, size = scheduled_phase.phase, scheduled_phase.size
        views_of_pixels = 1 + (RECTANGLE_PIXEL_RATIO if phase.rect_val else 0.0)
        gpu_seconds = self.val_images * views_of_pixels * self.batch_seconds(size, phase.batch) / phase.batch
        forward_seconds = gpu_seconds * self.constants.forward_share / self.gpus_per_step
        speed = self.loader_speed(phase.copy, size) * self.machines_per_step
        loader_seconds = self.val_images * (1 + phase.rect_val) / speed if speed else 0.0
        return max(forward_seconds, loader_seconds)

    def all_reduce_seconds(self) -> float:
        """Return the seconds of an all-reduce: in a ring of all GPUs, or inside machines and in a ring of machines."""
        world_size, constants, comm = self.gpus_per_step, self.constants, self.schedule.recipe.comm
        if world_size == 1:
            return 0.0
        gbit_per_byte = 8e-9 * self.model_cost[1]  # Gbit of the whole model, for each byte of a gradient value
        bus_gbit = constants.bus_gbit or self.device.bus_gbit
        if self.machines.count == 1:
            return gbit_per_byte * bytes_between_machines(comm, constants.gradient_bytes, world_size, 1) / bus_gbit
        machines = self.machines_per_step
        processes = math.ceil(world_size / machines)
        network = constants.network or (RDMA_NETWORK if self.machines.gbit >= RDMA_MIN_GBIT else TCP_NETWORK)
        if is_hierarchical(comm, processes):
            ring_size, bytes_inside = machines, 2 * constants.gradient_bytes
        else:
            ring_size, bytes_inside = world_size, 0
        bytes_between = bytes_between_machines(comm, constants.gradient_bytes, machines, processes)
        network_gbit = self.machines.gbit * network.efficiency
        transfer_seconds = gbit_per_byte * (bytes_between / network_gbit + bytes_inside / bus_gbit)
        return transfer_seconds + 2 * (ring_size - 1) * network.hop_seconds


def is_hierarchical(comm: Comm, processes_per_machine: int) -> bool:
    """Return whether gradients are summed inside each machine before they travel between machines."""
    return comm.hook == "hierarchical" and processes_per_machine > 1


def bytes_between_machines(comm: Comm, gradient_bytes: int, machines: int, processes_per_machine: int) -> float:
    """Return the bytes that one machine's network card sends for each parameter in a step.

    `gradient_bytes` are those of a gradient value where the hook does not make it smaller.
    tests/train/distributed/test_ddp_bytes.py counts the bytes of the hooks on network cards. PowerSGD's depend on the
    shapes of the layers, which are not known here; they are taken to be those of float32.
    """
    ring_size = machines if is_hierarchical(comm, processes_per_machine) else machines * processes_per_machine
    return 2 * (ring_size - 1) / ring_size * {"fp16": 2, "bf16": 2}.get(comm.hook, gradient_bytes)


def exposed_seconds(all_reduce_seconds: float, compute_seconds: float, overlap: bool) -> float:
    """Return by how many seconds an all-reduce makes a step longer: all of it, or what the backward pass does not hide.

    The backward pass is two thirds of the compute, four fifths of it have gradients to send, and the last bucket has
    nothing to hide behind.
    """
    if not overlap:
        return all_reduce_seconds
    hidden_at_most = OVERLAP_SHARE * BACKWARD_SHARE * compute_seconds
    return max(0.0, all_reduce_seconds - hidden_at_most) + LAST_BUCKET_SHARE * all_reduce_seconds


def scaling_efficiency(rows: Sequence[tuple[int, Forecast]]) -> list[float]:
    """Return for each (machines, forecast) the training speed of one machine in images/s over that of the first row."""

    def speed_per_machine(machines: int, result: Forecast) -> float:
        images = sum(
            min(epoch.dataset_size, epoch.steps * epoch.scheduled_phase.global_batch)
            for epoch in result.schedule.epochs
        )
        return images / machines / sum(cost.total_seconds for cost in result.epochs)

    return [speed_per_machine(*row) / speed_per_machine(*rows[0]) for row in rows]
