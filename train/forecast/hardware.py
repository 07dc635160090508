"""Presets for GPUs, models, networks and processors, each with its source. What a run measured replaces them."""

import math
from collections.abc import Collection
from dataclasses import dataclass

from train.recipe.schedule import Schedule

REFERENCE_PIXELS = 224  # image size at which speeds of GPUs and work of models are stated


@dataclass(frozen=True)
class DeviceSpec:
    """Speed of a GPU: images/s of ResNet-50 training at 224 pixels, and Gbit/s to the other GPUs of its machine."""

    images_per_second: float
    bus_gbit: float


# Speed of ResNet-50 in float32 over that in half precision, of which the presets below are: 367 / 1200 images/s on a
# V100, 938 / 2470 in TF32 on an A100 (NVIDIA DeepLearningExamples, PyTorch ResNet50 v1.5, pytorch-21.03). Later GPUs
# have TF32, and are taken to be as the A100. P100 and CPU compute in float32 in any case.
FLOAT32_SHARE = {"V100": 0.306, "T4": 0.306, "P100": 1.0, "CPU": 1.0}
FLOAT32_SHARE_WITH_TF32 = 0.380
NVLINK_GBIT = 1000.0  # assumed, not measured
PCIE_GBIT = 80.0  # assumed, not measured
# H100: measured here, 256 images in bfloat16 (LOG.md, 2026-11-26). H200: H100's times their ratio in MLPerf v4.0 (7983
# / 7184). The others are planning figures for plain PyTorch: 50 to 60 % of what the memory's bandwidth allows at 444 MB
# an image (11.1 million outputs of its convolutions, of 2 bytes, passed some 20 times). A10G, L4, T4: bandwidth (600,
# 300, 320 GB/s) / 444 MB x 0.55. P100: fp32, Goyal et al. 2017's 29 hours on eight. CPU: one process on two cores,
# fitted to our CIFAR-10 run (LOG.md).
DEVICES = {
    "P100": DeviceSpec(140, NVLINK_GBIT),
    "V100": DeviceSpec(1000, NVLINK_GBIT),
    "A100": DeviceSpec(2400, NVLINK_GBIT),
    "H100": DeviceSpec(3950, NVLINK_GBIT),
    "H200": DeviceSpec(4400, NVLINK_GBIT),
    "A10G": DeviceSpec(740, PCIE_GBIT),
    "L4": DeviceSpec(370, PCIE_GBIT),
    "L40S": DeviceSpec(1200, PCIE_GBIT),
    "T4": DeviceSpec(390, PCIE_GBIT),
    "CPU": DeviceSpec(16, PCIE_GBIT),
}


def device_in_precision(gpu: str, precision: str) -> DeviceSpec | None:
    """Return the preset of a GPU for the precision of a recipe; None for an unknown GPU."""
    device = DEVICES.get(gpu)
    if device is None or precision != "fp32":
        return device
    share = FLOAT32_SHARE.get(gpu, FLOAT32_SHARE_WITH_TF32)
    return DeviceSpec(device.images_per_second * share, device.bus_gbit)


# For each model its work per image over ResNet-50's, and its number of parameters. The work is counted as the
# convolutions' output at 224 pixels, because training waits for memory.
MODEL_COSTS = {
    "resnet10_tiny": (0.102, 436_536),
    "resnet10_cifar": (0.406, 436_536),
    "resnet18": (0.223, 11_689_512),
    "resnet34": (0.336, 21_797_672),
    "resnet50": (1.0, 25_557_032),
    "resnet101": (1.460, 44_549_160),
    "resnet152": (2.029, 60_192_808),
    "alexnet_bn": (0.059, 60_967_112),  # without its fully connected layers, which have nearly all of its parameters
}


@dataclass(frozen=True)
class NetworkSpec:
    """A network between machines: the share of its speed that an all-reduce gets, and the seconds of one hop."""

    efficiency: float
    hop_seconds: float


