"""Machine types and on-demand prices from the tables that ship with the program."""

from dataclasses import dataclass

from .catalog import load_machine_type_tables


@dataclass(frozen=True)
class MachineType:
    """A machine type with its hardware and its price."""

    name: str
    gpus: int  # GPUs per machine; 1 where there is none, because a process then trains on the CPUs
    gpu: str  # GPU model, such as "A100"
    network_gbps: float
    vcpus: float | None
    on_demand_price: float | None  # dollars per hour, None: unknown
    retired_reason: str = ""  # why the type can no longer be rented; "" if it can


def find_machine_type(name: str) -> MachineType | None:
    """Return a machine type from the built-in tables of all clouds, without a request; None when no table has it."""
    for find in load_machine_type_tables():
        assert callable(find)
        found = find(name)
        if isinstance(found, MachineType):
            return found
    return None
