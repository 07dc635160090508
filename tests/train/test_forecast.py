"""The forecast beside runs of others: DAWNBench 2018 on 4, 8 and 16 machines, Goyal et al. 2017, Kempner's table."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.catalogue import SHIPPED
from recipes.cifar10 import recipe as cifar10
from recipes.resnet50_18min import recipe as resnet50
from train.forecast import CARDS, IN_2018, MODELS, OURS, TCP, Forecast, Network, forecast
from train.recipe import IMAGENET, Data, Model, Phase, Recipe
from train.recipe import MODELS as NAMES
from train.schedule import Schedule

IMAGES = IMAGENET.train
V100_2018 = 835.0  # images of 224 pixels a second, fitted to the log of the run on 8 machines


def schedule(machines: int, epochs: int | None = None, **more: Any) -> Schedule:
    """The 18 minutes' schedule for so many machines of 8 GPUs, cut after some rows' end."""
    recipe = resnet50.at(machines)
    rows = [row for row in recipe.phases if epochs is None or row.epochs[1] <= epochs]
    return Schedule(replace(recipe, tables={}, phases=rows), IMAGES, 8 * machines, **more)


def told(one: Schedule, **words: Any) -> Forecast:
    """A forecast that must be one."""
    machines = one.gpus // 8
    found = forecast(one, **{"gpus": 8, "gpu": "V100", "gbit": 25.0, "machines": machines, **words})
    assert found is not None
    return found


def in_2018(machines: int, epochs: int | None = None, **more: Any) -> Forecast:
    return told(schedule(machines, epochs), habits=IN_2018, images=V100_2018, **more)


def single(phase: Phase, gpus: int = 1, model: str = "resnet50", images: int = IMAGES) -> Schedule:
    data = Data(name="some", root="some", train=images, val=1)
    return Schedule(Recipe(name="x", data=data, model=Model(name=model), phases=[phase], gpus=1), images, gpus)


def test_the_18_minutes_come_to_17_by_steps_of_another_run_and_the_stops_measured_in_this_one() -> None:
    found = in_2018(16, epochs=38)
    assert found.minutes == pytest.approx(17.0, abs=0.1)  # measured: 18.09
    assert found.parts["compute"] / 60 == pytest.approx(5.6, abs=0.1)
    assert (found.parts["all-reduce"] + found.parts["optimizer"]) / 60 == pytest.approx(4.4, abs=0.15)
    assert (found.parts["fixed"], found.parts["start"]) == (16 * 4 + 21 * 10 + 15, 132)


@pytest.mark.parametrize(("row", "step", "epoch"), [
    (0, 0.105, 20.5), (1, 0.130, 14.3), (2, 0.157, 34.6), (3, 0.310, 26.4), (5, 0.333, 41.3),
])  # fmt: skip
def test_steps_and_epochs_of_16_machines_are_those_of_the_calculation_by_hand(
    row: int, step: float, epoch: float
) -> None:
    phase = replace(resnet50.tables[16][row], epochs=(0, 1))
    one = Schedule(replace(resnet50, tables={}, phases=[phase]), IMAGES, 128)
    found = told(one, habits=replace(IN_2018, start=0.0), images=V100_2018)
    assert found.seconds == pytest.approx(epoch, rel=0.01)
    assert (found.seconds - found.parts["fixed"]) / one.steps == pytest.approx(step, abs=0.0011)


@pytest.mark.parametrize(("size", "batch", "measured"), [
    (128, 128, 0.133), (128, 256, 0.180), (224, 128, 0.223), (224, 224, 0.336), (288, 128, 0.350),
])  # fmt: skip
def test_steps_of_8_machines_are_about_those_of_the_log(size: int, batch: int, measured: float) -> None:
    one = single(Phase(epochs=(0, 1), size=size, batch=batch, lr=0.1), gpus=64)
    found = told(one, habits=replace(IN_2018, start=0.0), images=V100_2018)
    step = (found.seconds - found.parts["fixed"]) / one.steps
    assert step == pytest.approx(measured, rel=0.051)  # the last row is 5.03 % too short


@pytest.mark.parametrize(("machines", "minutes"), [(4, 29.71), (8, 25.98)])
def test_whole_runs_on_other_numbers_of_machines_are_within_10_percent_of_the_measured_ones(
    machines: int, minutes: float
) -> None:
    assert in_2018(machines).minutes == pytest.approx(minutes, rel=0.1)


@pytest.mark.parametrize(("gradient", "minutes"), [(2, 8.9), (4, 11.8)])
def test_overlap_and_workers_that_stay_halve_the_time_of_the_same_machines(gradient: int, minutes: float) -> None:
    habits = replace(OURS, start=0.0, gradient_bytes=gradient, network=Network(0.5, 0.0))
    found = told(schedule(16, epochs=38), habits=habits, images=V100_2018)
    assert found.minutes == pytest.approx(minutes, abs=0.05)


@pytest.mark.parametrize(("gpu", "gbit", "batch", "gradient", "percent"), [
    ("V100", 25, 192, 2, 96), ("V100", 25, 192, 4, 77), ("V100", 25, 64, 2, 54), ("V100", 100, 192, 4, 98),
    ("A100", 400, 256, 4, 99), ("A100", 400, 64, 4, 96), ("H100", 3200, 256, 4, 99),
])  # fmt: skip
def test_weak_scaling_to_16_machines_is_as_calculated(
    gpu: str, gbit: float, batch: int, gradient: int, percent: float
) -> None:
    one = single(Phase(epochs=(0, 1), size=224, batch=batch, lr=0.1), gpus=128)
    found = told(one, gpu=gpu, gbit=gbit, habits=replace(OURS, gradient_bytes=gradient))
    compute = found.parts["compute"]
    assert 100 * compute / (compute + found.parts["all-reduce"]) == pytest.approx(percent, abs=1.0)


def test_a_network_without_its_plugin_is_seen_at_once() -> None:
    one = single(Phase(epochs=(0, 1), size=224, batch=192, lr=0.1), gpus=128)
    slow = told(one, gpu="H100", gbit=100, habits=replace(OURS, network=TCP))  # 50 Gbit/s of 3200
    assert slow.parts["compute"] / (slow.parts["compute"] + slow.parts["all-reduce"]) == pytest.approx(0.63, abs=0.02)


def test_imagenet_in_1_hour_on_256_p100() -> None:
    one = single(Phase(epochs=(0, 90), size=224, batch=32, lr=0.1), gpus=256)
    assert told(one, gpu="P100", gbit=50, machines=32).minutes == pytest.approx(60, rel=0.1)


@pytest.mark.parametrize(("gpus", "percent"), [(4, 97.7), (8, 95.5), (16, 91.4), (32, 84.1), (64, 72.6)])
def test_what_an_epoch_costs_once_is_what_looks_like_a_loss_of_scaling(gpus: int, percent: float) -> None:
    habits = replace(OURS, optimizer=0.0, start=0.0, epoch=lambda size: 8.5, network=Network(1.0, 0.0))
    words = dict(gpus=4, gbit=1e9, gpu="A100", habits=habits, images=889.0)

    def seconds(many: int) -> float:
        one = single(Phase(epochs=(0, 1), size=224, batch=256, lr=0.1), gpus=many)
        return told(one, machines=max(1, many // 4), **words).seconds

    assert 100 * (seconds(1) - 8.5) / gpus / seconds(gpus) == pytest.approx(percent, abs=1.0)


# --- the rules ----------------------------------------------------------------------------------------------------


def test_unknown_cards_and_models_are_unknown_and_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    one = schedule(16)
    for gpu in ("B200", "", "v100", "RTX PRO 4500"):
        assert forecast(one, gpus=8, gpu=gpu, gbit=25, machines=16) is None
    assert told(one, gpu="B200", images=9000.0).seconds < told(one, gpu="H100").seconds  # measured: no guess
    monkeypatch.delitem(MODELS, "resnet50")
    assert forecast(one, gpus=8, gpu="V100", gbit=25, machines=16) is None


def test_every_model_and_nearly_every_card_that_can_be_rented_has_figures() -> None:
    assert MODELS.keys() == set(NAMES)
    assert {kind.gpu for kind in SHIPPED.values()} - CARDS.keys() == {"B200", "B300", "RTX PRO Server 6000"}


def test_a_machine_alone_sends_nothing_over_the_network_and_a_gpu_alone_nothing_at_all() -> None:
    one = single(Phase(epochs=(0, 1), size=224, batch=64, lr=0.1), gpus=8)
    assert told(one, gbit=1.0) == told(one, gbit=1000.0)
    assert told(one).parts["all-reduce"] > 0
    assert told(single(Phase(epochs=(0, 1), size=224, batch=64, lr=0.1)), gpus=1, machines=1).parts["all-reduce"] == 0


def test_fewer_gpus_than_the_batch_is_for_accumulate() -> None:
    one = single(Phase(epochs=(0, 1), size=224, batch=64, lr=0.1), gpus=16)
    whole, half = told(one, machines=2), told(one, machines=1)
    assert half.parts["compute"] == pytest.approx(2 * whole.parts["compute"])
    assert half.parts["optimizer"] == whole.parts["optimizer"]
    third = told(one, gpus=6, machines=1)  # 16 chunks on 6 GPUs are 3 rounds
    assert third.parts["compute"] == pytest.approx(3 * whole.parts["compute"])


def test_a_shortened_run_takes_as_much_less_as_it_makes_fewer_steps() -> None:
    whole, short = schedule(16), schedule(16, max_steps=40)
    parts, less = told(whole).parts, told(short).parts
    assert less["optimizer"] / parts["optimizer"] == pytest.approx(40 / whole.steps)
    assert less["fixed"] == len(short.epochs)


def test_small_images_and_small_models_take_less() -> None:
    def compute(size: int, model: str) -> float:
        return told(single(Phase(epochs=(0, 1), size=size, batch=64, lr=0.1), 8, model)).parts["compute"]

    assert compute(128, "resnet50") / compute(224, "resnet50") == pytest.approx((128 / 224) ** 2)
    assert compute(224, "resnet18") / compute(224, "resnet50") == pytest.approx(0.223)


def test_the_cpu_figure_is_still_the_one_fitted_to_cifar_on_two_cores() -> None:
    found = forecast(Schedule(cifar10, 50_000, 1), gpus=1, gpu="CPU", gbit=1.0, machines=1)
    assert found and found.seconds - found.parts["start"] == pytest.approx(355, rel=0.1)  # LOG.md


def test_a_forecast_adds_up_and_names_its_largest_part() -> None:
    found = told(schedule(16))
    assert found.seconds == pytest.approx(sum(found.parts.values())) and found.minutes == found.seconds / 60
    assert set(found.parts) == {"compute", "all-reduce", "optimizer", "fixed", "start"}
    assert found.most == "compute" and Forecast({"a": 1.0, "b": 2.0}).most == "b"


def test_it_needs_neither_torch_nor_numpy() -> None:
    code = "import sys, train.forecast; print(sorted({'torch', 'numpy', 'boto3', 'cluster'} & sys.modules.keys()))"
    root = Path(__file__).resolve().parents[2]
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, timeout=60)
    assert ran.stdout == "[]\n", ran.stderr
