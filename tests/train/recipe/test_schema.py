"""What a recipe accepts, and that it names the row and the field of what it does not."""

import json
import math
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest

from train.recipe import MODELS, SHAPES, Data, Model, Optim, Phase, Recipe

NAN, INF = math.nan, math.inf
NO_NUMBERS: list[Any] = [NAN, INF, -INF, -0.1, True, "0.1", None]
NO_PAIRS = [(), (0.1,), (0.1, 0.2, 0.3), *((0.1, one) for one in NO_NUMBERS), *((one, 1) for one in NO_NUMBERS)]


def phase(**changes: Any) -> Phase:
    return Phase(**{"epochs": (2, 5), "size": 64, "batch": 16, "lr": 0.1, **changes})


def rows(*pairs: tuple[int, int]) -> list[Phase]:
    return [phase(epochs=pair) for pair in pairs]


def data(**changes: Any) -> Data:
    return Data(**{"name": "some", "root": "some", "train": 10, "val": 5, **changes})


def model(**changes: Any) -> Model:
    return Model(**{"name": "resnet18", **changes})


def recipe(**changes: Any) -> Recipe:
    return Recipe(**{"name": "r", "data": data(), "model": model(), "phases": rows((0, 1)), **changes})


def refusal(make: Callable[..., object], **changes: Any) -> str:
    """The text of a `ValueError`, which must be one line."""
    with pytest.raises(ValueError) as caught:
        make(**changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("field", "wrongs"), [
    ("size", [15, 0, -64, 64.0, "64", None, True]),
    ("batch", [0, -1, 16.0, "16", None, True]),
    ("copy", [31, 0, -160, 160.0, "160", True]),
    ("lr", NO_NUMBERS + NO_PAIRS),
    ("shape", ["linea", "", None, 3, ["linear"]]),
    ("min_scale", [0, 0.0, -0.1, 1.001, NAN, INF, "0.1", None, True]),
    ("rect_val", [1, 0, None, "yes"]),
    ("augment", [1, 0, None, "no"]),
])  # fmt: skip
def test_a_wrong_value_of_a_phase_is_refused_by_row_and_field(field: str, wrongs: list[Any]) -> None:
    for wrong in wrongs:
        said = refusal(phase, **{field: wrong})
        assert said.startswith(f"phase 2-5, {field}: "), (wrong, said)


@pytest.mark.parametrize(
    "wrong",
    [(3, 3), (4, 3), (-1, 2), (0.0, 2), (0, 2.0), ("0", 2), (0, None), (True, 2), (1,), (1, 2, 3), 3, None],
)
def test_epochs_that_are_no_range_are_refused(wrong: Any) -> None:
    said = refusal(phase, epochs=wrong)
    assert said.startswith("phase ") and ", epochs" in said


@pytest.mark.parametrize("shape", ["gradual_warmup", "constant_warmup"])
def test_a_warmup_takes_one_rate(shape: str) -> None:
    assert phase(shape=shape, lr=0.4).lr_endpoints == (0.4, 0.4)
    assert "phase 2-5, lr" in refusal(phase, shape=shape, lr=(0.1, 0.4))


def test_values_at_the_edge_are_accepted() -> None:
    edge = phase(epochs=(0, 1), size=32, batch=1, lr=0, min_scale=1, copy=32)
    assert (edge.lr_endpoints, edge.min_scale) == ((0, 0), 1)
    assert phase(size=33).size == 33
    for shape in SHAPES:
        assert phase(shape=shape).shape == shape


def test_pairs_given_as_lists_become_tuples() -> None:
    assert phase(epochs=[2, 5], lr=[0.1, 0.2]) == phase(lr=(0.1, 0.2))


@pytest.mark.parametrize(("make", "field", "wrongs"), [
    (model, "name", ["resnet", "ResNet18", "", None, 18]),
    (model, "zero_gamma", [1, None]),
    (model, "fc_std", [one for one in NO_NUMBERS if one is not None]),  # None: as the network starts it
    (model, "weights", ["", 3]),
    (Optim, "momentum", [*NO_NUMBERS, 1.1]),
    (Optim, "weight_decay", NO_NUMBERS),
    (Optim, "label_smoothing", [*NO_NUMBERS, 1.1]),
    (Optim, "nesterov", [1, None]),
    (Optim, "norm_decay", [0, None]),
    (Optim, "betas", [0.9, (0.9,), (0.9, 1.1), (1.0, 0.99), (0.9, 1), (-0.1, 0.9), None]),
    (Optim, "trust", [*NO_NUMBERS, 0, 0.0]),
    (Optim, "eps", [*NO_NUMBERS, 0, 0.0]),
    (Optim, "eps", NO_NUMBERS),
    (Optim, "bias_decay", ["no", None]),
    (data, "name", ["", None, 3]),
    (data, "root", ["", None, 3]),
    (data, "train", [0, -1, 1.5, "10", None, True]),
    (data, "val", [0, -1, 1.5, "10", None, True]),
])  # fmt: skip
def test_a_wrong_value_is_refused_by_its_field(make: Any, field: str, wrongs: list[Any]) -> None:
    kind = {model: "model", data: "data"}.get(make, "optim")
    for wrong in wrongs:
        assert refusal(make, **{field: wrong}).startswith(f"{kind}, {field}: "), wrong


