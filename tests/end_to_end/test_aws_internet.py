"""Rented machines with several network cards, which RunInstances gives no public address: their way to the internet."""

import pytest
from support.aws_network import Network
from support.aws_user import Renter

from cluster.jobs.job import Job
from infra.aws.client import Account
from infra.aws.journal_events import (
    InstancesReleased,
    NatGatewayRequested,
    PublicAddressRefused,
    PublicAddressRequested,
)

TWO_CARDS = ("--type", "m6in.32xlarge")  # without GPUs, which no simulated machine has
NAT_WORD = "NAT gateway"


def train_to_the_end(renter: Renter, *options: str) -> Job:
    """Launch two machines with two network cards each, and wait until they have trained."""
    renter.cloud.post("set", internet_wait_seconds=20.0)
    job = renter.launch(*TWO_CARDS, *options, epochs=1)
    renter.wait_for(lambda: job.status().state in ("done", "failed"), 150)
    assert job.status().state == "done", renter.describe()
    renter.wait_for(lambda: not renter.supervisor_pids())
    return job


def test_each_machine_gets_a_public_address(renter: Renter) -> None:
    job = train_to_the_end(renter, "--spares", "1", "--on-demand-spares")
    calls = [action.removesuffix("Attribute") for action in renter.calls()]
    calls = [action for action in calls if action in ("RunInstances", "ModifyNetworkInterface")]
    addresses = ["ModifyNetworkInterface"] * 2
    assert calls[-5:] == ["RunInstances", *addresses, "RunInstances", addresses[0]], "addresses come before the spare"
    assert not renter.journal_events(job, NatGatewayRequested)
    machines = renter.run_json("cost", job.name)["machines"]
    assert all(machine["address_dollars"] > 0 for machine in machines)


def test_addresses_that_never_come_are_replaced_by_a_nat_gateway(renter: Renter) -> None:
    renter.cloud.post("set", hides_public_addresses=True, nat_seconds=1.0, internet_wait_seconds=600.0, tells_time=True)
    job = renter.launch(*TWO_CARDS, epochs=1)
    renter.wait_for(lambda: renter.journal_events(job, PublicAddressRequested))
    renter.cloud.post("advance", seconds=300.0)
    renter.wait_for(lambda: job.status().state in ("done", "failed"), 240)
    assert job.status().state == "done", renter.describe()
    (refusal,) = renter.journal_events(job, PublicAddressRefused)
    assert "does not show the public address" in refusal.message and len(renter.all_instance_ids()) == 4
    renter.wait_for(lambda: not renter.supervisor_pids())


def test_refused_addresses_are_replaced_by_a_nat_gateway(renter: Renter) -> None:
    renter.cloud.post("set", refuses_public_addresses=True, nat_seconds=1.0, boot_download_bytes=2 * 10**9)
    job = train_to_the_end(renter)
    assert len(renter.journal_events(job, PublicAddressRefused)) == 1
    releases = [event for event in renter.journal_events(job, InstancesReleased) if "refused" in event.reason]
    assert len(releases) == 1 and len(releases[0].ids) == 2 and len(renter.all_instance_ids()) == 4
    assert NAT_WORD in renter.run("cost", job.name)
    report = renter.run_json("cost", job.name)
    (row,) = (row for row in report["traffic"] if row["name"] == NAT_WORD)
    assert row["amount"] == pytest.approx(4.0, rel=0.01), "of the two machines behind the gateway"
    meter_dollars = renter.cloud.bill()["nat"]
    assert row["dollars"] + report["nat_dollars"] == pytest.approx(meter_dollars, rel=0.01), (report, meter_dollars)
    kinds = {resource["kind"] for resource in renter.cloud.all_resources() if "imgnet:job" in resource["tags"]}
    assert not kinds & {"nat-gateway", "subnet", "route-table"}, "everything of the job is removed"


def test_private_subnet_of_the_user_is_used_and_left_as_it_was(renter: Renter, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in renter.cloud.env.items():
        monkeypatch.setenv(name, value)
    theirs = Network(Account("us-east-1"))
    before = theirs.describe()
    renter.has_stack = True  # the launch makes it
    private = ("--internet", "private", "--from", "203.0.113.7/32")
    job = train_to_the_end(renter, "--subnet", theirs.private, *private)
    report = renter.run_json("cost", job.name)
    assert not report["nat_dollars"] and not any(machine["address_dollars"] for machine in report["machines"])
    renter.run("down", "--stack", "--delete-data", "-y", "--region", "us-east-1")
    assert theirs.describe() == before
    theirs.remove()


def test_machines_without_internet_fail_with_the_reason(renter: Renter) -> None:
    renter.cloud.post("set", internet_wait_seconds=2.0)
    job = renter.launch(*TWO_CARDS, "--internet", "none")
    renter.wait_for(lambda: job.status().state == "failed")
    assert "no way to the internet" in renter.run("status", job.name)
