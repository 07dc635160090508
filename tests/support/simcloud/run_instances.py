"""RunInstances: what is checked, in which order, and what a new instance is."""

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
from support.simcloud.cloud import AwsError, Sim
from support.simcloud.lifecycle import Life

TAGGABLE = ("instance", "volume", "network-interface", "spot-instances-request")
USER_DATA_BYTES = 16384


class Ask:
    """One RunInstances request, read."""

    def __init__(self, response: Any) -> None:
        get = response._get_param
        self.region, self.backend = response.region, response.ec2_backend
        self.low, self.high = int(get("MinCount", 0)), int(get("MaxCount", 0))
        self.token = get("ClientToken") or ""
        self.image, self.type = get("ImageId"), get("InstanceType") or "m1.small"
        self.key = get("KeyName")
        self.interfaces = [dict(one) for one in get("NetworkInterfaces", [])]
        self.subnet_id, self.groups = get("SubnetId"), list(get("SecurityGroupIds", []))
        self.group, self.group_id = get("Placement.GroupName"), get("Placement.GroupId")
        self.zone = get("Placement.AvailabilityZone")
        self.market = "spot" if get("InstanceMarketOptions.MarketType") == "spot" else "on-demand"
        self.spot = {name: get(f"InstanceMarketOptions.SpotOptions.{name}") for name in SPOT_OPTIONS}
        self.profile = {name: get(f"IamInstanceProfile.{name}") for name in ("Name", "Arn")}
        self.user_data = get("UserData")
        self.disks = [dict(one) for one in get("BlockDeviceMappings", [])]
        self.tags = response._parse_tag_specification()
        data = {name: value for name, value in sorted(response.data.items()) if name not in ("ClientToken", "DryRun")}
        self.digest = hashlib.sha256(json.dumps(data, default=str).encode()).hexdigest()

    def subnets(self) -> list[str]:
        """The subnets it names."""
        return [one["SubnetId"] for one in self.interfaces if one.get("SubnetId")] or [
            one for one in [self.subnet_id] if one
        ]

    def group_ids(self) -> list[str]:
        """The security groups it names."""
        return self.groups + [group for one in self.interfaces for group in one.get("Groups", [])]


SPOT_OPTIONS = ("MaxPrice", "SpotInstanceType", "InstanceInterruptionBehavior")


def run_instances(self: Any) -> ActionResult:
    """Launch as many as the market has, at least MinCount or none; the same token gives the same instances."""
    from support.simcloud import moto_patches

    sim, ask, dry = Sim.current, Ask(self), self._get_param("DryRun", False)
    if ask.token and not dry and (ask.region, ask.token) in sim.tokens:
        digest, known = sim.tokens[ask.region, ask.token]
        if digest != ask.digest:
            raise AwsError(
                "IdempotentParameterMismatch",
                "Arguments on this idempotent request are inconsistent with arguments used in previous request(s).",
            )
        return ActionResult(known)
    check(sim, ask)
    if dry:
        raise DryRunClientError()
    count = sim.market.take(sim, ask)
    _simplify(self.params, ask, count)
    reservation: Any = moto_patches.originals["run_instances"](self).result
    for instance in reservation.instances:
        _complete(sim, ask, reservation, instance)
    if ask.token:
        sim.tokens[ask.region, ask.token] = (ask.digest, reservation)
    return ActionResult(reservation)


def _simplify(params: Any, ask: Ask, count: int) -> None:
    """Leave to moto what it does right: so many machines, with a root disk; profiles are ours."""
    params["MinCount"] = count
    params.pop("IamInstanceProfile", None)
    root = ask.backend.amis[ask.image].root_device_name
    disks = ask.disks if any(one.get("DeviceName") == root for one in ask.disks) else [{"DeviceName": root}, *ask.disks]
    params["BlockDeviceMappings"] = [_disk(ask, root, one) for one in disks]
    params["SecurityGroups"] = list(params.get("SecurityGroups") or [])


def _disk(ask: Ask, root: str, mapping: dict[str, Any]) -> dict[str, Any]:
    disk = {"VolumeType": "gp3", "DeleteOnTermination": True, **dict(mapping.get("Ebs") or {})}
    if mapping["DeviceName"] == root:
        disk.setdefault("VolumeSize", ask.backend.amis[ask.image].block_device_mappings[0]["Ebs"]["VolumeSize"])
    return {"DeviceName": mapping["DeviceName"], "Ebs": disk}


