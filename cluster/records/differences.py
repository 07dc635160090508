"""Differences between what a record says and what it should say: two pieces of plain data."""

import json
import math
from collections.abc import Iterator, Mapping

# By which a rounded number may differ from the expected one, relatively and absolutely; other numbers must be equal.
TOLERANCES = {
    "hours": (0.0, 0.01 / 3600),
    "top1": (0.0, 1e-4),
    "top5": (0.0, 1e-4),
    "first_lr": (1e-9, 1e-15),
    "last_lr": (1e-9, 1e-15),
    "images_per_second": (1e-6, 0.0),
}


def differences(
    actual: object, expected: object, source: str, where: str = "", is_exact: bool = False
) -> Iterator[str]:
    """Yield a line for each value that differs: `where`, its path, both values, and the `source` of the expected one.

    Of two mappings, the names in `expected` are compared, and numbers have the tolerance of the last name in their
    path. When the comparison `is_exact`, all names are compared, and numbers must be equal.
    """
    for path, value, expected_value in pairs(actual, expected, "", is_exact):
        relative, absolute = (0.0, 0.0) if is_exact else TOLERANCES.get(last_name(path), (0.0, 0.0))
        if isinstance(value, int | float) and isinstance(expected_value, int | float):
            is_equal = math.isclose(value, expected_value, rel_tol=relative, abs_tol=absolute)
        else:
            is_equal = value == expected_value
        if not is_equal:
            yield f"{where}{path} is {json.dumps(value)}{source} {json.dumps(expected_value)}"


def last_name(path: str) -> str:
    """Return "lr" for "epochs[3].lr[0]"."""
    return path.rpartition(".")[2].partition("[")[0]


def pairs(
    actual: object, expected: object, path: str, is_complete: bool = False
) -> Iterator[tuple[str, object, object]]:
    """Yield the path and both values of all that is neither a mapping nor a list of the same length."""
    if isinstance(actual, Mapping) and isinstance(expected, Mapping):
        for name in {**expected, **actual} if is_complete else expected:
            yield from pairs(actual.get(name), expected.get(name), f"{path}.{name}".lstrip("."), is_complete)
    elif isinstance(actual, list) and isinstance(expected, list) and len(actual) == len(expected):
        for index, (item, expected_item) in enumerate(zip(actual, expected, strict=True)):
            yield from pairs(item, expected_item, f"{path}[{index}]", is_complete)
    else:
        yield path, actual, expected
