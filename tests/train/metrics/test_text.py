"""The settings of a recipe in one line."""

from dataclasses import replace

import pytest

from train.metrics.text import describe_training
from train.recipe import SAMPLE, Comm, Model, Optim, Phase, Recipe

PHASES = [Phase(epochs=(n, n + 1), size=32, batch=8, lr=0.1) for n in range(4)]
RECIPE = Recipe(name="t", data=SAMPLE, model=Model(name="resnet18", zero_gamma=False), phases=PHASES)


@pytest.mark.parametrize(
    "optim, description",
    [
        (Optim(), "sgd, momentum 0.9, decay 0.0001 (not on norms), cross_entropy"),
        (Optim(nesterov=True, norm_decay=True), "sgd, momentum 0.9, nesterov, decay 0.0001, cross_entropy"),
        (
            Optim(name="lars", bias_decay=False, scaling="sqrt"),
            "lars, momentum 0.9, trust 0.001, decay 0.0001 (not on norms and biases), cross_entropy, sqrt scaling",
        ),
        (
            Optim(name="adamw", loss="bce", label_smoothing=0.1),
            "adamw, betas 0.9 0.999, eps 1e-06, decay 0.0001 (not on norms), bce, smoothing 0.1",
        ),
    ],
)
def test_describe_training_names_what_the_optimizer_uses(optim: Optim, description: str) -> None:
    assert describe_training(replace(RECIPE, optim=optim)) == description


def test_describe_training_names_unusual_settings() -> None:
    frozen = [replace(phase, frozen=True) for phase in PHASES[:2]]
    phases = [*frozen, PHASES[2], replace(PHASES[3], augment=False)]
    model = Model(name="resnet18", weights="own.pt", compile=True)
    description = describe_training(replace(RECIPE, model=model, comm=Comm(hook="fp16"), phases=phases))
    settings = "zero gamma, weights own.pt, compiled, comm fp16, frozen in epochs 0-2, not augmented in epochs 3-4"
    assert description == f"sgd, momentum 0.9, decay 0.0001 (not on norms), cross_entropy, {settings}"
    rectangular = [replace(phase, rect_train=phase.epochs[0] != 1) for phase in PHASES]
    assert describe_training(replace(RECIPE, phases=rectangular)).endswith("rectangles in epochs 0-1, 2-4")
