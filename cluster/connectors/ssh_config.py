"""Resolves how to reach a machine over ssh: hosts.toml first, then OpenSSH's own reading of ~/.ssh/config (`ssh -G`).

Also writes the job's own ssh_config, with which `ssh -F FILE machine-2` on a terminal takes the same route.
"""

import getpass
import os
import pwd
import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.errors import ClusterError
from train.tools.files import write_atomic

from .hosts_file import Host

MAX_JUMP_HOSTS = 8
SSH_CONFIG_SECONDS = 60.0  # for OpenSSH to read its configuration, which may run commands (Match exec)
# OpenSSH notices a dead machine within 5 s x 3 = 15 s.
SERVER_ALIVE_SECONDS = 5
SERVER_ALIVE_COUNT = 3


@dataclass(frozen=True, kw_only=True)
class Route:
    """How to reach a machine's sshd: address, user, keys to log in with, accepted host keys, proxy or jump host."""

    host: str
    port: int
    user: str
    key_files: tuple[Path, ...]
    certificate_files: tuple[Path, ...]  # for these keys; those beside a key file, named -cert.pub, need no entry
    requires_keys: bool  # hosts.toml names the key file, so it is an error if the file is missing
    identity_agent: str  # whose keys are offered as well: the path of its socket, "SSH_AUTH_SOCK", or "none"
    identities_only: bool  # of the agent's keys, only those whose public keys lie in the key files
    host_key_alias: str | None
    known_hosts_files: tuple[Path, ...]
    pinned_host_key: str | None
    proxy_command: str | None
    jump_route: "Route | None"

    @property
    def agent_socket(self) -> str | None:
        """The socket of the ssh-agent whose keys are offered as well; None: of no agent."""
        if self.identity_agent == "SSH_AUTH_SOCK":
            return os.environ.get("SSH_AUTH_SOCK")
        return None if self.identity_agent == "none" else self.identity_agent

    @property
    def known_hosts_name(self) -> str:
        """The machine's name in known_hosts: [host]:port unless the port is 22."""
        return self.host_key_alias or (self.host if self.port == 22 else f"[{self.host}]:{self.port}")


def require_openssh(*programs: str) -> None:
    """Raise `ClusterError` when one of these programs of OpenSSH is not installed."""
    for program in programs:
        if not shutil.which(program):
            raise ClusterError(
                f"{program} is missing; install it: sudo apt-get install openssh-client (Debian, Ubuntu)"
            )


def resolve_route(host: Host, jump_depth: int = 0) -> Route:
    """Return the route to a machine. Raises `ClusterError` when OpenSSH cannot read its configuration.

    `jump_depth` is the number of jump hosts that are resolved already.
    """
    if jump_depth > MAX_JUMP_HOSTS:
        raise ClusterError(
            f"{host.host}: a chain of more than {MAX_JUMP_HOSTS} jump hosts; look for a loop in ProxyJump"
        )
    options = _openssh_options(host)
    key_files = [host.key] if host.key else options.get("identityfile", [])
    proxy_command = _first_value(options, "proxycommand") if not host.jump else None
    jump_hosts = host.jump or (_first_value(options, "proxyjump") if not proxy_command else None)
    host_name, port, user = options["hostname"][0], int(options["port"][0]), options["user"][0]
    alias, this_host = _first_value(options, "hostkeyalias"), socket.gethostname()
    tokens = {"h": host_name, "p": str(port), "r": user, "n": host.host, "k": alias or host.host}
    tokens |= {"l": this_host, "L": this_host.partition(".")[0], "i": str(os.getuid()), "u": getpass.getuser()}
    tokens |= {"d": "~", "%": "%"}
    return Route(
        host=host_name,
        port=port,
        user=user,
        key_files=tuple(_expand_path(path, tokens) for path in key_files),
        certificate_files=tuple(_expand_path(path, tokens) for path in options.get("certificatefile", [])),
        requires_keys=bool(host.key),
        identity_agent=_identity_agent(options.get("identityagent", ["SSH_AUTH_SOCK"])[0], tokens),
        identities_only=not host.key and _first_value(options, "identitiesonly") == "yes",
        host_key_alias=alias,
        known_hosts_files=tuple(
            _expand_path(path, tokens)
            for scope in ("user", "global")
            # ssh prints them without quotes: the next one begins with / or ~, $ or %.
            for path in re.split(r" (?=[/~$%])", _first_value(options, f"{scope}knownhostsfile") or "")
            if path
        ),
        pinned_host_key=host.host_key,
        proxy_command=_expand_tokens(proxy_command, tokens) if proxy_command else None,
        jump_route=_resolve_jump_host(jump_hosts, host.key, host.jump_host_key, jump_depth) if jump_hosts else None,
    )


