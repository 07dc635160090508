"""Gang launch: all machines of a job in one place, once, whatever EC2 answers.

F numbers refer to the list of faults that other tools have run into.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.aws_gang import START, ZONES, Crash, GangTestbed
from support.aws_journal import write_journal
from support.error_lines import error_line

from infra.aws import tags
from infra.aws.client import Account
from infra.aws.instances import gang as gang_module
from infra.aws.instances import instances
from infra.aws.instances.gang import Gang, LaunchRefused
from infra.aws.instances.instances import Instance
from infra.aws.instances.request import InstanceRequest
from infra.aws.journal_events import (
    ExpiryChanged,
    InstanceEnded,
    LaunchRequest,
    RequestGranted,
    RequestRefused,
    TerminationFinished,
)
from infra.aws.launch_request import Place
from infra.aws.market import billing
from infra.aws.market.instance_types import BUILTIN_TYPES
from infra.aws.market.reservations import find_reservation
from infra.errors import CloudError, Interrupted, NoCredentials, NoMachines

A, B, C = ZONES
G5_SPOT, G5_ON_DEMAND = "L-3819A6DF", "L-DB2E81BA"


def refusal(bed: GangTestbed, *places: Any, error: type[CloudError] = CloudError, **changes: Any) -> str:
    """Return the one-line error with which `acquire` fails."""
    return error_line(error, bed.acquire, *places, **changes)


def ids(machines: list[Any]) -> list[str]:
    return sorted(machine.id for machine in machines)


def live_instances(gang: Gang) -> list[Instance]:
    return list(instances.live_by_name(gang.list_instances()).values())


# --- order of places -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_launch_indexes", [True, False])
def test_acquire_uses_the_first_place_and_a_new_group(bed: GangTestbed, has_launch_indexes: bool) -> None:
    """EC2 may give all machines of a spot request the index 0. The order of their IDs names them then."""
    bed.sim.has_launch_indexes = has_launch_indexes
    machines = bed.acquire()
    rows = sorted(bed.live_instances(A), key=lambda row: (row.index * has_launch_indexes, row.id))
    assert [(machine.id, machine.name) for machine in machines] == [(row.id, row.tags[tags.MACHINE]) for row in rows]
    assert [machine.name for machine in machines] == ["0", "1", "2"]
    assert {machine.placement_group for machine in machines} == {"imgnet-job-3-9073e811-1"}
    assert bed.placement_group_names() == ["imgnet-job-3-9073e811-1"] and bed.clock.pauses == []
    assert bed.journal_kinds() == [LaunchRequest, RequestGranted] and bed.front.count("RunInstances") == 1


def test_refused_device_index_of_efa_only_interfaces_is_replaced_by_the_other(bed: GangTestbed) -> None:
    bed.sim.efa_only_device = 1
    machines = bed.acquire(bed.place(type="p4d.24xlarge"))
    assert len(machines) == 3 and bed.front.count("RunInstances") == 2 and bed.clock.pauses == []
    assert bed.journal_kinds() == [LaunchRequest, RequestRefused, LaunchRequest, RequestGranted]
    assert bed.placement_group_names() == ["imgnet-job-3-9073e811-2"]
    first, second = (request.parameters["NetworkInterfaces"] for request in bed.journal.events(LaunchRequest))
    assert {nic["DeviceIndex"] for nic in first} == {0} and [nic["DeviceIndex"] for nic in second] == [0, 1, 1, 1]
    bed.front.fault(action="RunInstances", code="InvalidParameterValue", status=400, times=1)
    assert "InvalidParameterValue" in refusal(bed, bed.place(type="p4d.24xlarge"), error=NoMachines)
    assert bed.front.count("RunInstances") == 3, "an error about something else is not repeated"


def test_f2_acquire_without_any_capacity_repeats_in_rounds(bed: GangTestbed) -> None:
    bed.sim.capacity |= {(A, "g5.xlarge"): 0, (B, "g5.xlarge"): 0}
    times: list[float] = []
    client = bed.account.ec2_no_retry
    bed.hook(client, "before-call.ec2.RunInstances", lambda **_: times.append(bed.sim.now()))

    def restore_capacity() -> None:
        bed.sim.capacity[B, "g5.xlarge"] = 3 * (len(times) >= 6)
        bed.clock.meanwhile.append(restore_capacity)

    bed.clock.meanwhile.append(restore_capacity)
    machines = bed.acquire()
    assert {machine.zone for machine in machines} == {B} and len(bed.live_instances()) == 3
    assert len(times) == bed.front.count("RunInstances") == 8, "EC2 answers 500 then, which is no transient error"
    assert bed.journal_kinds() == [LaunchRequest, RequestRefused] * 7 + [LaunchRequest, RequestGranted]
    cooldowns = [later - earlier for earlier, later in zip(times, times[2:], strict=False)]
    assert min(cooldowns) >= gang_module.CAPACITY_COOLDOWN_SECONDS
    assert bed.clock.pauses[:5] == [15, 30, 60, 120, 120] and bed.placement_group_names() == [f"imgnet-{bed.uid}-8"]


def test_search_ends_at_its_limit_although_the_computer_slept(bed: GangTestbed) -> None:
    """Nobody expects machines that are rented in the morning after a launch."""
    bed.sim.capacity |= {(A, "g5.xlarge"): 0, (B, "g5.xlarge"): 0}

    def sleep() -> None:
        bed.sim.advance(36_000)
        bed.sim.capacity |= {(A, "g5.xlarge"): 9, (B, "g5.xlarge"): 9}

    bed.clock.meanwhile.append(sleep)
    assert "EC2 cannot provide 3 machines" in refusal(bed)
    assert bed.front.count("RunInstances") == 2 and bed.live_instances() == []


def test_f4_acquire_without_quota_stops_and_names_the_command(bed: GangTestbed) -> None:
    bed.sim.quota_vcpu |= {G5_SPOT: 8, G5_ON_DEMAND: 0}
    message = refusal(bed, *[bed.place(zone, market) for market in ("spot", "on-demand") for zone in (A, B)])
    assert bed.front.count("RunInstances") == 2 and bed.clock.pauses == []
    assert "MaxSpotInstanceCountExceeded" in message and "VcpuLimitExceeded" in message
    for code in (G5_SPOT, G5_ON_DEMAND):
        assert f"--region us-east-1 --service-code ec2 --quota-code {code} --desired-value 12" in message
    assert message.endswith("see: imgnet-cluster offers; machines that need not be close together: --no-group")


@pytest.mark.parametrize(("action", "code", "count"), [
    ("RunInstances", "InvalidParameterCombination", 1),
    *(
        ("RunInstances", code, 1)
        for code in ("UnauthorizedOperation", "PendingVerification", "OptInRequired", "Blocked")
    ),
    ("CreatePlacementGroup", "UnauthorizedOperation", 0),
])  # fmt: skip
def test_f6_refusal_of_the_account_stops_at_once(bed: GangTestbed, action: str, code: str, count: int) -> None:
    free_plan = "The specified instance type is not eligible for Free Tier."
    bed.front.fault(action=action, code=code, message=free_plan, times=9)
    message = refusal(bed)
    assert bed.front.count("RunInstances") == count and bed.clock.pauses == []
    assert ("upgrade-account-plan" in message) == (code == "InvalidParameterCombination")
    assert count or f"ec2:{action}" in message


@pytest.mark.parametrize(
    ("fault", "message"),
    [({"code": "RequestLimitExceeded"}, "RequestLimitExceeded"), ({"drop": True}, "0 of 3 machines appeared")],
)
def test_request_without_effect_moves_to_the_next_place(bed: GangTestbed, fault: dict[str, Any], message: str) -> None:
    bed.front.fault(action="RunInstances", times=gang_module.RUN_ATTEMPTS, **fault)
    assert {machine.zone for machine in bed.acquire()} == {B} and len(bed.sim.instances()) == 3
    assert message in bed.log_lines[0] and bed.placement_group_names() == [f"imgnet-{bed.uid}-2"]


# --- lost responses---------------------------------------------------------------------------------------------------


NO_ROLE_YET = "Value (imgnet-machine) for parameter iamInstanceProfile.name is invalid. Invalid IAM Instance Profile"


@pytest.mark.parametrize(("fault", "pauses"), [
    pytest.param({"code": "RequestLimitExceeded", "times": 3}, [1, 2, 4], id="f7 throttled"),
    pytest.param({"code": "InvalidParameterValue", "message": NO_ROLE_YET, "times": 2}, [1, 2], id="new role"),
    pytest.param({"drop": True, "after": True}, [1], id="f8 lost response"),
    pytest.param({"code": "InternalError", "after": True}, [1], id="f8 error after the launch"),
    pytest.param({"code": "Unavailable", "after": True}, [1], id="f8 unavailable after the launch"),
])  # fmt: skip
def test_request_is_repeated_with_the_same_token(bed: GangTestbed, fault: dict[str, Any], pauses: list[int]) -> None:
    bed.front.fault(action="RunInstances", **fault)
    tokens: list[str] = []
    event = "before-call.ec2.RunInstances"
    bed.hook(bed.account.ec2_no_retry, event, lambda params, **_: tokens.append(params["body"]["ClientToken"]))
    machines = bed.acquire()
    assert bed.clock.pauses == pauses and len(tokens) == len(pauses) + 1 and len(set(tokens)) == 1
    assert ids(machines) == ids(bed.sim.instances()) and len(machines) == 3
    assert bed.journal_kinds() == [LaunchRequest, RequestGranted]


def test_f8_without_any_response_machines_are_found_by_tag(bed: GangTestbed) -> None:
    bed.front.fault(action="RunInstances", drop=True, after=True, times=99)
    bed.sim.visible_after = 70.0
    assert ids(bed.acquire()) == ids(bed.sim.instances()) and len(bed.live_instances(A)) == 3
    assert bed.front.count("RunInstances") == gang_module.RUN_ATTEMPTS and bed.journal_kinds()[-1] == RequestGranted


def test_list_instances_terminates_machines_that_appear_late(bed: GangTestbed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gang_module, "GANG_POLL_SECONDS", 10.0)
    bed.front.fault(action="RunInstances", drop=True, after=True, times=gang_module.RUN_ATTEMPTS)
    bed.sim.visible_after = 200.0
    machines = bed.acquire()
    assert {machine.zone for machine in machines} == {B} and len(bed.live_instances()) == 6
    assert ids(live_instances(bed.gang())) == ids(machines) == ids(bed.live_instances())
    bed.gang().list_instances()
    costs = billing.machine_costs(bed.journal, bed.sim.now())
    assert sorted(cost.id for cost in costs if not cost.ended) == ids(machines), "the others were billed, too"
    assert sorted(cost.name for cost in costs) == ["0", "0", "1", "1", "2", "2"]


@pytest.mark.parametrize("is_launched", [False, True])
def test_request_that_ec2_has_forgotten_is_not_sent_again(bed: GangTestbed, is_launched: bool) -> None:
    """EC2 would launch machines by it, although others may have their names."""
    acquire_and_crash(bed, event="response-received" if is_launched else "before-send")
    bed.sim.advance(25 * 3600)
    bed.sim.launches_by_token.clear()
    assert len(bed.gang().finish_open_requests()) == len(bed.sim.instances()) == 3 * is_launched
    assert bed.front.count("RunInstances") == is_launched and bed.gang().open_requests() == []


def test_idempotent_mismatch_recovers_machines_by_tag(bed: GangTestbed) -> None:
    first = bed.acquire()
    (request,) = bed.journal.events(LaunchRequest)
    request.parameters["UserData"] += " "
    write_journal(bed.journal.path, request)  # the request was edited, its outcome forgotten
    assert ids(bed.gang().finish_open_requests()) == ids(first) == ids(bed.live_instances())
    write_journal(bed.journal.path, request)
    instances.terminate(bed.account, [first[0].id])
    assert bed.gang().finish_open_requests() == [] and bed.live_instances() == []
    assert "IdempotentParameterMismatch" in bed.log_lines[-1] and "2 of 3 machines appeared" in bed.log_lines[-1]


# --- launched machines------------------------------------------------------------------------------------------------


def test_f10_acquire_terminates_all_when_the_account_ends_one_early(bed: GangTestbed) -> None:
    bed.sim.boot_seconds = 20.0
    bed.clock.meanwhile.append(lambda: bed.sim.kill(bed.live_instances()[1].id, "Client.VolumeLimitExceeded"))
    message = refusal(bed, error=LaunchRefused)
    assert "ended before it was running: Client.VolumeLimitExceeded" in message
    assert bed.front.count("RunInstances") == 1 and bed.live_instances() == []


def test_acquire_gives_up_machines_that_never_start(bed: GangTestbed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gang_module, "START_TIMEOUT_SECONDS", 20.0)
    bed.sim.boot_seconds = 1e6
    assert "did not start in 20 s" in refusal(bed, bed.place(A), seconds=0)
    assert bed.live_instances() == [] and sum(bed.clock.pauses) < 60


def test_acquire_terminates_fewer_machines_than_requested(bed: GangTestbed) -> None:
    bed.change_instances(lambda machine: machine["AmiLaunchIndex"] != 1, "RunInstances")
    assert "EC2 launched 2 of 3 machines" in refusal(bed, bed.place(A), seconds=0)
    bed.remove_faults()
    bed.gang().list_instances()
    assert bed.live_instances() == [], "also one that was missing in the response"
    assert bed.journal_kinds()[:2] == [LaunchRequest, RequestRefused]


def test_acquire_with_an_unknown_key_pair_stops_after_retries(bed: GangTestbed) -> None:
    bed.stack = replace(bed.stack, key_name="nobody")
    assert "InvalidKeyPair.NotFound" in refusal(bed, error=LaunchRefused)
    assert bed.front.count("RunInstances") == gang_module.RUN_ATTEMPTS and sum(bed.clock.pauses) < 60


@pytest.mark.parametrize("code", ["Unsupported", "InsufficientFreeAddressesInSubnet", "SomethingNew"])
def test_place_that_is_refused_is_never_asked_again_but_the_others_are(bed: GangTestbed, code: str) -> None:
    bed.sim.capacity[B, "g5.xlarge"] = 0
    bed.front.fault(action="RunInstances", code=code)
    bed.clock.meanwhile = [lambda: None] * 5 + [lambda: bed.sim.capacity.update({(B, "g5.xlarge"): 3})]
    assert {machine.zone for machine in bed.acquire()} == {B}
    assert [request.place.zone for request in bed.journal.events(LaunchRequest)].count(A) == 1


def test_type_without_an_image_is_skipped(bed: GangTestbed) -> None:
    """A V100 between two types whose GPUs AWS's images support."""

    def build_request(place: Place) -> InstanceRequest:
        if place.type == "p3dn.24xlarge":
            raise CloudError("AWS's images do not support sm_70")
        return bed.instance_request(place)

    places = [bed.place(A, type=name) for name in ("p3dn.24xlarge", "g5.xlarge")]
    machines = bed.gang().acquire(places, ["0"], build_request, dict(BUILTIN_TYPES), 0.0)
    assert [machine.type for machine in machines] == ["g5.xlarge"]
    with pytest.raises(NoMachines, match=r"p3dn.24xlarge spot in us-east-1a: AWS's images do not support sm_70"):
        bed.gang().acquire(places[:1], ["0"], build_request, dict(BUILTIN_TYPES), 1200.0)


