"""What ships with the program of AWS's machine types and prices, and the names of its regions. Makes no request.

The regions are those of the partition `aws` in botocore's partitions.json. A zone's name is that of its region and a
letter (EC2 user guide, "Regions and Zones"); which letters an account has, only AWS knows.
"""

import importlib.util
import json
import re
from dataclasses import dataclass
from pathlib import Path

from infra.aws.market import instance_types

ZONE_LETTERS = "abcdef"


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


def machine_types() -> list[str]:
    """Return the types of the table that ships with the program."""
    return sorted(instance_types.BUILTIN_TYPES)


def regions() -> list[str]:
    """Return the names of the regions. botocore is located, and not imported, because that takes time."""
    spec = importlib.util.find_spec("botocore")
    if spec is None or spec.origin is None:
        return []
    partitions = json.loads((Path(spec.origin).parent / "data" / "partitions.json").read_text())["partitions"]
    names = [name for partition in partitions if partition["id"] == "aws" for name in partition["regions"]]
    return sorted(name for name in names if re.fullmatch(r".*-[0-9]+", name))


def zones() -> list[str]:
    """Return names that a zone may have."""
    return [region + letter for region in regions() for letter in ZONE_LETTERS]
