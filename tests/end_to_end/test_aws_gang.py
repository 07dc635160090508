"""Sixteen rented machines at once, from the spot market and from a reservation: their start, their bill, what is left.

Each runs a command that takes no processor time, because all are on this computer.
"""

import pytest
from support.aws_user import TYPE, Renter
from support.simcloud.spot_market import offered

from infra.aws.journal_events import LaunchRequest, RequestRefused

MACHINES = 16
REFUSED_TYPE = "c7i.4xlarge"  # tried first
REGION = "us-east-1"
SAY_WHERE = 'echo "rank $RANK of $WORLD_SIZE in $AWS_REGION"; sleep 2'


def limit_capacity(renter: Renter, market: str) -> tuple[str, ...]:
    """Let one type be refused in all zones, or reserve machines. Returns the options of the launch."""
    if market == "spot":
        renter.cloud.post("limit_capacity", type=REFUSED_TYPE, zones=offered(REGION, REFUSED_TYPE), places=MACHINES - 1)
        return "--type", REFUSED_TYPE, "--type", TYPE
    return "--reservation", renter.cloud.post("reserve", type=TYPE, zone=f"{REGION}b", count=MACHINES)


@pytest.mark.parametrize("market", ["spot", "on-demand"])
def test_sixteen_machines_start_in_one_zone_are_billed_and_leave_nothing(renter: Renter, market: str) -> None:
    renter.create_stack()
    options = ("--machines", str(MACHINES), "--procs", "1", *limit_capacity(renter, market))
    renter.sandbox.env["IMGNET_RUNS"] = str(renter.path / "runs")
    folder = renter.path / "empty"
    folder.mkdir()
    ran = renter.cli("run", "-y", *options, "--", "sh", "-c", SAY_WHERE, cwd=folder, timeout=500)
    job = renter.sandbox.job(1)
    assert ran.code == 0 and job.state == "done", f"{ran}\n{renter.describe()}"
    assert [len(ids) for ids in renter.granted_ids(job)] == [MACHINES] == [len(renter.all_instance_ids())]
    for rank in range(MACHINES):
        assert f"rank {rank} of {MACHINES} in {REGION}" in job.log_path(rank, 1).read_text()

    refused_count = len(offered(REGION, REFUSED_TYPE)) if market == "spot" else 0
    places = [request.place for request in renter.journal_events(job, LaunchRequest)]
    assert [place.type for place in places] == [REFUSED_TYPE] * refused_count + [TYPE]
    refusals = renter.journal_events(job, RequestRefused)
    assert [refusal.code for refusal in refusals] == ["InsufficientInstanceCapacity"] * refused_count
    rented = {(row["market"], row["zone"]) for row in renter.run_json("cost", job.name)["machines"]}
    assert rented == {(market, places[-1].zone)} and (market == "spot" or places[-1].zone == f"{REGION}b")
    renter.assert_costs_match_the_bill(job)
    renter.assert_nothing_left()
