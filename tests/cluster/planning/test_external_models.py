"""Networks and optimizers of other people: planned without a forecast, with a guess of their checkpoints' size."""

from typing import Any

import pytest
import torch

from cluster.backends.local import CHECKPOINT_MB, estimate_checkpoint_mb
from cluster.planning.resolve import plan
from train.forecast import forecast
from train.models.registry import MODEL_BUILDERS
from train.recipe import MODELS, Data, Model, Optim, Phase, Recipe


def recipe(model: str, optim: str = "sgd", **changes: Any) -> Recipe:
    data = Data(name="d", root="/nowhere", train=1000, val=10)
    rows = [Phase(epochs=(0, 1), size=32, batch=10, lr=0.1)]
    return Recipe(name="x", data=data, model=Model(name=model), optim=Optim(name=optim), phases=rows, **changes)


@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_of_ours_has_weights_and_momentum(name: str) -> None:
    with torch.device("meta"):
        megabytes = sum(one.numel() for one in MODEL_BUILDERS[name](1000).parameters()) * 8 / 1e6
    assert megabytes <= CHECKPOINT_MB[name] <= max(megabytes + 1, 4)


@pytest.mark.parametrize("name", ["timm:vit_base_patch16_224", "torchvision:vgg16", "mine.nets:make"])
def test_of_other_networks_nothing_is_foretold_and_a_large_checkpoint_guessed(name: str) -> None:
    one = plan(recipe(name), backend="plan")
    assert one.spec.recipe.model.name == name
    assert forecast(one.schedule, gpus=8, gpu="V100", gbit=25.0, machines=1) is None
    assert 500 < estimate_checkpoint_mb(recipe(name)) < 1000


def test_a_second_moment_makes_a_checkpoint_half_as_large_again() -> None:
    sizes = [
        estimate_checkpoint_mb(recipe("resnet50", optim)) for optim in ("sgd", "lars", "lamb", "adamw", "mine:make")
    ]
    assert sizes == [205, 205, 307, 307, 205]
