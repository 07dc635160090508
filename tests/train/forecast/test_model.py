"""The arithmetic of the forecast against hand calculations (facts/training.md 6).

tests/docs/test_published_runs.py compares whole forecasts, with validation and fixed costs, with published runs.
"""

from dataclasses import replace
from typing import Any

import pytest

from recipes.resnet50_18min import recipe as resnet50
from train.forecast import DEFAULT_CONSTANTS, MODEL_COSTS, TERMS, Constants, Forecast, forecast
from train.forecast.hardware import NetworkSpec, fetch_bytes
from train.recipe import IMAGENET, Comm, Data, Model, Phase, Recipe
from train.recipe.schedule import Schedule

IMAGES = IMAGENET.train
BARE = Constants(source="bare")  # nothing but compute and all-reduce
NO_NETWORK = replace(BARE, network=NetworkSpec(1e9, 0.0))


def make_schedule(machines: int, **options: Any) -> Schedule:
    """Return the schedule of the 18 minutes for machines of 8 GPUs."""
    return Schedule(resnet50.for_machines(machines), IMAGES, 8 * machines, **options)


def one_phase(batch: int, gpus: int, images: int = IMAGES, **fields: Any) -> Schedule:
    """Return a schedule of one epoch at 128 pixels on a set that is not ImageNet. `fields` are those of the recipe."""
    phase = Phase(epochs=(0, 1), size=128, batch=batch, lr=0.1, copy=fields.pop("copy", None))
    data = Data(name="some", root="some", train=images, val=1)
    return Schedule(Recipe(name="x", data=data, model=Model(name="resnet50"), phases=[phase], **fields), images, gpus)


def forecast_of(schedule: Schedule, **settings: Any) -> Forecast:
    """Return the forecast of a schedule, by default on machines of 8 V100 with 25 Gbit/s."""
    machines = max(1, schedule.gpus // 8)
    defaults = {"gpus": 8, "gpu": "V100", "gbit": 25.0, "machines": machines, "constants": BARE}
    result = forecast(schedule, **{**defaults, **settings})
    assert result is not None
    return result


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
    schedule = one_phase(64, machines * gpus, comm=Comm(hook=hook, overlap=False))
    constants = replace(BARE, network=NetworkSpec(0.5, 1e-3))
    result = forecast_of(schedule, machines=machines, gpus=gpus, constants=constants)
    expected = bytes_sent * 25_557_032 * 8 / 12.5e9 + 2 * hops * 1e-3 + bus_seconds
    assert result.terms["all-reduce"] == pytest.approx(schedule.steps * expected, rel=1e-6)


def test_compute_in_float32_and_on_fewer_gpus() -> None:
    """16 batches on 6 GPUs are 3 for each. 367 / 1200: images/s of a V100 in float32 and float16, as measured."""
    half, single = (one_phase(64, 16, precision=precision) for precision in ("fp16", "fp32"))
    settings = [(half, 2, 8), (half, 1, 8), (half, 1, 6), (single, 2, 8)]
    seconds = [forecast_of(each, machines=count, gpus=gpus).terms["compute"] for each, count, gpus in settings]
    assert seconds == pytest.approx([seconds[0], 2 * seconds[0], 3 * seconds[0], 1200 / 367 * seconds[0]], rel=2e-3)


def test_step_waits_only_for_a_loader_slower_than_the_gpus() -> None:
    def terms(machines: int, *speeds: tuple[int, int, float]) -> dict[str, float]:
        schedule = one_phase(512, 16, images=16 * 512 * 10, copy=160)
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


def test_start_is_boot_setup_fetch_and_trainers() -> None:
    schedule = make_schedule(8)
    images = IMAGES + IMAGENET.val
    assert fetch_bytes(schedule, IMAGENET.val) == images * (13_100 + 49_000 + 109_000)
    result, on_slow_network = (forecast_of(schedule, gbit=gbit, constants=DEFAULT_CONSTANTS) for gbit in (25, 8))
    assert result.start == {"boot": 120, "setup": 60, "fetch": images * 171_100 / 1.5e9, "trainers": 30}
    assert on_slow_network.start["fetch"] == images * 171_100 / 1e9
    assert result.training_minutes == pytest.approx(result.minutes - (result.terms["start"] - 30) / 60)
    assert fetch_bytes(one_phase(64, 8), 50) == 0  # the size of other images is not known


def test_forecast_terms_and_phases_add_up_and_some_steps_take_their_share_of_each_phase() -> None:
    result = forecast_of(make_schedule(16), vcpus=64, constants=DEFAULT_CONSTANTS)
    assert result.source == "presets" and set(result.terms) == {*TERMS, "start"}
    assert 60 * result.minutes == pytest.approx(sum(result.terms.values()))
    assert [(row.start, row.end) for row in result.phases] == [phase.epochs for phase in resnet50.tables[16]]
    assert sum(row.seconds for row in result.phases) == pytest.approx(60 * result.minutes - result.terms["start"])
    for term in TERMS:
        assert sum(row.terms[term] for row in result.phases) == pytest.approx(result.terms[term])
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
