"""Errors that a user sees: each must be one line."""

from collections.abc import Callable

import pytest


def error_line(
    kind: type[Exception], function: Callable[..., object], *arguments: object, match: str = "", **options: object
) -> str:
    """Return the message of the error that a call raises; it must be one line, and match a pattern if one is given."""
    with pytest.raises(kind, match=match or None) as caught:
        function(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)
