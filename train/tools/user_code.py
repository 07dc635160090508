"""Import and call functions of users, which recipes name as `package.module:function`, and describe their errors."""

import contextlib
import importlib
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from .agent_protocol import MODULE_FOLDERS_VARIABLE
from .errors import TrainingError, one_line_error

T = TypeVar("T")
# Files whose lines are not the user's code: this package, the standard library, and generated code such as "<string>".
NON_USER_PATH_PREFIXES = (str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"), "<")


def import_function(where: str, name: str) -> Callable[..., Any]:  # Any: a function of the user
    """Return the function that `package.module:function` names.

    The folders of `MODULE_FOLDERS_VARIABLE` are searched first, as they are while the recipe is read, the folder in
    which the program started last. Raises `TrainingError`, which begins with `where`, such as "optim, name".
    """
    module_name, _, function_name = name.partition(":")
    folders = [folder for folder in os.environ.get(MODULE_FOLDERS_VARIABLE, "").split(os.pathsep) if folder]
    # Permanently, at the end of the path: functions of the module may import others of these folders when they run.
    sys.path += [folder for folder in (*folders, str(Path.cwd())) if folder not in sys.path]
    sys.path[:0] = folders
    try:
        function = getattr(importlib.import_module(module_name), function_name, None)
    except SystemExit as error:
        raise TrainingError(
            f"{where}: {module_name} ends the program when it is imported ({describe_error(error)}); move code "
            'that only a script should run under `if __name__ == "__main__":`'
        ) from error
    except Exception as error:  # the import of a user's module may raise anything
        raise TrainingError(
            f"{where}: {module_name} cannot be imported here ({describe_error(error)}); "
            "put it beside the recipe file, or into a folder of PYTHONPATH, or install it"
        ) from error
    finally:
        for folder in folders:
            with contextlib.suppress(ValueError):  # the module has changed `sys.path`
                sys.path.remove(folder)
    if not callable(function):
        raise TrainingError(f"{where}: {module_name} has no function {function_name}")
    return function  # type: ignore[no-any-return]


def call_user_code(where: str, name: str, function: Callable[[], T]) -> T:
    """Call a user's code. Any error becomes a `TrainingError` of a line with `where` in the recipe, and its `name`."""
    try:
        return function()
    except TrainingError:
        raise
    except (Exception, SystemExit) as error:
        raise TrainingError(f"{where}: {name} fails, {describe_error(error)}") from error


def describe_error(error: BaseException) -> str:
    """Return the type and text of an error in one line, with the last line of user code that it passed through."""
    text = f"{type(error).__name__}: {one_line_error(error)}".removesuffix(": ")
    user_frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(NON_USER_PATH_PREFIXES) and "site-packages" not in frame.filename
    ]
    if not user_frames:
        return text
    return f"{text}, {Path(user_frames[-1].filename).name} line {user_frames[-1].lineno}"
