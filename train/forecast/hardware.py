"""Presets: what GPUs, models, networks and processors do, each with its source. What a run measured replaces them."""

import math
from dataclasses import dataclass

from train.recipe.schedule import Schedule

REFERENCE_PIXELS = 224  # pixels


@dataclass(frozen=True)
class DeviceSpec:
    """`images` of 224 pixels that a GPU trains ResNet-50 on in a second; `bus` Gbit/s to the others of its machine."""

    images_per_second: float
    bus_gbit: float


NVLINK_GBIT, PCIE_GBIT = 1000.0, 80.0  # assumed, not measured
# Planning figures for plain PyTorch, not measured here: 50 to 60 % of what the memory's bandwidth allows at 444 MB an
# image (facts/training.md 6.2). H200: H100's times their ratio in MLPerf v4.0 (7983 / 7184). A10G, L4, T4: bandwidth
# (600, 300, 320 GB/s) / 444 MB x 0.55. P100: fp32, Goyal et al. 2017's 29 hours on eight. CPU: one process on two
# cores, fitted to our CIFAR-10 (LOG.md).
DEVICES = {
    "P100": DeviceSpec(140, NVLINK_GBIT), "V100": DeviceSpec(1000, NVLINK_GBIT), "A100": DeviceSpec(2400, NVLINK_GBIT), "H100": DeviceSpec(4200, NVLINK_GBIT),
    "H200": DeviceSpec(4700, NVLINK_GBIT), "A10G": DeviceSpec(740, PCIE_GBIT), "L4": DeviceSpec(370, PCIE_GBIT), "L40S": DeviceSpec(1200, PCIE_GBIT),
    "T4": DeviceSpec(390, PCIE_GBIT), "CPU": DeviceSpec(16, PCIE_GBIT),
}  # fmt: skip

# Work of an image beside ResNet-50's, by the convolutions' output at 224 pixels, for training waits for memory; and
# parameters.
MODEL_COSTS = {
    "resnet10_tiny": (0.102, 436_536),
    "resnet10_cifar": (0.406, 436_536),
    "resnet18": (0.223, 11_689_512),
    "resnet34": (0.336, 21_797_672),
    "resnet50": (1.0, 25_557_032),
    "resnet101": (1.460, 44_549_160),
    "resnet152": (2.029, 60_192_808),
    "alexnet_bn": (0.059, 60_967_112),  # its fully connected layers, nearly all of its parameters, are not counted
}


@dataclass(frozen=True)
class NetworkSpec:
    """How much of its speed a network gives to an all-reduce, and the seconds of one hop."""

    efficiency: float
    hop_seconds: float


TCP_NETWORK, EFA_NETWORK = NetworkSpec(0.5, 60e-6), NetworkSpec(0.65, 20e-6)  # facts/training.md 6.4
EFA_MIN_GBIT = 100  # EC2's machines with so much or more have EFA

# Microseconds of one core for an image of ImageNet: read, decode, crop, resize with antialiasing; measured on 2.3 GHz
# cores with photographs (facts/loading.md 2, simplejpeg and torch). At another size: the nearest one's and 0.9 us for
# each thousand pixels that are written more, as between 128, 224 and 288 there.
DECODE_MICROSECONDS = {
    (160, 128): 282.0, (160, 224): 359.0, (352, 128): 840.0, (352, 224): 960.0, (352, 288): 1091.0,
    (None, 128): 1667.0, (None, 224): 1650.0,
}  # fmt: skip
RESIZE_MICROSECONDS = 0.9e-3  # us a pixel
VCPU_CORE_SHARE = 0.45  # of such a core that a vCPU gives: 40 to 50 %, assumed (facts/loading.md 8)

# Bytes of an image: whole ImageNet is 16.8 GB at 160 pixels, 63 GB at 352 (quality 90), 140 GB full (loading.md 6).
IMAGE_BYTES = {160: 13_100, 352: 49_000, None: 109_000}
RECTANGLE_PIXEL_RATIO = 1.33  # pixels of a whole image beside its centre square, at ImageNet's mean


def has_known_images(schedule: Schedule) -> bool:
    """Whether the images are ImageNet's, whose sizes these presets are for; of others nothing is known."""
    return schedule.recipe.data.name.startswith("imagenet")


def loader_images_per_second(copy: int | None, size: int, vcpus: float) -> float:
    """Return images/s that the processors of one machine make of a prepared copy (None: full size) at a size."""
    source = copy if copy is None or copy in (160, 352) else 160 if copy < 256 else 352
    near = min((one for one in DECODE_MICROSECONDS if one[0] == source), key=lambda one: abs(math.log(one[1] / size)))
    micro = (
        max(150.0, DECODE_MICROSECONDS[near] + RESIZE_MICROSECONDS * (size**2 - near[1] ** 2))
        if size > near[1]
        else DECODE_MICROSECONDS[near]
    )
    return vcpus * VCPU_CORE_SHARE * 1e6 / micro


def fetch_bytes(schedule: Schedule, val_images: int) -> float:
    """Return the bytes of all copies that the schedule's epochs read, and of `val` images; 0: nobody knows."""
    if not has_known_images(schedule):
        return 0.0
    copies = {epoch.scheduled_phase.phase.copy for epoch in schedule.epochs}
    images = schedule.images + val_images
    sizes = [
        IMAGE_BYTES.get(one, 0) or IMAGE_BYTES[160] * (one / 160) ** 1.67 if one else IMAGE_BYTES[None]
        for one in copies
    ]  # between: as 160 to 352
    return images * float(sum(sizes))
