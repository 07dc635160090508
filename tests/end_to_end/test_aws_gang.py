"""Sixteen rented machines at once, from the spot market and from reservations: their start, their bill, what is left.

Each runs a command that takes no processor time, because all are on this computer.
"""

import shlex
import time
from typing import Any

import pytest
from support.aws_user import TYPE, Renter
from support.simcloud.spot_market import offered

from infra.aws.journal_events import LaunchRequest, RequestRefused

MACHINES = 16
REFUSED_TYPE = "c7i.4xlarge"  # tried first
REGION = "us-east-1"
SAY_WHERE = 'echo "rank $RANK of $WORLD_SIZE in $AWS_REGION"; until [ -e {end} ]; do sleep 1; done'


def limit_capacity(renter: Renter, market: str) -> tuple[str, ...]:
    """Let one type be refused in all zones, or reserve machines. Returns the options of the launch."""
    if market == "spot":
        renter.cloud.post("limit_capacity", type=REFUSED_TYPE, zones=offered(REGION, REFUSED_TYPE), places=MACHINES - 1)
        return "--type", REFUSED_TYPE, "--type", TYPE
    block: dict[str, Any] = {"is_block": True, "end": time.time() + 4 * 3600} if market == "capacity-block" else {}
    return "--reservation", renter.cloud.post("reserve", type=TYPE, zone=f"{REGION}b", count=MACHINES, **block)


@pytest.mark.parametrize("market", ["spot", "on-demand", "capacity-block"])
def test_sixteen_machines_start_in_one_zone_are_billed_and_leave_nothing(renter: Renter, market: str) -> None:
    renter.create_stack()
    renter.cloud.post("set", tells_time=True)
    options = ("--machines", str(MACHINES), "--procs", "1", *limit_capacity(renter, market))
    renter.sandbox.env["IMGNET_RUNS"] = str(renter.path / "runs")
    folder = renter.path / "empty"
    folder.mkdir()
    end = renter.path / "end"
    command = SAY_WHERE.format(end=shlex.quote(str(end)))
    renter.run("run", "-d", "-y", *options, "--", "sh", "-c", command, cwd=folder)
    job = renter.sandbox.job(1)
    logs = {job.log_path(rank, 1): f"rank {rank} of {MACHINES} in {REGION}" for rank in range(MACHINES)}
    renter.wait_for(lambda: all(path.exists() and line in path.read_text() for path, line in logs.items()), 400)
    renter.cloud.post("advance", seconds=900)  # more than the minute that is billed at least
    asked = renter.calls().count("DescribeInstances")
    # The supervisor has read the time of a first answer when it asks again.
    renter.wait_for(lambda: renter.calls().count("DescribeInstances") > asked + 1)
    end.touch()
    renter.wait_for(lambda: job.has_ended, 100)
    assert job.state == "done", renter.describe()
    assert [len(ids) for ids in renter.granted_ids(job)] == [MACHINES] == [len(renter.all_instance_ids())]

    refused_count = len(offered(REGION, REFUSED_TYPE)) if market == "spot" else 0
    places = [request.place for request in renter.journal_events(job, LaunchRequest)]
    assert [place.type for place in places] == [REFUSED_TYPE] * refused_count + [TYPE]
    refusals = renter.journal_events(job, RequestRefused)
    assert [refusal.code for refusal in refusals] == ["InsufficientInstanceCapacity"] * refused_count
    rows = renter.run_json("cost", job.name)["machines"]
    rented = {(row["market"], row["zone"]) for row in rows}
    assert rented == {(market, places[-1].zone)} and (market == "spot" or places[-1].zone == f"{REGION}b")
    assert all(row["seconds"] > 900 for row in rows)
    renter.assert_costs_match_the_bill(job)
    renter.assert_nothing_left()
