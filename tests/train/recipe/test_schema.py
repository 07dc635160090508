"""What a recipe accepts; errors name the row and the field of a wrong value; recipes as JSON."""

import json
import math
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest

from train.recipe import MODELS, Data, Model, Optim, Phase, Recipe
from train.recipe.schema import LR_SHAPES

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
    ("size", [15, 0, -64, 64.0, "64", None, True]),
    ("batch", [0, -1, 16.0, "16", None, True]),
    ("copy", [31, 0, -160, 160.0, "160", True]),
    ("lr", NOT_NUMBERS + NOT_PAIRS),
    ("shape", ["linea", "", None, 3, ["linear"]]),
    ("min_scale", [0, 0.0, -0.1, 1.001, NAN, INF, "0.1", None, True]),
    ("rect_val", [1, 0, None, "yes"]),
    ("augment", [1, 0, None, "no"]),
])  # fmt: skip
def test_phase_wrong_value_names_row_and_field(field: str, wrong_values: list[Any]) -> None:
    for wrong in wrong_values:
        message = error_of(make_phase, **{field: wrong})
        assert message.startswith(f"phase 2-5, {field}: "), (wrong, message)


@pytest.mark.parametrize(
    "wrong",
    [(3, 3), (4, 3), (-1, 2), (0.0, 2), (0, 2.0), ("0", 2), (0, None), (True, 2), (1,), (1, 2, 3), 3, None],
)
def test_phase_refuses_epochs_that_are_no_range(wrong: Any) -> None:
    message = error_of(make_phase, epochs=wrong)
    assert message.startswith("phase ") and ", epochs" in message


@pytest.mark.parametrize("shape", ["gradual_warmup", "constant_warmup"])
def test_phase_warmup_takes_one_rate(shape: str) -> None:
    assert make_phase(shape=shape, lr=0.4).lr_endpoints == (0.4, 0.4)
    assert "phase 2-5, lr" in error_of(make_phase, shape=shape, lr=(0.1, 0.4))


def test_phase_accepts_values_at_the_limits() -> None:
    phase = make_phase(epochs=(0, 1), size=32, batch=1, lr=0, min_scale=1, copy=32)
    assert (phase.lr_endpoints, phase.min_scale) == ((0, 0), 1)
    assert make_phase(size=33).size == 33
    for shape in LR_SHAPES:
        assert make_phase(shape=shape).shape == shape


WRONG_PAIRS: list[Any] = [(160,), (160, 192, 224), (192, 160), (160, 160), (150, 192), (160, 200), (0, 32), (-32, 32)]
WRONG_PAIRS += [(160.0, 192), ("160", 192), (True, 32), (160, None), ()]


@pytest.mark.parametrize("wrong", WRONG_PAIRS)
def test_phase_refuses_sizes_between_which_it_cannot_grow(wrong: Any) -> None:
    assert error_of(make_phase, size=wrong).startswith("phase 2-5, size: a pair must be two multiples of 32")


def test_phase_of_one_epoch_has_one_size() -> None:
    message = error_of(make_phase, epochs=(2, 3), size=(160, 192))
    assert message == "phase 2-3, size: 160 cannot grow to 192 in one epoch; give one number"


def test_growing_size_survives_json() -> None:
    phase = make_phase(epochs=(0, 5), size=[160, 224])
    assert phase.size == (160, 224) and phase.final_size == 224
    recipe = Recipe(name="x", data=make_data(), model=make_model(), phases=[phase])
    assert Recipe.from_json(json.loads(json.dumps(recipe.to_json()))) == recipe


@pytest.mark.parametrize(("make", "field", "wrong_values"), [
    (make_model, "name", ["resnet", "ResNet18", "", None, 18]),
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
    (Optim, "eps", NOT_NUMBERS),
    (Optim, "lars_form", ["Google", "", None]),
    (Optim, "bias_decay", ["no", None]),
    (make_data, "name", ["", None, 3]),
    (make_data, "root", ["", None, 3]),
    (make_data, "train", [0, -1, 1.5, "10", None, True]),
    (make_data, "val", [0, -1, 1.5, "10", None, True]),
])  # fmt: skip
def test_component_wrong_value_names_the_field(make: Any, field: str, wrong_values: list[Any]) -> None:
    kind = {make_model: "model", make_data: "data"}.get(make, "optim")
    for wrong in wrong_values:
        assert error_of(make, **{field: wrong}).startswith(f"{kind}, {field}: "), wrong


