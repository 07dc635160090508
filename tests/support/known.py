"""Values that a test knows to be there, without `None` in their type."""

from typing import TypeVar

T = TypeVar("T")


def known(value: T | None) -> T:
    """Return a value. Raises `AssertionError` when it is None."""
    assert value is not None
    return value
