"""Who is at the other end of a TCP connection on this machine, and how to end it."""

import os
import signal
import time
from pathlib import Path


def _encoded(address: str, port: int) -> str:
    """As /proc/net/tcp writes it: the address by bytes from the last, in hex."""
    return "".join(f"{int(part):02X}" for part in reversed(address.split("."))) + f":{port:04X}"


def peer_pids(address: str, port: int, server_port: int) -> list[int]:
    """The processes, except this one, that hold the socket of this address and port to the server's port."""
    mine, inode = _encoded(address, port), ""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[1] == mine and words[2].endswith(f":{server_port:04X}"):
            inode = words[9]
    link = f"socket:[{inode}]"
    return [pid for pid in _others() if inode and link in _links(pid)]


def _others() -> list[int]:
    return [int(one.name) for one in Path("/proc").iterdir() if one.name.isdigit() and int(one.name) != os.getpid()]


def _links(pid: int) -> set[str]:
    found = set()
    try:
        for one in Path(f"/proc/{pid}/fd").iterdir():
            found.add(str(one.readlink()))
    except OSError:  # it ended, or is another user's
        pass
    return found


def kill(pids: list[int]) -> None:
    """SIGKILL them and wait until they are dead."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while any(_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.005)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
