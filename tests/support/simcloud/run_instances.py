"""RunInstances: the checks, in the order of EC2, and the new instances."""

import base64
import hashlib
import json
from datetime import UTC, datetime
from typing import Any

from moto.core.responses import ActionResult
from moto.core.utils import utcnow
from moto.ec2.exceptions import DryRunClientError
from moto.ec2.models.instance_types import INSTANCE_TYPES
from moto.ec2.utils import random_eni_attach_id
from moto.iam.models import iam_backends
from support.simcloud import placement_groups, reservations, spot_market
from support.simcloud.cloud import ACCOUNT, AwsError, SimulatedAws, call_moto, ec2_call, refuse_if
from support.simcloud.lifecycle import InstanceLife

TAGGABLE = ("instance", "volume", "network-interface", "spot-instances-request")
USER_DATA_BYTES = 16384
WRONG_VALUE, COMBINATION = "InvalidParameterValue", "InvalidParameterCombination"


class LaunchRequest:
    def __init__(self, response: Any) -> None:
        get = response._get_param
        self.region = response.region
        self.backend = response.ec2_backend
        self.min_count = int(get("MinCount", 0))
        self.max_count = int(get("MaxCount", 0))
        self.token = get("ClientToken") or ""
        self.image = get("ImageId")
        self.type = get("InstanceType") or "m1.small"
        self.key = get("KeyName")
        self.interfaces = [dict(interface) for interface in get("NetworkInterfaces", [])]
        self.subnet_id = get("SubnetId")
        self.security_groups = list(get("SecurityGroupIds", []))
        self.group = get("Placement.GroupName")  # placement group
        self.zone = get("Placement.AvailabilityZone")
        self.market = get("InstanceMarketOptions.MarketType") or "on-demand"
        specification = "CapacityReservationSpecification"
        self.preference = get(f"{specification}.CapacityReservationPreference")
        target = f"{specification}.CapacityReservationTarget"
        self.reservation = get(f"{target}.CapacityReservationId")
        self.reservation_group = get(f"{target}.CapacityReservationResourceGroupArn")
        self.reservations: list[str] = []  # of the new instances; set by the check
        self.profile = {name: get(f"IamInstanceProfile.{name}") for name in ("Name", "Arn")}
        self.user_data = get("UserData")
        self.disks = [dict(disk) for disk in get("BlockDeviceMappings", [])]
        self.tags = response._parse_tag_specification()
        data = {name: value for name, value in sorted(response.data.items()) if name not in ("ClientToken", "DryRun")}
        self.digest = hashlib.sha256(json.dumps(data, default=str).encode()).hexdigest()

    def disks_named(self, device: str) -> list[dict[str, Any]]:
        return [disk for disk in self.disks if disk.get("DeviceName") == device]

    def subnet_ids(self) -> list[str]:
        of_interfaces = [interface["SubnetId"] for interface in self.interfaces if interface.get("SubnetId")]
        return of_interfaces or ([self.subnet_id] if self.subnet_id else [])

    def security_group_ids(self) -> list[str]:
        of_interfaces = [group for interface in self.interfaces for group in interface.get("Groups", [])]
        return [*self.security_groups, *of_interfaces]


@ec2_call
def run_instances(self: Any) -> ActionResult:
    """Launch as many instances as the market has: at least MinCount, or none.

    The same client token gives the same instances.
    """
    sim = SimulatedAws.current
    request = LaunchRequest(self)
    is_dry_run = self._get_param("DryRun", False)
    if request.token and not is_dry_run and (request.region, request.token) in sim.launches_by_token:
        digest, reservation = sim.launches_by_token[request.region, request.token]
        message = "Arguments on this idempotent request are inconsistent with those of an earlier request."
        refuse_if(digest != request.digest, "IdempotentParameterMismatch", message)
        return ActionResult(reservation)
    check(sim, request)
    if is_dry_run:
        raise DryRunClientError()
    count = spot_market.allocate(sim, request)
    _prepare_for_moto(self.params, request, count)
    reservation = call_moto("run_instances", self).result
    for instance in reservation.instances:
        _complete_instance(sim, request, reservation, instance)
    if request.token:
        sim.launches_by_token[request.region, request.token] = (request.digest, reservation)
    return ActionResult(reservation)


def _prepare_for_moto(params: Any, request: LaunchRequest, count: int) -> None:
    """Prepare the parameters for moto: the final count, a root disk, and no instance profile, which is added later."""
    params["MinCount"] = count
    params.pop("IamInstanceProfile", None)
    root = request.backend.amis[request.image].root_device_name
    disks = [*([] if request.disks_named(root) else [{"DeviceName": root}]), *request.disks]
    defaults = {"VolumeType": "gp3", "DeleteOnTermination": True, "VolumeSize": spot_market.IMAGE_GB}
    params["BlockDeviceMappings"] = [{**disk, "Ebs": {**defaults, **(disk.get("Ebs") or {})}} for disk in disks]
    params["SecurityGroups"] = list(params.get("SecurityGroups") or [])


