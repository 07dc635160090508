"""EC2 instances: parsed, found, terminated, and their leftovers removed."""

import io
from datetime import UTC, datetime
from typing import Any

import pytest
from botocore.awsrequest import AWSResponse
from support.aws_gang import START, ZONES, GangTestbed, bed

from infra.aws import tags
from infra.aws.instances import instances
from infra.aws.instances.instances import Instance
from infra.errors import CloudError

__all__ = ["bed"]

A, B, C = ZONES
ACCEPTED = b"<TerminateInstancesResponse><instancesSet/></TerminateInstancesResponse>"


class Raw(io.BytesIO):
    def stream(self, **_: Any) -> Any:
        yield self.read()


def accepted(request: Any, **_: Any) -> AWSResponse:
    """EC2 accepts the request, and does nothing."""
    return AWSResponse(request.url, 200, {}, Raw(ACCEPTED))


def parse(**changes: Any) -> Instance:
    description = {
        "InstanceId": "i-1",
        "InstanceType": "g5.xlarge",
        "State": {"Name": "running"},
        "AmiLaunchIndex": 2,
        "LaunchTime": datetime.fromtimestamp(START, UTC),
        "Placement": {"AvailabilityZone": A},
        "Tags": tags.to_aws_tags({tags.STACK: tags.STACK_VALUE, tags.MACHINE: "6", tags.JOB: "job-3"}),
    }
    return instances.parse_instance({**description, **changes}, "us-east-1")


# --- descriptions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "name"), [("4-7", ""), ("3", "3"), ("15", "15"), ("", ""), ("x", ""), ("-3", "")])
def test_parse_instance_name_from_its_own_tag_only(text: str, name: str) -> None:
    instance = parse(Tags=tags.to_aws_tags({tags.MACHINE: text}))
    assert instance.name == name and instance.job_uid == "" and instance.launch_index == 2


def test_parse_instance_end_time_from_ec2_or_now(bed: GangTestbed) -> None:
    reason = "User initiated (2026-11-21 20:01:40 GMT)"
    ended = parse(State={"Name": "terminated"}, StateTransitionReason=reason, StateReason={"Code": "Client.X"})
    assert (ended.end_time, ended.end_reason, ended.is_billed) == (START + 100, "Client.X", False)
    bed.sim.advance(30)
    assert parse(State={"Name": "shutting-down"}).end_time == START + 30
    running = parse()
    assert running.end_time is None and running.is_billed and running.end_reason == "" and running.name == "6"


def test_live_by_name_takes_the_later_of_two(bed: GangTestbed) -> None:
    early, late = (
        parse(),
        parse(InstanceId="i-2", LaunchTime=datetime.fromtimestamp(START + 9, UTC)),
    )
    over = parse(InstanceId="i-3", State={"Name": "terminated"})
    assert instances.live_by_name([early, late, over]) == {"6": late}
    assert instances.live_by_name([over]) == {}


def test_describe_needs_one_call_for_any_number(bed: GangTestbed) -> None:
    bed.acquire(n=20)
    before = bed.front.count("DescribeInstances")
    assert (
        len(instances.describe(bed.account, {tags.JOB: bed.uid})) == 20 == len(instances.describe_region(bed.account))
    )
    assert bed.front.count("DescribeInstances") == before + 2


def test_describe_finds_an_untagged_machine_by_id(bed: GangTestbed) -> None:
    (machine,) = bed.acquire(n=1)
    bed.account.ec2.delete_tags(Resources=[machine.id], Tags=[{"Key": tags.JOB}])
    assert instances.describe(bed.account, {tags.JOB: bed.uid}) == []
    (found_machine,) = instances.describe(bed.account, {tags.JOB: bed.uid}, [machine.id, "i-0123456789abcdef0"])
    assert found_machine.id == machine.id and bed.gang().terminate_job() == []
    assert bed.live_instances() == []


# --- termination -----------------------------------------------------------------------------------------------------


def test_terminate_job_waits_until_machines_are_terminated(bed: GangTestbed) -> None:
    bed.sim.stop_seconds = 50.0
    bed.acquire()
    assert bed.gang().terminate_job() == [] and bed.sim.now() >= START + 50
    assert bed.front.count("TerminateInstances") == 1 and bed.log_lines == [
        "waiting until 3 of 3 machines are terminated"
    ]


