"""Validation: exact numbers, whatever the number of processes and the sizes of their batches."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from train.data.loading.loader import Batch
from train.data.order.work import BatchRequest
from train.distributed.process_group import ProcessGroup
from train.engine.validation import run_validation
from train.metrics.accuracy import Accuracy
from train.metrics.time_breakdown import TimeBreakdown

IMAGES, CLASSES, BATCH = 53, 12, 8
SHARES = {  # of each world's ranks, in images: uneven, and once a process without any
    1: [[53]],
    2: [[27, 26], [53, 0], [8, 45]],
    3: [[18, 18, 17], [1, 44, 8], [0, 0, 53]],
}


class Scores(nn.Module):
    """Scores that are read off the image; remembers whether it was called as one validates."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.asked: list[tuple[bool, bool]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.asked.append((self.training, torch.is_grad_enabled()))
        return x.flatten(1)[:, :CLASSES]


def problem() -> tuple[torch.Tensor, np.ndarray[Any, Any]]:
    dice = np.random.default_rng(1)
    images = dice.permuted(np.tile(np.arange(CLASSES, dtype=np.uint8), (IMAGES, 1)), axis=1)  # no two scores are equal
    return torch.from_numpy(images).view(IMAGES, 2, 2, 3), dice.integers(0, CLASSES, IMAGES)


def batches(ids: list[int]) -> list[Batch]:
    images, labels = problem()
    cuts = [np.array(ids[i : i + BATCH]) for i in range(0, len(ids), BATCH)]
    return [Batch(images[cut], labels[cut], BatchRequest("val", None, cut, (2, 2))) for cut in cuts]


def prepare(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    return batch.images.permute(0, 3, 1, 2).float(), torch.from_numpy(batch.labels)


PLAIN: Any = SimpleNamespace(prepare=prepare, autocast=contextlib.nullcontext)  # pixels as they are


def validate(group: ProcessGroup, mine: list[Batch], images: int = IMAGES, model: nn.Module | None = None) -> Accuracy:
    def stream() -> Iterator[Batch]:
        yield from mine
        yield mine[0] if mine else batches([0])[0]  # the next epoch's: not to be taken

    left = stream()
    found = run_validation(
        group, model or Scores(), left, len(mine), images, PLAIN, TimeBreakdown(group.device)
    )  # fmt: skip
    assert len(list(left)) == 1
    return found


def by_hand() -> Accuracy:
    """One image at a time, by sorting."""
    loss = top1 = top5 = 0.0
    for batch in (batches([number])[0] for number in range(IMAGES)):
        inputs, labels = prepare(batch)
        scores = Scores()(inputs)
        loss += cross_entropy(scores, labels).item()
        place = [one.item() for one in scores[0].argsort(descending=True)].index(labels.item())
        top1, top5 = top1 + (place < 1), top5 + (place < 5)
    return Accuracy(loss / IMAGES, 100 * top1 / IMAGES, 100 * top5 / IMAGES, IMAGES)


@pytest.mark.parametrize(("world", "share"), [(world, share) for world, all_of in SHARES.items() for share in all_of])
def test_counts_are_exact_on_any_number_of_processes(world: int, share: list[int], in_group: Any) -> None:
    ends = np.cumsum(share).tolist()

    def work(group: ProcessGroup) -> Accuracy:
        return validate(group, batches(list(range(IMAGES))[ends[group.rank] - share[group.rank] : ends[group.rank]]))

    expected = by_hand()
    for found in in_group(world, work):
        assert (found.top1, found.top5, found.images) == (expected.top1, expected.top5, IMAGES)
        assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert 0 < expected.top1 < expected.top5 < 100


@pytest.mark.parametrize("ids", [range(IMAGES - 1), [*range(IMAGES), 0]])
def test_an_image_too_few_or_too_many_is_an_error(ids: Any) -> None:
    with pytest.raises(RuntimeError, match=f"counted {len(ids)} images, but there are {IMAGES}"):
        validate(ProcessGroup(0, 0, 1, 1, torch.device("cpu")), batches(list(ids)))


def test_the_model_validates_without_gradients_and_trains_on_afterwards() -> None:
    model = Scores()
    validate(ProcessGroup(0, 0, 1, 1, torch.device("cpu")), batches(list(range(IMAGES))), model=model)
    assert set(model.asked) == {(False, False)} and len(model.asked) == 7
    assert model.training and model.norm.num_batches_tracked == 0
