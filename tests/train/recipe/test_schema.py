"""What a recipe accepts; errors name the row and the field of a wrong value; recipes as JSON."""

import json
import math
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
from support.error_lines import error_line

from train.recipe import Data, Model, Optim, Phase, Recipe

error_of = partial(error_line, ValueError)
NAN, INF = math.nan, math.inf
NOT_NUMBERS: list[Any] = [NAN, INF, -INF, -0.1, True, "0.1", None]
NOT_PAIRS = [(), (0.1,), (0.1, 0.2, 0.3), *((0.1, bad) for bad in NOT_NUMBERS), *((bad, 1) for bad in NOT_NUMBERS)]


def make_phase(**changes: Any) -> Phase:
    return Phase(**{"epochs": (2, 5), "size": 64, "batch": 16, "lr": 0.1, **changes})


def make_phases(*pairs: tuple[int, int]) -> list[Phase]:
    return [make_phase(epochs=pair) for pair in pairs]


def make_data(**changes: Any) -> Data:
    return Data(**{"name": "some", "root": "some", "train": 10, "val": 5, **changes})


def make_model(**changes: Any) -> Model:
    return Model(**{"name": "resnet18", **changes})


def make_recipe(**changes: Any) -> Recipe:
    return Recipe(**{"name": "r", "data": make_data(), "model": make_model(), "phases": make_phases((0, 1)), **changes})


@pytest.mark.parametrize(("make", "where", "fields", "wrong_values"), [
    (make_phase, "phase 2-5, ", "size",
     [15, 0, -64, 64.0, "64", None, True, (160,), (160, 192, 224), (192, 160), (160, 160), (150, 192), (0, 32),
      (160, 200), (-32, 32), (160.0, 192), ("160", 192), (True, 32), (160, None), ()]),
    (make_phase, "phase ", "epochs",
     [(3, 3), (4, 3), (-1, 2), (0.0, 2), (0, 2.0), ("0", 2), (0, None), (True, 2), (1,), (1, 2, 3), 3, None]),
    (make_phase, "phase 2-5, ", "batch", [0, -1, 16.0, "16", None, True]),
    (make_phase, "phase 2-5, ", "copy", [31, 0, -160, 160.0, "160", True]),
    (make_phase, "phase 2-5, ", "lr", NOT_NUMBERS + NOT_PAIRS),
    (make_phase, "phase 2-5, ", "shape", ["linea", "", None, 3, ["linear"]]),
    (make_phase, "phase 2-5, ", "min_scale", [0, 0.0, -0.1, 1.001, NAN, INF, "0.1", None, True]),
    (make_phase, "phase 2-5, ", "rect_val augment", [1, 0, None, "yes", "fixres"]),
    (make_phase, "phase 2-5, ", "frozen", ["classifier", 1]),
    (make_phase, "phase 2-5, ", "validate", ["often", None]),
    (make_model, "model, ", "name", ["resnet", "ResNet18", "", None, 18]),
    (make_model, "model, ", "blurpool compile zero_gamma", [1, None]),
    (Optim, "optim, ", "ema", [0, 1, -0.5, 2, "0.9", True]),
    (Optim, "optim, ", "clip", [0, -1, NAN, "1", True]),
    (Optim, "optim, ", "mixup", [-0.1, NAN, None, "0.2"]),
    (Optim, "optim, ", "cutmix", [-0.1, True]),
    (make_model, "model, ", "fc_std", [wrong for wrong in NOT_NUMBERS if wrong is not None]),  # None is allowed
    (make_model, "model, ", "weights", ["", 3]),
    (Optim, "optim, ", "momentum label_smoothing", [*NOT_NUMBERS, 1.1]),
    (Optim, "optim, ", "weight_decay", NOT_NUMBERS),
    (Optim, "optim, ", "nesterov norm_decay bias_decay", [1, 0, "no", None]),
    (Optim, "optim, ", "betas", [0.9, (0.9,), (0.9, 1.1), (1.0, 0.99), (0.9, 1), (-0.1, 0.9), None]),
    (Optim, "optim, ", "trust eps", [*NOT_NUMBERS, 0, 0.0]),
    (Optim, "optim, ", "lars_form", ["Google", "", None]),
    (make_data, "data, ", "name root", ["", None, 3]),
    (make_data, "data, ", "train val", [0, -1, 1.5, "10", None, True]),
    (make_data, "data, ", "val_fraction", [-0.1, 0.95, 1, NAN, "0.1", True]),
    (make_recipe, "recipe ", "name", ["", "a/b", "a\\b", "a\nb", "a\0b", None, 3]),
    (make_recipe, "recipe ", "data", [None, "imagenet", {"name": "x"}]),
    (make_recipe, "recipe ", "model", [None, "resnet50"]),
    (make_recipe, "recipe ", "optim", [None, 0.1]),
    (make_recipe, "recipe ", "machines gpus", [0, -1, 1.0, "1", True]),
    (make_recipe, "recipe ", "seed", [-1, 0.5, "0", None, True, 2**63]),
    (make_recipe, "recipe ", "target", [-1.0, 100.5, float("nan"), "93", True]),
    (make_recipe, "recipe ", "transform", ["", 3, "augment", "timm:augment", "my-aug:augment", lambda pixels: pixels]),
    (make_recipe, "recipe ", "phases", [(), None, 3, make_phase(epochs=(0, 1))]),
    (make_recipe, "recipe ", "types",
     ["p4d.24xlarge", ["p4d/24xlarge"], ["p4d 24xlarge"], ["p4d.24xlarge "], [""], [None], [3], None, {}, 3,
      ["p4d.", ".24xlarge"], ["p4d.24xlarge\n"], ["g5.xlarge", "p4d.24xlarge", "g5.xlarge"]]),
])  # fmt: skip
def test_wrong_value_is_an_error_of_one_line_that_names_its_place(
    make: Any, where: str, fields: str, wrong_values: list[Any]
) -> None:
    for field, wrong in product(fields.split(), wrong_values):
        message = error_of(make, **{field: wrong})
        assert message.startswith(where) and f", {field}" in message, (wrong, message)


