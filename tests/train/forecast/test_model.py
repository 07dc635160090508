"""The arithmetic of the forecast: terms against hand calculations (facts/training.md 6), and rules that they follow."""

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
from train.recipe import IMAGENET, MODELS, Comm, Data, Model, Phase, Recipe
from train.recipe.schedule import Schedule

IMAGES = IMAGENET.train
BARE = Constants(source="bare")  # nothing but compute and all-reduce


def make_schedule(machines: int, epochs: int | None = None, **options: Any) -> Schedule:
    """Return the schedule of the 18 minutes for machines of 8 GPUs, cut after a phase that ends at `epochs`."""
    recipe = resnet50.for_machines(machines)
    phases = [phase for phase in recipe.phases if epochs is None or phase.epochs[1] <= epochs]
    return Schedule(replace(recipe, tables={}, phases=phases), IMAGES, 8 * machines, **options)


def one_epoch_schedule(
    size: int, batch: int, gpus: int = 1, model: str = "resnet50", images: int = IMAGES, copy: int | None = None
) -> Schedule:
    """Return a schedule of a single epoch on other images than ImageNet."""
    phase = Phase(epochs=(0, 1), size=size, batch=batch, lr=0.1, copy=copy)
    data = Data(name="some", root="some", train=images, val=1)
    return Schedule(Recipe(name="x", data=data, model=Model(name=model), phases=[phase], gpus=1), images, gpus)


def forecast_of(schedule: Schedule, **settings: Any) -> Forecast:
    """Return the forecast of a schedule, by default on machines of 8 V100 with 25 Gbit/s."""
    machines = schedule.gpus // 8
    result = forecast(schedule, **{"gpus": 8, "gpu": "V100", "gbit": 25.0, "machines": machines, **settings})
    assert result is not None
    return result


def step_seconds(result: Forecast, *terms: str) -> float:
    """Return the seconds that some terms take in one step."""
    steps = sum(epoch.steps for epoch in result.schedule.epochs)
    return sum(result.term_seconds[term] for term in terms) / steps


# --- steps, by hand and by the log of 8 machines --------------------------------------------------------------------


@pytest.mark.parametrize(("row", "seconds"), [(0, 0.105), (1, 0.130), (2, 0.157), (3, 0.310), (5, 0.333)])
def test_step_seconds_of_16_machines_match_the_hand_calculation(row: int, seconds: float) -> None:
    phase = replace(resnet50.tables[16][row], epochs=(0, 1))
    images = 128 * phase.batch * 50  # full steps only
    schedule = Schedule(replace(resnet50, tables={}, phases=[phase]), images, 128)
    result = forecast_of(schedule, constants=IMAGENET18_CONSTANTS)
    assert step_seconds(result, "compute", "all-reduce", "optimizer") == pytest.approx(seconds, abs=0.0011)


@pytest.mark.parametrize(("size", "batch", "printed", "mean"), [
    (128, 128, 0.133, 0.168), (128, 256, 0.180, 0.216), (224, 128, 0.223, 0.254), (224, 224, 0.346, 0.372),
    (288, 128, 0.352, 0.385),
])  # fmt: skip
def test_step_seconds_of_8_machines_match_the_log(size: int, batch: int, printed: float, mean: float) -> None:
    """The log prints steps without its own writing; the mean step contains it."""
    schedule = one_epoch_schedule(size, batch, gpus=64, images=64 * batch * 20)
    result = forecast_of(schedule, constants=IMAGENET18_CONSTANTS)
    assert step_seconds(result, "compute", "all-reduce", "optimizer") == pytest.approx(printed, rel=0.06)
    assert step_seconds(result, "compute", "all-reduce", "optimizer", "logging") == pytest.approx(mean, rel=0.055)


