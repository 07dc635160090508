"""Placement groups, and the refusal to delete resources that are in use."""

import hashlib
from collections.abc import Iterator
from typing import Any

from moto.core.responses import ActionResult, EmptyResult
from moto.ec2.models.core import TaggedEC2Resource
from moto.ec2.models.instance_types import INSTANCE_TYPES
from moto.ec2.utils import tag_filter_matches
from support.simcloud.cloud import ACCOUNT, SimulatedAws, call_moto, ec2_call, refuse_if


class PlacementGroup(TaggedEC2Resource):
    def __init__(self, backend: Any, name: str, strategy: str) -> None:
        self.ec2_backend = backend
        digest = hashlib.sha256(f"{backend.region_name}{name}{SimulatedAws.current.now()}".encode()).hexdigest()
        self.id = self.group_id = f"pg-{digest[:17]}"
        self.group_arn = f"arn:aws:ec2:{backend.region_name}:{ACCOUNT}:placement-group/{name}"
        self.group_name, self.strategy, self.state = name, strategy, "available"


def matches(resource: TaggedEC2Resource, filters: dict[str, list[str]]) -> bool:
    return all(
        tag_filter_matches(resource, name, values)
        if name.startswith("tag")
        else getattr(resource, name.replace("-", "_")) in values
        for name, values in filters.items()
    )


@ec2_call
def create_placement_group(self: Any) -> ActionResult:
    groups, name = SimulatedAws.current.groups, self._get_param("GroupName")
    exists = (self.region, name) in groups
    refuse_if(exists, "InvalidPlacementGroup.Duplicate", f"The group '{name}' already exists.")
    group = groups[self.region, name] = PlacementGroup(self.ec2_backend, name, self._get_param("Strategy"))
    group.add_tags(self._parse_tag_specification("placement-group").get("placement-group", {}))
    return ActionResult({"PlacementGroup": group})


def find_group(region: str, name: str) -> PlacementGroup:
    """Return a placement group. Raises `AwsError` for an unknown one."""
    groups = SimulatedAws.current.groups
    refuse_if((region, name) not in groups, "InvalidPlacementGroup.Unknown", f"The group '{name}' is unknown.")
    return groups[region, name]


def instances_in(region: str, name: str) -> list[Any]:
    live_instances = SimulatedAws.current.live_instances()
    return [one for one in live_instances if (one.region_name, one.placement.group_name) == (region, name)]


@ec2_call
def describe_placement_groups(self: Any) -> ActionResult:
    all_names = [name for region, name in SimulatedAws.current.groups if region == self.region]
    groups = [find_group(self.region, name) for name in self._get_param("GroupNames", []) or all_names]
    filters = self._filters_from_querystring()
    return ActionResult({"PlacementGroups": [group for group in groups if matches(group, filters)]})


@ec2_call
def delete_placement_group(self: Any) -> ActionResult:
    """Delete a placement group. It is refused until all its instances are terminated."""
    name = self._get_param("GroupName")
    group = find_group(self.region, name)
    refuse_if(instances_in(self.region, name), "InvalidPlacementGroup.InUse", f"The group '{name}' is in use.")
    self.ec2_backend.tags.pop(group.id, None)
    del SimulatedAws.current.groups[self.region, name]
    return EmptyResult()


def check_placement(request: Any) -> None:
    """Raise `AwsError` unless a launch may join its placement group. All groups have the strategy "cluster"."""
    if not request.group:
        return
    find_group(request.region, request.group)
    strategies = INSTANCE_TYPES[request.type].get("PlacementGroupInfo", {}).get("SupportedStrategies", [])
    is_unfit = "cluster" not in strategies
    refuse_if(is_unfit, "InvalidParameterCombination", f"'{request.type}' does not support cluster placement groups.")
    zones = {instance.placement.zone for instance in instances_in(request.region, request.group)}
    refuse_if(zones - {request.zone}, "InvalidParameterCombination", f"The instances of the group are in {zones}.")


def _refuse_in_use(is_in_use: object, resource: str) -> None:
    refuse_if(is_in_use, "DependencyViolation", f"{resource} has dependencies and cannot be deleted.")


@ec2_call
def delete_security_group(self: Any) -> ActionResult:
    """Delete a security group. It is refused while an interface has it, or another group's rules name it."""
    backend = self.ec2_backend
    id = self._get_param("GroupId")
    interface_groups = [group.id for interface in backend.enis.values() for group in interface._group_set]
    is_named = any(id in _groups_in_rules(other) for other in security_groups(backend) if other.id != id)
    _refuse_in_use(id in interface_groups or is_named, id)
    return call_moto("delete_security_group", self)


def security_groups(backend: Any) -> Iterator[Any]:
    for groups in backend.groups.values():
        yield from groups.values()


def _groups_in_rules(group: Any) -> set[str]:
    rules = [*group.ingress_rules, *group.egress_rules]
    sources = [getattr(rule, "source_group", None) for rule in rules]
    return {str(source.get("GroupId")) for source in sources if source}


@ec2_call
def delete_subnet(self: Any) -> ActionResult:
    """Delete a subnet. It is refused while an interface is in it."""
    id = self._get_param("SubnetId")
    _refuse_in_use(id in [interface.subnet.id for interface in self.ec2_backend.enis.values()], id)
    for table in self.ec2_backend.route_tables.values():  # EC2 ends the association, moto keeps it
        table._associations = {key: target for key, target in table._associations.items() if target != id}
    return call_moto("delete_subnet", self)


@ec2_call
def delete_vpc(self: Any) -> ActionResult:
    """Delete a network. It is refused while it has a gateway, an endpoint, or a security group of ours.

    moto itself checks subnets and route tables.
    """
    backend = self.ec2_backend
    id = self._get_param("VpcId")
    gateways = [gateway for gateway in backend.internet_gateways.values() if gateway.vpc and gateway.vpc.id == id]
    endpoints = [one for one in backend.vpc_end_points.values() if one.vpc_id == id and one.state != "deleted"]
    groups = [group for group in backend.groups.get(id, {}).values() if not group.is_default]
    _refuse_in_use(gateways or endpoints or groups, id)
    return call_moto("delete_vpc", self)


@ec2_call
def detach_internet_gateway(self: Any) -> ActionResult:
    """Detach an internet gateway. It is refused while an instance of the network has a public address."""
    id = self._get_param("VpcId")
    interfaces = [interface for interface in self.ec2_backend.enis.values() if interface.subnet.vpc_id == id]
    _refuse_in_use([interface for interface in interfaces if interface.public_ip], id)
    return call_moto("detach_internet_gateway", self)
