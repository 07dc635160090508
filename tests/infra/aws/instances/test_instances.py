"""Machines as EC2 describes them, how they end, and what they leave behind."""

import io
from typing import Any

import pytest
from botocore.awsrequest import AWSResponse
from support.aws_gang import START, ZONES, Bed, bed

from infra.aws import tags
from infra.aws.errors import CloudError
from infra.aws.instances import instances
from infra.aws.instances.instances import Instance

__all__ = ["bed"]

A, B, C = ZONES
ACCEPTED = b"<TerminateInstancesResponse><instancesSet/></TerminateInstancesResponse>"


class Raw(io.BytesIO):
    def stream(self, **_: Any) -> Any:
        yield self.read()


def accepted(request: Any, **_: Any) -> AWSResponse:
    """EC2 says yes, and does nothing."""
    return AWSResponse(request.url, 200, {}, Raw(ACCEPTED))


def described(**changes: Any) -> Instance:
    said = {
        "InstanceId": "i-1", "InstanceType": "g5.xlarge", "State": {"Name": "running"}, "AmiLaunchIndex": 2,
        "LaunchTime": instances.datetime.fromtimestamp(START, instances.UTC), "Placement": {"AvailabilityZone": A},
        "Tags": tags.to_aws_tags({tags.STACK: tags.STACK_VALUE, tags.MACHINE: "4-7", tags.JOB: "job-3"}),
    }  # fmt: skip
    return instances.parse_instance({**said, **changes}, "us-east-1")


# --- what EC2 says ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "index", "name"), [
    ("4-7", 0, "4"), ("4-7", 3, "7"), ("4-7", 4, ""), ("3", 0, "3"), ("3", 1, ""), ("", 0, ""), ("x-2", 0, ""),
    ("0-", 0, "0"), ("-3", 0, ""), ("0-x", 1, ""),
])  # fmt: skip
def test_a_machine_has_its_name_from_its_tag_and_its_launch_index(text: str, index: int, name: str) -> None:
    found = described(AmiLaunchIndex=index, Tags=tags.to_aws_tags({tags.MACHINE: text}))
    assert found.name == name and found.job_uid == ""


def test_a_machine_ends_when_ec2_says_so_or_else_when_it_is_seen(bed: Bed) -> None:
    reason = "User initiated (2026-11-21 20:01:40 GMT)"
    ended = described(State={"Name": "terminated"}, StateTransitionReason=reason, StateReason={"Code": "Client.X"})
    assert (ended.end_time, ended.end_reason, ended.is_billed) == (START + 100, "Client.X", False)
    bed.sim.advance(30)
    assert described(State={"Name": "shutting-down"}).end_time == START + 30
    running = described()
    assert running.end_time is None and running.is_billed and running.end_reason == "" and running.name == "6"


def test_of_two_with_one_name_the_later_is_the_machine(bed: Bed) -> None:
    early, late = described(), described(InstanceId="i-2", LaunchTime=instances.datetime.fromtimestamp(
        START + 9, instances.UTC))  # fmt: skip
    over = described(InstanceId="i-3", State={"Name": "terminated"})
    assert instances.live_by_name([early, late, over]) == {"6": late}
    assert instances.live_by_name([over]) == {}


def test_one_question_tells_of_all_machines_however_many(bed: Bed) -> None:
    bed.acquire(n=20)
    before = bed.front.count("DescribeInstances")
    assert (
        len(instances.describe(bed.account, {tags.JOB: bed.uid})) == 20 == len(instances.describe_region(bed.account))
    )
    assert bed.front.count("DescribeInstances") == before + 2


def test_a_machine_whose_tag_is_not_seen_is_found_by_its_id(bed: Bed) -> None:
    (one,) = bed.acquire(n=1)
    bed.account.ec2.delete_tags(Resources=[one.id], Tags=[{"Key": tags.JOB}])
    assert instances.describe(bed.account, {tags.JOB: bed.uid}) == []
    (same,) = instances.describe(bed.account, {tags.JOB: bed.uid}, [one.id, "i-0123456789abcdef0"])
    assert same.id == one.id and bed.gang().terminate_job() == []
    assert bed.alive() == []


# --- the end ---------------------------------------------------------------------------------------------------------


