"""A function by its name, as recipes give it: `package.module:function`."""

import importlib
from collections.abc import Callable
from typing import Any

from .files import one_line
from .report import Expected


def find(where: str, name: str) -> Callable[..., Any]:
    """Return the function that `package.module:function` names. Raises `Expected` with `where` it was asked for."""
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function, None)
    except Exception as error:  # whatever the import of somebody's module may raise becomes one line
        raise Expected(
            f"{where}: {module} cannot be imported here ({type(error).__name__}: {one_line(error)}); "
            "start in the folder that it lies in, or name that in PYTHONPATH"
        ) from error
    if not callable(found):
        raise Expected(f"{where}: {module} has no function {function}")
    return found  # type: ignore[no-any-return]
