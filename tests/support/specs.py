"""A tiny recipe, and job specifications from flat keyword arguments: `scale` is a trainer's option, for example."""

from dataclasses import fields, replace
from typing import Any

from cluster.state.recovery_options import RecoveryOptions
from cluster.state.spec import JobSpec
from train.engine.options import TrainOptions
from train.recipe import Data, Model, Phase, Recipe

GROUPS = {"train": TrainOptions, "recovery": RecoveryOptions}
TINY = Recipe(
    name="tiny",
    data=Data(name="drawn", root="nowhere", train=60, val=20),
    model=Model(name="resnet10_tiny"),
    gpus=1,
    phases=[Phase(epochs=(0, 2), size=32, batch=8, lr=0.05)],
)


def changed_spec(spec: JobSpec, **changes: Any) -> JobSpec:
    """Return a specification with changed fields, also of its groups of options."""
    for group, options_class in GROUPS.items():
        names = {field.name for field in fields(options_class)} & changes.keys()
        changes[group] = replace(getattr(spec, group), **{name: changes.pop(name) for name in names})
    return replace(spec, **changes)


def make_spec(**values: Any) -> JobSpec:
    """Return a specification without a recipe file; its schedule is for one GPU, and there is no standby."""
    required = {"name": values.pop("name"), "workload": values.pop("recipe"), "recipe_file": ""}
    spec = JobSpec(**required, train=TrainOptions(gpus=1), recovery=RecoveryOptions(standby=False))
    return changed_spec(spec, **values)