def _complete(sim: Sim, ask: Ask, reservation: Any, instance: Any) -> None:
    """What moto leaves out of a new instance."""
    now, backend = sim.now(), ask.backend
    key = backend.key_pairs[ask.key].public_key if ask.key else ""
    text = base64.b64decode(ask.user_data or "").decode(errors="replace")
    instance.life = Life(now, ask.market, key, text, ask.image, instance.private_ip)
    instance.launch_time = datetime.fromtimestamp(now, UTC).replace(tzinfo=None, microsecond=0)
    instance.client_token, instance.filter_reservation = ask.token, reservation.id
    instance.lifecycle = "spot" if ask.market == "spot" else None
    if ask.group:
        instance.placement.group_name = ask.group
        instance.placement.group_id = sim.groups[ask.region, ask.group]["GroupId"]
    if any(ask.profile.values()):
        backend.associate_iam_instance_profile(instance.id, ask.profile["Name"], ask.profile["Arn"])
    for nic in instance.nics.values():
        nic.add_tags(ask.tags.get("network-interface", {}))
    for mapping in ask.disks:
        block = instance.block_device_mapping.get(mapping.get("DeviceName"))
        for name in ("Iops", "Throughput"):
            if block is not None and (mapping.get("Ebs") or {}).get(name):
                setattr(backend.volumes[block.volume_id], name.lower(), int(mapping["Ebs"][name]))
    sim.market.open_request(sim, ask, instance)
    sim.born(instance)


def prep_nics(
    self: Any,
    nic_spec: list[dict[str, Any]],
    private_ip: str | None = None,
    associate_public_ip: bool | None = None,
    security_groups: list[Any] | None = None,
    ipv6_address_count: int | None = None,
) -> None:
    """The interfaces as asked for, with card and kind. The first has a loopback address, public too if it may."""
    backend, many = self.ec2_backend, len(nic_spec) > 1
    specs = sorted(nic_spec or [{}], key=lambda one: (_number(one, "NetworkCardIndex"), _number(one, "DeviceIndex")))
    self.nics = {}
    for place, spec in enumerate(specs):
        subnet = backend.get_subnet(spec.get("SubnetId") or self._subnet_id or _default_subnet(self))
        wanted = spec.get("AssociatePublicIpAddress")
        public = subnet.map_public_ip_on_launch if wanted is None else wanted
        address = Sim.current.address() if place == 0 else None
        nic = backend.create_network_interface(
            subnet,
            address or subnet.get_available_subnet_ip(self),
            group_ids=list(spec.get("Groups") or [group.id for group in security_groups or []]),
            description=spec.get("Description", ""),
            delete_on_termination=spec.get("DeleteOnTermination", True),
        )
        nic.interface_type = spec.get("InterfaceType") or "interface"
        nic.network_card_index, nic.device_index = _number(spec, "NetworkCardIndex"), _number(spec, "DeviceIndex")
        nic.public_ip = address if place == 0 and public and not many else None
        nic.instance, nic.status = self, "in-use"
        nic.attachment_id, nic.attach_time = random_eni_attach_id(), utcnow()
        self.nics[place] = nic
    self.security_groups = list(self.nics[0]._group_set)


def _number(spec: dict[str, Any], name: str) -> int:
    return int(spec.get(name) or 0)


def _default_subnet(instance: Any) -> str:
    found = instance.ec2_backend.get_default_subnets().get(instance.placement.zone)
    if found is None:
        raise AwsError("MissingInput", "No default subnet for this zone. Please specify a subnet.")
    return str(found.id)


# --- checks ----------------------------------------------------------------------------------------------------------


def check(sim: Sim, ask: Ask) -> None:
    """Refuse what EC2 refuses, by its codes."""
    from support.simcloud import placement_groups

    for part in (_counts, _image, _networks, _interfaces, _rest, _market_rules):
        part(sim, ask)
    placement_groups.check_placement(sim, ask)


def _counts(sim: Sim, ask: Ask) -> None:
    if ask.low < 1 or ask.high < 1:
        raise AwsError("InvalidParameterValue", "Invalid value for MinCount or MaxCount: it must be greater than 0.")
    if ask.low > ask.high:
        raise AwsError("InvalidParameterCombination", "MinCount must not be greater than MaxCount.")
    if len(ask.token) > 64 or not ask.token.isascii():
        raise AwsError("InvalidParameterValue", "Client token must be at most 64 ASCII characters.")
    for kind in ask.tags:
        if kind not in TAGGABLE:
            message = f"'{kind}' is not a valid taggable resource type for this operation."
            raise AwsError("InvalidParameterValue", message)


def _image(sim: Sim, ask: Ask) -> None:
    if not re.fullmatch(r"ami-([0-9a-f]{8}|[0-9a-f]{17})", ask.image or ""):
        raise AwsError("InvalidAMIID.Malformed", f'Invalid id: "{ask.image}"')
    if ask.image not in ask.backend.amis:
        raise AwsError("InvalidAMIID.NotFound", f"The image id '[{ask.image}]' does not exist")
    if ask.type not in INSTANCE_TYPES:
        sim.market.unknown_type(ask.type)
    if ask.key and ask.key not in ask.backend.key_pairs:
        raise AwsError("InvalidKeyPair.NotFound", f"The key pair '{ask.key}' does not exist")
    disk = ask.backend.amis[ask.image].block_device_mappings[0]
    for one in ask.disks:
        size, least = (one.get("Ebs") or {}).get("VolumeSize"), disk["Ebs"]["VolumeSize"]
        if one.get("DeviceName") == disk["DeviceName"] and size and int(size) < least:
            message = f"Volume of size {size}GB is smaller than snapshot 'snap', expect size>= {least}GB"
            raise AwsError("InvalidBlockDeviceMapping", message)


