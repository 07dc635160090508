"""RentalSpec and the rental plan: limits that hold together, the order of places, equal launches, images, terms."""

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.simcloud.http_server import AwsFrontend
from support.specs import TINY

from cluster.backends.aws.planning.images import find_obstacle
from cluster.backends.aws.planning.rental_request import RentalRequest, choose_instance_types, choose_sold_types
from cluster.backends.aws.renting.adoption import adopted_options
from cluster.backends.aws.terms.aws_options import AwsOptions
from cluster.backends.aws.terms.rental_spec import (
    POWEROFF_GRACE_SECONDS,
    Inspection,
    RentalSpec,
    RentalTerms,
    drop_dear_places,
    drop_unpriced_places,
    internet_dollars,
    sort_places,
)
from cluster.display import cloud
from cluster.errors import BadInput, ClusterError
from cluster.jobs import submit
from cluster.jobs.submit import request_fingerprint
from cluster.planning.launch_options import make_launch_options
from cluster.planning.resolve import load_recipes
from cluster.state.spec import MAX_MACHINES, RentalFacts
from infra.aws import prices
from infra.aws.instances import amis
from infra.aws.launch_request import Internet, Place
from infra.aws.market.instance_types import BUILTIN_TYPES
from infra.costs import TrafficForecast
from train.recipe import IMAGENET
from train.tools.records import DamagedRecord

OVERHEAD_DOLLARS_PER_HOUR = amis.ROOT_DISK_GB * prices.DISK_PER_GB_HOUR + internet_dollars(Internet.PUBLIC, 1)
RECIPE = replace(TINY, types=("c7i.2xlarge", "c6i.2xlarge"))


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


def test_price_contains_all_disks_of_the_image_also_as_the_supervisor_reads_it() -> None:
    image = amis.Image("ami-1", "ubuntu", 22, (("/dev/sda1", 75), ("/dev/sdf", 850)), "mine", "")
    found = Inspection(time=0.0, region="us-east-1", stack=None, types={}, gpu_arch="sm_90", image=image)
    read_spec = RentalSpec.from_json(replace(rental_spec(), inspection=found).to_json())
    more_dollars = 850 * prices.DISK_PER_GB_HOUR
    assert read_spec.dollars_per_hour(1, place()) == pytest.approx(1.0 + OVERHEAD_DOLLARS_PER_HOUR + more_dollars)


@pytest.mark.parametrize(("max_hours", "hours_left", "seconds_until_power_off"), [
    (None, 2.0, 7200), (5.0, 2.0, 7200), (1.9, 2.0, 7200), (1.5, 2.0, 1.5 * 3600 + 900), (2.0, -0.01, 0),
])  # fmt: skip
def test_compute_limits_end_with_the_reservation(
    max_hours: float | None, hours_left: float, seconds_until_power_off: float
) -> None:
    closing = replace(place(), reservation="cr-1", closing_time=time.time() + 3600 * hours_left)
    hours, grace_seconds = rental_spec().compute_limits(2, closing, max_hours)
    assert hours * 3600 + grace_seconds == pytest.approx(seconds_until_power_off, abs=5) and grace_seconds <= 900


def test_highest_cost_is_that_of_the_dearest_place_or_the_limit_or_unknown() -> None:
    def highest(*places: Place, limit: float | None = None) -> float | None:
        return rental_spec(*places, max_dollars=limit).highest_dollars(2, 2.25, 1.0)

    dearest = 2 * (3.0 + OVERHEAD_DOLLARS_PER_HOUR) * 2.25
    assert highest(place(1.0), place(3.0)) == pytest.approx(dearest)
    assert highest(place(1.0), place(None)) is None
    assert highest(place(1.0), place(3.0), limit=5.0) == 4.0, "one dollar was spent before"
    assert highest(place(1.0), place(3.0), limit=999.0) == pytest.approx(dearest)


def test_sort_places_by_region_type_market_and_price() -> None:
    cheap, dear, unpriced = place(1.0, zone="b"), place(2.0, zone="a"), place(None, zone="c")
    second_region, on_demand = place(0.1, region="eu-west-1"), place(0.1, market="on-demand")
    wishes: Any = {"regions": ["us-east-1", "eu-west-1"], "types": ["g5.xlarge"], "markets": ["spot", "on-demand"]}
    places = sort_places([second_region, on_demand, unpriced, dear, cheap], **wishes, spot_scores={})
    assert places == [cheap, dear, unpriced, on_demand, second_region]


