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
from train.tools.filesystem import replace

from .hosts_file import Host, Hosts

MOST_JUMPS = 8
ALIVE_SECONDS, ALIVE_COUNT = 5, 3  # a dead machine is noticed within 15 s


@dataclass(frozen=True, kw_only=True)
class Route:
    """Where a machine's sshd listens, who logs in with which keys, whose host key is believed, and by way of what."""

    host: str
    port: int
    user: str
    keys: tuple[Path, ...]
    asked: bool  # for these keys, by name: their absence is an error
    agent: bool
    alias: str | None
    known_hosts: tuple[Path, ...]
    pin: str | None
    proxy: str | None
    jump: "Route | None"

    @property
    def known_as(self) -> str:
        """The name in known_hosts: [host]:port unless the port is 22."""
        return self.alias or (self.host if self.port == 22 else f"[{self.host}]:{self.port}")


def resolve(host: Host, depth: int = 0) -> Route:
    """Return the way to a machine. Raises `ClusterError` when OpenSSH cannot read its configuration."""
    if depth > MOST_JUMPS:
        raise ClusterError(f"{host.host}: more than {MOST_JUMPS} jump hosts one behind the other; see ProxyJump")
    said = _ask_openssh(host)
    names = [host.key] if host.key else said.get("identityfile", [])
    proxy = _one(said, "proxycommand") if not host.jump else None
    jump = host.jump or (_one(said, "proxyjump") if not proxy else None)
    name, port, user = said["hostname"][0], int(said["port"][0]), said["user"][0]
    return Route(
        host=name,
        port=port,
        user=user,
        keys=tuple(_path(one) for one in names),
        asked=bool(host.key),
        agent=_one(said, "identityagent") is None and (bool(host.key) or _one(said, "identitiesonly") != "yes"),
        alias=_one(said, "hostkeyalias"),
        known_hosts=tuple(_path(one) for key in ("user", "global") for one in _words(said, f"{key}knownhostsfile")),
        pin=host.host_key,
        proxy=_expand(proxy, {"h": name, "p": str(port), "r": user, "n": host.host}) if proxy else None,
        jump=_gate(jump, host.key, host.jump_key, depth) if jump else None,
    )


def _gate(text: str, key: str | None, pin: str | None, depth: int) -> Route:
    """The way to the last of the jump hosts in `[user@]host[:port],...`; the key of hosts.toml may open it as well."""
    before, _, last = text.rpartition(",")
    user, _, place = last.removeprefix("ssh://").rpartition("@")
    name, port = place, ""
    if place.startswith("["):  # [::1]:22
        name, _, rest = place[1:].partition("]")
        port = rest.removeprefix(":")
    elif place.count(":") == 1:
        name, _, port = place.partition(":")
    if not name or name.startswith("-") or (port and not port.isdigit()):
        raise ClusterError(f'jump host {last!r}: write jump = "[user@]host[:port]"')
    gate = Host(host=name, user=user or None, port=int(port) if port else None, jump=before or None, host_key=pin)
    route = resolve(gate, depth + 1)
    return Route(**{**vars(route), "keys": (*route.keys, *([_path(key)] if key else []))})


def _ask_openssh(host: Host) -> dict[str, list[str]]:
    """Every option that OpenSSH has for a host, by its name in small letters."""
    words = ["ssh", "-G", *_user_config()]
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


def _user_config() -> list[str]:
    """OpenSSH looks for its files in the home of the password file; we, as everybody else does, in $HOME."""
    own = Path("~/.ssh/config").expanduser()
    if str(Path.home()) == pwd.getpwuid(os.getuid()).pw_dir:
        return []
    return ["-F", str(own) if own.exists() else "none"]


def _path(text: str) -> Path:
    home = pwd.getpwuid(os.getuid()).pw_dir
    if text.startswith(f"{home}/.ssh/"):
        text = "~" + text[len(home) :]
    return Path(_expand(text, {"d": "~", "h": "%h"})).expanduser()


def _one(said: dict[str, list[str]], name: str) -> str | None:
    value = said.get(name, [""])[0]
    return value if value and value.lower() != "none" else None


def _words(said: dict[str, list[str]], name: str) -> list[str]:
    return (_one(said, name) or "").split()


def _expand(text: str, values: dict[str, str]) -> str:
    for letter, value in values.items():
        text = text.replace(f"%{letter}", value)
    return text.replace("%%", "%")


# --- the job's own configuration ----------------------------------------------------------------------------------


def ssh_config(hosts: Hosts, path: Path) -> None:
    """Write an OpenSSH configuration with machine-0, machine-1, ..., and the pinned host keys in a file beside it."""
    path = path.absolute()
    pins = path.with_name(f"{path.name}.known_hosts")
    blocks, lines = [], []
    for rank, host in enumerate(hosts.machines):
        route = resolve(host)
        blocks += _blocks(f"machine-{rank}", route, path, pins)
        lines += _pins(f"machine-{rank}", route)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace(pins, "".join(lines).encode())
    replace(path, "\n".join(blocks).encode())


def _pins(name: str, route: Route) -> list[str]:
    """The known_hosts lines of a machine and its jump hosts, as far as we know their keys."""
    before = _pins(f"{name}-jump", route.jump) if route.jump else []
    return before + ([f"{name} {' '.join(route.pin.split()[:2])}\n"] if route.pin else [])


def _blocks(name: str, route: Route, config: Path, pins: Path) -> list[str]:
    """The block of one machine, after those of its jump hosts."""
    known = [pins] if route.pin else [one for one in route.known_hosts if one.exists()] or [pins]
    alias = name if route.pin else route.alias
    options = {
        "HostName": _quoted(route.host),
        "Port": route.port,
        "User": route.user,
        "IdentitiesOnly": "yes" if route.asked else None,
        "HostKeyAlias": alias,
        "UserKnownHostsFile": " ".join(_quoted(one) for one in known),
        "StrictHostKeyChecking": "yes",
        "ServerAliveInterval": ALIVE_SECONDS,
        "ServerAliveCountMax": ALIVE_COUNT,
        "ConnectTimeout": 10,
        "ProxyCommand": _way(name, route, config),
    }
    keys = [f"    IdentityFile {_quoted(one)}" for one in route.keys if one.exists()]
    lines = [f"    {key} {value}" for key, value in options.items() if value is not None]
    before = _blocks(f"{name}-jump", route.jump, config, pins) if route.jump else []
    return [*before, f"Host {name}", *lines, *keys, ""]


def _way(name: str, route: Route, config: Path) -> str | None:
    """What the connection runs on. Not ProxyJump, which quotes no spaces in -F."""
    if route.jump:
        return f"ssh -F {shlex.quote(str(config))}".replace("%", "%%") + f" -W [%h]:%p {name}-jump"
    return route.proxy.replace("%", "%%") if route.proxy else None


def _quoted(value: object) -> str:
    text = str(value).replace("%", "%%")
    return f'"{text}"' if " " in text else text


def terminal(config: Path, machine: int, argv: Sequence[str] = (), tty: bool = True) -> list[str]:
    """Return the command line that gives a person a terminal on a machine, or runs a command there."""
    return [
        "ssh",
        "-F",
        str(config),
        *(["-t"] if tty else []),
        f"machine-{machine}",
        *([shlex.join(argv)] if argv else []),
    ]
