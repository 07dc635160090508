"""RunInstances: the checks, in the order of EC2, and the new instances."""

import base64
import hashlib
import json
import re
from datetime import UTC, datetime
from typing import Any

from moto.core.responses import ActionResult
from moto.core.utils import utcnow
from moto.ec2.exceptions import DryRunClientError
from moto.ec2.models.instance_types import INSTANCE_TYPES
from moto.ec2.utils import filter_iam_instance_profiles, random_eni_attach_id
from support.simcloud.cloud import AwsError, SimulatedAws
from support.simcloud.lifecycle import InstanceLife

TAGGABLE = ("instance", "volume", "network-interface", "spot-instances-request")
USER_DATA_BYTES = 16384


class LaunchRequest:
    """The parameters of one RunInstances request."""

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
        target = "CapacityReservationSpecification.CapacityReservationTarget"
        self.reservation = get(f"{target}.CapacityReservationId")
        self.reservation_group = get(f"{target}.CapacityReservationResourceGroupArn")
        self.reservations: list[str] = []  # of the new instances; set by the check
        self.profile = {name: get(f"IamInstanceProfile.{name}") for name in ("Name", "Arn")}
        self.user_data = get("UserData")
        self.disks = [dict(disk) for disk in get("BlockDeviceMappings", [])]
        self.tags = response._parse_tag_specification()
        data = {name: value for name, value in sorted(response.data.items()) if name not in ("ClientToken", "DryRun")}
        self.digest = hashlib.sha256(json.dumps(data, default=str).encode()).hexdigest()

    def subnet_ids(self) -> list[str]:
        """Return the ids of the subnets that the request names."""
        of_interfaces = [interface["SubnetId"] for interface in self.interfaces if interface.get("SubnetId")]
        return of_interfaces or ([self.subnet_id] if self.subnet_id else [])

    def security_group_ids(self) -> list[str]:
        """Return the ids of the security groups that the request names."""
        of_interfaces = [group for interface in self.interfaces for group in interface.get("Groups", [])]
        return [*self.security_groups, *of_interfaces]


def run_instances(self: Any) -> ActionResult:
    """Launch as many instances as the market has: at least MinCount, or none.

    The same client token gives the same instances.
    """
    from support.simcloud import moto_patches

    sim = SimulatedAws.current
    request = LaunchRequest(self)
    is_dry_run = self._get_param("DryRun", False)
    if request.token and not is_dry_run and (request.region, request.token) in sim.launches_by_token:
        digest, reservation = sim.launches_by_token[request.region, request.token]
        if digest != request.digest:
            raise AwsError(
                "IdempotentParameterMismatch",
                "Arguments on this idempotent request are inconsistent with arguments used in previous request(s).",
            )
        return ActionResult(reservation)
    check(sim, request)
    if is_dry_run:
        raise DryRunClientError()
    count = sim.market.allocate(sim, request)
    _prepare_for_moto(self.params, request, count)
    reservation = moto_patches.moto_originals["run_instances"](self).result
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
    disks = request.disks
    if not any(disk.get("DeviceName") == root for disk in disks):
        disks = [{"DeviceName": root}, *disks]
    params["BlockDeviceMappings"] = [_disk(request, root, disk) for disk in disks]
    params["SecurityGroups"] = list(params.get("SecurityGroups") or [])


def _disk(request: LaunchRequest, root: str, mapping: dict[str, Any]) -> dict[str, Any]:
    disk = {"VolumeType": "gp3", "DeleteOnTermination": True, **dict(mapping.get("Ebs") or {})}
    if mapping["DeviceName"] == root:
        disk.setdefault("VolumeSize", request.backend.amis[request.image].block_device_mappings[0]["Ebs"]["VolumeSize"])
    return {"DeviceName": mapping["DeviceName"], "Ebs": disk}


def _complete_instance(sim: SimulatedAws, request: LaunchRequest, reservation: Any, instance: Any) -> None:
    """Add what moto leaves out of a new instance."""
    from support.simcloud import reservations

    now = sim.now()
    backend = request.backend
    key = backend.key_pairs[request.key].public_key if request.key else ""
    user_data = base64.b64decode(request.user_data or "").decode(errors="replace")
    instance.life = InstanceLife(now, request.market, key, user_data, request.image, instance.private_ip)
    instance.launch_time = datetime.fromtimestamp(now, UTC).replace(tzinfo=None, microsecond=0)
    instance.client_token = request.token
    if not sim.has_launch_indexes:
        instance.ami_launch_index = 0
    instance.lifecycle = "spot" if request.market == "spot" else None
    reservations.join_reservation(request, instance)
    if request.group:
        instance.placement.group_name = request.group
        instance.placement.group_id = sim.groups[request.region, request.group]["GroupId"]
    if any(request.profile.values()):
        backend.associate_iam_instance_profile(instance.id, request.profile["Name"], request.profile["Arn"])
    for interface in instance.nics.values():
        interface.add_tags(request.tags.get("network-interface", {}))
    for mapping in request.disks:
        block = instance.block_device_mapping.get(mapping.get("DeviceName"))
        for name in ("Iops", "Throughput"):
            if block is not None and (mapping.get("Ebs") or {}).get(name):
                setattr(backend.volumes[block.volume_id], name.lower(), int(mapping["Ebs"][name]))
    sim.market.open_request(sim, request, instance)
    sim.add_instance(instance)


