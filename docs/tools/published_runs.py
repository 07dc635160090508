"""Published training runs, each with its published time and what is needed to forecast it.

    python docs/tools/forecast_page.py docs/forecast.md         # writes the table of these runs

For each system, the constants of the forecast come from one or two runs, which are marked as fitted and prove nothing.
The other runs are predicted; they were not used to choose the constants. A prediction that misses stays in the table,
with a note on what is known about the reason.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from train.forecast.hardware import NetworkSpec
from train.forecast.model import Constants, Forecast, forecast
from train.recipe.components import IMAGENET, Comm, Model
from train.recipe.schedule import Schedule
from train.recipe.schema import Phase, Recipe

MAX_ERROR = 0.1  # largest relative error of a prediction
DAWNBENCH_ENTRIES = "stanford-futuredata/dawn-bench-entries, ImageNet/train/"
PLAIN = Comm(hook="none")
HALF_PRECISION = Comm(hook="fp16")
MLPERF_SOURCE = "mlcommons/training_results_v4.0, "


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """A published run of ResNet-50 on ImageNet, on machines of one type.

    Attributes:
        system: The software and the card; all runs of a system share their constants.
        name: The run within the system.
        minutes: Training time as published.
        phases: The schedule; its learning rates are of no importance here.
        gpus: GPUs of one machine, whose card is `gpu`.
        gbit: Gbit/s of one machine's network.
        constants: Constants of the forecast, and the runs that they come from.
        source: Where the time was published.
        val_images: Images of one validation; 1 leaves the validation out of the forecast.
        comm: How gradients are sent.
        fixed_seconds: Seconds of the whole run that are added to the forecast.
        is_fitted: Whether the constants come from this run.
        note: What a reader should know about this run.
    """

    system: str
    name: str
    minutes: float
    phases: tuple[Phase, ...]
    machines: int
    gpus: int = 8
    gpu: str
    gbit: float
    constants: Constants
    constants_from: str
    source: str
    val_images: int = 1
    comm: Comm = PLAIN
    fixed_seconds: float = 0.0
    is_fitted: bool = False
    note: str = ""

    @property
    def forecast(self) -> Forecast:
        """The forecast of this run. Raises `ValueError` when its card is unknown."""
        data = replace(IMAGENET, val=self.val_images)
        recipe = Recipe(name="published", data=data, model=Model(name="resnet50"), comm=self.comm, phases=self.phases)
        schedule = Schedule(recipe, IMAGENET.train, self.machines * self.gpus)
        result = forecast(
            schedule, gpus=self.gpus, gpu=self.gpu, gbit=self.gbit, machines=self.machines, constants=self.constants
        )
        if result is None:
            raise ValueError(f"{self.name}: no forecast for {self.gpu}")
        return result

    @property
    def forecast_minutes(self) -> float:
        """The training time by the forecast."""
        return self.forecast.training_minutes + self.fixed_seconds / 60

    @property
    def error(self) -> float:
        """The relative error of the forecast: positive where it is slower than the published run."""
        return self.forecast_minutes / self.minutes - 1


def consecutive_phases(*segments: tuple[int, int, int]) -> tuple[Phase, ...]:
    """Return phases that follow each other, from segments (number of epochs, image size, batch on one GPU)."""
    phases = []
    start = 0
    for epochs, size, batch in segments:
        phases.append(Phase(epochs=(start, start + epochs), size=size, batch=batch, lr=0.1))
        start += epochs
    return tuple(phases)


def phases_until(phases: Sequence[Phase], epochs: int) -> tuple[Phase, ...]:
    """Return the first `epochs` epochs of a schedule."""
    return tuple(
        replace(phase, epochs=(phase.epochs[0], min(phase.epochs[1], epochs)))
        for phase in phases
        if phase.epochs[0] < epochs
    )


# --- imagenet18 -----------------------------------------------------------------------------------------------------

# All from the log of the run on 8 machines (sanjeevm0/imagenet18, dawn/logs/single_machine/verbose.log).
#   images_per_second, optimizer_seconds
#       Steps of five shapes as printed are batch/835 x (size/224)^2 + 79 ms. The network takes 64 ms of these at half
#       of 25 Gbit/s; its meter shows 2 x 63/64 x 51.1 MB a step. The mean step is 33 ms longer than the printed steps,
#       whatever the shape: rank 0 writes to the shared file system after every fifth step, and all wait for it.
#   loader_speeds
#       16,384 images in 0.180 s on 8 machines without waiting: the loader is at least this fast, at any size.
#   epoch_seconds, switch_seconds, by largest image size
#       What an epoch took beyond its mean steps and its validation; what first epochs took beyond the next.
IMAGENET18_CONSTANTS = Constants(
    source="imagenet18 on 8 machines, its log",
    images_per_second=835.0,
    network=NetworkSpec(0.5, 0.0),
    optimizer_seconds=0.0146 + 0.033,
    startup_seconds=8.0,
)
IMAGENET18_NETWORK_SECONDS = 0.064
IMAGENET18_LOADER_SPEED = 16384 / 0.180 / 8
IMAGENET18_EPOCH_SECONDS = {128: 2.6, 224: 5.2, 288: 11.4}
IMAGENET18_SWITCH_SECONDS = {128: 7.5, 224: 16.0, 288: 54.0}


def imagenet18_constants(machines: int, phases: Sequence[Phase]) -> Constants:
    """Return the constants of the trainer of 2018 on a number of machines.

    The log does not say how much of the 79 ms is the network's; a single machine is forecast with all of them.
    """
    constants = IMAGENET18_CONSTANTS
    if machines == 1:
        optimizer_seconds = constants.optimizer_seconds + IMAGENET18_NETWORK_SECONDS
        constants = replace(constants, optimizer_seconds=optimizer_seconds)
    shapes = {(phase.copy or 0, phase.final_size) for phase in phases}
    return replace(constants, loader_speeds=tuple((*shape, IMAGENET18_LOADER_SPEED) for shape in sorted(shapes)))


def imagenet18_fixed_seconds(phases: Sequence[Phase]) -> float:
    """Return the seconds of all epochs beside steps and validation, which no forecast of our trainer has."""
    seconds = 0.0
    previous_shape = None
    for phase in phases:
        shape = (phase.final_size, phase.batch, phase.copy)
        start, end = phase.epochs
        seconds += (end - start) * IMAGENET18_EPOCH_SECONDS[phase.final_size]
        if shape != previous_shape:
            seconds += IMAGENET18_SWITCH_SECONDS[phase.final_size]
        previous_shape = shape
    return seconds


def imagenet18_runs(phases_by_machines: dict[int, Sequence[Phase]]) -> list[PublishedRun]:
    """Return the runs of 2018 on 1 to 16 p3.16xlarge, with the schedules that were run.

    `phases_by_machines` are the tables of recipes/resnet50_18min.py. They are an argument, because the package `train`
    does not know the recipes.
    """
    on_4 = [*phases_until(phases_by_machines[4], 27), replace(phases_by_machines[4][-1], epochs=(27, 30))]
    no_split = (
        "The log does not separate the network's part of the 79 ms of a step from the rest, so all of it is part "
        "of the forecast for one machine. If 64 ms were the network's, which is what half of its 25 Gbit/s would "
        "take, the forecast would be 94.5 minutes (-13.5 %). Without the loader, also in validation, it would be "
        "103.2 minutes (-5.5 %)."
    )
    entry = DAWNBENCH_ENTRIES + "fastai_resnet50_p3_{}_machine_pytorch.tsv, row {}"
    rows: list[tuple[int, int, float, Sequence[Phase], str, str]] = [
        (1, 28, 109.2, phases_by_machines[1], "imagenet18_old train.py, a comment: 109:12 to 93.00", no_split),
        (2, 30, 54.0, phases_by_machines[2], "cybertronai/imagenet18 train.py, a comment: 54 minutes to 93.364",
         "The trainer of 2019, which wrote its log elsewhere."),
        (4, 29, 29.71, on_4, entry.format(4, 28),
         "As it was run: 288 pixels start at epoch 27, one epoch earlier than in train.py."),
        (4, 30, 31.78, on_4, entry.format(4, 29), "As it was run, like the row above."),
        (8, 30, 18.88, phases_by_machines[8], entry.format(8, 29), ""),
        (8, 36, 25.98, phases_by_machines[8], entry.format(8, 35), ""),
        (16, 38, 18.09, phases_by_machines[16], entry.format(16, 38),
         "The steps of 24,576 images, read from full-size files, were 13 % slower than forecast."),
    ]  # fmt: skip
    return [
        PublishedRun(
            system="imagenet18, V100",
            name=f"{machines} machine{'s' * (machines > 1)}, {epochs} epochs",
            minutes=minutes,
            phases=phases_until(phases, epochs),
            machines=machines,
            gpu="V100",
            gbit=25.0,
            constants=imagenet18_constants(machines, phases),
            constants_from="8 machines, log",
            comm=Comm(hook="fp16", overlap=False),
            fixed_seconds=imagenet18_fixed_seconds(phases_until(phases, epochs)),
            source=source,
            val_images=IMAGENET.val,
            is_fitted=machines == 8,
            note=note,
        )
        for machines, epochs, minutes, phases, source, note in rows
    ]


# --- other systems --------------------------------------------------------------------------------------------------

# One A100 takes 129,686 s for 90 epochs of 1,281,167 images and the forward passes of 50,000 images, which are the work
# of 16,667 training images. The start of the loader's workers in each epoch takes what it takes in imagenet18 at 224
# pixels: both create a new DataLoader each time.
KEMPNER_CONSTANTS = Constants(
    source="Kempner on one GPU", images_per_second=(1_281_167 + 16_667) / (129_686 / 90 - 5.2), epoch_seconds=5.2
)


def kempner_runs() -> list[PublishedRun]:
    """Return the runs with plain DDP on 1 to 64 A100, four to a machine, over InfiniBand."""
    seconds_by_gpus = {1: 129_686, 2: 65_752, 4: 33_216, 8: 17_104, 16: 8_914, 32: 4_765, 64: 2_640}
    return [
        PublishedRun(
            system="Kempner, A100",
            name=f"{gpus} GPU{'s' * (gpus > 1)}, 90 epochs",
            minutes=seconds / 60,
            phases=consecutive_phases((90, 224, 256)),
            machines=max(1, gpus // 4),
            gpus=min(gpus, 4),
            gpu="A100",
            gbit=200.0,
            constants=KEMPNER_CONSTANTS,
            constants_from="1 GPU; the epochs' fixed seconds of imagenet18's log",
            source="KempnerInstitute/scalable-vision-workflows, imagenet1k_resnet50/README.md",
            val_images=IMAGENET.val,
            is_fitted=gpus == 1,
        )
        for gpus, seconds in seconds_by_gpus.items()
    ]


# From the rows of the run of 16 epochs: an epoch takes 49.0 s at 160 pixels and 65.1 s at 192, of which 3.5 s are the
# validation; it has 312 full steps. The first epoch takes 26.7 s more, 13.6 s of them as the first epoch at 192 pixels
# does. The last validation at the end takes 3.4 s.
FFCV_CONSTANTS = Constants(
    source="FFCV's 16 epochs",
    batch_timings=((160, 512, 45.5 / 312.8), (192, 512, 61.6 / 312.8)),
    epoch_seconds=3.5,
    switch_seconds=13.6,
    startup_seconds=26.7 - 13.6 + 3.4,
)


def ffcv_runs() -> list[PublishedRun]:
    """Return FFCV's schedules on 8 A100: 160 pixels, then 192 pixels from the middle of its ramp of sizes."""
    small_epochs_and_minutes = {
        **{16: (12, 14.87), 24: (19, 21.70), 32: (25, 28.76)},
        **{40: (32, 35.58), 56: (45, 49.40), 88: (71, 77.24)},
    }
    return [
        PublishedRun(
            system="FFCV, A100",
            name=f"{epochs} epochs",
            minutes=minutes,
            phases=consecutive_phases((small_epochs, 160, 512), (epochs - small_epochs, 192, 512)),
            machines=1,
            gpu="A100",
            gbit=400.0,
            constants=FFCV_CONSTANTS,
            constants_from="16 epochs",
            source="libffcv/ffcv-imagenet, assets/agg.csv, relative_time",
            is_fitted=epochs == 16,
        )
        for epochs, (small_epochs, minutes) in small_epochs_and_minutes.items()
    ]