@pytest.mark.parametrize(("gradient_bytes", "minutes"), [(2, 8.9), (4, 11.8)])
def test_overlap_and_persistent_workers_halve_the_time(gradient_bytes: int, minutes: float) -> None:
    constants = replace(
        DEFAULT_CONSTANTS,
        images_per_second=835.0,
        gradient_bytes=gradient_bytes,
        network=NetworkSpec(0.5, 0.0),
        startup_seconds=0.0,
        boot_seconds=0.0,
        setup_seconds=0.0,
        fetch_bytes_per_second=0.0,
    )
    result = forecast_of(make_schedule(16, epochs=38), constants=constants)
    assert result.total_minutes - result.term_seconds["validation"] / 60 == pytest.approx(minutes, abs=0.15)


@pytest.mark.parametrize(("gpu", "gbit", "batch", "gradient_bytes", "percent"), [
    ("V100", 25, 192, 2, 96), ("V100", 25, 192, 4, 77), ("V100", 25, 64, 2, 54), ("V100", 100, 192, 4, 98),
    ("A100", 400, 256, 4, 99), ("A100", 400, 64, 4, 96), ("H100", 3200, 256, 4, 99),
])  # fmt: skip
def test_weak_scaling_to_16_machines_is_as_calculated(
    gpu: str, gbit: float, batch: int, gradient_bytes: int, percent: float
) -> None:
    schedule = one_epoch_schedule(224, batch, gpus=128, images=128 * batch)
    result = forecast_of(schedule, gpu=gpu, gbit=gbit, constants=replace(BARE, gradient_bytes=gradient_bytes))
    compute = result.term_seconds["compute"]
    assert 100 * compute / (compute + result.term_seconds["all-reduce"]) == pytest.approx(percent, abs=1.0)


def with_comm(schedule: Schedule, **comm: Any) -> Schedule:
    """Return the schedule with gradients summed in another way."""
    return replace(schedule, recipe=replace(schedule.recipe, comm=Comm(**comm)))


@pytest.mark.parametrize(("hook", "gradient_bytes", "sent_bytes"), [
    ("none", 4, 4), ("fp16", 4, 2), ("bf16", 4, 2), ("powersgd", 4, 4), ("hierarchical", 4, 4), ("none", 2, 2),
    ("fp16", 2, 2),
])  # fmt: skip
def test_all_reduce_bytes_depend_on_the_comm_hook(hook: str, gradient_bytes: int, sent_bytes: int) -> None:
    schedule = with_comm(one_epoch_schedule(128, 64, gpus=16), hook=hook)
    constants = replace(BARE, gradient_bytes=gradient_bytes, network=NetworkSpec(0.5, 0.0), overlap=False, bus_gbit=1e9)
    ring = 2 / 2 if hook == "hierarchical" else 2 * 15 / 16
    expected = ring * 25_557_032 * sent_bytes * 8 / 12.5e9
    assert step_seconds(forecast_of(schedule, constants=constants), "all-reduce") == pytest.approx(expected, rel=1e-6)


def test_all_reduce_without_overlap_is_fully_exposed() -> None:
    schedule = one_epoch_schedule(224, 192, gpus=128)
    sequential = forecast_of(with_comm(schedule, overlap=False))
    overlapped = forecast_of(with_comm(schedule, overlap=True))
    assert step_seconds(sequential, "all-reduce") > 2 * step_seconds(overlapped, "all-reduce")
    assert forecast_of(schedule) == overlapped


def test_hierarchical_all_reduce_has_fewer_hops_but_uses_the_bus() -> None:
    schedule = one_epoch_schedule(224, 64, gpus=128)
    constants = replace(BARE, network=NetworkSpec(1e9, 1e-3), overlap=False, bus_gbit=100.0)

    def all_reduce(hook: str, **settings: Any) -> float:
        result = forecast_of(with_comm(schedule, hook=hook), constants=constants, **settings)
        return step_seconds(result, "all-reduce")

    assert all_reduce("none") == pytest.approx(2 * 127 * 1e-3)
    assert all_reduce("hierarchical") == pytest.approx(2 * 15e-3 + 2 * 25_557_032 * 32 / 100e9)
    one_gpu_each = {"gpus": 1, "machines": 128}
    assert all_reduce("hierarchical", **one_gpu_each) == all_reduce("none", **one_gpu_each)


