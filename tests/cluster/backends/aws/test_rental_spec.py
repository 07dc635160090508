"""RentalSpec and the rental plan: limits that hold together, the order of places, and equal launches."""

import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.backends.aws.planning import plan, plan_page
from cluster.backends.aws.planning.sold_types import choose_sold_types
from cluster.backends.aws.terms.options import AwsOptions
from cluster.backends.aws.terms.rental_spec import (
    DISK_DOLLARS_PER_HOUR,
    RentalSpec,
    drop_unpriced_places,
    internet_dollars,
    sort_places,
)
from cluster.backends.rented.provider import POWEROFF_GRACE_SECONDS
from cluster.display import cloud
from cluster.errors import BadInput, ClusterError
from cluster.jobs import submit
from cluster.jobs.submit import request_fingerprint
from cluster.planning.launch_options import make_launch_options
from cluster.planning.resolve import load_recipes
from cluster.state.spec import RentalFacts
from infra.aws.instances import amis
from infra.aws.launch_request import Internet, Place, ReservationTarget
from infra.aws.market.instance_types import BUILTIN_TYPES
from train.recipe import SAMPLE, Model, Phase, Recipe
from train.tools.records import DamagedRecord

OVERHEAD_DOLLARS_PER_HOUR = DISK_DOLLARS_PER_HOUR + internet_dollars(Internet.PUBLIC, 1)
RECIPE = Recipe(
    name="tiny",
    data=SAMPLE,
    model=Model(name="resnet10_tiny"),
    gpus=1,
    types=("c7i.2xlarge", "c6i.2xlarge"),
    phases=[Phase(epochs=(0, 1), size=32, batch=8, lr=0.1)],
)


def place(price: float | None = 1.0, **fields: Any) -> Place:
    defaults = {"region": "us-east-1", "zone": "us-east-1a", "type": "g5.xlarge", "market": "spot"}
    return Place(**{**defaults, **fields}, price=price)


def rental_spec(*places: Place, max_dollars: float | None = None) -> RentalSpec:
    return RentalSpec(places=places or (place(),), ssh_address="203.0.113.7/32", owner="us", max_dollars=max_dollars)


@pytest.mark.parametrize("max_dollars", [0.01, 1.0, 7.0, 40.0, 1e6])
@pytest.mark.parametrize("max_hours", [None, 0.01, 2.0, 10.0])
def test_compute_limits_power_off_before_the_price_limit(max_dollars: float, max_hours: float | None) -> None:
    hours, grace_seconds = rental_spec(max_dollars=max_dollars).compute_limits(16, place(), max_hours)
    spent = 16 * (1.0 + OVERHEAD_DOLLARS_PER_HOUR) * (hours + grace_seconds / 3600)
    time_limit = 48.0 if max_hours is None else max_hours
    assert spent <= max_dollars * 1.000001 and hours > 0 and 0 < grace_seconds <= POWEROFF_GRACE_SECONDS
    assert hours <= time_limit
    assert spent > max_dollars * 0.999999 or hours == time_limit


def test_compute_limits_without_a_price_limit_are_the_time_limit() -> None:
    assert rental_spec().compute_limits(4, place(), 2.0) == (2.0, 900.0)
    # A place of unknown price is never requested with a price limit, see below.
    assert rental_spec(max_dollars=1.0).compute_limits(4, place(None), 2.0) == (2.0, 900.0)


def test_max_dollars_is_the_dearest_places_cost_or_unknown() -> None:
    def max_dollars(*places: Place, limit: float | None = None) -> float | None:
        no_type: Any = None
        rental_plan = plan.AwsRentalPlan(rental_spec(*places, max_dollars=limit), no_type, (), (), None, 2.0, 900.0)
        return rental_plan.max_dollars(2)

    assert max_dollars(place(1.0), place(3.0)) == pytest.approx(2 * (3.0 + OVERHEAD_DOLLARS_PER_HOUR) * 2.25)
    assert max_dollars(place(1.0), place(None)) is None
    assert max_dollars(place(1.0), place(3.0), limit=5.0) == 5.0


