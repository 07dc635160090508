"""Accepted host keys: the one pinned in hosts.toml, otherwise those in known_hosts files."""

import base64
import binascii
import hashlib
import os
import shlex
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from .ssh_config import Route


@dataclass(frozen=True)
class KnownHostKey:
    """One line for a host, with the place where it was read. A key with the marker @revoked must never be accepted.

    That of an authority (@cert-authority) is not a key of the host. `is_of_other_port`: the line names the host without
    its port, so that another key at this port is no change.
    """

    key_type: str
    key_base64: str
    source: str
    marker: str = ""
    is_of_other_port: bool = False


def known_host_keys(route: Route) -> list[KnownHostKey]:
    """Return the keys that are known for a machine, with their markers. A pinned key replaces the known_hosts files."""
    if route.pinned_host_key:
        key_type, key_base64 = route.pinned_host_key.split()[:2]
        return [KnownHostKey(key_type, key_base64, "hosts.toml")]
    keys = _read_known_hosts(route, route.known_hosts_name)
    if any(not key.marker for key in keys) or route.host_key_alias or route.port == 22:
        return keys
    # As OpenSSH does: a key that is known for the host without a port counts, unless one is known for this port.
    return [*keys, *(replace(key, is_of_other_port=True) for key in _read_known_hosts(route, route.host))]


def _read_known_hosts(route: Route, name: str) -> list[KnownHostKey]:
    """Return the keys of a host from its known_hosts files. ssh-keygen also finds hashed names and patterns."""
    keys = []
    for path in route.known_hosts_files:
        if not os.access(path, os.R_OK):
            continue
        completed = subprocess.run(["ssh-keygen", "-F", name, "-f", str(path)], capture_output=True)
        lines = completed.stdout.decode(errors="replace").splitlines()
        for found, line in zip(lines[::2], lines[1::2], strict=False):  # "# Host gpu1 found: line 3", and that line
            columns = line.split()
            marker = columns.pop(0) if columns[0].startswith("@") else ""
            place = found.rpartition(" found: ")[2].split()
            keys.append(KnownHostKey(columns[1], columns[2], f"{path} {' '.join(place[:2])}", marker))
    return keys


def fingerprint(key_base64: str) -> str:
    """Return a key's SHA-256 fingerprint in the form that OpenSSH shows."""
    try:
        digest = hashlib.sha256(base64.b64decode(key_base64)).digest()
    except binascii.Error:
        return "(no key)"
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def host_key_error_message(route: Route, key_type: str, key_base64: str, known_keys: list[KnownHostKey]) -> str:
    """Return the error line for an offered host key that is not among the known ones, with what to type next."""
    offered = f"{fingerprint(key_base64)} ({key_type})"
    hosts_toml_line = f'host_key = "{key_type} {key_base64}"'
    accepted_keys = [key for key in known_keys if not key.marker and not key.is_of_other_port]
    if not accepted_keys:
        authority = ""
        if any(key.marker == "@cert-authority" for key in known_keys):
            authority = " (a @cert-authority of known_hosts is not read here, only the key itself)"
        file = route.known_hosts_files[0] if route.known_hosts_files else Path(os.devnull)
        can_add_key = file != Path(os.devnull)  # which `UserKnownHostsFile /dev/null` names
        line = f"{route.known_hosts_name} {key_type} {key_base64}"
        add_key = f"echo '{line}' >> {shlex.quote(str(file))}, or " if can_add_key else ""
        return (
            f"its host key is not known{authority}: it offers {offered}; compare it with the "
            f"output of ssh-keygen -lf /etc/ssh/ssh_host_*_key.pub on the machine, then accept it: {add_key}"
            f"in hosts.toml: {hosts_toml_line}"
        )
    accepted = accepted_keys[0]
    replace_key = (
        f"write {hosts_toml_line}"
        if route.pinned_host_key
        else f"ssh-keygen -f {accepted.source.rpartition(' line ')[0]} -R '{route.known_hosts_name}'"
    )
    return (
        f"its host key has CHANGED: it offers {offered}, {accepted.source} has "
        f"{fingerprint(accepted.key_base64)}; someone may be intercepting the connection; "
        f"if the machine was reinstalled: {replace_key}"
    )
