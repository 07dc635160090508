"""The process at the other end of a TCP connection on this computer, and how to kill it."""

import os
import signal
import time
from pathlib import Path

KILL_SECONDS = 10.0


def _encode_address(address: str, port: int) -> str:
    """Return an address as /proc/net/tcp writes it: its bytes from the last to the first, in hex."""
    return "".join(f"{int(part):02X}" for part in reversed(address.split("."))) + f":{port:04X}"


def peer_pids(address: str, port: int, server_port: int) -> list[int]:
    """Return the other processes that hold the socket from this address and port to the server's port."""
    client = _encode_address(address, port)
    inode = ""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        columns = line.split()
        if columns[1] == client and columns[2].endswith(f":{server_port:04X}"):
            inode = columns[9]
    return [pid for pid in _other_pids() if f"socket:[{inode}]" in _open_files(pid)] if inode else []


def _other_pids() -> list[int]:
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if pid != os.getpid()]


def _open_files(pid: int) -> set[str]:
    targets = set()
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            targets.add(str(link.readlink()))
    except OSError:  # the process has ended, or belongs to another user
        pass
    return targets


def kill(pids: list[int]) -> None:
    """Kill processes with SIGKILL and wait until they are dead."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + KILL_SECONDS
    while any(_is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.005)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
