"""Choice and description of machine images."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from support.simcloud.http_server import AwsFrontend
from support.simcloud.in_process import shared_account
from support.simcloud.spot_market import IMAGES, PARAMETER, image_id

from infra.aws.client import Account
from infra.aws.instances import amis
from infra.aws.market.instance_types import BUILTIN_TYPES
from infra.errors import CloudError

TORCH = "Deep Learning OSS Nvidia Driver AMI GPU PyTorch 2.13 (Ubuntu 26.04) 20261113"
ROOT = Path(__file__).parents[4]
PLAIN = "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 24.04) 20261113"


def refusal(*args: Any) -> str:
    """Return the one-line error of `resolve_image`."""
    with pytest.raises(CloudError) as caught:
        amis.resolve_image(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def register_own_image(account: Account, **changes: str) -> str:
    """Register a user's own image, and return its ID."""
    snapshot = account.ec2.create_snapshot(
        VolumeId=account.ec2.create_volume(AvailabilityZone="us-east-1a", Size=8)["VolumeId"]
    )["SnapshotId"]
    disk = {"DeviceName": "/dev/xvda", "Ebs": {"SnapshotId": snapshot, "VolumeSize": 120}}
    params: dict[str, Any] = {"Name": "mine", "Architecture": "x86_64", "RootDeviceName": "/dev/xvda"}
    ami = account.ec2.register_image(**params | changes, BlockDeviceMappings=[disk])["ImageId"]
    return str(ami)


def tag_image(account: Account, ami: str, **values: str) -> None:
    account.ec2.create_tags(Resources=[ami], Tags=[{"Key": f"imgnet:{k}", "Value": v} for k, v in values.items()])


def test_resolve_image_prefers_one_with_pytorch_and_names_its_python(front: AwsFrontend) -> None:
    image = amis.resolve_image(shared_account(), "sm_80")
    assert image == amis.Image(
        image_id("us-east-1", TORCH), "ubuntu", 22, 75, "/dev/sda1", TORCH, "/opt/pytorch/bin/python", "2.13"
    )
    assert amis.resolve_image(shared_account("eu-west-1"), "sm_90").id == image_id("eu-west-1", TORCH)


def test_resolve_image_without_pytorch_uses_the_base_image(front: AwsFrontend) -> None:
    front.sim.name_images(["base-oss-nvidia-driver-gpu-ubuntu-24.04"])
    image = amis.resolve_image(shared_account(), "sm_89")
    assert (image.name, image.python) == (PLAIN, "")


def test_resolve_image_without_parameters_asks_for_ami(front: AwsFrontend) -> None:
    front.sim.name_images([])
    assert refusal(shared_account(), "sm_80") == "AWS has no deep-learning image in us-east-1; pass one: --ami ami-..."


def test_resolve_image_asks_for_all_parameters_in_one_call(front: AwsFrontend) -> None:
    amis.resolve_image(shared_account(), "sm_80")
    assert front.calls == [("ssm", "GetParameters"), ("ec2", "DescribeImages")]
    assert len(amis.AMI_PARAMETERS) <= 10 and len(set(amis.AMI_PARAMETERS)) == len(amis.AMI_PARAMETERS)
    torch = ["-pytorch-" in name for name in amis.AMI_PARAMETERS]
    assert torch == sorted(torch, reverse=True)


def image_torch(parameter: str) -> str:
    """Return the version of PyTorch in a parameter's name, "" without one."""
    found = re.search(r"-pytorch-([0-9.]+)-", parameter)
    return found[1] if found else ""


