"""A recipe's settings in one line."""

from dataclasses import replace

import pytest

from train.metrics.text import describe_training
from train.recipe import SAMPLE, Comm, Model, Optim, Phase, Recipe

ROWS = [Phase(epochs=(n, n + 1), size=32, batch=8, lr=0.1) for n in range(4)]
RECIPE = Recipe(name="t", data=SAMPLE, model=Model(name="resnet18", zero_gamma=False), phases=ROWS)


@pytest.mark.parametrize(
    "optim, words",
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
def test_only_what_an_optimizer_uses_is_said(optim: Optim, words: str) -> None:
    assert describe_training(replace(RECIPE, optim=optim)) == words


def test_what_is_out_of_the_ordinary_is_said() -> None:
    rows = [replace(ROWS[0], frozen=True), replace(ROWS[1], frozen=True), ROWS[2], replace(ROWS[3], augment=False)]
    model = Model(name="resnet18", weights="own.pt", compile=True)
    said = describe_training(replace(RECIPE, model=model, comm=Comm(hook="fp16"), phases=rows))
    more = "zero gamma, weights own.pt, compiled, comm fp16, frozen in epochs 0-2, not augmented in epochs 3-4"
    assert said == f"sgd, momentum 0.9, decay 0.0001 (not on norms), cross_entropy, {more}"
    apart = [replace(one, rect_train=one.epochs[0] != 1) for one in ROWS]
    assert describe_training(replace(RECIPE, phases=apart)).endswith("rectangles in epochs 0-1, 2-4")
