"""How to reach a machine over ssh: hosts.toml first, then what OpenSSH itself makes of ~/.ssh/config (`ssh -G`).

And back again: the job's own ssh_config, with which a person's `ssh -F FILE machine-2` goes the same way.
"""

import os
import pwd
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import ClusterError
from train.tools.filesystem import write_atomic

from .hosts_file import Host, Hosts

MAX_JUMP_HOSTS = 8
SERVER_ALIVE_SECONDS, SERVER_ALIVE_COUNT = 5, 3  # a dead machine is noticed within 15 s


@dataclass(frozen=True, kw_only=True)
class Route:
    """Where a machine's sshd listens, who logs in with which keys, whose host key is believed, and by way of what."""

    host: str
    port: int
    user: str
    key_files: tuple[Path, ...]
    requires_keys: bool  # for these keys, by name: their absence is an error
    uses_ssh_agent: bool
    host_key_alias: str | None
    known_hosts_files: tuple[Path, ...]
    pinned_host_key: str | None
    proxy_command: str | None
    jump_route: "Route | None"

    @property
    def known_hosts_name(self) -> str:
        """The name in known_hosts: [host]:port unless the port is 22."""
        return self.host_key_alias or (self.host if self.port == 22 else f"[{self.host}]:{self.port}")


def resolve_route(host: Host, jump_depth: int = 0) -> Route:
    """Return the way to a machine. Raises `ClusterError` when OpenSSH cannot read its configuration."""
    if jump_depth > MAX_JUMP_HOSTS:
        raise ClusterError(f"{host.host}: more than {MAX_JUMP_HOSTS} jump hosts one behind the other; see ProxyJump")
    said = _openssh_options(host)
    names = [host.key] if host.key else said.get("identityfile", [])
    proxy = _first_value(said, "proxycommand") if not host.jump else None
    jump = host.jump or (_first_value(said, "proxyjump") if not proxy else None)
    name, port, user = said["hostname"][0], int(said["port"][0]), said["user"][0]
    return Route(
        host=name,
        port=port,
        user=user,
        key_files=tuple(_expand_path(one) for one in names),
        requires_keys=bool(host.key),
        uses_ssh_agent=_first_value(said, "identityagent") is None
        and (bool(host.key) or _first_value(said, "identitiesonly") != "yes"),
        host_key_alias=_first_value(said, "hostkeyalias"),
        known_hosts_files=tuple(
            _expand_path(one) for key in ("user", "global") for one in _split_value(said, f"{key}knownhostsfile")
        ),
        pinned_host_key=host.host_key,
        proxy_command=_expand_tokens(proxy, {"h": name, "p": str(port), "r": user, "n": host.host}) if proxy else None,
        jump_route=_resolve_jump_host(jump, host.key, host.jump_host_key, jump_depth) if jump else None,
    )


def _resolve_jump_host(jump_hosts: str, key_file: str | None, pinned_host_key: str | None, jump_depth: int) -> Route:
    """The way to the last of the jump hosts in `[user@]host[:port],...`; the key of hosts.toml may open it as well."""
    before, _, last = jump_hosts.rpartition(",")
    user, _, place = last.removeprefix("ssh://").rpartition("@")
    name, port = place, ""
    if place.startswith("["):  # [::1]:22
        name, _, rest = place[1:].partition("]")
        port = rest.removeprefix(":")
    elif place.count(":") == 1:
        name, _, port = place.partition(":")
    if not name or name.startswith("-") or (port and not port.isdigit()):
        raise ClusterError(f'jump host {last!r}: write jump = "[user@]host[:port]"')
    gate = Host(
        host=name, user=user or None, port=int(port) if port else None, jump=before or None, host_key=pinned_host_key
    )
    route = resolve_route(gate, jump_depth + 1)
    return Route(**{**vars(route), "keys": (*route.key_files, *([_expand_path(key_file)] if key_file else []))})


def _openssh_options(host: Host) -> dict[str, list[str]]:
    """Every option that OpenSSH has for a host, by its name in small letters."""
    words = ["ssh", "-G", *_user_config_argv()]
    words += ["-p", str(host.port)] if host.port else []
    words += ["-l", host.user] if host.user else []
    try:
        done = subprocess.run([*words, "--", host.host], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        raise ClusterError("ssh is missing; install it: sudo apt-get install openssh-client (Debian, Ubuntu)") from None
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"code {done.returncode}"])[0]
        raise ClusterError(f"ssh cannot say how to reach {host.host}: {said}; see: ssh -G {shlex.quote(host.host)}")
    options: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        name, _, value = line.partition(" ")
        options.setdefault(name, []).append(value)
    return options


