"""EC2's machine types and on-demand prices from the table that ships with the program. Makes no request."""

from cluster.backends.machine_types import MachineType
from infra.aws.market import instance_types


def find_machine_type(name: str) -> MachineType | None:
    """Return a machine type from the built-in tables, None when no table has the name."""
    instance_type = instance_types.BUILTIN_TYPES.get(name) or instance_types.HISTORIC_TYPES.get(name)
    if instance_type is None:
        return None
    price = instance_types.ON_DEMAND_PRICES.get(name, instance_types.HISTORIC_PRICES.get(name))
    is_current = name in instance_types.BUILTIN_TYPES
    return MachineType(
        name=name,
        gpus=max(1, instance_type.gpus),
        gpu=instance_type.gpu,
        network_gbps=instance_type.network_gbps,
        vcpus=instance_type.vcpus,
        on_demand_price=price,
        retired_reason="" if is_current else instance_types.RETIREMENT_REASONS.get(name, ""),
    )