@pytest.mark.parametrize(("limit", "expected"), [
    (None, "$13.51 until power-off, with disks, addresses and expected traffic (at the dearest of the places below)"),
    (5.0, "$5.00 until power-off, with disks, addresses and expected traffic (--max-price-total)"),
])  # fmt: skip
def test_plan_says_what_the_highest_price_counts(
    limit: float | None, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    c7i = BUILTIN_TYPES["c7i.2xlarge"]
    spec_of_rental = rental_spec(place(1.0), place(3.0), max_dollars=limit)
    rental_plan = plan.AwsRentalPlan(spec_of_rental, c7i, (), (), None, 2.0, 900.0)
    two_machines: Any = SimpleNamespace(machine_names=("0", "1"))
    cloud.show_rental_plan(rental_plan.summary(two_machines))
    rate = 3.0 + OVERHEAD_DOLLARS_PER_HOUR
    assert f"  at most        {expected.replace('13.51', f'{2 * rate * 2.25:.2f}')}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("internet", "type", "expected"),
    [
        ("public", "g5.48xlarge", "a public address for each machine, $0.08 an hour"),
        (
            "public",
            "p4d.24xlarge",
            "; if EC2 refuses them, a NAT gateway, $0.055 an hour and $0.045 per GB (S3 is free)",
        ),
        ("nat", "p4d.24xlarge", "a NAT gateway for the time of the job, $0.055 an hour and $0.045 per GB"),
        ("none", "g5.48xlarge", "none, the machine image has to have everything"),
    ],
)
def test_plan_says_the_way_to_the_internet_and_its_price(internet: str, type: str, expected: str) -> None:
    assert expected in plan_page.describe_internet(Internet(internet), BUILTIN_TYPES[type], 16)


def test_sort_places_by_region_type_market_and_price() -> None:
    cheap, dear, unpriced = place(1.0, zone="b"), place(2.0, zone="a"), place(None, zone="c")
    second_region, on_demand = place(0.1, region="eu-west-1"), place(0.1, market="on-demand")
    places = sort_places(
        [second_region, on_demand, unpriced, dear, cheap],
        regions=["us-east-1", "eu-west-1"],
        types=["g5.xlarge"],
        markets=["spot", "on-demand"],
    )
    assert places == [cheap, dear, unpriced, on_demand, second_region]


def test_plan_with_a_price_limit_and_unknown_prices_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"--max-price-total: the price of .* is unknown"):
        submit.plan(RECIPE, make_launch_options(backend="aws", max_dollars=5.0), offline=True)


def test_request_fingerprint_ignores_prices_but_not_limits() -> None:
    spec = submit.plan(RECIPE, make_launch_options(backend="aws"), offline=True).spec
    places = (spec.cloud or {})["places"]
    dearer = {**(spec.cloud or {}), "places": [{**place, "price": 9.0} for place in places][::-1]}
    same = replace(spec, cloud=dearer, created=1.0, uid="job-9-aaaaaaaa", name="job-9")
    assert request_fingerprint(same) == request_fingerprint(spec)
    for other in (
        replace(spec, max_hours=9.0),
        replace(spec, cloud={**dearer, "max_dollars": 5.0}),
        replace(spec, machines=2),
        submit.plan(RECIPE, make_launch_options(backend="aws", market="on-demand"), offline=True).spec,
    ):
        assert request_fingerprint(other) != request_fingerprint(spec)


def test_rental_facts_of_a_job_are_those_of_its_rental_spec(hand_made: Any) -> None:
    rental = replace(rental_spec(), gpus_per_machine=8, torch_index_url="https://example.org/cu126")
    spec = hand_made(cloud=rental.to_json()).job.spec
    assert spec.rental_facts == RentalFacts(gpus_per_machine=8, torch_index_url="https://example.org/cu126")
    assert replace(spec, cloud=None).rental_facts == RentalFacts()
    with pytest.raises(DamagedRecord, match="gpus_per_machine"):
        _ = replace(spec, cloud={"gpus_per_machine": "eight"}).rental_facts


def chosen_types(types: list[str], **options: Any) -> tuple[list[str], list[str]]:
    """Return the types that an offline plan requests of these, and its notes."""
    request = plan.RentalRequest(AwsOptions(**options), offline=True)
    chosen, notes = plan.choose_instance_types(types, request)
    return list(chosen), notes


def test_type_without_an_image_is_left_out_with_a_note() -> None:
    names, notes = chosen_types(["p3dn.24xlarge", "p4d.24xlarge", "p5.48xlarge"])
    assert names == ["p4d.24xlarge", "p5.48xlarge"] and len([note for note in notes if "p3dn.24xlarge" in note]) == 1
    with pytest.raises(ClusterError, match=r"sm_70.*--ami"):
        chosen_types(["p3dn.24xlarge"])


