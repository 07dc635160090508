"""Placement groups, and what may not be deleted because something still uses it."""

import hashlib
from collections.abc import Iterator
from typing import Any

from moto.core.responses import ActionResult, EmptyResult
from moto.ec2.models.instance_types import INSTANCE_TYPES
from moto.ec2.utils import tag_filter_matches
from support.simcloud.cloud import AwsError, Sim

# --- placement groups ------------------------------------------------------------------------------------------------


class Tagged:
    """Something with an id whose tags moto keeps."""

    def __init__(self, backend: Any, id: str) -> None:
        self.backend, self.id = backend, id

    def get_tags(self) -> list[dict[str, str]]:
        """As moto's filters ask for them."""
        return [{"key": key, "value": value} for key, value in self.backend.tags.get(self.id, {}).items()]

    def tags(self) -> list[dict[str, str]]:
        """As an answer shows them."""
        return [{"Key": one["key"], "Value": one["value"]} for one in self.get_tags()]


def matches(backend: Any, id: str, facts: dict[str, Any], filters: dict[str, list[str]]) -> bool:
    """True if a thing with these facts passes the filters; unknown filters are an error."""
    for name, values in filters.items():
        if name.startswith("tag:") or name == "tag-key":
            if not tag_filter_matches(Tagged(backend, id), name, values):
                return False
        elif name not in facts:
            raise AwsError("InvalidParameterValue", f"The filter '{name}' is invalid")
        elif facts[name] not in values:
            return False
    return True


def create_placement_group(self: Any) -> ActionResult:
    """A group of a name, with tags."""
    sim, name = Sim.current, self._get_param("GroupName")
    if (self.region, name) in sim.groups:
        raise AwsError("InvalidPlacementGroup.Duplicate", f"The Placement Group '{name}' already exists.")
    tags = self._parse_tag_specification("placement-group").get("placement-group", {})
    strategy = self._get_param("Strategy") or "cluster"
    if strategy not in ("cluster", "spread", "partition"):
        raise AwsError("InvalidParameterValue", f"Value ({strategy}) for parameter strategy is invalid.")
    number = hashlib.sha256(f"{self.region}{name}{sim.now()}".encode()).hexdigest()[:17]
    group = {"GroupName": name, "State": "available", "Strategy": strategy, "GroupId": f"pg-{number}"}
    group["GroupArn"] = f"arn:aws:ec2:{self.region}:{self.current_account}:placement-group/{name}"
    sim.groups[self.region, name] = group
    self.ec2_backend.create_tags([group["GroupId"]], tags)
    return ActionResult({"PlacementGroup": {**group, "Tags": Tagged(self.ec2_backend, group["GroupId"]).tags()}})


def _unknown(name: str) -> AwsError:
    return AwsError("InvalidPlacementGroup.Unknown", f"The Placement Group '{name}' is unknown.")


def describe_placement_groups(self: Any) -> ActionResult:
    """By names, ids or filters."""
    sim, backend, filters = Sim.current, self.ec2_backend, self._filters_from_querystring()
    here = {name: group for (region, name), group in sim.groups.items() if region == self.region}
    for asked, known in (("GroupNames", set(here)), ("GroupIds", {one["GroupId"] for one in here.values()})):
        for missing in [one for one in self._get_param(asked, []) if one not in known]:
            raise _unknown(missing)
    names, ids = self._get_param("GroupNames", []), self._get_param("GroupIds", [])
    found = []
    for name, group in here.items():
        facts = {"group-name": name, "group-arn": group["GroupArn"]}
        facts |= {"state": group["State"], "strategy": group["Strategy"]}
        chosen = (not names or name in names) and (not ids or group["GroupId"] in ids)
        if chosen and matches(backend, group["GroupId"], facts, filters):
            found.append({**group, "Tags": Tagged(backend, group["GroupId"]).tags()})
    return ActionResult({"PlacementGroups": found})


def delete_placement_group(self: Any) -> ActionResult:
    """Not while an instance in it is not terminated."""
    sim, name = Sim.current, self._get_param("GroupName")
    if (self.region, name) not in sim.groups:
        raise _unknown(name)
    if any(one.placement.group_name == name and one.region_name == self.region for one in sim.live()):
        message = f"The placement group '{name}' is in use and may not be deleted."
        raise AwsError("InvalidPlacementGroup.InUse", message)
    self.ec2_backend.tags.pop(sim.groups.pop((self.region, name))["GroupId"], None)
    return EmptyResult()


