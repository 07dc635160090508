"""Options that are declared once: as fields of a dataclass, from which every command line is generated.

`option_field()` makes such a field with its flags, range and help text. The dataclass inherits from `OptionSet`, which
checks the values also when they come from Python or from a file. argparse is served here, click in
cluster/cli/options.py.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from argparse import ArgumentParser


@dataclass(frozen=True)
class NumberRange:
    """The numbers that an option accepts: of type `kind`, finite, within the limits."""

    kind: type[int] | type[float]
    minimum: float | None = None
    maximum: float | None = None
    is_minimum_open: bool = False

    def __str__(self) -> str:
        """The range as in "0<x<=1"; "" without limits."""
        if self.minimum is None:
            return "" if self.maximum is None else f"x<={self.maximum}"
        if self.maximum is None:
            return f"x{'>' if self.is_minimum_open else '>='}{self.minimum}"
        return f"{self.minimum}{'<' if self.is_minimum_open else '<='}x<={self.maximum}"

    def convert(self, value: object) -> int | float:
        """Return the number that a text or a number stands for. Raises `ValueError` with the reason."""
        noun = "integer" if self.kind is int else "float"
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError(f"{value!r} is not a valid {noun}.")
        try:
            number = self.kind(value)
        except (ValueError, OverflowError):
            raise ValueError(f"{value!r} is not a valid {noun}.") from None
        if not isinstance(value, str) and number != value and value == value:  # 2.5 as an integer
            raise ValueError(f"{value!r} is not a valid {noun}.")
        if not math.isfinite(number):
            raise ValueError(f"{value} is not a finite number")
        is_low = self.minimum is not None and (
            number < self.minimum or (self.is_minimum_open and number == self.minimum)
        )
        if is_low or (self.maximum is not None and number > self.maximum):
            raise ValueError(f"{number} is not in the range {self}.")
        return number


@dataclass(frozen=True, kw_only=True)
class Option:
    """A field of an options dataclass as command lines offer it."""

    name: str = ""
    kind: type = str  # of one value
    default: object  # MISSING: the option has to be given
    is_multiple: bool = False  # the field is a tuple of values
    flags: tuple[str, ...]
    help: str
    default_text: str  # what the default stands for, where its value does not say it; "": nothing to say
    metavar: str | None
    group: str  # heading of `imgnet-cluster launch --help`; "": not an option of launch
    range: NumberRange | None
    switches: Mapping[str, str]  # for an option with a flag for each value: the help text of each value
    parse: Callable[[str], object] | None  # checks a text and returns the value; raises `ValueError`
    is_fixed: bool  # a job that is resumed keeps its value
    describe: Callable[[object], str] | None  # returns one value as people may see it, where it is a secret

    def of_field(self, name: str, hint: Any) -> "Option":  # Any: a type
        """Return the option of the field of a name and a type."""
        kind = (get_args(hint) or (hint,))[0]  # of `int`, `int | None` and `tuple[int, ...]`
        number_range = replace(self.range, kind=kind) if self.range and kind in (int, float) else None
        flags = self.flags or (f"--{name.replace('_', '-')}",)
        is_multiple = get_origin(hint) is tuple
        return replace(self, name=name, kind=kind, is_multiple=is_multiple, flags=flags, range=number_range)

    @property
    def all_flags(self) -> tuple[str, ...]:
        """All that a user may type for this option."""
        return tuple(f"--{value}" for value in self.switches) or self.flags

    @property
    def full_help(self) -> str:
        """The help text with the default and the range of a number."""
        if self.default_text:
            return _add_note(f"{self.help}  [default: {self.default_text}]", str(self.range or ""))
        default = f"default: {self.default}" if self.range and self.default not in (None, MISSING) else ""
        return _add_note(self.help, default, str(self.range or ""))

    @property
    def help_without_default(self) -> str:
        """The help text with the range of a number."""
        return _add_note(self.help, str(self.range or ""))

    def switch_help(self, value: str, with_default: bool = True) -> str:
        """Return the help text of the flag that stands for a value."""
        is_default = with_default and value == self.default
        return self.switches[value] + ("  [default]" if is_default else "")

    def convert(self, value: object) -> object:
        """Return one value, parsed if it is a text. Raises `ValueError` with the reason why it is refused."""
        if self.range:
            return self.range.convert(value)
        if self.switches and value not in self.switches:
            raise ValueError(f"{value!r} is not one of {', '.join(map(repr, self.switches))}.")
        if self.parse and isinstance(value, str):
            return self.parse(value)
        if isinstance(value, self.kind):
            return value
        if isinstance(value, str | os.PathLike):
            text = os.fspath(value)
            if self.kind in (str, Path):
                return self.kind(text)
        raise ValueError(f"{value!r} is not a valid {self.kind.__name__}.")

    def show(self, value: object) -> object:
        """Return the value of the field as people may see it."""
        if self.describe is None or value is None:
            return value
        return tuple(map(self.describe, value)) if isinstance(value, tuple | list) else self.describe(value)

    def check(self, value: object) -> object:
        """Return the value of the field, parsed and converted. Raises `OptionError`."""
        if value in (None, "") and value == self.default:  # not given
            return value
        try:
            if not self.is_multiple:
                return self.convert(value)
            values = value if isinstance(value, tuple | list) else [value]
            return tuple(self.convert(item) for item in values)
        except ValueError as error:
            raise OptionError(f"Invalid value for {' / '.join(map(repr, self.all_flags))}: {error}") from error


def _add_note(text: str, *parts: str) -> str:
    note = "; ".join(filter(None, parts))
    return f"{text}  [{note}]" if note else text


class OptionError(ValueError):
    """An option has a value that is refused. The message is that of the command line."""


def option_field(
    default: object,
    *flags: str,
    help: str,
    default_text: str = "",
    metavar: str | None = None,
    group: str = "",
    minimum: float | None = None,
    maximum: float | None = None,
    is_minimum_open: bool = False,
    switches: Mapping[str, str] | None = None,
    parse: Callable[[str], object] | None = None,
    is_fixed: bool = False,
    describe: Callable[[object], str] | None = None,
) -> Any:  # Any: the type of the field that it declares, as with `dataclasses.field`
    """Return a field of an `OptionSet`. Without `flags` the flag is the field's name, such as --max-steps.

    `MISSING` as the default makes a required option. A flag of a field that is True by default turns it off, unless it
    is a pair such as "--standby/--no-standby". `default_text` says in the help what the default means; the default of a
    number is shown without it. A resume cannot change an option that `is_fixed`: it decides on what is trained.
    """
    option = Option(
        default=default,
        flags=flags,
        help=help,
        default_text=default_text,
        metavar=metavar,
        group=group,
        range=NumberRange(float, minimum, maximum, is_minimum_open),
        switches=switches or {},
        parse=parse,
        is_fixed=is_fixed,
        describe=describe,
    )
    return field(default=default, metadata={"option": option})


@dataclass(frozen=True, kw_only=True)
class OptionSet:
    """Base of a dataclass of options. Values are checked when it is made; texts become values of the field's type.

    A field whose type is another `OptionSet` is a group of options that belong to this one.
    """

    def __post_init__(self) -> None:
        """Raises `OptionError` for a value that the command line would refuse."""
        for option in self.options():
            value = option.check(getattr(self, option.name))
            object.__setattr__(self, option.name, value)

    @classmethod
    @cache
    def options(cls) -> tuple[Option, ...]:
        """The options that the dataclass declares itself, without those of its groups."""
        hints = get_type_hints(cls)
        declared = {each.name: each.metadata["option"] for each in fields(cls) if "option" in each.metadata}
        return tuple(option.of_field(name, hints[name]) for name, option in declared.items())

    @classmethod
    @cache
    def groups(cls) -> Mapping[str, type["OptionSet"]]:
        """The fields that are groups of options, with their types."""
        hints = {options_field.name: get_type_hints(cls)[options_field.name] for options_field in fields(cls)}
        return {name: hint for name, hint in hints.items() if isinstance(hint, type) and issubclass(hint, OptionSet)}

    @classmethod
    def launch_options(cls) -> Iterator[Option]:
        """Yield all launch options, including those of groups."""
        yield from (option for option in cls.options() if option.group)
        for group_class in cls.groups().values():
            yield from group_class.launch_options()

    @classmethod
    def pop_from(cls, values: dict[str, object]) -> Self:
        """Make the dataclass from the `values` of its launch options, and remove them from `values`.

        Options of groups are named like all others. Raises `OptionError`.
        """
        names = [option.name for option in cls.options() if option.group]
        arguments = {name: values.pop(name) for name in names if name in values}
        groups = {name: group_class.pop_from(values) for name, group_class in cls.groups().items()}
        return cls(**arguments, **groups)

    def changed(self, values: Mapping[str, object]) -> Self:
        """Return these options with other `values` of launch options. Raises `OptionError`.

        Options of groups are named like all others. Other names in `values` are ignored.
        """
        names = [option.name for option in self.options() if option.group]
        arguments = {name: values[name] for name in names if name in values}
        groups = {name: getattr(self, name).changed(values) for name in self.groups()}
        return replace(self, **arguments, **groups)

    def launch_values(self) -> dict[str, object]:
        """Return the values of all launch options by name, including those of groups."""
        values = {option.name: getattr(self, option.name) for option in self.options() if option.group}
        for name in self.groups():
            values |= getattr(self, name).launch_values()
        return values


# --- argparse ------------------------------------------------------------------------------------------------------


def argument_type(convert: Callable[[object], object]) -> Callable[[str], object]:
    """Return a function for `type=` of argparse that reports the reason of a `ValueError`."""
    from argparse import ArgumentTypeError  # here, because `imgnet-cluster --help` needs only the declarations

    def parse(text: str) -> object:
        try:
            return convert(text)
        except ValueError as error:
            raise ArgumentTypeError(str(error)) from None

    return parse


def add_arguments(parser: "ArgumentParser", options_class: type[OptionSet]) -> None:
    """Add the options of a dataclass to a parser.

    With `argument_default=argparse.SUPPRESS`, parsing returns only what the user gave.
    """
    for option in options_class.options():
        settings: dict[str, Any] = {  # Any: argparse takes arguments of many types
            "help": option.full_help.replace("%", "%%")
        }
        is_positional = not option.flags[0].startswith("-")
        if not is_positional:
            settings |= {"dest": option.name, "required": option.default is MISSING}
        if option.kind is bool:
            settings |= {"action": "store_const", "const": not option.default}
        else:
            settings |= {"type": argument_type(option.convert), "metavar": option.metavar}
        parser.add_argument(*option.flags, **settings)