# No constant comes from the runs on 64 GPUs. The speed of a card comes from 8 GPUs. The part of a step that does not
# depend on the batch comes from 2528 H100 (0.228 minutes for 69 epochs of 32 steps with 16 images on each GPU: 6.2 ms,
# of which 2.1 ms are compute). The network's switches add the gradients, so a hop costs no time.
MLPERF_H100_CONSTANTS = Constants(
    source="NVIDIA's MLPerf v4.0", images_per_second=7_592.0, network=NetworkSpec(0.8, 0.0), optimizer_seconds=0.0040
)
MLPERF_L40S_CONSTANTS = replace(MLPERF_H100_CONSTANTS, images_per_second=1_919.0)


def mlperf_runs() -> list[PublishedRun]:
    """Return NVIDIA's runs to 75.9 % top-1. A time is the mean of five runs, without the fastest and the slowest."""
    # name, minutes, machines, GPUs per machine, card, constants, batch per GPU, epochs, results folder, fitted, note
    rows = [
        ("8 H100", 13.27, 1, 8, "H100", MLPERF_H100_CONSTANTS, 400, 35, "eos", True, ""),
        (
            *("64 H100", 2.505, 8, 8, "H100", MLPERF_H100_CONSTANTS, 50, 35, "eos_n8", False),
            "With the speed of 8 GPUs alone, the forecast would be 1.67 minutes (-33.5 %): steps of 7 ms have a part "
            "that a smaller batch does not shorten. The term for it was added when this was seen; its value comes from "
            "the run on 2528 GPUs.",
        ),
        ("2528 H100, 69 epochs", 0.228, 316, 8, "H100", MLPERF_H100_CONSTANTS, 16, 69, "eos_n316", True, ""),
        (
            *("3584 H100, 77 epochs", 0.183, 448, 8, "H100", MLPERF_H100_CONSTANTS, 16, 77, "coreweave_hgxh100_n448"),
            *(False, "MLPerf's record."),
        ),
        ("8 L40S", 50.59, 2, 4, "L40S", MLPERF_L40S_CONSTANTS, 200, 35, "l40s_n2", True, ""),
        (
            *("64 L40S", 7.149, 16, 4, "L40S", MLPERF_L40S_CONSTANTS, 50, 35, "l40s_n16", False),
            "With the speed of 8 GPUs alone, the forecast would be 6.38 minutes (-10.7 %).",
        ),
    ]
    return [
        PublishedRun(
            system=f"MLPerf, {gpu}",
            name=name if "epochs" in name else f"{name}, 35 epochs",
            minutes=minutes,
            phases=consecutive_phases((epochs, 224, batch)),
            machines=machines,
            gpus=gpus,
            gpu=gpu,
            gbit=3200.0 if gpu == "H100" else 400.0,
            constants=constants,
            constants_from=f"8 {gpu}; a step's least time from 2528 H100",
            source=f"{MLPERF_SOURCE}NVIDIA/results/{folder}",
            comm=HALF_PRECISION,
            is_fitted=is_fitted,
            note=note,
        )
        for name, minutes, machines, gpus, gpu, constants, batch, epochs, folder, is_fitted, note in rows
    ]


