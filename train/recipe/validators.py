"""Is a value what it must be? Each raises `ValueError` with where, the name and the value."""

import math
import re
from collections.abc import Callable, Sequence

LIBRARIES = ("timm", "torchvision")
FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")  # package.module:function
OF_LIBRARY = re.compile(rf"({'|'.join(LIBRARIES)}):[A-Za-z0-9_][A-Za-z0-9_.\-]*")  # timm:resnet50.a1_in1k


def whole(where: str, name: str, value: object, least: int) -> None:
    """Raise `ValueError` unless the value is a whole number of at least so much."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{where}, {name}: must be a whole number of at least {least}, not {value!r}")


def number(where: str, name: str, value: object, least: float = 0.0, most: float = math.inf) -> None:
    """Raise `ValueError` unless the value is a finite number within the bounds."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{where}, {name}: must be a finite number, not {value!r}")
    if not least <= value <= most:
        bounds = f"at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
        raise ValueError(f"{where}, {name}: must be {bounds}, not {value!r}")


def flag(where: str, name: str, value: object) -> None:
    """Raise `ValueError` unless the value is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{where}, {name}: must be True or False, not {value!r}")


def one_of(where: str, name: str, value: object, known: Sequence[str]) -> None:
    """Raise `ValueError` unless the value is known."""
    if value not in known:
        raise ValueError(f"{where}, {name}: {value!r} is unknown; known are {', '.join(known)}")


def named(where: str, name: str, value: object, known: Sequence[str], libraries: bool = False) -> str:
    """Return a known name, `package.module:function` or, with `libraries`, `timm:NAME` and `torchvision:NAME`.

    A function itself is turned into such a name, for a recipe is plain data; raises `ValueError` where it has none.
    """
    if isinstance(value, Callable):  # type: ignore[arg-type]
        value = f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', '')}"
        if not FUNCTION.fullmatch(value):
            raise ValueError(f"{where}, {name}: {value!r} must be a function of a module, so that others can import it")
    if value in known:
        return str(value)
    if isinstance(value, str):
        library = value.split(":")[0] in LIBRARIES
        if (OF_LIBRARY if library and libraries else FUNCTION).fullmatch(value) and library <= libraries:
            return value
    ways = [*(f"{one}:NAME" for one in LIBRARIES if libraries), "package.module:function"]
    raise ValueError(f"{where}, {name}: {value!r} is unknown; known are {', '.join([*known, *ways])}")
