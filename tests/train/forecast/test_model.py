"""The arithmetic of the forecast: terms by hand (facts/training.md 6), and the rules they follow."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.aws.market.instance_types import BUILTIN_TYPES
from recipes.cifar10 import recipe as cifar10
from recipes.resnet50_18min import recipe as resnet50
from train.forecast import (
    DEFAULT_CONSTANTS,
    DEVICES,
    IMAGENET18_CONSTANTS,
    MODEL_COSTS,
    TCP_NETWORK,
    Constants,
    Forecast,
    NetworkSpec,
    forecast,
    scaling_efficiency,
)
from train.forecast.constants import seconds_for_size
from train.forecast.hardware import DECODE_MICROSECONDS, VCPU_CORE_SHARE, fetch_bytes, loader_images_per_second
from train.recipe import IMAGENET, Comm, Data, Model, Phase, Recipe
from train.recipe import MODELS as NAMES
from train.recipe.schedule import Schedule

IMAGES = IMAGENET.train
BARE = Constants(source="bare")  # nothing but compute and what is sent


def schedule(machines: int, epochs: int | None = None, **more: Any) -> Schedule:
    """The 18 minutes' schedule for so many machines of 8 GPUs, cut after some rows' end."""
    recipe = resnet50.for_machines(machines)
    rows = [row for row in recipe.phases if epochs is None or row.epochs[1] <= epochs]
    return Schedule(replace(recipe, tables={}, phases=rows), IMAGES, 8 * machines, **more)


def told(one: Schedule, **words: Any) -> Forecast:
    """A forecast that must be one."""
    machines = one.gpus // 8
    found = forecast(one, **{"gpus": 8, "gpu": "V100", "gbit": 25.0, "machines": machines, **words})
    assert found is not None
    return found


def single(phase: Phase, gpus: int = 1, model: str = "resnet50", images: int = IMAGES) -> Schedule:
    data = Data(name="some", root="some", train=images, val=1)
    return Schedule(Recipe(name="x", data=data, model=Model(name=model), phases=[phase], gpus=1), images, gpus)


def step(found: Forecast, *names: str) -> float:
    """Seconds of one step by some terms."""
    steps = sum(one.steps for one in found.schedule.epochs)
    return sum(found.term_seconds[name] for name in names) / steps


# --- steps, by hand and by the log of 8 machines --------------------------------------------------------------------


@pytest.mark.parametrize(("row", "seconds"), [(0, 0.105), (1, 0.130), (2, 0.157), (3, 0.310), (5, 0.333)])
def test_steps_of_16_machines_are_those_of_the_calculation_by_hand(row: int, seconds: float) -> None:
    phase = replace(resnet50.tables[16][row], epochs=(0, 1))
    one = Schedule(replace(resnet50, tables={}, phases=[phase]), 128 * phase.batch * 50, 128)  # full steps
    assert step(told(one, constants=IMAGENET18_CONSTANTS), "compute", "all-reduce", "optimizer") == pytest.approx(
        seconds, abs=0.0011
    )


@pytest.mark.parametrize(("size", "batch", "printed", "mean"), [
    (128, 128, 0.133, 0.168), (128, 256, 0.180, 0.216), (224, 128, 0.223, 0.254), (224, 224, 0.346, 0.372),
    (288, 128, 0.352, 0.385),
])  # fmt: skip
def test_steps_of_8_machines_are_those_that_the_log_prints_and_with_its_writing_those_that_it_took(
    size: int, batch: int, printed: float, mean: float
) -> None:
    one = single(Phase(epochs=(0, 1), size=size, batch=batch, lr=0.1), gpus=64, images=64 * batch * 20)
    found = told(one, constants=IMAGENET18_CONSTANTS)
    assert step(found, "compute", "all-reduce", "optimizer") == pytest.approx(printed, rel=0.06)
    assert step(found, "compute", "all-reduce", "optimizer", "logging") == pytest.approx(mean, rel=0.055)


@pytest.mark.parametrize(("gradient", "minutes"), [(2, 8.9), (4, 11.8)])
def test_overlap_and_workers_that_stay_halve_the_time_of_the_same_machines(gradient: int, minutes: float) -> None:
    own = replace(DEFAULT_CONSTANTS, images=835.0, gradient_bytes=gradient, network=NetworkSpec(0.5, 0.0), start=0.0)
    found = told(schedule(16, epochs=38), constants=replace(own, boot=0.0, setup=0.0, fetch=0.0))
    assert found.total_minutes - found.term_seconds["validation"] / 60 == pytest.approx(minutes, abs=0.15)


@pytest.mark.parametrize(("gpu", "gbit", "batch", "gradient", "percent"), [
    ("V100", 25, 192, 2, 96), ("V100", 25, 192, 4, 77), ("V100", 25, 64, 2, 54), ("V100", 100, 192, 4, 98),
    ("A100", 400, 256, 4, 99), ("A100", 400, 64, 4, 96), ("H100", 3200, 256, 4, 99),
])  # fmt: skip
def test_weak_scaling_to_16_machines_is_as_calculated(
    gpu: str, gbit: float, batch: int, gradient: int, percent: float
) -> None:
    one = single(Phase(epochs=(0, 1), size=224, batch=batch, lr=0.1), gpus=128, images=128 * batch)
    found = told(one, gpu=gpu, gbit=gbit, constants=replace(BARE, gradient_bytes=gradient))
    compute = found.term_seconds["compute"]
    assert 100 * compute / (compute + found.term_seconds["all-reduce"]) == pytest.approx(percent, abs=1.0)


def by(one: Schedule, **comm: Any) -> Schedule:
    """The schedule with gradients summed in another way."""
    return replace(one, recipe=replace(one.recipe, comm=Comm(**comm)))


@pytest.mark.parametrize(("hook", "own", "sent"), [
    ("none", 4, 4), ("fp16", 4, 2), ("bf16", 4, 2), ("powersgd", 4, 4), ("hierarchical", 4, 4), ("none", 2, 2),
    ("fp16", 2, 2),
])  # fmt: skip
def test_the_recipes_hook_says_how_many_bytes_a_gradient_has_unless_the_trainers_were_of_two(
    hook: str, own: int, sent: int
) -> None:
    one = single(Phase(epochs=(0, 1), size=128, batch=64, lr=0.1), gpus=16)
    bare = replace(BARE, gradient_bytes=own, network=NetworkSpec(0.5, 0.0), overlap=False, bus=1e9)
    found = told(by(one, hook=hook), constants=bare)
    ring = 2 / 2 if hook == "hierarchical" else 2 * 15 / 16
    assert step(found, "all-reduce") == pytest.approx(ring * 25_557_032 * sent * 8 / 12.5e9, rel=1e-6)


def test_sums_after_the_backward_pass_are_seen_whole() -> None:
    one = single(Phase(epochs=(0, 1), size=224, batch=192, lr=0.1), gpus=128)
    after, beside = told(by(one, overlap=False)), told(by(one, overlap=True))
    assert step(after, "all-reduce") > 2 * step(beside, "all-reduce")
    assert told(one) == beside


def test_machine_by_machine_saves_hops_and_goes_twice_through_the_machine() -> None:
    one = single(Phase(epochs=(0, 1), size=224, batch=64, lr=0.1), gpus=128)
    bare = replace(BARE, network=NetworkSpec(1e9, 1e-3), overlap=False, bus=100.0)
    found, plain = (step(told(by(one, hook=hook), constants=bare), "all-reduce") for hook in ("hierarchical", "none"))
    assert plain == pytest.approx(2 * 127 * 1e-3) and found == pytest.approx(2 * 15e-3 + 2 * 25_557_032 * 32 / 100e9)
    alone = [told(by(one, hook=hook), constants=bare, gpus=1, machines=128) for hook in ("hierarchical", "none")]
    assert step(alone[0], "all-reduce") == step(alone[1], "all-reduce")


def test_a_network_without_its_plugin_is_seen_at_once() -> None:
    one = single(Phase(epochs=(0, 1), size=224, batch=192, lr=0.1), gpus=128, images=128 * 192)
    slow = told(one, gpu="H100", gbit=100, constants=replace(BARE, network=TCP_NETWORK))  # 50 Gbit/s of 3200
    assert slow.term_seconds["compute"] / (
        slow.term_seconds["compute"] + slow.term_seconds["all-reduce"]
    ) == pytest.approx(0.63, abs=0.02)


@pytest.mark.parametrize(("gpus", "percent"), [(4, 97.7), (8, 95.5), (16, 91.4), (32, 84.1), (64, 72.6)])
def test_what_an_epoch_costs_once_is_what_looks_like_a_loss_of_scaling(gpus: int, percent: float) -> None:
    own = replace(BARE, images=889.0, epoch=((224, 8.5),), network=NetworkSpec(1.0, 0.0))

    def seconds(many: int) -> float:
        one = single(Phase(epochs=(0, 1), size=224, batch=256, lr=0.1), gpus=many)
        return told(one, machines=max(1, many // 4), gpus=4, gbit=1e9, gpu="A100", constants=own).total_seconds

    assert 100 * (seconds(1) - 8.5) / gpus / seconds(gpus) == pytest.approx(percent, abs=1.0)


# --- the loader, validation, what is fixed, the start ---------------------------------------------------------------


def test_a_step_waits_for_a_loader_that_is_slower_than_the_gpus_and_for_no_other() -> None:
    one = single(Phase(epochs=(0, 1), size=128, batch=512, lr=0.1, copy=160), gpus=8, images=8 * 512 * 10)
    bare, slow, fast = (told(one, vcpus=64, constants=replace(BARE, feed=speed)) for speed in (None, 100.0, 1e6))
    assert (
        bare.term_seconds["loader"] == fast.term_seconds["loader"] == 0
    )  # of other images than ImageNet's presets know nothing
    assert slow.term_seconds["compute"] + slow.term_seconds["all-reduce"] + slow.term_seconds[
        "loader"
    ] == pytest.approx(40960 / 6400)
    assert told(one, constants=replace(BARE, feed=100.0)).term_seconds["loader"] == 0  # processors that nobody knows


def test_twice_the_machines_have_twice_the_loaders() -> None:
    one = single(Phase(epochs=(0, 1), size=128, batch=512, lr=0.1), gpus=16, images=16 * 512 * 10)
    two, half = (told(one, vcpus=64, machines=n, constants=replace(BARE, feed=10.0, bus=1e9)) for n in (2, 1))
    assert half.term_seconds["loader"] + half.term_seconds["compute"] == pytest.approx(
        2 * (two.term_seconds["loader"] + two.term_seconds["compute"] + two.term_seconds["all-reduce"])
    )


def test_the_processors_speed_is_what_was_measured_by_copy_and_size() -> None:
    assert loader_images_per_second(160, 128, 64) == pytest.approx(64 * VCPU_CORE_SHARE * 1e6 / 282)
    assert loader_images_per_second(352, 224, 96) == pytest.approx(
        96 * VCPU_CORE_SHARE * 1e6 / DECODE_MICROSECONDS[352, 224]
    )
    assert (
        loader_images_per_second(352, 224, 2)
        > loader_images_per_second(352, 288, 2)
        > loader_images_per_second(None, 288, 2)
    )  # full size at 288 was not measured: more than 224
    assert loader_images_per_second(None, 288, 1) == pytest.approx(
        VCPU_CORE_SHARE * 1e6 / (1650 + 0.9e-3 * (288**2 - 224**2))
    )


def test_a_p4d_is_fed_by_prepared_copies_as_the_facts_say() -> None:
    found = told(schedule(4), gpu="A100", gbit=400, vcpus=96)
    assert found.term_seconds["loader"] == 0
    assert told(schedule(4), gpu="A100", gbit=400, vcpus=8).longest_term == "loader"


def test_a_validation_is_a_third_of_a_step_for_each_view_and_not_shorter_than_its_loading() -> None:
    phase = Phase(epochs=(0, 2), size=224, batch=64, lr=0.1, rect_val=True)
    data = Data(name="some", root="some", train=64 * 80, val=50_000)
    one = Schedule(Recipe(name="x", data=data, model=Model(name="resnet50"), phases=[phase]), 64 * 80, 8)
    found = told(one, gpu="A100", constants=BARE)
    assert found.term_seconds["validation"] == pytest.approx(2 * 50_000 * 2.33 / 3 / 2400 / 8)
    slow = told(one, gpu="A100", vcpus=10, constants=replace(BARE, feed=100.0))
    assert slow.term_seconds["validation"] == pytest.approx(2 * 50_000 * 2 / 1000)


@pytest.mark.parametrize(("validate", "times"), [("each", 4), ("last", 1), ("never", 1), ("near", 3)])
def test_epochs_that_are_not_validated_cost_no_validation(validate: str, times: int) -> None:
    """The last is always validated; whether one is near the target nobody knows beforehand, but for the first."""
    phase = Phase(epochs=(0, 4), size=224, batch=64, lr=0.1, validate=validate)
    data = Data(name="some", root="some", train=640, val=800)
    recipe = Recipe(name="x", data=data, model=Model(name="resnet50"), phases=[phase], target=93.0)
    found = told(Schedule(recipe, 640, 8), constants=BARE)
    assert found.term_seconds["validation"] == pytest.approx(times * 100 / 3 / 1000)


def test_a_first_epoch_of_another_shape_costs_its_switch() -> None:
    told_rows = [((0, 2), 128, 64), ((2, 3), 128, 64), ((3, 4), 128, 128), ((4, 6), 224, 128)]
    rows = [Phase(epochs=epochs, size=size, batch=batch, lr=epochs[1] / 10) for epochs, size, batch in told_rows]
    one = Schedule(replace(resnet50, tables={}, phases=rows), IMAGES, 8)
    found = told(one, constants=replace(BARE, epoch=((128, 1.0), (224, 2.0)), switch=((128, 10.0), (288, 100.0))))
    assert [cost.term_seconds["fixed"] for cost in found.epochs] == [11, 1, 1, 11, 102, 2]
    assert [seconds_for_size(((128, 1.0), (224, 2.0)), size) for size in (64, 128, 129, 999)] == [1, 1, 2, 2]


def test_the_start_is_boot_setup_fetch_and_the_trainers_own() -> None:
    found = told(schedule(8), gpu="A100")
    images = IMAGES + IMAGENET.val
    assert fetch_bytes(schedule(8), IMAGENET.val) == images * (13_100 + 49_000 + 109_000)
    assert fetch_bytes(schedule(8, epochs=14), 0) == IMAGES * 13_100
    assert found.startup_seconds == {"boot": 120, "setup": 60, "fetch": images * 171_100 / 1.5e9, "trainers": 30}
    assert found.training_seconds == pytest.approx(found.total_seconds - found.term_seconds["start"] + 30)
    assert fetch_bytes(single(Phase(epochs=(0, 1), size=128, batch=8, lr=0.1)), 50) == 0  # nobody knows their size


def test_seconds_until_an_epoch_are_those_of_the_start_and_of_the_epochs_before() -> None:
    found = told(schedule(8))
    assert found.seconds_until(0) == found.term_seconds["start"] and found.seconds_until(None) == found.seconds_until(
        36
    )
    assert found.seconds_until(None) == pytest.approx(found.total_seconds)
    assert found.seconds_until(30) == pytest.approx(
        found.total_seconds - sum(one.total_seconds for one in found.epochs[30:])
    )


# --- the rules ----------------------------------------------------------------------------------------------------


def test_unknown_cards_and_models_are_unknown_and_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    one = schedule(16)
    for gpu in ("B200", "", "v100", "RTX PRO 4500"):
        assert forecast(one, gpus=8, gpu=gpu, gbit=25, machines=16) is None
    measured = told(one, gpu="B200", constants=replace(DEFAULT_CONSTANTS, images=9000.0))  # no guess
    assert measured.total_seconds < told(one, gpu="H100").total_seconds
    monkeypatch.delitem(MODEL_COSTS, "resnet50")
    assert forecast(one, gpus=8, gpu="V100", gbit=25, machines=16) is None


def test_every_model_and_nearly_every_card_that_can_be_rented_has_figures() -> None:
    assert MODEL_COSTS.keys() == set(NAMES)
    assert {kind.gpu for kind in BUILTIN_TYPES.values()} - DEVICES.keys() == {"B200", "B300", "RTX PRO Server 6000"}


def test_a_machine_alone_sends_nothing_over_the_network_and_a_gpu_alone_nothing_at_all() -> None:
    one = single(Phase(epochs=(0, 1), size=224, batch=64, lr=0.1), gpus=8)
    assert told(one, gbit=1.0) == told(one, gbit=1000.0)
    assert told(one).term_seconds["all-reduce"] > 0
    assert (
        told(single(Phase(epochs=(0, 1), size=224, batch=64, lr=0.1)), gpus=1, machines=1).term_seconds["all-reduce"]
        == 0
    )


def test_fewer_gpus_than_the_batch_is_for_accumulate() -> None:
    one = single(Phase(epochs=(0, 1), size=224, batch=64, lr=0.1), gpus=16)
    whole, half = told(one, machines=2), told(one, machines=1)
    assert half.term_seconds["compute"] == pytest.approx(2 * whole.term_seconds["compute"])
    assert half.term_seconds["optimizer"] == whole.term_seconds["optimizer"]
    third = told(one, gpus=6, machines=1)  # 16 chunks on 6 GPUs are 3 rounds
    assert third.term_seconds["compute"] == pytest.approx(3 * whole.term_seconds["compute"])


def test_a_shortened_run_takes_as_much_less_as_it_makes_fewer_steps() -> None:
    whole, short = schedule(16), schedule(16, max_steps=40)
    parts, less = told(whole).term_seconds, told(short).term_seconds
    assert less["optimizer"] / parts["optimizer"] == pytest.approx(40 / whole.steps)
    assert less["fixed"] == len(short.epochs)


def test_small_images_and_small_models_take_less() -> None:
    def compute(size: int, model: str) -> float:
        return told(single(Phase(epochs=(0, 1), size=size, batch=64, lr=0.1), 8, model)).term_seconds["compute"]

    assert compute(128, "resnet50") / compute(224, "resnet50") == pytest.approx((128 / 224) ** 2)
    assert compute(224, "resnet18") / compute(224, "resnet50") == pytest.approx(0.223)


def test_the_cpu_figure_is_still_the_one_fitted_to_cifar_on_two_cores() -> None:
    found = forecast(Schedule(cifar10, 50_000, 1), gpus=1, gpu="CPU", gbit=1.0, machines=1)
    assert found and found.total_seconds - found.term_seconds["start"] == pytest.approx(355, rel=0.1)  # LOG.md


def test_a_forecast_adds_up_and_its_phases_do_too() -> None:
    found = told(schedule(16), vcpus=64)
    assert (
        found.total_seconds == pytest.approx(sum(found.term_seconds.values()))
        and found.total_minutes == found.total_seconds / 60
    )
    terms = {"compute", "all-reduce", "optimizer", "logging", "loader", "validation", "fixed", "start"}
    assert set(found.term_seconds) == terms and found.longest_term in terms
    phases = found.phase_rows()
    assert [(one["start"], one["end"]) for one in phases] == [row.epochs for row in resnet50.tables[16]]
    assert sum(one["seconds"] for one in phases) == pytest.approx(found.total_seconds - found.term_seconds["start"])
    assert all(one["terms"][one["most"]] == max(one["terms"].values()) for one in phases)
    said = found.to_json()
    assert (
        said["minutes"] == found.total_minutes and said["terms"] == found.term_seconds and said["source"] == "presets"
    )


def test_efficiency_is_a_machines_images_in_a_second_beside_the_first_rows() -> None:
    one, two = (told(single(Phase(epochs=(0, 1), size=224, batch=64, lr=0.1), gpus=8 * n)) for n in (1, 2))
    first, second = scaling_efficiency([(1, one), (2, two)])
    seconds = [sum(cost.total_seconds for cost in found.epochs) for found in (one, two)]
    assert first == 1 and second == pytest.approx(seconds[0] / 2 / seconds[1])


def test_it_needs_neither_torch_nor_numpy() -> None:
    code = "import sys, train.forecast; "
    code += "print(sorted({'torch', 'numpy', 'boto3', 'PIL', 'cluster'} & sys.modules.keys()))"
    root = Path(__file__).resolve().parents[3]
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, timeout=60)
    assert ran.stdout == "[]\n", ran.stderr


def test_the_epoch_at_which_a_source_met_its_target_belongs_to_its_row_and_is_not_of_a_shorter_one() -> None:
    assert {machines: resnet50.for_machines(machines).source_target_epoch for machines in resnet50.tables} == {
        1: 28, 2: 30, 4: 29, 8: 30, 16: 38,
    }  # fmt: skip
    row = resnet50.tables[8][-1]
    cut = replace(row, epochs=(0, 20))
    assert row.reached == 30 and replace(resnet50, tables={}, phases=[cut]).source_target_epoch is None
    again = Recipe.from_json(resnet50.for_machines(8).to_json())
    assert again.source_target_epoch == 30 and cifar10.source_target_epoch is None
    for bad in (0, -1, 1.5, True, "30"):
        with pytest.raises(ValueError, match="reached"):
            replace(row, reached=bad)
