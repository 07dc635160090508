"""Machine types and on-demand prices that ship with the program."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MachineType:
    """A type of machine as the program's own table has it. `on_demand` dollars an hour, None: unknown; `gone`: why
    nobody can rent it.
    """

    name: str
    gpus: int
    gpu: str
    network_gbps: float
    vcpus: float | None
    on_demand_price: float | None
    retired_reason: str = ""


def find_machine_type(name: str) -> MachineType | None:
    """Return what is known of a type of machine without asking anybody, None when that is nothing."""
    from infra.aws.market import instance_types

    kind = instance_types.find_builtin_type(name) or instance_types.HISTORIC_TYPES.get(name)
    if kind is None:
        return None
    price = instance_types.ON_DEMAND_PRICES.get(name, instance_types.HISTORIC_PRICES.get(name))
    gone = "" if name in instance_types.BUILTIN_TYPES else instance_types.RETIREMENT_REASONS.get(name, "")
    return MachineType(name, max(1, kind.gpus), kind.gpu, kind.network_gbps, kind.vcpus, price, gone)