@pytest.mark.parametrize(("pairs", "row", "kind"), [
    ([(1, 2)], 1, "gap"),
    ([(0, 2), (3, 4)], 2, "gap"),
    ([(0, 2), (1, 4)], 2, "overlap"),
    ([(0, 2), (0, 2)], 2, "overlap"),
    ([(0, 2), (2, 4), (5, 6)], 3, "gap"),
    ([(2, 4), (0, 2)], 1, "gap"),
])  # fmt: skip
def test_recipe_gap_or_overlap_names_the_row(pairs: list[tuple[int, int]], row: int, kind: str) -> None:
    message = error_of(make_recipe, phases=make_phases(*pairs))
    assert f"row {row}, epochs: " in message and f"({kind})" in message
    message = error_of(make_recipe, phases=(), tables={1: make_phases((0, 1)), 4: make_phases(*pairs)})
    assert "table for 4 machines" in message and f"row {row}, epochs: " in message


RESNET50 = make_model(name="resnet50")
FIXRES = [make_phase(epochs=(0, 4), frozen="fixres")]
NEAR = [make_phase(epochs=(0, 4), validate="near")]


@pytest.mark.parametrize(("make", "allowed", "refused", "message"), [
    (make_phase, {"shape": "gradual_warmup"}, {"lr": (0.1, 0.4)}, "phase 2-5, lr: gradual_warmup takes one number"),
    (make_phase, {"size": (160, 192)}, {"epochs": (2, 3)}, "phase 2-3, size: 160 cannot grow to 192 in one epoch"),
    (Optim, {"nesterov": True}, {"momentum": 0.0}, "optim, nesterov: needs a momentum"),
    (Optim, {"name": "lars"}, {"norm_decay": True}, "optim, norm_decay: lars neither"),
    (Optim, {"name": "lamb"}, {"norm_decay": True}, "optim, norm_decay: lamb neither"),
    (Optim, {"label_smoothing": 0.1}, {"loss": "mine.losses:focal"}, "optim, label_smoothing: applies to built-in"),
    (make_model, {"name": "resnet50", "blurpool": True}, {"name": "alexnet_bn"}, "model, blurpool: 'alexnet_bn' is no"),
    (make_recipe, {"model": RESNET50, "phases": FIXRES}, {"model": make_model(name="alexnet_bn")},
     "recipe 'r', frozen: the last norm of 'alexnet_bn' is not known; set frozen=True"),
    (make_recipe, {"phases": NEAR, "target": 93.0}, {"target": None}, "recipe 'r', target: missing, but a phase has"),
    (make_recipe, {}, {"phases": [*make_phases((0, 1)), {}]}, "recipe 'r', row 2: must be a Phase"),
])  # fmt: skip
def test_values_that_do_not_go_together_are_refused(make: Any, allowed: Any, refused: Any, message: str) -> None:
    make(**allowed)
    assert error_of(make, **{**allowed, **refused}).startswith(message)


