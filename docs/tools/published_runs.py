"""Published runs beside the forecast: constants from at most one run of each system, all others predicted.

    python docs/tools/forecast_page.py docs/forecast.md         # writes the table

A run that constants come from is named "fitted" and proves nothing; what is predicted was not looked at for them. A
miss stays in the table with what is known of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from train.forecast.constants import IMAGENET18_CONSTANTS, Constants
from train.forecast.hardware import EFA_NETWORK, NetworkSpec
from train.forecast.model import Forecast, forecast
from train.recipe.components import IMAGENET, Model
from train.recipe.schedule import Schedule
from train.recipe.schema import Phase, Recipe

MAX_ERROR = 0.1
DAWNBENCH_ENTRIES = "stanford-futuredata/dawn-bench-entries, ImageNet/train/"
LOG_OF_8_MACHINES = "sanjeevm0/imagenet18, dawn/logs/single_machine"


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """A published run: `minutes` as they were published, of `phases` on `machines` of `gpus` GPUs; `fitted`: the
    constants come from it. `note` says what is to be known of it.
    """

    system: str
    name: str
    minutes: float
    phases: tuple[Phase, ...]
    machines: int
    gpus: int
    gpu: str
    gbit: float
    constants: Constants
    constants_from: str
    source: str
    vcpus: float | None = None
    val_images: int = IMAGENET.val
    is_fitted: bool = False
    note: str = ""

    @property
    def forecast(self) -> Forecast:
        """The forecast of it."""
        recipe = Recipe(name="published", data=replace(IMAGENET, val=self.val_images), model=Model(name="resnet50"),
                        phases=self.phases)  # fmt: skip
        schedule = Schedule(recipe, IMAGENET.train, self.machines * self.gpus)
        found = forecast(
            schedule, gpus=self.gpus, gpu=self.gpu, gbit=self.gbit, machines=self.machines, vcpus=self.vcpus,
            constants=self.constants,
        )  # fmt: skip
        if found is None:
            raise ValueError(f"{self.name}: no forecast for {self.gpu}")
        return found

    @property
    def error(self) -> float:
        """The forecast's training over the published one, less 1."""
        return self.forecast.training_seconds / 60 / self.minutes - 1


def consecutive_phases(*segments: tuple[int, int, int]) -> tuple[Phase, ...]:
    """Return phases of (epochs, size, batch on a GPU), one after the other."""
    found, start = [], 0
    for epochs, size, batch in segments:
        found.append(Phase(epochs=(start, start + epochs), size=size, batch=batch, lr=0.1))
        start += epochs
    return tuple(found)


def phases_until(phases: Sequence[Phase], epochs: int) -> tuple[Phase, ...]:
    """Return the phases up to an epoch."""
    some = [one for one in phases if one.epochs[0] < epochs]
    return tuple(replace(one, epochs=(one.epochs[0], min(one.epochs[1], epochs))) for one in some)


# --- imagenet18: the tables of recipes/resnet50_18min.py, given from outside, for trainers know no recipes ----------


def imagenet18_runs(tables: dict[int, Sequence[Phase]]) -> list[PublishedRun]:
    """Return the runs of 2018 on 1 to 16 p3.16xlarge, with the schedules that they ran."""
    four = [*phases_until(tables[4], 27), replace(tables[4][-1], epochs=(27, 30))]
    told = [
        (1, 28, 109.2, tables[1], "imagenet18_old train.py, a comment: 109:12 to 93.00", "The log cannot tell the "
         "network's part of its 79 ms a step from the rest, so one machine is forecast with all of it; were 64 ms of "
         "it the network's, as its half speed has it, the forecast would be 94.5 minutes (-13.5 %). Without the "
         "loader, in validation too: 101.2 minutes (-7.3 %)."),
        (2, 30, 54.0, tables[2], "cybertronai/imagenet18 train.py, a comment: 54 minutes to 93.364", "The trainer of "
         "2019, which logged elsewhere."),
        (4, 29, 29.71, four, DAWNBENCH_ENTRIES + "fastai_resnet50_p3_4_machine_pytorch.tsv, row 28", "As it was run: 288 pixels "
         "from epoch 27, one earlier than in train.py, whose 30 epochs are forecast at 31.7 minutes below."),
        (4, 30, 31.78, four, DAWNBENCH_ENTRIES + "fastai_resnet50_p3_4_machine_pytorch.tsv, row 29", "As it was run, too."),
        (8, 30, 18.88, tables[8], DAWNBENCH_ENTRIES + "fastai_resnet50_p3_8_machine_pytorch.tsv, row 29", ""),
        (8, 36, 25.98, tables[8], DAWNBENCH_ENTRIES + "fastai_resnet50_p3_8_machine_pytorch.tsv, row 35", ""),
        (16, 38, 18.09, tables[16], DAWNBENCH_ENTRIES + "fastai_resnet50_p3_16_machine_pytorch.tsv, row 38", "Its steps of 24,576 "
         "images from full-size files are 13 % slower than forecast."),
    ]  # fmt: skip
    return [
        PublishedRun(
            system="imagenet18, V100", name=f"{machines} machine{'s' * (machines > 1)}, {epochs} epochs",
            minutes=minutes, phases=phases_until(table, epochs), machines=machines, gpus=8, gpu="V100", gbit=25.0, vcpus=64,
            constants=IMAGENET18_CONSTANTS, constants_from="8 machines, log", source=source, is_fitted=machines == 8, note=note,
        )
        for machines, epochs, minutes, table, source, note in told
    ]  # fmt: skip


