"""RunInstances requests: all parameters of one, and in what those for other markets and reservations differ."""

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
    placement_group: str = "",
    region: str = "us-east-1",
    **changes: Any,
) -> dict[str, Any]:
    """Return the parameters of a request for a place in zone b."""
    place = Place(region=region, zone="us-east-1b", type=type, market=market, price=1.0, **reserved)
    instance_request = replace(INSTANCE_REQUEST, **changes)
    return build_launch_request(instance_request, BUILTIN_TYPES[type], place, names, number, placement_group).parameters


SIXTEEN = [str(number) for number in range(16)]
BLOCK: dict[str, Any] = {"reservation": "cr-0123456789abcdef0", "closing_time": 1_795_400_000.0}
GROUP = {"reservation": "arn:aws:resource-groups:us-east-1:123456789012:group/mine", "placement_group": "theirs"}
SPOT = {
    "MarketType": "spot",
    "SpotOptions": {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"},
}
UNPLACED = {"use_placement_group": False}  # as the plan of a job in reserved machines has it


PARAMETERS = {
    "ImageId": "ami-0f6",
    "InstanceType": "p4d.24xlarge",
    "MinCount": 16,
    "MaxCount": 16,
    "KeyName": "imgnet-0123456789ab",
    "IamInstanceProfile": {"Name": "imgnet-machine"},
    "InstanceInitiatedShutdownBehavior": "terminate",
    "MetadataOptions": {"HttpEndpoint": "enabled", "HttpTokens": "required", "HttpPutResponseHopLimit": 1},
    "NetworkInterfaces": [
        {
            "DeviceIndex": 0,
            "NetworkCardIndex": card,
            "SubnetId": "subnet-0b2",
            "Groups": ["sg-0c3"],
            "DeleteOnTermination": True,
            "InterfaceType": "efa-only" if card else "efa",
        }
        for card in range(4)
    ],
    "BlockDeviceMappings": [
        {
            "DeviceName": "/dev/sda1",
            "Ebs": {"VolumeSize": 150, "VolumeType": "gp3", "Encrypted": True, "DeleteOnTermination": True},
        }
    ],
    "UserData": "#cloud-config",
    "Placement": {"GroupName": "imgnet-job-3-9073e811-1"},
}


@pytest.mark.parametrize(
    ("market", "reserved", "changes", "expected"),
    [
        pytest.param("on-demand", UNRESERVED, {}, {}, id="on demand"),
        pytest.param("spot", UNRESERVED, {}, {"InstanceMarketOptions": SPOT}, id="spot"),
        pytest.param("on-demand", UNRESERVED, UNPLACED, {"Placement": None}, id="no placement group"),
        pytest.param(
            "on-demand", UNRESERVED, {"placement_group": "old"}, {"Placement": {"GroupName": "old"}}, id="joined"
        ),
        pytest.param(
            "capacity-block",
            BLOCK,
            UNPLACED,  # EC2 places the machines of a block close together
            {
                "InstanceMarketOptions": {"MarketType": "capacity-block"},
                "CapacityReservationSpecification": {
                    "CapacityReservationTarget": {"CapacityReservationId": BLOCK["reservation"]}
                },
                "Placement": None,
            },
            id="block",
        ),
        pytest.param(
            "on-demand",
            GROUP,
            UNPLACED,
            {
                "CapacityReservationSpecification": {
                    "CapacityReservationTarget": {"CapacityReservationResourceGroupArn": GROUP["reservation"]}
                },
                "Placement": {"GroupName": "theirs"},
            },
            id="group",
        ),
    ],
)
def test_parameters_of_a_request_by_market_place_and_reservation(
    market: str, reserved: Mapping[str, Any], changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    request = build("p4d.24xlarge", market, SIXTEEN, reserved, **changes)
    del request["ClientToken"], request["TagSpecifications"]
    assert request == {name: value for name, value in {**PARAMETERS, **expected}.items() if value is not None}


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
            tags.BOOT_KEY: INSTANCE_REQUEST.host_key,
            tags.TERMS: INSTANCE_REQUEST.terms,
            tags.NAME: "imgnet job-3",
        }


def test_client_token_differs_for_every_other_request() -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"number": 2},
        {"names": ["0", "1", "2"]},
        {"region": "us-west-2"},
        {"job_uid": "job-4"},
        {"user_data": "#cloud-config\n{}"},
        {"use_placement_group": False, "number": 2},
        {"market": "on-demand", "reserved": GROUP},
    ]
    tokens = [build(**change)["ClientToken"] for change in changes]
    assert build()["ClientToken"] == tokens[0] and len(set(tokens)) == len(tokens)
    assert all(token.isascii() and len(token) <= 64 for token in tokens)


def test_disk_is_never_smaller_than_the_image() -> None:
    disks = build(image=replace(IMAGE, snapshot_gb=400))["BlockDeviceMappings"]
    assert [disk["Ebs"]["VolumeSize"] for disk in disks] == [400]
