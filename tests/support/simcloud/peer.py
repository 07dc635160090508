"""The process at the other end of a TCP connection on this computer, and how to kill it."""

import contextlib
import os
import signal
from pathlib import Path

from support.ssh_machines import process_table, send_signal, wait_until


def _encode_address(address: str, port: int) -> str:
    """Return an address as /proc/net/tcp writes it: its bytes from the last to the first, in hex."""
    return "".join(f"{int(part):02X}" for part in reversed(address.split("."))) + f":{port:04X}"


def peer_pids(address: str, port: int, server_port: int) -> list[int]:
    """Return the other processes that hold the socket from this address and port to the server's port."""
    client, server = _encode_address(address, port), f":{server_port:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    files = {f"socket:[{row[9]}]" for row in rows if row[1] == client and row[2].endswith(server)}
    return [pid for pid in process_table() if pid != os.getpid() and files & _open_files(pid)]


def _open_files(pid: int) -> set[str]:
    with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
        return {str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()}
    return set()


def kill(pids: list[int]) -> None:
    send_signal(pids, signal.SIGKILL)
    wait_until(lambda: not process_table().keys() & set(pids), "the callers are dead")
