"""All resources in all regions: those that cost, and those that are free or meant to stay."""

from typing import Any

from moto.ec2.models import ec2_backends
from moto.efs.models import efs_backends
from support.simcloud.cloud import ACCOUNT, SimulatedAws
from support.simcloud.placement_groups import security_groups

ResourceRow = dict[str, Any]


def _ec2_row(kind: str, backend: Any, id: Any, **columns: Any) -> ResourceRow:
    tags = dict(backend.tags.get(id, {}))
    return {"kind": kind, "id": id, "region": backend.region_name, "tags": tags, **columns}


def billable(sim: SimulatedAws) -> list[ResourceRow]:
    """Return live instances, volumes, elastic addresses, and NAT gateways."""
    rows = []
    for backend in ec2_backends[ACCOUNT].values():
        live_instances = [instance for instance in sim.all_instances(backend) if instance.state != "terminated"]
        rows += [_ec2_row("instance", backend, instance.id, state=instance.state) for instance in live_instances]
        rows += [_ec2_row("volume", backend, volume.id) for volume in backend.volumes.values()]
        rows += [_ec2_row("address", backend, address.allocation_id) for address in backend.addresses]
        rows += [
            _ec2_row("nat-gateway", backend, gateway.id)
            for gateway in backend.nat_gateways.values()
            if gateway.state != "deleted"
        ]
    return rows


def free(sim: SimulatedAws) -> list[ResourceRow]:
    """Return placement groups, key pairs, networks and their parts without EC2's defaults, and file systems."""
    rows = []
    for backend in ec2_backends[ACCOUNT].values():
        for (region, name), group in sim.groups.items():
            if region == backend.region_name:
                rows.append(_ec2_row("placement-group", backend, group["GroupId"], name=name))
        rows += [_ec2_row("key-pair", backend, key.id, name=key.key_name) for key in backend.key_pairs.values()]
        rows += [
            _ec2_row("security-group", backend, group.id) for group in security_groups(backend) if not group.is_default
        ]
        rows += [_ec2_row("vpc", backend, vpc.id) for vpc in backend.vpcs.values() if not vpc.is_default]
        subnets = [subnet for zone in backend.subnets.values() for subnet in zone.values()]
        rows += [_ec2_row("subnet", backend, subnet.id) for subnet in subnets if not subnet.default_for_az]
        for kind, resources in (
            ("internet-gateway", backend.internet_gateways),
            ("network-interface", backend.enis),
        ):
            rows += [_ec2_row(kind, backend, resource.id) for resource in resources.values()]
    for region, efs_backend in efs_backends[ACCOUNT].items():
        for id in efs_backend.file_systems_by_id:
            tags = {tag["Key"]: tag["Value"] for tag in efs_backend.list_tags_for_resource(id)}
            rows.append({"kind": "file-system", "id": id, "region": region, "tags": tags})
    return rows
