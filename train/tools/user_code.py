"""A function by its name, as recipes give it: `package.module:function`; and what becomes of its errors."""

import importlib
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from .errors import TrainingError
from .filesystem import one_line_error

T = TypeVar("T")
NON_USER_PATH_PREFIXES = (
    str(Path(__file__).parents[1]),
    sysconfig.get_path("stdlib"),
    "<",
)  # not the code of whoever asks


def import_function(where: str, name: str) -> Callable[..., Any]:
    """Return the function that `package.module:function` names. Raises `Expected` with `where` it was asked for."""
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function, None)
    except SystemExit as error:
        raise TrainingError(
            f"{where}: {module} ends the program when it is imported ({describe_error(error)}); what only a script is to do "
            'belongs under `if __name__ == "__main__":`'
        ) from error
    except Exception as error:  # whatever the import of somebody's module may raise becomes one line
        raise TrainingError(
            f"{where}: {module} cannot be imported here ({describe_error(error)}); "
            "start in the folder that it lies in, or name that in PYTHONPATH"
        ) from error
    if not callable(found):
        raise TrainingError(f"{where}: {module} has no function {function}")
    return found  # type: ignore[no-any-return]


def call_user_code(where: str, name: str, function: Callable[[], T]) -> T:
    """Return what somebody's code makes. Whatever it raises becomes an `Expected` of one line that says where."""
    try:
        return function()
    except TrainingError:
        raise
    except (Exception, SystemExit) as error:
        raise TrainingError(f"{where}: {name} fails, {describe_error(error)}") from error


def describe_error(error: BaseException) -> str:
    """Return an error's kind and text in one line, with the last line of somebody's own code that it came through."""
    text = f"{type(error).__name__}: {one_line_error(error)}".removesuffix(": ")
    frames = [
        one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith(NON_USER_PATH_PREFIXES)
    ]
    own = [one for one in frames if "site-packages" not in one.filename]
    return f"{text}, {Path(own[-1].filename).name} line {own[-1].lineno}" if own else text