def prep_nics(
    self: Any,
    nic_spec: list[dict[str, Any]],
    private_ip: str | None = None,
    associate_public_ip: bool | None = None,
    security_groups: list[Any] | None = None,
    ipv6_address_count: int | None = None,
) -> None:
    """Create the network interfaces of an instance, with network card and type.

    The first has a loopback address, which is its public address too where it may have one.
    """
    backend = self.ec2_backend
    has_many = len(nic_spec) > 1
    specs = sorted(nic_spec or [{}], key=_interface_slot)
    self.nics = {}
    for index, spec in enumerate(specs):
        subnet = backend.get_subnet(spec.get("SubnetId") or self._subnet_id or _default_subnet(self))
        is_public = spec.get("AssociatePublicIpAddress")
        if is_public is None:
            is_public = subnet.map_public_ip_on_launch
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
    """Return the network card index and the device index of an interface."""
    return int(spec.get("NetworkCardIndex") or 0), int(spec.get("DeviceIndex") or 0)


def _default_subnet(instance: Any) -> str:
    subnet = instance.ec2_backend.get_default_subnets().get(instance.placement.zone)
    if subnet is None:
        raise AwsError("MissingInput", "No default subnet for this zone. Please specify a subnet.")
    return str(subnet.id)


# --- checks ----------------------------------------------------------------------------------------------------------


def check(sim: SimulatedAws, request: LaunchRequest) -> None:
    """Raise the error of EC2 for a launch that it refuses."""
    from support.simcloud import placement_groups, reservations

    for check_part in (
        _check_counts,
        _check_image,
        _check_networks,
        _check_interfaces,
        _check_profile_and_user_data,
        _check_market,
    ):
        check_part(sim, request)
    placement_groups.check_placement(sim, request)
    reservations.check_reservation(sim, request)


def _check_counts(sim: SimulatedAws, request: LaunchRequest) -> None:
    if request.min_count < 1 or request.max_count < 1:
        raise AwsError("InvalidParameterValue", "Invalid value for MinCount or MaxCount: it must be greater than 0.")
    if request.min_count > request.max_count:
        raise AwsError("InvalidParameterCombination", "MinCount must not be greater than MaxCount.")
    if len(request.token) > 64 or not request.token.isascii():
        raise AwsError("InvalidParameterValue", "Client token must be at most 64 ASCII characters.")
    for kind in request.tags:
        if kind not in TAGGABLE:
            message = f"'{kind}' is not a valid taggable resource type for this operation."
            raise AwsError("InvalidParameterValue", message)


def _check_image(sim: SimulatedAws, request: LaunchRequest) -> None:
    if not re.fullmatch(r"ami-([0-9a-f]{8}|[0-9a-f]{17})", request.image or ""):
        raise AwsError("InvalidAMIID.Malformed", f'Invalid id: "{request.image}"')
    if request.image not in request.backend.amis:
        raise AwsError("InvalidAMIID.NotFound", f"The image id '[{request.image}]' does not exist")
    if request.type not in INSTANCE_TYPES:
        sim.market.raise_unknown_type(request.type)
    if request.key and request.key not in request.backend.key_pairs:
        raise AwsError("InvalidKeyPair.NotFound", f"The key pair '{request.key}' does not exist")
    image_disk = request.backend.amis[request.image].block_device_mappings[0]
    min_size = image_disk["Ebs"]["VolumeSize"]
    for disk in request.disks:
        size = (disk.get("Ebs") or {}).get("VolumeSize")
        if disk.get("DeviceName") == image_disk["DeviceName"] and size and int(size) < min_size:
            message = f"Volume of size {size}GB is smaller than snapshot 'snap', expect size>= {min_size}GB"
            raise AwsError("InvalidBlockDeviceMapping", message)


