"""The schedules of papers and records, copied from the sources. Nothing is computed.

A row of a `phase_table` is a phase: its epochs (without the end), image size in pixels, images in a step on all GPUs,
and the learning rates of its first and its last step; a single rate is constant. `steps` is what the source counts,
or epochs x images / batch. Where our number of steps differs, `step_difference` gives the reason.
"""

from dataclasses import dataclass

IMAGENET18_SOURCE = "diux-dev/imagenet18, train.py"
IMAGENET18_2019_SOURCE = "cybertronai/imagenet18, train.py"
GOYAL_SOURCE = "Goyal et al. 2017, sections 2.2 and 5.1"
WU_SOURCE = "tornadomeet/ResNet, log/resnet-152.log, log/README.md, train_resnet.py"
LARS_SOURCE = "tensorflow/tpu, models/official/resnet/lars_util.py (11a028b)"
CONTINUOUS_STEPS_NOTE = (
    "The source has {theirs:.1f} steps an epoch, and a batch may continue into the next epoch; ours has {ours:,}, the "
    "last with the remaining images"
)
WHOLE_BATCHES_NOTE = (
    "The source counts {theirs:,.0f} whole batches an epoch; ours has {ours:,}, the last with the remaining images"
)


@dataclass(frozen=True)
class PaperPhase:
    """One phase of a schedule: its epochs, image size, images in a step, and first and last learning rate."""

    epochs: tuple[int, int]
    size: int
    batch: int
    lr_endpoints: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class PaperSchedule:
    """The schedule of a source, and our recipe that follows it.

    The recipe is `recipe_name` in recipes/<recipe_file>.py, on `machines` machines. `note` says what is uncertain.
    """

    recipe_file: str
    recipe_name: str
    machines: int
    source: str
    steps: int
    phase_table: str
    step_difference: str = ""
    note: str = ""

    @property
    def paper_phases(self) -> list[PaperPhase]:
        """The rows of `phase_table`."""
        phases = []
        for row in self.phase_table.strip().splitlines():
            epochs, size, batch, first, *last = row.split()
            start, end = epochs.split("-")
            rates = (float(first), float(last[0] if last else first))
            phases.append(PaperPhase((int(start), int(end)), int(size), int(batch), rates))
        return phases


def imagenet18_schedule(
    machines: int, steps: int, phase_table: str, source: str = IMAGENET18_SOURCE, note: str = ""
) -> PaperSchedule:
    """Return the schedule of an 18-minute run on this number of machines."""
    return PaperSchedule(
        recipe_file="resnet50_18min",
        recipe_name="resnet50_18min",
        machines=machines,
        source=source,
        steps=steps,
        phase_table=phase_table,
        note=note,
    )


IMAGENET18_SCHEDULES = [
    imagenet18_schedule(1, 16_405, """
         0-7   128   4096   1.0      2.0
         7-13  128   4096   2.0      0.25
        13-22  224   1792   0.4375   0.04375
        22-25  224   1792   0.04375  0.004375
        25-28  288   1024   0.0025   0.00025
    """),
    imagenet18_schedule(2, 9_599, """
         0-6   128   4096   1.5      3
         6-11  128   8192   3
        11-13  128   8192   3        1.5
        13-16  224   3584   1.3125
        16-23  224   3584   1.3125   0.13125
        23-28  224   3584   0.13125  0.013125
        28-30  288   2048   0.0075   0.00075
    """, source=IMAGENET18_2019_SOURCE),
    imagenet18_schedule(4, 4_806, """
         0-6   128   8192   2        4
         6-11  128  16384   4
        11-13  128  16384   4        2
        13-16  224   7168   1.75
        16-24  224   7168   1.75     0.175
        24-28  224   7168   0.175    0.0175
        28-30  288   4096   0.01     0.001
    """),
    imagenet18_schedule(8, 4_224, """
         0-6   128   8192   1.92     3.84
         6-11  128  16384   3.84
        11-14  128  16384   3.84     1.92
        14-17  224   8192   1.92
        17-23  224  14336   1.92     0.336
        23-29  224  14336   0.336    0.0336
        29-36  288   8192   0.0192   0.00192
    """),
    imagenet18_schedule(16, 4_184, """
         0-6   128   8192   1.88     3.76
         6-16  128  16384   3.76
        16-19  224   8192   1.88
        19-31  224  24576   0.564
        31-37  224  24576   0.0564
        37-38  288  16384   0.0376
        38-50  288  16384   0.00376
    """, note="The run reached 93 % after 38 epochs."),
]  # fmt: skip

THREE_HOURS_SCHEDULE = PaperSchedule(
    recipe_file="resnet50_3hours", recipe_name="resnet50_3hours", machines=1, steps=45 * 1252,
    source="fastai/imagenet-fast, imagenet_nv/main.py (c4b2255), --lr 0.40 --epochs 45 --small",
    phase_table="""
         0-1   128   1024   0.1
         1-2   128   1024   0.13333333333333333
         2-3   128   1024   0.2
         3-18  128   1024   0.4
        18-21  224   1024   0.4
        21-35  224   1024   0.04
        35-41  224   1024   0.004
        41-43  288   1024   0.004
        43-45  288   1024   0.0004
    """,
    note="The entry's own list has the drops of the rate at epochs 20, 34 and 42. The code that it names, and the "
    "accuracies in its fastai_pytorch.tsv, have them at 21, 35 and 43.",
)  # fmt: skip


