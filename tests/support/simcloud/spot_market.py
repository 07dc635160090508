"""The market of instances: types by zone, capacity, quotas, prices, and the images."""

import hashlib
from collections.abc import Collection
from datetime import UTC, datetime
from typing import Any

from moto.core.responses import ActionResult
from moto.core.utils import utcnow
from moto.ec2.models import ec2_backends
from moto.ec2.models.amis import Ami
from moto.ec2.models.instance_types import INSTANCE_TYPE_OFFERINGS, INSTANCE_TYPES
from moto.ssm.models import Parameter
from support.simcloud.cloud import ACCOUNT, SimulatedAws, ec2_call, refuse_if
from support.simcloud.lifecycle import BILLED_STATES

# Dollars per hour, Linux, on demand. Large GPU machines: Karpenter's list of 2026-07-20; small ones: from memory.
ON_DEMAND = {
    "p3.2xlarge": 3.06, "p3.8xlarge": 12.24, "p3.16xlarge": 24.48, "p3dn.24xlarge": 31.21,
    "p4d.24xlarge": 21.96, "p4de.24xlarge": 27.45,
    "p5.4xlarge": 6.88, "p5.48xlarge": 55.04, "p5en.48xlarge": 63.30, "p6-b200.48xlarge": 113.93,
    "g4dn.xlarge": 0.526, "g4dn.12xlarge": 3.912,
    "g5.xlarge": 1.006, "g5.2xlarge": 1.212, "g5.12xlarge": 5.672, "g5.48xlarge": 16.29,
    "g6.xlarge": 0.8048, "g6.12xlarge": 4.602, "g6.48xlarge": 13.35,
    "g6e.xlarge": 1.861, "g6e.12xlarge": 10.493, "g6e.48xlarge": 30.13, "g7e.48xlarge": 33.14,
    "c5.large": 0.085, "t3.micro": 0.0104,
    "c7i.2xlarge": 0.4,  # as all types without a price here; in the list, so that what is planned is what is billed
}  # fmt: skip
PLENTY_VCPU = 100_000.0
UBUNTU_BY_TORCH = {"2.9": "24.04", "2.10": "24.04", "2.11": "24.04", "2.12": "24.04", "2.13": "26.04", "2.14": "26.04"}
IMAGES = {  # names of the images by SSM parameter (the names are AWS's, the ids of the images are ours)
    "base-oss-nvidia-driver-gpu-ubuntu-22.04": "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 22.04) 20261113",
    "base-oss-nvidia-driver-gpu-ubuntu-24.04": "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 24.04) 20261113",
    **{
        f"oss-nvidia-driver-gpu-pytorch-{torch}-ubuntu-{ubuntu}": (
            f"Deep Learning OSS Nvidia Driver AMI GPU PyTorch {torch} (Ubuntu {ubuntu}) 20261113"
        )
        for torch, ubuntu in UBUNTU_BY_TORCH.items()
    },
}
IMAGE_GB = 75
ENABLED_REGIONS = "eu-west-1", "us-east-1", "us-west-2"
PARAMETER = "/aws/service/deeplearning/ami/x86_64/{}/latest/ami-id"
AMAZON = "898082745236"
STANDARD = tuple("acdhimrtz")  # prefixes of the standard types
QUOTAS = {  # by quota code: (market, prefixes of the types' names)
    "L-417A185B": ("on-demand", ("p",)),
    "L-DB2E81BA": ("on-demand", ("g", "vt")),
    "L-1216C47A": ("on-demand", STANDARD),
    "L-C4BD4855": ("spot", ("p5", "p6")),
    "L-7212CCBC": ("spot", ("p2", "p3", "p4")),
    "L-3819A6DF": ("spot", ("g", "vt")),
    "L-34B43A08": ("spot", STANDARD),
}


def on_demand(type: str) -> float:
    """Return the on-demand price in dollars per hour. A type without a price here costs 5 cents per vCPU."""
    return ON_DEMAND.get(type, 0.05 * vcpus(type))


def quota_code(type: str, market: str) -> str | None:
    """Return the code of the quota that counts this type in this market, None without one."""
    return next((code for code, (one, names) in QUOTAS.items() if one == market and type.startswith(names)), None)


def vcpus(type: str) -> int:
    return int(INSTANCE_TYPES[type]["VCpuInfo"]["DefaultVCpus"])


def offered(region: str, type: str) -> list[str]:
    rows = INSTANCE_TYPE_OFFERINGS["availability-zone"].get(region, [])
    return sorted(row["Location"] for row in rows if row["InstanceType"] == type)


def spot_price(sim: SimulatedAws, zone: str, type: str) -> float:
    """Return the spot price in dollars per hour: as set, else 0.30 to 0.50 of the on-demand price, by zone and type."""
    part = int(hashlib.sha256(f"{zone} {type}".encode()).hexdigest()[:4], 16) / 0xFFFF
    return sim.spot_prices.get((zone, type), round(on_demand(type) * (0.30 + part * 0.20), 4))


def dollars_per_hour(sim: SimulatedAws, instance: Any) -> float:
    if instance.life.market == "spot":
        return spot_price(sim, instance.placement.zone, instance.instance_type)
    is_paid = instance.life.market == "capacity-block"  # when it was bought
    return 0.0 if is_paid else on_demand(instance.instance_type)


