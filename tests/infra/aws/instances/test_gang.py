"""Renting the machines of a job: all of them, once, in one place, whatever EC2 answers. F numbers: the list of faults
that other tools stumbled over.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.aws_gang import ZONES, Bed, Crash, bed
from support.simcloud.spot_market import offered

from infra.aws import tags
from infra.aws.errors import CloudError, ErrorKind, Interrupted, NoCredentials
from infra.aws.instances import gang as gang_module
from infra.aws.instances import instances
from infra.aws.instances.gang import LaunchRefused
from infra.aws.instances.instances import Instance
from infra.aws.market.instance_types import BUILTIN_TYPES

__all__ = ["bed"]

A, B, C = ZONES
G5_SPOT, G5_ON_DEMAND = "L-3819A6DF", "L-DB2E81BA"


def refusal(bed: Bed, *places: Any, error: type[CloudError] = CloudError, **words: Any) -> str:
    """The one line with which machines are refused."""
    with pytest.raises(error) as caught:
        bed.acquire(*places, **words)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def ids(found: list[Any]) -> list[str]:
    return sorted(one.id for one in found)


# --- from place to place ---------------------------------------------------------------------------------------------


def test_all_machines_come_from_the_first_place_in_a_group_of_their_own(bed: Bed) -> None:
    found = bed.acquire()
    shown = {one.id: one for one in bed.alive(A)}
    assert [one.name for one in found] == ["0", "1", "2"] and [shown[one.id].index for one in found] == [0, 1, 2]
    assert {one.placement_group for one in found} == {"imgnet-job-3-9073e811-1"} == set(bed.groups())
    assert bed.what() == ["ask", "granted"] and bed.front.count("RunInstances") == 1
    assert bed.clock.pauses == []


def test_f1_without_capacity_in_a_zone_the_next_is_asked_with_another_group_and_token(bed: Bed) -> None:
    bed.sim.capacity[A, "g5.xlarge"] = 0
    tokens = bed.tokens()
    found = bed.acquire()
    assert {one.zone for one in found} == {B} and len(bed.alive()) == 3
    assert bed.groups() == [f"imgnet-{bed.uid}-2"] and {one.placement_group for one in found} == set(bed.groups())
    assert bed.what() == ["ask", "refused", "ask", "granted"] and len(set(tokens)) == 2
    assert bed.said == [
        f"{A}: InsufficientInstanceCapacity: We currently do not have sufficient g5.xlarge capacity in the Availability"
        f" Zone you requested ({A}). Our system will be working on provisioning additional capacity."
    ], "EC2 says 500 then, which botocore must not take for a hiccup"


def test_f2_without_capacity_anywhere_it_is_asked_again_in_rounds_and_each_place_not_too_often(bed: Bed) -> None:
    bed.sim.capacity |= {(A, "g5.xlarge"): 0, (B, "g5.xlarge"): 0}
    begin = bed.sim.now()
    asked: list[float] = []
    bed.hook(bed.account.ec2_no_retry, "before-call.ec2.RunInstances", lambda **_: asked.append(bed.sim.now() - begin))

    def perhaps() -> None:
        if len(asked) == 6:
            bed.sim.capacity[B, "g5.xlarge"] = 3
        bed.clock.meanwhile.append(perhaps)

    bed.clock.meanwhile.append(perhaps)
    found = bed.acquire()
    assert {one.zone for one in found} == {B} and len(bed.alive()) == 3 and len(asked) == 8
    assert all(
        later - earlier >= gang_module.CAPACITY_COOLDOWN_SECONDS
        for earlier, later in zip(asked, asked[2:], strict=False)
    )
    assert bed.clock.pauses[:5] == [15, 30, 60, 120, 120] and bed.groups() == [f"imgnet-{bed.uid}-8"]


def test_a_place_without_capacity_is_let_alone_for_a_while_also_when_its_other_market_was_asked_since(bed: Bed) -> None:
    bed.sim.capacity[A, "g5.xlarge"] = 0
    refusal(bed, bed.place(A, "spot"), bed.place(A, "on-demand"), seconds=100)
    assert bed.front.count("RunInstances") == 2 and bed.clock.pauses == [15, 30]
    assert "a moment ago" in refusal(bed, bed.place(A, "spot"), seconds=0)
    assert bed.front.count("RunInstances") == 2


def test_when_nobody_has_machines_in_time_one_line_says_what_each_place_said(bed: Bed) -> None:
    bed.sim.capacity |= {(A, "g5.xlarge"): 0, (B, "g5.xlarge"): 2}
    said = refusal(bed, seconds=0)
    assert f"g5.xlarge spot in {A}: InsufficientInstanceCapacity" in said and f"in {B}: Insuff" in said
    assert said.startswith("EC2 has no 3 machines for this job") and said.endswith("see imgnet-cluster offers")
    assert bed.alive() == [] and bed.groups() == []


def test_f3_a_zone_with_some_of_the_machines_starts_none(bed: Bed) -> None:
    bed.sim.capacity[A, "g5.xlarge"] = 2
    assert {one.zone for one in bed.acquire()} == {B}
    assert not [one for one in bed.sim.instances() if one.zone == A] and bed.sim.capacity[A, "g5.xlarge"] == 2


def test_fewer_machines_than_asked_for_are_ended(bed: Bed) -> None:
    bed.doctor(lambda one: one["AmiLaunchIndex"] != 1, "RunInstances")
    with pytest.raises(CloudError, match="2 of 3 machines came"):
        bed.acquire(bed.place(A), seconds=0)
    bed.unhook()
    bed.gang().list_instances()
    assert bed.alive() == [], "not even the one that EC2 did not tell of"


def test_f4_a_quota_stops_its_places_and_no_others(bed: Bed) -> None:
    bed.sim.quota_vcpu[G5_SPOT] = 8
    found = bed.acquire(bed.place(A), bed.place(B), bed.place(C), bed.place(A, "on-demand"))
    assert {one.market for one in found} == {"on-demand"} and bed.front.count("RunInstances") == 2
    assert len(bed.said) == 1 and "MaxSpotInstanceCountExceeded" in bed.said[0]


def test_f4_without_any_quota_it_stops_at_once_with_the_command_that_asks_for_more(bed: Bed) -> None:
    bed.sim.quota_vcpu |= {G5_SPOT: 8, G5_ON_DEMAND: 0}
    said = refusal(bed, *[bed.place(zone, market) for market in ("spot", "on-demand") for zone in (A, B)])
    assert bed.front.count("RunInstances") == 2 and bed.clock.pauses == []
    assert "MaxSpotInstanceCountExceeded" in said and "VcpuLimitExceeded" in said
    for code in (G5_SPOT, G5_ON_DEMAND):
        assert f"--region us-east-1 --service-code ec2 --quota-code {code} --desired-value 12" in said


def test_f6_what_is_not_permitted_stops_at_once_and_is_named(bed: Bed) -> None:
    bed.front.fault(action="RunInstances", code="UnauthorizedOperation", message="You are not authorized", times=9)
    said = refusal(bed, error=LaunchRefused)
    assert "ec2:RunInstances" in said and "not permitted" in said and "check --iam" in said
    assert bed.front.count("RunInstances") == 1 and bed.groups() == [] and bed.clock.pauses == []


def test_f6_without_leave_to_make_a_group_no_machine_is_asked_for(bed: Bed) -> None:
    bed.front.fault(action="CreatePlacementGroup", code="UnauthorizedOperation", times=9)
    assert "ec2:CreatePlacementGroup" in refusal(bed)
    assert bed.front.count("RunInstances") == 0 and bed.front.count("CreatePlacementGroup") == 1


def test_f7_when_told_to_slow_down_the_same_is_asked_again_with_growing_pauses(bed: Bed) -> None:
    bed.front.fault(action="RunInstances", code="RequestLimitExceeded", times=3)
    tokens = bed.tokens()
    assert len(bed.acquire()) == 3 == len(bed.alive(A))
    assert len(tokens) == 4 and len(set(tokens)) == 1 and bed.clock.pauses == [1, 2, 4]
    assert bed.what() == ["ask", "unanswered", "unanswered", "unanswered", "granted"]


def test_f7_when_told_so_for_ever_the_next_place_is_asked_and_nobody_searches_for_machines(bed: Bed) -> None:
    bed.front.fault(action="RunInstances", code="RequestLimitExceeded", times=gang_module.RUN_ATTEMPTS)
    assert {one.zone for one in bed.acquire()} == {B}
    assert sum(bed.clock.pauses) < 60 and "RequestLimitExceeded" in bed.said[0] and "came" not in bed.said[0]


# --- lost answers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [{"drop": True}, {"code": "InternalError"}, {"code": "Unavailable"}])
def test_f8_after_a_lost_answer_the_same_is_asked_again_and_brings_the_same_machines(
    bed: Bed, fault: dict[str, Any]
) -> None:
    bed.front.fault(action="RunInstances", after=True, **fault)
    tokens = bed.tokens()
    found = bed.acquire()
    assert len(tokens) == 2 and len(set(tokens)) == 1
    assert ids(found) == ids(bed.sim.instances()) and len(found) == 3


def test_f8_when_nobody_ever_answers_the_machines_are_found_by_their_tag(bed: Bed) -> None:
    bed.front.fault(action="RunInstances", drop=True, after=True, times=99)
    bed.sim.visible_after = 70.0
    assert ids(bed.acquire()) == ids(bed.sim.instances()) and len(bed.alive(A)) == 3
    assert bed.front.count("RunInstances") == gang_module.RUN_ATTEMPTS and bed.what()[-1] == "granted"


def test_f8_when_nothing_was_heard_either_way_the_next_place_is_asked(bed: Bed) -> None:
    bed.front.fault(action="RunInstances", drop=True, times=gang_module.RUN_ATTEMPTS)
    assert {one.zone for one in bed.acquire()} == {B} and len(bed.sim.instances()) == 3
    assert "0 of 3 machines came" in bed.said[0] and bed.groups() == [f"imgnet-{bed.uid}-2"]


def test_machines_that_appear_after_their_asking_was_given_up_are_ended(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gang_module, "GANG_POLL_SECONDS", 10.0)
    bed.front.fault(action="RunInstances", drop=True, after=True, times=gang_module.RUN_ATTEMPTS)
    bed.sim.visible_after = 200.0
    found = bed.acquire()
    assert {one.zone for one in found} == {B} and len(bed.alive()) == 6
    assert ids(list(instances.live_by_name(bed.gang().list_instances()).values())) == ids(found) == ids(bed.alive())


def test_f9_machines_that_are_not_seen_yet_are_waited_for(bed: Bed) -> None:
    bed.sim.visible_after = 30.0
    found = bed.acquire()
    assert len(found) == 3 == len(bed.sim.instances()) and sum(bed.clock.pauses) >= 30
    assert bed.what() == ["ask", "granted"]


def test_answers_about_the_wrong_request_take_what_is_there(bed: Bed) -> None:
    first = bed.acquire()
    (line,) = bed.journal.lines("ask")
    line["request"]["UserData"] += " "
    bed.journal.path.write_text(json.dumps(line) + "\n")  # edited, and the answer forgotten
    assert ids(bed.gang().finish_open_requests()) == ids(first) == ids(bed.alive())
    bed.journal.path.write_text(json.dumps(line) + "\n")
    instances.terminate(bed.account, [first[0].id])
    assert bed.gang().finish_open_requests() == [] and bed.alive() == []
    assert "IdempotentParameterMismatch" in bed.said[-1] and "2 of 3 machines came and were ended" in bed.said[-1]


# --- what came -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", ["Server.SpotInstanceTermination", "Client.VolumeLimitExceeded"])
def test_f10_when_one_ends_before_it_runs_all_are_ended_and_the_next_place_is_asked(bed: Bed, reason: str) -> None:
    bed.sim.boot_seconds = 20.0
    bed.clock.meanwhile.append(lambda: bed.sim.kill(bed.alive()[1].id, reason))
    found = bed.acquire()
    assert {one.zone for one in found} == {B} and ids(bed.alive()) == ids(found)
    assert reason in bed.said[0] and "ended before it began" in bed.said[0]


def test_machines_that_never_start_are_given_up(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gang_module, "START_TIMEOUT_SECONDS", 20.0)
    bed.sim.boot_seconds = 1e6
    assert "did not start in 20 s" in refusal(bed, bed.place(A), seconds=0)
    assert bed.alive() == [] and sum(bed.clock.pauses) < 60


def wrong_zone(one: dict[str, Any]) -> None:
    one["Placement"]["AvailabilityZone"] = B


def no_group(one: dict[str, Any]) -> None:
    one["Placement"]["GroupName"] = ""


def no_profile(one: dict[str, Any]) -> None:
    if one["AmiLaunchIndex"]:  # as moto would: on the first alone
        one.pop("IamInstanceProfile", None)


def same_address(one: dict[str, Any]) -> None:
    if one.get("PrivateIpAddress"):
        one["PrivateIpAddress"] = "127.1.0.2"


@pytest.mark.parametrize(("change", "said"), [
    (wrong_zone, f"in other zones than {A}"), (no_group, "outside their placement group"),
    (no_profile, "without their role"), (same_address, "with the same address"),
])  # fmt: skip
def test_machines_that_are_not_as_asked_for_are_ended(bed: Bed, change: Callable[[Any], None], said: str) -> None:
    bed.doctor(change)
    assert said in refusal(bed, bed.place(A), seconds=0)
    assert bed.alive() == [] and bed.what() == ["ask", "refused"]


def test_f13_all_interfaces_of_a_machine_with_many_are_in_the_subnet_of_its_zone(bed: Bed) -> None:
    kind = "p4d.24xlarge"
    zone, other = [one for one in offered("us-east-1", kind) if one in ZONES][:2]
    bed.sim.capacity[zone, kind] = 1
    found = bed.acquire(bed.place(zone, type=kind), bed.place(other, type=kind), n=2)
    said = bed.account.ec2.describe_instances(InstanceIds=ids(found))["Reservations"][0]["Instances"]
    for one in said:
        nics = one["NetworkInterfaces"]
        assert [nic["Attachment"]["NetworkCardIndex"] for nic in nics] == [0, 1, 2, 3]
        assert {nic["SubnetId"] for nic in nics} == {bed.stack.subnets[other]}
        assert {nic["InterfaceType"] for nic in nics} == {"efa"} and not one.get("PublicIpAddress")
    assert {one.primary_interface_id for one in found} == {
        one["NetworkInterfaces"][0]["NetworkInterfaceId"] for one in said
    }


def test_f14_an_image_of_another_region_stops_at_once(bed: Bed) -> None:
    image = replace(bed.want(bed.place()).image, id=bed.image("us-west-2"))
    said = refusal(bed, error=LaunchRefused, image=image)
    assert "InvalidAMIID.NotFound" in said and bed.front.count("RunInstances") == 1 and bed.groups() == []


def test_a_key_that_is_never_seen_stops_it_after_a_while(bed: Bed) -> None:
    bed.stack = replace(bed.stack, key_name="nobody")
    said = refusal(bed, error=LaunchRefused)
    assert "InvalidKeyPair.NotFound" in said and bed.front.count("RunInstances") == gang_module.RUN_ATTEMPTS
    assert sum(bed.clock.pauses) < 60


def test_a_role_that_was_just_made_is_waited_for(bed: Bed) -> None:
    message = "Value (imgnet-machine) for parameter iamInstanceProfile.name is invalid. Invalid IAM Instance Profile"
    bed.front.fault(action="RunInstances", code="InvalidParameterValue", message=message, times=2)
    assert len(bed.acquire()) == 3 and bed.clock.pauses == [1, 2]


def test_an_address_range_that_is_used_up_sends_it_to_the_next_zone(bed: Bed) -> None:
    bed.front.fault(action="RunInstances", code="InsufficientFreeAddressesInSubnet")
    assert {one.zone for one in bed.acquire()} == {B}


def test_a_replacement_joins_the_group_of_the_others(bed: Bed) -> None:
    first = bed.acquire()
    instances.terminate(bed.account, [first[1].id])
    place = bed.place(A)
    (other,) = bed.gang().request_instances(
        place, ["1"], bed.want(place), BUILTIN_TYPES["g5.xlarge"], first[0].placement_group
    )
    assert (
        other.name == "1"
        and other.placement_group == first[0].placement_group
        and bed.groups() == [first[0].placement_group]
    )
    assert ids(list(instances.live_by_name(bed.gang().list_instances()).values())) == ids([first[0], first[2], other])
    (gone,) = bed.journal.lines("gone")
    assert gone["id"] == first[1].id and gone["why"] == "Client.UserInitiatedShutdown"


def test_a_group_of_somebody_else_with_the_name_of_ours_is_not_used(bed: Bed) -> None:
    bed.account.ec2.create_placement_group(GroupName=f"imgnet-{bed.uid}-1", Strategy="cluster")
    bed.others.append(f"imgnet-{bed.uid}-1")
    assert "is not ours" in refusal(bed) and bed.front.count("RunInstances") == 0
    bed.nothing_left()
    assert bed.groups() == [f"imgnet-{bed.uid}-1"]


# --- crashes ---------------------------------------------------------------------------------------------------------


def test_credentials_that_expire_in_between_leave_an_asking_that_is_finished_later(bed: Bed) -> None:
    bed.sim.boot_seconds = 5.0
    bed.front.fault(action="RunInstances", code="ExpiredToken", after=True)
    assert "aws sts get-caller-identity" in refusal(bed, error=NoCredentials)
    bed.front.fault(action="DescribeInstances", code="ExpiredToken", skip=1)
    with pytest.raises(NoCredentials):
        bed.gather()
    assert ids(bed.gather()) == ids(bed.sim.instances()) and len(bed.alive()) == 3


def test_a_crash_after_an_asking_that_was_heard_and_then_no_answer_for_ever_finds_the_machines(bed: Bed) -> None:
    bed.hook(bed.account.ec2_no_retry, "response-received.ec2.RunInstances", crash)
    with pytest.raises(Crash):
        bed.acquire()
    bed.unhook()
    bed.front.fault(action="RunInstances", code="RequestLimitExceeded", times=99)
    assert ids(bed.gang().finish_open_requests()) == ids(bed.alive()) and len(bed.sim.instances()) == 3


def test_who_is_told_to_stop_leaves_it_to_the_end_to_clean_up(bed: Bed) -> None:
    bed.sim.boot_seconds = 50.0

    def stop() -> None:
        raise Interrupted("stopped by the user")

    bed.clock.meanwhile.append(stop)
    with pytest.raises(Interrupted):
        bed.acquire()
    assert len(bed.alive()) == 3
    assert bed.gang().terminate_job() == [] and bed.alive() == [] and bed.gang().open_requests() == []


def test_two_on_one_journal_do_not_rent_twice(bed: Bed) -> None:
    one, other = bed.gang(), bed.gang()
    bed.hook(bed.account.ec2_no_retry, "response-received.ec2.RunInstances", crash)
    with pytest.raises(Crash):
        bed.acquire()
    bed.unhook()
    assert ids(one.finish_open_requests()) == ids(
        other.finish_open_requests() or list(instances.live_by_name(other.list_instances()).values())
    )
    assert ids(bed.gather()) == ids(bed.sim.instances()) and len(bed.alive()) == 3
    assert one.granted_ids == other.granted_ids and len(one.granted_ids) == 3


def crash(**_: Any) -> None:
    raise Crash


class Steps:
    """Counts all that is written, sent and heard, and kills whoever comes to step `at`."""

    def __init__(self, bed: Bed, monkeypatch: pytest.MonkeyPatch, at: int | None) -> None:
        self.at, self.count = at, 0
        for client in (bed.account.ec2, bed.account.ec2_no_retry):
            for event in ("before-send.ec2", "response-received.ec2"):
                bed.hook(client, event, self)
        write = bed.journal.write

        def written(what: str, **facts: Any) -> None:
            self()
            write(what, **facts)
            self()

        monkeypatch.setattr(bed.journal, "write", written)

    def __call__(self, **_: Any) -> None:
        self.count += 1
        if self.count == self.at:
            raise Crash


def begin(bed: Bed) -> None:
    """Another job, whose first zone has too few machines."""
    bed.jobs += 1
    bed.uid, bed.sim.forget_seconds = f"job-{bed.jobs}-9073e811", 30.0
    bed.sim.capacity[A, "g5.xlarge"] = 2
    bed.sim.visible_after, bed.sim.boot_seconds = 1.0, 3.0
    bed.journal.path.unlink(missing_ok=True)
    bed.said.clear()


def interrupted(bed: Bed, act: Callable[[], Any], at: int | None) -> int:
    """Do something that is killed at a step; returns how many steps there were."""
    with pytest.MonkeyPatch.context() as patch:
        steps = Steps(bed, patch, at)
        try:
            act()
            assert at is None, f"there is no step {at}"
        except Crash:
            pass
        finally:
            bed.unhook()
    return steps.count


def test_killed_at_any_step_and_started_again_there_is_one_gang_or_nothing(bed: Bed) -> None:
    begin(bed)
    steps = interrupted(bed, bed.acquire, None)
    assert steps >= 20
    bed.nothing_left()
    for at in range(1, steps + 1):
        begin(bed)
        interrupted(bed, bed.acquire, at)
        found = bed.gather()
        assert ids(found) == ids(bed.alive()) and len(found) == 3, at
        assert sorted(bed.gang().granted_ids) == ids(found), at
        assert {one.zone for one in found} == {B} and len(set(bed.groups())) == 1, at
        bed.nothing_left()


def test_killed_at_any_step_of_the_end_and_told_again_nothing_is_left(bed: Bed) -> None:
    bed.sim.stop_seconds = 3.0

    def ended(at: int | None) -> int:
        begin(bed)
        bed.sim.visible_after = bed.sim.boot_seconds = 0.0
        bed.acquire(bed.place(B), n=2)
        steps = interrupted(bed, lambda: bed.gang().terminate_job(), at)
        bed.nothing_left()
        assert bed.what()[-1] == "ended", at
        return steps

    steps = ended(None)
    assert steps >= 10
    for at in range(1, steps + 1):
        ended(at)


def test_killed_while_asking_and_ended_instead_nothing_is_left(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instances, "INSTANCE_POLL_SECONDS", 10.0)  # it looks for a minute, lest one appear
    for at in range(1, 24, 2):
        begin(bed)
        interrupted(bed, bed.acquire, at)
        bed.nothing_left()
        assert bed.gang().open_requests() == []


def test_what_was_asked_in_another_region_is_finished_and_ended_there(bed: Bed) -> None:
    west = bed.account.in_region("us-west-2")
    bed.stack = bed.network("us-west-2", west.ec2, ["us-west-2a"])
    place = bed.place("us-west-2a")
    bed.hook(west.ec2_no_retry, "response-received.ec2.RunInstances", crash)
    with pytest.raises(Crash):
        bed.gang(account=west).acquire([place], ["0", "1"], bed.want, dict(BUILTIN_TYPES), 60)
    bed.unhook()
    assert bed.gang().finish_open_requests() == [] and bed.gang().terminate_job() == [], "here is nothing"
    found = bed.gang(account=west).finish_open_requests()
    assert ids(found) == ids(bed.sim.instances("us-west-2")) and len(found) == 2
    assert {one.region for one in found} == {"us-west-2"} and bed.sim.instances() == []
    assert bed.gang(account=west).terminate_job() == [] and bed.sim.leaks() == []


def test_nothing_is_asked_while_the_disk_is_full(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        bed.acquire()
    assert bed.front.count("RunInstances") == bed.front.count("CreatePlacementGroup") == 0
    monkeypatch.undo()


# --- the end ---------------------------------------------------------------------------------------------------------


def test_a_full_disk_keeps_nobody_from_ending_machines(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(what: str, **facts: Any) -> None:
        raise OSError(28, "No space left on device")

    bed.acquire()
    with monkeypatch.context() as patch:
        patch.setattr(bed.journal, "write", full)
        bed.gang().list_instances()
        assert bed.gang().terminate_job() == [] and bed.alive() == []


def test_f48_ending_twice_is_ending(bed: Bed) -> None:
    bed.acquire()
    assert bed.gang().terminate_job() == [] == bed.gang().terminate_job()
    assert bed.groups() == [] and bed.what().count("ended") == 2
    assert len(bed.journal.lines("gone")) == 3
    assert bed.front.count("TerminateInstances") == 1


def test_what_ec2_tells_of_no_more_has_ended_by_its_limit_at_the_latest(bed: Bed) -> None:
    found = bed.acquire()
    for one in found:
        bed.sim.power_off(one.id)
    bed.sim.advance(90_000)
    assert bed.gang().terminate_job() == []
    gone = bed.journal.lines("gone")
    assert sorted(line["id"] for line in gone) == ids(found)
    assert {line["ended"] for line in gone} == {tags.parse_time(found[0].tags[tags.EXPIRES])}


def test_the_end_of_a_job_that_just_asked_waits_for_machines_that_nobody_sees_yet(bed: Bed) -> None:
    bed.sim.visible_after = 40.0
    bed.hook(bed.account.ec2_no_retry, "response-received.ec2.RunInstances", crash)
    with pytest.raises(Crash):
        bed.acquire()
    bed.unhook()
    assert bed.gang().terminate_job() == [] and bed.alive() == [] and bed.sim.leaks() == []
    assert sum(bed.clock.pauses) >= 40


def test_refusals_say_what_they_mean(bed: Bed) -> None:
    bed.sim.quota_vcpu[G5_SPOT] = 0
    place = bed.place()
    with pytest.raises(LaunchRefused) as caught:
        bed.gang().request_instances(place, ["0"], bed.want(place), BUILTIN_TYPES["g5.xlarge"])
    assert caught.value.error_kind is ErrorKind.QUOTA_EXCEEDED and caught.value.code == "MaxSpotInstanceCountExceeded"
    assert bed.journal.lines("refused")[0]["code"] == "MaxSpotInstanceCountExceeded"


def test_instances_are_read_as_they_are(bed: Bed) -> None:
    (one,) = bed.acquire(n=1)
    assert isinstance(one, Instance) and one.job_uid == bed.uid and one.is_billed and one.end_time is None
    assert (
        one.spot_request_id.startswith("sir-")
        and one.launch_token == one.tags[tags.LAUNCH]
        and one.public_ip == one.private_ip
    )