def with_keys(route: Route, host: Host) -> Route:
    """Return the route to a machine with the host keys that it and its jump host have now."""
    jump_route = route.jump_route and replace(route.jump_route, pinned_host_key=host.jump_host_key)
    return replace(route, pinned_host_key=host.host_key, jump_route=jump_route)


def _resolve_jump_host(jump_hosts: str, key_file: str | None, pinned_host_key: str | None, jump_depth: int) -> Route:
    """Return the route to the last jump host of `[user@]host[:port],...`. Offers the machine's key file there too."""
    previous_hosts, _, last_host = jump_hosts.rpartition(",")
    user, _, address = last_host.removeprefix("ssh://").rpartition("@")
    host_name, port = address, ""
    if address.startswith("["):  # IPv6, such as [::1]:22
        host_name, _, after_bracket = address[1:].partition("]")
        port = after_bracket.removeprefix(":")
    elif address.count(":") == 1:
        host_name, _, port = address.partition(":")
    if not host_name or host_name.startswith("-") or (port and not port.isdigit()):
        raise ClusterError(f'jump host {last_host!r} cannot be understood; write jump = "[user@]host[:port]"')
    jump_host = Host(
        host=host_name,
        user=user or None,
        port=int(port) if port else None,
        jump=previous_hosts or None,
        host_key=pinned_host_key,
    )
    route = resolve_route(jump_host, jump_depth + 1)
    extra_key_files = [_expand_path(key_file, {})] if key_file else []
    return Route(**{**vars(route), "key_files": (*route.key_files, *extra_key_files)})


