"""What is asked of EC2, to the letter: golden/ has the requests, made anew by `GOLDEN=1 pytest <this file>`."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.aws_gang import ZONES, Bed, bed

from infra.aws import tags
from infra.aws.instances import request
from infra.aws.instances.amis import Image
from infra.aws.instances.request import InstanceRequest, Place, build_run_instances
from infra.aws.instances.user_data import build_user_data
from infra.aws.market.instance_types import BUILTIN_TYPES
from infra.aws.stack.stack import Stack

__all__ = ["bed"]

GOLDEN = Path(__file__).parents[2] / "golden"
STACK = Stack(
    region="us-east-1", vpc="vpc-0a1", subnets={"us-east-1a": "subnet-0a1", "us-east-1b": "subnet-0b2"},
    security_group="sg-0c3", file_system="fs-0d4", key_name="imgnet-0123456789ab", key_file="/home/ann/key",
    instance_profile="imgnet-machine", bucket=None, access_point="fsap-0e5",
)  # fmt: skip
IMAGE = Image("ami-0f6", "ubuntu", 22, 75, "/dev/sda1", "Deep Learning", "/opt/pytorch/bin/python")
WANT = InstanceRequest(
    job_uid="job-3-9073e811", job_name="job-3", owner="ann", expires=1_795_298_400.0, image=IMAGE, stack=STACK,
    user_data=build_user_data(
        poweroff_seconds=7200, private_key="(private half)", public_key="ssh-ed25519 AAAA", file_system="fs-0d4",
        access_point="fsap-0e5", region="us-east-1", ssh_user="ubuntu", python=IMAGE.python,
    ), host_key="ssh-ed25519 AAAA",
)  # fmt: skip


def made(type: str = "g5.xlarge", market: str = "spot", n: int = 2, number: int = 1, **changes: Any) -> dict[str, Any]:
    place = Place(region="us-east-1", zone="us-east-1b", type=type, market=market, price=1.0)
    return build_run_instances(
        replace(WANT, **changes), BUILTIN_TYPES[type], place, [str(one) for one in range(n)], number
    )


CASES = {"g5": ("g5.xlarge", "spot", 2), "p4d": ("p4d.24xlarge", "on-demand", 16), "p5": ("p5.48xlarge", "spot", 16)}


@pytest.mark.parametrize("case", CASES)
def test_a_request_is_to_the_letter_what_it_was(case: str) -> None:
    path = GOLDEN / f"run_instances_{case}.json"
    text = json.dumps(made(*CASES[case]), indent=1) + "\n"
    if os.environ.get("GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize(("case", "count"), [("g5", 1), ("p4d", 4), ("p5", 32)])
def test_a_machine_has_all_its_cards_and_a_public_address_only_with_one(case: str, count: int) -> None:
    nics = json.loads((GOLDEN / f"run_instances_{case}.json").read_text())["NetworkInterfaces"]
    assert [one["NetworkCardIndex"] for one in nics] == list(range(count))
    assert [one["DeviceIndex"] for one in nics] == [0] + [1] * (count - 1)
    assert {one["InterfaceType"] for one in nics} == {"efa" if count > 1 else "interface"}
    assert {one["SubnetId"] for one in nics} == {"subnet-0b2"} and all(one["DeleteOnTermination"] for one in nics)
    assert [one.get("AssociatePublicIpAddress", False) for one in nics] == [count == 1] * count


@pytest.mark.parametrize("type", BUILTIN_TYPES)
def test_every_type_has_no_more_interfaces_than_cards_and_one_at_least(type: str) -> None:
    kind = BUILTIN_TYPES[type]
    nics = request.network_interfaces(kind, "subnet-1", "sg-1")
    assert 1 <= len(nics) <= max(1, kind.efa_interfaces) and len(nics) <= kind.network_cards
    assert len(nics) == 1 or len(nics) == min(kind.efa_interfaces, kind.network_cards)


def test_all_or_none_and_no_machine_outlives_its_power() -> None:
    for case in CASES.values():
        asked = made(*case)
        assert asked["MinCount"] == asked["MaxCount"] == case[2]
        assert asked["InstanceInitiatedShutdownBehavior"] == "terminate"
        assert asked["MetadataOptions"]["HttpTokens"] == "required"
        assert asked["MetadataOptions"]["HttpPutResponseHopLimit"] == 1
        assert asked["BlockDeviceMappings"][0]["Ebs"]["Encrypted"] is True
        assert "SubnetId" not in asked and "SecurityGroupIds" not in asked, "they are the interfaces'"


def test_what_comes_with_a_machine_bears_the_same_tags() -> None:
    for market in ("spot", "on-demand"):
        asked = made(market=market)
        said = {one["ResourceType"]: {tag["Key"]: tag["Value"] for tag in one["Tags"]}
                for one in asked["TagSpecifications"]}  # fmt: skip
        kinds = {"instance", "volume", "network-interface"}
        kinds |= {"spot-instances-request"} if market == "spot" else set()
        assert said.keys() == kinds and len({json.dumps(one) for one in said.values()}) == 1
        assert said["instance"] == {
            tags.STACK: "imgnet", tags.JOB: "job-3-9073e811", tags.MACHINE: "0-1", tags.OWNER: "ann",
            tags.LAUNCH: asked["ClientToken"], tags.EXPIRES: "2026-11-21T22:00:00Z", tags.NAME: "imgnet job-3",
        }  # fmt: skip
        assert ("InstanceMarketOptions" in asked) is (market == "spot")


def test_the_token_is_the_askings_own() -> None:
    own = made()["ClientToken"]
    others = [
        made(number=2), made(n=3), made(market="on-demand"), made(type="g5.2xlarge"), made(job_uid="job-4"),
        made(expires=WANT.expires + 1), made(owner="bob"), made(user_data="#cloud-config\n{}"), made(use_placement_group=False),
        made(use_placement_group=False, number=2),
    ]  # fmt: skip
    tokens = [own, *[one["ClientToken"] for one in others]]
    assert made()["ClientToken"] == own and len(set(tokens)) == len(tokens)
    assert all(one.isascii() and len(one) <= 64 for one in tokens)
    elsewhere = Place(region="us-west-2", zone="us-east-1b", type="g5.xlarge", market="spot")
    assert build_run_instances(WANT, BUILTIN_TYPES["g5.xlarge"], elsewhere, ["0", "1"], 1)["ClientToken"] not in tokens


def test_the_disk_holds_the_image_whatever_was_asked_for() -> None:
    sizes = [
        made(disk_gb=gb)["BlockDeviceMappings"][0]["Ebs"]["VolumeSize"] for gb in (10, 75, 400)
    ]  # fmt: skip
    assert sizes == [75, 75, 400]


def test_without_a_group_none_is_named() -> None:
    assert "Placement" not in made(use_placement_group=False)
    assert made(number=7)["Placement"] == {"GroupName": "imgnet-job-3-9073e811-7"}


@pytest.mark.parametrize("names", [["0"], ["3"], ["0", "1"], [str(one) for one in range(4, 16)]])
def test_the_names_in_a_tag_are_read_back(names: list[str]) -> None:
    text = request.format_machine_range(names)
    assert [request.machine_name_in_range(text, index) for index in range(len(names))] == names
    assert request.machine_name_in_range(text, len(names)) == ""


def test_a_request_survives_the_journal(bed: Bed) -> None:
    place = bed.place(ZONES[0])
    asked = build_run_instances(bed.want(place), BUILTIN_TYPES["g5.xlarge"], place, ["0"], 1)
    bed.journal.write("look", request=asked)
    assert bed.journal.lines()[0]["request"] == asked


@pytest.mark.parametrize("type", ["g5.xlarge", "p4d.24xlarge", "p5.48xlarge"])
def test_ec2_takes_the_requests_and_shows_the_machines_as_asked(bed: Bed, type: str) -> None:
    (one,) = bed.acquire(bed.place(ZONES[0], type=type), n=1)
    (said,) = bed.account.ec2.describe_instances(InstanceIds=[one.id])["Reservations"][0]["Instances"]
    assert len(said["NetworkInterfaces"]) == len(request.network_interfaces(BUILTIN_TYPES[type], "", ""))
    assert said["MetadataOptions"]["HttpTokens"] == "required" and said["KeyName"] == "imgnet-key"
    (disk,) = bed.account.ec2.describe_volumes()["Volumes"]
    assert (disk["Size"], disk["VolumeType"], disk["Encrypted"]) == (150, "gp3", True)
    assert tags.read_tags(disk)[tags.JOB] == bed.uid and one.instance_profile.endswith("/imgnet-machine")
