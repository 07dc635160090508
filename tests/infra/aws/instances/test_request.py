"""RunInstances requests: all parameters of one, and in what those for other markets and reservations differ."""

from dataclasses import replace
from typing import Any

import botocore.session
import pytest
from botocore.validate import ParamValidator
from moto.ec2.models.instance_types import INSTANCE_TYPES

from infra.aws import tags
from infra.aws.instances.amis import Image
from infra.aws.instances.request import InstanceRequest, build_launch_request
from infra.aws.launch_request import Place, ReservationTarget
from infra.aws.market.instance_types import BUILTIN_TYPES
from infra.aws.stack.stack import Stack

STACK = Stack(
    region="us-east-1",
    vpc="vpc-0a1",
    subnets={"us-east-1a": "subnet-0a1", "us-east-1b": "subnet-0b2"},
    security_group="sg-0c3",
    file_system="fs-0d4",
    key_name="imgnet-0123456789ab",
    access_point="fsap-0e5",
)
IMAGE = Image("ami-0f6", "ubuntu", 22, 75, "/dev/sda1", "Deep Learning", "/opt/pytorch/bin/python")
INSTANCE_REQUEST = InstanceRequest(
    job_uid="job-3-9073e811",
    job_name="job-3",
    owner="ann",
    expires=1_795_298_400.0,
    image=IMAGE,
    stack=STACK,
    user_data="#cloud-config",
    host_key="ssh-ed25519 AAAA",
    terms='{"machines":2}',
)


def build(
    type: str = "g5.xlarge",
    market: str = "spot",
    n: int = 2,
    reservation: ReservationTarget | None = None,
    number: int = 1,
    placement_group: str = "",
    **changes: Any,
) -> dict[str, Any]:
    place = Place(region="us-east-1", zone="us-east-1b", type=type, market=market, price=1.0, reservation=reservation)
    names = [str(index) for index in range(n)]
    return build_launch_request(
        replace(INSTANCE_REQUEST, **changes), BUILTIN_TYPES[type], place, names, number, placement_group
    ).parameters


