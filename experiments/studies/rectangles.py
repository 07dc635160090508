"""Training on rectangular against square crops, on photographs that are upright or turned by 180 degrees.

There are few photographs, of nearly as many kinds of things, so the kinds cannot be learned. Whether a photograph was
turned by 180 degrees can be learned. The label needs no human, and turning changes neither width nor height, so the
shape of a rectangle does not reveal it.
"""

from experiments.harness.claims import Arm, Claim, ClaimSide, Experiment, ImageSources
from experiments.harness.images import FOLDS, ImageSet, prepare_photographs
from train.recipe import Data, Model, Optim, Phase, Recipe

EPOCHS = 30


def make_arm(name: str, rect_train: bool) -> Arm:
    """Return an arm. Both arms are validated on whole rectangles and on center squares."""

    def make_phase(start: int, end: int, lr: tuple[float, float]) -> Phase:
        return Phase(
            epochs=(start, end),
            size=96,
            batch=32,
            lr=lr,
            min_scale=0.35,
            validate="never",
            rect_val=True,
            rect_train=rect_train,
        )

    recipe = Recipe(
        name="rectangles",
        data=Data(name="photographs", root="data/photographs", train=640, val=160),
        model=Model(name="resnet10_tiny", zero_gamma=False),
        optim=Optim(momentum=0.9, nesterov=True, weight_decay=5e-4),
        machines=1,
        gpus=1,
        phases=[make_phase(0, 6, (0.005, 0.05)), make_phase(6, EPOCHS, (0.05, 0.0))],
    )
    return Arm(name=name, recipe=recipe)


def fold_images(sources: ImageSources, seed: int) -> ImageSet:
    """Return the photographs with the seed's fold, a fifth of them, for validation."""
    assert sources.photographs is not None
    return prepare_photographs(sources.photographs, sources.work, seed % FOLDS)


SQUARE_ARM = make_arm("trained on squares", False)
RECTANGLE_ARM = make_arm("trained on rectangles", True)
METRIC_BY_VIEW = {"rectangles": "top1", "squares": "top1_square"}

EXPERIMENT = Experiment(
    name="rectangles",
    title="7. Training on rectangles, on photographs",
    description=(
        "Each photograph appears upright and turned by 180 degrees, and the network predicts which. 96 pixels, "
        f"{EPOCHS} epochs, the same number of images and steps in both arms. A fifth of the photographs, with both "
        "versions of each, is for validation; five consecutive seeds use five different fifths. Top-1 is that of "
        "whole rectangles; guessing gives 50 %. Several seeds use the same photographs, so the intervals are valid "
        "only for these photographs."
    ),
    arms=(SQUARE_ARM, RECTANGLE_ARM),
    claims=(
        *(
            Claim(
                text=f"Validated on {view}, training on rectangles is better than on squares",
                first=ClaimSide((RECTANGLE_ARM.name,), metric),
                second=ClaimSide((SQUARE_ARM.name,), metric),
            )
            for view, metric in METRIC_BY_VIEW.items()
        ),
        Claim(
            text="Trained on squares, validation on rectangles is better than on squares",
            first=ClaimSide((SQUARE_ARM.name,), "top1"),
            second=ClaimSide((SQUARE_ARM.name,), "top1_square"),
            source="76.91 to 77.35 % top-1 on ImageNet (fast.ai's notebook)",
        ),
    ),
    required_source="photographs",
    images=fold_images,
    seeds_factor=2,
)
