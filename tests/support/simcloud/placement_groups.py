"""Placement groups, and the refusal to delete resources that are in use."""

import hashlib
from collections.abc import Iterator
from typing import Any

from moto.core.responses import ActionResult, EmptyResult
from moto.ec2.models.instance_types import INSTANCE_TYPES
from moto.ec2.utils import tag_filter_matches
from support.simcloud.cloud import AwsError, SimulatedAws

# --- placement groups ------------------------------------------------------------------------------------------------


class TaggedResource:
    """A resource without a class in moto, by its id. moto keeps its tags."""

    def __init__(self, backend: Any, id: str) -> None:
        self.backend = backend
        self.id = id

    def get_tags(self) -> list[dict[str, str]]:
        """Return the tags as moto's filters read them."""
        return [{"key": key, "value": value} for key, value in self.backend.tags.get(self.id, {}).items()]

    def tags(self) -> list[dict[str, str]]:
        """Return the tags as a response shows them."""
        return [{"Key": tag["key"], "Value": tag["value"]} for tag in self.get_tags()]


def matches(backend: Any, id: str, attributes: dict[str, Any], filters: dict[str, list[str]]) -> bool:
    """Return whether a resource with these attributes passes the filters. Raises `AwsError` for an unknown filter."""
    for name, values in filters.items():
        if name.startswith("tag:") or name == "tag-key":
            if not tag_filter_matches(TaggedResource(backend, id), name, values):
                return False
        elif name not in attributes:
            raise AwsError("InvalidParameterValue", f"The filter '{name}' is invalid")
        elif attributes[name] not in values:
            return False
    return True


def create_placement_group(self: Any) -> ActionResult:
    """Create a placement group with tags."""
    sim = SimulatedAws.current
    name = self._get_param("GroupName")
    if (self.region, name) in sim.groups:
        raise AwsError("InvalidPlacementGroup.Duplicate", f"The Placement Group '{name}' already exists.")
    tags = self._parse_tag_specification("placement-group").get("placement-group", {})
    suffix = hashlib.sha256(f"{self.region}{name}{sim.now()}".encode()).hexdigest()[:17]
    group = {
        "GroupName": name,
        "State": "available",
        "Strategy": self._get_param("Strategy"),
        "GroupId": f"pg-{suffix}",
    }
    group["GroupArn"] = f"arn:aws:ec2:{self.region}:{self.current_account}:placement-group/{name}"
    sim.groups[self.region, name] = group
    self.ec2_backend.create_tags([group["GroupId"]], tags)
    return ActionResult(
        {"PlacementGroup": {**group, "Tags": TaggedResource(self.ec2_backend, group["GroupId"]).tags()}}
    )


def _unknown_group(name: str) -> AwsError:
    return AwsError("InvalidPlacementGroup.Unknown", f"The Placement Group '{name}' is unknown.")


def describe_placement_groups(self: Any) -> ActionResult:
    """Describe placement groups by names or filters."""
    sim = SimulatedAws.current
    backend = self.ec2_backend
    filters = self._filters_from_querystring()
    groups = {name: group for (region, name), group in sim.groups.items() if region == self.region}
    names = self._get_param("GroupNames", [])
    for missing in [name for name in names if name not in groups]:
        raise _unknown_group(missing)
    rows = []
    for name, group in groups.items():
        attributes = {"group-name": name, "state": group["State"], "strategy": group["Strategy"]}
        if (not names or name in names) and matches(backend, group["GroupId"], attributes, filters):
            rows.append({**group, "Tags": TaggedResource(backend, group["GroupId"]).tags()})
    return ActionResult({"PlacementGroups": rows})


def delete_placement_group(self: Any) -> ActionResult:
    """Delete a placement group. It is refused until all its instances are terminated."""
    sim = SimulatedAws.current
    name = self._get_param("GroupName")
    if (self.region, name) not in sim.groups:
        raise _unknown_group(name)
    if any(
        instance.placement.group_name == name and instance.region_name == self.region
        for instance in sim.live_instances()
    ):
        message = f"The placement group '{name}' is in use and may not be deleted."
        raise AwsError("InvalidPlacementGroup.InUse", message)
    self.ec2_backend.tags.pop(sim.groups.pop((self.region, name))["GroupId"], None)
    return EmptyResult()