def test_all_reduce_over_tcp_lowers_the_efficiency() -> None:
    """Without EFA's plugin a p5 has 50 of its 3200 Gbit/s."""
    schedule = one_epoch_schedule(224, 192, gpus=128, images=128 * 192)
    terms = forecast_of(schedule, gpu="H100", gbit=100, constants=replace(BARE, network=TCP_NETWORK)).term_seconds
    assert terms["compute"] / (terms["compute"] + terms["all-reduce"]) == pytest.approx(0.63, abs=0.02)


@pytest.mark.parametrize(("gpus", "percent"), [(4, 97.7), (8, 95.5), (16, 91.4), (32, 84.1), (64, 72.6)])
def test_fixed_epoch_seconds_look_like_a_loss_of_scaling(gpus: int, percent: float) -> None:
    constants = replace(BARE, images_per_second=889.0, epoch_seconds=((224, 8.5),), network=NetworkSpec(1.0, 0.0))

    def seconds(gpu_count: int) -> float:
        schedule = one_epoch_schedule(224, 256, gpus=gpu_count)
        machines = max(1, gpu_count // 4)
        result = forecast_of(schedule, machines=machines, gpus=4, gbit=1e9, gpu="A100", constants=constants)
        return result.total_seconds

    assert 100 * (seconds(1) - 8.5) / gpus / seconds(gpus) == pytest.approx(percent, abs=1.0)


# --- the loader, validation, fixed costs, the start ------------------------------------------------------------------


def test_step_waits_only_for_a_loader_slower_than_the_gpus() -> None:
    schedule = one_epoch_schedule(128, 512, gpus=8, images=8 * 512 * 10, copy=160)
    # The presets know nothing of other images than ImageNet's.
    unknown, slow, fast = (
        forecast_of(schedule, vcpus=64, constants=replace(BARE, vcpu_images_per_second=speed)).term_seconds
        for speed in (None, 100.0, 1e6)
    )
    assert unknown["loader"] == fast["loader"] == 0
    assert slow["compute"] + slow["all-reduce"] + slow["loader"] == pytest.approx(40960 / 6400)
    unknown_vcpus = forecast_of(schedule, constants=replace(BARE, vcpu_images_per_second=100.0))
    assert unknown_vcpus.term_seconds["loader"] == 0


def test_twice_the_machines_load_twice_as_fast() -> None:
    schedule = one_epoch_schedule(128, 512, gpus=16, images=16 * 512 * 10)
    constants = replace(BARE, vcpu_images_per_second=10.0, bus_gbit=1e9)
    two, one = (
        forecast_of(schedule, vcpus=64, machines=machines, constants=constants).term_seconds for machines in (2, 1)
    )
    assert one["loader"] + one["compute"] == pytest.approx(2 * (two["loader"] + two["compute"] + two["all-reduce"]))


def test_loader_images_per_second_by_copy_and_size() -> None:
    assert loader_images_per_second(160, 128, 64) == pytest.approx(64 * VCPU_CORE_SHARE * 1e6 / 282)
    measured = DECODE_MICROSECONDS[352, 224]
    assert loader_images_per_second(352, 224, 96) == pytest.approx(96 * VCPU_CORE_SHARE * 1e6 / measured)
    assert loader_images_per_second(352, 224, 2) > loader_images_per_second(352, 288, 2)
    assert loader_images_per_second(352, 288, 2) > loader_images_per_second(None, 288, 2)
    # Full size at 288 pixels was not measured: it takes longer than at 224.
    extrapolated = 1650 + 0.9e-3 * (288**2 - 224**2)
    assert loader_images_per_second(None, 288, 1) == pytest.approx(VCPU_CORE_SHARE * 1e6 / extrapolated)


def test_p4d_is_fed_by_resized_copies() -> None:
    assert forecast_of(make_schedule(4), gpu="A100", gbit=400, vcpus=96).term_seconds["loader"] == 0
    assert forecast_of(make_schedule(4), gpu="A100", gbit=400, vcpus=8).longest_term == "loader"


def test_validation_seconds_of_all_views_or_their_loading() -> None:
    phase = Phase(epochs=(0, 2), size=224, batch=64, lr=0.1, rect_val=True)
    data = Data(name="some", root="some", train=64 * 80, val=50_000)
    schedule = Schedule(Recipe(name="x", data=data, model=Model(name="resnet50"), phases=[phase]), 64 * 80, 8)
    result = forecast_of(schedule, gpu="A100", constants=BARE)
    assert result.term_seconds["validation"] == pytest.approx(2 * 50_000 * 2.33 / 3 / 2400 / 8)
    slow_loader = forecast_of(schedule, gpu="A100", vcpus=10, constants=replace(BARE, vcpu_images_per_second=100.0))
    assert slow_loader.term_seconds["validation"] == pytest.approx(2 * 50_000 * 2 / 1000)


@pytest.mark.parametrize(("validate", "validations"), [("each", 4), ("last", 1), ("never", 1), ("near", 3)])
def test_validation_seconds_follow_the_validation_policy(validate: str, validations: int) -> None:
    """The last epoch is always validated. With "near", all but the first count: how near they are is not known yet."""
    phase = Phase(epochs=(0, 4), size=224, batch=64, lr=0.1, validate=validate)
    data = Data(name="some", root="some", train=640, val=800)
    recipe = Recipe(name="x", data=data, model=Model(name="resnet50"), phases=[phase], target=93.0)
    result = forecast_of(Schedule(recipe, 640, 8), constants=BARE)
    assert result.term_seconds["validation"] == pytest.approx(validations * 100 / 3 / 1000)


def test_fixed_seconds_include_the_switch_to_a_new_shape() -> None:
    settings = [((0, 2), 128, 64), ((2, 3), 128, 64), ((3, 4), 128, 128), ((4, 6), 224, 128)]
    phases = [Phase(epochs=epochs, size=size, batch=batch, lr=epochs[1] / 10) for epochs, size, batch in settings]
    schedule = Schedule(replace(resnet50, tables={}, phases=phases), IMAGES, 8)
    epoch_seconds = ((128, 1.0), (224, 2.0))
    switch_seconds = ((128, 10.0), (288, 100.0))
    constants = replace(BARE, epoch_seconds=epoch_seconds, switch_seconds=switch_seconds)
    result = forecast_of(schedule, constants=constants)
    assert [cost.term_seconds["fixed"] for cost in result.epochs] == [11, 1, 1, 11, 102, 2]
    assert [seconds_for_size(epoch_seconds, size) for size in (64, 128, 129, 999)] == [1, 1, 2, 2]


def test_startup_seconds_are_boot_setup_fetch_and_trainers() -> None:
    result = forecast_of(make_schedule(8), gpu="A100")
    images = IMAGES + IMAGENET.val
    assert fetch_bytes(make_schedule(8), IMAGENET.val) == images * (13_100 + 49_000 + 109_000)
    assert fetch_bytes(make_schedule(8, epochs=14), 0) == IMAGES * 13_100
    assert result.startup_seconds == {"boot": 120, "setup": 60, "fetch": images * 171_100 / 1.5e9, "trainers": 30}
    assert result.training_seconds == pytest.approx(result.total_seconds - result.term_seconds["start"] + 30)
    assert fetch_bytes(one_epoch_schedule(128, 8), 50) == 0  # the size of other images is not known


def test_seconds_until_sums_the_start_and_the_epochs_before() -> None:
    result = forecast_of(make_schedule(8))
    assert result.seconds_until(0) == result.term_seconds["start"]
    assert result.seconds_until(None) == result.seconds_until(36) == pytest.approx(result.total_seconds)
    later_seconds = sum(cost.total_seconds for cost in result.epochs[30:])
    assert result.seconds_until(30) == pytest.approx(result.total_seconds - later_seconds)


# --- the rules ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "share"), [("V100", 367 / 1200), ("A100", 938 / 2470), ("H100", 938 / 2470), ("P100", 1.0)]
)
def test_float32_is_slower_by_what_its_source_measured(gpu: str, share: float) -> None:
    schedule = one_epoch_schedule(128, 64, gpus=8)
    half, single = (
        step_seconds(
            forecast_of(replace(schedule, recipe=replace(schedule.recipe, precision=precision)), gpu=gpu), "compute"
        )
        for precision in ("fp16", "fp32")
    )
    assert half / single == pytest.approx(share, rel=2e-3)


