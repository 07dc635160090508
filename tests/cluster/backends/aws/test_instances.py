"""JobInstances: conclusions from its journal: who ended the machines, how much time is left, where it may rent."""

import json
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from support.aws_journal import launch_request, request_granted, write_journal
from support.log_lines import log_lines
from support.simcloud.http_server import AwsFrontend
from support.simcloud.in_process import shared_account

from cluster.backends.aws.renting import ssh_access
from cluster.backends.aws.renting.adoption import AwsAdoption
from cluster.backends.aws.renting.controller import RentedJobController
from cluster.backends.aws.renting.instances import JobInstances
from cluster.backends.aws.renting.traffic import TRAFFIC_FILE, TrafficCount, TrafficRecord
from cluster.backends.aws.terms.rental_spec import RentalSpec, internet_dollars
from infra.aws import prices, tags
from infra.aws.error_codes import ErrorKind
from infra.aws.instances import internet
from infra.aws.instances.amis import ROOT_DISK_GB
from infra.aws.instances.gang import LaunchRefused
from infra.aws.journal_events import (
    FORGOTTEN,
    ExpiryChanged,
    InstanceEnded,
    InstancesReleased,
    JobAdopted,
    JournalEvent,
    LaunchMoved,
    LaunchStarted,
    NatGatewayRequested,
    PublicAddressRefused,
    PublicAddressRequested,
    TerminationFinished,
)
from infra.aws.launch_request import Internet, Place
from infra.aws.stack import claims, security_group, stack
from infra.aws.stack.claims import Claim
from infra.costs import Traffic, TrafficForecast
from infra.errors import AdoptedElsewhere, CloudError, EndedExternally, NoAnswer, NoCredentials, NoMachines
from train.tools import host
from train.tools.records import encode
from train.tools.text_files import to_json_bytes

NOW = time.time()
HOUR = 3600.0
DISK_DOLLARS_PER_HOUR = ROOT_DISK_GB * prices.DISK_PER_GB_HOUR
OVERHEAD_DOLLARS_PER_HOUR = DISK_DOLLARS_PER_HOUR + internet_dollars(Internet.PUBLIC, 1)
MODULE = sys.modules[JobInstances.__module__]


def place(price: float = 10.0, region: str = "us-east-1") -> Place:
    return Place(region=region, zone=f"{region}a", type="p5.48xlarge", market="spot", price=price)