def test_spot_places_follow_the_scores_of_their_zones_and_then_the_prices(front: AwsFrontend) -> None:
    def zones_of(market: str) -> tuple[list[str], str]:
        options = make_launch_options(backend="aws", types=["p4d.24xlarge"], market=market)
        plan = submit.plan(replace(TINY, gpus=8), options)
        assert plan.rental_plan
        places = RentalSpec.from_json(plan.spec.cloud).places
        return [place.zone for place in places if place.market == "spot"], dict(plan.rental_plan.facts)[
            "zones in order"
        ]

    by_price, text = zones_of("spot")
    assert text.endswith(" an hour each; by EC2's spot score, then price") and len(by_price) > 2
    front.sim.spot_scores = {by_price[-1]: 9, by_price[0]: 1}
    assert zones_of("spot-then-on-demand")[0] == [by_price[-1], *by_price[1:-1], by_price[0]]
    assert front.count("GetSpotPlacementScores") == 2, "once for each plan"
    front.fault(action="GetSpotPlacementScores", code="UnauthorizedOperation", status=403, times=99)
    zones, text = zones_of("spot")
    assert zones == by_price and text.endswith("; by price")
    assert zones_of("on-demand")[1].endswith("; by price") and front.count("GetSpotPlacementScores") == 3


def test_request_fingerprint_ignores_prices_but_not_limits() -> None:
    spec = offline_plan().spec
    places = (spec.cloud or {})["places"]
    dearer = {**(spec.cloud or {}), "places": [{**place, "price": 9.0, "zone": "other"} for place in places][::-1]}
    dearer["network_ids"] = ["vpc-1", "subnet-1"]  # of which EFS may have refused some meanwhile
    same = replace(spec, cloud=dearer, created=1.0, uid="job-9-aaaaaaaa", name="job-9")
    assert request_fingerprint(same) == request_fingerprint(spec)
    for other in (
        replace(spec, max_hours=9.0),
        replace(spec, cloud={**dearer, "max_dollars": 5.0}),
        replace(spec, machines=2),
        offline_plan(market="on-demand").spec,
        offline_plan(zones=("us-east-1b",)).spec,
        offline_plan(vpc="vpc-1").spec,
    ):
        assert request_fingerprint(other) != request_fingerprint(spec)


def test_rental_facts_of_a_job_are_those_of_its_rental_spec(hand_made: Any) -> None:
    rental = replace(rental_spec(), gpus_per_machine=8, torch_index_url="https://example.org/cu126")
    spec = hand_made(cloud=rental.to_json()).job.spec
    assert spec.rental_facts == RentalFacts(gpus_per_machine=8, torch_index_url="https://example.org/cu126")
    assert replace(spec, cloud=None).rental_facts == RentalFacts()
    with pytest.raises(DamagedRecord, match="gpus_per_machine"):
        _ = replace(spec, cloud={"gpus_per_machine": "eight"}).rental_facts


@pytest.mark.parametrize(("types", "ami", "expected", "note"), [
    (["p3dn.24xlarge", "p4d.24xlarge", "p5.48xlarge"], None, ["p4d.24xlarge", "p5.48xlarge"], "no AWS image"),
    (["p4d.24xlarge", "p3dn.24xlarge"], "ami-0123456789abcdef0", ["p4d.24xlarge"], "needs another PyTorch build"),
    (["p3dn.24xlarge", "p4d.24xlarge"], "ami-0123456789abcdef0", ["p3dn.24xlarge"], "another PyTorch build"),
])  # fmt: skip
def test_type_without_an_image_or_with_another_torch_is_left_out_with_a_note(
    types: list[str], ami: str | None, expected: list[str], note: str
) -> None:
    request = RentalRequest(AwsOptions(ami=ami), offline=True)
    chosen, notes = choose_instance_types(types, request)
    assert list(chosen) == expected and len([line for line in notes if note in line]) == 1
    with pytest.raises(ClusterError, match=r"sm_70.*--ami"):
        choose_instance_types(["p3dn.24xlarge"], RentalRequest(AwsOptions(), offline=True))


def test_types_that_ec2_does_not_sell_in_the_market_are_left_out() -> None:
    p5, g5 = BUILTIN_TYPES["p5.48xlarge"], BUILTIN_TYPES["g5.48xlarge"]
    known = {"p5": replace(p5, markets=("capacity-block", "on-demand")), "g5": g5}
    notes: list[str] = []
    assert choose_sold_types(known, ["spot", "on-demand"], notes) == known and not notes
    assert [*choose_sold_types(known, ["spot"], notes)] == ["g5"]
    assert notes == ["p5: not requested, EC2 does not sell them as spot"]
    with pytest.raises(ClusterError, match="EC2 does not sell p5 as spot; pass --on-demand"):
        choose_sold_types({"p5": known["p5"]}, ["spot"], notes)
    known["p5"] = replace(p5, markets=("capacity-block",))
    with pytest.raises(ClusterError, match=r"p5 as on-demand; buy a block: imgnet-cluster offers --capacity-blocks"):
        choose_sold_types({"p5": known["p5"]}, ["on-demand"], notes)


