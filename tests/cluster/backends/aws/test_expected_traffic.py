"""What a plan says about traffic: its expected cost, the assumptions, and the advice that saves money."""

import io
from dataclasses import replace
from typing import Any

import pytest
import torch

from cluster.backends.aws.planning.expected_traffic import ExpectedTraffic, expect_traffic
from cluster.backends.planner import checkpoint_bytes
from cluster.display import cloud as display_cloud
from cluster.jobs import submit
from cluster.planning.launch_options import make_launch_options
from cluster.planning.resolve import load_recipes
from infra.aws import prices
from infra.aws.launch_request import Internet
from train.forecast.hardware import fetch_bytes
from train.models.registry import build_model
from train.optim.factory import build_optimizer
from train.recipe import IMAGENET, Model, Optim, Recipe
from train.recipe.schedule import Schedule

(RECIPE,) = load_recipes("recipes/resnet50_18min.py")


def schedule_of(recipe: Recipe) -> Schedule:
    return Schedule(recipe, recipe.data.train, recipe.gpus)


def plan_of(recipe: Recipe = RECIPE, machines: int = 1, **options: Any) -> Any:
    """Plan a launch on AWS without asking AWS."""
    return submit.plan(
        recipe, make_launch_options(backend="aws", types=["p4d.24xlarge"], machines=machines, **options), offline=True
    )


def traffic_of(machines: int = 1, internet: Internet = Internet.PUBLIC, **options: Any) -> ExpectedTraffic:
    plan = plan_of(machines=machines, **options)
    return expect_traffic(plan.spec, plan.schedule, internet, plan.rental_plan.forecast, installs_torch=True)


def line_about(traffic: ExpectedTraffic, word: str) -> str:
    (line,) = (line for line in traffic.lines if line.startswith(word))
    return line


# --- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "lars"])
@pytest.mark.parametrize("model_name", ["resnet10_tiny", "resnet18"])
def test_expected_size_of_a_checkpoint_is_that_of_a_file(model_name: str, optimizer: str) -> None:
    recipe = replace(RECIPE, model=Model(name=model_name), optim=Optim(name=optimizer))
    model = build_model(recipe.model, 1000, 0)
    torch_optimizer = build_optimizer(model, recipe.optim)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    torch_optimizer.step()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": torch_optimizer.state_dict()}, file)
    expected = checkpoint_bytes(recipe)
    extra_bytes = 4 * 512 * 1000 if model_name == "resnet10_tiny" else 0  # its table entry has fewer classes
    assert expected and expected * 0.97 < len(file.getvalue()) < (expected + 3 * extra_bytes) * 1.1


def test_checkpoint_of_an_unknown_model_or_optimizer_has_no_expected_size() -> None:
    assert checkpoint_bytes(RECIPE) == 25_557_032 * 8
    assert checkpoint_bytes(replace(RECIPE, optim=Optim(name="mine:make"))) is None
    unknown = replace(RECIPE.for_machines(1), model=Model(name="timm:resnet50"))
    traffic = expect_traffic(plan_of().spec, schedule_of(unknown), Internet.PUBLIC, None, True)
    assert "size is unknown, each GB written costs $0.06" in line_about(traffic, "checkpoints")


def test_checkpoints_cost_by_the_hour_and_fewer_cost_less() -> None:
    often, seldom = traffic_of(), traffic_of(save_seconds=600.0)
    saves_dollars = 120 * 25_557_032 * 8 / 1e9 * prices.EFS_PER_GB_WRITTEN  # a review estimated $1.50
    assert saves_dollars == pytest.approx(1.47, abs=0.01)
    assert often.forecast.dollars_per_hour > saves_dollars > seldom.forecast.dollars_per_hour
    assert line_about(often, "checkpoints of 204 MB every 30 s").endswith("(fewer: --save-seconds)")
    assert often.forecast.dollars_once == pytest.approx(0.2045 * prices.DATA_OUT_PER_GB, abs=1e-4)


def test_heartbeats_cost_by_the_square_of_the_machines() -> None:
    assert not [line for line in traffic_of().lines if line.startswith("heartbeats")]
    assert line_about(traffic_of(machines=16), "heartbeats of 16 machines").endswith("$1.71 an hour")


# --- images and internet ---------------------------------------------------------------------------------------------


def test_images_read_from_the_shared_folder_name_their_price_and_that_of_s3() -> None:
    traffic = traffic_of(data="data/imagenet")
    line = line_about(traffic, "images from the shared folder, read anew in each epoch")
    gigabytes = float(line.partition("at most ")[2].partition(" GB")[0].replace(",", ""))
    epochs = len(plan_of(data="data/imagenet").schedule.epochs)
    assert 17 * epochs < gigabytes < 146 * epochs, "between the smallest copy and the full size"
    dollars = float(line.partition(" GB, $")[2].partition(";")[0].replace(",", ""))
    assert dollars == pytest.approx(gigabytes * 0.03, rel=1e-3)
    assert "; from S3 $0.00, and $" in line
    assert "(imgnet-cluster data put)" in line
    assert traffic.forecast.dollars_per_hour > 10 * traffic_of().forecast.dollars_per_hour


def test_images_fetched_once_from_the_shared_folder_are_counted_once_a_machine() -> None:
    options: dict[str, Any] = {"machines": 16, "data": "data/imagenet", "fetch": "~/.imgnet/data"}
    traffic, plan = traffic_of(**options), plan_of(**options)
    assert "each of 16 machines fetches them once" in line_about(traffic, "images from the shared folder")
    image_dollars = 16 * fetch_bytes(plan.schedule, 50_000) / 1e9 * prices.EFS_PER_GB_READ
    assert traffic.forecast.dollars_once == pytest.approx(image_dollars + 0.0184, abs=0.001) and image_dollars > 70


def test_images_from_s3_cost_requests_only() -> None:
    plan = plan_of(replace(RECIPE, data=replace(IMAGENET, root="s3://bucket/imagenet")))
    traffic = expect_traffic(plan.spec, plan.schedule, Internet.PUBLIC, None, True)
    assert line_about(traffic, "images from S3") == "images from S3, free but for the requests"
    assert 0 < traffic.forecast.dollars_once - 0.2045 * prices.DATA_OUT_PER_GB < 0.01


def test_packages_cost_behind_a_nat_gateway_only() -> None:
    public, nat = traffic_of(machines=2), traffic_of(machines=2, internet=Internet.NAT)
    assert line_about(nat, "6 GB of packages through the NAT gateway")
    difference = nat.forecast.dollars_once - public.forecast.dollars_once
    assert difference == pytest.approx(6 * prices.NAT_PER_GB + prices.NAT_PER_HOUR)


# --- the plan --------------------------------------------------------------------------------------------------------


def test_plan_shows_the_traffic_and_holds_it_back_from_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    limited = plan_of(max_dollars=40.0, market="on-demand")
    display_cloud.show_rental_plan(limited.rental_plan.summary(limited.spec))
    text = capsys.readouterr().out
    assert "\n  traffic        about $" in text and "an hour, and $0.02 once\n" in text
    assert "\n                 checkpoints of 204 MB" in text
    rental = limited.rental_plan.rental_spec
    (place,) = rental.places[:1]
    rate = rental.dollars_per_hour(1, place)
    without = replace(rental, traffic=type(rental.traffic)()).dollars_per_hour(1, place)
    assert rate - without == pytest.approx(rental.traffic.dollars_per_hour)
    hours, grace_seconds = rental.compute_limits(1, place, 10.0)
    assert (hours + grace_seconds / 3600) * rate + rental.traffic.dollars_once <= 40.000001