@pytest.fixture
def make_instances(hand_made: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make the instances of a job from journal events: make_instances(machine_count, event, ...).

    The gang is a stand-in without open requests and instances, available as `.fake_gang`.
    """

    class FakeAccount(SimpleNamespace):
        def in_region(self, region: str) -> "FakeAccount":
            return FakeAccount(region=region, identity=("", ""))

    fake_gang = SimpleNamespace(list_instances=list, open_requests=list)
    monkeypatch.setattr(MODULE, "Account", lambda region: FakeAccount(region=region, identity=("", "")))
    monkeypatch.setattr(MODULE, "Gang", lambda *_: fake_gang)
    monkeypatch.setattr(claims, "read_claim", lambda account, uid: Claim())

    def make(machine_count: int, *events: JournalEvent, **spec_fields: Any) -> Any:
        rental_fields = {"places": (place(),), "ssh_address": "192.0.2.1/32", "owner": "ann"}
        rental_spec = RentalSpec(**{**rental_fields, **spec_fields.pop("rental", {})})
        run = hand_made(machines=machine_count, backend="aws", cloud=rental_spec.to_json(), **spec_fields)
        write_journal(run.run_folder.path / "cloud.jsonl", *events)
        job_instances: Any = JobInstances(run.spec, run.run_folder)
        job_instances.fake_gang = fake_gang
        return job_instances

    return make


def find_or_rent(job_instances: Any) -> tuple[dict[str, Any], bool]:
    """Let the controller look for machines, or rent some. Returns them, and whether it rented under a new launch ID."""
    job_instances.rent_all = Mock(return_value={})
    provider_class: Any = Mock(return_value=job_instances)
    controller: Any = RentedJobController(job_instances.spec, job_instances.run_folder, provider_class)
    controller._new_launch_id = Mock()
    machines = controller._find_or_rent()
    return machines, job_instances.rent_all.called and controller._new_launch_id.called


def granted(number: int, at: float, where: Place, *names: str) -> list[JournalEvent]:
    """The journal events of a request that EC2 granted; the instance IDs are i-<number><name>."""
    machines = [(f"i-{number}{name}", name, at) for name in names]
    return [launch_request(number, where, names, at), request_granted(number, *machines, time=at)]


def gone(instance_id: str, at: float, reason: str) -> JournalEvent:
    return InstanceEnded(time=NOW, id=instance_id, name=instance_id[-1], ended=at, reason=reason)


def move_traffic(job_instances: Any, first: float, last: float, written_gb: float) -> None:
    moved = Traffic(shared_written_bytes=round(written_gb * 1e9))
    record = TrafficRecord(counts={"10.0.0.1 a": TrafficCount(first=first, last=last, traffic=moved)})
    (job_instances.run_folder.path / TRAFFIC_FILE).write_bytes(to_json_bytes(encode(record)))


def hours_until_power_off(job_instances: Any) -> float:
    hours, grace_seconds = job_instances.compute_limits(job_instances.dollars_per_hour)
    return float(hours + grace_seconds / HOUR)


SPOT = "Server.SpotInstanceTermination"
LIMIT = "Client.InstanceInitiatedShutdown"
USER = "Client.UserInitiatedShutdown"


@pytest.mark.parametrize("endings, reason", [
    ({"0": (900, SPOT), "1": (901, SPOT)}, ""),
    ({"0": (100, SPOT), "1": (900, LIMIT)}, "powered themselves off"),
    ({"0": (100, SPOT), "1": (900, USER)}, "by a user"),
    ({"0": (100, USER), "1": (900, SPOT)}, ""),
    ({"0": (100, SPOT)}, "powered themselves off"),
    ({"0": (900, FORGOTTEN), "1": (901, FORGOTTEN)}, "powered themselves off"),
    ({}, "powered themselves off"),
])  # fmt: skip
def test_find_or_rent_rents_again_only_if_ec2_ended_the_last_machine(
    endings: dict[str, Any], reason: str, make_instances: Any
) -> None:
    lines = [gone(f"i-1{name}", NOW - 1000 + at, why) for name, (at, why) in endings.items()]
    job_instances = make_instances(2, *granted(1, NOW - 1000, place(), "0", "1"), *lines)
    if reason:
        with pytest.raises(EndedExternally, match=f"{reason}.*imgnet-cluster resume job-1"):
            find_or_rent(job_instances)
        job_instances.rent_all.assert_not_called()
    else:
        assert find_or_rent(job_instances) == ({}, True)


def test_find_or_rent_after_the_time_limit_is_refused_until_extended(make_instances: Any) -> None:
    lines = [*granted(1, NOW - 2 * HOUR, place(), "0"), gone("i-10", NOW - HOUR, SPOT)]
    job_instances = make_instances(1, *lines, max_hours=1.0)
    with pytest.raises(EndedExternally, match="its time limit passed; to continue: imgnet-cluster resume job-1"):
        find_or_rent(job_instances)
    job_instances.rent_all.assert_not_called()
    spec_path = job_instances.run_folder.spec_path
    spec_path.write_text(json.dumps({**json.loads(spec_path.read_text()), "max_hours": 3.0}))
    assert not job_instances.is_overdue


def test_limits_after_a_move_count_the_earlier_actual_cost(make_instances: Any) -> None:
    lines = [*granted(1, NOW - HOUR, place(20.0), "0"), gone("i-10", NOW, SPOT), *granted(2, NOW, place(10.0), "0")]
    limits: dict[str, Any] = {"max_hours": 100.0, "rental": {"max_dollars": 40.0}}
    moved = hours_until_power_off(make_instances(1, *lines, **limits))
    assert moved == pytest.approx(1 + 20 / (10 + OVERHEAD_DOLLARS_PER_HOUR), abs=0.03)


def test_rent_all_with_an_open_request_does_not_try_the_next_region(
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
    remove = Mock(return_value=[])
    monkeypatch.setattr(MODULE.instances, "remove_leftovers", remove)
    job_instances.nat_subnets["us-east-1a"] = "subnet-1"
    with pytest.raises(CloudError):
        job_instances.rent_all()
    assert requested_regions == ["us-east-1", "us-west-2"]
    assert not job_instances.nat_subnets, "its NAT gateway is deleted, and the region may be tried again"
    assert [call.args[0].region for call in remove.call_args_list] == ["us-east-1"]
    assert job_instances.journal.events(TerminationFinished), "a NAT gateway of the next region is counted by itself"
    job_instances.fake_gang.open_requests = lambda: [{"number": 1}]
    with pytest.raises(CloudError):
        job_instances.rent_all()
    assert requested_regions[2:] == ["us-east-1"]


def test_job_is_ended_also_where_it_has_a_nat_gateway_and_requested_no_machine_yet(
    make_instances: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [launch_request(1, place(), ["0"]), NatGatewayRequested(region="us-west-2")]
    job_instances = make_instances(1, *requests, rental={"places": (place(), place(region="us-west-2"))})
    monkeypatch.setattr(MODULE, "Gang", lambda account, *_: SimpleNamespace(terminate_job=lambda: [account.region]))
    record_spot_costs = Mock(side_effect=CloudError("no answer"))
    monkeypatch.setattr(MODULE.billing, "record_spot_costs", record_spot_costs)
    assert sorted(job_instances.terminate_job()) == ["us-east-1", "us-west-2"]
    assert {call.args[0].region for call in record_spot_costs.call_args_list} == {"us-east-1", "us-west-2"}


def test_resolve_ssh_address_follows_this_computer_unless_fixed(
    make_instances: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh_access, "get_public_address", lambda: "198.51.100.9/32")
    following = make_instances(1)
    fixed = make_instances(1, rental={"is_address_fixed": True}, name="job-2")
    assert following.ssh_access.resolve_address() == following.ssh_access.address == "198.51.100.9/32"
    assert fixed.ssh_access.resolve_address() == "192.0.2.1/32"
    monkeypatch.setattr(ssh_access, "get_public_address", Mock(side_effect=CloudError("no service tells the address")))
    assert following.ssh_access.resolve_address() == "198.51.100.9/32"


@pytest.fixture
def refused_addresses(make_instances: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[CloudError], Any]:
    """Return a function that makes the instances of a job whose two machines EC2 refuses public addresses so."""

    def make(error: CloudError) -> Any:
        request = launch_request(1, place(), ["0", "1"], NOW)
        granted_machines = request_granted(1, ("i-0", "0", NOW), ("i-1", "1", NOW), time=NOW)
        job_instances = make_instances(2, request, granted_machines)
        job_instances.machines = {
            name: SimpleNamespace(
                id=f"i-{name}", name=name, public_ip="", launch_token=request.token, primary_interface_id=f"eni-{name}"
            )
            for name in "01"
        }
        monkeypatch.setattr(internet, "give_public_address", Mock(side_effect=error))
        return job_instances

    return make


def test_refused_public_addresses_release_the_machines_also_after_a_crash(
    refused_addresses: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_instances = refused_addresses(CloudError("not for several interfaces", "UnsupportedOperation"))
    terminate = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr(MODULE.instances, "terminate", terminate)
    with pytest.raises(KeyboardInterrupt):
        job_instances.ensure_reachable(job_instances.machines)
    assert job_instances.internet is Internet.NAT, "recorded before the machines are terminated"
    assert [event.ids for event in job_instances.journal.events(InstancesReleased)] == [("i-0", "i-1")]
    terminate.side_effect = None
    assert job_instances.ensure_reachable(job_instances.machines) == {}
    assert [call.args[1] for call in terminate.call_args_list] == [["i-0", "i-1"]] * 2
    assert len(job_instances.journal.events(PublicAddressRefused)) == 1
    nat_dollars = internet_dollars(Internet.NAT, 2)
    assert job_instances.dollars_per_hour == pytest.approx(2 * (10 + DISK_DOLLARS_PER_HOUR) + nat_dollars)


@pytest.mark.parametrize(("seconds", "error", "is_refused"), [
    (200, None, False),
    (301, None, True),
    (301, CloudError("too many calls", "RequestLimitExceeded"), True),
    (301, NoAnswer("EC2 cannot be reached"), False),
    (301, NoCredentials("the session has expired"), False),
])  # fmt: skip
def test_public_address_that_is_not_shown_for_five_minutes_counts_as_refused(
    refused_addresses: Any, monkeypatch: pytest.MonkeyPatch, seconds: float, error: CloudError | None, is_refused: bool
) -> None:
    """The machines have no way to the internet, and nobody can log in: they would idle until their time limit."""
    job_instances = refused_addresses(error)
    monkeypatch.setattr(MODULE.instances, "INSTANCE_VISIBILITY_SECONDS", 0.0)
    monkeypatch.setattr(MODULE.instances, "terminate", terminate := Mock())
    job_instances.journal.write(PublicAddressRequested(id="i-another"))
    job_instances.journal.copy(PublicAddressRequested(time=host.unix_time() - seconds, id="i-1"))
    if is_refused:
        assert job_instances.ensure_reachable(job_instances.machines) == {} and terminate.called
        assert job_instances.internet is Internet.NAT
    else:
        with pytest.raises(CloudError, match="does not show the public address" if error is None else str(error)):
            job_instances.ensure_reachable(job_instances.machines)
        assert not terminate.called and job_instances.internet is Internet.PUBLIC


@pytest.mark.parametrize(("code", "network_ids", "message"), [
    ("UnsupportedOperation", ("vpc-1",), "no addresses; name a subnet behind a NAT gateway"),
    ("UnauthorizedOperation", (), "^no addresses$"),
])  # fmt: skip
def test_no_nat_gateway_is_made_in_a_network_of_the_user_nor_where_only_a_right_is_missing(
    refused_addresses: Any, code: str, network_ids: tuple[str, ...], message: str
) -> None:
    job_instances = refused_addresses(CloudError("no addresses", code))
    job_instances.rental_spec = replace(job_instances.rental_spec, network_ids=network_ids)
    with pytest.raises(NoMachines, match=message):
        job_instances.ensure_reachable(job_instances.machines)
    assert job_instances.internet is Internet.PUBLIC


def test_private_machines_are_reached_without_a_jump_host(make_instances: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    request = replace(launch_request(1, place(), ["0", "1"], NOW), internet=Internet.PRIVATE)
    request.parameters["NetworkInterfaces"] = [{"Groups": ["sg-1"]}]
    monkeypatch.setattr(security_group, "allow_ssh_from", Mock())
    events = request, request_granted(1, ("i-0", "0", NOW), ("i-1", "1", NOW), time=NOW)
    private = make_instances(2, *events, rental={"internet": Internet.PRIVATE, "network_ids": ("vpc-1",)})
    machines = {
        name: SimpleNamespace(name=name, public_ip="", private_ip=f"10.9.3.{name}", launch_token=request.token, id=name)
        for name in "01"
    }
    assert private.ensure_reachable(machines) is machines, "no address is asked for"
    assert [(host.host, host.jump) for host in private.hosts(machines).values()] == [
        ("10.9.3.0", None),
        ("10.9.3.1", None),
    ]
    assert private.restore_access() == "", "this computer's public address does not matter"


def make_reachable_from(make_instances: Any, address: str) -> tuple[Any, str]:
    """Return a job of one machine that was launched from this address, and the stack's security group."""
    account = shared_account()
    group = stack.ensure(account, address).security_group
    request = launch_request(1, place(), ["0"], NOW)
    request.parameters["NetworkInterfaces"] = [{"Groups": [group]}]
    grant = request_granted(1, ("i-0", "0", NOW), time=NOW)
    job_instances = make_instances(1, request, grant, rental={"ssh_address": address})
    job_instances.account = account
    return job_instances, group


def test_ssh_that_another_computer_has_closed_is_opened_again(
    front: AwsFrontend, make_instances: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, elsewhere = "127.0.0.1/32", "198.51.100.9/32"
    job_instances, group = make_reachable_from(make_instances, own)
    account = job_instances.account

    def addresses() -> set[str]:
        rules = account.ec2.describe_security_groups(GroupIds=[group])["SecurityGroups"][0]["IpPermissions"]
        return {ip_range["CidrIp"] for rule in rules for ip_range in rule["IpRanges"]}

    security_group.allow_ssh_from(account, group, elsewhere, account.owner)
    assert addresses() == {elsewhere}, "no machine names the other one yet"
    with log_lines("infra", logging.INFO) as lines:
        assert [job_instances.restore_access() for _ in range(2)] == ["", ""]
    assert addresses() == {own, elsewhere} and lines == [f"opening ssh to {own}"]
    monkeypatch.setattr(ssh_access, "get_public_address", lambda: "203.0.113.7/32")
    assert f"now 203.0.113.7/32, but ssh is open to {own}" in job_instances.restore_access()
    assert addresses() == {own, elsewhere}


def test_changed_address_is_that_of_the_machines_once_the_user_has_opened_it(
    front: AwsFrontend, make_instances: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    former, present = "127.0.0.1/32", "203.0.113.7/32"
    job_instances, _ = make_reachable_from(make_instances, former)
    job_instances.list_machines = lambda: {"0": SimpleNamespace(id="i-0")}
    monkeypatch.setattr(MODULE.instances, "set_tags", set_tags := Mock())
    monkeypatch.setattr(ssh_access, "get_public_address", lambda: present)
    assert job_instances.restore_access()
    job_instances.note_access()  # ssh goes another way than what tells the address, such as a proxy
    assert not set_tags.called and job_instances.ssh_access.address == former
    assert job_instances.restore_access()
    stack.ensure(job_instances.account, present)  # up --stack
    job_instances.note_access()
    assert set_tags.call_args.args == (job_instances.account, ["i-0"], {tags.SSH_FROM: present})
    assert job_instances.restore_access() == ""


def test_limits_hold_when_the_clock_is_set_back_after_the_start_of_a_launch(make_instances: Any) -> None:
    ending = InstanceEnded(time=NOW - HOUR, id="i-10", name="0", ended=NOW - HOUR, reason=LIMIT)
    earlier = [LaunchStarted(time=NOW - 9 * HOUR, launch_id="first"), *granted(2, NOW - 8 * HOUR, place(), "0")]
    start = LaunchStarted(time=NOW, launch_id="second")
    job_instances = make_instances(1, *earlier, start, *granted(1, NOW - 2 * HOUR, place(), "0"), ending)
    assert job_instances.first_machine_time == NOW - 2 * HOUR
    assert job_instances.external_termination_reason()
    job_instances.journal.copy(LaunchStarted(time=NOW - 2 * HOUR, launch_id="third"))
    assert "no machines" in job_instances.external_termination_reason()


def test_launch_that_is_too_late_sends_no_request(make_instances: Any) -> None:
    """EC2 forgets the token of a request after a day, and then rents by a request that is sent again."""
    start = LaunchStarted(time=NOW - 2 * HOUR, launch_id="first")
    job_instances = make_instances(1, start, launch_request(1, place(), ["0"], NOW - 2 * HOUR))
    job_instances._ensure_stack = lambda account: SimpleNamespace(subnets=[])
    job_instances.fake_gang.open_requests = lambda: [{"number": 1}]
    finish = job_instances.fake_gang.finish_open_requests = Mock()
    with pytest.raises(NoMachines, match="no machines an hour after its launch; to continue"):
        job_instances.rent_all()
    with pytest.raises(EndedExternally, match="no machines an hour after its launch; to continue"):
        find_or_rent(job_instances)
    finish.assert_not_called()
    job_instances.fake_gang.list_instances = lambda: [SimpleNamespace(id="i-10", name="", is_billed=True)]
    job_instances.finish_open_requests()
    finish.assert_called_once_with()


def test_launch_is_in_time_although_the_virtual_machine_of_its_queue_was_paused(
    make_instances: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seconds since the boot do not count the pause. The supervisor starts later, with the right time."""
    job_instances = make_instances(1)
    monkeypatch.setattr(host, "steady_clock", host.SteadyClock(host.SteadyClock.wall_offset() - 9 * HOUR))
    job_instances.record_launch("first")
    monkeypatch.setattr(host, "steady_clock", host.SteadyClock())
    assert job_instances.has_launch("first") and not job_instances.is_too_late


@pytest.mark.parametrize(("jump_hours", "hours", "is_over"), [(5.0, 3.0, False), (-5.0, 1.0, True)])
@pytest.mark.parametrize("is_limit_of_price", [False, True])
def test_no_limit_follows_the_wall_clock(
    make_instances: Any,
    monkeypatch: pytest.MonkeyPatch,
    is_limit_of_price: bool,
    jump_hours: float,
    hours: float,
    is_over: bool,
) -> None:
    """The machines have run for two hours when the clock of this computer is set."""
    limits = {"max_hours": None, "rental": {"max_dollars": 10 * hours}} if is_limit_of_price else {"max_hours": hours}
    job_instances = make_instances(1, *granted(1, NOW - 2 * HOUR, place(10.0), "0"), **limits)
    monkeypatch.setattr(time, "time", lambda: NOW + jump_hours * HOUR)
    assert (job_instances.is_price_limit_reached if is_limit_of_price else job_instances.is_overdue) is is_over


def test_limits_keep_expected_traffic_back_and_shorten_with_more(make_instances: Any) -> None:
    rental = {"max_dollars": 40.0, "traffic": TrafficForecast(dollars_once=2.0, dollars_per_hour=1.0)}
    job_instances = make_instances(1, *granted(1, NOW - HOUR, place(10.0), "0"), max_hours=100.0, rental=rental)
    rate = 10 + OVERHEAD_DOLLARS_PER_HOUR + 1
    assert job_instances.dollars_per_hour == pytest.approx(rate)

    def affordable_dollars(written_gb: float) -> float:
        """Return the dollars of the hours until power-off, when the machines have written so much in an hour."""
        move_traffic(job_instances, NOW - HOUR, NOW - 1, written_gb)
        return hours_until_power_off(job_instances) * rate

    usual = affordable_dollars(0)
    assert usual == affordable_dollars(49) == pytest.approx(40 - 2, abs=0.2)  # the first minute is billed at once
    expected_until_now = 2 + (time.time() - (NOW - HOUR)) / HOUR
    assert affordable_dollars(100) == pytest.approx(usual - (6 - expected_until_now), abs=0.01)


def test_traffic_of_an_earlier_launch_is_no_excess_of_this_one(make_instances: Any) -> None:
    earlier_lines = [*granted(1, NOW - 9 * HOUR, place(10.0), "0"), gone("i-10", NOW - 8 * HOUR, SPOT)]
    launch = LaunchStarted(launch_id="later", time=NOW - HOUR)
    lines = [*earlier_lines, launch, *granted(2, NOW - HOUR, place(10.0), "0")]
    job_instances = make_instances(1, *lines, max_hours=100.0, rental={"max_dollars": 100.0})
    move_traffic(job_instances, NOW - 9 * HOUR, NOW - 8 * HOUR, 500)
    assert job_instances.earlier_cost == pytest.approx(10 + 30, abs=0.2)
    affordable = hours_until_power_off(job_instances) * (10 + OVERHEAD_DOLLARS_PER_HOUR)
    assert affordable == pytest.approx(60, abs=0.2), "counted once, as the cost of the earlier launch"


@pytest.mark.parametrize(("hours", "written_gb", "max_hours", "is_reached"), [
    (1.0, 0, 100.0, False),
    (3.9, 0, 100.0, True),  # ten dollars an hour, and a quarter of an hour for the end
    (3.5, 0, 3.0, False),  # the agents end at that limit by themselves, whatever the price
    (1.0, 400, 100.0, False),
    (1.0, 470, 100.0, True),
    (1.0, 470, None, True),
])  # fmt: skip
def test_price_limit_is_reached_while_the_rest_pays_for_the_end(
    make_instances: Any, hours: float, written_gb: int, max_hours: float | None, is_reached: bool
) -> None:
    start = time.time() - hours * HOUR
    job = make_instances(1, *granted(1, start, place(10.0), "0"), max_hours=max_hours, rental={"max_dollars": 40.0})
    move_traffic(job, start, start + 60, written_gb)
    assert job.is_price_limit_reached is is_reached
    assert job.total_dollars(time.time()) < 40.0, "it is reached before all is spent"


# --- spares ----------------------------------------------------------------------------------------------------------

ON_DEMAND = replace(place(25.0), market="on-demand")


@pytest.fixture
def with_spare(make_instances: Any) -> Any:
    """The instances of a job on two spot machines with a spare on demand; `.requests` are those to EC2."""
    rental = {"on_demand_spares": 1, "spare_places": (ON_DEMAND,)}
    job_instances = make_instances(2, *granted(1, NOW, place(), "0", "1"), rental=rental, spares=1)
    job_instances.requests = []

    def request_instances(where: Place, names: list[str], request: Any, instance_type: Any, group: str) -> list[Any]:
        job_instances.requests.append((where, tuple(names), group))
        return [SimpleNamespace(name=name) for name in names]

    job_instances.fake_gang.request_instances = request_instances
    job_instances._ensure_stack = lambda account: None
    job_instances._instance_request = lambda *places: places
    job_instances.instance_types = {place().type: None}
    return job_instances


def test_spare_is_rented_on_demand_beside_the_spot_machines(with_spare: Any) -> None:
    group = with_spare.last_full_request().placement_group
    assert group and with_spare.first_names == ("0", "1")
    assert [spare.name for spare in with_spare._rent_first_spares()] == ["2"]
    with_spare.rent_replacement("1")
    with_spare.rent_replacement("2")
    assert with_spare.requests == [(ON_DEMAND, ("2",), group), (place(), ("1",), group), (ON_DEMAND, ("2",), group)]
    assert with_spare.dollars_per_hour == pytest.approx(2 * 10 + 25 + 3 * OVERHEAD_DOLLARS_PER_HOUR)


def test_machine_of_a_request_whose_answer_was_lost_is_not_rented_twice(with_spare: Any) -> None:
    finished: list[str] = []
    with_spare.fake_gang.open_requests = lambda: [{"number": 2}]
    with_spare.fake_gang.finish_open_requests = lambda: finished.append("2")
    with_spare.fake_gang.list_instances = lambda: [SimpleNamespace(id="i-22", name="2", is_billed=True)] * len(finished)
    assert with_spare.rent_replacement("2").id == "i-22" and with_spare.requests == []
    with_spare.journal.write(InstancesReleased(ids=("i-22",), reason="its boot failed"))
    with_spare.rent_replacement("2")
    assert [names for _, names, _ in with_spare.requests] == [("2",)], "EC2 may still show the one that was terminated"


def test_replacement_waits_for_the_quota_to_which_ec2_still_counts_the_lost_machine(
    with_spare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MODULE, "QUOTA_POLL_SECONDS", 0.0)
    refusal = LaunchRefused("the quota allows 0", "MaxSpotInstanceCountExceeded", ErrorKind.QUOTA_EXCEEDED)
    with_spare.fake_gang.request_instances = Mock(side_effect=[refusal, refusal, [SimpleNamespace(name="1")]])
    with pytest.raises(LaunchRefused, match="the quota allows 0"):
        with_spare.rent_replacement("1")  # no machine has ended
    with_spare.journal.write(InstancesReleased(ids=("i-11",), reason="its boot failed"))
    assert with_spare.rent_replacement("1").name == "1" and with_spare.fake_gang.request_instances.call_count == 3


def test_spare_that_cannot_be_rented_does_not_end_the_launch(with_spare: Any, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: Any) -> None:
        raise CloudError("no machine: throttled")

    with_spare.fake_gang.request_instances = fail
    assert with_spare._rent_first_spares() == []
    assert "the job starts without its spares: no machine" in caplog.text


def test_one_machine_and_its_spare_are_no_move(make_instances: Any) -> None:
    """Both requests are for one machine each."""
    rental = {"on_demand_spares": 1, "spare_places": (ON_DEMAND,)}
    requests = [*granted(1, NOW, place(), "0"), *granted(2, NOW, ON_DEMAND, "1")]
    job_instances = make_instances(1, *requests, rental=rental, spares=1)
    assert not job_instances.has_moved and job_instances.current_place == place()
    moved = make_instances(1, *requests, *granted(3, NOW, place(), "0"), rental=rental, spares=1, name="job-2")
    assert moved.has_moved


# --- exchanged machines ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("later", "exchanged"), [
    ([], {"i-1"}),
    ([LaunchMoved(launch_id="second")], {"i-1"}),
    ([LaunchStarted(launch_id="third")], set()),  # a decision of the user, who has seen why the job ended
])  # fmt: skip
def test_exchanged_instances_are_those_of_this_launch(
    make_instances: Any, later: list[JournalEvent], exchanged: set[str]
) -> None:
    lines: list[JournalEvent] = [
        LaunchStarted(launch_id="first"),
        InstancesReleased(ids=("i-1",), reason="7 of 8 GPUs answer", is_exchange=True),
        InstancesReleased(ids=("i-2",), reason="a spot notice"),
    ]
    assert make_instances(2, *lines, *later).exchanged_ids == exchanged


# --- limits that `extend` has changed --------------------------------------------------------------------------------


def test_limits_are_read_from_the_run_folder(make_instances: Any) -> None:
    job_instances = make_instances(
        1, *granted(1, NOW - HOUR, place(10.0), "0"), max_hours=100.0, rental={"max_dollars": 20.0}
    )
    spec_path = job_instances.run_folder.spec_path
    content = json.loads(spec_path.read_text())
    for dollars in (20.0, 40.0):
        spec_path.write_text(json.dumps({**content, "cloud": {**content["cloud"], "max_dollars": dollars}}))
        limited = job_instances.with_machine_limits(job_instances.spec)
        # The tolerance covers the first minute, which is billed at once.
        expected_hours = pytest.approx(dollars / job_instances.dollars_per_hour, abs=0.02)
        assert limited.max_hours + limited.poweroff_grace / HOUR == expected_hours
        assert limited.limit_name == f"the limit of ${dollars:.2f} (--max-price-total)"
    for hours, new_dollars, max_hours in ((2.0, None, 2.0), (None, 1e6, 100.0)):
        job_instances.change_limits(hours, new_dollars)
        limited = job_instances.with_machine_limits(job_instances.spec)
        assert (limited.max_hours, limited.limit_name) == (max_hours, "")


def test_machines_get_the_region_in_which_they_are(make_instances: Any) -> None:
    western = place(region="us-west-2")
    job_instances = make_instances(1, *granted(1, NOW, western, "0"), rental={"places": (place(), western)})
    limited = job_instances.with_machine_limits(job_instances.spec)
    assert limited.rental_facts.environment == {"AWS_REGION": "us-west-2"}
    assert RentalSpec.from_json(limited.cloud).places == job_instances.rental_spec.places


def test_changed_expiry_is_in_the_journal_before_the_tag(make_instances: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """EC2 forgets a machine an hour after its end; then the journal alone says when it ended at the latest."""
    job_instances = make_instances(1, *granted(1, NOW, place(), "0"))
    job_instances.fake_gang.list_instances = lambda: [SimpleNamespace(id="i-10", name="0", is_billed=True)]
    monkeypatch.setattr(MODULE.instances, "set_tags", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        job_instances.set_expiry(NOW + 9 * HOUR)
    (event,) = job_instances.journal.events(ExpiryChanged)
    assert (event.ids, event.expires) == (("i-10",), NOW + 9 * HOUR)


# --- adoption --------------------------------------------------------------------------------------------------------


def test_job_without_its_claim_rents_and_ends_nothing(make_instances: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "read_claim", lambda account, uid: Claim(id="b" * 32, since=NOW, holder="ann on desk"))
    launched = make_instances(1, *granted(1, NOW, place(), "0"))
    adopted = make_instances(1, *granted(1, NOW, place(), "0"), JobAdopted(claim="a" * 32, dollars=2.0), name="job-2")
    for lost in (launched, adopted):
        actions = lost.list_machines, lost.rent_all, lost.finish_open_requests, partial(lost.rent_replacement, "0")
        for action in (*actions, partial(lost.terminate, ["i-10"], "left")):
            with pytest.raises(AdoptedElsewhere, match=r"computer \(ann on desk\), .* since 20.*cluster down job-"):
                action()
    assert make_instances(1, name="job-3").list_machines() == {}, "nothing was rented, so nothing can be adopted"
    monkeypatch.setattr(claims, "read_claim", lambda account, uid: Claim(id="a" * 32))
    assert adopted.list_machines() == {} and adopted.total_dollars(NOW) >= 2.0


def test_machine_that_was_lost_before_an_adoption_counts_until_then(
    make_instances: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EC2 shows it no more, and its end was not seen. The terms say what was spent before."""
    start, where = time.time() - 2 * HOUR, replace(place(), market="on-demand")
    old = make_instances(4, *granted(1, start, where, "0", "1", "2"), rental={"places": (where,)})
    adoption: Any = AwsAdoption.__new__(AwsAdoption)
    adoption.account, adoption.uid, adoption.rental_spec = old.account, "job-1-00000000", old.rental_spec
    adoption.terms = replace(old.terms(start - 10), late_spares=1)  # written before the request
    adoption.events = granted(1, start, where, "0", "1")
    adoption.instances, adoption.address, adoption._open_ssh = {}, "", Mock()
    monkeypatch.setattr(MODULE.instances, "set_tags", Mock())
    monkeypatch.setattr(claims, "write_claim", Mock())
    path = make_instances(1, name="job-2").run_folder.path
    adoption.take_over(path, "a launch ID")
    cost = JobInstances.job_cost(path, time.time())
    expected = 2 * (10 + DISK_DOLLARS_PER_HOUR + internet_dollars(Internet.PUBLIC, 1))
    assert cost.earlier_dollars == pytest.approx(expected, rel=0.01), "the late spare may not have been rented"
    assert cost.machine_dollars == pytest.approx(40, rel=0.01)


def test_machine_that_the_former_computer_rented_meanwhile_is_terminated(
    make_instances: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "read_claim", lambda account, uid: Claim(id="a" * 32))
    adopted = make_instances(1, *granted(1, NOW, place(), "0"), JobAdopted(claim="a" * 32, dollars=0.0))
    (request,) = adopted.granted_requests()
    own, stray = (
        SimpleNamespace(id=f"i-{token}", name="0", launch_token=token, is_billed=True)
        for token in (request.token, "another")
    )
    terminate = Mock()
    monkeypatch.setattr(MODULE.instances, "terminate", terminate)
    adopted.fake_gang.list_instances = lambda: [own, stray]
    assert adopted.list_machines() == {"0": own} and terminate.call_args.args[1] == ["i-another"]
