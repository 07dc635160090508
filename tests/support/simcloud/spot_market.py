"""What may be launched and for how much: types by zone, capacity, quotas, spot requests, prices, and the images."""

import hashlib
from datetime import UTC, datetime
from typing import Any

from moto.core.responses import ActionResult
from moto.core.utils import utcnow
from moto.ec2.models.amis import Ami
from moto.ec2.models.instance_types import INSTANCE_TYPE_OFFERINGS, INSTANCE_TYPES
from moto.ssm.models import Parameter
from support.simcloud.cloud import AwsError, Sim
from support.simcloud.lifecycle import BILLED
from support.simcloud.prices import ON_DEMAND, on_demand, spot_factor

PLENTY = 100_000.0
IMAGES = {  # SSM parameter: name of the image (the names are AWS's; the numbers of the images are ours)
    "base-oss-nvidia-driver-gpu-ubuntu-22.04": "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 22.04) 20261113",
    "base-oss-nvidia-driver-gpu-ubuntu-24.04": "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 24.04) 20261113",
    "oss-nvidia-driver-gpu-pytorch-2.9-ubuntu-24.04": (
        "Deep Learning OSS Nvidia Driver AMI GPU PyTorch 2.9 (Ubuntu 24.04) 20261113"
    ),
}
PARAMETER = "/aws/service/deeplearning/ami/x86_64/{}/latest/ami-id"
AMAZON = "898082745236"
QUOTAS = {  # quota code: (market, first letters of the types' names, its name)
    "L-417A185B": ("on-demand", ("p",), "Running On-Demand P instances"),
    "L-DB2E81BA": ("on-demand", ("g", "vt"), "Running On-Demand G and VT instances"),
    "L-1216C47A": ("on-demand", ("standard",), "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances"),
    "L-C4BD4855": ("spot", ("p5", "p6"), "All P5 Spot Instance Requests"),
    "L-7212CCBC": ("spot", ("p2", "p3", "p4"), "All P4, P3 and P2 Spot Instance Requests"),
    "L-3819A6DF": ("spot", ("g", "vt"), "All G and VT Spot Instance Requests"),
    "L-34B43A08": ("spot", ("standard",), "All Standard (A, C, D, H, I, M, R, T, Z) Spot Instance Requests"),
}
STANDARD = tuple("acdhimrtz")


def quota_code(type: str, market: str) -> str | None:
    """The quota that counts this type in this market."""
    for code, (of, prefixes, _) in QUOTAS.items():
        standard = "standard" in prefixes and type.startswith(STANDARD)
        if of == market and (standard or type.startswith(prefixes)):
            return code
    return None


def vcpus(type: str) -> int:
    """The vCPU of a type."""
    return int(INSTANCE_TYPES[type]["VCpuInfo"]["DefaultVCpus"])


def offered(region: str, type: str) -> list[str]:
    """The zones of a region where a type is offered."""
    rows = INSTANCE_TYPE_OFFERINGS["availability-zone"].get(region, [])
    return sorted(row["Location"] for row in rows if row["InstanceType"] == type)


