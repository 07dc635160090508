"""All resources in all regions: those that cost, and those that are free or meant to stay."""

from collections.abc import Iterator
from typing import Any

from moto.ec2.models import ec2_backends
from moto.efs.models import efs_backends
from support.simcloud.cloud import ACCOUNT, SimulatedAws
from support.simcloud.placement_groups import security_groups

ResourceRow = dict[str, Any]


def _rows(kind: str, backend: Any, *ids: Any, **columns: Any) -> Iterator[ResourceRow]:
    for id in ids:
        yield {"kind": kind, "id": id, "region": backend.region_name, "tags": dict(backend.tags.get(id, {})), **columns}


def billable(sim: SimulatedAws) -> Iterator[ResourceRow]:
    """Yield live instances, volumes, elastic addresses, and NAT gateways."""
    for backend in ec2_backends[ACCOUNT].values():
        for instance in sim.all_instances(backend):
            if instance.state != "terminated":
                yield from _rows("instance", backend, instance.id, state=instance.state)
        yield from _rows("volume", backend, *backend.volumes)
        yield from _rows("address", backend, *(address.allocation_id for address in backend.addresses))
        gateways = backend.nat_gateways.values()
        yield from _rows("nat-gateway", backend, *(one.id for one in gateways if one.state != "deleted"))


def free(sim: SimulatedAws) -> Iterator[ResourceRow]:
    """Yield placement groups, key pairs, networks and their parts without EC2's defaults, and file systems."""
    for backend in ec2_backends[ACCOUNT].values():
        for (region, name), group in sim.groups.items():
            if region == backend.region_name:
                yield from _rows("placement-group", backend, group.id, name=name)
        for key in backend.key_pairs.values():
            yield from _rows("key-pair", backend, key.id, name=key.key_name)
        subnets = [subnet for zone in backend.subnets.values() for subnet in zone.values()]
        for kind, ids in {
            "security-group": [group.id for group in security_groups(backend) if not group.is_default],
            "vpc": [vpc.id for vpc in backend.vpcs.values() if not vpc.is_default],
            "subnet": [subnet.id for subnet in subnets if not subnet.default_for_az],
            "internet-gateway": backend.internet_gateways,
            "network-interface": backend.enis,
        }.items():
            yield from _rows(kind, backend, *ids)
    for region, efs_backend in efs_backends[ACCOUNT].items():
        for id in efs_backend.file_systems_by_id:
            tags = {tag["Key"]: tag["Value"] for tag in efs_backend.list_tags_for_resource(id)}
            yield {"kind": "file-system", "id": id, "region": region, "tags": tags}
