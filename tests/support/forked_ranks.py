"""Groups of processes for tests: forked from the test, so that no rank waits for the import of torch."""

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from train.tools import process


def _be_rank(work: Callable[[int, Path], Any], rank: int, store: Path, line: Any) -> None:
    process.die_with_parent()
    try:
        line.send((True, work(rank, store)))
    except BaseException as error:
        line.send((False, f"rank {rank}: {type(error).__name__}: {error}"))
    finally:
        line.close()
        os._exit(0)


def run_ranks(world: int, work: Callable[[int, Path], Any], seconds: float = 60.0) -> list[Any]:
    """Run work(rank, store) in so many forked processes, which may meet at the store; return their answers by rank."""
    fork = multiprocessing.get_context("fork")
    lines = [fork.Pipe(duplex=False) for _ in range(world)]
    with tempfile.TemporaryDirectory(prefix="imgt-") as folder:
        store = Path(folder) / "store"
        ranks = [fork.Process(target=_be_rank, args=(work, rank, store, lines[rank][1])) for rank in range(world)]
        try:
            for one in ranks:
                one.start()
            answers = []
            for reader, _ in lines:
                assert reader.poll(seconds), "a rank does not answer"
                answers.append(reader.recv())
        finally:
            for one in ranks:
                one.kill()
                one.join()
    assert all(good for good, _ in answers), [what for good, what in answers if not good]
    return [what for _, what in answers]


def join(store: Path, rank: int, world: int, procs: int) -> Any:
    """Form a group over Gloo with `procs` ranks on each machine, if there are others, and return it."""
    import torch
    import torch.distributed as dist

    from train.distributed.process_group import ProcessGroup

    torch.set_num_threads(1)  # a forked child must not wait for threads that only its parent has
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    return ProcessGroup(rank, rank % procs, world, procs, torch.device("cpu"))


@pytest.fixture
def in_group() -> Callable[[int, Any], list[Any]]:
    """Run function(group) in so many forked processes that form a real group; return their answers by rank."""

    def run(world: int, function: Any) -> list[Any]:
        return run_ranks(world, lambda rank, store: function(join(store, rank, world, world)))

    return run