BLOCK = ReservationTarget(id="cr-0123456789abcdef0", closing_time=1_795_400_000.0)
GROUP = ReservationTarget(id="arn:aws:resource-groups:us-east-1:123456789012:group/mine", placement_group="theirs")
SPOT = {
    "MarketType": "spot",
    "SpotOptions": {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"},
}
UNPLACED = {"use_placement_group": False}  # as the plan of a job in reserved machines has it
MARKETS = pytest.mark.parametrize(
    ("market", "reservation"),
    [("spot", None), ("on-demand", None), ("on-demand", GROUP), ("capacity-block", BLOCK)],
)


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
    ("market", "reservation", "changes", "expected"),
    [
        pytest.param("on-demand", None, {}, {}, id="on demand"),
        pytest.param("spot", None, {}, {"InstanceMarketOptions": SPOT}, id="spot"),
        pytest.param("on-demand", None, UNPLACED, {"Placement": None}, id="no placement group"),
        pytest.param("on-demand", None, {"placement_group": "old"}, {"Placement": {"GroupName": "old"}}, id="joined"),
        pytest.param(
            "capacity-block",
            BLOCK,
            UNPLACED,  # EC2 places the machines of a block close together
            {
                "InstanceMarketOptions": {"MarketType": "capacity-block"},
                "CapacityReservationSpecification": {"CapacityReservationTarget": {"CapacityReservationId": BLOCK.id}},
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
                    "CapacityReservationTarget": {"CapacityReservationResourceGroupArn": GROUP.id}
                },
                "Placement": {"GroupName": "theirs"},
            },
            id="group",
        ),
    ],
)
def test_parameters_of_a_request_by_market_place_and_reservation(
    market: str, reservation: ReservationTarget | None, changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    request = build("p4d.24xlarge", market, 16, reservation, **changes)
    del request["ClientToken"], request["TagSpecifications"]
    assert request == {name: value for name, value in {**PARAMETERS, **expected}.items() if value is not None}


@pytest.mark.parametrize(("type", "count"), [("g5.xlarge", 1), ("p5.48xlarge", 32)])
def test_machine_has_a_public_address_with_one_card_only(type: str, count: int) -> None:
    nics = build(type)["NetworkInterfaces"]
    assert [(nic["NetworkCardIndex"], nic["DeviceIndex"]) for nic in nics] == [(card, 0) for card in range(count)]
    assert {nic["SubnetId"] for nic in nics} == {"subnet-0b2"} and all(nic["DeleteOnTermination"] for nic in nics)
    assert [nic.get("AssociatePublicIpAddress", False) for nic in nics] == [count == 1] * count


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


@MARKETS
def test_requests_of_every_type_are_valid_by_botocores_model(
    market: str, reservation: ReservationTarget | None
) -> None:
    shape = botocore.session.get_session().get_service_model("ec2").operation_model("RunInstances").input_shape
    for type in BUILTIN_TYPES:
        report = ParamValidator().validate(build(type, market, 16, reservation), shape)
        assert not report.has_errors(), f"{type}: {report.generate_report()}"


@pytest.mark.parametrize("names", [["3"], ["0", "1"], ["4", "5", "6"]])
@pytest.mark.parametrize("market", ["spot", "on-demand"])
def test_all_resources_of_a_request_have_the_same_tags(market: str, names: list[str]) -> None:
    place = Place(region="us-east-1", zone="us-east-1b", type="g5.xlarge", market=market)
    request = build_launch_request(INSTANCE_REQUEST, BUILTIN_TYPES["g5.xlarge"], place, names, 1)
    specifications = request.parameters["TagSpecifications"]
    types = ["instance", "volume", "network-interface", *["spot-instances-request"] * (market == "spot")]
    assert [specification["ResourceType"] for specification in specifications] == types
    for specification in specifications:
        assert tags.read_tags(specification) == {
            tags.STACK: "imgnet",
            tags.JOB: "job-3-9073e811",
            tags.MACHINE: {1: "3", 2: "0-1", 3: "4-6"}[len(names)],
            tags.OWNER: "ann",
            tags.LAUNCH: request.token,
            tags.EXPIRES: "2026-11-21T22:00:00Z",
            tags.BOOT_KEY: INSTANCE_REQUEST.host_key,
            tags.TERMS: INSTANCE_REQUEST.terms,
            tags.NAME: "imgnet job-3",
        }


def test_client_token_differs_for_every_other_request() -> None:
    own_token = build()["ClientToken"]
    other_requests = [
        build(number=2),
        build(n=3),
        build(market="on-demand"),
        build(type="g5.2xlarge"),
        build(job_uid="job-4"),
        build(expires=INSTANCE_REQUEST.expires + 1),
        build(owner="bob"),
        build(user_data="#cloud-config\n{}"),
        build(use_placement_group=False),
        build(use_placement_group=False, number=2),
        build(market="on-demand", reservation=BLOCK),
        build(market="on-demand", reservation=GROUP),
    ]
    elsewhere = Place(region="us-west-2", zone="us-east-1b", type="g5.xlarge", market="spot")
    western_token = build_launch_request(INSTANCE_REQUEST, BUILTIN_TYPES["g5.xlarge"], elsewhere, ["0", "1"], 1).token
    tokens = [own_token, western_token, *[request["ClientToken"] for request in other_requests]]
    assert build()["ClientToken"] == own_token and len(set(tokens)) == len(tokens)
    assert all(token.isascii() and len(token) <= 64 for token in tokens)


def test_disk_is_never_smaller_than_the_image() -> None:
    disks = build(image=replace(IMAGE, snapshot_gb=400))["BlockDeviceMappings"]
    assert [disk["Ebs"]["VolumeSize"] for disk in disks] == [400]
