"""Memory for batches that trainer and workers share from the start, used again and again.

torch's own way is new shared memory for each batch, whose pages the kernel clears, maps twice and takes back: 40 of
240 us an image at 128 pixels, 140 of 790 at 224. This memory has no name, so it needs no room in /dev/shm (64 MB in a
container that was not told otherwise) and goes with the processes, however they end.
"""

import itertools
import math
import mmap
import weakref

import numpy as np
import torch
from numpy.typing import NDArray

_numbers = itertools.count()
_rings: "weakref.WeakValueDictionary[int, Ring]" = weakref.WeakValueDictionary()


class Ring:
    """`places` pieces of `size` bytes. Made before the workers are forked; only the trainer takes and lends.

    Pages are memory only once they were used, and the place that was free last is the next to be.
    """

    def __init__(self, places: int, size: int) -> None:
        self.size, self.number = size, next(_numbers)
        self.memory = mmap.mmap(-1, places * size)
        self.free = list(range(places))
        _rings[self.number] = self

    @staticmethod
    def numbered(number: int) -> "Ring":
        """Return the ring of this number, which its maker holds. Raises `KeyError`."""
        return _rings[number]

    def take(self, shape: tuple[int, ...]) -> int | None:
        """Return a place for so many bytes that nobody uses, None when there is none."""
        return self.free.pop() if self.free and math.prod(shape) <= self.size else None

    def pixels(self, place: int, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """Return the memory of a place, as the worker fills it."""
        return np.frombuffer(self.memory, np.uint8, math.prod(shape), place * self.size).reshape(shape)

    def lend(self, place: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the tensor in a place, which is free again when neither it nor a view of it is held any more."""
        pixels = self.pixels(place, shape)
        weakref.finalize(pixels, self.free.append, place).atexit = False
        return torch.from_numpy(pixels)
