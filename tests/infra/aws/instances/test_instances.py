"""EC2 instances: parsed, found, terminated, and their leftovers removed."""

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.awsrequest import AWSResponse
from support.aws_gang import START, ZONES, GangTestbed

from infra.aws import tags
from infra.aws.instances import instances
from infra.aws.journal_events import TerminationFinished
from infra.errors import CloudError

A, B, C = ZONES


def ignore_termination(bed: GangTestbed) -> None:
    """Let EC2 accept each TerminateInstances, and do nothing."""
    answer = b"<TerminateInstancesResponse><instancesSet/></TerminateInstancesResponse>"

    def accept(request: Any, **_: Any) -> AWSResponse:
        raw = SimpleNamespace(stream=lambda **_: iter([answer]))
        return AWSResponse(request.url, 200, {}, raw)

    bed.hook(bed.account.ec2, "before-send.ec2.TerminateInstances", accept)


def test_f44_terminate_job_reports_machines_that_stay_and_repeats_a_request_without_effect(bed: GangTestbed) -> None:
    machines = bed.acquire()
    ignore_termination(bed)
    lines = bed.gang().terminate_job(timeout_seconds=20)
    assert sorted(lines[:3]) == sorted(f"machine {machine.id} in us-east-1: running" for machine in machines)
    assert lines[3:] == [f"placement group {machines[0].placement_group}: still in use"]
    assert TerminationFinished not in bed.journal_kinds() and bed.sim.now() <= START + 30
    bed.clock.meanwhile += [lambda: None, bed.remove_faults]
    assert bed.gang().terminate_job() == [] and bed.live_instances() == []


def test_terminate_job_terminates_a_stopped_machine(bed: GangTestbed) -> None:
    (machine,) = bed.acquire(bed.place(A, "on-demand"), n=1)
    bed.account.ec2.stop_instances(InstanceIds=[machine.id])
    assert [line["kind"] for line in bed.sim.leaks()] == ["instance", "volume"]
    assert bed.gang().terminate_job(timeout_seconds=60) == [] and bed.sim.leaks() == []


@pytest.mark.parametrize(("code", "times", "line", "pauses"), [
    ("InvalidPlacementGroup.InUse", 3, None, 4),
    ("InvalidPlacementGroup.InUse", 99, "placement group imgnet-job-3-9073e811-1: still in use", 16),
    ("UnauthorizedOperation", 99, "remove placement group imgnet-job-3-9073e811-1: not permitted", 1),
])  # fmt: skip
def test_f46_terminate_job_waits_for_a_group_in_use(
    bed: GangTestbed, code: str, times: int, line: str | None, pauses: int
) -> None:
    bed.acquire()
    bed.front.fault(action="DeletePlacementGroup", code=code, times=times)
    lines = bed.gang().terminate_job()
    assert len(lines) == (line is not None) and all(text.startswith(str(line)) for text in lines)
    assert (TerminationFinished in bed.journal_kinds()) is (line is None) and len(bed.clock.pauses) == pauses


def test_f50_terminate_job_leaves_resources_of_others_alone(bed: GangTestbed) -> None:
    own_machines = bed.acquire()
    ec2, job = bed.account.ec2, {tags.JOB: bed.uid, tags.NAME: "imgnet job-3"}
    cases = [job, {**job, tags.STACK: "imgnet2"}, {tags.STACK: tags.STACK_VALUE, tags.JOB: f"{bed.uid}0"}]
    groups = [f"imgnet-{bed.uid}-{number}" for number in (2, 3, 4)]
    params = {"ImageId": bed.image_id(), "InstanceType": "g5.xlarge", "MinCount": 1, "MaxCount": 1}
    for group, foreign_tags in zip(groups, cases, strict=True):
        instance, group_tags, address, volume = (
            {"TagSpecifications": tags.tag_specifications([kind], foreign_tags)}
            for kind in ("instance", "placement-group", "elastic-ip", "volume")
        )
        ec2.run_instances(**params, **instance)
        ec2.create_placement_group(GroupName=group, Strategy="cluster", **group_tags)
        ec2.allocate_address(Domain="vpc", **address)
        ec2.create_volume(AvailabilityZone=A, Size=10, **volume)
    own_ids = {machine.id for machine in own_machines}
    foreign_ids = {row["id"] for row in bed.sim.leaks() if row["kind"] != "volume"} - own_ids
    assert len(foreign_ids) == 3 + 3 and bed.gang().terminate_job() == []
    left = bed.sim.leaks()
    assert foreign_ids <= {row["id"] for row in left} and own_ids.isdisjoint(row["id"] for row in left)
    assert len([row for row in left if row["kind"] == "volume"]) == 3 + 3, "of the machines, and others"
    assert bed.placement_group_names() == groups
    bed.foreign_ids += [*groups, *(row["id"] for row in left)]
    instances.terminate(bed.account, [machine.id for machine in bed.live_instances()])


