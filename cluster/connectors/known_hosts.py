"""Host keys that are believed: the pin of hosts.toml, else the lines of known_hosts(5), hashed names and all.

OpenSSH's file format: sshd(8), "SSH_KNOWN_HOSTS FILE FORMAT".
"""

import base64
import binascii
import fnmatch
import hashlib
import hmac
from dataclasses import dataclass
from pathlib import Path

from .ssh_config import Route


@dataclass(frozen=True)
class KnownHostKey:
    """A host key: its type, its base64 text, where it stands, and whether it must never be believed again."""

    key_type: str
    key_base64: str
    source: str
    is_revoked: bool = False


def known_host_keys(route: Route) -> list[KnownHostKey]:
    """Return the keys that a machine may have. A pin stands alone."""
    if route.pinned_host_key:
        kind, text = route.pinned_host_key.split()[:2]
        return [KnownHostKey(kind, text, "hosts.toml")]
    return [key for path in route.known_hosts_files for key in _read_known_hosts_file(path, route.known_hosts_name)]


def _read_known_hosts_file(path: Path, host_name: str) -> list[KnownHostKey]:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        marker = words.pop(0) if words and words[0].startswith("@") else ""
        if len(words) < 3 or words[0].startswith("#") or marker not in ("", "@revoked"):
            continue
        if _host_patterns_match(words[0], host_name):
            found.append(KnownHostKey(words[1], words[2], f"{path} line {number}", marker == "@revoked"))
    return found


def _host_patterns_match(patterns: str, host_name: str) -> bool:
    """Whether a line's first word means this name: a hash of it, or patterns, of which !one takes a name out again."""
    if patterns.startswith("|1|"):
        try:
            salt, digest = (base64.b64decode(one, validate=True) for one in patterns[3:].split("|"))
        except (binascii.Error, ValueError):
            return False
        return hmac.compare_digest(hmac.new(salt, host_name.encode(), hashlib.sha1).digest(), digest)
    fits = False
    for one in patterns.lower().split(","):
        plain = one.removeprefix("!").replace("[", "[[]")
        if fnmatch.fnmatchcase(host_name.lower(), plain):
            if one.startswith("!"):
                return False
            fits = True
    return fits


def fingerprint(key_base64: str) -> str:
    """Return a key's fingerprint as OpenSSH shows it."""
    try:
        digest = hashlib.sha256(base64.b64decode(key_base64)).digest()
    except binascii.Error:
        return "(no key)"
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def host_key_error_message(
    route: Route, machine_label: str, key_type: str, key_base64: str, accepted_keys: list[KnownHostKey]
) -> str:
    """Return the one line for a host key that is not among the known ones."""
    offered = f"{fingerprint(key_base64)} ({key_type})"
    line = f'host_key = "{key_type} {key_base64}"'
    check = "compare it with ssh-keygen -lf /etc/ssh/ssh_host_*_key.pub on the machine"
    if not accepted_keys:
        scan = (
            f"ssh-keyscan -p {route.port} {route.host} >> {route.known_hosts_files[0]}"
            if route.known_hosts_files
            else line
        )
        return f"{machine_label}: its host key is not known: it offers {offered}; {check}, then: {scan}, or hosts.toml: {line}"
    first = accepted_keys[0]
    mend = (
        f"write {line}"
        if route.pinned_host_key
        else f"ssh-keygen -f {first.source.rpartition(' line ')[0]} -R '{route.known_hosts_name}'"
    )
    return (
        f"{machine_label}: its host key has CHANGED: it offers {offered}, {first.source} has {fingerprint(first.key_base64)}; "
        f"somebody may be in between; if the machine was made anew: {mend}"
    )
