"""Groups of processes for tests: forked from the test, so that no rank waits for the import of torch."""

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def _be_rank(function: Any, rank: int, world: int, store: Path, line: Any) -> None:
    import torch
    import torch.distributed as dist

    from train.distributed import Group

    torch.set_num_threads(1)  # a forked child must not wait for threads that only its parent has
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        line.send((True, function(Group(rank, rank, world, world, torch.device("cpu")))))
    except BaseException as error:
        line.send((False, f"rank {rank}: {type(error).__name__}: {error}"))
    finally:
        line.close()
        os._exit(0)


@pytest.fixture
def in_group(tmp_path: Path) -> Callable[[int, Any], list[Any]]:
    """Run function(group) in so many forked processes that form a real group; return their answers by rank."""
    count = iter(range(1000))

    def run(world: int, function: Any) -> list[Any]:
        fork, store = multiprocessing.get_context("fork"), tmp_path / f"store-{next(count)}"
        lines = [fork.Pipe(duplex=False) for _ in range(world)]
        ranks = [fork.Process(target=_be_rank, args=(function, r, world, store, lines[r][1])) for r in range(world)]
        try:
            for one in ranks:
                one.start()
            answers = []
            for reader, _ in lines:
                assert reader.poll(60), "a rank does not answer"
                answers.append(reader.recv())
        finally:
            for one in ranks:
                one.kill()
                one.join()
        assert all(good for good, _ in answers), [what for good, what in answers if not good]
        return [what for _, what in answers]

    return run
