"""Is a value what it must be? Each raises `ValueError` with where, the name and the value."""

import math
import re
from collections.abc import Callable, Sequence

MODEL_LIBRARIES = ("timm", "torchvision")
FUNCTION_PATTERN = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")  # package.module:function
LIBRARY_MODEL_PATTERN = re.compile(
    rf"({'|'.join(MODEL_LIBRARIES)}):[A-Za-z0-9_][A-Za-z0-9_.\-]*"
)  # timm:resnet50.a1_in1k


def check_int(where: str, name: str, value: object, minimum: int) -> None:
    """Raise `ValueError` unless the value is a whole number of at least so much."""
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ValueError(f"{where}, {name}: must be a whole number of at least {minimum}, not {value!r}")


def check_number(where: str, name: str, value: object, minimum: float = 0.0, maximum: float = math.inf) -> None:
    """Raise `ValueError` unless the value is a finite number within the bounds."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{where}, {name}: must be a finite number, not {value!r}")
    if not minimum <= value <= maximum:
        bounds = f"at least {minimum:g}" if maximum == math.inf else f"from {minimum:g} to {maximum:g}"
        raise ValueError(f"{where}, {name}: must be {bounds}, not {value!r}")


def check_bool(where: str, name: str, value: object) -> None:
    """Raise `ValueError` unless the value is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{where}, {name}: must be True or False, not {value!r}")


def check_choice(where: str, name: str, value: object, choices: Sequence[str]) -> None:
    """Raise `ValueError` unless the value is known."""
    if value not in choices:
        raise ValueError(f"{where}, {name}: {value!r} is unknown; known are {', '.join(choices)}")


def check_name_or_function(
    where: str, name: str, value: object, known_names: Sequence[str], allow_libraries: bool = False
) -> str:
    """Return a known name, `package.module:function` or, with `libraries`, `timm:NAME` and `torchvision:NAME`.

    A function itself is turned into such a name, for a recipe is plain data; raises `ValueError` where it has none.
    """
    if isinstance(value, Callable):  # type: ignore[arg-type]
        value = f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', '')}"
        if not FUNCTION_PATTERN.fullmatch(value):
            raise ValueError(f"{where}, {name}: {value!r} must be a function of a module, so that others can import it")
    if value in known_names:
        return str(value)
    if isinstance(value, str):
        library = value.split(":")[0] in MODEL_LIBRARIES
        if (LIBRARY_MODEL_PATTERN if library and allow_libraries else FUNCTION_PATTERN).fullmatch(
            value
        ) and library <= allow_libraries:
            return value
    ways = [*(f"{one}:NAME" for one in MODEL_LIBRARIES if allow_libraries), "package.module:function"]
    raise ValueError(f"{where}, {name}: {value!r} is unknown; known are {', '.join([*known_names, *ways])}")
