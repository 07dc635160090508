"""Machine images (AMIs): which one to launch, how to log in to it, and which PyTorch build its GPUs need.

AWS publishes the IDs of its newest images as Systems Manager parameters. They are resolved once for a job, because
another image in a repeated request would make it a different request.
"""

import re
from dataclasses import dataclass

from infra.aws import tags
from infra.aws.client import Account, call
from infra.errors import CloudError

# In order of preference: the PyTorch with which the project is tested, then others that it accepts, the newest first;
# a test compares them with pyproject.toml. The base image has a driver and no PyTorch. At most ten: SSM takes no more.
AMI_PARAMETERS = tuple(
    f"/aws/service/deeplearning/ami/x86_64/{name}/latest/ami-id"
    for name in (
        "oss-nvidia-driver-gpu-pytorch-2.13-ubuntu-26.04",
        "oss-nvidia-driver-gpu-pytorch-2.14-ubuntu-26.04",
        "oss-nvidia-driver-gpu-pytorch-2.12-ubuntu-24.04",
        "oss-nvidia-driver-gpu-pytorch-2.11-ubuntu-24.04",
        "oss-nvidia-driver-gpu-pytorch-2.10-ubuntu-24.04",
        "base-oss-nvidia-driver-gpu-ubuntu-24.04",
    )
)
TORCH_INSTALL_MINUTES = 5.0  # a download of 3 GB, unpacked to 8 GB
ROOT_DISK_GB = 150  # at least: code, environment, and the data of a machine without fast local disks
USER_TAG = "imgnet:user"  # tag of a user's own image: the login name
PORT_TAG = "imgnet:port"  # tag of a user's own image: the port of sshd
MIN_COMPUTE_CAPABILITY = 75  # 7.5, Turing: the first that NVIDIA's open driver and CUDA 13 support
# The last builds for Volta are those for CUDA 12.6, up to PyTorch 2.14 (pytorch/pytorch, RFC 190385).
LEGACY_TORCH_INDEX_URL = "https://download.pytorch.org/whl/cu126"
LEGACY_TORCH = "torch<2.15"
# The SSM parameter of the Ubuntu from which an image for Volta is made. R580 is the last driver for Volta (NVIDIA,
# "Datacenter Drivers"); Ubuntu has its proprietary modules. The image of AWS's own that has such a driver is of Amazon
# Linux 2 (DLAMI release notes of January 2026), whose libc is too old for PyTorch.
LEGACY_BASE_PARAMETER = "/aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/ami-id"


@dataclass(frozen=True)
class Image:
    """A machine image."""

    id: str
    ssh_user: str
    ssh_port: int
    disks: tuple[tuple[str, int], ...]  # device and gigabytes of each: first the root device, whose size may be 0
    name: str
    python: str  # path of the Python that has PyTorch, "" when unknown
    torch: str = ""  # version of its PyTorch, "" when unknown

    @property
    def machine_disks(self) -> dict[str, int]:
        """The gigabytes of each disk of a machine by device, the root device first."""
        (root_device, gigabytes), *others = self.disks
        return {root_device: max(ROOT_DISK_GB, gigabytes), **dict(others)}


def resolve_image(account: Account, gpu_arch: str, ami: str | None = None) -> Image:
    """Return AWS's newest image for GPUs of an architecture ("sm_80"), or the image with the ID `ami`.

    Raises `CloudError` when there is none, or when no image of AWS supports such GPUs.
    """
    if ami:
        return _describe_image(account, ami)
    if is_legacy_arch(gpu_arch):
        raise CloudError(explain_legacy_arch(gpu_arch))
    response = call("look up the deep-learning images", account.ssm.get_parameters, Names=list(AMI_PARAMETERS))
    image_ids = {parameter["Name"]: parameter["Value"].strip() for parameter in response["Parameters"]}
    for name in AMI_PARAMETERS:
        if image_ids.get(name):
            return _describe_image(account, image_ids[name], read_torch_version(name))
    raise CloudError(f"AWS has no deep-learning image in {account.region}; pass one: --ami ami-...")


def read_torch_version(parameter: str) -> str:
    """Return the version of PyTorch that the name of an image's parameter contains, "" for an image without it."""
    match = re.search(r"-pytorch-([0-9.]+)-", parameter)
    return match[1] if match else ""


def explain_legacy_arch(gpu_arch: str) -> str:
    """Return in one line why AWS's images cannot be used for such GPUs, and what to do."""
    return (
        f"AWS's deep-learning images do not support GPUs as old as {gpu_arch} (V100), which need NVIDIA's "
        f"proprietary driver, R580 or older; make an image with it from {LEGACY_BASE_PARAMETER} (docs/aws.md, 'V100 "
        "machines', has the commands) and pass it: --ami ami-...; or take newer GPUs: --type p4d.24xlarge"
    )


def get_torch_index_url(gpu_arch: str) -> str | None:
    """Return the package index whose PyTorch supports such GPUs, None when the default build does."""
    return LEGACY_TORCH_INDEX_URL if is_legacy_arch(gpu_arch) else None


def get_torch_requirement(gpu_arch: str) -> str | None:
    """Return the versions of PyTorch whose builds in that index support such GPUs, None when all do."""
    return LEGACY_TORCH if is_legacy_arch(gpu_arch) else None


def is_legacy_arch(gpu_arch: str) -> bool:
    """Whether GPUs are too old for AWS's images and for the default PyTorch build."""
    number = gpu_arch.removeprefix("sm_")
    return number.isdecimal() and int(number) < MIN_COMPUTE_CAPABILITY


def _describe_image(account: Account, ami: str, torch: str = "") -> Image:
    """Return an image. Raises `CloudError` when it does not exist, or cannot be launched on the supported types."""
    response = call(f"look up image {ami}", account.ec2.describe_images, ImageIds=[ami])
    if not response.get("Images"):
        raise CloudError(f"there is no image {ami} in {account.region}; images belong to a region: pass another --ami")
    image = response["Images"][0]
    if image.get("State", "available") != "available":
        raise CloudError(f"image {ami} is {image['State']}; wait for it, or pass another --ami")
    if image.get("Architecture", "x86_64") != "x86_64":
        raise CloudError(f"image {ami} is for {image['Architecture']}, but the machines are x86_64; pass another --ami")
    user, port = _ssh_login(ami, tags.read_tags(image))
    root_device = image.get("RootDeviceName") or "/dev/sda1"
    disks = [(each["DeviceName"], each.get("Ebs", {})) for each in image.get("BlockDeviceMappings", [])]
    sizes = {device: int(disk["VolumeSize"]) for device, disk in disks if disk.get("VolumeSize")}
    return Image(
        id=ami,
        ssh_user=user,
        ssh_port=port,
        disks=((root_device, sizes.pop(root_device, 0)), *sizes.items()),
        name=image.get("Name", ""),
        python="/opt/pytorch/bin/python" if torch else "",
        torch=torch,
    )


def _ssh_login(ami: str, image_tags: dict[str, str]) -> tuple[str, int]:
    """Return user and port from an image's tags; ubuntu and 22 without them. Raises `CloudError`."""
    user = image_tags.get(USER_TAG) or "ubuntu"
    port = image_tags.get(PORT_TAG) or "22"
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise CloudError(
            f"image {ami}: its tag {PORT_TAG} is {port!r}, which is not a port; "
            f"set it: aws ec2 create-tags --resources {ami} --tags Key={PORT_TAG},Value=22"
        )
    return user, int(port)
