"""The arithmetic of the forecast: terms against hand calculations (facts/training.md 6), and rules that they follow."""

from dataclasses import replace
from typing import Any

import pytest

from infra.aws.market.instance_types import BUILTIN_TYPES
from recipes.cifar10 import recipe as cifar10
from recipes.resnet50_18min import recipe as resnet50
from train.forecast import DEFAULT_CONSTANTS, MODEL_COSTS, TERMS, Constants, Forecast, forecast
from train.forecast.hardware import (
    DEVICES,
    NetworkSpec,
    fetch_bytes,
)
from train.recipe import IMAGENET, MODELS, Comm, Data, Model, Phase, Recipe
from train.recipe.schedule import Schedule

IMAGES = IMAGENET.train
BARE = Constants(source="bare")  # nothing but compute and all-reduce
NO_NETWORK = replace(BARE, network=NetworkSpec(1e9, 0.0))


def make_schedule(machines: int, **options: Any) -> Schedule:
    """Return the schedule of the 18 minutes for machines of 8 GPUs."""
    return Schedule(resnet50.for_machines(machines), IMAGES, 8 * machines, **options)


def one_phase(
    size: Any, batch: int, gpus: int = 8, images: int = IMAGES, val: int = 1, comm: Comm | None = None, **options: Any
) -> Schedule:
    """Return a schedule of one phase, by default of one epoch, on other images than ImageNet."""
    recipe_options = {name: options.pop(name) for name in ("model", "precision") if name in options}
    phase = Phase(**{"epochs": (0, 1), "size": size, "batch": batch, "lr": 0.1, **options})
    recipe_options["model"] = Model(name=recipe_options.get("model", "resnet50"))
    data = Data(name="some", root="some", train=images, val=val)
    recipe = Recipe(name="x", data=data, phases=[phase], comm=comm or Comm(), target=93.0, **recipe_options)
    return Schedule(recipe, images, gpus)


def forecast_of(schedule: Schedule, **settings: Any) -> Forecast:
    """Return the forecast of a schedule, by default on machines of 8 V100 with 25 Gbit/s."""
    machines = max(1, schedule.gpus // 8)
    defaults = {"gpus": 8, "gpu": "V100", "gbit": 25.0, "machines": machines, "constants": BARE}
    result = forecast(schedule, **{**defaults, **settings})
    assert result is not None
    return result


def step_seconds(result: Forecast, *terms: str) -> float:
    """Return the seconds that some terms take in one step."""
    return sum(result.terms[term] for term in terms) / sum(phase.steps for phase in result.phases)


# --- steps, by hand and by the log of 8 machines --------------------------------------------------------------------


BUS_SECONDS = 25_557_032 * 8 * 8 / 1000e9  # twice 4 bytes of each parameter inside a machine


@pytest.mark.parametrize(("hook", "machines", "gpus", "bytes_sent", "hops", "bus_seconds"), [
    ("none", 2, 8, 2 * 15 / 16 * 4, 15, 0), ("powersgd", 2, 8, 2 * 15 / 16 * 4, 15, 0),
    ("fp16", 2, 8, 2 * 15 / 16 * 2, 15, 0), ("bf16", 2, 8, 2 * 15 / 16 * 2, 15, 0),
    ("hierarchical", 2, 8, 2 / 2 * 4, 1, BUS_SECONDS), ("hierarchical", 16, 1, 2 * 15 / 16 * 4, 15, 0),
    ("none", 1, 8, 0, 0, 7 / 8 * BUS_SECONDS), ("none", 1, 1, 0, 0, 0),
])  # fmt: skip
def test_all_reduce_seconds_of_bytes_hops_and_bus(
    hook: str, machines: int, gpus: int, bytes_sent: float, hops: int, bus_seconds: float
) -> None:
    schedule = one_phase(128, 64, machines * gpus, comm=Comm(hook=hook, overlap=False))
    constants = replace(BARE, network=NetworkSpec(0.5, 1e-3))
    result = forecast_of(schedule, machines=machines, gpus=gpus, constants=constants)
    expected = bytes_sent * 25_557_032 * 8 / 12.5e9 + 2 * hops * 1e-3 + bus_seconds
    assert step_seconds(result, "all-reduce") == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("gpu", "share"), [("V100", 367 / 1200), ("A100", 938 / 2470), ("H100", 938 / 2470), ("P100", 1.0)]
)
def test_float32_is_slower_by_what_its_source_measured(gpu: str, share: float) -> None:
    half, single = (
        forecast_of(one_phase(128, 64, precision=precision), gpu=gpu).terms["compute"] for precision in ("fp16", "fp32")
    )
    assert half / single == pytest.approx(share, rel=2e-3)


