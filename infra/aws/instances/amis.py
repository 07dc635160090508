"""Machine images: which one to start, how to log in to it, and which torch its cards need.

The names are parameters that AWS keeps up to date (Systems Manager). They are resolved once for a job: another image in
a repeated request would make it another request.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from infra.aws import tags
from infra.aws.errors import CloudError

if TYPE_CHECKING:
    from infra.aws.client import Account

# The newest torch first; the plain ones have a driver and no torch.
AMI_PARAMETERS = tuple(
    f"/aws/service/deeplearning/ami/x86_64/{name}/latest/ami-id"
    for name in (
        *(f"oss-nvidia-driver-gpu-pytorch-2.{minor}-ubuntu-24.04" for minor in range(14, 8, -1)),
        "oss-nvidia-driver-gpu-pytorch-2.7-ubuntu-22.04",
        "base-oss-nvidia-driver-gpu-ubuntu-24.04",
        "base-oss-nvidia-driver-gpu-ubuntu-22.04",
    )
)
USER_TAG, PORT_TAG = "imgnet:user", "imgnet:port"  # how an image of one's own says how to log in to it
MIN_COMPUTE_CAPABILITY = 75  # compute capability 7.5, Turing: NVIDIA's open driver and CUDA 13 begin there
LEGACY_TORCH_INDEX_URL = "https://download.pytorch.org/whl/cu126"  # has the last builds of torch, below 2.15, for Volta


@dataclass(frozen=True)
class Image:
    """An image: `user` and `port` of its ssh, its `root` device with a snapshot of `gigabytes`, and the `python` that
    has torch, "" when that must be searched for.
    """

    id: str
    ssh_user: str
    ssh_port: int
    snapshot_gb: int
    root_device: str
    name: str
    python: str


def resolve_image(account: "Account", gpu_arch: str, ami: str | None = None) -> Image:
    """Return AWS's newest image for cards of an architecture ("sm_80"), or the one of the id `ami`.

    Raises `CloudError` when there is none, or when no image of AWS drives such cards.
    """
    if ami:
        return _describe_image(account, ami, "")
    if is_legacy_arch(gpu_arch):
        raise CloudError(
            f"AWS's deep-learning images do not drive cards as old as {gpu_arch} (V100), which need NVIDIA's proprietary "
            "driver, R580 or older; make an image of your own with it and pass it: --ami ami-..., a torch that fits "
            "(cu126, < 2.15) is then installed; or take newer cards: --type p4d.24xlarge"
        )
    name, ami = _find_newest_image(account)
    return _describe_image(account, ami, "/opt/pytorch/bin/python" if "-pytorch-" in name else "")


def get_torch_index_url(gpu_arch: str) -> str | None:
    """Return the package index whose torch has code for such cards, None when the usual torch has it."""
    return LEGACY_TORCH_INDEX_URL if is_legacy_arch(gpu_arch) else None


def is_legacy_arch(gpu_arch: str) -> bool:
    """Whether cards are too old for AWS's images and for the usual torch."""
    number = gpu_arch.removeprefix("sm_")
    return number.isdecimal() and int(number) < MIN_COMPUTE_CAPABILITY


def _find_newest_image(account: "Account") -> tuple[str, str]:
    """Return the first parameter that exists, and the id of its image. Raises `CloudError`."""
    from infra.aws.client import call

    said = call("look up the deep-learning images", account.ssm.get_parameters, Names=list(AMI_PARAMETERS))
    found = {one["Name"]: one["Value"].strip() for one in said.get("Parameters", [])}
    for name in AMI_PARAMETERS:
        if found.get(name):
            return name, found[name]
    raise CloudError(f"AWS names no deep-learning image in {account.region}; pass one: --ami ami-...")


def _describe_image(account: "Account", ami: str, python: str) -> Image:
    from infra.aws.client import call

    said = call(f"look at image {ami}", account.ec2.describe_images, ImageIds=[ami])
    if not said.get("Images"):
        raise CloudError(f"there is no image {ami} in {account.region}; images belong to a region: pass another --ami")
    image = said["Images"][0]
    if image.get("State", "available") != "available":
        raise CloudError(f"image {ami} is {image['State']}; wait for it, or pass another --ami")
    if image.get("Architecture", "x86_64") != "x86_64":
        raise CloudError(f"image {ami} is for {image['Architecture']}, and the machines are x86_64; pass another --ami")
    user, port = _ssh_login(ami, tags.read_tags(image))
    root = image.get("RootDeviceName") or "/dev/sda1"
    return Image(ami, user, port, _root_snapshot_gb(image, root), root, image.get("Name", ""), python)


def _ssh_login(ami: str, image_tags: dict[str, str]) -> tuple[str, int]:
    user, port = image_tags.get(USER_TAG) or "ubuntu", image_tags.get(PORT_TAG) or "22"
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise CloudError(
            f"image {ami}: its tag {PORT_TAG} is {port!r}, which is no port; "
            f"aws ec2 create-tags --resources {ami} --tags Key={PORT_TAG},Value=22"
        )
    return user, int(port)


def _root_snapshot_gb(image: dict[str, Any], root_device: str) -> int:
    sizes = [one.get("Ebs", {}).get("VolumeSize", 0) for one in image.get("BlockDeviceMappings", [])
             if one.get("DeviceName") == root_device]  # fmt: skip
    return int(sizes[0]) if sizes else 0
