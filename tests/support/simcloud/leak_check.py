"""What exists in all regions: what costs, and what is free or meant to stay."""

from typing import Any

from moto.ec2.models import ec2_backends
from moto.efs.models import efs_backends
from support.simcloud.cloud import ACCOUNT, Sim
from support.simcloud.placement_groups import security_groups


def _regions() -> list[Any]:
    return list(ec2_backends[ACCOUNT].values())


def _thing(kind: str, backend: Any, id: str, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "id": id, "region": backend.region_name, "tags": dict(backend.tags.get(id, {})), **more}


def billable(sim: Sim) -> list[dict[str, Any]]:
    """Instances that are not terminated, volumes, elastic addresses, file systems with paid throughput."""
    found = []
    for backend in _regions():
        alive = [one for one in sim.all(backend) if one.state != "terminated"]
        found += [_thing("instance", backend, one.id, state=one.state) for one in alive]
        found += [_thing("volume", backend, one.id) for one in backend.volumes.values()]
        found += [_thing("address", backend, one.allocation_id) for one in backend.addresses]
    for region, backend in efs_backends[ACCOUNT].items():
        paid = [one for one in backend.file_systems_by_id.values() if one.provisioned_throughput_in_mibps]
        found += [{"kind": "throughput", "id": one.file_system_id, "region": region, "tags": {}} for one in paid]
    return found


def free(sim: Sim) -> list[dict[str, Any]]:
    """Placement groups, key pairs, networks and their parts that are not EC2's own, interfaces, file systems."""
    found = []
    for backend in _regions():
        groups = [group for (region, _), group in sim.groups.items() if region == backend.region_name]
        found += [_thing("placement-group", backend, one["GroupId"], name=one["GroupName"]) for one in groups]
        found += [_thing("key-pair", backend, one.id, name=one.key_name) for one in backend.key_pairs.values()]
        found += [_thing("security-group", backend, one.id) for one in security_groups(backend) if not one.is_default]
        found += [_thing("vpc", backend, one.id) for one in backend.vpcs.values() if not one.is_default]
        subnets = [one for zone in backend.subnets.values() for one in zone.values()]
        found += [_thing("subnet", backend, one.id) for one in subnets if not one.default_for_az]
        found += [_thing("internet-gateway", backend, one.id) for one in backend.internet_gateways.values()]
        found += [_thing("network-interface", backend, one.id) for one in backend.enis.values()]
        found += [_thing("launch-template", backend, one.id) for one in backend.launch_templates.values()]
    for region, backend in efs_backends[ACCOUNT].items():
        for one in backend.file_systems_by_id.values():
            tags = {tag["Key"]: tag["Value"] for tag in backend.list_tags_for_resource(one.file_system_id)}
            found.append({"kind": "file-system", "id": one.file_system_id, "region": region, "tags": tags})
    return found
