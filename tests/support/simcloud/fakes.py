"""The commands of a simulated machine that need root: fakes.py NAME URL [WORDS]. They ask the cloud at URL to do it.

Imports nothing of ours: it is started for each command, by whatever Python there is.
"""

import http.client
import os
import re
import sys
from urllib.parse import urlsplit

USAGE = {
    "imgnet-limit": "SECONDS",
    "imgnet-hostkey": "",
    "systemctl": "poweroff",
    "shutdown": "[-h] [-P] now|+MINUTES",
    "poweroff": "",
    "halt": "",
}


def meaning(name: str, words: list[str]) -> str | None:
    """Return what the cloud shall do, None when the words make no sense to this fake."""
    if name == "imgnet-limit" and len(words) == 1 and re.fullmatch(r"[0-9]+(\.[0-9]+)?", words[0]):
        return f"limit/{words[0]}"
    if name == "imgnet-hostkey" and not words:
        return "hostkey"
    if (name in ("poweroff", "halt") and not words) or (name, words) == ("systemctl", ["poweroff"]):
        return "poweroff"
    if name == "shutdown":
        rest = [word for word in words if word not in ("-h", "-P")]
        if rest == ["now"]:
            return "poweroff"
        if len(rest) == 1 and re.fullmatch(r"\+[0-9]+", rest[0]):
            return f"limit/{60 * int(rest[0])}"
    return None


def main(name: str, url: str, *words: str) -> int:
    """Run one command; its exit code."""
    what = meaning(name, list(words))
    if what is None:
        print(f"usage: {name} {USAGE.get(name, '')} (a fake of the simulated cloud: it knows no more)", file=sys.stderr)
        return 2
    if "SUDO_USER" not in os.environ:
        print(f"{name}: only root may do this: sudo -n {name} ...", file=sys.stderr)
        return 1
    place = urlsplit(url)
    link = http.client.HTTPConnection(place.hostname or "", place.port, timeout=30)
    link.request("POST", f"{place.path}/machine/{what}")
    answer = link.getresponse()
    text = answer.read().decode()
    print(text, end="", file=sys.stdout if answer.status == 200 else sys.stderr)
    return 0 if answer.status == 200 else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