def _complete_instance(sim: SimulatedAws, request: LaunchRequest, reservation: Any, instance: Any) -> None:
    """Add what moto leaves out of a new instance."""
    now = sim.now()
    backend = request.backend
    key = backend.key_pairs[request.key].public_key if request.key else ""
    user_data = base64.b64decode(request.user_data or "").decode(errors="replace")
    instance.life = InstanceLife(now, request.market, key, user_data, instance.private_ip)
    instance.launch_time = datetime.fromtimestamp(now, UTC).replace(tzinfo=None, microsecond=0)
    instance.client_token = request.token
    if not sim.has_launch_indexes:
        instance.ami_launch_index = 0
    instance.lifecycle = "spot" if request.market == "spot" else None
    reservations.join_reservation(request, instance)
    if request.group:
        instance.placement.group_name = request.group
        instance.placement.group_id = sim.groups[request.region, request.group].id
    if any(request.profile.values()):
        backend.associate_iam_instance_profile(instance.id, request.profile["Name"], request.profile["Arn"])
    for interface in instance.nics.values():
        interface.add_tags(request.tags.get("network-interface", {}))
    sim.add_instance(instance)


def prep_nics(self: Any, nic_spec: list[dict[str, Any]], security_groups: list[Any] | None = None, **_: Any) -> None:
    """Create the network interfaces of an instance, with network card and type.

    The first has a loopback address, which is its public address too where it may have one.
    """
    backend = self.ec2_backend
    has_many = len(nic_spec) > 1
    specs = sorted(nic_spec or [{}], key=_interface_slot)
    self.nics = {}
    for index, spec in enumerate(specs):
        own_subnet = spec.get("SubnetId") or self._subnet_id
        subnet = backend.get_subnet(own_subnet or backend.get_default_subnets()[self.placement.zone].id)
        is_public = spec.get("AssociatePublicIpAddress")
        address = SimulatedAws.current.next_address() if index == 0 else None
        interface = backend.create_network_interface(
            subnet,
            address or subnet.get_available_subnet_ip(self),
            group_ids=list(spec.get("Groups") or [group.id for group in security_groups or []]),
            description=spec.get("Description", ""),
            delete_on_termination=spec.get("DeleteOnTermination", True),
        )
        interface.interface_type = spec.get("InterfaceType") or "interface"
        interface.network_card_index, interface.device_index = _interface_slot(spec)
        interface.public_ip = address if index == 0 and is_public and not has_many else None
        if interface.interface_type == "efa-only":  # it has no IP address
            subnet.del_subnet_ip(interface.private_ip_address)
            interface.private_ip_addresses = []
            interface.private_ip_address = None
        interface.instance = self
        interface.status = "in-use"
        interface.attachment_id = random_eni_attach_id()
        interface.attach_time = utcnow()
        self.nics[index] = interface
    self.security_groups = list(self.nics[0]._group_set)


def _interface_slot(spec: dict[str, Any]) -> tuple[int, int]:
    return int(spec.get("NetworkCardIndex") or 0), int(spec.get("DeviceIndex") or 0)


def check(sim: SimulatedAws, request: LaunchRequest) -> None:
    _check_token_and_tags(request)
    _check_image(request)
    _check_networks(request)
    _check_interfaces(request)
    _check_profile_and_user_data(request)
    placement_groups.check_placement(request)
    reservations.check_reservation(sim, request)


def _check_token_and_tags(request: LaunchRequest) -> None:
    is_wrong = len(request.token) > 64 or not request.token.isascii()
    refuse_if(is_wrong, WRONG_VALUE, "Client token must be at most 64 ASCII characters.")
    refuse_if(request.tags.keys() - TAGGABLE, WRONG_VALUE, f"One of {list(request.tags)} is not a taggable type.")
    has_idle_tags = request.market != "spot" and "spot-instances-request" in request.tags
    refuse_if(has_idle_tags, COMBINATION, "The request creates no spot request that could have tags.")


def _check_image(request: LaunchRequest) -> None:
    image = request.backend.amis.get(request.image)
    refuse_if(image is None, "InvalidAMIID.NotFound", f"The image id '[{request.image}]' does not exist")
    if request.type not in INSTANCE_TYPES:  # a retired type, or one that never was
        code = "Unsupported" if request.type in spot_market.ON_DEMAND else WRONG_VALUE
        raise AwsError(code, f"Invalid value '{request.type}' for InstanceType.")
    has_key = not request.key or request.key in request.backend.key_pairs
    refuse_if(not has_key, "InvalidKeyPair.NotFound", f"The key pair '{request.key}' does not exist")
    root, min_size = image.root_device_name, spot_market.IMAGE_GB
    sizes = [int((disk.get("Ebs") or {}).get("VolumeSize") or min_size) for disk in request.disks_named(root)]
    is_too_small = any(size < min_size for size in sizes)
    refuse_if(is_too_small, "InvalidBlockDeviceMapping", f"The image expects a volume of {min_size}GB or more.")