def test_types_that_need_different_torch_builds_are_not_mixed() -> None:
    names, notes = chosen_types(["p4d.24xlarge", "p3dn.24xlarge"], ami="ami-0123456789abcdef0")
    assert names == ["p4d.24xlarge"] and "another PyTorch build than p4d.24xlarge" in notes[-1]
    assert chosen_types(["p3dn.24xlarge", "p4d.24xlarge"], ami="ami-0123456789abcdef0")[0] == ["p3dn.24xlarge"]


def test_plan_says_what_it_costs_to_install_torch() -> None:
    assert plan_page.torch_install_note(None, 120.0) == "each machine will install torch, about 5 minutes and $10.00"
    note = plan_page.torch_install_note("ami-1", None)
    assert note == "each machine will install torch, about 5 minutes, unless the python3 of ami-1 has it"


def test_types_that_ec2_does_not_sell_in_the_market_are_left_out() -> None:
    p5, g5 = BUILTIN_TYPES["p5.48xlarge"], BUILTIN_TYPES["g5.48xlarge"]
    known = {"p5": replace(p5, markets=("capacity-block", "on-demand")), "g5": g5}
    note = "p5: not requested, EC2 does not sell them as spot"
    assert choose_sold_types(known, ["p5", "g5"], ["spot"]) == (["g5"], [note])
    assert choose_sold_types(known, ["p5", "g5"], ["spot", "on-demand"]) == (["p5", "g5"], [])
    with pytest.raises(ClusterError, match="EC2 does not sell p5 as spot; pass --on-demand"):
        choose_sold_types(known, ["p5"], ["spot"])
    known["p5"] = replace(p5, markets=("capacity-block",))
    with pytest.raises(ClusterError, match=r"p5 as on-demand; buy a block: imgnet-cluster offers --capacity-blocks"):
        choose_sold_types(known, ["p5"], ["on-demand"])


def test_compute_limits_end_with_the_reservation() -> None:
    closing = replace(place(), reservation=ReservationTarget(id="cr-1", closing_time=time.time() + 7200))
    for max_hours in (None, 5.0, 1.9):
        hours, grace_seconds = rental_spec().compute_limits(2, closing, max_hours)
        assert hours * 3600 + grace_seconds == pytest.approx(7200, abs=5) and 0 < grace_seconds <= 900
    assert rental_spec().compute_limits(2, closing, 1.5) == (1.5, 900.0)
    over = replace(place(), reservation=ReservationTarget(id="cr-1", closing_time=time.time() - 1))
    assert rental_spec().compute_limits(2, over, 2.0) == (0.0, 0.0)


def shown_plan(capsys: pytest.CaptureFixture[str], recipe: Recipe = RECIPE, **options: Any) -> str:
    """Return what the offline plan of a launch prints about the rental."""
    planned = submit.plan(recipe, make_launch_options(backend="aws", **options), offline=True)
    assert planned.rental_plan
    cloud.show_rental_plan(planned.rental_plan.summary(planned.spec))
    return capsys.readouterr().out


def test_several_types_are_tried_in_the_users_order_and_each_has_its_price(capsys: pytest.CaptureFixture[str]) -> None:
    types = ["p5.48xlarge", "p4d.24xlarge", "p4d.24xlarge"]
    text = shown_plan(capsys, types=types, market="on-demand", machines=2)
    assert text.startswith("rents 2 x p5.48xlarge (8 x H100 each), on-demand: $110.08 an hour\n")
    assert "  then           p4d.24xlarge on-demand in us-east-1: $43.92 an hour" in text
    assert text.count("p4d.24xlarge") == 1
    text = shown_plan(capsys, types=["p4d.24xlarge"], market="on-demand")
    assert "  then  " not in text, "a type of the recipe is not taken when the user names others"


