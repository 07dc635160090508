"""Ends a process group from within, so that the same process can join another one.

A collective of Gloo waits for its peers until its timeout, and `abort` does not end it. So the process's own TCP
connections are shut down: the collective raises, here and at the peers. NCCL's communicators are aborted.
"""

import contextlib
import resource
import socket
from pathlib import Path

import torch.distributed as dist

from .network import own_tcp_sockets

# Groups that were left. They are never destroyed: the thread that destroys one waits for Gloo's threads, and these may
# wait for Python's lock.
_left_groups: list[object] = []


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
        _left_groups.extend(dist.distributed_c10d._world.pg_map)
        abort_collectives()
        dist.distributed_c10d._abort_process_group()
    dist.distributed_c10d._world.group_count = 0


def can_join_more_groups() -> bool:
    """Return whether this process has enough file descriptors for further groups: each that it left keeps a few."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit == resource.RLIM_INFINITY or len(list(Path("/proc/self/fd").iterdir())) < limit / 2


def has_left_groups() -> bool:
    """Return whether this process has left a group. Its threads may still run, so a regular exit may hang."""
    return bool(_left_groups)
