"""The market of instances: types by zone, capacity, quotas, spot requests, prices, and the images."""

import hashlib
from datetime import UTC, datetime
from typing import Any

from moto.core.responses import ActionResult
from moto.core.utils import utcnow
from moto.ec2.models.amis import Ami
from moto.ec2.models.instance_types import INSTANCE_TYPE_OFFERINGS, INSTANCE_TYPES
from moto.ssm.models import Parameter
from support.simcloud.cloud import AwsError, SimulatedAws
from support.simcloud.lifecycle import BILLED_STATES
from support.simcloud.prices import ON_DEMAND, on_demand, spot_factor

PLENTY_VCPU = 100_000.0
IMAGES = {  # names of the images by SSM parameter (the names are AWS's, the ids of the images are ours)
    "base-oss-nvidia-driver-gpu-ubuntu-22.04": "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 22.04) 20261113",
    "base-oss-nvidia-driver-gpu-ubuntu-24.04": "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 24.04) 20261113",
    **{
        f"oss-nvidia-driver-gpu-pytorch-{torch}-ubuntu-{ubuntu}": (
            f"Deep Learning OSS Nvidia Driver AMI GPU PyTorch {torch} (Ubuntu {ubuntu}) 20261113"
        )
        for torch, ubuntu in (
            ("2.9", "24.04"),
            ("2.10", "24.04"),
            ("2.11", "24.04"),
            ("2.12", "24.04"),
            ("2.13", "26.04"),
            ("2.14", "26.04"),
        )
    },
}
PARAMETER = "/aws/service/deeplearning/ami/x86_64/{}/latest/ami-id"
AMAZON = "898082745236"
QUOTAS = {  # by quota code: (market, prefixes of the types' names)
    "L-417A185B": ("on-demand", ("p",)),
    "L-DB2E81BA": ("on-demand", ("g", "vt")),
    "L-1216C47A": ("on-demand", ("standard",)),
    "L-C4BD4855": ("spot", ("p5", "p6")),
    "L-7212CCBC": ("spot", ("p2", "p3", "p4")),
    "L-3819A6DF": ("spot", ("g", "vt")),
    "L-34B43A08": ("spot", ("standard",)),
}
STANDARD_PREFIXES = tuple("acdhimrtz")


def quota_code(type: str, market: str) -> str | None:
    """Return the code of the quota that counts this type in this market, None without one."""
    for code, (quota_market, prefixes) in QUOTAS.items():
        is_standard = "standard" in prefixes and type.startswith(STANDARD_PREFIXES)
        if quota_market == market and (is_standard or type.startswith(prefixes)):
            return code
    return None


def vcpus(type: str) -> int:
    """Return the number of vCPU of a type."""
    return int(INSTANCE_TYPES[type]["VCpuInfo"]["DefaultVCpus"])


def offered(region: str, type: str) -> list[str]:
    """Return the zones of a region where a type is offered."""
    rows = INSTANCE_TYPE_OFFERINGS["availability-zone"].get(region, [])
    return sorted(row["Location"] for row in rows if row["InstanceType"] == type)


