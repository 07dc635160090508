"""The store at which the ranks of a run meet: torch's TCPStore, closed to strangers as far as torch allows.

By itself torch listens on all interfaces of rank 0's machine, and answers whoever connects. Here rank 0 listens on
the address that the ranks use, and every key begins with a token that only the ranks know. The token is in the file of
the attempt and differs from attempt to attempt. What remains open to a stranger who reaches the port: to connect and
to write keys that nobody reads (docs/security.md).
"""

import contextlib
import datetime
import errno
import ipaddress
import os
import socket

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistNetworkError

from train.tools.agent_protocol import TOKEN_VARIABLE


def open_store(rank: int, world_size: int, timeout: datetime.timedelta) -> Store | None:
    """Return the store of the ranks that MASTER_ADDR, MASTER_PORT and `TOKEN_VARIABLE` describe.

    Without a token, as under torchrun, returns None: torch's own rendezvous is used. Raises `DistNetworkError` (a
    RuntimeError of torch) when rank 0 does not answer in time, or its port is in use.
    """
    token = os.environ.get(TOKEN_VARIABLE)
    if not token:
        return None
    address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", 0))
    return PrefixStore(token, open_tcp_store(address, port, rank, world_size, timeout))


def open_tcp_store(address: str, port: int, rank: int, world_size: int, timeout: datetime.timedelta) -> TCPStore:
    """Return the TCP store at an address, which rank 0 holds. Does not wait for other ranks.

    Raises `DistNetworkError`.
    """
    return TCPStore(
        address,
        port,
        world_size,
        is_master=rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=_listen(address, port).detach() if rank == 0 else None,  # torch closes it
    )


def _listen(address: str, port: int) -> socket.socket:
    """Listen on one address of this machine.

    A host's name may stand for 127.0.1.1 on the host itself (Debian), and an address behind NAT is not the machine's
    own. In both cases the socket listens on all interfaces. Raises `DistNetworkError`.
    """
    try:
        with contextlib.suppress(ValueError):  # a name
            family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
            try:
                return socket.create_server((address, port), family=family)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        raise DistNetworkError(f"rank 0 cannot listen on {address}:{port}: {error.strerror}") from error