# The 29 hours of their run on one server with 8 P100 and 256 images in a step. 50 Gbit/s of Ethernet, by the presets.
GOYAL_CONSTANTS = Constants(source="Goyal et al. 2017, one server", images_per_second=90 * 1_281_167 / (29 * 3600) / 8)


def goyal_runs() -> list[PublishedRun]:
    """Return "ImageNet in 1 hour" on 256 P100, and the run on 8 P100 that the constants come from."""
    return [
        PublishedRun(
            system="Goyal et al., P100",
            name=f"{8 * machines} GPUs, 90 epochs",
            minutes=minutes,
            phases=consecutive_phases((90, 224, 32)),
            machines=machines,
            gpu="P100",
            gbit=50.0,
            constants=GOYAL_CONSTANTS,
            constants_from="8 GPUs, 29 hours",
            source="arXiv 1706.02677, abstract and section 5",
            is_fitted=machines == 1,
        )
        for machines, minutes in ((1, 29 * 60.0), (32, 60.0))
    ]


# From the run on one machine: epochs of 37.3, 56.1 and 138.6 s at 96, 128 and 224 pixels, each of 626 steps with 256
# images on each GPU. A line through the first and the last gives 1292 images/s and 23.2 ms in each step; the other two
# sizes lie on it within 2 %.
ALIBABA_CONSTANTS = Constants(source="Alibaba on one machine", images_per_second=1_292.0, optimizer_seconds=0.0232)