def offline_plan(**options: Any) -> submit.Plan:
    return submit.plan(RECIPE, make_launch_options(backend="aws", **options), offline=True)


def shown(planned: submit.Plan, capsys: pytest.CaptureFixture[str]) -> str:
    assert planned.rental_plan
    cloud.show_rental_plan(planned.rental_plan)
    return capsys.readouterr().out


@pytest.mark.parametrize("option", ["max_hours", "max_dollars"])
def test_limit_that_ends_before_anything_is_trained_is_refused_with_the_smallest_that_makes_sense(option: str) -> None:
    types = {"types": ["p4d.24xlarge"], "market": "on-demand", "machines": 2}
    with pytest.raises(BadInput, match="smallest limit that makes sense: --max-") as refused:
        offline_plan(**types, **{option: 0.01})
    smallest = float(str(refused.value).rpartition(" ")[2])
    planned = offline_plan(**types, **{option: smallest})
    assert planned.rental_plan
    assert 3600 * planned.rental_plan.max_hours >= 180, "boot and set-up by the presets"
    with pytest.raises(BadInput):
        offline_plan(**types, **{option: smallest - 0.02})


def test_type_that_is_too_dear_for_the_limit_is_left_out_and_a_short_limit_of_each_type_is_told() -> None:
    types = {"types": ["p5.48xlarge", "p4d.24xlarge"], "market": "on-demand", "machines": 2}
    for max_dollars, names, note in (
        (4.0, ["p4d.24xlarge"], "p5.48xlarge on-demand in a zone of us-east-1: too dear for --max-price-total, not"),
        (9.0, ["p5.48xlarge", "p4d.24xlarge"], "p4d.24xlarge on-demand: the limit ends the job after"),
    ):
        recipe = replace(load_recipes("recipes/resnet50_18min.py")[0], types=())
        planned = submit.plan(recipe, make_launch_options("aws", max_dollars=max_dollars, **types), offline=True)
        assert [place.type for place in RentalSpec.from_json(planned.spec.cloud).places] == names
        assert [line for line in planned.notes if line.startswith(note)], planned.notes


def test_each_place_is_too_dear_by_the_traffic_of_its_own_type() -> None:
    rental = rental_spec(place(), place(type="p5.48xlarge"), max_dollars=1.0)
    traffic = {"g5.xlarge": TrafficForecast(dollars_once=2.0), "p5.48xlarge": TrafficForecast()}
    left, names = drop_dear_places(rental, 1, traffic, spent_dollars=0.5, start_seconds=180)
    assert left.places == rental.places[1:] and names == ["g5.xlarge spot in us-east-1a"]
    with pytest.raises(BadInput, match=r"which costs \$2.07, so .* the smallest .*: --max-price-total 2.57"):
        drop_dear_places(rental.at(rental.places[:1]), 1, traffic, spent_dollars=0.5, start_seconds=180)


def test_types_of_the_user_alone_are_tried_in_the_users_order_and_each_has_its_price() -> None:
    planned = offline_plan(types=["p5.48xlarge", "p4d.24xlarge", "p4d.24xlarge"], market="on-demand", machines=2)
    places = RentalSpec.from_json(planned.spec.cloud).places
    assert [(place.type, place.price) for place in places] == [("p5.48xlarge", 55.04), ("p4d.24xlarge", 21.957642)]


@pytest.mark.parametrize(("types", "machines", "comm", "is_told"), [
    (["g4dn.xlarge"], 2, "auto", True), (["g4dn.xlarge"], 1, "auto", False), (["g4dn.xlarge"], 2, "none", False),
    (["p4d.24xlarge"], 2, "auto", False), (["g5.8xlarge", "g5.xlarge"], 2, "auto", True),
])  # fmt: skip
def test_plan_says_where_sums_are_bfloat16(types: list[str], machines: int, comm: str, is_told: bool) -> None:
    planned = offline_plan(types=types, machines=machines, set=(f"comm.hook={comm}",))
    text = f"without EFA ({types[-1]}), gradients are summed in bfloat16"
    assert any(text in note for note in planned.notes) == is_told


