"""What must be the same on all ranks, in groups of forked ranks."""

from typing import Any

import pytest
import torch

from train.data.loading.dataset import Dataset
from train.distributed import process_group
from train.distributed.process_group import ProcessGroup
from train.engine.run import check_ranks_agree
from train.tools.errors import TrainingError


@pytest.mark.parametrize("numbers", [(50, 51, 50), (2**32 - 1, 2**32 - 1, 2**32 - 2)])
def test_check_same_on_all_ranks_fails_on_every_rank(numbers: Any, in_group: Any) -> None:
    def work(group: ProcessGroup) -> str:
        with pytest.raises(TrainingError) as caught:
            process_group.check_same_on_all_ranks(group, "the numbers of images", numbers[group.rank])
        return str(caught.value)

    for rank, message in enumerate(in_group(3, work)):
        expected = f"this one has {numbers[rank]}, others from {min(numbers)} to {max(numbers)}"
        assert message == f"the numbers of images differ between the machines ({expected})"


class FakeIndex:
    """What of an index is compared between machines."""

    def __init__(self, **changes: Any) -> None:
        self.images = 5
        self.folder, self.names_checksum, self.classes, self.sizes_checksum = "val", 1, ("a", "b"), 2
        vars(self).update(changes)

    def __len__(self) -> int:
        return self.images


VAL = ("val", None)


@pytest.mark.parametrize(("changes", "differs"), [
    ({VAL: FakeIndex(images=6)}, "numbers of images in val"),
    ({VAL: FakeIndex(names_checksum=2)}, "names of the images"),
    ({VAL: FakeIndex(classes=("a", "c"))}, "names of the classes"),
    ({VAL: FakeIndex(sizes_checksum=3)}, "widths and heights of"),
    ({("train", 160): FakeIndex(), ("val", 160): FakeIndex()}, "numbers of resized copies"),
    ({}, "precisions"),
])  # fmt: skip
def test_check_ranks_agree_names_what_differs(
    changes: dict[Any, FakeIndex], differs: str, in_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(group: ProcessGroup) -> str:
        indexes: Any = {("train", None): FakeIndex(), VAL: FakeIndex()}
        check_ranks_agree(group, Dataset(indexes, None))  # type: ignore[arg-type]
        if group.rank == 1:
            indexes |= changes
            if not changes:
                monkeypatch.setattr(process_group, "compute_dtype", lambda *_: torch.float16)
        with pytest.raises(TrainingError) as caught:
            check_ranks_agree(group, Dataset(indexes, None))  # type: ignore[arg-type]
        return str(caught.value)

    assert all(differs in message for message in in_group(2, work))