def alibaba_runs() -> list[PublishedRun]:
    """Return Alibaba's run on 128 V100 with 32 Gbit/s, and the run on 8 V100 that the constants come from."""
    # machines, minutes, segments (epochs, size) before the last epoch at 288 pixels
    rows = [(1, 21.63, ((12, 96), (6, 128), (2, 224))), (16, 2.63, ((13, 96), (11, 128), (3, 224)))]
    return [
        PublishedRun(
            system="Alibaba, V100",
            name=f"{8 * machines} GPUs, {sum(epochs for epochs, _ in segments) + 1} epochs",
            minutes=minutes,
            phases=consecutive_phases(*((epochs, size, 256) for epochs, size in segments), (1, 288, 128)),
            machines=machines,
            gpu="V100",
            gbit=32.0,
            constants=ALIBABA_CONSTANTS,
            constants_from="8 GPUs",
            source=f"{DAWNBENCH_ENTRIES}alibabacloud_resnet50_gn6e_{machines}_machine_tensorflow.tsv",
            comm=HALF_PRECISION,
            is_fitted=machines == 1,
        )
        for machines, minutes, segments in rows
    ]


def published_runs(phases_by_machines: dict[int, Sequence[Phase]]) -> list[PublishedRun]:
    """Return all published runs. `phases_by_machines` are the tables of recipes/resnet50_18min.py."""
    others = (kempner_runs, ffcv_runs, mlperf_runs, goyal_runs, alibaba_runs)
    return [*imagenet18_runs(phases_by_machines), *(run for runs in others for run in runs())]