def test_forecast_of_a_day_is_told_in_whole_minutes() -> None:
    (recipe,) = load_recipes("recipes/resnet50_18min.py")
    options = make_launch_options("aws", types=["g4dn.xlarge", "g4dn.2xlarge"], machines=1, max_hours=18)
    planned = submit.plan(recipe, options, offline=True)
    (note,) = [note for note in planned.notes if note.startswith("the limit ends")]
    assert re.fullmatch(r"the limit ends the job after 1080 minutes, but the forecast is 1\d{3} minutes", note)
    assert planned.rental_plan
    assert re.search(r", about 1\d{3} minutes", dict(planned.rental_plan.facts)["then"])


def test_on_demand_spares_cost_the_price_of_their_zone_and_a_place_without_one_is_dropped() -> None:
    first, second = place(1.0), place(2.0, zone="us-east-1b")
    rental = replace(
        rental_spec(first, second, max_dollars=9.0),
        on_demand_spares=1,
        spare_places=(place(5.0, market="on-demand"), place(None, zone="us-east-1b", market="on-demand")),
    )
    assert rental.dollars_per_hour(3, first) == pytest.approx(2 * 1.0 + 5.0 + 3 * OVERHEAD_DOLLARS_PER_HOUR)
    assert rental.dollars_per_hour(3, second) is None, "the price on demand is unknown there"
    assert rental.split_spares(("0", "1", "2")) == (("0", "1"), ("2",))
    assert rental_spec(first).split_spares(("0", "1")) == (("0", "1"), ())
    priced, unpriced = drop_unpriced_places(rental, 3)
    assert (priced.places, priced.spare_places) == ((first,), rental.spare_places[:1]) and unpriced == [
        "g5.xlarge on-demand"
    ]


@pytest.mark.parametrize(("options", "shown_spares", "counts"), [
    ({"on_demand_spares": True}, "1 of them on demand, $0.36 an hour of it", [2, 1]),
    ({"late_spares": True}, "1 of them, rented once EC2 warns of an interruption", [2]),
])  # fmt: skip
def test_plan_with_spares_shows_them_and_their_requests(
    options: dict[str, Any], shown_spares: str, counts: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    planned = offline_plan(machines=2, spares=1, **options)
    assert f"  spares         {shown_spares}\n" in shown(planned, capsys)
    assert planned.rental_plan
    (action, group), *launches = planned.rental_plan.requests
    assert action == "ec2:CreatePlacementGroup" and {action for action, _ in launches} == {"ec2:RunInstances"}
    requests: list[Any] = [request for _, request in launches]
    assert [request["MinCount"] for request in requests] == [request["MaxCount"] for request in requests] == counts
    assert ["InstanceMarketOptions" in request for request in requests] == [True, False][: len(counts)]
    assert all(request["Placement"] == {"GroupName": group["GroupName"]} for request in requests)


TAG = r"Invalid value for '--tag': [^\n]*"
NO_SPARES = ": the job has no spares; say how many: --spares 1$"


@pytest.mark.parametrize(("options", "message"), [
    ({"on_demand_spares": True}, f"--on-demand-spares{NO_SPARES}"),
    ({"late_spares": True}, f"--late-spares{NO_SPARES}"),
    ({"late_spares": True, "spares": 1, "market": "on-demand"}, "--late-spares needs spot .* --on-demand"),
    ({"tags": ["CostCenter"]}, f"{TAG}KEY=VALUE"),
    ({"tags": ["=ml"]}, f"{TAG}KEY=VALUE"),
    ({"tags": ["k" * 129 + "=v"]}, f"{TAG}128 characters"),
    ({"tags": ["k=" + "v" * 257]}, f"{TAG}256"),
    ({"tags": ["AWS:owner=me"]}, f"{TAG}AWS's own"),
    ({"tags": ["imgnet:owner=me"]}, f"{TAG}imgnet-cluster itself"),
    ({"tags": ["name=me"]}, f"{TAG}imgnet-cluster itself"),
    ({"tags": ["CostCenter=a&b"]}, f"{TAG}'&'"),
    ({"tags": ["Team=a", "team=b"]}, f"{TAG}twice"),
    ({"tags": [f"k{number}=v" for number in range(40)]}, f"{TAG}at most 39"),
])  # fmt: skip
def test_options_that_cannot_be_rented_are_refused_in_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ClusterError, match=f"^{message}"):
        offline_plan(**options)


