"""Options that are declared once: as fields of a dataclass, from which every command line is generated.

`option_field()` makes such a field with its flags, range and help text. The dataclass inherits from `OptionSet`, which
checks values also from Python or a file. argparse is served here, click in cluster/cli/options.py.
"""

import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from argparse import ArgumentParser


@dataclass(frozen=True, kw_only=True)
class Option:
    """A field of an options dataclass as command lines offer it. `option_field` takes all but the last four."""

    help: str
    flags: tuple[str, ...] = ()
    default_text: str = ""  # what the default stands for, where its value does not say it
    metavar: str | None = None
    group: str = ""  # heading of `imgnet-cluster launch --help`; "": not an option of launch
    minimum: float | None = None
    maximum: float | None = None
    is_minimum_open: bool = False
    switches: Mapping[str, str] = field(default_factory=dict)  # help by value, of an option with a flag for each value
    parse: Callable[[str], object] | None = None  # checks a text and returns the value; raises `ValueError`
    is_fixed: bool = False  # it decides on what is trained: a job that is resumed keeps its value
    describe: Callable[[object], str] | None = None  # returns one value as people may see it, where it is a secret

    name: str = ""
    kind: type = str  # of one value
    default: object = None  # MISSING: the option has to be given
    is_multiple: bool = False  # the field is a tuple of values

    @property
    def all_flags(self) -> tuple[str, ...]:
        """All that a user may type for this option."""
        return tuple(f"--{value}" for value in self.switches) or self.flags

    @property
    def is_number(self) -> bool:
        """Whether the values are numbers."""
        return self.kind in (int, float)

    @property
    def range(self) -> str:
        """The accepted numbers, as in "0<x<=1"; "" without limits."""
        if self.maximum is None:
            return "" if self.minimum is None else f"x{'>' if self.is_minimum_open else '>='}{self.minimum}"
        return f"{self.minimum}{'<' if self.is_minimum_open else '<='}x<={self.maximum}"

    def full_help(self, with_default: bool = True) -> str:
        """Return the help text with the default and the range of a number."""
        default = self.default_text
        if self.is_number and not default and self.default not in (None, MISSING):
            default = str(self.default)
        notes = (f"default: {default}" if default and with_default else "", self.range)
        return self.help + "".join(f"  [{note}]" for note in notes if note)

    def convert(self, value: object) -> object:
        """Return one value, parsed if it is a text. Raises `ValueError` with the reason why it is refused."""
        if self.parse and isinstance(value, str):
            value = self.parse(value)
            return self._convert_number(value) if isinstance(value, int) else value
        if self.is_number:
            return self._convert_number(value)
        if self.switches and value not in self.switches:
            raise ValueError(f"{value!r} is not one of {', '.join(map(repr, self.switches))}.")
        if isinstance(value, self.kind):
            return value
        if isinstance(value, str | os.PathLike) and self.kind in (str, Path):
            return self.kind(os.fspath(value))
        raise ValueError(f"{value!r} is not a valid {self.kind.__name__}.")

    def _convert_number(self, value: object) -> int | float:
        invalid = ValueError(f"{value!r} is not a valid {'integer' if self.kind is int else 'float'}.")
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise invalid
        try:
            number: int | float = self.kind(value)
        except (ValueError, OverflowError):
            raise invalid from None
        if not math.isfinite(number):
            raise ValueError(f"{value} is not a finite number")
        if not isinstance(value, str) and number != value:  # 2.5 as an integer
            raise invalid
        low, high = self.minimum, self.maximum
        is_low = low is not None and (number < low or (self.is_minimum_open and number == low))
        if is_low or (high is not None and number > high):
            raise ValueError(f"{number} is not in the range {self.range}.")
        return number

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


def one_of(choices: Collection[str]) -> Callable[[str], str]:
    """Return a parser of options that accepts these texts only, and raises `ValueError` for any other."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"{text!r} is not one of {', '.join(choices)}")
        return text

    return parse


class OptionError(ValueError):
    """An option has a value that is refused. The message is that of the command line."""


def option_field(default: object, *flags: str, **declaration: Any) -> Any:  # Any: as with `dataclasses.field`
    """Return a field of an `OptionSet`. `declaration` has fields of `Option`. `MISSING` makes a required option.

    Without `flags` the flag is the field's name, such as --max-steps. A flag of a field that is True by default turns
    the field off, unless it is a pair such as "--standby/--no-standby".
    """
    return field(default=default, metadata={"option": Option(flags=flags, **declaration)})


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
        options = []
        for options_field in fields(cls):
            declared: Option | None = options_field.metadata.get("option")
            if declared:
                hint = hints[options_field.name]
                options.append(
                    replace(
                        declared,
                        name=options_field.name,
                        kind=(get_args(hint) or (hint,))[0],  # of `int`, `int | None` and `tuple[int, ...]`
                        default=options_field.default,
                        is_multiple=get_origin(hint) is tuple,
                        flags=declared.flags or (f"--{options_field.name.replace('_', '-')}",),
                    )
                )
        return tuple(options)

    @classmethod
    @cache
    def groups(cls) -> Mapping[str, type["OptionSet"]]:
        """The fields that are groups of options, with their types."""
        hints = {options_field.name: get_type_hints(cls)[options_field.name] for options_field in fields(cls)}
        return {name: hint for name, hint in hints.items() if isinstance(hint, type) and issubclass(hint, OptionSet)}

    @classmethod
    def launch_options(cls, *names: str) -> Iterator[Option]:
        """Yield the launch options, or those with these names. Options of groups are among them."""
        yield from (option for option in cls.options() if option.group and (not names or option.name in names))
        for group_class in cls.groups().values():
            yield from group_class.launch_options(*names)

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


def add_arguments(parser: "ArgumentParser", options_class: type[OptionSet]) -> None:
    """Add a dataclass's options to argparse, as texts. With SUPPRESS as default, only given ones are returned."""
    for option in options_class.options():
        settings: dict[str, Any] = {  # Any: argparse takes arguments of many types
            "help": option.full_help().replace("%", "%%")
        }
        if option.flags[0].startswith("-"):
            settings |= {"dest": option.name, "required": option.default is MISSING}
        if option.kind is bool:
            settings |= {"action": "store_const", "const": not option.default}
        else:
            settings |= {"metavar": option.metavar, "action": "append" if option.is_multiple else "store"}
        parser.add_argument(*option.flags, **settings)
