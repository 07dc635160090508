"""run_validation: full batches on a GPU, the check of its counts, and the counts by class.

Its counts and its eval mode are tested in tests/train/rules/test_validation.py.
"""

import contextlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from train.data.loading.loader import Batch
from train.data.order.work import BatchRequest
from train.distributed.process_group import ProcessGroup
from train.engine.validation import fill_batch, run_validation
from train.metrics.accuracy import Accuracy
from train.metrics.time_breakdown import TimeBreakdown

IMAGES, CLASSES, BATCH = 53, 12, 8
CPU_GROUP = ProcessGroup(0, 0, 1, 1, torch.device("cpu"))


class PixelScores(nn.Module):
    """A network whose scores are the image's pixels. It records how many images it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert not self.training and not torch.is_grad_enabled()
        self.batches.append(len(x))
        return x.flatten(1)[:, :CLASSES]


def test_fill_batch_takes_the_smallest_warmed_shape_and_keeps_the_scores() -> None:
    """On a GPU kernels were searched for full batches only."""
    images = torch.rand(3, 3, 8, 6).contiguous(memory_format=torch.channels_last)
    shapes = {(8, 8, 6), (5, 8, 6), (5, 6, 8), (2, 8, 6)}
    filled = fill_batch(images, shapes)
    assert filled.shape == (5, 3, 8, 6) and torch.equal(filled[:3], images) and not filled[3:].any()
    assert filled.is_contiguous(memory_format=torch.channels_last)
    assert fill_batch(images, {(2, 8, 6), (5, 6, 8)}) is images and fill_batch(images, {(3, 8, 6), *shapes}) is images
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 6 * 4, 7)).eval()
    torch.testing.assert_close(net(filled)[:3], net(images))


def images_and_labels() -> tuple[torch.Tensor, np.ndarray[Any, Any]]:
    generator = np.random.default_rng(1)
    images = generator.permuted(
        np.tile(np.arange(CLASSES, dtype=np.uint8), (IMAGES, 1)), axis=1
    )  # no two scores are equal
    return torch.from_numpy(images).view(IMAGES, 2, 2, 3), generator.integers(0, CLASSES, IMAGES)


def batches(ids: list[int]) -> list[Batch]:
    images, labels = images_and_labels()
    cuts = [np.array(ids[i : i + BATCH]) for i in range(0, len(ids), BATCH)]
    return [Batch(images[cut], labels[cut], BatchRequest("val", None, cut, (2, 2))) for cut in cuts]


def prepare(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    return batch.images.permute(0, 3, 1, 2).float(), torch.from_numpy(batch.labels)


PLAIN_PREPROCESSOR: Any = SimpleNamespace(prepare=prepare, autocast=contextlib.nullcontext)  # pixels unchanged


def validate(ids: list[int], model: nn.Module, group: ProcessGroup = CPU_GROUP, preprocessor: Any = None) -> Accuracy:
    own_batches = batches(ids)
    remaining = iter([*own_batches, own_batches[0]])  # one of the next epoch: must not be taken
    times = TimeBreakdown(CPU_GROUP.device)
    preprocessor = preprocessor or PLAIN_PREPROCESSOR
    accuracy = run_validation(group, model, remaining, len(own_batches), IMAGES, preprocessor, times)
    assert len(list(remaining)) == 1 and model.training
    return accuracy


@pytest.mark.parametrize("ids", [range(IMAGES - 1), [*range(IMAGES), 0]])
def test_run_validation_wrong_image_count_is_an_error(ids: Any) -> None:
    with pytest.raises(RuntimeError, match=f"counted {len(ids)} images, but there are {IMAGES}"):
        validate(list(ids), PixelScores())


def test_run_validation_counts_by_class_over_all_ranks(in_group: Any) -> None:
    def work(group: ProcessGroup) -> list[list[int]]:
        confusion = torch.zeros(CLASSES, CLASSES, dtype=torch.int64)
        own = batches(list(range(IMAGES))[group.rank :: 2])
        times = TimeBreakdown(group.device)
        run_validation(
            group, PixelScores(), iter(own), len(own), IMAGES, PLAIN_PREPROCESSOR, times, confusion=confusion
        )
        return confusion.tolist()

    images, labels = images_and_labels()
    expected = torch.zeros(CLASSES, CLASSES, dtype=torch.int64)
    for pixels, label in zip(images.permute(0, 3, 1, 2).flatten(1), labels, strict=True):
        expected[int(label), int(pixels.argmax())] += 1
    assert expected.sum() == IMAGES
    for confusion in in_group(2, work):
        assert confusion == expected.tolist()
