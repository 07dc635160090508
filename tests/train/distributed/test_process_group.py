"""ProcessGroup in real groups of forked ranks."""

from typing import Any

import pytest
import torch

from train.distributed import process_group
from train.distributed.process_group import ProcessGroup

WORLDS = [1, 2, 3]


@pytest.mark.parametrize("world", WORLDS)
def test_sum_over_processes(world: int, in_group: Any) -> None:
    def work(group: ProcessGroup) -> Any:
        values = torch.tensor([1, 10**15 + group.rank, -group.rank])
        total = process_group.sum_over_processes(group, values)
        process_group.barrier(group)
        return total.tolist(), total is values

    sum_of_ranks = sum(range(world))
    assert in_group(world, work) == [([world, world * 10**15 + sum_of_ranks, -sum_of_ranks], True)] * world


def test_join_process_group_without_variables_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    group = process_group.join_process_group()
    assert (group.rank, group.world_size, group.local_world_size, group.is_first) == (0, 1, 1, True)


def test_compute_dtype_and_peak_memory_on_cpu() -> None:
    assert process_group.compute_dtype(torch.device("cpu")) == torch.float32
    assert 0.01 < process_group.peak_memory_gb(torch.device("cpu")) < 1000


@pytest.mark.parametrize("numbers", [(50, 51, 50), (0, 0, 1), (2**32 - 1, 2**32 - 1, 2**32 - 2)])
def test_check_same_on_all_ranks_fails_on_every_rank(numbers: Any, in_group: Any) -> None:
    from train.tools.errors import TrainingError

    def work(group: ProcessGroup) -> Any:
        with pytest.raises(TrainingError) as caught:
            process_group.check_same_on_all_ranks(group, "the numbers of images", numbers[group.rank])
        return str(caught.value)

    for rank, message in enumerate(in_group(3, work)):
        assert message == (
            f"the numbers of images differ between the machines (this one has {numbers[rank]}, "
            f"others from {min(numbers)} to {max(numbers)})"
        )


def test_check_ranks_agree_names_what_differs(in_group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from train.data.loading.dataset import Dataset
    from train.engine.run import check_ranks_agree
    from train.tools.errors import TrainingError

    class FakeIndex(SimpleNamespace):
        def __len__(self) -> int:
            return int(self.images)

    def index(**changes: Any) -> Any:
        return FakeIndex(
            **{"folder": "val", "images": 5, "names_checksum": 1, "classes": ("a", "b"), "sizes_checksum": 2, **changes}
        )

    def work(group: ProcessGroup) -> list[str]:
        is_rank_1, messages = group.rank == 1, []
        differences: list[dict[str, Any]] = [
            {},
            {"images": 6},
            {"names_checksum": 2},
            {"classes": ("a", "c")},
            {"sizes_checksum": 3},
        ]
        for difference in differences:
            indexes = {("train", None): index(), ("val", None): index(**(difference if is_rank_1 else {}))}
            messages.append(str(refusal(group, indexes)))
        copies: Any = {("train", 160): index(), ("val", 160): index()}
        messages.append(str(refusal(group, indexes | (copies if is_rank_1 else {}))))
        monkeypatch.setattr(process_group, "compute_dtype", lambda *_: torch.bfloat16 if is_rank_1 else torch.float16)
        return [*messages, str(refusal(group, indexes))]

    def refusal(group: ProcessGroup, indexes: Any) -> TrainingError | None:
        try:
            check_ranks_agree(group, Dataset(indexes, None))  # type: ignore[arg-type]
        except TrainingError as error:
            return error
        return None

    for messages in in_group(2, work):
        expected_parts = (
            *("numbers of images in val", "names of the images", "names of the classes", "widths and heights of"),
            *("numbers of resized copies", "precisions"),
        )
        assert messages[0] == "None" and all(
            part in text for part, text in zip(expected_parts, messages[1:], strict=True)
        ), messages
