"""The store at which the ranks of a run meet: torch's TCPStore, on as few addresses as possible.

By itself torch listens on all interfaces of rank 0's machine and answers every client. Here rank 0 listens on the
address that the ranks use, and the kernel admits only the machines of the run (`peer_filter`). Every key begins with a
token that only the ranks know, from the file of the attempt. It separates attempts, and runs on the same machines.
"""

import contextlib
import datetime
import errno
import ipaddress
import os
import socket
import time
from collections.abc import Callable

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistNetworkError

from train.tools.agent_protocol import TOKEN_VARIABLE

from .peer_filter import admit_only_peers

CONNECT_SECONDS = 2.0  # for one try to reach rank 0
CONNECT_INTERVAL_SECONDS = 0.05


def open_store(
    rank: int, world_size: int, timeout: datetime.timedelta, is_cancelled: Callable[[], bool] = lambda: False
) -> Store | None:
    """Return the store of the ranks that MASTER_ADDR, MASTER_PORT and `TOKEN_VARIABLE` describe.

    Without a token, as under torchrun, returns None: torch's own rendezvous is used. Raises `DistNetworkError` (a
    RuntimeError of torch) when rank 0 does not answer in time, its port is in use, or `is_cancelled` is true before.
    """
    token = os.environ.get(TOKEN_VARIABLE)
    if not token:
        return None
    address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", 0))
    if rank:
        wait_for_listener(address, port, timeout, is_cancelled)
    store = TCPStore(
        address,
        port,
        world_size,
        is_master=rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=_listen(address, port).detach() if rank == 0 else None,  # torch closes it
    )
    return PrefixStore(token, store)


def wait_for_listener(address: str, port: int, timeout: datetime.timedelta, is_cancelled: Callable[[], bool]) -> None:
    """Wait until rank 0 listens. torch's own wait cannot be ended from outside, and asks at ever longer intervals.

    Raises `DistNetworkError` when `is_cancelled` is true, or after the timeout.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    while not is_cancelled():
        try:
            socket.create_connection((address, port), timeout=CONNECT_SECONDS).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise DistNetworkError(f"rank 0 does not answer at {address}:{port}: {error}") from error
        time.sleep(CONNECT_INTERVAL_SECONDS)
    raise DistNetworkError("the agent has ended the attempt")


def _listen(address: str, port: int) -> socket.socket:
    """Listen on one address of this machine, for the machines of the run. Raises `DistNetworkError`.

    For a host's name (127.0.1.1 on Debian), and an address behind NAT, not its own, it listens on all interfaces.
    """
    try:
        listener = _bind(address, port)
        admit_only_peers(listener)  # before `listen`: an earlier connection would stay open
        listener.listen()
        return listener
    except OSError as error:
        raise DistNetworkError(f"rank 0 cannot listen on {address}:{port}: {error.strerror}") from error


def _bind(address: str, port: int) -> socket.socket:
    """Return a socket that is bound to the address if this machine has it, else to all addresses of the machine."""
    with contextlib.suppress(ValueError):  # the address is a host name
        family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
        try:
            return _bind_socket(family, address, port)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    return _bind_socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET, "", port)


def _bind_socket(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    with contextlib.ExitStack() as on_error:
        bound = on_error.enter_context(socket.socket(family))
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind((address, port))
        on_error.pop_all()
        return bound
