"""Launches into capacity reservations, groups of them and capacity blocks of the simulated AWS."""

from typing import Any

import pytest
from support.simcloud.in_process import START, Cloud, cloud, refused, served

from infra.aws.stack import policies

__all__ = ["cloud", "served"]

ZONE, TYPE = "us-east-1a", "p5.48xlarge"
HOUR = 3600.0
GROUP = "arn:aws:resource-groups:us-east-1:123456789012:group/mine"
BLOCK_MARKET = {"MarketType": "capacity-block"}


def into(id: str, block: bool = False, **changes: Any) -> dict[str, Any]:
    """Return the arguments of a launch into a reservation, or into those of a group."""
    key = "CapacityReservationResourceGroupArn" if id.startswith("arn:") else "CapacityReservationId"
    target = {"CapacityReservationTarget": {key: id}}
    market = {"InstanceMarketOptions": BLOCK_MARKET} if block else {}
    arguments = {"InstanceType": TYPE, "Placement": {"AvailabilityZone": ZONE}, **market, **changes}
    return {"CapacityReservationSpecification": target, **arguments}


def free_count(cloud: Cloud, id: str) -> int:
    (row,) = cloud.ec2.describe_capacity_reservations(CapacityReservationIds=[id])["CapacityReservations"]
    return int(row["AvailableInstanceCount"])


def launch_refusal(cloud: Cloud, count: int = 1, **changes: Any) -> str:
    arguments = cloud.request(**{"MinCount": count, "MaxCount": count, **changes})
    return refused(cloud.ec2.run_instances, **arguments)[0]


def test_launch_has_to_match_the_reservation(cloud: Cloud) -> None:
    plain = cloud.sim.reserve(TYPE, ZONE, 4)
    block = cloud.sim.reserve(TYPE, ZONE, 4, is_block=True, end=START + 24 * HOUR)
    later = cloud.sim.reserve(TYPE, ZONE, 4, is_block=True, start=START + HOUR, end=START + 24 * HOUR)
    grouped = cloud.sim.reserve(TYPE, ZONE, 4, placement_group="theirs")
    for arguments in (
        into(plain, InstanceType="p4d.24xlarge"),
        into(plain, Placement={"AvailabilityZone": "us-east-1b"}),
        into(plain, block=True),
        into(block),
        into(plain, InstanceMarketOptions={"MarketType": "spot"}),
        into(grouped),
        {"InstanceType": TYPE, "InstanceMarketOptions": BLOCK_MARKET},  # without a target
    ):
        assert launch_refusal(cloud, **arguments) == "InvalidParameterCombination", arguments
    assert launch_refusal(cloud, **into(later, block=True)) == "InvalidCapacityReservationState"
    assert launch_refusal(cloud, **into("cr-0123456789abcdef0")) == "InvalidCapacityReservationId.NotFound"
    cloud.ec2.create_placement_group(GroupName="theirs", Strategy="cluster")
    cloud.launch(2, **into(grouped, Placement={"AvailabilityZone": ZONE, "GroupName": "theirs"}))


def test_group_takes_machines_of_its_matching_members(cloud: Cloud) -> None:
    members = [cloud.sim.reserve(TYPE, ZONE, 2, groups=[GROUP]) for _ in range(2)]
    other = cloud.sim.reserve("p4d.24xlarge", ZONE, 8, groups=[GROUP])
    ids = cloud.launch(3, **into(GROUP))
    assert {cloud.instance(id)["CapacityReservationId"] for id in ids} == set(members)
    assert [free_count(cloud, id) for id in (*members, other)] == [0, 1, 8]
    (first, second) = cloud.launch(2, **into(GROUP))
    assert free_count(cloud, members[1]) == 0
    assert "CapacityReservationId" not in cloud.instance(second), f"{first} took the last; the rest runs on demand"


@pytest.mark.parametrize("is_group", [False, True])
def test_launch_into_a_reservation_needs_the_permission_for_it(cloud: Cloud, is_group: bool) -> None:
    id = cloud.sim.reserve(TYPE, ZONE, 2, groups=[GROUP])
    _, subnet, security_group = cloud.network(ZONE)
    tags = [{"Key": "imgnet:stack", "Value": "imgnet"}]
    cloud.ec2.create_tags(Resources=[subnet, security_group], Tags=tags)
    kinds = ("instance", "volume", "network-interface")
    arguments = into(
        GROUP if is_group else id,
        Placement=None,
        SubnetId=subnet,
        SecurityGroupIds=[security_group],
        MetadataOptions={"HttpTokens": "required"},
        TagSpecifications=[{"ResourceType": kind, "Tags": tags} for kind in kinds],
    )
    policy = policies.user_policy()
    cloud.sim.policy = policy
    cloud.launch(1, **arguments)
    statements = [statement for statement in policy["Statement"] if statement["Sid"] != "RunUntagged"]
    image_only: policies.Statement = {
        "Sid": "I",
        "Effect": "Allow",
        "Action": "ec2:RunInstances",
        "Resource": "arn:aws:ec2:*::image/*",
    }
    cloud.sim.policy = {"Version": policy["Version"], "Statement": [*statements, image_only]}
    assert launch_refusal(cloud, **arguments) == "UnauthorizedOperation"
