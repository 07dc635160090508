"""JobInstances: conclusions from its journal: who ended the machines, how much time is left, where it may rent."""

import json
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
from support.aws_journal import launch_request, request_granted, write_journal

from cluster.backends.aws.instances import JobInstances
from cluster.backends.aws.rental_spec import DISK_DOLLARS_PER_HOUR, RentalSpec, internet_dollars
from cluster.backends.rented.controller import EndedExternally, RentedJobController
from infra.aws.instances import internet
from infra.aws.journal_events import InstanceEnded, JournalEvent, PublicAddressRefused
from infra.aws.launch_request import Internet, Place
from infra.errors import CloudError, NoMachines

Fixture = Any
NOW = time.time()
HOUR = 3600.0
OVERHEAD_DOLLARS_PER_HOUR = DISK_DOLLARS_PER_HOUR + internet_dollars(Internet.PUBLIC, 1)
MODULE = sys.modules[JobInstances.__module__]


def place(price: float = 10.0, region: str = "us-east-1") -> Place:
    return Place(region=region, zone=f"{region}a", type="p5.48xlarge", market="spot", price=price)


@pytest.fixture
def make_instances(hand_made: Fixture, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make the instances of a job from journal events: make_instances(machine_count, event, ...).

    The gang is a stand-in without open requests and instances, available as `.fake_gang`.
    """

    class FakeAccount(SimpleNamespace):
        def in_region(self, region: str) -> "FakeAccount":
            return FakeAccount(region=region, identity=("", ""))

    fake_gang = SimpleNamespace(list_instances=list, open_requests=list)
    monkeypatch.setattr(MODULE, "Account", lambda region: FakeAccount(region=region, identity=("", "")))
    monkeypatch.setattr(MODULE, "Gang", lambda *_: fake_gang)

    def make(machine_count: int, *events: JournalEvent, **spec_fields: Any) -> Any:
        rental_fields = {"places": (place(),), "ssh_address": "192.0.2.1/32", "owner": "ann"}
        rental_spec = RentalSpec(**{**rental_fields, **spec_fields.pop("rental", {})})
        run = hand_made(machines=machine_count, backend="aws", cloud=rental_spec.to_json(), **spec_fields)
        write_journal(run.run_folder.path / "cloud.jsonl", *events)
        job_instances: Any = JobInstances(run.spec, run.run_folder)
        job_instances.fake_gang = fake_gang
        return job_instances

    return make


def find_or_rent(job_instances: Any, launches: list[str]) -> dict[str, Any]:
    """Let the controller look for machines, or rent some. `launches` gets an entry when it rents."""

    def rent_all() -> dict[str, Any]:
        launches.append("rented")
        return {}

    job_instances.rent_all = rent_all
    any_class: Any = lambda *_: job_instances  # noqa: E731
    controller: Any = RentedJobController(job_instances.spec, job_instances.run_folder, any_class)
    controller._new_launch_id = lambda: launches.append("new launch ID")
    machines: dict[str, Any] = controller._find_or_rent()
    return machines


def granted(number: int, at: float, where: Place, *names: str) -> list[JournalEvent]:
    """The journal events of a request that EC2 granted; the instance IDs are i-<number><name>."""
    machines = [(f"i-{number}{name}", name, at) for name in names]
    return [launch_request(number, where, names, at), request_granted(number, *machines, time=at)]


def gone(instance_id: str, at: float, reason: str) -> JournalEvent:
    return InstanceEnded(time=NOW, id=instance_id, name=instance_id[-1], ended=at, reason=reason)


SPOT = "Server.SpotInstanceTermination"
LIMIT = "Client.InstanceInitiatedShutdown"
USER = "Client.UserInitiatedShutdown"


@pytest.mark.parametrize(
    "endings, reason",
    [
        ({"0": (900, SPOT), "1": (901, SPOT)}, ""),
        ({"0": (100, SPOT), "1": (900, LIMIT)}, "powered themselves off"),
        ({"0": (100, SPOT), "1": (900, USER)}, "by a user"),
        ({"0": (100, USER), "1": (900, SPOT)}, ""),
        ({"0": (100, SPOT)}, "powered themselves off"),
        ({}, "powered themselves off"),
    ],
)
def test_find_or_rent_rents_again_only_if_ec2_ended_the_last_machine(
    endings: dict[str, Any], reason: str, make_instances: Any
) -> None:
    lines = [gone(f"i-1{name}", NOW - 1000 + at, why) for name, (at, why) in endings.items()]
    job_instances = make_instances(2, *granted(1, NOW - 1000, place(), "0", "1"), *lines)
    calls: list[str] = []
    if reason:
        with pytest.raises(EndedExternally, match=f"{reason}.*imgnet-cluster resume job-1"):
            find_or_rent(job_instances, calls)
    else:
        assert find_or_rent(job_instances, calls) == {}
    assert calls == ([] if reason else ["new launch ID", "rented"])


def test_find_or_rent_after_the_time_limit_is_refused_until_extended(make_instances: Any) -> None:
    lines = [*granted(1, NOW - 2 * HOUR, place(), "0"), gone("i-10", NOW - HOUR, SPOT)]
    job_instances = make_instances(1, *lines, max_hours=1.0)
    assert job_instances.is_overdue
    calls: list[str] = []
    with pytest.raises(EndedExternally, match="its time is over; to continue: imgnet-cluster resume job-1"):
        find_or_rent(job_instances, calls)
    assert calls == []
    spec_path = job_instances.run_folder.spec_path
    spec_path.write_text(json.dumps({**json.loads(spec_path.read_text()), "max_hours": 3.0}))
    assert not job_instances.is_overdue


def test_compute_limits_after_a_move_counts_the_earlier_actual_cost(make_instances: Any) -> None:
    first, second = place(20.0), place(10.0)
    lines = [*granted(1, NOW - HOUR, first, "0"), gone("i-10", NOW, SPOT), *granted(2, NOW, second, "0")]
    moved = make_instances(1, *lines, max_hours=100.0, rental={"max_dollars": 40.0})
    hours, grace_seconds = moved.compute_limits(moved.dollars_per_hour)
    assert hours + grace_seconds / HOUR == pytest.approx(1 + 20 / (10 + OVERHEAD_DOLLARS_PER_HOUR), abs=0.03)
    before = make_instances(1, *lines[:2], max_hours=100.0, rental={"max_dollars": 40.0}, name="job-2")
    hours, grace_seconds = before.compute_limits(before.dollars_per_hour)
    # The tolerance covers the first minute, which is billed at once.
    assert hours + grace_seconds / HOUR == pytest.approx(40 / (20 + OVERHEAD_DOLLARS_PER_HOUR), abs=0.02)


def testrent_all_with_an_open_request_does_not_try_the_next_region(
    make_instances: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_instances = make_instances(1, rental={"places": (place(), place(region="us-west-2"))})
    requested_regions: list[str] = []

    def acquire(places: list[Place], *_: Any) -> None:
        requested_regions.append(places[0].region)
        raise CloudError("describe machines (ec2:DescribeInstances): throttled")

    monkeypatch.setattr(MODULE, "list_instance_types", lambda account, types: dict.fromkeys(types))
    job_instances.fake_gang.acquire = acquire
    job_instances._ensure_stack = lambda account: SimpleNamespace(subnets=["us-east-1a", "us-west-2a"])
    with pytest.raises(CloudError):
        job_instances.rent_all()
    assert requested_regions == ["us-east-1", "us-west-2"]
    job_instances.fake_gang.open_requests = lambda: [{"number": 1}]
    with pytest.raises(CloudError):
        job_instances.rent_all()
    assert requested_regions[2:] == ["us-east-1"]


def test_resolve_ssh_address_follows_this_computer_unless_fixed(
    make_instances: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MODULE, "get_public_address", lambda: "198.51.100.9/32")
    following = make_instances(1)
    fixed = make_instances(1, rental={"is_address_fixed": True}, name="job-2")
    assert following.allowed_address == "192.0.2.1/32"
    assert following.resolve_ssh_address() == following.allowed_address == "198.51.100.9/32"
    assert fixed.resolve_ssh_address() == "192.0.2.1/32"

    def fail() -> str:
        raise CloudError("no service tells the address")

    monkeypatch.setattr(MODULE, "get_public_address", fail)
    assert following.resolve_ssh_address() == "198.51.100.9/32"


class Interrupted(Exception):
    """Stands for a kill of the supervisor."""


def test_refused_public_addresses_release_the_machines_also_after_a_crash(
    make_instances: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = launch_request(1, place(), ["0", "1"], NOW)
    job_instances = make_instances(2, request, request_granted(1, ("i-0", "0", NOW), ("i-1", "1", NOW), time=NOW))
    machines = {
        name: SimpleNamespace(
            id=f"i-{name}", name=name, public_ip="", launch_token=request.token, primary_interface_id=f"eni-{name}"
        )
        for name in "01"
    }

    def refuse(account: Any, interface_id: str) -> None:
        raise CloudError("not for several interfaces", "UnsupportedOperation")

    def crash(ids: list[str], reason: str) -> None:
        raise Interrupted

    monkeypatch.setattr(internet, "give_public_address", refuse)
    job_instances.terminate = crash
    with pytest.raises(Interrupted):
        job_instances.ensure_reachable(machines)
    assert job_instances.internet is Internet.NAT, "recorded before the machines are terminated"
    released: list[str] = []
    job_instances.terminate = lambda ids, reason: released.extend(ids)
    assert job_instances.ensure_reachable(machines) == {} and released == ["i-0", "i-1"]
    assert len(job_instances.journal.events(PublicAddressRefused)) == 1
    assert job_instances.dollars_per_hour == pytest.approx(
        2 * (10 + DISK_DOLLARS_PER_HOUR) + internet_dollars(Internet.NAT, 2)
    )


def test_missing_right_to_give_addresses_is_no_refusal(make_instances: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    request = launch_request(1, place(), ["0"], NOW)
    job_instances = make_instances(1, request, request_granted(1, ("i-0", "0", NOW), time=NOW))
    machine = SimpleNamespace(
        id="i-0", name="0", public_ip="", launch_token=request.token, primary_interface_id="eni-0"
    )

    def deny(account: Any, interface_id: str) -> None:
        raise CloudError("ec2:ModifyNetworkInterfaceAttribute is not permitted", "UnauthorizedOperation")

    monkeypatch.setattr(internet, "give_public_address", deny)
    with pytest.raises(NoMachines, match="not permitted"):
        job_instances.ensure_reachable({"0": machine})
    assert job_instances.internet is Internet.PUBLIC