def test_forecast_of_unknown_cards_and_models_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = make_schedule(16)
    for gpu in ("B200", "", "v100", "RTX PRO 4500"):
        assert forecast(schedule, gpus=8, gpu=gpu, gbit=25, machines=16) is None
    measured = forecast_of(schedule, gpu="B200", constants=replace(DEFAULT_CONSTANTS, images_per_second=9000.0))
    assert measured.total_seconds < forecast_of(schedule, gpu="H100").total_seconds
    monkeypatch.delitem(MODEL_COSTS, "resnet50")
    assert forecast(schedule, gpus=8, gpu="V100", gbit=25, machines=16) is None


def test_presets_cover_all_models_and_nearly_all_cards() -> None:
    assert MODEL_COSTS.keys() == set(MODELS)
    cards = {instance_type.gpu for instance_type in BUILTIN_TYPES.values()}
    assert cards - DEVICES.keys() == {"B200", "B300", "RTX PRO Server 6000"}


def test_all_reduce_of_one_machine_and_of_one_gpu() -> None:
    one_machine = one_epoch_schedule(224, 64, gpus=8)
    assert forecast_of(one_machine, gbit=1.0) == forecast_of(one_machine, gbit=1000.0)
    assert forecast_of(one_machine).term_seconds["all-reduce"] > 0
    one_gpu = forecast_of(one_epoch_schedule(224, 64), gpus=1, machines=1)
    assert one_gpu.term_seconds["all-reduce"] == 0


