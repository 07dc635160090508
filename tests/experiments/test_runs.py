"""Tests of a run's key: it is stable, and changes with everything that decides the outcome and with nothing else."""

import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.harness import runs
from experiments.harness.claims import Arm
from experiments.harness.images import ImageSet
from experiments.harness.runs import FIELDS_OF_FORMAT_1, ExperimentRun
from train.recipe import Data, Model, Phase, Recipe

IMAGES = ImageSet(Path("somewhere"), "abc", 10)
RECIPE = Recipe(
    name="x",
    data=Data(name="drawn", root="r", train=60, val=20),
    model=Model(name="resnet10_tiny"),
    gpus=1,
    phases=[Phase(epochs=(0, 1), size=32, batch=8, lr=0.1), Phase(epochs=(1, 2), size=32, batch=8, lr=(0.1, 0.0))],
)
RUN = ExperimentRun(Arm(name="x", recipe=RECIPE), 0, IMAGES)
CHANGED_VALUES: dict[str, Any] = {  # another value for each field that counts
    "Model.name": "resnet10_cifar", "Model.zero_gamma": False, "Model.fc_std": 0.02, "Model.weights": "w.pt",
    "Model.compile": True, "Optim.name": "lars", "Optim.momentum": 0.8, "Optim.nesterov": True,
    "Optim.betas": (0.8, 0.999), "Optim.eps": 1e-5, "Optim.trust": 0.002, "Optim.weight_decay": 2e-4,
    "Optim.norm_decay": True, "Optim.bias_decay": False, "Optim.loss": "bce", "Optim.label_smoothing": 0.1,
    "Optim.scaling": "sqrt", "Phase.epochs": (1, 3), "Phase.size": 48, "Phase.batch": 16, "Phase.lr": 0.2,
    "Phase.shape": "cosine", "Phase.min_scale": 0.5, "Phase.copy": 64, "Phase.rect_val": True,
    "Phase.rect_train": True, "Phase.frozen": True, "Phase.validate": "last",
}  # fmt: skip


def recipe_with_changed(field: str) -> Recipe:
    """Return the recipe with another value of a field such as "Optim.name"; of a phase, in its second one."""
    part, name = field.split(".")
    change = {name: CHANGED_VALUES[field]}
    if part == "Phase":
        return replace(RECIPE, phases=(RECIPE.phases[0], replace(RECIPE.phases[1], **change)))
    return replace(RECIPE, **{part.lower(): replace(getattr(RECIPE, part.lower()), **change)})


def test_key_is_stable() -> None:
    assert RUN.key == "e9b43e0db721d9b6"  # another key makes all rows worthless; if that is intended, increase FORMAT


@pytest.mark.parametrize("field", CHANGED_VALUES)
def test_key_changes_with_each_field_of_the_recipe(field: str) -> None:
    assert ExperimentRun(Arm(name="x", recipe=recipe_with_changed(field)), 0, IMAGES).key != RUN.key


def test_relevant_fields_exist_and_are_tested_above() -> None:
    names = {f"{kind.__name__}.{name}" for kind, names in FIELDS_OF_FORMAT_1.items() for name in names}
    recipe_fields = {
        f"{kind.__name__}.{field.name}" for kind in FIELDS_OF_FORMAT_1 for field in dataclasses.fields(kind)
    }
    assert names == set(CHANGED_VALUES) and names <= recipe_fields


@pytest.mark.parametrize(
    "other",
    [
        replace(RUN, seed=1), replace(RUN, images=replace(IMAGES, fingerprint="abd")),
        replace(RUN, arm=replace(RUN.arm, gpus=2)), replace(RUN, arm=replace(RUN.arm, recipe=replace(RECIPE, gpus=2))),
        replace(RUN, arm=replace(RUN.arm, recipe=replace(RECIPE, phases=RECIPE.phases[:1]))),
    ],
)  # fmt: skip
def test_key_changes_with_seed_images_gpus_and_phases(other: ExperimentRun) -> None:
    assert other.key != RUN.key


def test_key_ignores_names_and_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = replace(RECIPE, name="y", data=replace(RECIPE.data, root="elsewhere"), seed=7, types=("p4d.24xlarge",))
    other = ExperimentRun(Arm(name="y", recipe=recipe), 0, replace(IMAGES, folder=Path("elsewhere")))
    key = RUN.key
    assert other.key == key
    monkeypatch.setattr(runs, "FORMAT", 2)
    assert RUN.key != key


def test_key_counts_new_field_only_away_from_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    old_fields = tuple(name for name in FIELDS_OF_FORMAT_1[Phase] if name != "rect_val")
    monkeypatch.setitem(FIELDS_OF_FORMAT_1, Phase, old_fields)
    key_without_field = RUN.key
    other = ExperimentRun(Arm(name="x", recipe=recipe_with_changed("Phase.rect_val")), 0, IMAGES)
    monkeypatch.undo()
    assert "rect_val" in RUN.config["phases"][0]
    monkeypatch.setitem(FIELDS_OF_FORMAT_1, Phase, old_fields)
    assert "rect_val" not in RUN.config["phases"][0] and key_without_field == RUN.key
    assert other.config["phases"][1]["rect_val"] is True and other.key != RUN.key


def test_read_row_returns_only_the_same_configuration(tmp_path: Path) -> None:
    assert runs.read_row(RUN, tmp_path) is None
    row = runs.write_row(RUN, tmp_path, {"top1": 50.0})
    assert runs.read_row(RUN, tmp_path) == row and row["name"] == "x, seed 0"
    path = tmp_path / f"{RUN.key}.json"
    assert len(path.read_text().splitlines()) == 6  # the configuration is on one line
    path.write_text(json.dumps({**row, "config": {**row["config"], "seed": 5}}))  # edited by hand, or copied
    assert runs.read_row(RUN, tmp_path) is None
    path.write_text(path.read_text()[:40])
    assert runs.read_row(RUN, tmp_path) is None
