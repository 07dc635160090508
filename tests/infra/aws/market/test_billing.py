"""What a job has cost, beside the simulated cloud's own meter."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.aws_gang import START, ZONES, Bed, bed

from infra.aws.journal import Journal
from infra.aws.market import billing

__all__ = ["bed"]

A, B, C = ZONES


def near(bed: Bed) -> None:
    """The journal's dollars are the meter's, within 1 %, machine by machine and in all."""
    said = billing.machine_costs(bed.journal, bed.sim.now())
    meter = bed.sim.bill()
    assert {one.id for one in said} == set(meter["instances"])
    for one in said:
        assert one.dollars == pytest.approx(meter["instances"][one.id], rel=0.01)
    assert billing.CostMeter(bed.journal).total_dollars(bed.sim.now()) == pytest.approx(meter["total"], rel=0.01)
    assert sum(one.disk_dollars for one in said) == pytest.approx(meter["volumes"], rel=0.01, abs=0.001)
    assert sum(one.address_dollars for one in said) == pytest.approx(meter["addresses"], rel=0.01, abs=0.001)


@pytest.mark.parametrize("market", ["spot", "on-demand"])
def test_a_job_costs_what_the_meter_says_while_it_runs_and_afterwards(bed: Bed, market: str) -> None:
    bed.acquire(bed.place(A, market))
    bed.sim.advance(1800)
    near(bed)
    bed.sim.advance(1800.5)
    assert bed.gang().terminate_job() == []
    near(bed)
    bed.sim.advance(90_000)
    near(bed)
    assert all(one.ended == START + 3600 for one in billing.machine_costs(bed.journal, bed.sim.now()))


def test_a_machine_that_was_replaced_costs_until_its_end_and_the_other_from_its_beginning(bed: Bed) -> None:
    from infra.aws.market.instance_types import BUILTIN_TYPES

    first = bed.acquire()
    bed.sim.advance(1000)
    bed.sim.interrupt(first[1].id, 0)
    place = bed.place(A)
    bed.gang().list_instances()
    bed.gang().request_instances(place, ["1"], bed.want(place), BUILTIN_TYPES["g5.xlarge"], first[0].placement_group)
    bed.sim.advance(1000)
    near(bed)
    said = billing.machine_costs(bed.journal, bed.sim.now())
    assert [one.seconds for one in said] == [2000, 1000, 2000, 1000]
    assert [one.name for one in said] == ["0", "1", "2", "1"]
    assert [one.why for one in said] == ["", "Server.SpotInstanceTermination", "", ""]


def test_machines_that_were_ended_before_they_were_of_use_cost_a_minute_each(bed: Bed) -> None:
    bed.sim.boot_seconds = 4.0
    bed.clock.meanwhile.append(lambda: bed.sim.kill(bed.alive()[1].id, "Server.InternalError"))
    bed.acquire(n=2)
    bed.sim.advance(600)
    bed.gang().list_instances()
    near(bed)
    said = billing.machine_costs(bed.journal, bed.sim.now())
    assert [(one.zone, one.seconds) for one in said] == [(A, 60), (A, 60), (B, 604), (B, 604)]


def test_an_answer_that_two_have_heard_is_paid_once(bed: Bed) -> None:
    bed.acquire()
    (line,) = bed.journal.lines("granted")
    bed.journal.write("granted", number=1, machines=line["machines"])
    bed.sim.advance(600)
    near(bed)


@pytest.mark.parametrize(("seconds", "billed"), [(0, 60), (59.2, 60), (60, 60), (60.1, 61), (3600, 3600)])
def test_time_is_billed_by_the_second_and_a_minute_at_least(seconds: float, billed: float) -> None:
    assert billing.billed_seconds(START, START + seconds) == billed


def test_a_price_that_nobody_knew_stays_unknown_and_is_said(bed: Bed) -> None:
    from dataclasses import replace

    found = bed.acquire(replace(bed.place(A), price=None))
    bed.sim.advance(600)
    said = billing.machine_costs(bed.journal, bed.sim.now())
    assert all(one.dollars is None and one.price is None and one.total_dollars > 0 for one in said)
    assert sorted(billing.CostMeter(bed.journal).unpriced_machines(bed.sim.now())) == sorted(one.id for one in found)
    assert billing.CostMeter(bed.journal).total_dollars(bed.sim.now()) < 0.05, "disks and addresses are known"


HISTORY = [(START - 900, 1.0), (START + 1800, 2.0), (START + 7200, 9.0)]


@pytest.mark.parametrize(("begin", "end", "dollars"), [
    (0, 3600, 0.5 * 1 + 0.5 * 2), (-900, -600, 300 / 3600), (1800, 3600, 1.0), (2000, 2060, 2 / 60),
    (0, 10800, 0.5 + 3.0 + 9.0), (-901, 0, None), (0, 0, 0.0),
])  # fmt: skip
def test_a_spot_price_that_changes_is_paid_as_it_changed(begin: float, end: float, dollars: float | None) -> None:
    found = billing.integrate_price(HISTORY, START + begin, START + end)
    assert found == (None if dollars is None else pytest.approx(dollars))


def history(bed: Bed) -> None:
    """EC2 tells of HISTORY from here on."""

    def heard(parsed: dict[str, Any], **_: Any) -> None:
        from datetime import UTC, datetime

        parsed["SpotPriceHistory"] = [
            {"Timestamp": datetime.fromtimestamp(when, UTC), "SpotPrice": str(price)} for when, price in HISTORY
        ]

    bed.hook(bed.account.ec2, "after-call.ec2.DescribeSpotPriceHistory", heard)


def test_when_a_job_is_over_its_spot_machines_are_paid_at_the_prices_that_were(bed: Bed) -> None:
    bed.acquire(n=2)
    bed.sim.advance(3600)
    bed.gang().terminate_job()
    history(bed)
    billing.record_spot_costs(bed.account, bed.journal, bed.sim.now())
    assert [one.dollars for one in billing.machine_costs(bed.journal, bed.sim.now())] == pytest.approx([1.5, 1.5])
    billing.record_spot_costs(bed.account, bed.journal, bed.sim.now())
    assert len(bed.journal.lines("price")) == 2 and bed.front.count("DescribeSpotPriceHistory") == 1


def test_the_history_that_ec2_tells_has_the_price_at_which_a_short_job_ran(bed: Bed) -> None:
    bed.sim.set_price(A, "g5.xlarge", 0.77)
    bed.acquire()
    bed.sim.advance(500)
    bed.gang().terminate_job()
    billing.record_spot_costs(bed.account, bed.journal, bed.sim.now())
    assert len(bed.journal.lines("price")) == 3
    near(bed)


def test_machines_that_run_or_are_not_spot_keep_the_price_of_their_asking(bed: Bed) -> None:
    history(bed)
    bed.acquire(n=1)
    billing.record_spot_costs(bed.account, bed.journal, bed.sim.now())
    bed.gang().terminate_job()
    bed.acquire(bed.place(A, "on-demand"), n=1)
    bed.gang().terminate_job()
    billing.record_spot_costs(bed.account, bed.journal, bed.sim.now())
    assert len(bed.journal.lines("price")) == 1 == bed.front.count("DescribeSpotPriceHistory")


def test_a_job_that_never_had_machines_costs_nothing(tmp_path: Path) -> None:
    meter = billing.CostMeter(Journal(tmp_path / "cloud.jsonl"))
    assert meter.total_dollars(START) == 0 and meter.unpriced_machines(START) == []


def test_the_address_of_a_job_is_paid_while_the_job_has_it_and_not_between_two_launches(tmp_path: Path) -> None:
    said = [("address", 100), ("address", 150), ("ended", 200), ("address", 1000), ("ended", 2000), ("ended", 9000)]
    path = tmp_path / "cloud.jsonl"
    path.write_text("".join(json.dumps({"what": what, "time": time}) + "\n" for what, time in said))
    hour = {
        now: billing.jump_host_address_dollars(Journal(path), now) / billing.ADDRESS_DOLLARS_PER_HOUR * 3600
        for now in (50, 150, 500, 1500, 99_999)
    }
    assert hour == pytest.approx({50: 0, 150: 50, 500: 100, 1500: 600, 99_999: 1100})