TABLES = {2: make_phases((0, 2)), 4: make_phases((0, 4)), 16: make_phases((0, 16))}


@pytest.mark.parametrize(("machines", "table"), [(1, 2), (2, 2), (3, 2), (4, 4), (15, 4), (16, 16), (99, 16)])
def test_for_machines_takes_the_same_or_next_smaller_table(machines: int, table: int) -> None:
    recipe = make_recipe(phases=(), tables=TABLES, machines=4)
    assert recipe.epochs == 4
    chosen = recipe.for_machines(machines)
    assert (chosen.machines, chosen.epochs, chosen.nominal_gpus) == (table, table, 8 * table)
    assert chosen.for_machines(4) == recipe
    assert "machines: no table for 8" in error_of(make_recipe, phases=(), tables=TABLES, machines=8)


@pytest.mark.parametrize("recipe", [
    make_recipe(),
    make_recipe(
        phases=[
            make_phase(epochs=(0, 3), lr=(0.1, 0.2), copy=160, validate="near"),
            make_phase(epochs=(3, 5), shape="cosine", rect_val=True, size=[160, 224]),
        ],
        optim=Optim(nesterov=True, bias_decay=False, ema=0.999),
        model=make_model(zero_gamma=False, fc_std=0.1, compile=True, blurpool=True),
        machines=2, gpus=3, seed=5, types=["p4d.24xlarge", "g5.xlarge"], target=93.0,
    ),
    make_recipe(phases=(), tables=TABLES, machines=4),
])  # fmt: skip
def test_recipe_survives_json_without_the_tables_that_are_not_used(recipe: Recipe) -> None:
    assert Recipe.from_json(json.loads(json.dumps(recipe.to_json()))) == replace(recipe, tables={})


JSON = make_recipe().to_json()


@pytest.mark.parametrize("wrong", [
    {}, [], 3, None, "text",
    {**JSON, "extra": 1},
    *({key: value for key, value in JSON.items() if key != name} for name in ("name", "data", "model", "phases")),
    {**JSON, "phases": 3},
    {**JSON, "phases": [{"epochs": [0, 1]}]},
    {**JSON, "phases": [{**JSON["phases"][0], "extra": 1}]},
    {**JSON, "data": {"name": "x"}},
    {**JSON, "model": "resnet18"},
    {**JSON, "optim": None},
    {**JSON, "gpus": 0},
], ids=str)  # fmt: skip
def test_from_json_refuses_other_values(wrong: Any) -> None:
    with pytest.raises(ValueError):
        Recipe.from_json(wrong)
