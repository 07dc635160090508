"""The broken images that a run has met: each is told once, replaced by the next of its class, and counted."""

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from train.data.index.open import DataError, Index
from train.data.order.work import IndexKey

from .loader import Batch


class BrokenImages:
    """Counts broken images over all processes, and ends a run that has met more than `limit` of them.

    `known` are (split, copy, ID) of those that all processes know of; `new` of this process's others. `sum_up` sums a
    tensor over all processes, `log` prints in the first one.
    """

    def __init__(
        self,
        indexes: Mapping[IndexKey, Index],
        limit: int,
        sum_up: Callable[[torch.Tensor], torch.Tensor],
        log: Callable[[str], object],
    ) -> None:
        self.indexes, self.limit, self.sum_up, self.log = indexes, limit, sum_up, log
        self.known: set[tuple[str, int | None, int]] = set()
        self.new: set[tuple[str, int | None, int]] = set()

    def watch(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches. Prints a line for each broken image that is new to this process."""
        for batch in batches:
            for number, text in batch.broken:
                image = (batch.request.split, batch.request.copy, number)
                if image not in self.known | self.new:
                    self.new.add(image)
                    print(f"warning: broken image: {text}", flush=True)
            yield batch

    def agree(self, new_count: float | None = None) -> None:
        """Tell all processes what each has met since the last call. Raises `DataError` in all when it is too much.

        `new_count` is the number of new images of all processes, where it is known.
        """
        if new_count is None:
            new_count = self.sum_up(torch.tensor([float(len(self.new))])).item()
        if not new_count:
            return
        for key, index in self.indexes.items():
            marks = torch.zeros(len(index))
            marks[[number for *own_key, number in self.new if tuple(own_key) == key]] = 1
            self.known |= {(*key, number) for number in self.sum_up(marks).nonzero().flatten().tolist()}
        self.new.clear()
        self.log(self.summary)
        if len(self.known) > self.limit:
            root = self.indexes["train", None].folder.parent
            raise DataError(
                f"{root}: {self.summary}, more than --max-bad {self.limit}; repair or remove them; to list all: "
                f"imgnet-cluster data check {root}"
            )

    @property
    def summary(self) -> str:
        """How many images are broken, with the first one; "" for none."""
        if not self.known:
            return ""
        split, copy, number = min(self.known, key=str)
        return f"broken images replaced so far: {len(self.known)}, such as {self.indexes[split, copy].location(number)}"