class Market:
    """Who gets what, and at which price."""

    def __init__(self) -> None:
        self.spot: dict[tuple[str, str], float] = {}

    def spot_price(self, zone: str, type: str) -> float:
        """Dollars an hour: as set, else a part of the on-demand price that depends on the zone."""
        if (zone, type) in self.spot:
            return self.spot[zone, type]
        return round(on_demand(type, vcpus(type) if type in INSTANCE_TYPES else 8) * spot_factor(zone, type), 4)

    def hourly(self, instance: Any) -> float:
        """What a new instance costs an hour."""
        type = instance.instance_type
        if instance.life.market == "spot":
            return self.spot_price(instance.placement.zone, type)
        return on_demand(type, vcpus(type))

    def unknown_type(self, type: str) -> None:
        """Refuse a type that EC2 does not describe: one that it once had, and one that never was."""
        if type in ON_DEMAND:
            message = "The requested configuration is currently not supported. Please check the documentation."
            raise AwsError("Unsupported", message)
        raise AwsError("InvalidParameterValue", f"Invalid value '{type}' for InstanceType.")

    def take(self, sim: Sim, ask: Any) -> int:
        """How many are launched now. Raises the error of EC2 if fewer than the least. Capacity goes down by as many."""
        zones = offered(ask.region, ask.type)
        if ask.zone not in zones:
            message = f"Your requested instance type ({ask.type}) is not supported in your requested Availability Zone"
            message += f" ({ask.zone}). Please retry your request by not specifying an Availability Zone or choosing"
            raise AwsError("Unsupported", f"{message} {', '.join(zones)}.")
        self._price(ask)
        within = self._within_quota(sim, ask)
        free: int = sim.capacity.get((ask.zone, ask.type), ask.high)
        count = min(int(ask.high), int(within), free)
        if within < ask.low:
            self._over_quota(sim, ask)
        if count < ask.low:
            message = f"We currently do not have sufficient {ask.type} capacity in the Availability Zone you requested"
            message += f" ({ask.zone}). Our system will be working on provisioning additional capacity."
            raise AwsError("InsufficientInstanceCapacity", message)
        if (ask.zone, ask.type) in sim.capacity:
            sim.capacity[ask.zone, ask.type] -= count
        return count

    def _price(self, ask: Any) -> None:
        price, most = self.spot_price(ask.zone, ask.type), ask.spot["MaxPrice"]
        if ask.market == "spot" and most and float(most) < price:
            message = f"Your Spot request price of {most} is lower than the minimum required Spot request fulfillment"
            raise AwsError("SpotMaxPriceTooLow", f"{message} price of {price}.")

    def _within_quota(self, sim: Sim, ask: Any) -> float:
        code = quota_code(ask.type, ask.market)
        if code is None:
            return float(ask.high)
        used = sum(vcpus(one.instance_type) for one in sim.live() if self._counts(one, ask, code))
        return (sim.quota_vcpu.get(code, PLENTY) - used) // vcpus(ask.type)

    def _counts(self, instance: Any, ask: Any, code: str) -> bool:
        here = instance.region_name == ask.region and instance.state in BILLED
        return here and quota_code(instance.instance_type, instance.life.market) == code

    def _over_quota(self, sim: Sim, ask: Any) -> None:
        if ask.market == "spot":
            raise AwsError("MaxSpotInstanceCountExceeded", "Max spot instance count exceeded")
        limit = sim.quota_vcpu.get(quota_code(ask.type, ask.market) or "", PLENTY)
        message = f"You have requested more vCPU capacity than your current vCPU limit of {limit:g} allows for the"
        message += " instance bucket that the specified instance type belongs to."
        raise AwsError("VcpuLimitExceeded", message)

    # --- spot requests ---------------------------------------------------------------------------------------------

    def open_request(self, sim: Sim, ask: Any, instance: Any) -> None:
        """A spot instance belongs to a request, with tags of its own."""
        if ask.market != "spot":
            return
        id = "sir-" + hashlib.sha256(instance.id.encode()).hexdigest()[:8]
        instance.spot_instance_request_id = instance.life.request = id
        instance.ec2_backend.create_tags([id], ask.tags.get("spot-instances-request", {}))
        sim.requests[id] = {
            "SpotInstanceRequestId": id,
            "CreateTime": datetime.fromtimestamp(sim.now(), UTC),
            "InstanceId": instance.id,
            "InstanceInterruptionBehavior": ask.spot["InstanceInterruptionBehavior"] or "terminate",
            "LaunchedAvailabilityZone": instance.placement.zone,
            "ProductDescription": "Linux/UNIX",
            "SpotPrice": ask.spot["MaxPrice"] or f"{on_demand(ask.type, vcpus(ask.type)):.6f}",
            "State": "active",
            "Status": {"Code": "fulfilled", "Message": "Your spot request is fulfilled."},
            "Type": ask.spot["SpotInstanceType"] or "one-time",
            "region": ask.region,
        }

    def mark_request(self, sim: Sim, instance: Any) -> None:
        """A notice has been given."""
        sim.requests[instance.life.request]["Status"] = {"Code": "marked-for-termination", "Message": "Interruption."}

    def close_request(self, sim: Sim, instance: Any, taken: bool) -> None:
        """Its instance has ended."""
        request = sim.requests.get(instance.life.request or "")
        if request is not None:
            request["State"] = "closed" if request["State"] == "active" else request["State"]
            code = "instance-terminated-no-capacity" if taken else "instance-terminated-by-user"
            request["Status"] = {"Code": code, "Message": code.replace("-", " ")}


def describe_spot_instance_requests(self: Any) -> ActionResult:
    """By ids or filters, with tags; a young one is not seen yet, like its instance."""
    from support.simcloud import placement_groups

    sim, backend, filters = Sim.current, self.ec2_backend, self._filters_from_querystring()
    ids, found = self._get_param("SpotInstanceRequestIds", []), []
    known = {id: one for id, one in sim.requests.items() if one["region"] == self.region}
    known = {id: one for id, one in known.items() if sim.visible(sim.find(one["InstanceId"]))}
    for missing in [id for id in ids if id not in known]:
        message = f"The spot instance request ID '{missing}' does not exist"
        raise AwsError("InvalidSpotInstanceRequestID.NotFound", message)
    for id, one in known.items():
        facts = {"spot-instance-request-id": id, "instance-id": one["InstanceId"], "state": one["State"]}
        facts |= {"type": one["Type"], "launched-availability-zone": one["LaunchedAvailabilityZone"]}
        facts["status-code"] = one["Status"]["Code"]
        if (not ids or id in ids) and placement_groups.matches(backend, id, facts, filters):
            shown = {name: value for name, value in one.items() if name != "region"}
            found.append({**shown, "Tags": placement_groups.Tagged(backend, id).tags()})
    return ActionResult({"SpotInstanceRequests": found})


