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
class Known:
    """A host key: its type, its base64 text, where it stands, and whether it must never be believed again."""

    type: str
    text: str
    where: str
    revoked: bool = False


def known_keys(route: Route) -> list[Known]:
    """Return the keys that a machine may have. A pin stands alone."""
    if route.pin:
        kind, text = route.pin.split()[:2]
        return [Known(kind, text, "hosts.toml")]
    return [key for path in route.known_hosts for key in _read(path, route.known_as)]


def _read(path: Path, name: str) -> list[Known]:
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
        if _fits(words[0], name):
            found.append(Known(words[1], words[2], f"{path} line {number}", marker == "@revoked"))
    return found


def _fits(patterns: str, name: str) -> bool:
    """Whether a line's first word means this name: a hash of it, or patterns, of which !one takes a name out again."""
    if patterns.startswith("|1|"):
        try:
            salt, digest = (base64.b64decode(one, validate=True) for one in patterns[3:].split("|"))
        except (binascii.Error, ValueError):
            return False
        return hmac.compare_digest(hmac.new(salt, name.encode(), hashlib.sha1).digest(), digest)
    fits = False
    for one in patterns.lower().split(","):
        plain = one.removeprefix("!").replace("[", "[[]")
        if fnmatch.fnmatchcase(name.lower(), plain):
            if one.startswith("!"):
                return False
            fits = True
    return fits


def fingerprint(text: str) -> str:
    """Return a key's fingerprint as OpenSSH shows it."""
    try:
        digest = hashlib.sha256(base64.b64decode(text)).digest()
    except binascii.Error:
        return "(no key)"
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def refused_key(route: Route, who: str, name: str, text: str, known: list[Known]) -> str:
    """Return the one line for a host key that is not among the known ones."""
    offered = f"{fingerprint(text)} ({name})"
    line = f'host_key = "{name} {text}"'
    check = "compare it with ssh-keygen -lf /etc/ssh/ssh_host_*_key.pub on the machine"
    if not known:
        scan = f"ssh-keyscan -p {route.port} {route.host} >> {route.known_hosts[0]}" if route.known_hosts else line
        return f"{who}: its host key is not known: it offers {offered}; {check}, then: {scan}, or hosts.toml: {line}"
    first = known[0]
    mend = (
        f"write {line}" if route.pin else f"ssh-keygen -f {first.where.rpartition(' line ')[0]} -R '{route.known_as}'"
    )
    return (
        f"{who}: its host key has CHANGED: it offers {offered}, {first.where} has {fingerprint(first.text)}; "
        f"somebody may be in between; if the machine was made anew: {mend}"
    )