def _check_networks(sim: SimulatedAws, request: LaunchRequest) -> None:
    if request.interfaces and (request.subnet_id or request.security_groups):
        parameter = "subnet ID" if request.subnet_id else "security groups"
        message = f"Network interfaces and an instance-level {parameter} may not be specified on the same request"
        raise AwsError("InvalidParameterCombination", message)
    subnets = [request.backend.get_subnet(id) for id in request.subnet_ids()]  # raises InvalidSubnetID.NotFound
    if len({subnet.availability_zone for subnet in subnets}) > 1:
        raise AwsError("InvalidParameterCombination", "All network interfaces must be in the same Availability Zone")
    for group_id in request.security_group_ids():
        if not re.fullmatch(r"sg-([0-9a-f]{8}|[0-9a-f]{17})", group_id):
            raise AwsError("InvalidGroupId.Malformed", f"Invalid id: '{group_id}' (expecting 'sg-...')")
        group = request.backend.get_security_group_from_id(group_id)
        if group is None:
            raise AwsError("InvalidGroup.NotFound", f"The security group '{group_id}' does not exist")
        if subnets and group.vpc_id != subnets[0].vpc_id:
            message = f"Security group {group_id} and subnet {subnets[0].id} belong to different networks."
            raise AwsError("InvalidParameter", message)
    request.zone = subnets[0].availability_zone if subnets else request.zone or f"{request.region}a"
    addressed_count = sum(interface.get("InterfaceType") != "efa-only" for interface in request.interfaces)
    if subnets and subnets[0].available_ip_address_count < request.min_count * max(1, addressed_count):
        message = f"There are not enough free addresses in subnet '{subnets[0].id}' to satisfy the requested number."
        raise AwsError("InsufficientFreeAddressesInSubnet", message)


def _check_interfaces(sim: SimulatedAws, request: LaunchRequest) -> None:
    network_info = INSTANCE_TYPES[request.type].get("NetworkInfo", {})
    slots = [_interface_slot(interface) for interface in request.interfaces]
    if len(set(slots)) < len(slots) or (slots and (0, 0) not in slots):
        message = "Each network interface needs its own network card and device index, and one must be 0 and 0."
        raise AwsError("InvalidParameterValue", message)
    if len(slots) > 1 and any(interface.get("AssociatePublicIpAddress") for interface in request.interfaces):
        message = "The associatePublicIPAddress parameter cannot be specified when launching with multiple network"
        message += " interfaces."
        raise AwsError("InvalidParameterCombination", message)
    efa_interfaces = [
        interface for interface in request.interfaces if str(interface.get("InterfaceType", "")).startswith("efa")
    ]
    if efa_interfaces and not network_info.get("EfaSupported"):
        message = f"EFA interfaces are not supported on the instance type {request.type}."
        raise AwsError("InvalidParameterCombination", message)
    for interface in request.interfaces:
        _check_card(request.type, network_info, interface)
    max_efa = network_info.get("EfaInfo", {}).get("MaximumEfaInterfaces", 0)
    cards = network_info.get("MaximumNetworkCards", 1)
    if len(efa_interfaces) > max_efa or any(card >= cards for card, _ in slots):
        message = f"{request.type} has {cards} network cards and takes {max_efa} EFA interfaces."
        raise AwsError("AttachmentLimitExceeded", message)


def _check_card(type: str, network_info: dict[str, Any], interface: dict[str, Any]) -> None:
    """Check that a network card takes an interface of this type, where EC2 describes the cards of the type."""
    index, device = _interface_slot(interface)
    kind = interface.get("InterfaceType") or "interface"
    cards = {card["NetworkCardIndex"]: card for card in network_info.get("NetworkCards", [])}
    if index in cards and kind not in cards[index].get("InterfaceTypes", [kind]):
        message = f"Network card {index} of {type} does not support interfaces of type {kind}."
        raise AwsError("InvalidParameterCombination", message)
    if kind == "efa-only" and (index, device) == (0, 0):
        raise AwsError("InvalidParameterCombination", "The primary network interface cannot be EFA-only.")


def _check_profile_and_user_data(sim: SimulatedAws, request: LaunchRequest) -> None:
    for name, value in request.profile.items():
        if value:
            _check_profile(request, name, value)
    try:
        size = len(base64.b64decode(request.user_data or "", validate=True))
    except ValueError as error:
        raise AwsError("InvalidUserData.Malformed", "Invalid BASE64 encoding of user data.") from error
    if size > USER_DATA_BYTES:
        raise AwsError("InvalidParameterValue", "User data is limited to 16384 bytes")


def _check_profile(request: LaunchRequest, name: str, value: str) -> None:
    arguments: dict[str, Any] = {"iam_instance_profile_name": None, "iam_instance_profile_arn": None}
    try:
        arguments[f"iam_instance_profile_{name.lower()}"] = value
        profile = filter_iam_instance_profiles(request.backend.account_id, request.backend.partition, **arguments)
    except Exception:  # IAM's own error, which EC2 does not pass on
        profile = None
    if profile is None:
        message = f"Value ({value}) for parameter iamInstanceProfile.{name.lower()} is invalid."
        raise AwsError("InvalidParameterValue", f"{message} Invalid IAM Instance Profile {name.lower()}")


def _check_market(sim: SimulatedAws, request: LaunchRequest) -> None:
    if request.market != "spot" and "spot-instances-request" in request.tags:
        message = "You cannot specify tags for Spot instances requests if there are no Spot instances requests being"
        message += " created by the request."
        raise AwsError("InvalidParameterCombination", message)


ACTIONS = {"run_instances": run_instances}