def _check_networks(request: LaunchRequest) -> None:
    is_named_twice = request.interfaces and (request.subnet_id or request.security_groups)
    refuse_if(is_named_twice, COMBINATION, "Interfaces and a subnet or security groups cannot be specified together.")
    subnets = [request.backend.get_subnet(id) for id in request.subnet_ids()]  # raises InvalidSubnetID.NotFound
    has_many_zones = len({subnet.availability_zone for subnet in subnets}) > 1
    refuse_if(has_many_zones, COMBINATION, "All network interfaces must be in the same Availability Zone")
    for group_id in request.security_group_ids():
        group = request.backend.get_security_group_from_id(group_id)
        refuse_if(group is None, "InvalidGroup.NotFound", f"The security group '{group_id}' does not exist")
        is_elsewhere = subnets and group.vpc_id != subnets[0].vpc_id
        refuse_if(is_elsewhere, "InvalidParameter", f"{group_id} and the subnet belong to different networks.")
    request.zone = subnets[0].availability_zone if subnets else request.zone or f"{request.region}a"
    addressed_count = sum(interface.get("InterfaceType") != "efa-only" for interface in request.interfaces)
    is_full = subnets and subnets[0].available_ip_address_count < request.min_count * max(1, addressed_count)
    refuse_if(is_full, "InsufficientFreeAddressesInSubnet", "There are not enough free addresses in the subnet.")


def _check_interfaces(request: LaunchRequest) -> None:
    network_info = INSTANCE_TYPES[request.type].get("NetworkInfo", {})
    slots = [_interface_slot(interface) for interface in request.interfaces]
    has_wrong_slots = len(set(slots)) < len(slots) or (slots and (0, 0) not in slots)
    refuse_if(has_wrong_slots, WRONG_VALUE, "Each interface needs its own card and device index, one 0 and 0.")
    is_public = any(interface.get("AssociatePublicIpAddress") for interface in request.interfaces)
    has_many = is_public and len(slots) > 1
    refuse_if(has_many, COMBINATION, "associatePublicIPAddress cannot be specified with multiple network interfaces.")
    kinds = [str(interface.get("InterfaceType") or "interface") for interface in request.interfaces]
    efa_count = sum(kind.startswith("efa") for kind in kinds)
    has_no_efa = efa_count and not network_info.get("EfaSupported")
    refuse_if(has_no_efa, COMBINATION, f"EFA interfaces are not supported on the instance type {request.type}.")
    cards = {card["NetworkCardIndex"]: card for card in network_info.get("NetworkCards", [])}
    for kind, (card, device) in zip(kinds, slots, strict=True):
        is_unfit = kind not in cards.get(card, {}).get("InterfaceTypes", [kind])
        refuse_if(is_unfit, COMBINATION, f"Network card {card} does not support interfaces of type {kind}.")
        is_unaddressed = kind == "efa-only" and (card, device) == (0, 0)
        refuse_if(is_unaddressed, COMBINATION, "The primary network interface cannot be EFA-only.")
        has_wrong_index = kind == "efa-only" and SimulatedAws.current.efa_only_device not in (None, device)
        refuse_if(has_wrong_index, WRONG_VALUE, f"Device index {device} of network card {card} is not valid.")  # ours
    max_efa = network_info.get("EfaInfo", {}).get("MaximumEfaInterfaces", 0)
    card_count = network_info.get("MaximumNetworkCards", 1)
    has_too_many = efa_count > max_efa or any(card >= card_count for card, _ in slots)
    refuse_if(has_too_many, "AttachmentLimitExceeded", f"{request.type}: {card_count} cards, {max_efa} EFA interfaces")


def _check_profile_and_user_data(request: LaunchRequest) -> None:
    profiles = iam_backends[ACCOUNT]["aws"].instance_profiles.values()
    known_names = [*(profile.name for profile in profiles), *(profile.arn for profile in profiles), None]
    is_known = all(value in known_names for value in request.profile.values())
    refuse_if(not is_known, WRONG_VALUE, f"Invalid IAM Instance Profile {request.profile}")
    size = len(base64.b64decode(request.user_data or ""))
    refuse_if(size > USER_DATA_BYTES, WRONG_VALUE, "User data is limited to 16384 bytes")