def test_compute_on_fewer_gpus_accumulates() -> None:
    schedule = one_epoch_schedule(224, 64, gpus=16)
    all_gpus = forecast_of(schedule, machines=2).term_seconds
    half = forecast_of(schedule, machines=1).term_seconds
    assert half["compute"] == pytest.approx(2 * all_gpus["compute"])
    assert half["optimizer"] == all_gpus["optimizer"]
    six_gpus = forecast_of(schedule, gpus=6, machines=1).term_seconds  # 16 chunks on 6 GPUs are 3 batches each
    assert six_gpus["compute"] == pytest.approx(3 * all_gpus["compute"])


def test_forecast_of_a_shortened_run_is_proportional_to_steps() -> None:
    whole, shortened = make_schedule(16), make_schedule(16, max_steps=40)
    whole_terms, shortened_terms = forecast_of(whole).term_seconds, forecast_of(shortened).term_seconds
    assert shortened_terms["optimizer"] / whole_terms["optimizer"] == pytest.approx(40 / whole.steps)
    assert shortened_terms["fixed"] == len(shortened.epochs)


def test_compute_is_proportional_to_pixels_and_model_work() -> None:
    def compute(size: int, model: str) -> float:
        return forecast_of(one_epoch_schedule(size, 64, 8, model)).term_seconds["compute"]

    assert compute(128, "resnet50") / compute(224, "resnet50") == pytest.approx((128 / 224) ** 2)
    assert compute(224, "resnet18") / compute(224, "resnet50") == pytest.approx(0.223)


