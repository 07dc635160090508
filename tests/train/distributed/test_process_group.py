"""The processes of a run, as real groups of forked ranks: sums, batch-norm statistics, who one is."""

from typing import Any

import pytest
import torch
from torch import nn

from train.distributed import batchnorm, process_group
from train.distributed.process_group import ProcessGroup

WORLDS = [1, 2, 3]
ALONE = ProcessGroup(0, 0, 1, 1, torch.device("cpu"))


def net(rank: int = 0) -> nn.Module:
    """Two batch norms, one of them deeper, with statistics of the rank's own."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 1),
        nn.BatchNorm2d(4),
        nn.Sequential(nn.BatchNorm1d(2)),
        nn.BatchNorm2d(5, track_running_stats=False),
    )
    for number, buffer in enumerate(batchnorm.running_statistics(model)):
        buffer += 10.0**number * (rank + 1)
    return model


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([one.flatten() for one in batchnorm.running_statistics(model)])


def test_statistics_are_the_means_and_variances_of_all_norms_and_nothing_else() -> None:
    model = net()
    found = batchnorm.running_statistics(model)
    assert [one.numel() for one in found] == [4, 4, 2, 2]
    assert found[0] is model[1].running_mean and found[3] is model[2][0].running_var  # type: ignore[index]
    assert batchnorm.running_statistics(nn.Linear(2, 2)) == []
    other = nn.InstanceNorm2d(3, track_running_stats=True)
    assert [one.numel() for one in batchnorm.running_statistics(other)] == [
        3,
        3,
    ]  # else each process validates with its own


@pytest.mark.parametrize("world", WORLDS)
def test_a_total_is_the_sum_over_all_and_the_same_everywhere(world: int, in_group: Any) -> None:
    def work(group: ProcessGroup) -> Any:
        values = torch.tensor([1, 10**15 + group.rank, -group.rank])
        found = process_group.sum_over_processes(group, values)
        process_group.barrier(group)
        return found.tolist(), found is values

    ranks = sum(range(world))
    assert in_group(world, work) == [([world, world * 10**15 + ranks, -ranks], True)] * world


@pytest.mark.parametrize("world", WORLDS)
def test_every_process_gets_the_mean_of_all_statistics(world: int, in_group: Any) -> None:
    def work(group: ProcessGroup) -> Any:
        model = net(group.rank)
        batchnorm.average_running_statistics(group, model)
        return flat(model).tolist(), model[1].num_batches_tracked.item()  # type: ignore[index, union-attr]

    mean = torch.stack([flat(net(rank)) for rank in range(world)]).mean(0)
    for found, tracked in in_group(world, work):
        assert torch.allclose(torch.tensor(found), mean) and tracked == 0


@pytest.mark.parametrize("world", WORLDS)
def test_statistics_are_gathered_by_rank_and_each_takes_its_own_back(world: int, in_group: Any) -> None:
    def work(group: ProcessGroup) -> Any:
        stored = batchnorm.gather_running_statistics(group, net(group.rank))
        model = net(77)
        batchnorm.restore_running_statistics(group, model, stored)
        return stored.tolist(), flat(model).tolist()

    rows = torch.stack([flat(net(rank)) for rank in range(world)])
    for rank, (stored, mine) in enumerate(in_group(world, work)):
        assert torch.equal(torch.tensor(stored), rows)
        assert torch.equal(torch.tensor(mine), rows[rank])


def test_another_number_of_processes_takes_the_mean_of_the_stored_ones(in_group: Any) -> None:
    stored = torch.stack([flat(net(rank)) for rank in range(3)])

    def work(group: ProcessGroup) -> Any:
        model = net(77)
        batchnorm.restore_running_statistics(group, model, stored)
        return flat(model).tolist()

    for found in (*in_group(1, work), *in_group(2, work)):
        assert torch.allclose(torch.tensor(found), stored.mean(0))


def test_a_model_without_norms_has_nothing_to_average_or_store() -> None:
    model = nn.Linear(2, 2)
    batchnorm.average_running_statistics(ALONE, model)
    assert batchnorm.gather_running_statistics(ALONE, model).shape == (1, 0)


def test_join_without_the_five_variables_is_a_run_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    group = process_group.join_process_group()
    assert (group.rank, group.world_size, group.local_world_size, group.is_first) == (0, 1, 1, True)


def test_a_cpu_computes_in_single_precision_and_knows_its_memory() -> None:
    assert process_group.compute_dtype(torch.device("cpu")) == torch.float32
    assert 0.01 < process_group.peak_memory_gb(torch.device("cpu")) < 1000


@pytest.mark.parametrize("world", WORLDS)
def test_the_same_number_everywhere_is_no_error(world: int, in_group: Any) -> None:
    def work(group: ProcessGroup) -> Any:
        for number in (0, 1, 2**32 - 1, 2**53 - 1):
            process_group.check_same_on_all_ranks(group, "the numbers of images", number)
        return True

    assert in_group(world, work) == [True] * world


@pytest.mark.parametrize("numbers", [(50, 51, 50), (0, 0, 1), (2**32 - 1, 2**32 - 1, 2**32 - 2)])
def test_a_number_that_differs_ends_all_processes_with_the_same_reason(numbers: Any, in_group: Any) -> None:
    from train.tools.errors import TrainingError

    def work(group: ProcessGroup) -> Any:
        with pytest.raises(TrainingError) as caught:
            process_group.check_same_on_all_ranks(group, "the numbers of images", numbers[group.rank])
        return str(caught.value)

    for rank, said in enumerate(in_group(3, work)):
        assert said == (
            f"the numbers of images differ between the machines (this one has {numbers[rank]}, "
            f"others from {min(numbers)} to {max(numbers)})"
        )


def test_processes_that_would_not_train_the_same_end_before_they_do(
    in_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from types import SimpleNamespace

    from train.data.loading.dataset import Dataset
    from train.engine.run import check_ranks_agree
    from train.tools.errors import TrainingError

    class Some(SimpleNamespace):
        def __len__(self) -> int:
            return int(self.images)

    def index(**changes: Any) -> Any:
        return Some(
            **{"folder": "val", "images": 5, "names_checksum": 1, "classes": ("a", "b"), "sizes_checksum": 2, **changes}
        )

    def work(group: ProcessGroup) -> list[str]:
        other, said = group.rank == 1, []
        kinds: list[dict[str, Any]] = [
            {},
            {"images": 6},
            {"names_checksum": 2},
            {"classes": ("a", "c")},
            {"sizes_checksum": 3},
        ]
        for kind in kinds:
            found = {("train", None): index(), ("val", None): index(**(kind if other else {}))}
            said.append(str(refused(group, found)))
        copies: Any = {("train", 160): index(), ("val", 160): index()}
        said.append(str(refused(group, found | (copies if other else {}))))
        monkeypatch.setattr(process_group, "compute_dtype", lambda _: torch.bfloat16 if other else torch.float16)
        return [*said, str(refused(group, found))]

    def refused(group: ProcessGroup, indexes: Any) -> TrainingError | None:
        try:
            check_ranks_agree(group, Dataset(indexes, None))  # type: ignore[arg-type]
        except TrainingError as error:
            return error
        return None

    for said in in_group(2, work):
        words = (
            *("numbers of images in val", "names of the images", "names of the classes", "widths and heights of"),
            *("numbers of resized copies", "precisions"),
        )
        assert said[0] == "None" and all(word in text for word, text in zip(words, said[1:], strict=True)), said
