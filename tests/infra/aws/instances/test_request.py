"""RunInstances requests: one is compared with golden/, which `GOLDEN=1 pytest <this file>` writes; others with it."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from botocore.validate import ParamValidator
from moto.ec2.models.instance_types import INSTANCE_TYPES
from support.aws_gang import ZONES, GangTestbed, bed

from infra.aws import tags
from infra.aws.instances import request
from infra.aws.instances.amis import Image
from infra.aws.instances.request import InstanceRequest, build_launch_request
from infra.aws.instances.user_data import build_user_data
from infra.aws.journal_events import LaunchRequest
from infra.aws.launch_request import Place, ReservationTarget
from infra.aws.market.instance_types import BUILTIN_TYPES
from infra.aws.stack.stack import Stack

__all__ = ["bed"]

GOLDEN = Path(__file__).parents[2] / "golden"
STACK = Stack(
    region="us-east-1",
    vpc="vpc-0a1",
    subnets={"us-east-1a": "subnet-0a1", "us-east-1b": "subnet-0b2"},
    security_group="sg-0c3",
    file_system="fs-0d4",
    key_name="imgnet-0123456789ab",
    key_file="/home/ann/key",
    instance_profile="imgnet-machine",
    bucket=None,
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
    user_data=build_user_data(
        poweroff_seconds=7200,
        private_key="(private half)",
        public_key="ssh-ed25519 AAAA",
        file_system="fs-0d4",
        access_point="fsap-0e5",
        ssh_user="ubuntu",
        python=IMAGE.python,
    ),
    host_key="ssh-ed25519 AAAA",
    terms='{"machines":2}',
)


def build(
    type: str = "g5.xlarge",
    market: str = "spot",
    n: int = 2,
    reservation: ReservationTarget | None = None,
    number: int = 1,
    **changes: Any,
) -> dict[str, Any]:
    place = Place(region="us-east-1", zone="us-east-1b", type=type, market=market, price=1.0, reservation=reservation)
    names = [str(index) for index in range(n)]
    return build_launch_request(
        replace(INSTANCE_REQUEST, **changes), BUILTIN_TYPES[type], place, names, number
    ).parameters


BLOCK = ReservationTarget(id="cr-0123456789abcdef0", closing_time=1_795_400_000.0)
GROUP = ReservationTarget(id="arn:aws:resource-groups:us-east-1:123456789012:group/mine", placement_group="theirs")
UNPLACED = {"use_placement_group": False}  # as the plan of a job in reserved machines has it
MARKETS = pytest.mark.parametrize(
    ("market", "reservation"),
    [("spot", None), ("on-demand", None), ("on-demand", GROUP), ("capacity-block", BLOCK)],
)


def test_request_equals_the_golden_file() -> None:
    path = GOLDEN / "run_instances_p4d.json"
    text = json.dumps(build("p4d.24xlarge", "on-demand", 16), indent=1) + "\n"
    if os.environ.get("GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize(
    ("arguments", "changes", "different"),
    [
        (("g5.xlarge", "on-demand", 16), {}, {"InstanceType", "NetworkInterfaces"}),
        (("p5.48xlarge", "on-demand", 16), {}, {"InstanceType", "NetworkInterfaces"}),
        (("p4d.24xlarge", "spot", 16), {}, {"InstanceMarketOptions", "TagSpecifications"}),
        (("p4d.24xlarge", "on-demand", 4), {}, {"MinCount", "MaxCount", "TagSpecifications"}),
        (
            ("p4d.24xlarge", "capacity-block", 16, BLOCK),
            UNPLACED,
            {"InstanceMarketOptions", "CapacityReservationSpecification", "Placement", "TagSpecifications"},
        ),
        (
            ("p4d.24xlarge", "on-demand", 16, GROUP),
            UNPLACED,
            {"CapacityReservationSpecification", "Placement", "TagSpecifications"},
        ),
    ],
)
def test_other_requests_differ_from_the_golden_one_in(
    arguments: tuple[Any, ...], changes: dict[str, Any], different: set[str]
) -> None:
    golden, other = build("p4d.24xlarge", "on-demand", 16), build(*arguments, **changes)
    names = {name for name in golden.keys() | other.keys() if golden.get(name) != other.get(name)}
    assert names == different | {"ClientToken", "TagSpecifications"}  # the token is also a tag
    assert other["MinCount"] == other["MaxCount"] == arguments[2]


@pytest.mark.parametrize(("type", "count"), [("g5.xlarge", 1), ("p5.48xlarge", 32)])
def test_machine_has_a_public_address_with_one_card_only(type: str, count: int) -> None:
    nics = build(type)["NetworkInterfaces"]
    assert [(nic["NetworkCardIndex"], nic["DeviceIndex"]) for nic in nics] == [(card, 0) for card in range(count)]
    assert {nic["SubnetId"] for nic in nics} == {"subnet-0b2"} and all(nic["DeleteOnTermination"] for nic in nics)
    assert [nic.get("AssociatePublicIpAddress", False) for nic in nics] == [count == 1] * count


def test_network_interfaces_of_every_type_fit_its_cards() -> None:
    for type in BUILTIN_TYPES:
        assert_interfaces_fit(type)


def assert_interfaces_fit(type: str) -> None:
    network = INSTANCE_TYPES[type]["NetworkInfo"]  # EC2's own description
    cards = {card["NetworkCardIndex"]: card for card in network["NetworkCards"]}
    nics = request._network_interfaces(BUILTIN_TYPES[type], "subnet-1", "sg-1", is_public=True)
    card_indexes = [nic["NetworkCardIndex"] for nic in nics]
    assert card_indexes[0] == 0 and len(set(card_indexes)) == len(card_indexes) <= network["MaximumNetworkInterfaces"]
    assert all(nic["InterfaceType"] in cards[nic["NetworkCardIndex"]]["InterfaceTypes"] for nic in nics)
    efa_count = sum(nic["InterfaceType"].startswith("efa") for nic in nics)
    assert efa_count == network.get("EfaInfo", {}).get("MaximumEfaInterfaces", 0)
    assert sum(nic["InterfaceType"] != "efa-only" for nic in nics) == 1, "one IP address"


def test_card_without_efa_gets_a_plain_interface() -> None:
    nics = request._network_interfaces(BUILTIN_TYPES["p6-b300.48xlarge"], "subnet-1", "sg-1", is_public=True)
    assert [nic["InterfaceType"] for nic in nics] == ["interface", *["efa-only"] * 16]


@MARKETS
def test_requests_of_every_type_are_valid_by_botocores_model(
    market: str, reservation: ReservationTarget | None
) -> None:
    shape = botocore.session.get_session().get_service_model("ec2").operation_model("RunInstances").input_shape
    for type in BUILTIN_TYPES:
        report = ParamValidator().validate(build(type, market, 16, reservation), shape)
        assert not report.has_errors(), f"{type}: {report.generate_report()}"


def test_request_of_a_capacity_block_targets_it_and_names_its_market() -> None:
    run_request = build("p5.48xlarge", "capacity-block", 4, BLOCK, **UNPLACED)
    assert run_request["InstanceMarketOptions"] == {"MarketType": "capacity-block"}
    assert run_request["CapacityReservationSpecification"] == {
        "CapacityReservationTarget": {"CapacityReservationId": BLOCK.id}
    }
    assert "Placement" not in run_request, "EC2 places the machines of a block close together"


def test_request_of_a_group_of_reservations_joins_their_placement_group() -> None:
    run_request = build("g5.xlarge", "on-demand", 2, GROUP, **UNPLACED)
    assert "InstanceMarketOptions" not in run_request
    assert run_request["CapacityReservationSpecification"] == {
        "CapacityReservationTarget": {"CapacityReservationResourceGroupArn": GROUP.id}
    }
    assert run_request["Placement"] == {"GroupName": "theirs"}


def test_build_launch_request_tags_all_resources_alike() -> None:
    for market in ("spot", "on-demand"):
        run_request = build(market=market)
        tags_by_type = {
            specification["ResourceType"]: {tag["Key"]: tag["Value"] for tag in specification["Tags"]}
            for specification in run_request["TagSpecifications"]
        }
        resource_types = {"instance", "volume", "network-interface"}
        resource_types |= {"spot-instances-request"} if market == "spot" else set()
        assert (
            tags_by_type.keys() == resource_types
            and len({json.dumps(tag_set) for tag_set in tags_by_type.values()}) == 1
        )
        assert tags_by_type["instance"] == {
            tags.STACK: "imgnet",
            tags.JOB: "job-3-9073e811",
            tags.MACHINE: "0-1",
            tags.OWNER: "ann",
            tags.LAUNCH: run_request["ClientToken"],
            tags.EXPIRES: "2026-11-21T22:00:00Z",
            tags.BOOT_KEY: INSTANCE_REQUEST.host_key,
            tags.TERMS: INSTANCE_REQUEST.terms,
            tags.NAME: "imgnet job-3",
        }
        assert ("InstanceMarketOptions" in run_request) is (market == "spot")


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
    tokens = [own_token, *[other_request["ClientToken"] for other_request in other_requests]]
    assert build()["ClientToken"] == own_token and len(set(tokens)) == len(tokens)
    assert all(token.isascii() and len(token) <= 64 for token in tokens)
    elsewhere = Place(region="us-west-2", zone="us-east-1b", type="g5.xlarge", market="spot")
    assert (
        build_launch_request(INSTANCE_REQUEST, BUILTIN_TYPES["g5.xlarge"], elsewhere, ["0", "1"], 1).token not in tokens
    )


def test_disk_is_never_smaller_than_the_image() -> None:
    sizes = [build(disk_gb=gb)["BlockDeviceMappings"][0]["Ebs"]["VolumeSize"] for gb in (10, 75, 400)]
    assert sizes == [75, 75, 400]


def test_build_launch_request_names_the_placement_group_or_none() -> None:
    assert "Placement" not in build(use_placement_group=False)
    assert build(number=7)["Placement"] == {"GroupName": "imgnet-job-3-9073e811-7"}


@pytest.mark.parametrize("type", ["g5.xlarge", "p4d.24xlarge"])
@MARKETS
def test_request_is_unchanged_by_the_journal(
    bed: GangTestbed, type: str, market: str, reservation: ReservationTarget | None
) -> None:
    place = Place(region="us-east-1", zone=ZONES[0], type=type, market=market, price=1.0, reservation=reservation)
    request = build_launch_request(bed.instance_request(place), BUILTIN_TYPES[type], place, ["0", "1"], 1)
    bed.journal.write(request)
    (recorded,) = bed.journal.events(LaunchRequest)
    assert replace(recorded, time=0.0) == request


@pytest.mark.parametrize("type", ["g5.xlarge", "p4d.24xlarge", "p5.48xlarge"])
def test_ec2_launches_machines_as_requested(bed: GangTestbed, type: str) -> None:
    (machine,) = bed.acquire(bed.place(ZONES[0], type=type), n=1)
    (description,) = bed.account.ec2.describe_instances(InstanceIds=[machine.id])["Reservations"][0]["Instances"]
    assert len(description["NetworkInterfaces"]) == len(request._network_interfaces(BUILTIN_TYPES[type], "", "", True))
    assert description["MetadataOptions"]["HttpTokens"] == "required" and description["KeyName"] == "imgnet-key"
    (disk,) = bed.account.ec2.describe_volumes()["Volumes"]
    assert (disk["Size"], disk["VolumeType"], disk["Encrypted"]) == (150, "gp3", True)
    assert tags.read_tags(disk)[tags.JOB] == bed.uid and machine.instance_profile.endswith("/imgnet-machine")