def goyal_schedule(name: str, phase_table: str, machines: int = 32, steps: int = 14_075) -> PaperSchedule:
    """Return a schedule of "ImageNet in 1 hour" (Goyal et al.)."""
    return PaperSchedule(
        recipe_file="resnet50_1hour",
        recipe_name=name,
        machines=machines,
        source=GOYAL_SOURCE,
        steps=steps,
        phase_table=phase_table,
        step_difference=CONTINUOUS_STEPS_NOTE,
    )


GRADUAL_WARMUP_TABLE = """
     0-5   224   8192   0.1      3.2
     5-30  224   8192   3.2
    30-60  224   8192   0.32
    60-80  224   8192   0.032
    80-90  224   8192   0.0032
"""
BASELINE_TABLE = """
     0-30  224    256   0.1
    30-60  224    256   0.01
    60-80  224    256   0.001
    80-90  224    256   0.0001
"""
ONE_HOUR_SCHEDULES = [
    goyal_schedule("resnet50_1hour", GRADUAL_WARMUP_TABLE),
    goyal_schedule("resnet50_1hour_constant", """
         0-5   224   8192   0.1
         5-30  224   8192   3.2
        30-60  224   8192   0.32
        60-80  224   8192   0.032
        80-90  224   8192   0.0032
    """),
    goyal_schedule("resnet50_1hour_cold", """
         0-30  224   8192   3.2
        30-60  224   8192   0.32
        60-80  224   8192   0.032
        80-90  224   8192   0.0032
    """),
    goyal_schedule("resnet50_1hour_plain", GRADUAL_WARMUP_TABLE),
    goyal_schedule("resnet50_1hour_256", BASELINE_TABLE, 1, 450_410),
    goyal_schedule("resnet101_1hour", GRADUAL_WARMUP_TABLE),
    goyal_schedule("resnet101_1hour_256", BASELINE_TABLE, 1, 450_410),
]  # fmt: skip


def mxnet_schedule(batch: int, steps: int, phase_table: str, source: str = WU_SOURCE, note: str = "") -> PaperSchedule:
    """Return a schedule of MXNet. It counts whole batches and leaves out the rest of an epoch."""
    return PaperSchedule(
        recipe_file="resnet152_mxnet",
        recipe_name=f"resnet152_mxnet_{batch}",
        machines=batch // 256,
        source=source,
        steps=steps,
        phase_table=phase_table,
        step_difference=WHOLE_BATCHES_NOTE,
        note=note,
    )


MXNET_SCHEDULES = [
    mxnet_schedule(256, 600_480, """
          0-30   224    256   0.1
         30-60   224    256   0.01
         60-90   224    256   0.001
         90-100  224    256   0.0001
        100-120  224    256   0.0001
    """),
    mxnet_schedule(2560, 60_000, """
          0-30   224   2560   0.5
         30-60   224   2560   0.05
         60-90   224   2560   0.005
         90-100  224   2560   0.0005
        100-120  224   2560   0.0005
    """, source="apache/mxnet, example/image-classification/README.md: as with 256, but 80 x 32 images and rate 0.5"),
    mxnet_schedule(5120, 30_000, """
          0-40   224   5120   1
         40-70   224   5120   0.1
         70-100  224   5120   0.01
        100-120  224   5120   0.001
    """, source="Mu Li's thesis, section 4.6 (which we have not read)",
          note="Batch and rate are the source's. The epochs of the drops are a guess."),
]  # fmt: skip


def lars_schedule(
    name: str, machines: int, steps: int, phase_table: str, source: str = LARS_SOURCE, note: str = ""
) -> PaperSchedule:
    """Return a schedule with LARS."""
    return PaperSchedule(
        recipe_file="resnet50_lars",
        recipe_name=name,
        machines=machines,
        source=source,
        steps=steps,
        phase_table=phase_table,
        step_difference=CONTINUOUS_STEPS_NOTE,
        note=note,
    )


LARGE_BATCH_SCHEDULES = [
    lars_schedule("resnet50_lars_32k", 128, 3_518, """
         0-12  224  32768   0   34
        12-90  224  32768   34  0
    """),
    lars_schedule("resnet50_lars_64k", 256, 1_759, """
         0-16  224  65536   0   41
        16-90  224  65536   41  0
    """, note="Batch and epochs are also those of Jia et al., whose rate we have not read."),
    lars_schedule("alexnet_lars_32k", 128, 4_000, """
         0-10   224  32768   1   32
        10-100  224  32768   32  0
    """, source="borisgin/nvcaffe, models/alexnet_bn/solver_32k.prototxt"),
    lars_schedule("alexnet_lars_64k", 128, 1_857, """
         0-10  224  65536   1      45.25
        10-95  224  65536   45.25  0
    """, source="Jia et al. 2018: 65,536 images, 95 epochs",
         note="The rate is a guess: the square root of 2 times the 32 of the schedule above."),
]  # fmt: skip

PAPER_SCHEDULES: list[PaperSchedule] = [
    *IMAGENET18_SCHEDULES,
    THREE_HOURS_SCHEDULE,
    *ONE_HOUR_SCHEDULES,
    *MXNET_SCHEDULES,
    *LARGE_BATCH_SCHEDULES,
]
