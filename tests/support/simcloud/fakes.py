"""The commands of a simulated machine that need root: fakes.py NAME URL [WORDS]. The cloud at URL carries them out.

Commands that would cut the power of this computer are refused.

Imports nothing of this project, because any Python may run it, once for each command.
"""

import http.client
import os
import re
import sys
from urllib.parse import urlsplit

USAGE = {"imgnet-limit": "SECONDS", "imgnet-hostkey": ""}


def cloud_request(name: str, words: list[str]) -> str | None:
    """Return what the cloud is asked for, None when this fake does not know the command."""
    if name == "imgnet-limit" and len(words) == 1 and re.fullmatch(r"[0-9]+(\.[0-9]+)?", words[0]):
        return f"limit/{words[0]}"
    if name == "imgnet-hostkey" and not words:
        return "hostkey"
    return None


def main(name: str, url: str, *words: str) -> int:
    """Run one command and return its exit code."""
    request = cloud_request(name, list(words))
    if request is None:
        print(f"usage: {name} {USAGE.get(name, '')} (a fake command that knows no more)", file=sys.stderr)
        return 2
    if "SUDO_USER" not in os.environ:
        print(f"{name}: only root may do this: sudo -n {name} ...", file=sys.stderr)
        return 1
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=30)
    connection.request("POST", f"{address.path}/machine/{request}")
    response = connection.getresponse()
    text = response.read().decode()
    print(text, end="", file=sys.stdout if response.status == 200 else sys.stderr)
    return 0 if response.status == 200 else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