def test_compute_on_fewer_gpus_accumulates() -> None:
    schedule, constants = one_phase(224, 64, gpus=16), replace(BARE, optimizer_seconds=1.0)
    all_gpus, half, six_gpus = (
        forecast_of(schedule, gpus=gpus, machines=machines, constants=constants).terms
        for machines, gpus in ((2, 8), (1, 8), (1, 6))
    )
    assert half["compute"] == pytest.approx(2 * all_gpus["compute"])
    assert half["optimizer"] == all_gpus["optimizer"]
    assert six_gpus["compute"] == pytest.approx(3 * all_gpus["compute"])  # 16 chunks on 6 GPUs are 3 batches each


# --- the loader, validation, fixed costs, the start ------------------------------------------------------------------


def test_step_waits_only_for_a_loader_slower_than_the_gpus() -> None:
    def terms(machines: int, *speeds: tuple[int, int, float]) -> dict[str, float]:
        schedule = one_phase(128, 512, gpus=16, images=16 * 512 * 10, copy=160)
        constants = replace(NO_NETWORK, loader_speeds=speeds)
        return forecast_of(schedule, machines=machines, constants=constants, vcpus=64).terms

    assert terms(2)["loader"] == terms(2, (160, 128, 1e6))["loader"] == 0  # unknown images, and a fast loader
    assert terms(2, (0, 128, 640.0))["loader"] == 0  # of another copy
    for vcpus, waits in ((96, False), (8, True), (None, False)):  # ImageNet: by presets of the processors
        loader = forecast_of(make_schedule(4), gpu="A100", gbit=400, vcpus=vcpus).terms["loader"]
        assert bool(loader) is waits
    for machines in (1, 2):
        waiting = terms(machines, (160, 128, 640.0))
        working = waiting["compute"] + waiting["all-reduce"]
        assert working + waiting["loader"] == pytest.approx(81920 / 640 / machines)


def test_validation_seconds_of_all_views_or_their_loading() -> None:
    schedule = one_phase(224, 64, images=64 * 80, val=50_000, rect_val=True, epochs=(0, 2))
    terms = forecast_of(schedule, gpu="A100").terms
    assert terms["validation"] == pytest.approx(2 * 50_000 * 2.33 / 3 / 2400 / 8)
    slow_loader = replace(BARE, loader_speeds=((0, 224, 1000.0),))
    assert forecast_of(schedule, constants=slow_loader).terms["validation"] == pytest.approx(2 * 50_000 * 2 / 1000)
    assert forecast_of(schedule, gpu="A100", val_images=500).terms["validation"] == pytest.approx(
        terms["validation"] / 100
    )


@pytest.mark.parametrize(("validate", "validations"), [("each", 4), ("last", 1), ("never", 1), ("near", 3)])
def test_validation_seconds_follow_the_validation_policy(validate: str, validations: int) -> None:
    """The last epoch is always validated. With "near", all but the first count: how near they are is not known yet."""
    result = forecast_of(one_phase(224, 64, images=640, val=800, epochs=(0, 4), validate=validate))
    assert result.terms["validation"] == pytest.approx(validations * 100 / 3 / 1000)


def test_fixed_seconds_include_the_switch_to_a_new_shape() -> None:
    shapes: list[tuple[tuple[int, int], Any, int]] = [
        ((0, 2), 128, 64), ((2, 3), 128, 64), ((3, 4), 128, 128), ((4, 6), 224, 128), ((6, 8), (160, 192), 128)
    ]  # fmt: skip
    phases = [Phase(epochs=epochs, size=size, batch=batch, lr=0.1) for epochs, size, batch in shapes]
    schedule = Schedule(replace(resnet50, tables={}, phases=phases), IMAGES, 8)
    result = forecast_of(schedule, constants=replace(BARE, epoch_seconds=1.0, switch_seconds=10.0))
    assert [phase.terms["fixed"] for phase in result.phases] == [12, 1, 11, 12, 11, 11]
    growing = result.phases[-2:]  # each size of a phase has its row
    assert [(phase.start, phase.end, phase.size) for phase in growing] == [(6, 7, 160), (7, 8, 192)]
    assert growing[1].terms["compute"] / growing[0].terms["compute"] == pytest.approx((192 / 160) ** 2)


