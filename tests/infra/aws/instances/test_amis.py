"""Which image is started, and what it says of itself."""

from typing import Any

import pytest
from moto.ssm.models import ssm_backends
from support.simcloud.http_server import AwsFrontend
from support.simcloud.spot_market import IMAGES, PARAMETER, image_id

from infra.aws.client import Account
from infra.aws.errors import CloudError
from infra.aws.instances import amis
from infra.aws.market.instance_types import BUILTIN_TYPES

TORCH = "Deep Learning OSS Nvidia Driver AMI GPU PyTorch 2.9 (Ubuntu 24.04) 20261113"
PLAIN = "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 24.04) 20261113"


def refusal(*words: Any) -> str:
    with pytest.raises(CloudError) as caught:
        amis.resolve_image(*words)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def own(account: Account, **changes: str) -> str:
    """An image of one's own, with tags."""
    snapshot = account.ec2.create_snapshot(VolumeId=account.ec2.create_volume(
        AvailabilityZone="us-east-1a", Size=8)["VolumeId"])["SnapshotId"]  # fmt: skip
    disk = {"DeviceName": "/dev/xvda", "Ebs": {"SnapshotId": snapshot, "VolumeSize": 120}}
    words: dict[str, Any] = {"Name": "mine", "Architecture": "x86_64", "RootDeviceName": "/dev/xvda"}
    id = account.ec2.register_image(**words | changes, BlockDeviceMappings=[disk])["ImageId"]
    return str(id)


def tag(account: Account, id: str, **tags: str) -> None:
    account.ec2.create_tags(Resources=[id], Tags=[{"Key": f"imgnet:{k}", "Value": v} for k, v in tags.items()])


def test_the_image_with_torch_is_preferred_and_says_where_its_python_is(front: AwsFrontend) -> None:
    found = amis.resolve_image(Account(), "sm_80")
    assert found == amis.Image(
        image_id("us-east-1", TORCH), "ubuntu", 22, 75, "/dev/sda1", TORCH, "/opt/pytorch/bin/python"
    )
    assert amis.resolve_image(Account("eu-west-1"), "sm_90").id == image_id("eu-west-1", TORCH)


def test_without_it_the_plain_one_is_taken_whose_python_must_be_searched(front: AwsFrontend) -> None:
    amis.resolve_image(Account(), "sm_80")  # the region is there from now on
    drop_parameters("oss-nvidia-driver-gpu-pytorch-2.9-ubuntu-24.04")
    found = amis.resolve_image(Account(), "sm_89")
    assert (found.name, found.python) == (PLAIN, "")


def drop_parameters(*names: str) -> None:
    """Take public parameters away from the simulated region."""
    parameters = ssm_backends["123456789012"]["us-east-1"]._parameters
    for name in names:
        parameters.pop(PARAMETER.format(name))


def test_a_region_without_images_is_told_to_pass_one(front: AwsFrontend) -> None:
    amis.resolve_image(Account(), "sm_80")
    drop_parameters(*IMAGES)
    assert refusal(Account(), "sm_80") == "AWS names no deep-learning image in us-east-1; pass one: --ami ami-..."


def test_the_parameters_are_asked_for_in_one_call_that_aws_accepts(front: AwsFrontend) -> None:
    amis.resolve_image(Account(), "sm_80")
    assert front.calls == [("ssm", "GetParameters"), ("ec2", "DescribeImages")]
    assert len(amis.AMI_PARAMETERS) <= 10 and len(set(amis.AMI_PARAMETERS)) == len(amis.AMI_PARAMETERS)
    torch = ["-pytorch-" in name for name in amis.AMI_PARAMETERS]
    assert torch == sorted(torch, reverse=True)


def test_an_image_says_by_its_tags_how_to_log_in(front: AwsFrontend) -> None:
    front.sim.login = ("somebody", 2222)
    found = amis.resolve_image(Account(), "sm_80")
    assert (found.ssh_user, found.ssh_port) == ("somebody", 2222)


