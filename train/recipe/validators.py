"""Checks of a recipe's values. Each raises `ValueError` with the place in the recipe, the field and the value."""

import math
import re
from collections.abc import Callable, Sequence

MODEL_LIBRARIES = ("timm", "torchvision")
FUNCTION_PATTERN = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")  # package.module:function
LIBRARY_MODEL_PATTERN = re.compile(  # timm:resnet50.a1_in1k
    rf"({'|'.join(MODEL_LIBRARIES)}):[A-Za-z0-9_][A-Za-z0-9_.\-]*"
)


def check_int(where: str, name: str, value: object, minimum: int) -> None:
    """Raise `ValueError` unless the value is a whole number of at least `minimum`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ValueError(f"{where}, {name}: must be a whole number of at least {minimum}, not {value!r}")


def check_number(
    where: str,
    name: str,
    value: object,
    minimum: float = 0.0,
    maximum: float = math.inf,
    excluded: Sequence[float] = (),
) -> None:
    """Raise `ValueError` unless the value is a finite number from `minimum` to `maximum`, and not `excluded`."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{where}, {name}: must be a finite number, not {value!r}")
    if not minimum <= value <= maximum or value in excluded:
        bounds = f"{'above' if minimum in excluded else 'at least'} {minimum:g}"
        if maximum != math.inf:
            bounds += f" and {'below' if maximum in excluded else 'at most'} {maximum:g}"
        raise ValueError(f"{where}, {name}: must be {bounds}, not {value!r}")


def check_bool(where: str, name: str, value: object, word: str | None = None) -> None:
    """Raise `ValueError` unless the value is True, False or, where one is given, a word."""
    if not isinstance(value, bool) and (word is None or value != word):
        choices = "True or False" if word is None else f"True, False or {word!r}"
        raise ValueError(f"{where}, {name}: must be {choices}, not {value!r}")


def check_choice(where: str, name: str, value: object, choices: Sequence[str]) -> None:
    """Raise `ValueError` unless the value is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{where}, {name}: {value!r} is unknown; known are {', '.join(choices)}")


def check_name_or_function(
    where: str, name: str, value: object, known_names: Sequence[str], allow_libraries: bool = False
) -> str:
    """Return the value as a text: a known name, `package.module:function` or, with `allow_libraries`, `timm:NAME`.

    A function object becomes such a name, because a recipe is plain data. Raises `ValueError` for any other value, and
    for a function that cannot be imported by name, such as a lambda.
    """
    if isinstance(value, Callable):  # type: ignore[arg-type]
        value = f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', '')}"
        if not FUNCTION_PATTERN.fullmatch(value):
            raise ValueError(f"{where}, {name}: {value!r} must be a function of a module, so that others can import it")
    if value in known_names:
        return str(value)
    if isinstance(value, str):
        names_library = value.split(":")[0] in MODEL_LIBRARIES
        pattern = LIBRARY_MODEL_PATTERN if names_library and allow_libraries else FUNCTION_PATTERN
        if pattern.fullmatch(value) and names_library <= allow_libraries:
            return value
    library_forms = [f"{library}:NAME" for library in MODEL_LIBRARIES if allow_libraries]
    accepted = [*known_names, *library_forms, "package.module:function"]
    raise ValueError(f"{where}, {name}: {value!r} is unknown; known are {', '.join(accepted)}")