def test_start_is_boot_setup_fetch_and_trainers() -> None:
    schedule = make_schedule(8)
    images = IMAGES + IMAGENET.val
    assert fetch_bytes(schedule, IMAGENET.val) == images * (13_100 + 49_000 + 109_000)
    result, on_slow_network = (forecast_of(schedule, gbit=gbit, constants=DEFAULT_CONSTANTS) for gbit in (25, 8))
    assert result.start == {"boot": 120, "setup": 60, "fetch": images * 171_100 / 1.5e9, "trainers": 30}
    assert on_slow_network.start["fetch"] == images * 171_100 / 1e9
    assert result.training_minutes == pytest.approx(result.minutes - (result.terms["start"] - 30) / 60)
    assert fetch_bytes(one_phase(128, 8), 50) == 0  # the size of other images is not known


# --- the whole ------------------------------------------------------------------------------------------------------


def test_forecast_terms_and_phases_add_up() -> None:
    result = forecast_of(make_schedule(16), vcpus=64, constants=DEFAULT_CONSTANTS)
    assert result.source == "presets" and set(result.terms) == {*TERMS, "start"}
    assert 60 * result.minutes == pytest.approx(sum(result.terms.values()))
    assert [(row.start, row.end) for row in result.phases] == [phase.epochs for phase in resnet50.tables[16]]
    assert sum(row.seconds for row in result.phases) == pytest.approx(60 * result.minutes - result.terms["start"])
    for term in TERMS:
        assert sum(row.terms[term] for row in result.phases) == pytest.approx(result.terms[term])


def test_forecast_of_steps_takes_their_share_of_each_phase() -> None:
    result = forecast_of(make_schedule(8), constants=DEFAULT_CONSTANTS)
    first, second = result.phases[:2]
    steps = first.steps + second.steps // 5
    begun, rest = result.of_steps(0, steps), result.of_steps(steps)
    assert begun.terms["compute"] == pytest.approx(
        first.terms["compute"] + second.terms["compute"] * (second.steps // 5) / second.steps
    )
    for term in TERMS:
        assert begun.terms[term] + rest.terms[term] == pytest.approx(result.terms[term])
    assert begun.start == rest.start == result.start and result.of_steps(0) == result


def test_forecast_of_unknown_cards_and_models_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = make_schedule(16)
    for gpu in ("B200", "", "v100", "RTX PRO 4500"):
        assert forecast(schedule, gpus=8, gpu=gpu, gbit=25, machines=16) is None
    measured = forecast_of(schedule, gpu="B200", constants=replace(BARE, images_per_second=8400.0))
    assert measured.terms["compute"] == pytest.approx(forecast_of(schedule, gpu="H100").terms["compute"] / 2)
    monkeypatch.delitem(MODEL_COSTS, "resnet50")
    assert forecast(schedule, gpus=8, gpu="V100", gbit=25, machines=16) is None


def test_presets_cover_all_models_and_nearly_all_cards() -> None:
    assert MODEL_COSTS.keys() == set(MODELS)
    cards = {instance_type.gpu for instance_type in BUILTIN_TYPES.values()}
    assert cards - DEVICES.keys() == {"B200", "B300", "RTX PRO Server 6000"}


def test_source_target_epoch_of_the_18_minute_tables() -> None:
    target_epochs = {machines: resnet50.for_machines(machines).source_target_epoch for machines in resnet50.tables}
    assert target_epochs == {1: 28, 2: 30, 4: 29, 8: 30, 16: 38} and cifar10.source_target_epoch is None
    phase = resnet50.tables[8][-1]
    assert replace(resnet50, tables={}, phases=[replace(phase, epochs=(0, 20))]).source_target_epoch is None
    assert Recipe.from_json(resnet50.for_machines(8).to_json()).source_target_epoch == 30
    wrong_epochs: tuple[Any, ...] = (0, -1, 1.5, True, "30")
    for wrong in wrong_epochs:
        with pytest.raises(ValueError, match="reached"):
            replace(phase, reached=wrong)