def check_placement(sim: Sim, ask: Any) -> None:
    """The group of a launch exists, and a cluster group stays in one zone. Sets `ask.group` where the id was given."""
    if ask.group_id:
        known = [name for (region, name), one in sim.groups.items() if one["GroupId"] == ask.group_id]
        ask.group = known[0] if known else ask.group_id
    if not ask.group:
        return
    if (ask.region, ask.group) not in sim.groups:
        raise _unknown(ask.group)
    if sim.groups[ask.region, ask.group]["Strategy"] != "cluster":
        return
    if "cluster" not in INSTANCE_TYPES[ask.type].get("PlacementGroupInfo", {}).get("SupportedStrategies", []):
        message = f"Cluster placement groups are not supported by the '{ask.type}' instance type."
        raise AwsError("InvalidParameterCombination", message)
    here = [one for one in sim.live() if one.region_name == ask.region and one.placement.group_name == ask.group]
    zones = {one.placement.zone for one in here}
    if zones - {ask.zone}:
        message = f"Placement group '{ask.group}' is in {zones.pop()}: its instances must be in one Availability Zone."
        raise AwsError("InvalidParameterCombination", message)


# --- in use ----------------------------------------------------------------------------------------------------------


def _violation(message: str) -> AwsError:
    return AwsError("DependencyViolation", message)


def then(name: str, self: Any) -> ActionResult:
    """What moto does."""
    from support.simcloud import moto_patches

    answer: ActionResult = moto_patches.originals[name](self)
    return answer


def delete_security_group(self: Any) -> ActionResult:
    """Not while an interface bears it, nor while another group's rules name it."""
    backend, id, name = self.ec2_backend, self._get_param("GroupId"), self._get_param("GroupName")
    group = backend.get_security_group_from_id(id) if id else backend.get_security_group_from_name(name)
    if group is not None:
        if group.is_default:
            message = f'the specified group: "{group.id}" name: "default" cannot be deleted by a user'
            raise AwsError("CannotDelete", message)
        users = [one.id for one in backend.enis.values() if any(other.id == group.id for other in one._group_set)]
        users += [one.id for one in security_groups(backend) if one.id != group.id and group.id in _named_by(one)]
        if users:
            raise _violation(f"resource {group.id} has a dependent object")
    return then("delete_security_group", self)


def security_groups(backend: Any) -> Iterator[Any]:
    """All of a region."""
    for groups in backend.groups.values():
        yield from groups.values()


def _named_by(group: Any) -> set[str]:
    rules = [*group.ingress_rules, *group.egress_rules]
    sources = [one for rule in rules for one in [getattr(rule, "source_group", None)] if one]
    return {str(one.get("GroupId")) for one in sources}


def delete_subnet(self: Any) -> ActionResult:
    """Not while an interface is in it."""
    id = self._get_param("SubnetId")
    if any(one.subnet.id == id for one in self.ec2_backend.enis.values()):
        raise _violation(f"The subnet '{id}' has dependencies and cannot be deleted.")
    return then("delete_subnet", self)


def delete_vpc(self: Any) -> ActionResult:
    """Not while it has a gateway, an endpoint, or a security group of ours; moto sees subnets and route tables."""
    backend, id = self.ec2_backend, self._get_param("VpcId")
    gateways = [one for one in backend.internet_gateways.values() if one.vpc is not None and one.vpc.id == id]
    ends = [one for one in backend.vpc_end_points.values() if one.vpc_id == id and one.state != "deleted"]
    named = [one for one in backend.groups.get(id, {}).values() if not one.is_default]
    if gateways or ends or named:
        raise _violation(f"The vpc '{id}' has dependencies and cannot be deleted.")
    return then("delete_vpc", self)


def create_vpc_endpoint(self: Any) -> ActionResult:
    """A gateway one, if the request does not say; moto cannot delete one without a kind."""
    self.params["VpcEndpointType"] = self._get_param("VpcEndpointType") or "Gateway"
    return then("create_vpc_endpoint", self)


def detach_internet_gateway(self: Any) -> ActionResult:
    """Not while an instance of the network has a public address."""
    id = self._get_param("VpcId")
    if any(one.subnet.vpc_id == id and one.public_ip for one in self.ec2_backend.enis.values()):
        message = f"Network {id} has some mapped public address(es). Please unmap those public address(es) first."
        raise _violation(message)
    return then("detach_internet_gateway", self)


def delete_network_interface(self: Any) -> ActionResult:
    """Not while it is attached."""
    nic = self.ec2_backend.enis.get(self._get_param("NetworkInterfaceId"))
    if nic is not None and nic.status == "in-use":
        raise AwsError("InvalidParameterValue", f"Network interface '{nic.id}' is currently in use.")
    return then("delete_network_interface", self)


ACTIONS = {
    "create_placement_group": create_placement_group,
    "create_vpc_endpoint": create_vpc_endpoint,
    "delete_network_interface": delete_network_interface,
    "delete_placement_group": delete_placement_group,
    "delete_security_group": delete_security_group,
    "delete_subnet": delete_subnet,
    "delete_vpc": delete_vpc,
    "describe_placement_groups": describe_placement_groups,
    "detach_internet_gateway": detach_internet_gateway,
}