def test_f44_terminate_job_reports_machines_that_stay(bed: GangTestbed) -> None:
    machines = bed.acquire()
    bed.hook(bed.account.ec2, "before-send.ec2.TerminateInstances", accepted)
    lines = bed.gang().terminate_job(timeout_seconds=20)
    assert sorted(lines[:3]) == sorted(f"machine {machine.id} in us-east-1: running" for machine in machines)
    assert lines[3:] == [f"placement group {machines[0].placement_group}: still in use"]
    assert "ended" not in bed.journal_kinds() and not any(
        "terminated" in line and "until" not in line for line in bed.log_lines
    )
    assert bed.sim.now() <= START + 30


def test_f44_terminate_job_repeats_a_request_without_effect(bed: GangTestbed) -> None:
    bed.acquire()
    bed.hook(bed.account.ec2, "before-send.ec2.TerminateInstances", accepted)
    bed.clock.meanwhile += [lambda: None, bed.remove_faults]
    assert bed.gang().terminate_job() == [] and bed.live_instances() == []


def test_terminate_job_terminates_a_stopped_machine(bed: GangTestbed) -> None:
    (machine,) = bed.acquire(bed.place(A, "on-demand"), n=1)
    bed.account.ec2.stop_instances(InstanceIds=[machine.id])
    assert [line["kind"] for line in bed.sim.leaks()] == ["instance", "volume"]
    assert bed.gang().terminate_job(timeout_seconds=60) == [] and bed.sim.leaks() == []


def test_f46_terminate_job_waits_for_a_placement_group_in_use(bed: GangTestbed) -> None:
    bed.acquire()
    bed.front.fault(action="DeletePlacementGroup", code="InvalidPlacementGroup.InUse", times=3)
    assert bed.gang().terminate_job() == [] and bed.placement_group_names() == [] and len(bed.clock.pauses) == 1 + 3


def test_f46_terminate_job_reports_a_group_that_stays_in_use(bed: GangTestbed) -> None:
    (machine, *_) = bed.acquire()
    bed.front.fault(action="DeletePlacementGroup", code="InvalidPlacementGroup.InUse", times=99)
    assert (
        bed.gang().terminate_job() == [f"placement group {machine.placement_group}: still in use"]
        and "ended" not in bed.journal_kinds()
    )
    assert sum(bed.clock.pauses) < 60


def test_terminate_job_reports_a_missing_permission_at_once(bed: GangTestbed) -> None:
    bed.acquire()
    bed.front.fault(action="DeletePlacementGroup", code="UnauthorizedOperation", times=99)
    (line,) = bed.gang().terminate_job()
    assert line.startswith(f"remove placement group imgnet-{bed.uid}-1: not permitted") and len(bed.clock.pauses) == 1


def test_f49_terminate_job_finds_machines_without_a_journal(bed: GangTestbed) -> None:
    bed.acquire()
    bed.journal.path.unlink()
    assert bed.gang().terminate_job() == [] and bed.live_instances() == [] and bed.placement_group_names() == []


def test_f50_terminate_job_leaves_resources_of_others_alone(bed: GangTestbed) -> None:
    own_machines = bed.acquire()
    ec2, job = bed.account.ec2, {tags.JOB: bed.uid, tags.NAME: "imgnet job-3"}
    cases = {
        "no stack": job,
        "other stack": {**job, tags.STACK: "imgnet2"},
        "other job": {tags.STACK: tags.STACK_VALUE, tags.JOB: f"{bed.uid}0"},
    }
    for number, foreign_tags in enumerate(cases.values()):
        params = {"ImageId": bed.image_id(), "InstanceType": "g5.xlarge", "MinCount": 1, "MaxCount": 1}
        (foreign_machine,) = ec2.run_instances(
            **params, TagSpecifications=tags.tag_specifications(["instance", "volume"], foreign_tags)
        )["Instances"]
        ec2.create_placement_group(
            GroupName=f"imgnet-{bed.uid}-{number + 2}",
            Strategy="cluster",
            TagSpecifications=tags.tag_specifications(["placement-group"], foreign_tags),
        )
        address = ec2.allocate_address(
            Domain="vpc", TagSpecifications=tags.tag_specifications(["elastic-ip"], foreign_tags)
        )
        disk = ec2.create_volume(
            AvailabilityZone=A, Size=10, TagSpecifications=tags.tag_specifications(["volume"], foreign_tags)
        )["VolumeId"]
        bed.foreign_ids += [
            foreign_machine["InstanceId"],
            disk,
            address["AllocationId"],
            f"imgnet-{bed.uid}-{number + 2}",
        ]
    before = {leftover["id"] for leftover in bed.sim.leaks()} - {machine.id for machine in own_machines}
    assert bed.gang().terminate_job() == []
    after = {leftover["id"] for leftover in bed.sim.leaks()}
    assert {leftover["kind"] for leftover in bed.sim.leaks()} == {"instance", "volume", "address"} and len(
        bed.live_instances()
    ) == 3
    assert after < before and set(bed.foreign_ids[i] for i in (0, 1, 2, 4, 5, 6, 8, 9, 10)) <= after
    assert len(bed.placement_group_names()) == 3
    bed.foreign_ids += after
    instances.terminate(bed.account, [machine.id for machine in bed.live_instances()])