def test_tags_of_the_user_are_shown_and_on_all_that_a_launch_requests(capsys: pytest.CaptureFixture[str]) -> None:
    longest = [f"{number:0128}={'é' * 256}" for number in range(36)]
    texts = ["CostCenter=ml research", "team:mail=a+b@example.org", "empty=", *longest]
    planned = offline_plan(machines=2, spares=1, on_demand_spares=True, tags=texts)
    assert "CostCenter=ml research, team:mail=a+b@example.org" in shown(planned, capsys)
    assert planned.rental_plan
    _, *launches = planned.rental_plan.requests
    requests: list[Any] = [request for _, request in launches]
    specifications = [specification for request in requests for specification in request["TagSpecifications"]]
    assert len(specifications) == 4 + 3, "the second launch is on demand: it has no spot request"
    for specification in specifications:
        assert {"Key": "CostCenter", "Value": "ml research"} in specification["Tags"]
        assert len(specification["Tags"]) < 50, "EC2 takes 50; a machine gets one more of ours"


def test_plan_for_v100_says_what_the_image_must_have_and_takes_a_torch_that_fits() -> None:
    planned = offline_plan(types=["p3dn.24xlarge"], ami="ami-0123456789abcdef0")
    facts = planned.spec.rental_facts
    assert (facts.torch_index_url, facts.torch_requirement) == (amis.LEGACY_TORCH_INDEX_URL, "torch<2.15")
    (note,) = [note for note in planned.notes if "sm_70" in note]
    assert "ami-0123456789abcdef0 must have NVIDIA's proprietary driver, R580 or older" in note
    newer = offline_plan(types=["p4d.24xlarge"]).spec
    assert (newer.rental_facts.torch_index_url, newer.rental_facts.torch_requirement) == (None, None)


@pytest.mark.parametrize(("folder", "ami", "has_file_system", "expected"), [
    ("~/data/imagenet", "", True, "no folder of this computer"),
    (str(Path.home() / "data/imagenet"), "", True, "no folder of this computer"),
    ("~/data/imagenet", "ami-1", True, ""),
    ("/data/imagenet", "", False, ""),
    ("~/.imgnet/shared/data/own", "", True, ""),
    ("~/.imgnet/shared/data/own", "ami-1", False, "does not exist yet"),
    ("/home/ubuntu/.imgnet/shared/own", "", False, "does not exist yet"),
])  # fmt: skip
def test_folder_without_images_is_an_obstacle(folder: str, ami: str, has_file_system: bool, expected: str) -> None:
    obstacle = find_obstacle(Path(folder), ami, has_file_system)
    assert expected in obstacle and bool(expected) == bool(obstacle)


def test_launch_with_images_of_this_computer_rents_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IMGNET_RUNS", str(tmp_path / "runs"))
    planned = submit.plan(replace(RECIPE, data=IMAGENET), make_launch_options("aws"), offline=True)
    assert "imgnet-cluster data put FOLDER s3://BUCKET/NAME" in "".join(planned.obstacles)
    with pytest.raises(BadInput, match=r"^~/data/imagenet: rented machines have no folder of this computer"):
        submit.launch(planned)
    assert not (tmp_path / "runs").exists()


LONGEST = RentalTerms(
    machines=MAX_MACHINES,
    spares=MAX_MACHINES - 1,
    exchanges=MAX_MACHINES,
    hours=99999.9999,
    dollars=999999.99,
    spent=999999.9999,
    at=1795291200,
    start=1795291200,
    internet=Internet.PUBLIC,
    on_demand_spares=MAX_MACHINES - 1,
    late_spares=MAX_MACHINES - 1,
    traffic=(9999.99, 9999.99),
)


def test_longest_terms_fit_into_a_tag_and_come_back() -> None:
    text = LONGEST.to_tag()  # AWS, "Tag restrictions"
    assert len(text) <= 256 and RentalTerms.from_tag(text) == LONGEST


@pytest.mark.parametrize("text", ["", "{}", '{"machines": "many"}', "[" * 1000])
def test_damaged_terms_are_refused(text: str) -> None:
    with pytest.raises(DamagedRecord, match="the tag imgnet:terms"):
        RentalTerms.from_tag(text)


def test_resume_of_an_adopted_job_keeps_its_place_and_its_limit_of_dollars() -> None:
    common: dict[str, Any] = {"max_dollars": 0.25, "use_placement_group": False, "internet": Internet.NAT}
    options = adopted_options(replace(rental_spec(place(zone="us-east-1b", market="on-demand")), **common))
    where: Any = {"regions": ("us-east-1",), "zones": ("us-east-1b",), "types": ("g5.xlarge",)}
    assert options == AwsOptions(market="on-demand", **where, **common)