def test_an_image_of_ones_own_is_taken_as_it_is(front: AwsFrontend) -> None:
    account = Account()
    ami = own(account)
    found = amis.resolve_image(account, "sm_80", ami)
    assert (found.id, found.ssh_user, found.ssh_port, found.name, found.python) == (ami, "ubuntu", 22, "mine", "")
    tag(account, ami, user="me", port="2022")
    found = amis.resolve_image(account, "sm_70", ami)  # whoever passes an image for such cards knows its driver
    assert (found.ssh_user, found.ssh_port) == ("me", 2022)
    assert ("ssm", "GetParameters") not in front.calls


@pytest.mark.parametrize("port", ["0", "65536", "ssh", "-1", "22 ", "2²"])
def test_a_tag_that_is_no_port_is_refused_with_the_command_that_mends_it(front: AwsFrontend, port: str) -> None:
    account = Account()
    ami = own(account)
    tag(account, ami, port=port)
    said = refusal(account, "sm_80", ami)
    assert f"imgnet:port is {port!r}" in said and f"aws ec2 create-tags --resources {ami}" in said


def test_an_image_that_is_not_there_is_one_line(front: AwsFrontend) -> None:
    said = refusal(Account(), "sm_80", "ami-0123456789abcdef0")
    assert "ami-0123456789abcdef0" in said
    assert "look at image ami-x" in refusal(Account(), "sm_80", "ami-x")


@pytest.mark.parametrize(("changes", "said"), [
    ({"State": "pending"}, "image ami-1 is pending; wait for it"),
    ({"State": "failed"}, "image ami-1 is failed"),
    ({"Architecture": "arm64"}, "image ami-1 is for arm64, and the machines are x86_64"),
    (None, "there is no image ami-1 in us-east-1"),
])  # fmt: skip
def test_an_image_that_cannot_be_started_is_refused(front: AwsFrontend, changes: dict[str, str] | None, said: str) -> None:
    assert refusal(told(changes), "sm_80", "ami-1").startswith(said)


def told(changes: dict[str, Any] | None) -> Account:
    """An account whose EC2 describes one image, ami-1, so."""
    account = Account()
    answer = {"Images": [] if changes is None else [{"ImageId": "ami-1", **changes}]}
    account.__dict__["ec2"] = type("Client", (), {"describe_images": lambda self, **_: answer})()
    return account


def test_the_root_disk_is_the_one_that_has_the_roots_name(front: AwsFrontend) -> None:
    disks = [
        {"DeviceName": "/dev/sdb", "VirtualName": "ephemeral0"},
        {"DeviceName": "/dev/sdc", "Ebs": {"VolumeSize": 7}},
        {"DeviceName": "/dev/xvda", "Ebs": {"VolumeSize": 120}},
    ]
    found = amis.resolve_image(told({"RootDeviceName": "/dev/xvda", "BlockDeviceMappings": disks}), "sm_80", "ami-1")
    assert (found.root_device, found.snapshot_gb) == ("/dev/xvda", 120)
    found = amis.resolve_image(told({}), "sm_80", "ami-1")
    assert (found.root_device, found.snapshot_gb, found.name) == ("/dev/sda1", 0, "")


def test_a_v100_is_refused_without_an_image_of_ones_own_and_gets_a_torch_that_fits(front: AwsFrontend) -> None:
    said = refusal(Account(), BUILTIN_TYPES["p3dn.24xlarge"].gpu_arch)
    assert "sm_70" in said and "proprietary driver" in said and "--ami ami-" in said and "cu126, < 2.15" in said
    assert not front.calls
    assert amis.get_torch_index_url("sm_70") == "https://download.pytorch.org/whl/cu126"


@pytest.mark.parametrize(("arch", "old"), [
    ("sm_60", True), ("sm_70", True), ("sm_72", True), ("sm_75", False), ("sm_80", False), ("sm_90", False),
    ("sm_100", False), ("sm_120", False), ("", False), ("sm_x", False),
])  # fmt: skip
def test_cards_before_turing_are_too_old_and_no_others(arch: str, old: bool) -> None:
    assert amis.is_legacy_arch(arch) is old and (amis.get_torch_index_url(arch) is not None) is old
