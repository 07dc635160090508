"""What a launch on rented machines asks for: limits that hold together, and which launch is the same again."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.backends.aws import plan
from cluster.backends.aws.rental_spec import OVERHEAD_DOLLARS_PER_HOUR, POWEROFF_GRACE_SECONDS, RentalSpec, sort_places
from cluster.errors import ClusterError
from cluster.jobs import submit
from cluster.jobs.submit import request_fingerprint
from infra.aws.instances.request import Place
from train.recipe import SAMPLE, Model, Phase, Recipe

RECIPE = Recipe(
    name="tiny", data=SAMPLE, model=Model(name="resnet10_tiny"), gpus=1, types=("c7i.2xlarge", "c6i.2xlarge"),
    phases=[Phase(epochs=(0, 1), size=32, batch=8, lr=0.1)],
)  # fmt: skip


def place(price: float | None = 1.0, **words: Any) -> Place:
    known = {"region": "us-east-1", "zone": "us-east-1a", "type": "g5.xlarge", "market": "spot"}
    return Place(**{**known, **words}, price=price)


def wish(*places: Place, dollars: float | None = None) -> RentalSpec:
    return RentalSpec(places=places or (place(),), ssh_address="203.0.113.7/32", owner="us", max_dollars=dollars)


@pytest.mark.parametrize("dollars", [0.01, 1.0, 7.0, 40.0, 1e6])
@pytest.mark.parametrize("hours", [None, 0.01, 2.0, 10.0])
def test_the_power_goes_before_more_than_the_limit_of_dollars_is_spent(dollars: float, hours: float | None) -> None:
    found, late = wish(dollars=dollars).compute_limits(16, place(), hours)
    spent = 16 * (1.0 + OVERHEAD_DOLLARS_PER_HOUR) * (found + late / 3600)
    assert spent <= dollars * 1.000001 and found > 0 and 0 < late <= POWEROFF_GRACE_SECONDS
    assert found <= (48.0 if hours is None else hours)
    assert spent > dollars * 0.999999 or found == (48.0 if hours is None else hours)


def test_without_a_limit_of_dollars_the_time_alone_counts_and_the_save_has_a_quarter_of_an_hour() -> None:
    assert wish().compute_limits(4, place(), 2.0) == (2.0, 900.0)
    assert wish(dollars=1.0).compute_limits(4, place(None), 2.0) == (
        2.0,
        900.0,
    )  # such a place is never asked, see below


def test_most_is_what_the_dearest_place_would_cost_and_unknown_when_one_is() -> None:
    def most(*places: Place, dollars: float | None = None) -> float | None:
        kind: Any = None
        return plan.RentalPlan(wish(*places, dollars=dollars), kind, (), (), None, 2.0, 900.0).max_dollars(2)

    assert most(place(1.0), place(3.0)) == pytest.approx(2 * (3.0 + OVERHEAD_DOLLARS_PER_HOUR) * 2.25)
    assert most(place(1.0), place(None)) is None
    assert most(place(1.0), place(3.0), dollars=5.0) == 5.0


def test_places_are_asked_by_region_type_market_and_price() -> None:
    cheap, dear, unknown = place(1.0, zone="b"), place(2.0, zone="a"), place(None, zone="c")
    there, owned = place(0.1, region="eu-west-1"), place(0.1, market="on-demand")
    markets, regions = ["spot", "on-demand"], ["us-east-1", "eu-west-1"]
    found = sort_places([there, owned, unknown, dear, cheap], regions, ["g5.xlarge"], markets)
    assert found == [cheap, dear, unknown, owned, there]


def test_a_limit_of_dollars_needs_a_price(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"--max-price-total: the price of .* is unknown"):
        submit.plan(RECIPE, backend="aws", rental_options={"offline": True, "max_dollars": 5.0})


def test_the_same_launch_is_the_same_whatever_the_prices_are_now_and_another_limit_is_another() -> None:
    spec = submit.plan(RECIPE, backend="aws", rental_options={"offline": True}).spec
    dearer = {**(spec.cloud or {}), "places": [{**one, "price": 9.0} for one in (spec.cloud or {})["places"]][::-1]}
    again = replace(spec, cloud=dearer, created=1.0, uid="job-9-aaaaaaaa", name="job-9")
    assert request_fingerprint(again) == request_fingerprint(spec)
    for other in (
        replace(spec, max_hours=9.0), replace(spec, cloud={**dearer, "max_dollars": 5.0}), replace(spec, machines=2),
        submit.plan(RECIPE, backend="aws", rental_options={"offline": True, "market": "on-demand"}).spec,
    ):  # fmt: skip
        assert request_fingerprint(other) != request_fingerprint(spec)
