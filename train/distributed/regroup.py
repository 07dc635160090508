"""Ends a process group from within, so that the same process can join another one.

A collective of Gloo waits for its peers until its timeout, and `abort` does not end it. So the process's own TCP
connections are shut down: the collective raises, here and at the peers. NCCL's communicators are aborted; no CUDA graph
holds one, because sums are in no graph, and NCCL would wait for it.
When a connection ends within a message, Gloo does not tell the operation that sends or receives it. So nobody waits for
Gloo's operations themselves, but for futures that `abort_collectives` fails (`abortable`).
"""

import contextlib
import os
import socket
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist

from train.tools import agent_protocol

from .network import own_tcp_sockets

ABORT_SECONDS = 2.0  # for NCCL's abort; it may wait for a thread that waits for a connection
DESTROY_SECONDS = 0.2  # an operation that waits on ends at its timeout, and nobody needs to see that
_left_groups: list[list[object]] = []  # each time's; an empty list once they are destroyed
_before_abort: list[Callable[[], object]] = []  # in this group

Future = torch.futures.Future[torch.Tensor]
_triggers: set["torch.futures.Future[None]"] = set()  # what is waited for in this group
_lock = threading.Lock()
_is_aborted = False


def goes_on_in_place(device: torch.device) -> bool:
    """Return whether a process with this device may keep its state: with "auto" only one on a CPU."""
    way = os.environ.get(agent_protocol.IN_PLACE_VARIABLE)
    return way is not None and (device.type == "cpu" or way == "on")


def may_abort(device: torch.device) -> bool:
    """Return whether the process may go on in place, and so has to wait for futures that can be aborted."""
    return device.type == "cpu" and goes_on_in_place(device)


def abortable(future: Future) -> Future:
    """Return a future that ends as a collective's does, or with an error once the collectives are aborted."""
    trigger: torch.futures.Future[None] = torch.futures.Future()

    def result(_: object) -> torch.Tensor:
        if not future.done():
            raise RuntimeError("the collectives were aborted")
        return future.value()

    with _lock:
        _triggers.add(trigger)
    ended = trigger.then(result)
    future.add_done_callback(lambda _: _fire(trigger))
    if _is_aborted:
        _fire(trigger)
    return ended


def _fire(trigger: "torch.futures.Future[None]") -> None:
    with _lock:
        if trigger not in _triggers:
            return
        _triggers.remove(trigger)
    trigger.set_result(None)


def until_abort(work: dist.Work, device: torch.device) -> "dist.Work | Future":
    """Return what to wait for instead of a collective that has begun."""
    return abortable(work.get_future()) if may_abort(device) else work


def start_sum(values: torch.Tensor, kind: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> "dist.Work | Future":
    """Begin to sum a tensor over all processes, in place. Returns what to wait for."""
    return until_abort(dist.all_reduce(values, kind, async_op=True), values.device)


def before_abort(function: Callable[[], object]) -> None:
    """Have a function called in this group before its collectives are aborted, in any thread."""
    _before_abort.append(function)


def nccl_groups() -> list[dist.ProcessGroup]:
    """Return the process groups of this process that NCCL serves."""
    return [group for group, (backend, _) in [*dist.distributed_c10d._world.pg_map.items()] if backend == "nccl"]


def has_failed() -> bool:
    """Whether NCCL has met an error or a timeout where a guard is; elsewhere its own watchdog ends the process."""
    for group in nccl_groups() if goes_on_in_place(torch.device("cuda")) else ():
        with contextlib.suppress(RuntimeError):  # the group is being made or ended
            if group._get_backend(torch.device("cuda")).get_error().name != "SUCCESS":
                return True
    return False


def abort_collectives() -> None:
    """Make the collectives of this process fail, those that run and all later ones. May be called in any thread."""
    global _is_aborted
    _is_aborted = True
    for function in _before_abort:
        function()
    # An abort waits for the kernels of its group, which may wait for those of another one.
    threads = [threading.Thread(target=group.abort, daemon=True) for group in nccl_groups()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(ABORT_SECONDS)
    shut_down_connections()
    for trigger in list(_triggers):
        _fire(trigger)


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
    global _is_aborted
    if dist.is_initialized():
        _left_groups.append(list(dist.distributed_c10d._world.pg_map))
        abort_collectives()
        dist.distributed_c10d._abort_process_group()
    dist.distributed_c10d._world.group_count = 0
    _before_abort.clear()
    _is_aborted = False


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