def test_terminate_with_an_unknown_id_terminates_the_others(bed: GangTestbed) -> None:
    machines = bed.acquire()
    instances.terminate(bed.account, [machines[0].id, "i-0123456789abcdef0", machines[2].id])
    assert [machine.id for machine in bed.live_instances()] == [machines[1].id]


def test_terminate_job_without_permission_names_the_action(bed: GangTestbed) -> None:
    bed.acquire()
    bed.front.fault(action="TerminateInstances", code="UnauthorizedOperation")
    with pytest.raises(CloudError, match=r"ec2:TerminateInstances.*not permitted"):
        bed.gang().terminate_job()


# --- leftovers ------------------------------------------------------------------------------------------------------


def test_remove_leftovers_removes_what_the_job_left(bed: GangTestbed) -> None:
    (machine,) = bed.acquire(bed.place(A, type="p4d.24xlarge"), n=1)
    ec2, own_tags = bed.account.ec2, {tags.STACK: tags.STACK_VALUE, tags.JOB: bed.uid}
    instances.attach_elastic_ip(bed.account, machine, own_tags)
    instances.attach_elastic_ip(bed.account, machine, own_tags)
    assert len(ec2.describe_addresses()["Addresses"]) == 1, "one address, also after a second call"
    ec2.create_volume(AvailabilityZone=A, Size=10, TagSpecifications=tags.tag_specifications(["volume"], own_tags))
    remaining = instances.remove_leftovers(bed.account, bed.uid, bed.clock.sleep, 0)
    assert remaining == [f"placement group {machine.placement_group}: still in use"]
    assert ec2.describe_addresses()["Addresses"] == [] and len(ec2.describe_volumes()["Volumes"]) == 1
    assert bed.gang().terminate_job() == [] and instances.remove_leftovers(bed.account, bed.uid) == []


def test_attach_elastic_ip_moves_the_jobs_address(bed: GangTestbed) -> None:
    first, second = bed.acquire(bed.place(A, type="p4d.24xlarge"), n=2)
    own_tags = {tags.STACK: tags.STACK_VALUE, tags.JOB: bed.uid}
    instances.attach_elastic_ip(bed.account, first, own_tags)
    instances.attach_elastic_ip(bed.account, second, own_tags)
    (address,) = bed.account.ec2.describe_addresses()["Addresses"]
    assert address["NetworkInterfaceId"] == second.primary_interface_id
    assert bed.gang().list_instances()[1].public_ip


def test_remove_leftovers_ignores_a_disk_that_vanishes(bed: GangTestbed) -> None:
    own_tags = {tags.STACK: tags.STACK_VALUE, tags.JOB: bed.uid}
    bed.account.ec2.create_volume(
        AvailabilityZone=A, Size=10, TagSpecifications=tags.tag_specifications(["volume"], own_tags)
    )
    bed.front.fault(action="DeleteVolume", code="InvalidVolume.NotFound", after=True)
    assert instances.remove_leftovers(bed.account, bed.uid) == []


def test_describe_all_rejects_a_response_that_omits_a_machine(bed: GangTestbed, monkeypatch: Any) -> None:
    machine = bed.acquire(bed.place(), n=1)[0]
    with monkeypatch.context() as patch:
        patch.setattr(instances, "_describe", lambda *_, **__: [])
        with pytest.raises(CloudError, match=f"leaves out {machine.id}"):
            instances.describe_all(bed.account, {}, [machine.id])
    assert [machine.id for machine in instances.describe_all(bed.account, {}, [machine.id, "i-0123456789abcdef0"])] == [
        machine.id
    ]