def test_every_model_is_known_and_an_unknown_one_is_answered_with_the_list() -> None:
    for name in MODELS:
        assert model(name=name).name == name
    assert all(name in refusal(model, name="resnet51") for name in MODELS)


def test_nesterov_needs_a_momentum() -> None:
    assert refusal(Optim, nesterov=True, momentum=0.0).startswith("optim, nesterov: ")


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_what_leaves_norms_alone_cannot_decay_them(name: str) -> None:
    assert refusal(Optim, name=name, norm_decay=True).startswith("optim, norm_decay: ")


def test_a_loss_of_one_s_own_smooths_by_itself() -> None:
    assert refusal(Optim, loss="mine.losses:focal", label_smoothing=0.1).startswith("optim, label_smoothing: ")
    assert Optim(loss="bce", label_smoothing=0.1).loss == "bce"


@pytest.mark.parametrize(("field", "wrongs"), [
    ("name", ["", "a/b", "a\\b", "a\nb", "a\0b", None, 3]),
    ("data", [None, "imagenet", {"name": "x"}]),
    ("model", [None, "resnet50"]),
    ("optim", [None, 0.1]),
    ("machines", [0, -1, 1.0, "1", True]),
    ("gpus", [0, -1, 8.0, "8", True]),
    ("seed", [-1, 0.5, "0", None, True]),
    ("phases", [(), None, 3, phase(epochs=(0, 1))]),
    ("types", ["p4d.24xlarge", ["p4d"], ["P4d.24xlarge"], ["p4d.24xlarge "], [""], [None], [3], None, {}, 3,
               ["p4d.", ".24xlarge"], ["p4d.24xlarge\n"], ["g5.xlarge", "p4d.24xlarge", "g5.xlarge"]]),
])  # fmt: skip
def test_a_wrong_value_of_a_recipe_is_refused_by_recipe_and_field(field: str, wrongs: list[Any]) -> None:
    for wrong in wrongs:
        said = refusal(recipe, **{field: wrong})
        assert said.startswith("recipe ") and f", {field}: " in said, (wrong, said)


@pytest.mark.parametrize(("pairs", "row", "kind"), [
    ([(1, 2)], 1, "gap"),
    ([(0, 2), (3, 4)], 2, "gap"),
    ([(0, 2), (1, 4)], 2, "overlap"),
    ([(0, 2), (0, 2)], 2, "overlap"),
    ([(0, 2), (2, 4), (5, 6)], 3, "gap"),
    ([(2, 4), (0, 2)], 1, "gap"),
])  # fmt: skip
def test_gaps_and_overlaps_are_refused_by_row(pairs: list[tuple[int, int]], row: int, kind: str) -> None:
    said = refusal(recipe, phases=rows(*pairs))
    assert f"row {row}, epochs: " in said and f"({kind})" in said
    said = refusal(recipe, phases=(), tables={1: rows((0, 1)), 4: rows(*pairs)})
    assert "table for 4 machines" in said and f"row {row}, epochs: " in said


def test_a_row_that_is_no_phase_is_refused() -> None:
    assert "row 2: must be a Phase" in refusal(recipe, phases=[*rows((0, 1)), {"epochs": (1, 2)}])


@pytest.mark.parametrize("make", [phase, model, Optim, data, recipe])
def test_everything_is_frozen_and_keyword_only(make: Callable[[], Any]) -> None:
    one = make()
    for field in fields(one):
        assert field.kw_only
        with pytest.raises(FrozenInstanceError):
            setattr(one, field.name, getattr(one, field.name))


def test_phases_are_kept_whatever_happens_to_the_list() -> None:
    given = rows((0, 1), (1, 2))
    made = recipe(phases=given)
    given.clear()
    assert [one.epochs for one in made.phases] == [(0, 1), (1, 2)]


