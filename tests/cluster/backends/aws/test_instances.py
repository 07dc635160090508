"""What a supervisor makes of its journal: whose doing an end was, how much time is left, and where it may rent."""

import json
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.backends.aws.instances import EndedExternally, JobInstances
from cluster.backends.aws.rental_spec import OVERHEAD_DOLLARS_PER_HOUR, RentalSpec
from infra.aws.errors import CloudError
from infra.aws.instances.request import Place

Fixture = Any
NOW = time.time()
HOUR = 3600.0


def place(price: float = 10.0, region: str = "us-east-1") -> Place:
    return Place(region=region, zone=f"{region}a", type="p5.48xlarge", market="spot", price=price)


@pytest.fixture
def rent(hand_made: Fixture, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make a job of so many machines with a journal: rent(machines, (what, facts), ...)."""
    here = sys.modules[JobInstances.__module__]

    class Account(SimpleNamespace):
        def in_region(self, region: str) -> "Account":
            return Account(region=region, identity=("", ""))

    monkeypatch.setattr(here, "Account", lambda region: Account(region=region, identity=("", "")))
    gang = SimpleNamespace(launch_requests=list, list_instances=list, open_requests=list)
    monkeypatch.setattr(here, "Gang", lambda *_: gang)

    def make(machines: int, *lines: tuple[str, dict[str, Any]], **changes: Any) -> Any:
        wish = RentalSpec(
            **{"places": (place(),), "ssh_address": "192.0.2.1/32", "owner": "ann", **changes.pop("wish", {})}
        )
        run = hand_made(machines=machines, backend="aws", cloud=wish.to_json(), **changes)
        rows = [{"what": what, "time": NOW, **facts} for what, facts in lines]
        (run.folders.path / "cloud.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
        found: Any = JobInstances(run.spec, run.folders, lambda text: None)
        found.bed = gang
        return found

    return make


def came(number: int, at: float, where: Place, *names: str) -> list[tuple[str, dict[str, Any]]]:
    request = {"BlockDeviceMappings": [], "NetworkInterfaces": []}
    machines = [{"id": f"i-{number}{name}", "name": name, "launched": at} for name in names]
    ask = {"number": number, "place": vars(where), "names": list(names), "request": request, "time": at}
    return [("ask", ask), ("granted", {"number": number, "machines": machines, "time": at})]


def gone(id: str, at: float, why: str) -> tuple[str, dict[str, Any]]:
    return "gone", {"id": id, "name": id[-1], "ended": at, "why": why}


SPOT, LIMIT, USER = "Server.SpotInstanceTermination", "Client.InstanceInitiatedShutdown", "Client.UserInitiatedShutdown"


@pytest.mark.parametrize("ends, said", [
    ({"0": (900, SPOT), "1": (901, SPOT)}, ""),
    ({"0": (100, SPOT), "1": (900, LIMIT)}, "by their own limit"),
    ({"0": (100, SPOT), "1": (900, USER)}, "by somebody"),
    ({"0": (100, USER), "1": (900, SPOT)}, ""),
    ({"0": (100, SPOT)}, "by their own limit"),
    ({}, "by their own limit"),
])  # fmt: skip
def test_those_that_ended_last_tell_whether_others_are_wanted(ends: dict[str, Any], said: str, rent: Any) -> None:
    lines = [gone(f"i-1{name}", NOW - 1000 + at, why) for name, (at, why) in ends.items()]
    found = rent(2, *came(1, NOW - 1000, place(), "0", "1"), *lines)
    renewed: list[str] = []
    found._rent_all = list
    if said:
        with pytest.raises(EndedExternally, match=f"ended {said}.*imgnet-cluster resume job-1"):
            found.find_or_rent(lambda: renewed.append("anew"))
    else:
        assert found.find_or_rent(lambda: renewed.append("anew")) == {}
    assert renewed == [] if said else ["anew"]


def test_nothing_is_rented_when_the_time_is_over(rent: Any) -> None:
    lines = [*came(1, NOW - 2 * HOUR, place(), "0"), gone("i-10", NOW - HOUR, SPOT)]
    found = rent(1, *lines, max_hours=1.0)
    assert found.is_overdue
    with pytest.raises(EndedExternally, match="its time is over; go on: imgnet-cluster resume job-1"):
        found.find_or_rent(lambda: pytest.fail("anew"))
    found.run_folder.spec_path.write_text(json.dumps({**json.loads(found.run_folder.spec_path.read_text()), "max_hours": 3.0}))
    assert not found.is_overdue, "it was extended"


def test_after_a_move_what_was_spent_before_counts_as_it_was(rent: Any) -> None:
    first, second = place(20.0), place(10.0)
    lines = [*came(1, NOW - HOUR, first, "0"), gone("i-10", NOW, SPOT), *came(2, NOW, second, "0")]
    found = rent(1, *lines, max_hours=100.0, wish={"max_dollars": 40.0})
    hours, late = found.compute_limits(second)
    assert hours + late / HOUR == pytest.approx(1 + 20 / (10 + OVERHEAD_DOLLARS_PER_HOUR), abs=0.03)
    before = rent(1, *lines[:2], max_hours=100.0, wish={"max_dollars": 40.0}, name="job-2")
    hours, late = before.compute_limits(first)
    assert hours + late / HOUR == pytest.approx(
        40 / (20 + OVERHEAD_DOLLARS_PER_HOUR), abs=0.02
    )  # a minute is billed at once


def test_an_asking_without_an_answer_is_not_followed_by_one_in_another_region(
    rent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = rent(1, wish={"places": (place(), place(region="us-west-2"))})
    asked: list[str] = []

    def acquire(places: list[Place], *_: Any) -> None:
        asked.append(places[0].region)
        raise CloudError("describe machines (ec2:DescribeInstances): throttled")

    monkeypatch.setattr(sys.modules[JobInstances.__module__], "list_instance_types", lambda account, types: dict.fromkeys(types))
    found.bed.acquire = acquire
    found._ensure_stack = lambda account: SimpleNamespace(subnets=["us-east-1a", "us-west-2a"])
    with pytest.raises(CloudError):
        found._rent_all()
    assert asked == ["us-east-1", "us-west-2"]
    found.bed.open_requests = lambda: [{"number": 1}]
    with pytest.raises(CloudError):
        found._rent_all()
    assert asked[2:] == ["us-east-1"]


def test_the_computer_that_looks_after_a_job_is_let_in_wherever_it_is_unless_another_was_said(
    rent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[JobInstances.__module__], "get_public_address", lambda: "198.51.100.9/32")
    moved, said = rent(1), rent(1, wish={"is_address_fixed": True}, name="job-2")
    assert (moved.allowed_address, moved.resolve_ssh_address(), moved.allowed_address) == ("192.0.2.1/32", "198.51.100.9/32", "198.51.100.9/32")
    assert said.resolve_ssh_address() == "192.0.2.1/32"

    def nobody() -> str:
        raise CloudError("nobody says it")

    monkeypatch.setattr(sys.modules[JobInstances.__module__], "get_public_address", nobody)
    assert moved.resolve_ssh_address() == "198.51.100.9/32"
