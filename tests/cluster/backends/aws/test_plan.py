"""What a plan says of its limits, with the prices of the simulated EC2."""

import re
from dataclasses import replace
from typing import Any

import pytest
from support.simcloud.http_server import AwsFrontend
from support.specs import TINY

from cluster.backends.rentals import RentalPlan
from cluster.display.plan import rental_question
from cluster.jobs import submit
from cluster.planning.launch_options import make_launch_options


def make_plan(**options: Any) -> tuple[submit.Plan, RentalPlan]:
    recipe = replace(TINY, gpus=8, types=("p4d.24xlarge", "p5.48xlarge"))
    plan = submit.plan(recipe, make_launch_options(backend="aws", **{"machines": 2, **options}))
    assert plan.rental_plan
    return plan, plan.rental_plan


def test_at_most_is_at_todays_prices_and_the_ceiling_at_those_on_demand(front: AwsFrontend) -> None:
    plan, rental = make_plan(max_hours=2.0)
    assert rental.max_dollars and rental.ceiling_dollars
    highest = 2 * 55.04 * 2.25  # p5.48xlarge
    assert highest < rental.ceiling_dollars < highest + 1 and rental.max_dollars < 0.51 * rental.ceiling_dollars
    dollars = rf"\${rental.max_dollars:,.2f} at today's prices \(\${rental.ceiling_dollars:,.2f} if spot prices rise"
    assert re.search(dollars, rental_question([plan]))
    _, limited = make_plan(max_hours=2.0, max_dollars=40.0)
    assert limited.max_dollars == 40.0 and 80 < (limited.ceiling_dollars or 0) < 140, "its hours follow from spot"
    _, on_demand = make_plan(max_hours=2.0, market="on-demand")
    assert on_demand.ceiling_dollars is None and on_demand.max_dollars == pytest.approx(rental.ceiling_dollars)


def test_each_further_place_has_its_own_time_limit(front: AwsFrontend) -> None:
    _, rental = make_plan(market="spot-then-on-demand", max_dollars=40.0)
    others = [line for label, line in rental.facts if label == "then"]
    assert len(others) == 3 and all(re.search(r", limit \d+(\.\d+)? minutes$", line) for line in others), others
    _, rental = make_plan(market="spot-then-on-demand")
    assert not [line for _, line in rental.facts if "limit" in line], "two hours everywhere"