# --- others -------------------------------------------------------------------------------------------------------


# One A100: 129,686 s for 90 epochs of 1,281,167 images and 50,000 forward (16,667 whole ones). The workers' start in
# each epoch is imagenet18's at 224 pixels: the same DataLoader, made anew each time.
KEMPNER_CONSTANTS = Constants(
    source="Kempner on one GPU", images_per_second=(1_281_167 + 16_667) / (129_686 / 90 - 5.2), network=EFA_NETWORK,
    epoch_seconds=((224, 5.2),),
)  # fmt: skip


def kempner_runs() -> list[PublishedRun]:
    """Return plain DDP on 1 to 64 A100, four to a machine, InfiniBand."""
    told = {1: 129_686, 2: 65_752, 4: 33_216, 8: 17_104, 16: 8_914, 32: 4_765, 64: 2_640}
    return [
        PublishedRun(
            system="Kempner, A100", name=f"{gpus} GPU{'s' * (gpus > 1)}, 90 epochs", minutes=seconds / 60,
            phases=consecutive_phases((90, 224, 256)), machines=max(1, gpus // 4), gpus=min(gpus, 4), gpu="A100", gbit=200.0,
            constants=KEMPNER_CONSTANTS, constants_from="1 GPU; the epochs' fixed seconds of imagenet18's log", is_fitted=gpus == 1,
            source="KempnerInstitute/scalable-vision-workflows, imagenet1k_resnet50/README.md",
        )
        for gpus, seconds in told.items()
    ]  # fmt: skip


# Rows of the 16-epoch run: epochs of 49.0 s at 160 pixels and 65.1 s at 192, 3.5 s of each validation; 312 full steps;
# 26.7 s more for the first epoch, 13.6 s of it as for the first at 192; 3.4 s for another validation at the end.
FFCV_CONSTANTS = Constants(
    source="FFCV's 16 epochs", batch_timings=((160, 512, 45.5 / 312.8), (192, 512, 61.6 / 312.8)), bus_gbit=1e9,
    epoch_seconds=((192, 3.5),), switch_seconds=((192, 13.6),), startup_seconds=26.7 - 13.6 + 3.4,
)  # fmt: skip


def ffcv_runs() -> list[PublishedRun]:
    """Return FFCV's schedules on 8 A100: 160 pixels, from the middle of its ramp on 192."""
    told = {16: (12, 14.87), 24: (19, 21.70), 32: (25, 28.76), 40: (32, 35.58), 56: (45, 49.40), 88: (71, 77.24)}
    return [
        PublishedRun(
            system="FFCV, A100", name=f"{epochs} epochs", minutes=minutes,
            phases=consecutive_phases((small, 160, 512), (epochs - small, 192, 512)), machines=1, gpus=8, gpu="A100", gbit=400.0,
            constants=FFCV_CONSTANTS, constants_from="16 epochs", source="libffcv/ffcv-imagenet, assets/agg.csv, relative_time", val_images=1,
            is_fitted=epochs == 16,
        )
        for epochs, (small, minutes) in told.items()
    ]  # fmt: skip


# Nothing of the runs on 64 GPUs: a card's rate from 8 of them, and what a step takes whatever its batch from 2528 H100
# (0.228 minutes, 69 epochs of 32 steps with 16 images a GPU: 6.2 ms, 2.1 of them compute). The switches add the
# gradients up, so hops are free.
MLPERF_H100_CONSTANTS = Constants(
    source="NVIDIA's MLPerf v4.0",
    images_per_second=7_592.0,
    network=NetworkSpec(0.8, 0.0),
    gradient_bytes=2,
    optimizer_seconds=0.0040,
)
MLPERF_L40S_CONSTANTS = replace(MLPERF_H100_CONSTANTS, images_per_second=1_919.0)
MLPERF_SOURCE = "mlcommons/training_results_v4.0, "


def mlperf_runs() -> list[PublishedRun]:
    """Return NVIDIA's runs of 35 epochs to 75.9 % top-1; mean of five without the fastest and the slowest."""
    told = [
        ("8 H100", 13.27, 1, 8, "H100", MLPERF_H100_CONSTANTS, 400, 35, "eos", True, ""),
        ("64 H100", 2.505, 8, 8, "H100", MLPERF_H100_CONSTANTS, 50, 35, "eos_n8", False,
         "With the rate of 8 GPUs alone the forecast would be 1.67 minutes (-33.5 %): steps of 7 ms have a part that "
         "no smaller batch shortens. The term was added when this was seen; its value is the run's on 2528 GPUs."),
        ("2528 H100, 69 epochs", 0.228, 316, 8, "H100", MLPERF_H100_CONSTANTS, 16, 69, "eos_n316", True, ""),
        ("3584 H100, 77 epochs", 0.183, 448, 8, "H100", MLPERF_H100_CONSTANTS, 16, 77, "coreweave_hgxh100_n448", False,
         "MLPerf's record."),
        ("8 L40S", 50.59, 2, 4, "L40S", MLPERF_L40S_CONSTANTS, 200, 35, "l40s_n2", True, ""),
        ("64 L40S", 7.149, 16, 4, "L40S", MLPERF_L40S_CONSTANTS, 50, 35, "l40s_n16", False,
         "With the rate of 8 GPUs alone: 6.38 minutes (-10.7 %)."),
    ]  # fmt: skip
    return [
        PublishedRun(
            system=f"MLPerf, {gpu}", name=name if "epochs" in name else f"{name}, 35 epochs", minutes=minutes,
            phases=consecutive_phases((epochs, 224, batch)), machines=machines, gpus=gpus, gpu=gpu,
            gbit=3200.0 if gpu == "H100" else 400.0, constants=constants,
            constants_from=f"8 {gpu}; a step's least time from 2528 H100", source=f"{MLPERF_SOURCE}NVIDIA/results/{folder}", val_images=1,
            is_fitted=fitted, note=note,
        )
        for name, minutes, machines, gpus, gpu, constants, batch, epochs, folder, fitted, note in told
    ]  # fmt: skip


# Their 29 hours on one server of 8 P100, 256 images a step; 50 Gbit/s of Ethernet by the presets.
GOYAL_CONSTANTS = Constants(source="Goyal et al. 2017, one server", images_per_second=90 * 1_281_167 / (29 * 3600) / 8)


def goyal_runs() -> list[PublishedRun]:
    """Return ImageNet in an hour on 256 P100."""
    return [
        PublishedRun(
            system="Goyal et al., P100", name=f"{8 * machines} GPUs, 90 epochs", minutes=minutes,
            phases=consecutive_phases((90, 224, 32)), machines=machines, gpus=8, gpu="P100", gbit=50.0, constants=GOYAL_CONSTANTS,
            constants_from="8 GPUs, 29 hours", source="arXiv 1706.02677, abstract and section 5", is_fitted=machines == 1, val_images=1,
        )
        for machines, minutes in ((1, 29 * 60.0), (32, 60.0))
    ]  # fmt: skip


# Its run on one machine: epochs of 37.3, 56.1 and 138.6 s at 96, 128 and 224 pixels, 626 steps of 256 images a GPU. A
# line through the first and the last: 1292 images/s and 23.2 ms in each step; the two other sizes are on it (2 %).
ALIBABA_CONSTANTS = Constants(
    source="Alibaba on one machine", images_per_second=1_292.0, gradient_bytes=2, optimizer_seconds=0.0232
)


def alibaba_runs() -> list[PublishedRun]:
    """Return Alibaba's on 128 V100 with 32 Gbit/s, and on the 8 that the constants come from."""
    one, many = ((12, 96), (6, 128), (2, 224)), ((13, 96), (11, 128), (3, 224))
    told = [(1, 21.63, one, "1"), (16, 2.63, many, "16")]
    return [
        PublishedRun(
            system="Alibaba, V100", name=f"{8 * machines} GPUs, {sum(epochs for epochs, _ in parts) + 1} epochs",
            minutes=minutes, phases=consecutive_phases(*((epochs, size, 256) for epochs, size in parts), (1, 288, 128)),
            machines=machines, gpus=8, gpu="V100", gbit=32.0, constants=ALIBABA_CONSTANTS, constants_from="8 GPUs",
            source=f"{DAWNBENCH_ENTRIES}alibabacloud_resnet50_gn6e_{number}_machine_tensorflow.tsv", is_fitted=machines == 1, val_images=1,
        )
        for machines, minutes, parts, number in told
    ]  # fmt: skip


def published_runs(tables: dict[int, Sequence[Phase]]) -> list[PublishedRun]:
    """Return all published runs; `tables` are the phases of recipes/resnet50_18min.py."""
    return [*imagenet18_runs(tables), *kempner_runs(), *ffcv_runs(), *mlperf_runs(), *goyal_runs(), *alibaba_runs()]
