"""What a plan says about traffic: its expected cost, the assumptions, and the advice that saves money."""

import io
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from cluster.backends.aws.planning.expected_traffic import expect_traffic
from cluster.backends.aws.terms.rental_spec import RentalSpec
from cluster.backends.planner import checkpoint_bytes
from cluster.jobs import submit
from cluster.planning.launch_options import make_launch_options
from cluster.planning.resolve import load_recipes
from infra.aws import prices
from infra.aws.launch_request import Internet
from train.forecast.hardware import fetch_bytes
from train.models.registry import build_model
from train.optim.factory import build_optimizer
from train.recipe import IMAGENET, Model, Optim, Recipe

(RECIPE,) = load_recipes("recipes/resnet50_18min.py")
FROM_S3 = replace(RECIPE, data=replace(IMAGENET, root="s3://bucket/imagenet"))
OF_ANOTHER_LIBRARY = replace(RECIPE.for_machines(1), model=Model(name="timm:resnet50"))
HOME_DOLLARS = 25_557_032 * 8 / 1e9 * prices.DATA_OUT_PER_GB  # the last checkpoint comes to this computer


def rental_of(recipe: Recipe = RECIPE, machines: int = 1, **options: Any) -> Any:
    """Plan a launch on AWS without asking AWS, and return its plan, what it rents, and its lines about traffic."""
    launch_options = make_launch_options(backend="aws", types=["p4d.24xlarge"], machines=machines, **options)
    plan = submit.plan(recipe, launch_options, offline=True)
    assert plan.rental_plan
    return plan, RentalSpec.from_json(plan.spec.cloud), plan.rental_plan.traffic


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
    assert checkpoint_bytes(OF_ANOTHER_LIBRARY) is None


@pytest.mark.parametrize(("recipe", "options", "line", "dollars_once"), [
    pytest.param(RECIPE, {}, ("checkpoints of 204 MB every 30 s", "an hour"), 0, id="checkpoints"),
    pytest.param(OF_ANOTHER_LIBRARY, {}, ("checkpoints: their size is unknown", "$0.06"), -HOME_DOLLARS, id="none"),
    # They cost by the square of the machines.
    pytest.param(RECIPE, {"machines": 16}, ("heartbeats of 16 machines", "$1.71 an hour"), 0, id="heartbeats"),
    pytest.param(FROM_S3, {}, ("images from S3", ", free but for the requests"), 0.0005, id="S3"),
    pytest.param(RECIPE, {"machines": 2, "internet": Internet.NAT}, ("6 GB of packages", " through the NAT gateway"),
                 6 * prices.NAT_PER_GB + prices.NAT_PER_HOUR, id="NAT gateway"),
])  # fmt: skip
def test_traffic_has_a_line_for_each_cause_and_its_cost(
    recipe: Recipe, options: dict[str, Any], line: tuple[str, str], dollars_once: float
) -> None:
    _, rental_spec, lines = rental_of(recipe, **options)
    start, end = line
    assert [text for text in lines if text.startswith(start) and text.endswith(end)], lines
    assert rental_spec.traffic.dollars_once == pytest.approx(HOME_DOLLARS + dollars_once, abs=5e-4)


@pytest.mark.parametrize(("internet", "way", "gb_dollars", "start"), [
    (Internet.PUBLIC, ("eu-west-1", True), 0.02, "in eu-west-1, another region: "),
    (Internet.NAT, ("eu-west-1", True), 0.02 + 0.045, "in eu-west-1, another region through the NAT gateway: "),
    (Internet.PRIVATE, ("", False), 0.045, "without an S3 gateway endpoint, through the NAT gateway: "),
])  # fmt: skip
def test_images_to_which_no_endpoint_leads_cost_by_the_gigabyte(
    internet: Internet, way: tuple[str, bool], gb_dollars: float, start: str
) -> None:
    plan, _, _ = rental_of(FROM_S3, machines=16)
    (free, _), (paid, lines) = (
        expect_traffic(plan.spec, plan.schedule, internet, None, False, 0, *each) for each in (("", True), way)
    )
    gigabytes = 16 * fetch_bytes(plan.schedule) / 1e9
    dollars = gigabytes * gb_dollars
    assert paid.dollars_once - free.dollars_once == pytest.approx(dollars, abs=0.01) and dollars > 10
    assert f"images from S3 {start}{gigabytes:,.0f} GB, ${dollars:,.2f}" in lines


def test_fewer_checkpoints_cost_less_by_the_hour() -> None:
    (_, often, lines), (_, seldom, _) = rental_of(), rental_of(save_seconds=600.0)
    saves_dollars = 120 * 25_557_032 * 8 / 1e9 * prices.EFS_PER_GB_WRITTEN
    assert often.traffic.dollars_per_hour > saves_dollars > seldom.traffic.dollars_per_hour
    assert not [line for line in lines if line.startswith("heartbeats")], "one machine reads no other's"


def test_images_read_from_the_shared_folder_name_their_price_and_that_of_s3() -> None:
    plan, rental_spec, lines = rental_of(data="data/imagenet")
    (line,) = (line for line in lines if line.startswith("images from the shared folder, read anew in each epoch"))
    gigabytes, dollars = (float(text.replace(",", "")) for text in re.findall(r"([\d,.]+) GB, \$([\d,.]+);", line)[0])
    assert 17 < gigabytes / len(plan.schedule.epochs) < 146, "between the smallest copy and the full size"
    assert dollars == pytest.approx(gigabytes * 0.03, rel=1e-3)
    assert "; from S3 $0.00, and $" in line and "(imgnet-cluster data put)" in line
    assert rental_spec.traffic.dollars_per_hour > 10 * rental_of()[1].traffic.dollars_per_hour


def test_each_machine_fetches_all_images_once_also_in_a_rehearsal_which_validates_on_its_part() -> None:
    options: dict[str, Any] = {"machines": 16, "data": "data/imagenet", "fetch": "~/.imgnet/data"}
    (whole, whole_rental, lines), (part, part_rental, _) = rental_of(**options), rental_of(**options, scale=0.01)
    assert [line for line in lines if "each of 16 machines fetches them once" in line]
    image_dollars = 16 * fetch_bytes(whole.schedule) / 1e9 * prices.EFS_PER_GB_READ
    for rental in (whole_rental, part_rental):
        assert (
            rental.traffic.dollars_once == pytest.approx(image_dollars + HOME_DOLLARS, abs=0.001) and image_dollars > 70
        )
    whole_terms, part_terms = whole.spec.forecast.terms, part.spec.forecast.terms
    assert part.spec.forecast.start == whole.spec.forecast.start
    assert part_terms["validation"] == pytest.approx(whole_terms["validation"] / 100)
