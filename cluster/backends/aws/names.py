"""The names of AWS's regions, zones and machine types, for tab completion. Makes no request.

The regions are those of the partition `aws` in botocore's partitions.json. A zone's name is that of its region and a
letter (EC2 user guide, "Regions and Zones"); which letters an account has, only AWS knows.
"""

import importlib.util
import json
import re
from pathlib import Path

from infra.aws.market import instance_types

ZONE_LETTERS = "abcdef"


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
