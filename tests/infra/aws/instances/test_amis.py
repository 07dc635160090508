"""Choice and description of machine images."""

import re
import tomllib
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement
from support.error_lines import error_line
from support.simcloud.http_server import AwsFrontend
from support.simcloud.in_process import shared_account
from support.simcloud.spot_market import image_id

from infra.aws.client import Account
from infra.aws.instances import amis
from infra.aws.market.instance_types import BUILTIN_TYPES
from infra.aws.tags import to_aws_tags
from infra.errors import CloudError

TORCH = "Deep Learning OSS Nvidia Driver AMI GPU PyTorch 2.13 (Ubuntu 26.04) 20261113"
ROOT = Path(__file__).parents[4]
refusal = partial(error_line, CloudError, amis.resolve_image)
PLAIN = "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 24.04) 20261113"


def account_with_image(**changes: Any) -> Account:
    """Return an account whose EC2 describes a user's own image."""
    disks = [
        {"DeviceName": "/dev/sdb", "VirtualName": "ephemeral0"},
        {"DeviceName": "/dev/sdc", "Ebs": {"VolumeSize": 7}},
        {"DeviceName": "/dev/xvda", "Ebs": {"VolumeSize": 120}},
    ]
    image = {"Name": "mine", "RootDeviceName": "/dev/xvda", "BlockDeviceMappings": disks, **changes}
    account = Account()
    account.__dict__["ec2"] = SimpleNamespace(describe_images=lambda **_: {"Images": [image] if image["Name"] else []})
    return account


def test_resolve_image_prefers_one_with_pytorch_then_the_base_image_then_asks_for_ami(front: AwsFrontend) -> None:
    image = amis.resolve_image(shared_account(), "sm_80")
    assert image == amis.Image(
        image_id("us-east-1", TORCH), "ubuntu", 22, (("/dev/sda1", 75),), TORCH, "/opt/pytorch/bin/python", "2.13"
    )
    assert amis.resolve_image(shared_account("eu-west-1"), "sm_90").id == image_id("eu-west-1", TORCH)
    front.sim.name_images(["base-oss-nvidia-driver-gpu-ubuntu-24.04"])
    image = amis.resolve_image(shared_account(), "sm_89")
    assert (image.name, image.python) == (PLAIN, "")
    front.sim.name_images([])
    assert refusal(shared_account(), "sm_80") == "AWS has no deep-learning image in us-east-1; pass one: --ami ami-..."


def test_images_and_v100_have_a_torch_that_the_project_accepts_and_is_tested_with() -> None:
    """The order follows pyproject.toml and constraints.txt: a new range or version of torch changes it.

    If the project needs a newer torch than V100 can have, this fails: then V100 can no longer be used.
    """
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (accepted,) = [Requirement(text).specifier for text in dependencies if Requirement(text).name == "torch"]
    (tested,) = re.findall(r"^torch==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    versions = [version for name in amis.AMI_PARAMETERS if (version := amis.read_torch_version(name))]
    assert tested.startswith(f"{versions[0]}.") and all(accepted.contains(f"{version}.0") for version in versions)
    others = [tuple(map(int, version.split("."))) for version in versions[1:]]
    assert others == sorted(others, reverse=True)
    assert not any(map(amis.read_torch_version, amis.AMI_PARAMETERS[len(versions) :])), "images without it come last"
    fitting = Requirement(amis.LEGACY_TORCH).specifier
    assert fitting.contains(tested) and not fitting.contains("2.15.0"), "its builds for CUDA 12.6 have no sm_70"
    assert amis.get_torch_requirement("sm_70") == amis.LEGACY_TORCH and amis.get_torch_requirement("sm_75") is None


@pytest.mark.parametrize(("changes", "expected"), [
    ({}, amis.Image("ami-1", "ubuntu", 22, (("/dev/xvda", 120), ("/dev/sdc", 7)), "mine", "")),
    ({"Tags": to_aws_tags({"imgnet:user": "me", "imgnet:port": "2022"})},
     amis.Image("ami-1", "me", 2022, (("/dev/xvda", 120), ("/dev/sdc", 7)), "mine", "")),
    ({"RootDeviceName": None, "BlockDeviceMappings": []},
     amis.Image("ami-1", "ubuntu", 22, (("/dev/sda1", 0),), "mine", "")),
])  # fmt: skip
def test_own_image_is_used_unchanged(front: AwsFrontend, changes: dict[str, Any], expected: amis.Image) -> None:
    account = account_with_image(**changes)
    for arch in ("sm_80", "sm_70"):  # an own image for such GPUs is trusted to have its driver
        assert amis.resolve_image(account, arch, "ami-1") == expected
    assert not front.calls


@pytest.mark.parametrize(("changes", "message"), [
    ({"State": "pending"}, "image ami-1 is pending; wait for it"),
    ({"Architecture": "arm64"}, "image ami-1 is for arm64, but the machines are x86_64"),
    ({"Name": ""}, "there is no image ami-1 in us-east-1"),
    *(
        ({"Tags": to_aws_tags({"imgnet:port": port})}, f"image ami-1: its tag imgnet:port is {port!r}")
        for port in ("0", "65536", "ssh", "-1", "22 ", "2²")
    ),
])  # fmt: skip
def test_image_that_cannot_launch_is_refused(front: AwsFrontend, changes: dict[str, Any], message: str) -> None:
    assert refusal(account_with_image(**changes), "sm_80", "ami-1").startswith(message)


def test_resolve_image_for_v100_needs_an_own_image(front: AwsFrontend) -> None:
    message = refusal(shared_account(), BUILTIN_TYPES["p3dn.24xlarge"].gpu_arch)
    for part in ("sm_70", "proprietary driver, R580 or older", "--ami ami-", amis.LEGACY_BASE_PARAMETER):
        assert part in message
    assert not front.calls
    archs = ("sm_60", "sm_70", "sm_72", "sm_75", "sm_80", "sm_100", "", "sm_x")
    cu126 = "https://download.pytorch.org/whl/cu126"
    assert [amis.get_torch_index_url(arch) for arch in archs] == [cu126] * 3 + [None] * 5, "until Turing"
