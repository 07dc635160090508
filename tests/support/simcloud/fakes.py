"""The commands of a simulated machine that need root: fakes.py URL NAME [WORDS]. The cloud at URL carries them out.

The cloud refuses commands that would cut the power of this computer.

Imports nothing of this project, because any Python may run it, once for each command.
"""

import http.client
import os
import sys
from urllib.parse import quote, urlsplit


def main(url: str, name: str, *words: str) -> int:
    if "SUDO_USER" not in os.environ:
        print(f"{name}: only root may do this: sudo -n {name} ...", file=sys.stderr)
        return 1
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=30)
    connection.request("POST", "/".join([address.path, name, *map(quote, words)]))
    response = connection.getresponse()
    text = response.read().decode()
    print(text, end="", file=sys.stdout if response.status == 200 else sys.stderr)
    return 0 if response.status == 200 else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
