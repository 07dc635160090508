"""hosts.toml: which machines there are of your own, and how to reach them. Checked when read.

    shared = "/mnt/shared/imgnet"
    user = "ubuntu"
    machines = ["gpu1", "gpu2"]

What stands at the top holds for every machine that says nothing else in its `[[machines]]` table.
"""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from cluster.errors import BadInput
from train.tools.filesystem import one_line_error

DEFAULT_FOLDER = "~/.imgnet"
DEFAULT_PYTHON = "python3"


@dataclass(frozen=True, kw_only=True)
class Host:
    """One machine. `host` is an address or a name in ~/.ssh/config, which decides where a value is None.

    `address` is what the other machines reach it by, None: the host name that ssh resolves. `folder` and `python` are
    on the machine; `host_key` is its public key, None: as known_hosts has it.
    """

    host: str
    address: str | None = None
    port: int | None = None
    user: str | None = None
    key: str | None = None
    jump: str | None = None
    python: str = DEFAULT_PYTHON
    folder: str = DEFAULT_FOLDER
    host_key: str | None = None
    jump_host_key: str | None = None  # of the jump host, where we know it and known_hosts need not


@dataclass(frozen=True)
class Hosts:
    """All machines, in the order of their ranks, and the folder that all of them see (None: there is one machine)."""

    shared: str | None
    machines: tuple[Host, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain data from which `from_json` makes equal Hosts."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Return what `to_json` described; keys of a later version are left out."""
        known = {one.name for one in fields(Host)}
        machines = [{key: one for key, one in host.items() if key in known} for host in value["machines"]]
        return cls(value["shared"], tuple(Host(**one) for one in machines))


# What a value has to be, as it is said to whoever wrote another one.
VALUE_DESCRIPTIONS = {
    "shared": 'an absolute path, such as shared = "/mnt/shared/imgnet"',
    "host": 'a name or an address, such as host = "gpu1"',
    "address": 'a name or an address, such as address = "10.0.0.11"',
    "port": "a number from 1 to 65535, such as port = 22",
    "user": 'a name, such as user = "ubuntu"',
    "key": 'the path of a private key, such as key = "~/.ssh/id_ed25519"',
    "jump": '[user@]host[:port], such as jump = "me@gate.example.com"',
    "python": 'a program, such as python = "python3"',
    "folder": 'a path that begins with / or ~/, such as folder = "~/.imgnet"',
    "host_key": 'a type and a key, such as host_key = "ssh-ed25519 AAAA..."',
}
MACHINE_KEYS = tuple(one.name for one in fields(Host) if one.name != "jump_key")
INHERITED_KEYS = tuple(one for one in MACHINE_KEYS if one not in ("host", "address", "host_key"))


def read_hosts(path: Path) -> Hosts:
    """Read a hosts file. Raises `BadInput` with one line: the file, the key, what to write."""
    try:
        value = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(f'{path}: no such file; write one with at least: machines = ["gpu1", "gpu2"]') from None
    except (OSError, ValueError) as error:  # a TOML error names line and column
        raise BadInput(f"{path}: {one_line_error(error)}".replace(f"{path}: {path}", str(path))) from None
    try:
        return parse_hosts(value)
    except ValueError as error:
        raise BadInput(f"{path}: {error}") from None


def parse_hosts(value: Mapping[str, Any]) -> Hosts:
    """Return the hosts that a file's content means. Raises `ValueError` with one line."""
    _reject_unknown_keys(value, ("shared", "machines", *INHERITED_KEYS), "")
    common = {key: _validate_value(key, value[key], "") for key in INHERITED_KEYS if key in value}
    tables = value.get("machines")
    if not isinstance(tables, list) or not tables:
        raise ValueError('machines: there are none; write machines = ["gpu1", "gpu2"], or [[machines]] tables')
    machines = tuple(_parse_host(one, number, common) for number, one in enumerate(tables))
    _require_distinct_hosts(machines)
    shared = _validate_value("shared", value["shared"], "") if "shared" in value else None
    if shared is None and len(machines) > 1:
        raise ValueError('shared: is missing; write the folder that all machines see: shared = "/mnt/shared/imgnet"')
    return Hosts(shared, machines)


def _parse_host(value: Any, index: int, inherited: Mapping[str, Any]) -> Host:
    where = f"machines[{index}]."
    table = {"host": value} if isinstance(value, str) else value
    if not isinstance(table, dict):
        raise ValueError(f'machines[{index}]: is {value!r}; write a name, "gpu1", or a [[machines]] table')
    _reject_unknown_keys(table, MACHINE_KEYS, where)
    if "host" not in table:
        raise ValueError(f'{where}host: is missing; write host = "gpu1", an address or a name in ~/.ssh/config')
    own = {key: _validate_value(key, one, where) for key, one in table.items()}
    return Host(**{**inherited, **own})


def _reject_unknown_keys(table: Mapping[str, Any], known_keys: tuple[str, ...], key_prefix: str) -> None:
    for key in table:
        if key not in known_keys:
            place = "a machine" if key_prefix else "the top"
            raise ValueError(f"{key_prefix}{key}: is no key of {place}; it knows {', '.join(known_keys)}")


def _validate_value(key: str, value: Any, key_prefix: str) -> Any:
    """The value, when it is of the kind that its key asks for. Nothing may look like an option of ssh."""
    plain = isinstance(value, str) and value.isprintable() and value[:1] not in ("", "-")
    tests: dict[str, Callable[[], bool]] = {
        "port": lambda: isinstance(value, int) and not isinstance(value, bool) and 0 < value < 65536,
        "host_key": lambda: plain and [word[:4] for word in value.split()][1:2] == ["AAAA"],
        "shared": lambda: plain and value.startswith("/"),
        "folder": lambda: plain and value.startswith(("/", "~/")),
        "key": lambda: plain,
        "python": lambda: plain,
    }
    if not tests.get(key, lambda: plain and " " not in value)():
        raise ValueError(f"{key_prefix}{key}: is {value!r}; write {VALUE_DESCRIPTIONS[key]}")
    return value


def _require_distinct_hosts(machines: tuple[Host, ...]) -> None:
    """Two ranks on one machine would wait for each other's GPUs."""
    seen: dict[tuple[str, int | None], int] = {}
    for number, one in enumerate(machines):
        place = (one.host.lower(), one.port or 22)
        if place in seen:
            first = f"machines[{seen[place]}]"
            raise ValueError(
                f"machines[{number}].host: {one.host} is {first} already; leave it out, or change its port"
            )
        seen[place] = number