def _openssh_options(host: Host) -> dict[str, list[str]]:
    argv = ["ssh", "-G", *_user_config_argv()]
    argv += ["-p", str(host.port)] if host.port else []
    argv += ["-l", host.user] if host.user else []
    require_openssh("ssh", "ssh-keygen")
    try:
        completed = subprocess.run(
            [*argv, "--", host.host],
            capture_output=True,
            text=True,
            errors="surrogateescape",
            stdin=subprocess.DEVNULL,
            timeout=SSH_CONFIG_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise ClusterError(
            f"ssh has not read its configuration for {host.host} in {SSH_CONFIG_SECONDS:.0f} s; a command in it may "
            f"hang (Match exec); try: ssh -G {shlex.quote(host.host)}"
        ) from None
    if completed.returncode:
        first_line = (completed.stderr.strip().splitlines() or [f"code {completed.returncode}"])[0]
        raise ClusterError(
            f"ssh cannot read its configuration for {host.host}: {first_line}; try: ssh -G {shlex.quote(host.host)}"
        )
    options: dict[str, list[str]] = {}
    for line in completed.stdout.splitlines():
        name, _, value = line.partition(" ")
        options.setdefault(name, []).append(value)
    return options


def _user_config_argv() -> list[str]:
    """Return -F for $HOME/.ssh/config, where the password database, which OpenSSH asks, has another home."""
    config = Path("~/.ssh/config").expanduser()
    if str(Path.home()) == _passwd_home():
        return []
    return ["-F", str(config) if config.exists() else "none"]


def _passwd_home() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        raise ClusterError(
            f"ssh refuses a user without a name: add a line for uid {os.getuid()} to /etc/passwd"
        ) from None


def _expand_path(text: str, tokens: Mapping[str, str]) -> Path:
    home = _passwd_home()
    if text.startswith(f"{home}/.ssh/"):
        text = "~" + text[len(home) :]
    return Path(os.path.expandvars(_expand_tokens(text, tokens))).expanduser()


def _identity_agent(value: str, tokens: Mapping[str, str]) -> str:
    """Return `Route.identity_agent` for a value of IdentityAgent: a path, a variable like $SSH_AUTH_SOCK, or none."""
    if value in ("SSH_AUTH_SOCK", "$SSH_AUTH_SOCK", "${SSH_AUTH_SOCK}"):
        return "SSH_AUTH_SOCK"
    if value.startswith("$"):
        return os.environ.get(value.lstrip("$").strip("{}"), "none")
    return "none" if value.lower() == "none" else str(_expand_path(value.strip('"'), tokens))


def _first_value(options: dict[str, list[str]], name: str) -> str | None:
    value = options.get(name, [""])[0]
    return value if value and value.lower() != "none" else None


def _expand_tokens(text: str, values: Mapping[str, str]) -> str:
    """Replace tokens such as %h; ssh_config(5), section TOKENS."""
    return re.sub("%(.)", lambda token: values.get(token[1], token[0]), text)


# --- the job's own configuration ----------------------------------------------------------------------------------


def write_ssh_config(routes: Iterable[Route], path: Path) -> None:
    """Write an OpenSSH configuration of the hosts machine-0, ...; the pinned host keys go to a file beside it."""
    path = path.absolute()
    pinned_keys_file = path.with_name(f"{path.name}.known_hosts")
    config_lines: list[str] = []
    key_lines: list[str] = []
    for rank, route in enumerate(routes):
        config_lines += _config_lines(f"machine-{rank}", route, path, pinned_keys_file)
        key_lines += _pinned_key_lines(f"machine-{rank}", route)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(pinned_keys_file, "".join(key_lines).encode())
    write_atomic(path, "\n".join(config_lines).encode())


def _pinned_key_lines(name: str, route: Route) -> list[str]:
    """Return the known_hosts lines of a machine and its jump hosts, where their keys are pinned."""
    jump_lines = _pinned_key_lines(f"{name}-jump", route.jump_route) if route.jump_route else []
    own_lines = [f"{name} {' '.join(route.pinned_host_key.split()[:2])}\n"] if route.pinned_host_key else []
    return jump_lines + own_lines


def _config_lines(name: str, route: Route, config: Path, pinned_keys_file: Path) -> list[str]:
    """Return the Host block of one machine, preceded by those of its jump hosts."""
    known_hosts_files = [pinned_keys_file]
    if not route.pinned_host_key:
        known_hosts_files = [path for path in route.known_hosts_files if path.exists()] or [pinned_keys_file]
    proxy_command = route.proxy_command and route.proxy_command.replace("%", "%%")
    if route.jump_route:  # not ProxyJump, which does not quote spaces in the path after -F
        proxy_command = f"ssh -F {shlex.quote(str(config))}".replace("%", "%%") + f" -W [%h]:%p {name}-jump"
    options = {
        "HostName": _quote_value(route.host),
        "Port": route.port,
        "User": route.user,
        "IdentitiesOnly": "yes" if route.requires_keys or route.identities_only else None,
        "IdentityAgent": None if route.identity_agent == "SSH_AUTH_SOCK" else _quote_value(route.identity_agent),
        "HostKeyAlias": name if route.pinned_host_key else route.host_key_alias,
        "UserKnownHostsFile": " ".join(_quote_value(path) for path in known_hosts_files),
        "StrictHostKeyChecking": "yes",
        "ServerAliveInterval": SERVER_ALIVE_SECONDS,
        "ServerAliveCountMax": SERVER_ALIVE_COUNT,
        "ConnectTimeout": 10,
        "ProxyCommand": proxy_command,
    }
    key_lines = [
        f"    {option} {_quote_value(path)}"
        for option, paths in (("IdentityFile", route.key_files), ("CertificateFile", route.certificate_files))
        for path in paths
        if path.exists() or path.with_name(f"{path.name}.pub").exists()  # then the key is in an agent
    ]
    option_lines = [f"    {key} {value}" for key, value in options.items() if value is not None]
    jump_lines = _config_lines(f"{name}-jump", route.jump_route, config, pinned_keys_file) if route.jump_route else []
    return [*jump_lines, f"Host {name}", *option_lines, *key_lines, ""]


def _quote_value(value: object) -> str:
    text = str(value).replace("%", "%%")
    return f'"{text}"' if " " in text else text


def openssh_argv(config: Path, machine: int, argv: Sequence[str] = (), tty: bool = True) -> list[str]:
    """Return the ssh command line for a terminal, or a command; one argument is a line for the shell, as with ssh."""
    tty_option = ["-t"] if tty else []
    remote_command = [shlex.join(argv) if len(argv) > 1 else argv[0]] if argv else []
    return ["ssh", "-F", str(config), *tty_option, f"machine-{machine}", *remote_command]