def _user_config_argv() -> list[str]:
    """OpenSSH looks for its files in the home of the password file; we, as everybody else does, in $HOME."""
    own = Path("~/.ssh/config").expanduser()
    if str(Path.home()) == pwd.getpwuid(os.getuid()).pw_dir:
        return []
    return ["-F", str(own) if own.exists() else "none"]


def _expand_path(text: str) -> Path:
    home = pwd.getpwuid(os.getuid()).pw_dir
    if text.startswith(f"{home}/.ssh/"):
        text = "~" + text[len(home) :]
    return Path(_expand_tokens(text, {"d": "~", "h": "%h"})).expanduser()


def _first_value(options: dict[str, list[str]], name: str) -> str | None:
    value = options.get(name, [""])[0]
    return value if value and value.lower() != "none" else None


def _split_value(options: dict[str, list[str]], name: str) -> list[str]:
    return (_first_value(options, name) or "").split()


def _expand_tokens(text: str, values: dict[str, str]) -> str:
    for letter, value in values.items():
        text = text.replace(f"%{letter}", value)
    return text.replace("%%", "%")


# --- the job's own configuration ----------------------------------------------------------------------------------


def write_ssh_config(hosts: Hosts, path: Path) -> None:
    """Write an OpenSSH configuration with machine-0, machine-1, ..., and the pinned host keys in a file beside it."""
    path = path.absolute()
    pins = path.with_name(f"{path.name}.known_hosts")
    blocks, lines = [], []
    for rank, host in enumerate(hosts.machines):
        route = resolve_route(host)
        blocks += _config_lines(f"machine-{rank}", route, path, pins)
        lines += _pinned_key_lines(f"machine-{rank}", route)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(pins, "".join(lines).encode())
    write_atomic(path, "\n".join(blocks).encode())


def _pinned_key_lines(name: str, route: Route) -> list[str]:
    """The known_hosts lines of a machine and its jump hosts, as far as we know their keys."""
    before = _pinned_key_lines(f"{name}-jump", route.jump_route) if route.jump_route else []
    return before + ([f"{name} {' '.join(route.pinned_host_key.split()[:2])}\n"] if route.pinned_host_key else [])


def _config_lines(name: str, route: Route, config: Path, pinned_keys_file: Path) -> list[str]:
    """The block of one machine, after those of its jump hosts."""
    known = (
        [pinned_keys_file]
        if route.pinned_host_key
        else [one for one in route.known_hosts_files if one.exists()] or [pinned_keys_file]
    )
    alias = name if route.pinned_host_key else route.host_key_alias
    options = {
        "HostName": _quote_value(route.host),
        "Port": route.port,
        "User": route.user,
        "IdentitiesOnly": "yes" if route.requires_keys else None,
        "HostKeyAlias": alias,
        "UserKnownHostsFile": " ".join(_quote_value(one) for one in known),
        "StrictHostKeyChecking": "yes",
        "ServerAliveInterval": SERVER_ALIVE_SECONDS,
        "ServerAliveCountMax": SERVER_ALIVE_COUNT,
        "ConnectTimeout": 10,
        "ProxyCommand": _proxy_command(name, route, config),
    }
    keys = [f"    IdentityFile {_quote_value(one)}" for one in route.key_files if one.exists()]
    lines = [f"    {key} {value}" for key, value in options.items() if value is not None]
    before = _config_lines(f"{name}-jump", route.jump_route, config, pinned_keys_file) if route.jump_route else []
    return [*before, f"Host {name}", *lines, *keys, ""]


def _proxy_command(name: str, route: Route, config: Path) -> str | None:
    """What the connection runs on. Not ProxyJump, which quotes no spaces in -F."""
    if route.jump_route:
        return f"ssh -F {shlex.quote(str(config))}".replace("%", "%%") + f" -W [%h]:%p {name}-jump"
    return route.proxy_command.replace("%", "%%") if route.proxy_command else None


def _quote_value(value: object) -> str:
    text = str(value).replace("%", "%%")
    return f'"{text}"' if " " in text else text


def openssh_argv(config: Path, machine: int, argv: Sequence[str] = (), tty: bool = True) -> list[str]:
    """Return the command line that gives a person a terminal on a machine, or runs a command there."""
    return [
        "ssh",
        "-F",
        str(config),
        *(["-t"] if tty else []),
        f"machine-{machine}",
        *([shlex.join(argv)] if argv else []),
    ]
