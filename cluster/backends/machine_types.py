"""Machine types and on-demand prices that ship with the program."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shipped:
    """A type of machine as the program's own table has it. `on_demand` dollars an hour, None: unknown; `gone`: why
    nobody can rent it.
    """

    name: str
    gpus: int
    gpu: str
    gbit: float
    vcpus: float | None
    on_demand: float | None
    gone: str = ""


def shipped(name: str) -> Shipped | None:
    """Return what is known of a type of machine without asking anybody, None when that is nothing."""
    from infra.aws.market import instance_types

    kind = instance_types.shipped(name) or instance_types.HISTORIC.get(name)
    if kind is None:
        return None
    price = instance_types.ON_DEMAND.get(name, instance_types.HISTORIC_PRICES.get(name))
    gone = "" if name in instance_types.SHIPPED else instance_types.RETIRED.get(name, "")
    return Shipped(name, max(1, kind.gpus), kind.gpu, kind.gbit, kind.vcpus, price, gone)