def test_terminate_with_an_unknown_id_terminates_the_others(bed: GangTestbed) -> None:
    machines = bed.acquire()
    instances.terminate(bed.account, [machines[0].id, "i-0123456789abcdef0", machines[2].id])
    assert [machine.id for machine in bed.live_instances()] == [machines[1].id]


def test_remove_leftovers_removes_disks_and_ignores_one_that_vanishes(bed: GangTestbed) -> None:
    own_tags = {tags.STACK: tags.STACK_VALUE, tags.JOB: bed.uid}
    specifications = tags.tag_specifications(["volume"], own_tags)
    for _ in range(2):
        bed.account.ec2.create_volume(AvailabilityZone=A, Size=10, TagSpecifications=specifications)
    bed.front.fault(action="DeleteVolume", code="InvalidVolume.NotFound", after=True)
    assert instances.remove_leftovers(bed.account, bed.uid) == []
    assert bed.account.ec2.describe_volumes()["Volumes"] == []


def test_address_is_released_although_the_end_of_its_machine_removes_the_association(bed: GangTestbed) -> None:
    (machine,) = bed.acquire(n=1, use_placement_group=False)
    instances.attach_elastic_ip(bed.account, machine, {tags.STACK: tags.STACK_VALUE, tags.JOB: bed.uid})
    bed.front.fault(action="DisassociateAddress", code="InvalidAssociationID.NotFound", after=True)
    assert instances.remove_leftovers(bed.account, bed.uid) == []
    assert bed.account.ec2.describe_addresses()["Addresses"] == []


def test_describe_all_finds_an_untagged_machine_and_rejects_a_response_that_omits_one(bed: GangTestbed) -> None:
    """An ID that EC2 says it does not know is no such response."""
    (machine,) = bed.acquire(n=1)
    bed.account.ec2.delete_tags(Resources=[machine.id], Tags=[{"Key": tags.JOB}])
    assert instances.describe(bed.account, {tags.JOB: bed.uid}) == []
    ids = [machine.id, "i-0123456789abcdef0"]
    assert [found.id for found in instances.describe_all(bed.account, {tags.JOB: bed.uid}, ids)] == [machine.id]
    bed.change_instances(lambda _: False)
    with pytest.raises(CloudError, match=f"leaves out {machine.id}"):
        instances.describe_all(bed.account, {tags.JOB: bed.uid}, [machine.id])
    bed.remove_faults()
    assert bed.gang().terminate_job() == [] and bed.live_instances() == []


def parse(**changes: Any) -> instances.Instance:
    description = {
        "InstanceId": "i-1",
        "InstanceType": "g5.xlarge",
        "LaunchTime": datetime.fromtimestamp(START, UTC),
        "Placement": {"AvailabilityZone": A},
    }
    return instances.parse_instance({**description, **changes}, "us-east-1")


def test_parse_instance_end_time_from_ec2_or_now(bed: GangTestbed) -> None:
    reason = "User initiated (2026-11-21 20:01:40 GMT)"
    ended = parse(State={"Name": "terminated"}, StateTransitionReason=reason, StateReason={"Code": "Client.X"})
    assert (ended.end_time, ended.end_reason, ended.is_billed) == (START + 100, "Client.X", False)
    bed.sim.advance(30)
    assert parse(State={"Name": "shutting-down"}).end_time == START + 30
