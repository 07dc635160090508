"""What a recipe accepts; errors name the row and the field of a wrong value; recipes as JSON."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from train.recipe import Data, Model, Optim, Phase, Recipe

NAN, INF = math.nan, math.inf
NOT_NUMBERS: list[Any] = [NAN, INF, -INF, -0.1, True, "0.1", None]
NOT_PAIRS = [
    (),
    (0.1,),
    (0.1, 0.2, 0.3),
    *((0.1, wrong) for wrong in NOT_NUMBERS),
    *((wrong, 1) for wrong in NOT_NUMBERS),
]


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


def error_of(make: Callable[..., object], **changes: Any) -> str:
    """Return the text of the `ValueError`, which must be one line."""
    with pytest.raises(ValueError) as caught:
        make(**changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("field", "wrong_values"), [
    ("size", [15, 0, -64, 64.0, "64", None, True, (160,), (160, 192, 224), (192, 160), (160, 160), (150, 192), (0, 32),
              (160, 200), (-32, 32), (160.0, 192), ("160", 192), (True, 32), (160, None), ()]),
    ("epochs", [(3, 3), (4, 3), (-1, 2), (0.0, 2), (0, 2.0), ("0", 2), (0, None), (True, 2), (1,), (1, 2, 3), 3, None]),
    ("batch", [0, -1, 16.0, "16", None, True]),
    ("copy", [31, 0, -160, 160.0, "160", True]),
    ("lr", NOT_NUMBERS + NOT_PAIRS),
    ("shape", ["linea", "", None, 3, ["linear"]]),
    ("min_scale", [0, 0.0, -0.1, 1.001, NAN, INF, "0.1", None, True]),
    ("rect_val", [1, 0, None, "yes"]),
    ("augment", [1, 0, None, "no"]),
    ("frozen", ["classifier", 1]),
    ("validate", ["often", None]),
])  # fmt: skip
def test_phase_wrong_value_names_row_and_field(field: str, wrong_values: list[Any]) -> None:
    for wrong in wrong_values:
        message = error_of(make_phase, **{field: wrong})
        where = "phase " if field == "epochs" else "phase 2-5"
        assert message.startswith(where) and f", {field}" in message, (wrong, message)


@pytest.mark.parametrize(("make", "field", "wrong_values"), [
    (make_model, "name", ["resnet", "ResNet18", "", None, 18]),
    (make_model, "blurpool", [1]),
    (make_model, "compile", [1]),
    (Optim, "ema", [0, 1, -0.5, 2, "0.9", True]),
    (make_model, "zero_gamma", [1, None]),
    (make_model, "fc_std", [wrong for wrong in NOT_NUMBERS if wrong is not None]),  # None is allowed
    (make_model, "weights", ["", 3]),
    (Optim, "momentum", [*NOT_NUMBERS, 1.1]),
    (Optim, "weight_decay", NOT_NUMBERS),
    (Optim, "label_smoothing", [*NOT_NUMBERS, 1.1]),
    (Optim, "nesterov", [1, None]),
    (Optim, "norm_decay", [0, None]),
    (Optim, "betas", [0.9, (0.9,), (0.9, 1.1), (1.0, 0.99), (0.9, 1), (-0.1, 0.9), None]),
    (Optim, "trust", [*NOT_NUMBERS, 0, 0.0]),
    (Optim, "eps", [*NOT_NUMBERS, 0, 0.0]),
    (Optim, "lars_form", ["Google", "", None]),
    (Optim, "bias_decay", ["no", None]),
    (make_data, "name", ["", None, 3]),
    (make_data, "root", ["", None, 3]),
    (make_data, "train", [0, -1, 1.5, "10", None, True]),
    (make_data, "val", [0, -1, 1.5, "10", None, True]),
    (make_data, "val_fraction", [-0.1, 0.95, 1, NAN, "0.1", True]),
])  # fmt: skip
def test_component_wrong_value_names_the_field(make: Any, field: str, wrong_values: list[Any]) -> None:
    kind = {make_model: "model", make_data: "data"}.get(make, "optim")
    for wrong in wrong_values:
        assert error_of(make, **{field: wrong}).startswith(f"{kind}, {field}: "), wrong


@pytest.mark.parametrize(("field", "wrong_values"), [
    ("name", ["", "a/b", "a\\b", "a\nb", "a\0b", None, 3]),
    ("data", [None, "imagenet", {"name": "x"}]),
    ("model", [None, "resnet50"]),
    ("optim", [None, 0.1]),
    ("machines", [0, -1, 1.0, "1", True]),
    ("gpus", [0, -1, 8.0, "8", True]),
    ("seed", [-1, 0.5, "0", None, True, 2**63]),
    ("target", [-1.0, 100.5, float("nan"), "93", True]),
    ("phases", [(), None, 3, make_phase(epochs=(0, 1))]),
    ("types", ["p4d.24xlarge", ["p4d/24xlarge"], ["p4d 24xlarge"], ["p4d.24xlarge "], [""], [None], [3], None, {}, 3,
               ["p4d.", ".24xlarge"], ["p4d.24xlarge\n"], ["g5.xlarge", "p4d.24xlarge", "g5.xlarge"]]),
])  # fmt: skip
def test_recipe_wrong_value_names_recipe_and_field(field: str, wrong_values: list[Any]) -> None:
    for wrong in wrong_values:
        message = error_of(make_recipe, **{field: wrong})
        assert message.startswith("recipe ") and f", {field}: " in message, (wrong, message)


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


JSON = make_recipe().to_json()


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