class Market:
    """Capacity, quotas and prices, and the spot requests."""

    def __init__(self) -> None:
        self.spot: dict[tuple[str, str], float] = {}

    def spot_price(self, zone: str, type: str) -> float:
        """Return the spot price in dollars per hour: as set, else a zone's fraction of the on-demand price."""
        if (zone, type) in self.spot:
            return self.spot[zone, type]
        return round(on_demand(type, vcpus(type) if type in INSTANCE_TYPES else 8) * spot_factor(zone, type), 4)

    def dollars_per_hour(self, instance: Any) -> float:
        """Return the price of a new instance."""
        type = instance.instance_type
        if instance.life.market == "spot":
            return self.spot_price(instance.placement.zone, type)
        if instance.life.market == "capacity-block":  # it was paid for when it was bought
            return 0.0
        return on_demand(type, vcpus(type))

    def raise_unknown_type(self, type: str) -> None:
        """Raise the error of EC2 for a type that it does not describe: a retired one, or one that never was."""
        if type in ON_DEMAND:
            message = "The requested configuration is currently not supported. Please check the documentation."
            raise AwsError("Unsupported", message)
        raise AwsError("InvalidParameterValue", f"Invalid value '{type}' for InstanceType.")

    def allocate(self, sim: SimulatedAws, request: Any) -> int:
        """Return how many instances are launched now, and take them from the capacity.

        Raises the error of EC2 when these are fewer than MinCount.
        """
        zones = offered(request.region, request.type)
        if request.zone not in zones:
            message = (
                f"Your requested instance type ({request.type}) is not supported in your requested Availability Zone"
            )
            message += (
                f" ({request.zone}). Please retry your request by not specifying an Availability Zone or choosing"
            )
            raise AwsError("Unsupported", f"{message} {', '.join(zones)}.")
        quota_count = self._quota_count(sim, request)
        is_limited = (request.zone, request.type) in sim.capacity and not request.reservations
        free: int = sim.capacity[request.zone, request.type] if is_limited else request.max_count
        count = min(int(request.max_count), int(quota_count), free)
        if quota_count < request.min_count:
            self._raise_over_quota(sim, request)
        if count < request.min_count:
            message = (
                f"We currently do not have sufficient {request.type} capacity in the Availability Zone you requested"
            )
            message += f" ({request.zone}). Our system will be working on provisioning additional capacity."
            raise AwsError("InsufficientInstanceCapacity", message)
        if is_limited:
            sim.capacity[request.zone, request.type] -= count
        return count

    def _quota_count(self, sim: SimulatedAws, request: Any) -> float:
        code = quota_code(request.type, request.market)
        if code is None:
            return float(request.max_count)
        used = sum(
            vcpus(instance.instance_type)
            for instance in sim.live_instances()
            if self._counts_in_quota(instance, request, code)
        )
        return (sim.quota_vcpu.get(code, PLENTY_VCPU) - used) // vcpus(request.type)

    def _counts_in_quota(self, instance: Any, request: Any, code: str) -> bool:
        is_in_region = instance.region_name == request.region and instance.state in BILLED_STATES
        return is_in_region and quota_code(instance.instance_type, instance.life.market) == code

    def _raise_over_quota(self, sim: SimulatedAws, request: Any) -> None:
        if request.market == "spot":
            raise AwsError("MaxSpotInstanceCountExceeded", "Max spot instance count exceeded")
        limit = sim.quota_vcpu.get(quota_code(request.type, request.market) or "", PLENTY_VCPU)
        message = f"You have requested more vCPU capacity than your current vCPU limit of {limit:g} allows for the"
        message += " instance bucket that the specified instance type belongs to."
        raise AwsError("VcpuLimitExceeded", message)

    # --- spot requests ---------------------------------------------------------------------------------------------

    def open_request(self, sim: SimulatedAws, request: Any, instance: Any) -> None:
        """Create the request to which a new spot instance belongs, with tags of its own."""
        if request.market != "spot":
            return
        id = "sir-" + hashlib.sha256(instance.id.encode()).hexdigest()[:8]
        instance.spot_instance_request_id = instance.life.spot_request_id = id
        instance.ec2_backend.create_tags([id], request.tags.get("spot-instances-request", {}))
        sim.spot_requests[id] = {
            "SpotInstanceRequestId": id,
            "InstanceId": instance.id,
            "State": "active",
            "Status": {"Code": "fulfilled", "Message": "Your spot request is fulfilled."},
            "region": request.region,
        }

    def mark_request(self, sim: SimulatedAws, instance: Any) -> None:
        """Note in a request that its instance has received an interruption notice."""
        status = {"Code": "marked-for-termination", "Message": "Interruption."}
        sim.spot_requests[instance.life.spot_request_id]["Status"] = status

    def close_request(self, sim: SimulatedAws, instance: Any, lost_capacity: bool) -> None:
        """Close the request of an instance that has ended."""
        request = sim.spot_requests.get(instance.life.spot_request_id or "")
        if request is not None:
            request["State"] = "closed" if request["State"] == "active" else request["State"]
            code = "instance-terminated-no-capacity" if lost_capacity else "instance-terminated-by-user"
            request["Status"] = {"Code": code, "Message": code.replace("-", " ")}


def describe_spot_instance_requests(self: Any) -> ActionResult:
    """Describe spot requests by ids or filters, with tags. A request is visible when its instance is."""
    from support.simcloud import placement_groups

    sim = SimulatedAws.current
    backend = self.ec2_backend
    filters = self._filters_from_querystring()
    ids = self._get_param("SpotInstanceRequestIds", [])
    spot_requests = {
        id: spot_request
        for id, spot_request in sim.spot_requests.items()
        if spot_request["region"] == self.region and sim.is_visible(sim.find(spot_request["InstanceId"]))
    }
    for missing in [id for id in ids if id not in spot_requests]:
        message = f"The spot instance request ID '{missing}' does not exist"
        raise AwsError("InvalidSpotInstanceRequestID.NotFound", message)
    rows = []
    for id, spot_request in spot_requests.items():
        if (not ids or id in ids) and placement_groups.matches(backend, id, {"state": spot_request["State"]}, filters):
            row = {name: value for name, value in spot_request.items() if name != "region"}
            rows.append({**row, "Tags": placement_groups.TaggedResource(backend, id).tags()})
    return ActionResult({"SpotInstanceRequests": rows})


