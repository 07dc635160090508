"""Process groups for tests. Ranks are forked from the test, so that none of them spends time to import torch."""

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.waiting import PATIENCE

from train.tools.process import die_with_parent


def _run_rank(work: Callable[[int, Path], Any], rank: int, store: Path, connection: Any) -> None:
    die_with_parent()
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)  # a forked child must not wait for threads that only its parent has
    try:
        connection.send((True, work(rank, store)))
    except BaseException as error:
        connection.send((False, f"rank {rank}: {type(error).__name__}: {error}"))
    finally:
        connection.close()
        os._exit(0)


def run_ranks(world: int, work: Callable[[int, Path], Any], seconds: float = 60.0) -> list[Any]:
    """Run work(rank, store) in `world` forked processes and return the results by rank.

    The processes may form a group at `store`. Raises `AssertionError` when a rank fails or takes more than `seconds`,
    which is multiplied by `PATIENCE`.
    """
    fork = multiprocessing.get_context("fork")
    pipes = [fork.Pipe(duplex=False) for _ in range(world)]
    with tempfile.TemporaryDirectory(prefix="imgt-") as folder:
        store = Path(folder) / "store"
        processes = [fork.Process(target=_run_rank, args=(work, rank, store, pipes[rank][1])) for rank in range(world)]
        try:
            for process in processes:
                process.start()
            outcomes = []
            for reader, _ in pipes:
                assert reader.poll(seconds * PATIENCE), "a rank does not answer"
                outcomes.append(reader.recv())
        finally:
            for process in processes:
                process.kill()
                process.join()
    errors = [result for succeeded, result in outcomes if not succeeded]
    assert not errors, errors
    return [result for _, result in outcomes]


def join_group(store: Path, rank: int, world: int, procs: int) -> Any:
    """Return the process group of a rank: over Gloo, with `procs` ranks on each machine; alone when `world` is 1."""
    import torch
    import torch.distributed as dist

    from train.distributed.process_group import ProcessGroup

    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    return ProcessGroup(rank, rank % procs, world, procs, torch.device("cpu"))


@pytest.fixture
def in_group() -> Callable[[int, Any], list[Any]]:
    """Run function(group) in `world` forked processes that form a group: in_group(world, function). Results by rank."""

    def run(world: int, function: Any) -> list[Any]:
        return run_ranks(world, lambda rank, store: function(join_group(store, rank, world, world)))

    return run
