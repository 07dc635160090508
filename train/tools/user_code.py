"""A function by its name, as recipes give it: `package.module:function`; and what becomes of its errors."""

import importlib
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from .errors import Expected
from .filesystem import one_line

T = TypeVar("T")
LIBRARIES = (str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"), "<")  # not the code of whoever asks


def find(where: str, name: str) -> Callable[..., Any]:
    """Return the function that `package.module:function` names. Raises `Expected` with `where` it was asked for."""
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function, None)
    except SystemExit as error:
        raise Expected(
            f"{where}: {module} ends the program when it is imported ({said(error)}); what only a script is to do "
            'belongs under `if __name__ == "__main__":`'
        ) from error
    except Exception as error:  # whatever the import of somebody's module may raise becomes one line
        raise Expected(
            f"{where}: {module} cannot be imported here ({said(error)}); "
            "start in the folder that it lies in, or name that in PYTHONPATH"
        ) from error
    if not callable(found):
        raise Expected(f"{where}: {module} has no function {function}")
    return found  # type: ignore[no-any-return]


def tried(where: str, name: str, make: Callable[[], T]) -> T:
    """Return what somebody's code makes. Whatever it raises becomes an `Expected` of one line that says where."""
    try:
        return make()
    except Expected:
        raise
    except (Exception, SystemExit) as error:
        raise Expected(f"{where}: {name} fails, {said(error)}") from error


def said(error: BaseException) -> str:
    """Return an error's kind and text in one line, with the last line of somebody's own code that it came through."""
    text = f"{type(error).__name__}: {one_line(error)}".removesuffix(": ")
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith(LIBRARIES)]
    own = [one for one in frames if "site-packages" not in one.filename]
    return f"{text}, {Path(own[-1].filename).name} line {own[-1].lineno}" if own else text
