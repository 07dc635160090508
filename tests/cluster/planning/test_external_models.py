"""Models and optimizers of other packages: no forecast, and no known size of their checkpoints."""

from typing import Any

import pytest

from cluster.backends.planner import checkpoint_bytes
from cluster.planning.launch_options import make_launch_options
from cluster.planning.resolve import plan
from train.forecast import forecast
from train.recipe import Data, Model, Optim, Phase, Recipe


def recipe(model: str, optim: str = "sgd", **changes: Any) -> Recipe:
    data = Data(name="d", root="/nowhere", train=1000, val=10)
    phases = [Phase(epochs=(0, 1), size=32, batch=10, lr=0.1)]
    return Recipe(name="x", data=data, model=Model(name=model), optim=Optim(name=optim), phases=phases, **changes)


@pytest.mark.parametrize("name", ["timm:vit_base_patch16_224", "torchvision:vgg16", "mine.nets:make"])
def test_external_model_has_no_forecast_and_no_known_checkpoint(name: str) -> None:
    external = plan(recipe(name), make_launch_options(backend="plan"))
    assert external.spec.recipe.model.name == name
    assert forecast(external.recipe_schedule, gpus=8, gpu="V100", gbit=25.0, machines=1) is None
    assert checkpoint_bytes(recipe(name)) is None