def _networks(sim: Sim, ask: Ask) -> None:
    if ask.interfaces and (ask.subnet_id or ask.groups):
        what = "subnet ID" if ask.subnet_id else "security groups"
        message = f"Network interfaces and an instance-level {what} may not be specified on the same request"
        raise AwsError("InvalidParameterCombination", message)
    found = [ask.backend.get_subnet(one) for one in ask.subnets()]  # InvalidSubnetID.NotFound
    if len({subnet.availability_zone for subnet in found}) > 1:
        raise AwsError("InvalidParameterCombination", "All network interfaces must be in the same Availability Zone")
    for group_id in ask.group_ids():
        if not re.fullmatch(r"sg-([0-9a-f]{8}|[0-9a-f]{17})", group_id):
            raise AwsError("InvalidGroupId.Malformed", f"Invalid id: '{group_id}' (expecting 'sg-...')")
        group = ask.backend.get_security_group_from_id(group_id)
        if group is None:
            raise AwsError("InvalidGroup.NotFound", f"The security group '{group_id}' does not exist")
        if found and group.vpc_id != found[0].vpc_id:
            message = f"Security group {group_id} and subnet {found[0].id} belong to different networks."
            raise AwsError("InvalidParameter", message)
    ask.zone = found[0].availability_zone if found else ask.zone or f"{ask.region}a"
    if found and found[0].available_ip_address_count < ask.low * max(1, len(ask.interfaces)):
        message = f"There are not enough free addresses in subnet '{found[0].id}' to satisfy the requested number."
        raise AwsError("InsufficientFreeAddressesInSubnet", message)


def _interfaces(sim: Sim, ask: Ask) -> None:
    facts = INSTANCE_TYPES[ask.type].get("NetworkInfo", {})
    places = [(_number(one, "NetworkCardIndex"), _number(one, "DeviceIndex")) for one in ask.interfaces]
    if len(set(places)) < len(places) or (places and (0, 0) not in places):
        message = "Each network interface needs its own network card and device index, and one must be 0 and 0."
        raise AwsError("InvalidParameterValue", message)
    if len(places) > 1 and any(one.get("AssociatePublicIpAddress") for one in ask.interfaces):
        message = "The associatePublicIPAddress parameter cannot be specified when launching with multiple network"
        message += " interfaces."
        raise AwsError("InvalidParameterCombination", message)
    efa = [one for one in ask.interfaces if str(one.get("InterfaceType", "")).startswith("efa")]
    if efa and not facts.get("EfaSupported"):
        message = f"EFA interfaces are not supported on the instance type {ask.type}."
        raise AwsError("InvalidParameterCombination", message)
    most, cards = facts.get("EfaInfo", {}).get("MaximumEfaInterfaces", 0), facts.get("MaximumNetworkCards", 1)
    if len(efa) > most or any(card >= cards for card, _ in places):
        message = f"{ask.type} has {cards} network cards and takes {most} EFA interfaces."
        raise AwsError("AttachmentLimitExceeded", message)


def _rest(sim: Sim, ask: Ask) -> None:
    for name, value in ask.profile.items():
        if value:
            _profile(ask, name, value)
    try:
        size = len(base64.b64decode(ask.user_data or "", validate=True))
    except ValueError as error:
        raise AwsError("InvalidUserData.Malformed", "Invalid BASE64 encoding of user data.") from error
    if size > USER_DATA_BYTES:
        raise AwsError("InvalidParameterValue", "User data is limited to 16384 bytes")


def _profile(ask: Ask, name: str, value: str) -> None:
    wanted: dict[str, Any] = {"iam_instance_profile_name": None, "iam_instance_profile_arn": None}
    try:
        wanted[f"iam_instance_profile_{name.lower()}"] = value
        found = filter_iam_instance_profiles(ask.backend.account_id, ask.backend.partition, **wanted)
    except Exception:  # IAM's own error, which EC2 does not pass on
        found = None
    if found is None:
        message = f"Value ({value}) for parameter iamInstanceProfile.{name.lower()} is invalid."
        raise AwsError("InvalidParameterValue", f"{message} Invalid IAM Instance Profile {name.lower()}")


def _market_rules(sim: Sim, ask: Ask) -> None:
    if ask.market != "spot" and "spot-instances-request" in ask.tags:
        message = "You cannot specify tags for Spot instances requests if there are no Spot instances requests being"
        message += " created by the request."
        raise AwsError("InvalidParameterCombination", message)
    once = ask.spot["SpotInstanceType"] != "persistent"
    if ask.spot["InstanceInterruptionBehavior"] in ("stop", "hibernate"):
        if once:
            message = "The request with type 'one-time' is not supported when instanceInterruptionBehavior is 'stop'."
            raise AwsError("InvalidParameterCombination", message)
        if ask.group:
            message = "Spot instances that stop or hibernate cannot be launched in a placement group."
            raise AwsError("InvalidParameterCombination", message)


ACTIONS = {"run_instances": run_instances}