def cancel_spot_instance_requests(self: Any) -> ActionResult:
    """Cancel spot requests. Their instances keep running."""
    sim = SimulatedAws.current
    changes = []
    for id in self._get_param("SpotInstanceRequestIds", []):
        if id not in sim.spot_requests:
            message = f"The spot instance request ID '{id}' does not exist"
            raise AwsError("InvalidSpotInstanceRequestID.NotFound", message)
        if sim.spot_requests[id]["State"] == "active":
            sim.spot_requests[id]["State"] = "cancelled"
            code = "request-canceled-and-instance-running"
            sim.spot_requests[id]["Status"] = {"Code": code, "Message": code.replace("-", " ")}
        changes.append({"SpotInstanceRequestId": id, "State": sim.spot_requests[id]["State"]})
    return ActionResult({"CancelledSpotInstanceRequests": changes})


def describe_spot_price_history(self: Any) -> ActionResult:
    """List the prices of types in the zones that offer them: of 10 minutes ago, and back to StartTime."""
    sim = SimulatedAws.current
    filters = self._filters_from_querystring()
    rows = []
    types = self._get_param("InstanceTypes", []) or filters.get("instance-type", [])
    zone = self._get_param("AvailabilityZone")
    zones = [zone] if zone else filters.get("availability-zone", [])
    products = self._get_param("ProductDescriptions", []) or filters.get("product-description", ["Linux/UNIX"])
    start_time = self._get_param("StartTime")
    begin = sim.now() - 86400
    if start_time is not None:
        begin = min(sim.now(), start_time.replace(tzinfo=UTC).timestamp())
    if not types:
        raise AwsError("NotImplemented", "the simulated price history wants instance types")
    if not {"Linux/UNIX", "Linux/UNIX (Amazon VPC)"} & set(products):
        return ActionResult({"SpotPriceHistory": []})
    for type in types:
        for offered_zone in offered(self.region, type):
            if not zones or offered_zone in zones:
                rows += _price_history(sim, type, offered_zone, begin)
    return ActionResult({"SpotPriceHistory": sorted(rows, key=lambda row: row["Timestamp"], reverse=True)})


def _price_history(sim: SimulatedAws, type: str, zone: str, begin: float) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    price = sim.market.spot_price(zone, type)
    moment = sim.now() - 600
    while True:  # the last row is the price that was in force at the beginning
        row = {
            "InstanceType": type,
            "ProductDescription": "Linux/UNIX",
            "SpotPrice": f"{price:.6f}",
            "AvailabilityZone": zone,
            "Timestamp": datetime.fromtimestamp(moment, UTC).replace(microsecond=0),
        }
        rows.append(row)
        if moment <= begin:
            return rows
        moment -= 6 * 3600  # the bill has one price for a machine's whole life, so the price never changes


# --- images ----------------------------------------------------------------------------------------------------------


def image_id(region: str, name: str) -> str:
    """Return the id of an image in a region."""
    return "ami-" + hashlib.sha256(f"{region} {name}".encode()).hexdigest()[:17]


def make_images(sim: SimulatedAws, backend: Any) -> None:
    """Create the images of a new region."""
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


def tag_images(sim: SimulatedAws, backend: Any) -> None:
    """Tag the images of a region with the user and the port for a login."""
    user, port = sim.login
    for id in [image_id(backend.region_name, name) for name in IMAGES.values()]:
        if id in backend.amis:
            backend.create_tags([id], {"imgnet:user": user, "imgnet:port": str(port)})


def image_disks(image: Any) -> list[dict[str, Any]]:
    """Return the disk of an image, which has `image_gb` of the cloud."""
    disk = {"SnapshotId": image.ebs_snapshot.id, "VolumeSize": SimulatedAws.current.image_gb}
    disk |= {"DeleteOnTermination": True, "VolumeType": "gp3", "Encrypted": False}
    return [{"DeviceName": image.root_device_name, "Ebs": disk}]


def make_parameters(sim: SimulatedAws, backend: Any) -> None:
    """Create the public parameters of a region: those of the cloud's `images`, all others are removed."""
    for short, name in IMAGES.items():
        parameter = PARAMETER.format(short)
        backend._parameters.pop(parameter, None)
        if sim.images is not None and short not in sim.images:
            continue
        value = image_id(backend.region_name, name)
        arguments = (backend.account_id, parameter, value, "String", None, None, None, utcnow(), 1, "aws:ec2:image")
        backend._parameters[parameter].append(Parameter(*arguments))  # type: ignore[abstract]


ACTIONS = {
    "cancel_spot_instance_requests": cancel_spot_instance_requests,
    "describe_spot_instance_requests": describe_spot_instance_requests,
    "describe_spot_price_history": describe_spot_price_history,
}