def test_each_of_several_types_has_its_forecast(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = load_recipes("recipes/resnet50_18min.py")[0]
    text = shown_plan(capsys, recipe, types=["p4d.24xlarge", "p5.48xlarge"], market="on-demand")
    (second,) = [line for line in text.splitlines() if line.startswith("  then           p5.48xlarge")]
    (run,) = [line for line in text.splitlines() if line.startswith("  the run")]
    numbers = re.compile(r"about ([\d.]+) minutes, \$([\d.]+)")
    first_run, second_run = (numbers.search(line) for line in (run, second))
    assert first_run and second_run and float(second_run[1]) < float(first_run[1]), "H100 are faster"


def on_demand_spares(**fields: Any) -> RentalSpec:
    """Return a rental of machines on spot with one spare on demand."""
    return replace(
        rental_spec(place(1.0), place(2.0, zone="us-east-1b")),
        on_demand_spares=1,
        spare_places=(place(5.0, market="on-demand"), place(None, zone="us-east-1b", market="on-demand")),
        **fields,
    )


def test_price_of_on_demand_spares_is_that_of_their_zone() -> None:
    rental = on_demand_spares()
    first, second = rental.places
    assert rental.dollars_per_hour(3, first) == pytest.approx(2 * 1.0 + 5.0 + 3 * OVERHEAD_DOLLARS_PER_HOUR)
    assert rental.dollars_per_hour(3, second) is None, "the price on demand is unknown there"
    assert rental.split_spares(("0", "1", "2")) == (("0", "1"), ("2",))
    assert rental.spare_place(first).market == "on-demand" and rental_spec(first).spare_place(first) == first
    assert rental_spec(first).split_spares(("0", "1")) == (("0", "1"), ())


def test_place_whose_spares_have_no_known_price_is_dropped_with_a_price_limit() -> None:
    priced, unpriced = drop_unpriced_places(on_demand_spares(max_dollars=9.0), 3)
    assert [kept.zone for kept in priced.places] == ["us-east-1a"] and unpriced == ["g5.xlarge on-demand"]


def test_plan_with_on_demand_spares_shows_and_sends_two_requests(capsys: pytest.CaptureFixture[str]) -> None:
    options = make_launch_options(backend="aws", machines=2, spares=1, on_demand_spares=True)
    planned = submit.plan(RECIPE, options, offline=True)
    assert planned.rental_plan
    cloud.show_rental_plan(planned.rental_plan.summary(planned.spec))
    assert "  spares         1 of them on demand, $0.36 an hour of it\n" in capsys.readouterr().out
    group, machines, spares = planned.rental_plan.preview_requests(planned.spec)
    assert [request[0] for request in (group, machines, spares)] == [
        "ec2:CreatePlacementGroup",
        "ec2:RunInstances",
        "ec2:RunInstances",
    ]
    counts = [(request["MinCount"], request["MaxCount"]) for _, request in (machines, spares)]
    assert counts == [(2, 2), (1, 1)]
    assert "InstanceMarketOptions" in machines[1] and "InstanceMarketOptions" not in spares[1]
    assert machines[1]["Placement"] == spares[1]["Placement"] == {"GroupName": group[1]["GroupName"]}


def test_plan_with_late_spares_requests_none_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    options = make_launch_options(backend="aws", machines=2, spares=1, late_spares=True)
    planned = submit.plan(RECIPE, options, offline=True)
    assert planned.rental_plan
    cloud.show_rental_plan(planned.rental_plan.summary(planned.spec))
    assert "  spares         1 of them, rented once EC2 warns of an interruption\n" in capsys.readouterr().out
    assert [action for action, _ in planned.rental_plan.preview_requests(planned.spec)] == [
        "ec2:CreatePlacementGroup",
        "ec2:RunInstances",
    ]


@pytest.mark.parametrize("flag", ["--on-demand-spares", "--late-spares"])
def test_options_of_spares_that_do_not_fit_are_refused(flag: str) -> None:
    def refusal(**options: Any) -> str:
        keyword = {flag.removeprefix("--").replace("-", "_"): True}
        with pytest.raises(BadInput) as caught:
            submit.plan(RECIPE, make_launch_options(backend="aws", **keyword, **options), offline=True)
        return str(caught.value)

    assert refusal() == f"{flag}: the job has no spares; say how many: --spares 1"
    on_demand = refusal(spares=1, market="on-demand")
    assert on_demand == f"{flag} needs spot machines, and --on-demand rents none; leave one of the two out"


# --- V100 ------------------------------------------------------------------------------------------------------------


def test_plan_for_v100_says_what_the_image_must_have_and_takes_a_torch_that_fits() -> None:
    options = make_launch_options(backend="aws", types=["p3dn.24xlarge"], ami="ami-0123456789abcdef0")
    planned = submit.plan(RECIPE, options, offline=True)
    facts = planned.spec.rental_facts
    assert (facts.torch_index_url, facts.torch_requirement) == (amis.LEGACY_TORCH_INDEX_URL, "torch<2.15")
    (note,) = [note for note in planned.notes if "sm_70" in note]
    assert "ami-0123456789abcdef0 must have NVIDIA's proprietary driver, R580 or older" in note
    newer = submit.plan(RECIPE, make_launch_options(backend="aws", types=["p4d.24xlarge"]), offline=True).spec
    assert (newer.rental_facts.torch_index_url, newer.rental_facts.torch_requirement) == (None, None)
