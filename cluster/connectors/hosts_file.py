"""The hosts file (hosts.toml): lists your own machines and how to reach them by ssh. Validated when it is read.

    shared = "/mnt/shared/imgnet"
    user = "ubuntu"
    machines = ["gpu1", "gpu2:2222"]

A key at the top level applies to every machine whose `[[machines]]` table does not set it.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from cluster.errors import BadInput
from train.tools.errors import one_line_error

DEFAULT_FOLDER = "~/.imgnet"
DEFAULT_PYTHON = "python3"
DEFAULT_SSH_PORT = 22


@dataclass(frozen=True, kw_only=True)
class Host:
    """How to reach one machine. Where a value is None, ~/.ssh/config decides.

    `host` is an address or a name in ~/.ssh/config. `address` is where the other machines reach this one (None: the
    name that ssh resolves). `folder` and `python` are paths there. `host_key` is its public key (None: known_hosts).
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
    jump_host_key: str | None = None  # the jump host's public key; not settable in the file, only by the AWS backend

    @property
    def endpoint(self) -> tuple[str, int]:
        """Address and port, the same for all entries of hosts files that name this machine."""
        return self.host.lower(), self.port or DEFAULT_SSH_PORT


@dataclass(frozen=True)
class Hosts:
    """All machines in rank order, and the folder that all of them mount (None only for a single machine)."""

    shared: str | None
    machines: tuple[Host, ...]


# What the value of each key must be: a pattern, and words that an error message quotes. A value that begins with - is
# refused: it would be an option of ssh.
WORD, LINE = "[^- ][^ ]*", "[^-].*"
VALUE_RULES = {
    "shared": ("/.*", 'an absolute path, such as shared = "/mnt/shared/imgnet"'),
    "host": (WORD, 'a name or an address, such as host = "gpu1"'),
    "address": (WORD, 'a name or an address, such as address = "10.0.0.11"'),
    "port": ("", "a number from 1 to 65535, such as port = 22"),
    "user": (WORD, 'a name, such as user = "ubuntu"'),
    "key": (LINE, 'the path of a private key, such as key = "~/.ssh/id_ed25519"'),
    "jump": (WORD, '[user@]host[:port], such as jump = "me@gate.example.com"'),
    "python": (LINE, 'a program, such as python = "python3"'),
    "folder": ("(/|~/).*", 'a path that begins with / or ~/, such as folder = "~/.imgnet"'),
    "host_key": (r"[^- ]\S* +AAAA.*", 'a key type and a key, such as host_key = "ssh-ed25519 AAAA..."'),
}
MACHINE_KEYS = tuple(field.name for field in fields(Host) if field.name != "jump_host_key")
HOST_AND_PORT_PATTERN = re.compile(r"(\[(?P<bracketed>[^\]]+)\]|(?P<host>[^:]+))(:(?P<port>\d{1,5}))?")
Values = Mapping[str, Any]  # Any: what `_validate_value` returned
INHERITED_KEYS = tuple(key for key in MACHINE_KEYS if key not in ("host", "address", "host_key"))


def read_hosts(path: Path) -> Hosts:
    """Read a hosts file. Raises `BadInput` with one line that names the file, the key and what to write."""
    try:
        return parse_hosts(tomllib.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise BadInput(
            f'{path}: no such file; for one machine it needs this line: machines = ["gpu1"]; for several, also: '
            'shared = "/mnt/shared/imgnet", a folder that all of them mount'
        ) from None
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:  # a TOML error has line and column
        raise BadInput(f"{path}: {one_line_error(error)}".replace(f"{path}: {path}", str(path))) from None
    except ValueError as error:
        raise BadInput(f"{path}: {error}") from None


def parse_hosts(value: Mapping[str, object]) -> Hosts:
    """Return the hosts that a parsed hosts file describes. Raises `ValueError` with one line."""
    _reject_unknown_keys(value, ("shared", "machines", *INHERITED_KEYS), "")
    inherited = {key: _validate_value(key, value[key], "") for key in INHERITED_KEYS if key in value}
    tables = value.get("machines")
    if not isinstance(tables, list) or not tables:
        raise ValueError('machines: lists no machine; write machines = ["gpu1"], or [[machines]] tables')
    machines = tuple(_parse_host(table, index, inherited) for index, table in enumerate(tables))
    endpoints = [machine.endpoint for machine in machines]
    for index, machine in enumerate(machines):  # two entries of one machine would wait for each other's GPUs
        if (first := endpoints.index(machine.endpoint)) < index:
            raise ValueError(
                f"machines[{index}].host: {machine.host} is already machines[{first}]; "
                "remove one of them, or give it another port"
            )
    shared = _validate_value("shared", value["shared"], "") if "shared" in value else None
    if shared is None and len(machines) > 1:
        raise ValueError('shared: is missing; write the folder that all machines mount: shared = "/mnt/shared/imgnet"')
    return Hosts(shared, machines)


def _parse_host(value: object, index: int, inherited: Values) -> Host:
    key_prefix = f"machines[{index}]."
    table = {"host": value} if isinstance(value, str) else value
    if not isinstance(table, dict):
        raise ValueError(f'machines[{index}]: is {value!r}; write a name such as "gpu1", or a [[machines]] table')
    _reject_unknown_keys(table, MACHINE_KEYS, key_prefix)
    if "host" not in table:
        raise ValueError(f'{key_prefix}host: is missing; write host = "gpu1", an address or a name in ~/.ssh/config')
    table = _split_port(table, key_prefix)
    own_values = {key: _validate_value(key, item, key_prefix) for key, item in table.items()}
    return Host(**{**inherited, **own_values})


def _split_port(table: dict[str, object], key_prefix: str) -> dict[str, object]:
    """Return the table with the port that was written behind the host, as in "gpu1:2222" or "[fd00::1]:2222"."""
    host = table["host"]
    match = HOST_AND_PORT_PATTERN.fullmatch(host) if isinstance(host, str) else None
    if not match:
        return table
    table = {**table, "host": match["bracketed"] or match["host"]}
    if not match["port"]:
        return table
    if "port" in table:
        raise ValueError(f"{key_prefix}port: is given twice, in host = {host!r} too; leave one of them out")
    return {**table, "port": int(match["port"])}


def _reject_unknown_keys(table: Mapping[str, object], known_keys: tuple[str, ...], key_prefix: str) -> None:
    for key in table:
        if key not in known_keys:
            place = "in a [[machines]] table" if key_prefix else "at the top level"
            raise ValueError(f"{key_prefix}{key}: is not a known key {place}; known are {', '.join(known_keys)}")


def _validate_value(key: str, value: Any, key_prefix: str) -> Any:  # Any: a text or a number, as the key wants it
    pattern, description = VALUE_RULES[key]
    if key == "port":
        is_valid = isinstance(value, int) and not isinstance(value, bool) and 0 < value < 65536
    else:
        is_valid = isinstance(value, str) and value.isprintable() and bool(re.fullmatch(pattern, value))
    if not is_valid:
        raise ValueError(f"{key_prefix}{key}: is {value!r}; write {description}")
    return value
