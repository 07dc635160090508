"""A map over many items in threads: results in order, few items in flight (a million futures take gigabytes)."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

from train.tools.host import usable_cpu_count

Item = TypeVar("Item")
Result = TypeVar("Result")

FUTURES_PER_WORKER = 16


def map_in_threads(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yield function(item) in the order of the items, with a thread for each CPU. Ending early cancels the rest."""
    workers = usable_cpu_count()
    remaining_items = iter(items)
    futures = deque[Future[Result]]()
    with ThreadPoolExecutor(workers) as pool:
        try:
            first_items = islice(remaining_items, FUTURES_PER_WORKER * workers)
            futures.extend(pool.submit(function, item) for item in first_items)
            while futures:
                yield futures.popleft().result()
                futures.extend(pool.submit(function, item) for item in islice(remaining_items, 1))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