def test_model_unknown_name_lists_the_known_ones() -> None:
    for name in MODELS:
        assert make_model(name=name).name == name
    assert all(name in error_of(make_model, name="resnet51") for name in MODELS)


def test_optim_nesterov_needs_a_momentum() -> None:
    assert error_of(Optim, nesterov=True, momentum=0.0).startswith("optim, nesterov: ")


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_optim_lars_and_lamb_refuse_norm_decay(name: str) -> None:
    assert error_of(Optim, name=name, norm_decay=True).startswith("optim, norm_decay: ")


def test_optim_custom_loss_refuses_label_smoothing() -> None:
    assert error_of(Optim, loss="mine.losses:focal", label_smoothing=0.1).startswith("optim, label_smoothing: ")
    assert Optim(loss="bce", label_smoothing=0.1).loss == "bce"


@pytest.mark.parametrize(("field", "wrong_values"), [
    ("name", ["", "a/b", "a\\b", "a\nb", "a\0b", None, 3]),
    ("data", [None, "imagenet", {"name": "x"}]),
    ("model", [None, "resnet50"]),
    ("optim", [None, 0.1]),
    ("machines", [0, -1, 1.0, "1", True]),
    ("gpus", [0, -1, 8.0, "8", True]),
    ("seed", [-1, 0.5, "0", None, True]),
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


def test_recipe_refuses_a_row_that_is_no_phase() -> None:
    assert "row 2: must be a Phase" in error_of(make_recipe, phases=[*make_phases((0, 1)), {"epochs": (1, 2)}])


@pytest.mark.parametrize("make", [make_phase, make_model, Optim, make_data, make_recipe])
def test_all_objects_are_frozen_and_keyword_only(make: Callable[[], Any]) -> None:
    instance = make()
    for field in fields(instance):
        assert field.kw_only
        with pytest.raises(FrozenInstanceError):
            setattr(instance, field.name, getattr(instance, field.name))


def test_recipe_copies_the_list_of_phases() -> None:
    phase_list = make_phases((0, 1), (1, 2))
    recipe = make_recipe(phases=phase_list)
    phase_list.clear()
    assert [phase.epochs for phase in recipe.phases] == [(0, 1), (1, 2)]


def test_recipe_counts_epochs_copies_and_gpus() -> None:
    recipe = make_recipe(
        phases=[
            make_phase(epochs=(0, 3), copy=160),
            make_phase(epochs=(3, 4), copy=96),
            make_phase(epochs=(4, 9)),
            make_phase(epochs=(9, 10), copy=160),
        ],
        machines=3,
        gpus=4,
    )  # fmt: skip
    assert (recipe.epochs, recipe.copy_sizes, recipe.nominal_gpus) == (10, (96, 160), 12)


TABLES = {2: make_phases((0, 2)), 4: make_phases((0, 4)), 16: make_phases((0, 16))}


@pytest.mark.parametrize(("machines", "table"), [(1, 2), (2, 2), (3, 2), (4, 4), (15, 4), (16, 16), (99, 16)])
def test_for_machines_takes_the_same_or_next_smaller_table(machines: int, table: int) -> None:
    recipe = make_recipe(phases=(), tables=TABLES, machines=4)
    assert recipe.epochs == 4
    chosen = recipe.for_machines(machines)
    assert (chosen.machines, chosen.epochs, chosen.nominal_gpus) == (table, table, 8 * table)
    assert chosen.for_machines(4) == recipe


def test_recipe_types_keep_their_order() -> None:
    names = ["p4d.24xlarge", "p6-b200.48xlarge", "g4dn.metal", "u-6tb1.112xlarge"]
    assert make_recipe(types=names).types == make_recipe(types=tuple(names)).types == tuple(names)
    assert make_recipe(phases=(), tables=TABLES, machines=4, types=names).for_machines(16).types == tuple(names)
    assert make_recipe().types == ()


def test_recipe_refuses_machines_without_a_table() -> None:
    message = error_of(make_recipe, phases=(), tables=TABLES, machines=8)
    assert "machines: no table for 8" in message and "[2, 4, 16]" in message


@pytest.mark.parametrize("target", [-1.0, 100.5, float("nan"), "93", True])
def test_recipe_target_must_be_in_percent(target: Any) -> None:
    assert "target" in error_of(make_recipe, target=target)


def test_phase_validate_policies_and_near_needs_a_target() -> None:
    assert "validate: 'often' is unknown; known are each, last, near, never" in error_of(make_phase, validate="often")
    phases = [make_phase(epochs=(0, 4), validate="near")]
    assert 'target: missing, but a phase has validate="near"' in error_of(make_recipe, phases=phases)
    assert make_recipe(phases=phases, target=93.0).target == 93.0
    assert "model, compile: must be True or False" in error_of(make_model, compile=1)


def test_blurpool_is_for_the_own_resnets() -> None:
    assert make_model(name="resnet50", blurpool=True).blurpool
    assert "model, blurpool: must be True or False" in error_of(make_model, blurpool=1)
    for name in ("alexnet_bn", "timm:resnet50", "nets:small"):
        assert error_of(make_model, name=name, blurpool=True).startswith(f"model, blurpool: {name!r} is none of ")


def test_fixres_is_for_the_own_resnets() -> None:
    phases = [make_phase(epochs=(0, 4), frozen="fixres")]
    assert make_recipe(phases=phases, model=make_model(name="resnet50")).phases[0].frozen == "fixres"
    assert "frozen: must be True or False" in error_of(make_phase, frozen="classifier")
    message = error_of(make_recipe, phases=phases, model=make_model(name="alexnet_bn"))
    assert "frozen: the last norm of 'alexnet_bn' is not known; set frozen=True" in message


@pytest.mark.parametrize("decay", [0, 1, -0.5, 2, "0.9", True])
def test_decay_of_averaged_weights_lies_between_0_and_1(decay: object) -> None:
    assert "optim, ema: must be" in error_of(Optim, ema=decay)


def test_json_has_an_option_only_where_it_is_on() -> None:
    """A recipe that does not use a new option keeps its digest, so its old checkpoints still match."""
    assert set(make_recipe().to_json()["model"]) == {"name", "zero_gamma", "fc_std", "weights", "compile"}
    assert "ema" not in make_recipe().to_json()["optim"]
    recipe = make_recipe(model=make_model(blurpool=True), optim=Optim(ema=0.999))
    assert recipe.to_json()["model"]["blurpool"] is True and recipe.to_json()["optim"]["ema"] == 0.999
    assert Recipe.from_json(recipe.to_json()) == recipe


def test_from_json_restores_an_equal_recipe() -> None:
    recipe = make_recipe(
        phases=[
            make_phase(epochs=(0, 3), lr=(0.1, 0.2), copy=160, validate="near"),
            make_phase(epochs=(3, 4), shape="cosine", rect_val=True),
        ],
        optim=Optim(nesterov=True, bias_decay=False),
        model=make_model(zero_gamma=False, fc_std=0.1, compile=True),
        machines=2,
        gpus=3,
        seed=5,
        types=("p4d.24xlarge", "g5.xlarge"),
        target=93.0,
    )
    assert Recipe.from_json(json.loads(json.dumps(recipe.to_json()))) == recipe


def test_to_json_of_a_recipe_with_tables_has_the_chosen_phases() -> None:
    recipe = make_recipe(phases=(), tables=TABLES, machines=4)
    restored = Recipe.from_json(json.loads(json.dumps(recipe.to_json())))
    assert restored == replace(recipe, tables={}) and restored.epochs == 4 and restored.for_machines(16) == restored


def json_without(name: str) -> Any:
    value = make_recipe().to_json()
    del value[name]
    return value


@pytest.mark.parametrize("wrong", [
    {}, [], 3, None, "text",
    {**make_recipe().to_json(), "extra": 1},
    *(json_without(name) for name in ("name", "data", "model", "phases")),
    {**make_recipe().to_json(), "phases": 3},
    {**make_recipe().to_json(), "phases": [{"epochs": [0, 1]}]},
    {**make_recipe().to_json(), "phases": [{**make_recipe().to_json()["phases"][0], "extra": 1}]},
    {**make_recipe().to_json(), "data": {"name": "x"}},
    {**make_recipe().to_json(), "model": "resnet18"},
    {**make_recipe().to_json(), "optim": None},
    {**make_recipe().to_json(), "gpus": 0},
], ids=str)  # fmt: skip
def test_from_json_refuses_other_values(wrong: Any) -> None:
    with pytest.raises(ValueError):
        Recipe.from_json(wrong)


def test_from_json_may_lack_fields_with_defaults() -> None:
    value = make_recipe().to_json()
    for name in ("optim", "tables", "machines", "gpus", "seed", "types", "target"):
        del value[name]
    assert Recipe.from_json(value) == make_recipe()