TCP_NETWORK = NetworkSpec(0.5, 60e-6)  # 0.5: of 25 Gbit/s, from the log of imagenet18 on 8 machines; 60 us: assumed
RDMA_NETWORK = NetworkSpec(0.65, 20e-6)  # past the kernel: EFA on EC2, InfiniBand, RoCE
RDMA_MIN_GBIT = 100  # machines with a network of this speed or more are taken to have one

# Microseconds of one core for an ImageNet image by (copy, size): read, decode, crop, resize with antialiasing. Measured
# on 2026-11-21 with simplejpeg 1.9 and torch 2.13 on a 2.3 GHz Xeon (best of 3 passes over 398 photographs). A larger
# size costs the nearest measured size's time and 0.9 us for each thousand additional pixels, as between 128, 224 and
# 288 there.
DECODE_MICROSECONDS = {
    (160, 128): 282.0,
    (160, 224): 359.0,
    (352, 128): 840.0,
    (352, 224): 960.0,
    (352, 288): 1091.0,
    (None, 128): 1667.0,
    (None, 224): 1650.0,
}
RESIZE_MICROSECONDS = 0.9e-3  # of one pixel
VCPU_CORE_SHARE = 0.45  # of such a core that a vCPU gives: 40 to 50 %, assumed

# Bytes of an image by copy: ImageNet is 16.8 GB at 160 pixels, 63 GB at 352 (quality 90), 140 GB at full size, by its
# number of images times the mean of 400 of them.
IMAGE_BYTES = {160: 13_100, 352: 49_000, None: 109_000}
IMAGE_BYTES_EXPONENT = 1.67  # bytes grow with this power of the short side, as between 160 and 352
RECTANGLE_PIXEL_RATIO = 1.33  # pixels of a whole image over those of its centre square, ImageNet's mean


def has_known_images(schedule: Schedule) -> bool:
    """Return whether the data set is ImageNet, for whose images these presets are. Of other images nothing is known."""
    return schedule.recipe.data.name.startswith("imagenet")


def loader_images_per_second(copy: int | None, size: int, vcpus: float) -> float:
    """Return the images/s that the processors of one machine load, for a copy (None: full size) and an image size."""
    measured_copy = None if copy is None else 160 if copy < 256 else 352
    nearest = min(
        (measured for measured in DECODE_MICROSECONDS if measured[0] == measured_copy),
        key=lambda measured: abs(math.log(measured[1] / size)),
    )
    microseconds = DECODE_MICROSECONDS[nearest]
    if size > nearest[1]:
        microseconds += RESIZE_MICROSECONDS * (size**2 - nearest[1] ** 2)
    return vcpus * VCPU_CORE_SHARE * 1e6 / microseconds


def fetch_bytes(schedule: Schedule) -> float:
    """Return the bytes of the data sets that a schedule reads, fetched as a whole; 0 when unknown."""
    data, copies = schedule.recipe.data, {epoch.scheduled_phase.phase.copy for epoch in schedule.epochs}
    return _bytes_of_images(schedule, data.train + data.val, copies)


def read_bytes(schedule: Schedule, val_images: int) -> float:
    """Return the bytes of images that the epochs of a schedule read in all, each image anew; 0 when unknown."""
    copies = [epoch.scheduled_phase.phase.copy for epoch in schedule.epochs]
    return _bytes_of_images(schedule, schedule.images + val_images, copies)


def _bytes_of_images(schedule: Schedule, images: int, copies: Collection[int | None]) -> float:
    if not has_known_images(schedule):
        return 0.0
    bytes_per_image = 0.0
    for copy in copies:
        if copy is None or copy in IMAGE_BYTES:
            bytes_per_image += IMAGE_BYTES[copy]
        else:
            bytes_per_image += IMAGE_BYTES[160] * (copy / 160) ** IMAGE_BYTES_EXPONENT
    return images * bytes_per_image
