"""Progressive resizing, and a growing batch instead of a falling learning rate: the same accuracy for less work?"""

from itertools import pairwise

from experiments.harness.claims import MARGIN_POINTS, Arm, Claim, Experiment, make_side
from experiments.studies.goyal import CIFAR
from train.recipe import Model, Optim, Phase, Recipe

EPOCH_EDGES = (0, 3, 6, 9, 12)
SIZES_BY_CHOICE = {"full size": (32, 32, 32, 32), "small first": (16, 24, 24, 32)}
BatchesAndRates = tuple[tuple[int, ...], tuple[float | tuple[float, float], ...]]  # of the four phases
PEAK_RATE = 0.1  # at 64 images
FALLING_RATE: BatchesAndRates = (
    (64, 64, 64, 64),
    ((PEAK_RATE / 10, PEAK_RATE), PEAK_RATE, PEAK_RATE / 2, (PEAK_RATE / 4, 0.0)),
)
GROWING_BATCH: BatchesAndRates = (
    (64, 64, 128, 256),
    ((PEAK_RATE / 10, PEAK_RATE), PEAK_RATE, PEAK_RATE, (PEAK_RATE, 0.0)),
)
BATCHES_AND_RATES_BY_CHOICE = {"falling rate": FALLING_RATE, "growing batch": GROWING_BATCH}


def make_arm(size_choice: str, step_choice: str) -> Arm:
    """Return the arm with a choice of image sizes and a choice of batches and learning rates."""
    batches, rates = BATCHES_AND_RATES_BY_CHOICE[step_choice]
    phase_values = zip(pairwise(EPOCH_EDGES), SIZES_BY_CHOICE[size_choice], batches, rates, strict=True)
    recipe = Recipe(
        name="progressive",
        data=CIFAR,
        model=Model(name="resnet10_cifar", zero_gamma=False),
        optim=Optim(momentum=0.9, nesterov=True, weight_decay=5e-4),
        machines=1,
        gpus=1,
        phases=[
            Phase(epochs=epochs, size=size, batch=batch, lr=rate, min_scale=0.75, validate="never")
            for epochs, size, batch, rate in phase_values
        ],
    )
    return Arm(name=f"{size_choice}, {step_choice}", recipe=recipe)


PLAIN_ARM = make_arm("full size", "falling rate")
SMALL_FIRST_ARM = make_arm("small first", "falling rate")
GROWING_BATCH_ARM = make_arm("full size", "growing batch")
BOTH_ARM = make_arm("small first", "growing batch")


def as_good_claim(arm: Arm, text: str, source: str = "") -> Claim:
    """Return the claim that an arm is as good as the plain one, and takes less work or time."""
    return Claim(
        text=text,
        first=make_side(arm.name),
        second=make_side(PLAIN_ARM.name),
        margin=MARGIN_POINTS,
        cheaper=True,
        source=source,
    )


EXPERIMENT = Experiment(
    name="progressive",
    title="6. Small images first, and a growing batch",
    description=(
        "12 epochs in four phases. Image sizes: 32 pixels in all phases, or 16, 24, 24, 32. Steps: 64 images with a "
        "learning rate that is halved twice, or a constant rate with a batch that is doubled twice (Smith et al. "
        "2017), so that the rate per image is the same; both decay to 0 at the end. Validation is at 32 pixels. "
        "Batch norm sees the whole batch."
    ),
    arms=(PLAIN_ARM, SMALL_FIRST_ARM, GROWING_BATCH_ARM, BOTH_ARM),
    claims=(
        as_good_claim(
            SMALL_FIRST_ARM,
            "Small images first are as good as full size",
            "128, 224 and 288 pixels in fast.ai's 18 minutes",
        ),
        as_good_claim(GROWING_BATCH_ARM, "A growing batch is as good as a falling rate"),
        as_good_claim(BOTH_ARM, "Both together are as good as neither"),
    ),
)