def check_placement(sim: SimulatedAws, request: Any) -> None:
    """Raise `AwsError` unless the placement group of a launch exists; a cluster group stays in one zone."""
    if not request.group:
        return
    if (request.region, request.group) not in sim.groups:
        raise _unknown_group(request.group)
    if sim.groups[request.region, request.group]["Strategy"] != "cluster":
        return
    if "cluster" not in INSTANCE_TYPES[request.type].get("PlacementGroupInfo", {}).get("SupportedStrategies", []):
        message = f"Cluster placement groups are not supported by the '{request.type}' instance type."
        raise AwsError("InvalidParameterCombination", message)
    zones = {
        instance.placement.zone
        for instance in sim.live_instances()
        if instance.region_name == request.region and instance.placement.group_name == request.group
    }
    if zones - {request.zone}:
        message = (
            f"Placement group '{request.group}' is in {zones.pop()}: its instances must be in one Availability Zone."
        )
        raise AwsError("InvalidParameterCombination", message)


# --- deletion -------------------------------------------------------------------------------------------------------


def _dependency_violation(message: str) -> AwsError:
    return AwsError("DependencyViolation", message)


def call_moto(name: str, self: Any) -> ActionResult:
    """Let moto do a call."""
    from support.simcloud import moto_patches

    result: ActionResult = moto_patches.moto_originals[name](self)
    return result


def delete_security_group(self: Any) -> ActionResult:
    """Delete a security group. It is refused while an interface has it, or another group's rules name it."""
    backend = self.ec2_backend
    id = self._get_param("GroupId")
    name = self._get_param("GroupName")
    group = backend.get_security_group_from_id(id) if id else backend.get_security_group_from_name(name)
    if group is not None:
        if group.is_default:
            message = f'the specified group: "{group.id}" name: "default" cannot be deleted by a user'
            raise AwsError("CannotDelete", message)
        has_interface = any(
            group.id in [own_group.id for own_group in interface._group_set] for interface in backend.enis.values()
        )
        is_named = any(
            group.id in _groups_in_rules(other) for other in security_groups(backend) if other.id != group.id
        )
        if has_interface or is_named:
            raise _dependency_violation(f"resource {group.id} has a dependent object")
    return call_moto("delete_security_group", self)


def security_groups(backend: Any) -> Iterator[Any]:
    """Yield the security groups of a region."""
    for groups in backend.groups.values():
        yield from groups.values()


def _groups_in_rules(group: Any) -> set[str]:
    """Return the ids of the groups that a group's rules name."""
    rules = [*group.ingress_rules, *group.egress_rules]
    sources = [getattr(rule, "source_group", None) for rule in rules]
    return {str(source.get("GroupId")) for source in sources if source}


def delete_subnet(self: Any) -> ActionResult:
    """Delete a subnet. It is refused while an interface is in it."""
    id = self._get_param("SubnetId")
    if any(interface.subnet.id == id for interface in self.ec2_backend.enis.values()):
        raise _dependency_violation(f"The subnet '{id}' has dependencies and cannot be deleted.")
    for table in self.ec2_backend.route_tables.values():  # EC2 ends the association, moto keeps it
        table._associations = {key: target for key, target in table._associations.items() if target != id}
    return call_moto("delete_subnet", self)


def delete_vpc(self: Any) -> ActionResult:
    """Delete a network. It is refused while it has a gateway, an endpoint, or a security group of ours.

    moto itself checks subnets and route tables.
    """
    backend = self.ec2_backend
    id = self._get_param("VpcId")
    has_gateway = any(
        gateway.vpc is not None and gateway.vpc.id == id for gateway in backend.internet_gateways.values()
    )
    has_endpoint = any(
        endpoint.vpc_id == id and endpoint.state != "deleted" for endpoint in backend.vpc_end_points.values()
    )
    has_group = any(not group.is_default for group in backend.groups.get(id, {}).values())
    if has_gateway or has_endpoint or has_group:
        raise _dependency_violation(f"The vpc '{id}' has dependencies and cannot be deleted.")
    return call_moto("delete_vpc", self)


def create_vpc_endpoint(self: Any) -> ActionResult:
    """Create a gateway endpoint where the request names no type: moto cannot delete an endpoint without a type."""
    self.params["VpcEndpointType"] = self._get_param("VpcEndpointType") or "Gateway"
    return call_moto("create_vpc_endpoint", self)


def detach_internet_gateway(self: Any) -> ActionResult:
    """Detach an internet gateway. It is refused while an instance of the network has a public address."""
    id = self._get_param("VpcId")
    if any(interface.subnet.vpc_id == id and interface.public_ip for interface in self.ec2_backend.enis.values()):
        message = f"Network {id} has some mapped public address(es). Please unmap those public address(es) first."
        raise _dependency_violation(message)
    return call_moto("detach_internet_gateway", self)


ACTIONS = {
    "create_placement_group": create_placement_group,
    "create_vpc_endpoint": create_vpc_endpoint,
    "delete_placement_group": delete_placement_group,
    "delete_security_group": delete_security_group,
    "delete_subnet": delete_subnet,
    "delete_vpc": delete_vpc,
    "describe_placement_groups": describe_placement_groups,
    "detach_internet_gateway": detach_internet_gateway,
}