def allocate(sim: SimulatedAws, request: Any) -> int:
    """Return how many instances are launched now, and take them from the capacity.

    Raises `AwsError` when these are fewer than MinCount.
    """
    zones = offered(request.region, request.type)
    refuse_if(request.zone not in zones, "Unsupported", f"{request.type} is offered in {zones}.")
    quota_count = _quota_count(sim, request)
    is_limited = (request.zone, request.type) in sim.capacity and not request.reservations
    free: int = sim.capacity[request.zone, request.type] if is_limited else request.max_count
    count = min(int(request.max_count), int(quota_count), free)
    is_spot = request.market == "spot"
    code = "MaxSpotInstanceCountExceeded" if is_spot else "VcpuLimitExceeded"
    refuse_if(quota_count < request.min_count, code, f"The quota allows {quota_count:g} instances.")
    message = f"We currently do not have sufficient {request.type} capacity in {request.zone}."
    refuse_if(count < request.min_count, "InsufficientInstanceCapacity", message)
    if is_limited:
        sim.capacity[request.zone, request.type] -= count
    return count


def _quota_count(sim: SimulatedAws, request: Any) -> float:
    code = quota_code(request.type, request.market)
    if code is None:
        return float(request.max_count)
    counted = [one for one in sim.all_instances(request.backend) if _counts_towards_quota(sim, one)]
    types = [one.instance_type for one in counted if quota_code(one.instance_type, one.life.market) == code]
    used = sum(map(vcpus, types))
    return (sim.quota_vcpu.get(code, PLENTY_VCPU) - used) // vcpus(request.type)


def _counts_towards_quota(sim: SimulatedAws, instance: Any) -> bool:
    """Return whether EC2 counts an instance: also while it ends, and for a while after its end."""
    end = instance.life.termination_time
    is_fresh_end = end is not None and sim.now() < end + sim.quota_seconds
    return instance.state in (*BILLED_STATES, "shutting-down") or is_fresh_end


@ec2_call
def describe_spot_price_history(self: Any) -> ActionResult:
    """List the prices of types in the zones that offer them: of each the one in force at StartTime. None changes."""
    sim = SimulatedAws.current
    start = self._get_param("StartTime")
    types = self._get_param("InstanceTypes", [])
    zone = self._get_param("AvailabilityZone")
    refuse_if(not types, "NotImplemented", "the simulated price history wants instance types")
    rows = [
        {
            "InstanceType": type,
            "ProductDescription": "Linux/UNIX",
            "SpotPrice": f"{spot_price(sim, offered_zone, type):.6f}",
            "AvailabilityZone": offered_zone,
            "Timestamp": (start or datetime.fromtimestamp(sim.now() - 600, UTC)).replace(microsecond=0, tzinfo=UTC),
        }
        for type in types
        for offered_zone in offered(self.region, type)
        if zone in (None, offered_zone)
    ]
    return ActionResult({"SpotPriceHistory": rows})


@ec2_call
def describe_regions(self: Any) -> ActionResult:
    """Return few regions: to ask one more takes the simulation a quarter of a second. By default EC2 has 17."""
    return ActionResult({"Regions": [{"RegionName": name} for name in ENABLED_REGIONS]})


@ec2_call
def get_spot_placement_scores(self: Any) -> ActionResult:
    """Score the zones that offer one of the types: as set, else 5 of 10. AWS shows the ten best (API reference)."""
    sim = SimulatedAws.current
    types = self._get_param("InstanceTypes", [])
    refuse_if(not self._get_param("SingleAvailabilityZone"), "NotImplemented", "only scores of zones are simulated")
    zone_ids = {
        (region, row.name): row.zone_id for region in self._get_param("RegionNames", []) for row in _zones(region)
    }
    rows = [
        {"Region": region, "AvailabilityZoneId": id, "Score": sim.spot_scores.get(zone, 5)}
        for (region, zone), id in zone_ids.items()
        if any(zone in offered(region, type) for type in types)
    ]
    best = sorted(rows, key=lambda row: -int(row["Score"]))[:10]
    return ActionResult({"SpotPlacementScores": best})


def _zones(region: str) -> Any:
    return ec2_backends[ACCOUNT][region].describe_availability_zones()


def image_id(region: str, name: str) -> str:
    return "ami-" + hashlib.sha256(f"{region} {name}".encode()).hexdigest()[:17]


def make_images(sim: SimulatedAws, backend: Any) -> None:
    """Create the images of a new region, tagged with the user and the port for a login."""
    user, port = sim.login
    for name in IMAGES.values():
        id = image_id(backend.region_name, name)
        backend.amis[id] = Ami(
            backend, id, name=name, description=name, owner_id=AMAZON, owner_alias="amazon", public=True,
            virtualization_type="hvm", architecture="x86_64", root_device_name="/dev/sda1", root_device_type="ebs",
            hypervisor="xen", region_name=f"{backend.region_name}a",
        )  # fmt: skip
        backend.create_tags([id], {"imgnet:user": user, "imgnet:port": str(port)})


def image_disks(image: Any) -> list[dict[str, Any]]:
    disk = {"SnapshotId": image.ebs_snapshot.id, "VolumeSize": IMAGE_GB}
    disk |= {"DeleteOnTermination": True, "VolumeType": "gp3", "Encrypted": False}
    return [{"DeviceName": image.root_device_name, "Ebs": disk}]


def make_parameters(backend: Any, images: Collection[str] = tuple(IMAGES)) -> None:
    """Create the public parameters of a region that name images, and remove those of all other images."""
    for short, name in IMAGES.items():
        parameter = PARAMETER.format(short)
        backend._parameters.pop(parameter, None)
        if short in images:
            value = image_id(backend.region_name, name)
            arguments = (backend.account_id, parameter, value, "String", None, None, None, utcnow(), 1, "aws:ec2:image")
            backend._parameters[parameter].append(Parameter(*arguments))  # type: ignore[abstract]