def test_nothing_is_called_gone_before_ec2_calls_it_terminated(bed: Bed) -> None:
    bed.sim.stop_seconds = 50.0
    bed.acquire()
    assert bed.gang().terminate_job() == [] and bed.sim.now() >= START + 50
    assert bed.front.count("TerminateInstances") == 1 and bed.said == [
        "waiting until EC2 says that 3 of 3 machines are gone"
    ]


def test_f44_a_machine_that_stays_though_its_end_was_accepted_is_told(bed: Bed) -> None:
    found = bed.acquire()
    bed.hook(bed.account.ec2, "before-send.ec2.TerminateInstances", accepted)
    said = bed.gang().terminate_job(timeout_seconds=20)
    assert sorted(said[:3]) == sorted(f"machine {one.id} in us-east-1: running" for one in found)
    assert said[3:] == [f"placement group {found[0].placement_group}: still in use"]
    assert "ended" not in bed.what() and not any("gone" in line and "until" not in line for line in bed.said)
    assert bed.sim.now() <= START + 30


def test_f44_what_was_accepted_and_not_done_is_asked_again(bed: Bed) -> None:
    bed.acquire()
    bed.hook(bed.account.ec2, "before-send.ec2.TerminateInstances", accepted)
    bed.clock.meanwhile += [lambda: None, bed.unhook]
    assert bed.gang().terminate_job() == [] and bed.alive() == []


def test_a_stopped_machine_is_ended_too_for_its_disk_costs(bed: Bed) -> None:
    (one,) = bed.acquire(bed.place(A, "on-demand"), n=1)
    bed.account.ec2.stop_instances(InstanceIds=[one.id])
    assert [line["kind"] for line in bed.sim.leaks()] == ["instance", "volume"]
    assert bed.gang().terminate_job(timeout_seconds=60) == [] and bed.sim.leaks() == []


def test_f46_a_group_that_is_in_use_for_a_moment_longer_is_removed_all_the_same(bed: Bed) -> None:
    bed.acquire()
    bed.front.fault(action="DeletePlacementGroup", code="InvalidPlacementGroup.InUse", times=3)
    assert bed.gang().terminate_job() == [] and bed.groups() == [] and len(bed.clock.pauses) == 1 + 3


def test_f46_a_group_that_stays_in_use_is_told(bed: Bed) -> None:
    (one, *_) = bed.acquire()
    bed.front.fault(action="DeletePlacementGroup", code="InvalidPlacementGroup.InUse", times=99)
    assert (
        bed.gang().terminate_job() == [f"placement group {one.placement_group}: still in use"]
        and "ended" not in bed.what()
    )
    assert sum(bed.clock.pauses) < 60


def test_what_may_not_be_removed_is_told_at_once_with_the_permission(bed: Bed) -> None:
    bed.acquire()
    bed.front.fault(action="DeletePlacementGroup", code="UnauthorizedOperation", times=99)
    (said,) = bed.gang().terminate_job()
    assert said.startswith(f"remove placement group imgnet-{bed.uid}-1: not permitted") and len(bed.clock.pauses) == 1


def test_f49_an_orphan_with_our_tag_that_no_journal_knows_is_ended(bed: Bed) -> None:
    bed.acquire()
    bed.journal.path.unlink()
    assert bed.gang().terminate_job() == [] and bed.alive() == [] and bed.groups() == []


def test_f50_machines_groups_disks_and_addresses_of_others_survive(bed: Bed) -> None:
    mine = bed.acquire()
    ec2, job = bed.account.ec2, {tags.JOB: bed.uid, tags.NAME: "imgnet job-3"}
    cases = {"no stack": job, "other stack": {**job, tags.STACK: "imgnet2"}, "other job": {
        tags.STACK: tags.STACK_VALUE, tags.JOB: f"{bed.uid}0"}}  # fmt: skip
    for number, own in enumerate(cases.values()):
        words = {"ImageId": bed.image(), "InstanceType": "g5.xlarge", "MinCount": 1, "MaxCount": 1}
        (one,) = ec2.run_instances(**words, TagSpecifications=tags.tag_specifications(["instance", "volume"], own))[
            "Instances"
        ]
        ec2.create_placement_group(
            GroupName=f"imgnet-{bed.uid}-{number + 2}", Strategy="cluster",
            TagSpecifications=tags.tag_specifications(["placement-group"], own),
        )  # fmt: skip
        address = ec2.allocate_address(Domain="vpc", TagSpecifications=tags.tag_specifications(["elastic-ip"], own))
        disk = ec2.create_volume(
            AvailabilityZone=A, Size=10, TagSpecifications=tags.tag_specifications(["volume"], own)
        )["VolumeId"]  # fmt: skip
        bed.others += [one["InstanceId"], disk, address["AllocationId"], f"imgnet-{bed.uid}-{number + 2}"]
    before = {one["id"] for one in bed.sim.leaks()} - {one.id for one in mine}
    assert bed.gang().terminate_job() == []
    after = {one["id"] for one in bed.sim.leaks()}
    assert {one["kind"] for one in bed.sim.leaks()} == {"instance", "volume", "address"} and len(bed.alive()) == 3
    assert after < before and set(bed.others[i] for i in (0, 1, 2, 4, 5, 6, 8, 9, 10)) <= after
    assert len(bed.groups()) == 3
    bed.others += after
    instances.terminate(bed.account, [one.id for one in bed.alive()])


