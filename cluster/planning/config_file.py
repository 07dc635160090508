"""The user's configuration file: default values of the options of a launch, as lines "option = value".

Projects have no configuration file: a folder that somebody else wrote must not decide what is rented.
"""

import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from cluster.backends import catalog
from cluster.errors import BadInput
from train.tools.errors import one_line_error
from train.tools.option_fields import Option, OptionSet

from .launch_options import LaunchOptions

FILE_NAME = Path("imgnet-cluster/config.toml")


@dataclass(frozen=True)
class ConfigKey:
    """A line that the file may have: a flag of `launch` without dashes, and the value that a switch stands for."""

    option: Option
    switch_value: str | None = None

    def convert(self, value: object) -> object:
        """Return the option's value for a value of the file. Raises `ValueError` with the reason why it is refused."""
        option = self.option
        if self.switch_value is not None or option.kind is bool:
            if not isinstance(value, bool):
                raise ValueError(f"{value!r} is not true or false.")
            if "/" in option.flags[0]:
                return value
            if self.switch_value is not None:
                return self.switch_value if value else None
            return not option.default if value else option.default
        if option.is_multiple:
            return tuple(map(self._convert_one, value if isinstance(value, list) else [value]))
        return self._convert_one(value)

    def _convert_one(self, value: object) -> object:
        if self.option.is_number and isinstance(value, str):
            raise ValueError(f"{value!r} is a string, not a number; leave out the quotes.")
        return self.option.convert(value)


def config_path() -> Path:
    """Return the path of the file, which need not exist: in $XDG_CONFIG_HOME, else in ~/.config."""
    base = os.environ.get("XDG_CONFIG_HOME") or ""
    return (Path(base) if base.startswith("/") else Path("~/.config").expanduser()) / FILE_NAME


def refuse(fault: BadInput) -> NoReturn:
    """Raise a fault of the configuration file."""
    raise fault


def read_config(on_fault: Callable[[BadInput], None] = refuse) -> dict[str, object]:
    """Return the values of the configuration file by the option's keyword, {} when there is no file.

    `on_fault` gets a `BadInput` with file and key for a key that is no option, and for a value that the option refuses.
    Unless it raises, such a line does not count. In a file that is not TOML no line counts.
    """
    path = config_path()
    try:
        entries = tomllib.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:  # a `TOMLDecodeError` is a `ValueError`, and so is text that is not UTF-8
        reason = one_line_error(error)
        on_fault(BadInput(reason if str(path) in reason else f"{path}: {reason}"))
        return {}
    keys = config_keys()
    values: dict[str, object] = {}
    keys_by_name: dict[str, str] = {}
    for key, entry in entries.items():
        try:
            if key not in keys:
                raise ValueError(_explain_unknown_key(key, entry, keys))
            name, value = keys[key].option.name, keys[key].convert(entry)
            if value is not None and name in keys_by_name:
                raise ValueError(f"it excludes {keys_by_name[name]}; leave one of them out.")
        except ValueError as error:
            on_fault(BadInput(f"{path}: {key}: {error}"))
            continue
        if value is not None:
            keys_by_name[name], values[name] = key, value
    return values


def config_keys() -> dict[str, ConfigKey]:
    """Return all keys that the file may have: the options of a launch on any backend."""
    keys = dict[str, ConfigKey]()
    options_classes: list[type[OptionSet]] = [LaunchOptions, *catalog.usable_options().values()]
    for options_class in options_classes:
        for option in options_class.launch_options():
            if option.switches:
                keys |= {value: ConfigKey(option, value) for value in option.switches}
            else:
                keys[config_key(option.flags[0])] = ConfigKey(option)
    return keys


def config_key(flag: str) -> str:
    """Return the key of a flag: "standby" for "--standby/--no-standby"."""
    return flag.partition("/")[0].removeprefix("--")


def _explain_unknown_key(key: str, entry: object, keys: Mapping[str, ConfigKey]) -> str:
    import difflib  # only needed for this message

    if isinstance(entry, dict):
        return "is a table; the file has no tables, only options of a launch, such as region"
    similar = difflib.get_close_matches(key, keys, 1)
    hint = f"did you mean {similar[0]}?" if similar else "the options are in: imgnet-cluster config"
    return f"is no option of a launch that can be set here; {hint}"
