"""The cost of a job from its journal, compared with the simulated cloud's own meter."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from support.aws_gang import START, ZONES, GangTestbed
from support.aws_journal import write_journal

from infra.aws import prices
from infra.aws.journal import Journal
from infra.aws.journal_events import (
    AddressRequested,
    NatGatewayRequested,
    RequestGranted,
    SpotCostKnown,
    TerminationFinished,
)
from infra.aws.market import billing

A, B, C = ZONES


def assert_near_meter(bed: GangTestbed) -> None:
    """Assert that the journal's dollars equal the meter's within 1 %, for each machine and in all."""
    costs = billing.machine_costs(bed.journal, bed.sim.now())
    meter = bed.sim.bill()
    assert {cost.id for cost in costs} == set(meter["instances"])
    for cost in costs:
        assert cost.dollars == pytest.approx(meter["instances"][cost.id], rel=0.01)
    assert billing.job_cost(bed.journal, bed.sim.now()).dollars == pytest.approx(meter["total"], rel=0.01)
    assert sum(cost.disk_dollars for cost in costs) == pytest.approx(meter["volumes"], rel=0.01, abs=0.001)
    assert sum(cost.address_dollars for cost in costs) == pytest.approx(meter["addresses"], rel=0.01, abs=0.001)


@pytest.mark.parametrize("market", ["spot", "on-demand"])
def test_machine_costs_equal_the_meter_during_and_after_a_job(bed: GangTestbed, market: str) -> None:
    bed.acquire(bed.place(A, market))
    bed.journal.write(*bed.journal.events(RequestGranted))  # as two supervisors may do
    bed.sim.advance(1800)
    assert_near_meter(bed)
    bed.sim.advance(1800.5)
    assert bed.gang().terminate_job() == []
    assert_near_meter(bed)
    bed.sim.advance(90_000)
    assert_near_meter(bed)
    assert all(cost.ended == START + 3600 for cost in billing.machine_costs(bed.journal, bed.sim.now()))


def test_machine_costs_of_refused_machines_are_a_minute_each(bed: GangTestbed) -> None:
    bed.sim.boot_seconds = 4.0
    bed.clock.meanwhile.append(lambda: bed.sim.kill(bed.live_instances()[1].id, "Server.InternalError"))
    bed.acquire(n=2)
    bed.sim.advance(600)
    bed.gang().list_instances()
    assert_near_meter(bed)
    costs = billing.machine_costs(bed.journal, bed.sim.now())
    assert [(cost.zone, cost.seconds) for cost in costs] == [(A, 60), (A, 60), (B, 604), (B, 604)]


def test_unknown_price_stays_unknown_and_is_reported(bed: GangTestbed) -> None:
    machines = bed.acquire(replace(bed.place(A), price=None))
    bed.sim.advance(600)
    costs = billing.machine_costs(bed.journal, bed.sim.now())
    assert all(cost.dollars is None and cost.price is None and cost.total_dollars > 0 for cost in costs)
    assert sorted(billing.job_cost(bed.journal, bed.sim.now()).unknown) == sorted(machine.id for machine in machines)
    assert billing.job_cost(bed.journal, bed.sim.now()).dollars < 0.05, "disks and addresses are known"


HISTORY = [(START - 900, 1.0), (START + 1800, 2.0), (START + 7200, 9.0)]


@pytest.mark.parametrize(
    ("begin", "end", "dollars"),
    [(-900, -600, 300 / 3600), (1800, 3600, 1.0), (0, 10800, 0.5 + 3.0 + 9.0), (-901, 0, None), (0, 0, 0.0)],
)
def test_integrate_price_follows_the_changes(begin: float, end: float, dollars: float | None) -> None:
    result = billing.integrate_price(HISTORY, START + begin, START + end)
    assert result == (None if dollars is None else pytest.approx(dollars))


def report_price_history(bed: GangTestbed) -> None:
    """Let EC2 return HISTORY from here on."""

    def replace_history(parsed: dict[str, Any], **_: Any) -> None:
        parsed["SpotPriceHistory"] = [
            {"Timestamp": datetime.fromtimestamp(time, UTC), "SpotPrice": str(price)} for time, price in HISTORY
        ]

    bed.hook(bed.account.ec2, "after-call.ec2.DescribeSpotPriceHistory", replace_history)


def test_record_spot_costs_uses_the_price_history_once(bed: GangTestbed) -> None:
    bed.acquire(n=2)
    report_price_history(bed)
    billing.record_spot_costs(bed.account, bed.journal, bed.sim.now())
    assert bed.journal.events(SpotCostKnown) == [], "they still run"
    bed.sim.advance(3600)
    bed.gang().terminate_job()
    bed.acquire(bed.place(A, "on-demand"), n=1)
    bed.gang().terminate_job()
    billing.record_spot_costs(bed.account.in_region("us-west-2"), bed.journal, bed.sim.now())
    assert bed.journal.events(SpotCostKnown) == [], "another region does not know the prices"
    for _ in range(2):
        billing.record_spot_costs(bed.account, bed.journal, bed.sim.now())
    costs = {cost.market: cost.dollars for cost in billing.machine_costs(bed.journal, bed.sim.now())}
    assert costs["spot"] == pytest.approx(1.5)
    assert len(bed.journal.events(SpotCostKnown)) == 2 and bed.front.count("DescribeSpotPriceHistory") == 1


def test_dollars_of_the_jump_hosts_address_and_of_the_nat_gateway_count_each_launch(tmp_path: Path) -> None:
    path = tmp_path / "cloud.jsonl"
    write_journal(
        path,
        *(AddressRequested(time=time, id="i-1") for time in (100, 150)),
        NatGatewayRequested(time=100, region="us-east-1"),
        TerminationFinished(time=200),
        AddressRequested(time=1000, id="i-2"),
        NatGatewayRequested(time=1000, region="us-east-1"),
        *(TerminationFinished(time=time) for time in (4700, 9000)),
    )
    costs = {now: billing.job_cost(Journal(path), now) for now in (50, 150, 500, 1500, 99_999)}
    seconds = {50: 0, 150: 50, 500: 100, 1500: 600, 99_999: 3800}
    nat_hours = {50: 0, 150: 1, 500: 1, 1500: 2, 99_999: 3}  # begun
    for now, cost in costs.items():
        address_dollars = seconds[now] / 3600 * prices.ADDRESS_PER_HOUR
        assert cost.shared_address_dollars == pytest.approx(address_dollars)
        assert cost.nat_dollars == pytest.approx(nat_hours[now] * prices.NAT_PER_HOUR + address_dollars)