def cancel_spot_instance_requests(self: Any) -> ActionResult:
    """The request is cancelled; its instance goes on."""
    sim, done = Sim.current, []
    for id in self._get_param("SpotInstanceRequestIds", []):
        if id not in sim.requests:
            message = f"The spot instance request ID '{id}' does not exist"
            raise AwsError("InvalidSpotInstanceRequestID.NotFound", message)
        if sim.requests[id]["State"] == "active":
            sim.requests[id]["State"] = "cancelled"
            code = "request-canceled-and-instance-running"
            sim.requests[id]["Status"] = {"Code": code, "Message": code.replace("-", " ")}
        done.append({"SpotInstanceRequestId": id, "State": sim.requests[id]["State"]})
    return ActionResult({"CancelledSpotInstanceRequests": done})


def describe_spot_price_history(self: Any) -> ActionResult:
    """Prices of each zone where the type is offered: now's, 10 minutes old, and older ones back to StartTime."""
    sim, filters, rows = Sim.current, self._filters_from_querystring(), []
    types = self._get_param("InstanceTypes", []) or filters.get("instance-type", [])
    zone = self._get_param("AvailabilityZone")
    zones = [zone] if zone else filters.get("availability-zone", [])
    products = self._get_param("ProductDescriptions", []) or filters.get("product-description", ["Linux/UNIX"])
    since = self._get_param("StartTime")
    begin = sim.now() - 86400 if since is None else min(sim.now(), since.replace(tzinfo=UTC).timestamp())
    if not types:
        raise AwsError("NotImplemented", "the simulated price history wants instance types")
    if not {"Linux/UNIX", "Linux/UNIX (Amazon VPC)"} & set(products):
        return ActionResult({"SpotPriceHistory": []})
    for type in types:
        for place in [one for one in offered(self.region, type) if not zones or one in zones]:
            rows += _history(sim, type, place, begin)
    return ActionResult({"SpotPriceHistory": sorted(rows, key=lambda row: row["Timestamp"], reverse=True)})


def _history(sim: Sim, type: str, zone: str, begin: float) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    price, at = sim.market.spot_price(zone, type), sim.now() - 600
    while True:  # the last row is the price that was in force at the beginning
        when = datetime.fromtimestamp(at, UTC).replace(microsecond=0)
        rows.append({"InstanceType": type, "ProductDescription": "Linux/UNIX", "SpotPrice": f"{price:.6f}"})
        rows[-1] |= {"AvailabilityZone": zone, "Timestamp": when}
        if at <= begin:
            return rows
        at -= 6 * 3600  # the meter takes one price for a machine's whole life, so it has not changed


# --- images ----------------------------------------------------------------------------------------------------------


def image_id(region: str, name: str) -> str:
    """The number of an image in a region."""
    return "ami-" + hashlib.sha256(f"{region} {name}".encode()).hexdigest()[:17]


def make_images(sim: Sim, backend: Any) -> None:
    """Our images in a new region."""
    for name in IMAGES.values():
        id = image_id(backend.region_name, name)
        backend.amis[id] = Ami(
            backend,
            id,
            name=name,
            description=name,
            owner_id=AMAZON,
            owner_alias="amazon",
            public=True,
            virtualization_type="hvm",
            architecture="x86_64",
            root_device_name="/dev/sda1",
            root_device_type="ebs",
            hypervisor="xen",
            region_name=f"{backend.region_name}a",
        )
    tag_images(sim, backend)


def tag_images(sim: Sim, backend: Any) -> None:
    """The images say how to log in."""
    user, port = sim.login
    for id in [image_id(backend.region_name, name) for name in IMAGES.values()]:
        if id in backend.amis:
            backend.create_tags([id], {"imgnet:user": user, "imgnet:port": str(port)})


def image_disks(image: Any) -> list[dict[str, Any]]:
    """The disk of an image: as big as `sim.image_gb`."""
    disk = {"SnapshotId": image.ebs_snapshot.id, "VolumeSize": Sim.current.image_gb}
    disk |= {"DeleteOnTermination": True, "VolumeType": "gp3", "Encrypted": False}
    return [{"DeviceName": image.root_device_name, "Ebs": disk}]


def make_parameters(backend: Any) -> None:
    """The public parameters of a new region."""
    for short, name in IMAGES.items():
        full, value = PARAMETER.format(short), image_id(backend.region_name, name)
        words = (backend.account_id, full, value, "String", None, None, None, utcnow(), 1, "aws:ec2:image")
        backend._parameters[full].append(Parameter(*words))  # type: ignore[abstract]


ACTIONS = {
    "cancel_spot_instance_requests": cancel_spot_instance_requests,
    "describe_spot_instance_requests": describe_spot_instance_requests,
    "describe_spot_price_history": describe_spot_price_history,
}