def test_one_unknown_id_keeps_no_other_machine_alive(bed: Bed) -> None:
    found = bed.acquire()
    instances.terminate(bed.account, [found[0].id, "i-0123456789abcdef0", found[2].id])
    assert [one.id for one in bed.alive()] == [found[1].id]


def test_who_may_not_end_machines_is_told_so(bed: Bed) -> None:
    bed.acquire()
    bed.front.fault(action="TerminateInstances", code="UnauthorizedOperation")
    with pytest.raises(CloudError, match=r"ec2:TerminateInstances.*not permitted"):
        bed.gang().terminate_job()


# --- what they leave -------------------------------------------------------------------------------------------------


def test_the_sweep_removes_disks_addresses_requests_and_groups_of_the_job(bed: Bed) -> None:
    (one,) = bed.acquire(bed.place(A, type="p4d.24xlarge"), n=1)
    ec2, own = bed.account.ec2, {tags.STACK: tags.STACK_VALUE, tags.JOB: bed.uid}
    instances.attach_elastic_ip(bed.account, one, own)
    instances.attach_elastic_ip(bed.account, one, own)
    assert len(ec2.describe_addresses()["Addresses"]) == 1, "one address, however often"
    ec2.create_volume(AvailabilityZone=A, Size=10, TagSpecifications=tags.tag_specifications(["volume"], own))
    left = instances.remove_leftovers(bed.account, {tags.JOB: bed.uid}, bed.clock.sleep, 0)
    assert left == [f"placement group {one.placement_group}: still in use"]
    assert ec2.describe_addresses()["Addresses"] == [] and len(ec2.describe_volumes()["Volumes"]) == 1
    assert bed.gang().terminate_job() == [] and instances.remove_leftovers(bed.account, {tags.JOB: bed.uid}) == []


def test_the_address_of_a_job_moves_to_another_machine(bed: Bed) -> None:
    first, second = bed.acquire(bed.place(A, type="p4d.24xlarge"), n=2)
    own = {tags.STACK: tags.STACK_VALUE, tags.JOB: bed.uid}
    instances.attach_elastic_ip(bed.account, first, own)
    instances.attach_elastic_ip(bed.account, second, own)
    (address,) = bed.account.ec2.describe_addresses()["Addresses"]
    assert address["NetworkInterfaceId"] == second.primary_interface_id
    assert bed.gang().list_instances()[1].public_ip


def test_a_disk_that_goes_by_itself_is_no_trouble(bed: Bed) -> None:
    own = {tags.STACK: tags.STACK_VALUE, tags.JOB: bed.uid}
    bed.account.ec2.create_volume(
        AvailabilityZone=A, Size=10, TagSpecifications=tags.tag_specifications(["volume"], own)
    )
    bed.front.fault(action="DeleteVolume", code="InvalidVolume.NotFound", after=True)
    assert instances.remove_leftovers(bed.account, {tags.JOB: bed.uid}) == []


def test_an_answer_that_is_silent_about_a_machine_is_not_taken_for_its_end(bed: Bed, monkeypatch: Any) -> None:
    gone = bed.acquire(bed.place(), n=1)[0]
    with monkeypatch.context() as patch:
        patch.setattr(instances, "_describe", lambda *_, **__: [])
        with pytest.raises(CloudError, match=f"tells nothing of {gone.id}"):
            instances.describe_all(bed.account, {}, [gone.id])
    assert [one.id for one in instances.describe_all(bed.account, {}, [gone.id, "i-0123456789abcdef0"])] == [gone.id]
