"""RunInstances requests: what ends with the machines, network cards, tags, tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from moto.ec2.models.instance_types import INSTANCE_TYPES
from support.aws_journal import IMAGE, INSTANCE_REQUEST

from infra.aws import tags
from infra.aws.instances.request import build_launch_request
from infra.aws.launch_request import Place
from infra.aws.market.instance_types import BUILTIN_TYPES

UNRESERVED: dict[str, Any] = {}


def build(
    type: str = "g5.xlarge",
    market: str = "spot",
    names: Sequence[str] = ("0", "1"),
    reserved: Mapping[str, Any] = UNRESERVED,
    number: int = 1,
    region: str = "us-east-1",
    **changes: Any,
) -> dict[str, Any]:
    place = Place(region=region, zone="us-east-1b", type=type, market=market, price=1.0, **reserved)
    instance_request = replace(INSTANCE_REQUEST, **changes)
    return build_launch_request(instance_request, BUILTIN_TYPES[type], place, names, number).parameters


GROUP = {"reservation": "arn:aws:resource-groups:us-east-1:123456789012:group/mine", "placement_group": "theirs"}


def test_machines_end_with_their_disks_when_they_power_off_or_are_interrupted() -> None:
    """The simulated EC2 does not imitate this. The request names each disk of the image, and none is smaller there."""
    request = build("p4d.24xlarge", image=replace(IMAGE, disks=(("/dev/sda1", 400), ("/dev/sdf", 300))))
    assert request["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert request["InstanceMarketOptions"] == {
        "MarketType": "spot",
        "SpotOptions": {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"},
    }
    disk = {"VolumeType": "gp3", "Encrypted": True, "DeleteOnTermination": True}
    assert request["BlockDeviceMappings"] == [
        {"DeviceName": device, "Ebs": {**disk, "VolumeSize": gigabytes}}
        for device, gigabytes in (("/dev/sda1", 400), ("/dev/sdf", 300))
    ]
    assert all(nic["DeleteOnTermination"] for nic in request["NetworkInterfaces"])
    assert "InstanceMarketOptions" not in build(market="on-demand")


def test_group_of_reservations_is_named_by_its_arn_and_its_placement_group_is_joined() -> None:
    request = build(market="on-demand", reserved=GROUP, use_placement_group=False)
    specification: dict[str, Any] = {
        "CapacityReservationTarget": {"CapacityReservationResourceGroupArn": GROUP["reservation"]}
    }
    in_block = build(market="capacity-block", reserved=GROUP)
    assert in_block["CapacityReservationSpecification"] == specification
    specification["CapacityReservationPreference"] = "capacity-reservations-only"
    assert request["CapacityReservationSpecification"] == specification
    assert request["Placement"] == {"GroupName": "theirs"}


def test_network_interfaces_of_every_type_fit_its_cards() -> None:
    for type in BUILTIN_TYPES:
        network = INSTANCE_TYPES[type]["NetworkInfo"]  # EC2's own description
        cards = {card["NetworkCardIndex"]: card for card in network["NetworkCards"]}
        nics = build(type)["NetworkInterfaces"]
        indexes = [nic["NetworkCardIndex"] for nic in nics]
        assert indexes[0] == 0 and len(set(indexes)) == len(indexes) <= network["MaximumNetworkInterfaces"]
        assert all(nic["InterfaceType"] in cards[nic["NetworkCardIndex"]]["InterfaceTypes"] for nic in nics)
        efa_count = sum(nic["InterfaceType"].startswith("efa") for nic in nics)
        assert efa_count == network.get("EfaInfo", {}).get("MaximumEfaInterfaces", 0)
        assert sum(nic["InterfaceType"] != "efa-only" for nic in nics) == 1, "one IP address"
        assert [nic.get("AssociatePublicIpAddress", False) for nic in nics] == [len(nics) == 1] * len(nics)


@pytest.mark.parametrize(
    ("market", "names", "shown"),
    [("spot", ["3"], "3"), ("on-demand", ["0", "1"], "0-1"), ("spot", ["4", "5", "6"], "4-6")],
)
def test_all_resources_of_a_request_have_the_same_tags(market: str, names: list[str], shown: str) -> None:
    request = build(market=market, names=names)
    types = ["instance", "volume", "network-interface", *["spot-instances-request"] * (market == "spot")]
    assert [specification["ResourceType"] for specification in request["TagSpecifications"]] == types
    for specification in request["TagSpecifications"]:
        assert tags.read_tags(specification) == {
            tags.STACK: "imgnet",
            tags.JOB: "job-3-9073e811",
            tags.MACHINE: shown,
            tags.OWNER: "ann",
            tags.LAUNCH: request["ClientToken"],
            tags.EXPIRES: "2026-11-21T22:00:00Z",
            tags.BOOT_KEY: "ssh-ed25519 AAAA",
            tags.TERMS: '{"machines":2}',
            tags.NAME: "imgnet job-3",
        }


def test_client_token_differs_for_every_other_request() -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"number": 2},
        {"names": ["0", "1", "2"]},
        {"region": "us-west-2"},
        {"own_tags": {**INSTANCE_REQUEST.own_tags, tags.JOB: "job-4"}},
        {"user_data": "#cloud-config\n{}"},
        {"use_placement_group": False, "number": 2},
        {"market": "on-demand", "reserved": GROUP},
    ]
    tokens = [build(**change)["ClientToken"] for change in changes]
    assert build()["ClientToken"] == tokens[0] and len(set(tokens)) == len(tokens)
    assert all(token.isascii() and len(token) <= 64 for token in tokens)