def test_a_recipe_counts_its_epochs_copies_and_gpus() -> None:
    made = recipe(
        phases=[
            phase(epochs=(0, 3), copy=160),
            phase(epochs=(3, 4), copy=96),
            phase(epochs=(4, 9)),
            phase(epochs=(9, 10), copy=160),
        ],
        machines=3,
        gpus=4,
    )  # fmt: skip
    assert (made.epochs, made.copy_sizes, made.nominal_gpus) == (10, (96, 160), 12)


TABLES = {2: rows((0, 2)), 4: rows((0, 4)), 16: rows((0, 16))}


@pytest.mark.parametrize(("asked", "taken"), [(1, 2), (2, 2), (3, 2), (4, 4), (15, 4), (16, 16), (99, 16)])
def test_at_takes_the_table_of_as_many_machines_or_the_next_smaller(asked: int, taken: int) -> None:
    made = recipe(phases=(), tables=TABLES, machines=4)
    assert made.epochs == 4
    got = made.for_machines(asked)
    assert (got.machines, got.epochs, got.nominal_gpus) == (taken, taken, 8 * taken)
    assert got.for_machines(4) == made


def test_at_changes_nothing_without_tables() -> None:
    assert recipe().for_machines(7) == recipe()


def test_types_are_kept_in_their_order_whatever_list_they_came_in() -> None:
    names = ["p4d.24xlarge", "p6-b200.48xlarge", "g4dn.metal", "u-6tb1.112xlarge"]
    assert recipe(types=names).types == recipe(types=tuple(names)).types == tuple(names)
    assert recipe(phases=(), tables=TABLES, machines=4, types=names).for_machines(16).types == tuple(names)
    assert recipe().types == ()


def test_machines_without_a_table_are_refused() -> None:
    said = refusal(recipe, phases=(), tables=TABLES, machines=8)
    assert "machines: no table for 8" in said and "[2, 4, 16]" in said


@pytest.mark.parametrize("target", [-1.0, 100.5, float("nan"), "93", True])
def test_a_target_is_a_number_of_percent(target: Any) -> None:
    assert "target" in refusal(recipe, target=target)


def test_a_cadence_is_one_of_four_and_near_needs_a_target() -> None:
    assert "validate: 'often' is unknown; known are each, last, near, never" in refusal(phase, validate="often")
    rows = [phase(epochs=(0, 4), validate="near")]
    assert "target: a phase validates near it, but there is none" in refusal(recipe, phases=rows)
    assert recipe(phases=rows, target=93.0).target == 93.0
    assert "model, compile: must be True or False" in refusal(model, compile=1)


def test_json_gives_an_equal_recipe_back() -> None:
    made = recipe(
        phases=[
            phase(epochs=(0, 3), lr=(0.1, 0.2), copy=160, validate="near"),
            phase(epochs=(3, 4), shape="cosine", rect_val=True),
        ],
        optim=Optim(nesterov=True, bias_decay=False),
        model=model(zero_gamma=False, fc_std=0.1, compile=True),
        machines=2,
        gpus=3,
        seed=5,
        types=("p4d.24xlarge", "g5.xlarge"),
        target=93.0,
    )
    assert Recipe.from_json(json.loads(json.dumps(made.to_json()))) == made


def test_json_of_a_recipe_with_tables_is_the_chosen_one() -> None:
    made = recipe(phases=(), tables=TABLES, machines=4)
    back = Recipe.from_json(json.loads(json.dumps(made.to_json())))
    assert back == replace(made, tables={}) and back.epochs == 4 and back.for_machines(16) == back


def without(name: str) -> Any:
    value = recipe().to_json()
    del value[name]
    return value


@pytest.mark.parametrize("wrong", [
    {}, [], 3, None, "text",
    {**recipe().to_json(), "extra": 1},
    *(without(name) for name in ("name", "data", "model", "phases")),
    {**recipe().to_json(), "phases": 3},
    {**recipe().to_json(), "phases": [{"epochs": [0, 1]}]},
    {**recipe().to_json(), "phases": [{**recipe().to_json()["phases"][0], "extra": 1}]},
    {**recipe().to_json(), "data": {"name": "x"}},
    {**recipe().to_json(), "model": "resnet18"},
    {**recipe().to_json(), "optim": None},
    {**recipe().to_json(), "gpus": 0},
], ids=str)  # fmt: skip
def test_json_that_is_no_recipe_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError):
        Recipe.from_json(wrong)


def test_json_may_leave_out_what_has_a_default() -> None:
    value = recipe().to_json()
    for name in ("optim", "tables", "machines", "gpus", "seed", "types", "target"):
        del value[name]
    assert Recipe.from_json(value) == recipe()
