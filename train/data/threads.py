"""Map over many items in threads, in order, with few of them in flight: a million futures would take gigabytes."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_in_threads(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int | None = None
) -> Iterator[Result]:
    """Yield function(item) for each item, in order. What is not begun when the caller stops is never begun."""
    workers = workers or os.cpu_count() or 1
    waiting, flying = iter(items), deque[Future[Result]]()
    with ThreadPoolExecutor(workers) as pool:
        try:
            flying.extend(pool.submit(function, one) for one in islice(waiting, 16 * workers))
            while flying:
                yield flying.popleft().result()
                flying.extend(pool.submit(function, one) for one in islice(waiting, 1))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