def test_images_have_a_torch_that_the_project_accepts_and_the_tested_one_first() -> None:
    """The order follows pyproject.toml and constraints.txt: a new range or version of torch changes it."""
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (accepted,) = [Requirement(text).specifier for text in dependencies if Requirement(text).name == "torch"]
    (tested,) = re.findall(r"^torch==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    versions = [version for name in amis.AMI_PARAMETERS if (version := image_torch(name))]
    assert versions[0] == tested and all(accepted.contains(f"{version}.0") for version in versions)
    others = [tuple(map(int, version.split("."))) for version in versions[1:]]
    assert others == sorted(others, reverse=True)


def test_each_image_is_one_that_aws_publishes(front: AwsFrontend) -> None:
    """The simulated cloud has the parameters of November 2026."""
    assert {*amis.AMI_PARAMETERS} <= {PARAMETER.format(name) for name in IMAGES}
    for number, parameter in enumerate(amis.AMI_PARAMETERS):
        left = [name for name in IMAGES if PARAMETER.format(name) in amis.AMI_PARAMETERS[number:]]
        front.sim.name_images(left)
        image = amis.resolve_image(shared_account(), "sm_80")
        assert bool(image.python) is bool(image_torch(parameter)) and image_torch(parameter) in image.name


def test_resolve_image_reads_the_ssh_login_from_tags(front: AwsFrontend) -> None:
    front.sim.login = ("somebody", 2222)
    image = amis.resolve_image(shared_account(), "sm_80")
    assert (image.ssh_user, image.ssh_port) == ("somebody", 2222)


def test_resolve_image_uses_an_own_image_unchanged(front: AwsFrontend) -> None:
    account = Account()
    ami = register_own_image(account)
    image = amis.resolve_image(account, "sm_80", ami)
    assert (image.id, image.ssh_user, image.ssh_port, image.name, image.python) == (ami, "ubuntu", 22, "mine", "")
    tag_image(account, ami, user="me", port="2022")
    image = amis.resolve_image(account, "sm_70", ami)  # an own image for such GPUs is trusted to have its driver
    assert (image.ssh_user, image.ssh_port) == ("me", 2022)
    assert ("ssm", "GetParameters") not in front.calls


@pytest.mark.parametrize("port", ["0", "65536", "ssh", "-1", "22 ", "2²"])
def test_resolve_image_with_a_bad_port_tag_names_the_fix(front: AwsFrontend, port: str) -> None:
    account = Account()
    ami = register_own_image(account)
    tag_image(account, ami, port=port)
    message = refusal(account, "sm_80", ami)
    assert f"imgnet:port is {port!r}" in message and f"aws ec2 create-tags --resources {ami}" in message


def test_resolve_image_missing_is_a_one_line_error(front: AwsFrontend) -> None:
    message = refusal(shared_account(), "sm_80", "ami-0123456789abcdef0")
    assert "ami-0123456789abcdef0" in message
    assert "look up image ami-x" in refusal(shared_account(), "sm_80", "ami-x")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"State": "pending"}, "image ami-1 is pending; wait for it"),
        ({"State": "failed"}, "image ami-1 is failed"),
        ({"Architecture": "arm64"}, "image ami-1 is for arm64, but the machines are x86_64"),
        (None, "there is no image ami-1 in us-east-1"),
    ],
)
def test_resolve_image_refuses_images_that_cannot_launch(
    front: AwsFrontend, changes: dict[str, str] | None, message: str
) -> None:
    assert refusal(account_with_image(changes), "sm_80", "ami-1").startswith(message)


def account_with_image(changes: dict[str, Any] | None) -> Account:
    """Return an account whose EC2 describes one image, ami-1, with these changes; None: no image."""
    account = Account()
    response = {"Images": [] if changes is None else [{"ImageId": "ami-1", **changes}]}
    account.__dict__["ec2"] = type("Client", (), {"describe_images": lambda self, **_: response})()
    return account


def test_resolve_image_reads_the_size_of_the_root_device(front: AwsFrontend) -> None:
    disks = [
        {"DeviceName": "/dev/sdb", "VirtualName": "ephemeral0"},
        {"DeviceName": "/dev/sdc", "Ebs": {"VolumeSize": 7}},
        {"DeviceName": "/dev/xvda", "Ebs": {"VolumeSize": 120}},
    ]
    image = amis.resolve_image(
        account_with_image({"RootDeviceName": "/dev/xvda", "BlockDeviceMappings": disks}), "sm_80", "ami-1"
    )
    assert (image.root_device, image.snapshot_gb) == ("/dev/xvda", 120)
    image = amis.resolve_image(account_with_image({}), "sm_80", "ami-1")
    assert (image.root_device, image.snapshot_gb, image.name) == ("/dev/sda1", 0, "")


def test_resolve_image_for_v100_needs_an_own_image(front: AwsFrontend) -> None:
    message = refusal(shared_account(), BUILTIN_TYPES["p3dn.24xlarge"].gpu_arch)
    assert (
        "sm_70" in message
        and "proprietary driver, R580 or older" in message
        and "--ami ami-" in message
        and amis.LEGACY_BASE_PARAMETER in message
    )
    assert not front.calls
    assert amis.get_torch_index_url("sm_70") == "https://download.pytorch.org/whl/cu126"


def test_torch_for_v100_is_one_that_the_project_accepts_and_is_tested_with() -> None:
    """If the project needs a newer one some day, this fails: then V100 can no longer be used."""
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (accepted,) = [Requirement(text).specifier for text in dependencies if Requirement(text).name == "torch"]
    (tested,) = re.findall(r"^torch==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    fitting = Requirement(amis.LEGACY_TORCH).specifier
    assert fitting.contains(tested) and accepted.contains("2.14.1") and fitting.contains("2.14.1+cu126")
    assert not fitting.contains("2.15.0"), "its builds for CUDA 12.6 have no sm_70"
    assert amis.get_torch_requirement("sm_70") == amis.LEGACY_TORCH and amis.get_torch_requirement("sm_75") is None


@pytest.mark.parametrize(
    ("arch", "old"),
    [
        ("sm_60", True),
        ("sm_70", True),
        ("sm_72", True),
        ("sm_75", False),
        ("sm_80", False),
        ("sm_90", False),
        ("sm_100", False),
        ("sm_120", False),
        ("", False),
        ("sm_x", False),
    ],
)
def test_is_legacy_arch_is_true_before_turing(arch: str, old: bool) -> None:
    assert amis.is_legacy_arch(arch) is old and (amis.get_torch_index_url(arch) is not None) is old
