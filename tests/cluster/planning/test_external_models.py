"""Models and optimizers of other packages: no forecast, and a guess of their checkpoints' size."""

from typing import Any

import pytest
import torch

from cluster.backends.local import CHECKPOINT_MB, estimate_checkpoint_mb
from cluster.planning.launch_options import make_launch_options
from cluster.planning.resolve import plan
from train.forecast import forecast
from train.models.registry import MODEL_BUILDERS
from train.recipe import MODELS, Data, Model, Optim, Phase, Recipe


def recipe(model: str, optim: str = "sgd", **changes: Any) -> Recipe:
    data = Data(name="d", root="/nowhere", train=1000, val=10)
    phases = [Phase(epochs=(0, 1), size=32, batch=10, lr=0.1)]
    return Recipe(name="x", data=data, model=Model(name=model), optim=Optim(name=optim), phases=phases, **changes)


@pytest.mark.parametrize("name", MODELS)
def test_checkpoint_mb_covers_weights_and_momentum(name: str) -> None:
    with torch.device("meta"):
        megabytes = sum(tensor.numel() for tensor in MODEL_BUILDERS[name](1000).parameters()) * 8 / 1e6
    assert megabytes <= CHECKPOINT_MB[name] <= max(megabytes + 1, 4)


@pytest.mark.parametrize("name", ["timm:vit_base_patch16_224", "torchvision:vgg16", "mine.nets:make"])
def test_external_model_has_no_forecast_and_a_large_checkpoint(name: str) -> None:
    external = plan(recipe(name), make_launch_options(backend="plan"))
    assert external.spec.recipe.model.name == name
    assert forecast(external.recipe_schedule, gpus=8, gpu="V100", gbit=25.0, machines=1) is None
    assert 500 < estimate_checkpoint_mb(recipe(name)) < 1000


def test_estimate_checkpoint_mb_adds_half_for_a_second_moment() -> None:
    sizes = [
        estimate_checkpoint_mb(recipe("resnet50", optim)) for optim in ("sgd", "lars", "lamb", "adamw", "mine:make")
    ]
    assert sizes == [205, 205, 307, 307, 205]
