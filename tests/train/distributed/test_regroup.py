"""Leaving a process group whose peers are gone or hang, and joining another one in the same process."""

import contextlib
import gc
import socket
import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo  # DistributedDataParallel imports it, which would take each forked rank seconds
import torch.distributed as dist
from support.forked_ranks import run_ranks

from train.distributed import ddp, regroup
from train.recipe.components import Comm


def join(store: Path, rank: int, world: int) -> None:
    timeout = timedelta(seconds=50)  # the tests fail when a collective waits for it
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timeout)


def gradient_after_backward(net: Any, rank: int) -> float:
    """Return the gradient of the weight of a network with one input: the mean of rank + 1 over all ranks."""
    net(torch.full((1, 1), rank + 1.0)).sum().backward()
    return float(net.module.weight.grad)


def wrap(net: torch.nn.Module) -> Any:
    return ddp.wrap_ddp(net, Comm())


def test_a_process_whose_group_could_not_be_formed_finds_new_processes_in_the_next() -> None:
    """Its second place is empty at first. torch counts the group all the same, and names the next one by the count."""

    def work(rank: int, store: Path) -> float:
        if rank == 0:
            place = f"file://{store}"
            with pytest.raises(RuntimeError):
                dist.init_process_group("gloo", init_method=place, rank=0, world_size=2, timeout=timedelta(seconds=0.1))
            regroup.leave_group()
        join(store.with_name("second"), rank, 2)
        ones = torch.ones(1)
        dist.all_reduce(ones)
        return float(ones)

    assert run_ranks(2, work, seconds=20) == [2.0, 2.0]


def test_abort_ends_a_backward_pass_whose_sum_gloo_has_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection has ended within a message: the operation that was receiving it is never told."""
    monkeypatch.setenv("IMGNET_IN_PLACE", "1")

    def work(rank: int, store: Path) -> float:
        join(store, rank, 2)
        with monkeypatch.context() as patch:
            patch.setattr(ddp, "allreduce_hook", lambda *_: torch.futures.Future())
            wrapped = wrap(torch.nn.Linear(1, 1, bias=False))
            threading.Timer(0.2, regroup.abort_collectives).start()
            with pytest.raises(RuntimeError, match="the collectives were aborted"):
                gradient_after_backward(wrapped, rank)
        regroup.leave_group()
        assert not dist.is_initialized() and regroup.has_left_groups()
        join(store.with_name("second"), rank, 2)
        return gradient_after_backward(wrap(torch.nn.Linear(1, 1, bias=False)), rank)

    assert run_ranks(2, work, seconds=20) == [1.5, 1.5]


def test_many_regroups_leave_no_threads_and_sockets_behind() -> None:
    """A hook in Python runs in Gloo's threads, which then need Python's lock."""
    rounds = 12

    def work(rank: int, store: Path) -> int:
        counts = []
        for number in range(rounds):
            join(store.with_name(f"store-{number}"), rank, 3)
            wrapped: Any = ddp.wrap_ddp(torch.nn.Linear(1, 1, bias=False), Comm(hook="bf16"))
            gradient_after_backward(wrapped, rank)
            with contextlib.suppress(RuntimeError):
                if rank == number % 3:
                    regroup.shut_down_connections()
                else:
                    gradient_after_backward(wrapped, rank)
            regroup.leave_group()
            del wrapped
            gc.collect()
            regroup.destroy_left_groups()
            counts.append(sum(len(list(Path("/proc/self", kind).iterdir())) for kind in ("fd", "task")))
        return counts[-1] - counts[2]

    assert max(run_ranks(3, work, seconds=60)) <= 2, "a thread that has just ended may be counted"


def test_abort_ends_nccl_communicators_and_no_listening_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    aborted: list[str] = []
    both_abort = threading.Barrier(2)

    class Group:
        error = "SUCCESS"

        def __init__(self, backend: str) -> None:
            self.backend = backend

        def abort(self) -> None:
            both_abort.wait(20)  # one may wait for the other
            aborted.append(self.backend)

        def _get_backend(self, _: torch.device) -> Any:
            return SimpleNamespace(get_error=lambda: SimpleNamespace(name=self.error))

    groups = {Group(backend): (backend, None) for backend in ("nccl", "gloo", "nccl")}
    monkeypatch.setattr(dist.distributed_c10d, "_world", SimpleNamespace(pg_map=groups))
    monkeypatch.setattr(regroup, "_is_aborted", False)  # what follows sets it, also for the tests after this one
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        assert not regroup.has_failed()
        Group.error = "REMOTE_ERROR"
        for way in ("auto", "on"):  # without a guard, an abort could spoil what the others sum
            monkeypatch.setenv("IMGNET_IN_PLACE", way)
            assert regroup.has_failed() == (way == "on")
        regroup.abort_collectives()
        assert aborted == ["nccl", "nccl"]
        assert client.recv(1) == accepted.recv(1) == b"", "both ends see the end of the connection"
        with socket.create_connection(server.getsockname()):
            server.accept()[0].close()
        accepted.close()