def test_forecast_of_cifar10_on_two_cores_matches_the_log() -> None:
    result = forecast(Schedule(cifar10, 50_000, 1), gpus=1, gpu="CPU", gbit=1.0, machines=1)
    assert result and result.total_seconds - result.term_seconds["start"] == pytest.approx(355, rel=0.1)  # LOG.md


def test_forecast_terms_and_phases_add_up() -> None:
    result = forecast_of(make_schedule(16), vcpus=64)
    assert result.total_seconds == pytest.approx(sum(result.term_seconds.values()))
    assert result.total_minutes == result.total_seconds / 60
    terms = {"compute", "all-reduce", "optimizer", "logging", "loader", "validation", "fixed", "start"}
    assert set(result.term_seconds) == terms and result.longest_term in terms
    rows = result.phase_rows()
    assert [(row.start, row.end) for row in rows] == [phase.epochs for phase in resnet50.tables[16]]
    without_start = result.total_seconds - result.term_seconds["start"]
    assert sum(row.seconds for row in rows) == pytest.approx(without_start)
    assert all(row.terms[row.most] == max(row.terms.values()) for row in rows)
    record = result.to_record()
    assert record.minutes == result.total_minutes
    assert record.terms == result.term_seconds and record.source == "presets"


def test_forecast_counts_each_size_of_a_growing_phase() -> None:
    """160 for two epochs, then 192: the compute grows with the pixels, and each size has its row and its switch."""
    phases = [Phase(epochs=(0, 4), size=(160, 192), batch=64, lr=0.1)]
    schedule = Schedule(Recipe(name="x", data=IMAGENET, model=Model(name="resnet50"), phases=phases), IMAGES, 8)
    result = forecast_of(schedule, constants=replace(BARE, switch_seconds=((0, 5.0),)))
    small, large = result.phase_rows()
    assert [(row.start, row.end, row.size) for row in (small, large)] == [(0, 2, 160), (2, 4, 192)]
    assert large.terms["compute"] / small.terms["compute"] == pytest.approx((192 / 160) ** 2)
    assert large.terms["validation"] / small.terms["validation"] == pytest.approx((192 / 160) ** 2)
    assert (small.terms["fixed"], large.terms["fixed"]) == (5.0, 5.0)


def test_scaling_efficiency_is_relative_to_the_first_row() -> None:
    one, two = (forecast_of(one_epoch_schedule(224, 64, gpus=8 * machines)) for machines in (1, 2))
    first, second = scaling_efficiency([(1, one), (2, two)])
    one_seconds, two_seconds = (sum(cost.total_seconds for cost in result.epochs) for result in (one, two))
    assert first == 1 and second == pytest.approx(one_seconds / 2 / two_seconds)


def test_forecast_imports_neither_torch_nor_numpy() -> None:
    code = "import sys, train.forecast; "
    code += "print(sorted({'torch', 'numpy', 'boto3', 'PIL', 'cluster'} & sys.modules.keys()))"
    root = Path(__file__).resolve().parents[3]
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, timeout=120)
    assert completed.stdout == "[]\n", completed.stderr


def test_source_target_epoch_of_the_18_minute_tables() -> None:
    target_epochs = {machines: resnet50.for_machines(machines).source_target_epoch for machines in resnet50.tables}
    assert target_epochs == {1: 28, 2: 30, 4: 29, 8: 30, 16: 38}
    phase = resnet50.tables[8][-1]
    shortened = replace(phase, epochs=(0, 20))
    assert phase.reached == 30
    assert replace(resnet50, tables={}, phases=[shortened]).source_target_epoch is None
    restored = Recipe.from_json(resnet50.for_machines(8).to_json())
    assert restored.source_target_epoch == 30 and cifar10.source_target_epoch is None
    wrong_epochs: tuple[Any, ...] = (0, -1, 1.5, True, "30")
    for wrong in wrong_epochs:
        with pytest.raises(ValueError, match="reached"):
            replace(phase, reached=wrong)