def test_acquire_refuses_a_foreign_placement_group(bed: GangTestbed) -> None:
    bed.account.ec2.create_placement_group(GroupName=f"imgnet-{bed.uid}-1", Strategy="cluster")
    bed.foreign_ids.append(f"imgnet-{bed.uid}-1")
    assert "was not created by imgnet-cluster" in refusal(bed) and bed.front.count("RunInstances") == 0
    bed.end_job()
    assert bed.placement_group_names() == [f"imgnet-{bed.uid}-1"]


# --- crashes ---------------------------------------------------------------------------------------------------------


def test_expired_credentials_leave_a_request_to_finish_later(bed: GangTestbed) -> None:
    bed.sim.boot_seconds = 5.0
    bed.front.fault(action="RunInstances", code="ExpiredToken", after=True)
    assert "aws sts get-caller-identity" in refusal(bed, error=NoCredentials)
    bed.front.fault(action="DescribeInstances", code="ExpiredToken", skip=1)
    with pytest.raises(NoCredentials):
        bed.find_or_acquire()
    assert ids(bed.find_or_acquire()) == ids(bed.sim.instances()) and len(bed.live_instances()) == 3


def test_stop_before_a_request_leaves_none_to_wait_for(bed: GangTestbed, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a job waits a minute for machines of a request without an answer, so an unsent one is not recorded."""

    def stop(_: float) -> None:
        raise Interrupted("stopped by the user")

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(bed.clock, "sleep", stop)
        bed.acquire()
    assert bed.front.count("RunInstances") == 0 and bed.gang().open_requests() == []
    assert bed.gang().terminate_job() == [] and bed.clock.pauses == []


def crash_at(bed: GangTestbed, event: str, act: Callable[[], Any], account: Account | None = None) -> None:
    """Run `act`, killed at an event of RunInstances."""

    def crash(**_: Any) -> None:
        raise Crash

    bed.hook((account or bed.account).ec2_no_retry, f"{event}.ec2.RunInstances", crash)
    with pytest.raises(Crash):
        act()
    bed.remove_faults()


def acquire_and_crash(
    bed: GangTestbed, *places: Place, account: Account | None = None, event: str = "response-received"
) -> None:
    """Request three machines, killed when EC2 has launched them, before the response is read; or at another event."""
    names, places = ["0", "1", "2"], places or (bed.place(A),)
    gang = bed.gang(account)
    crash_at(bed, event, lambda: gang.acquire(places, names, bed.instance_request, dict(BUILTIN_TYPES), 1), account)


def start_next_job(bed: GangTestbed) -> None:
    bed.jobs += 1
    bed.uid, bed.sim.forget_seconds = f"job-{bed.jobs}-9073e811", 30.0
    bed.sim.capacity[A, "g5.xlarge"] = 2
    bed.sim.visible_after, bed.sim.boot_seconds = 1.0, 3.0
    bed.journal.path.unlink(missing_ok=True)
    bed.log_lines.clear()


@pytest.mark.rehearsal
def test_acquire_killed_at_any_step_and_restarted_gives_one_gang(bed: GangTestbed) -> None:
    start_next_job(bed)
    steps = bed.count_steps(bed.acquire, None)
    assert steps >= 20
    bed.end_job()
    for at in range(1, steps + 1):
        start_next_job(bed)
        bed.count_steps(bed.acquire, at)
        machines = bed.find_or_acquire()
        assert ids(machines) == ids(bed.live_instances()) and len(machines) == 3, at
        assert sorted(bed.journal.granted_ids) == ids(machines), at
        assert {machine.zone for machine in machines} == {B} and len(set(bed.placement_group_names())) == 1, at
        bed.end_job()


@pytest.mark.rehearsal
def test_terminate_job_killed_at_any_step_and_repeated_leaves_none(bed: GangTestbed) -> None:
    bed.sim.stop_seconds = 3.0

    def kill_and_repeat(at: int | None) -> int:
        start_next_job(bed)
        bed.sim.visible_after = bed.sim.boot_seconds = 0.0
        bed.acquire(bed.place(B), n=2)
        steps = bed.count_steps(lambda: bed.gang().terminate_job(), at)
        bed.end_job()
        assert bed.journal_kinds()[-1] == TerminationFinished, at
        return steps

    steps = kill_and_repeat(None)
    assert steps >= 10
    for at in range(1, steps + 1):
        kill_and_repeat(at)


def test_requests_of_another_region_are_finished_there(bed: GangTestbed) -> None:
    west = bed.account.in_region("us-west-2")
    bed.stack = bed.create_stack("us-west-2", west.ec2, ["us-west-2a"])
    acquire_and_crash(bed, bed.place("us-west-2a"), account=west)
    assert bed.gang().finish_open_requests() == [] and bed.gang().terminate_job() == [], "this region has nothing"
    machines = bed.gang(account=west).finish_open_requests()
    assert ids(machines) == ids(bed.sim.instances("us-west-2")) and len(machines) == 3
    assert {machine.region for machine in machines} == {"us-west-2"} and bed.sim.instances() == []
    assert bed.gang(account=west).terminate_job() == [] and bed.sim.leaks() == []


def no_space(_: object) -> None:
    raise OSError(28, "No space left on device")


def test_acquire_on_a_full_disk_sends_nothing(bed: GangTestbed, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr("os.fsync", no_space)
        bed.acquire()
    assert bed.front.count("RunInstances") == bed.front.count("CreatePlacementGroup") == 0


# --- termination -----------------------------------------------------------------------------------------------------


def test_terminate_job_works_on_a_full_disk(bed: GangTestbed, monkeypatch: pytest.MonkeyPatch) -> None:
    bed.acquire()
    with monkeypatch.context() as patch:
        patch.setattr(bed.journal, "write", no_space)
        assert bed.gang().terminate_job() == [] and bed.live_instances() == []


@pytest.mark.parametrize("extended_by", [0, 36_000])
def test_forgotten_machines_ended_at_their_limit_at_the_latest(bed: GangTestbed, extended_by: float) -> None:
    machines = bed.acquire()
    expires = (tags.parse_time(machines[0].tags[tags.EXPIRES]) or 0) + extended_by
    if extended_by:
        bed.journal.write(ExpiryChanged(ids=tuple(ids(machines)), expires=expires))
    for machine in machines:
        bed.sim.power_off(machine.id)
    bed.sim.advance(90_000)
    assert bed.gang().terminate_job() == []
    endings = bed.journal.events(InstanceEnded)
    assert sorted(event.id for event in endings) == ids(machines)
    assert {event.ended for event in endings} == {expires}


def test_machine_that_ended_while_this_computer_slept_is_billed_no_longer(bed: GangTestbed) -> None:
    """A machine younger than an hour that EC2 does not show yet has not ended."""
    bed.sim.forget_seconds = 10.0
    lost, *_ = bed.acquire()
    bed.sim.kill(lost.id, "Server.SpotInstanceTermination")
    for seconds, ends in ((1000, []), (3000, [START + 4000]), (9000, [START + 4000])):
        bed.sim.advance(seconds)
        bed.gang().list_instances()
        assert [event.ended for event in bed.journal.events(InstanceEnded)] == ends
    costs = {cost.id: cost.seconds for cost in billing.machine_costs(bed.journal, bed.sim.now())}
    assert costs[lost.id] == 4000 and sorted(costs.values()) == [4000, 13_000, 13_000]


@pytest.mark.parametrize("is_sent_again", [False, True])
def test_terminate_job_waits_for_invisible_machines(bed: GangTestbed, is_sent_again: bool) -> None:
    """A later supervisor may have sent the request again, long after the first one recorded it."""
    bed.sim.visible_after = 40.0
    acquire_and_crash(bed, event="before-send" if is_sent_again else "response-received")
    if is_sent_again:
        bed.sim.advance(1000)
        crash_at(bed, "response-received", bed.gang().finish_open_requests)
    assert bed.gang().terminate_job() == [] and bed.live_instances() == [] and bed.sim.leaks() == []
    assert sum(bed.clock.pauses) >= 40


# --- reserved machines -----------------------------------------------------------------------------------------------


def reserve(bed: GangTestbed, count: int, **details: Any) -> Place:
    id = bed.sim.reserve("g5.xlarge", A, count, **details)
    id = details.get("groups", [id])[0]
    return find_reservation(bed.account, ["us-east-1"], id, bed.sim.now()).place(0.0)


def test_machines_of_a_capacity_block_are_replaced_when_ec2_has_cleaned_up_the_lost_ones(bed: GangTestbed) -> None:
    bed.sim.capacity[A, "g5.xlarge"] = 0  # beside the block
    bed.sim.stop_seconds = 300
    place = reserve(bed, 3, is_block=True, end=bed.sim.now() + 24 * 3600)
    assert place.closing_time == bed.sim.now() + 23.5 * 3600
    machines = bed.acquire(place, use_placement_group=False)
    assert {machine.market for machine in machines} == {"capacity-block"} and len(machines) == 3
    assert bed.placement_group_names() == [] and bed.journal_kinds() == [LaunchRequest, RequestGranted]
    assert bed.journal.events(LaunchRequest)[0].place == place
    assert bed.sim.bill()["instances"] == {machine.id: 0.0 for machine in machines}
    instances.terminate(bed.account, ids(machines))
    replacements = bed.acquire(place, use_placement_group=False)
    assert len(replacements) == 3 and not set(ids(machines)) & set(ids(replacements))
    assert sum(bed.clock.pauses) >= 300 and "ReservationCapacityExceeded" in " ".join(bed.log_lines)
    bed.sim.stop_seconds = 0


def test_acquire_joins_the_placement_group_of_a_reservation_and_leaves_it(bed: GangTestbed) -> None:
    bed.account.ec2.create_placement_group(GroupName="theirs", Strategy="cluster")
    bed.foreign_ids.append("theirs")
    machines = bed.acquire(reserve(bed, 3, placement_group="theirs"), use_placement_group=False)
    assert {machine.placement_group for machine in machines} == {"theirs"}
    bed.gang().terminate_job()
    assert bed.placement_group_names() == ["theirs"]
    bed.account.ec2.delete_placement_group(GroupName="theirs")


def test_machines_of_a_group_of_reservations_are_never_bought_beside_it(bed: GangTestbed) -> None:
    """EC2 would launch the machines that the group lacks on demand, unless the request forbids it."""
    place = reserve(bed, 2, groups=["arn:aws:resource-groups:us-east-1:123456789012:group/mine"])
    assert "ReservationCapacityExceeded" in refusal(bed, place, use_placement_group=False, error=NoMachines)
    assert bed.live_instances() == []
    assert len(bed.acquire(place, n=2, use_placement_group=False)) == 2
