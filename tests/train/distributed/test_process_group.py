"""ProcessGroup and batch-norm statistics in real groups of forked ranks."""

from typing import Any

import pytest
import torch
from torch import nn

from train.distributed import batchnorm, process_group
from train.distributed.process_group import ProcessGroup

WORLDS = [1, 2, 3]
SINGLE_PROCESS = ProcessGroup(0, 0, 1, 1, torch.device("cpu"))


def net_with_norms(rank: int = 0) -> nn.Module:
    """Return two batch norms, one of them nested, with statistics that depend on the rank."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 1),
        nn.BatchNorm2d(4),
        nn.Sequential(nn.BatchNorm1d(2)),
        nn.BatchNorm2d(5, track_running_stats=False),
    )
    for number, buffer in enumerate(batchnorm.running_statistics(model)):
        buffer += 10.0**number * (rank + 1)
    return model


def flat_statistics(model: nn.Module) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in batchnorm.running_statistics(model)])


def test_running_statistics_of_all_norms() -> None:
    model = net_with_norms()
    statistics = batchnorm.running_statistics(model)
    assert [tensor.numel() for tensor in statistics] == [4, 4, 2, 2]
    assert statistics[0] is model[1].running_mean and statistics[3] is model[2][0].running_var  # type: ignore[index]
    assert batchnorm.running_statistics(nn.Linear(2, 2)) == []
    instance_norm = nn.InstanceNorm2d(3, track_running_stats=True)
    assert [tensor.numel() for tensor in batchnorm.running_statistics(instance_norm)] == [
        3,
        3,
    ]  # else each rank would validate with its own


@pytest.mark.parametrize("world", WORLDS)
def test_sum_over_processes(world: int, in_group: Any) -> None:
    def work(group: ProcessGroup) -> Any:
        values = torch.tensor([1, 10**15 + group.rank, -group.rank])
        total = process_group.sum_over_processes(group, values)
        process_group.barrier(group)
        return total.tolist(), total is values

    sum_of_ranks = sum(range(world))
    assert in_group(world, work) == [([world, world * 10**15 + sum_of_ranks, -sum_of_ranks], True)] * world


@pytest.mark.parametrize("world", WORLDS)
def test_average_running_statistics(world: int, in_group: Any) -> None:
    def work(group: ProcessGroup) -> Any:
        model = net_with_norms(group.rank)
        batchnorm.average_running_statistics(group, model)
        return flat_statistics(model).tolist(), model.get_buffer("1.num_batches_tracked").item()

    mean = torch.stack([flat_statistics(net_with_norms(rank)) for rank in range(world)]).mean(0)
    for statistics, tracked in in_group(world, work):
        assert torch.allclose(torch.tensor(statistics), mean) and tracked == 0


@pytest.mark.parametrize("world", WORLDS)
def test_gather_and_restore_running_statistics(world: int, in_group: Any) -> None:
    def work(group: ProcessGroup) -> Any:
        stored = batchnorm.gather_running_statistics(group, net_with_norms(group.rank))
        model = net_with_norms(77)
        batchnorm.restore_running_statistics(group, model, stored)
        return stored.tolist(), flat_statistics(model).tolist()

    rows = torch.stack([flat_statistics(net_with_norms(rank)) for rank in range(world)])
    for rank, (stored, restored) in enumerate(in_group(world, work)):
        assert torch.equal(torch.tensor(stored), rows)
        assert torch.equal(torch.tensor(restored), rows[rank])


def test_restore_running_statistics_on_another_number_of_ranks(in_group: Any) -> None:
    stored = torch.stack([flat_statistics(net_with_norms(rank)) for rank in range(3)])

    def work(group: ProcessGroup) -> Any:
        model = net_with_norms(77)
        batchnorm.restore_running_statistics(group, model, stored)
        return flat_statistics(model).tolist()

    for statistics in (*in_group(1, work), *in_group(2, work)):
        assert torch.allclose(torch.tensor(statistics), stored.mean(0))


def test_running_statistics_of_a_model_without_norms() -> None:
    model = nn.Linear(2, 2)
    batchnorm.average_running_statistics(SINGLE_PROCESS, model)
    assert batchnorm.gather_running_statistics(SINGLE_PROCESS, model).shape == (1, 0)


def test_join_process_group_without_variables_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    group = process_group.join_process_group()
    assert (group.rank, group.world_size, group.local_world_size, group.is_first) == (0, 1, 1, True)


def test_compute_dtype_and_peak_memory_on_cpu() -> None:
    assert process_group.compute_dtype(torch.device("cpu")) == torch.float32
    assert 0.01 < process_group.peak_memory_gb(torch.device("cpu")) < 1000


@pytest.mark.parametrize("world", WORLDS)
def test_check_same_on_all_ranks_accepts_equal_numbers(world: int, in_group: Any) -> None:
    def work(group: ProcessGroup) -> Any:
        for number in (0, 1, 2**32 - 1, 2**53 - 1):
            process_group.check_same_on_all_ranks(group, "the numbers of images", number)
        return True

    assert in_group(world, work) == [True] * world


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
        monkeypatch.setattr(process_group, "compute_dtype", lambda _: torch.bfloat16 if is_rank_1 else torch.float16)
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
