"""Ends a process group from within, so that the same process can join another one.

A collective of Gloo waits for its peers until its timeout, and `abort` does not end it. So the process's own TCP
connections are shut down: the collective raises, here and at the peers. NCCL's communicators are aborted.
"""

import contextlib
import socket
import threading

import torch.distributed as dist

from .network import own_tcp_sockets

DESTROY_SECONDS = 2.0
_left_groups: list[list[object]] = []  # each time's; an empty list once they are destroyed


def abort_collectives() -> None:
    """Make the collectives of this process fail, those that run and all later ones. May be called in any thread."""
    for group in list(dist.distributed_c10d._world.pg_map):
        if dist.distributed_c10d._world.pg_map[group][0] == "nccl":
            group.abort()
    shut_down_connections()


def shut_down_connections() -> None:
    """Shut down all TCP connections of this process: those of Gloo, and of the store. Listening sockets stay open."""
    for connection in own_tcp_sockets(is_listening=False):
        with contextlib.suppress(OSError):  # not connected
            connection.shutdown(socket.SHUT_RDWR)


def leave_group() -> None:
    """Leave the process group and all its subgroups, also one that could not be formed.

    torch names a group by the number of groups that this process has begun to form, and the name is part of the keys of
    the store. A group that could not be formed counts too, and a new process has begun none: they would look for each
    other under different keys until the timeout. So the count starts again.
    """
    if dist.is_initialized():
        _left_groups.append(list(dist.distributed_c10d._world.pg_map))
        abort_collectives()
        dist.distributed_c10d._abort_process_group()
    dist.distributed_c10d._world.group_count = 0


def destroy_left_groups() -> None:
    """End the threads and sockets of the groups that were left. Nothing else may refer to them: no DDP, no traceback.

    Whoever drops the last reference waits for Gloo's threads, and these may wait for Python's lock: Python's own
    reference is dropped without the lock, that of DDP with it. Another thread does so, in case that it waits for ever.
    """
    for groups in filter(None, _left_groups):
        thread = threading.Thread(target=groups.clear, daemon=True)
        thread.start()
        thread.join(DESTROY_SECONDS)


def has_left_groups() -> bool:
    """Return whether this process has left a group. A thread of it may still run, so a regular exit may hang."""
    return bool(_left_groups)
