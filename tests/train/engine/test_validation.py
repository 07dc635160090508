"""run_validation: exact counts on any number of processes and with any batch sizes."""

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
from train.engine.validation import fill_batch, run_validation
from train.metrics.accuracy import Accuracy
from train.metrics.time_breakdown import TimeBreakdown

IMAGES, CLASSES, BATCH = 53, 12, 8
IMAGES_BY_RANK = {  # by world size; uneven numbers, and ranks without images
    1: [[53]],
    2: [[27, 26], [53, 0], [8, 45]],
    3: [[18, 18, 17], [1, 44, 8], [0, 0, 53]],
}


class PixelScores(nn.Module):
    """A network whose scores are the image's pixels. It records its mode, and whether gradients are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.calls: list[tuple[bool, bool]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append((self.training, torch.is_grad_enabled()))
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


class FilledPreprocessor:
    """Prepares batches as the tests here do, and says that the warm-up has run full ones."""

    prepare, autocast = staticmethod(lambda batch: prepare(batch)), contextlib.nullcontext
    warmed_shapes = frozenset({(BATCH, 2, 2)})


def test_run_validation_on_a_gpu_runs_full_batches_and_counts_each_image_once() -> None:
    """The device is mocked: the sums stay on the CPU, and the code takes it for a GPU."""

    class Gpu(ProcessGroup):
        @property
        def device(self) -> Any:
            return SimpleNamespace(type="cuda")

    expected = validate(ProcessGroup(0, 0, 1, 1, torch.device("cpu")), batches(list(range(IMAGES))))
    seen: list[int] = []

    class Scores(PixelScores):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(len(x))
            return super().forward(x)

    cpu = ProcessGroup(0, 0, 1, 1, torch.device("cpu"))
    own_batches = batches(list(range(IMAGES)))
    zeros = torch.zeros
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "zeros", lambda *shape, device=None, **kw: zeros(*shape, **kw))
        group = object.__new__(Gpu)
        for name in ("rank", "local_rank", "world_size", "local_world_size"):
            object.__setattr__(group, name, getattr(cpu, name))
        accuracy = run_validation(
            group, Scores(), iter(own_batches), len(own_batches), IMAGES, FilledPreprocessor(),  # type: ignore[arg-type]
            TimeBreakdown(cpu.device),
        )  # fmt: skip
    assert accuracy == expected and set(seen) == {BATCH} and IMAGES % BATCH


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


def validate(
    group: ProcessGroup, own_batches: list[Batch], expected_images: int = IMAGES, model: nn.Module | None = None
) -> Accuracy:
    def stream() -> Iterator[Batch]:
        yield from own_batches
        yield own_batches[0] if own_batches else batches([0])[0]  # of the next epoch: must not be taken

    remaining = stream()
    accuracy = run_validation(
        group,
        model or PixelScores(),
        remaining,
        len(own_batches),
        expected_images,
        PLAIN_PREPROCESSOR,
        TimeBreakdown(group.device),
    )
    assert len(list(remaining)) == 1
    return accuracy


def accuracy_by_sorting() -> Accuracy:
    """Return the accuracy, computed one image at a time by sorting the scores."""
    loss = top1 = top5 = 0.0
    for batch in (batches([number])[0] for number in range(IMAGES)):
        inputs, labels = prepare(batch)
        scores = PixelScores()(inputs)
        loss += cross_entropy(scores, labels).item()
        rank_of_label = [class_index.item() for class_index in scores[0].argsort(descending=True)].index(labels.item())
        top1, top5 = top1 + (rank_of_label < 1), top5 + (rank_of_label < 5)
    return Accuracy(loss / IMAGES, 100 * top1 / IMAGES, 100 * top5 / IMAGES, IMAGES)


@pytest.mark.parametrize(
    ("world", "image_counts"),
    [(world, image_counts) for world, variants in IMAGES_BY_RANK.items() for image_counts in variants],
)
def test_run_validation_counts_exactly_on_any_world_size(world: int, image_counts: list[int], in_group: Any) -> None:
    ends = np.cumsum(image_counts).tolist()

    def work(group: ProcessGroup) -> Accuracy:
        return validate(
            group, batches(list(range(IMAGES))[ends[group.rank] - image_counts[group.rank] : ends[group.rank]])
        )

    expected = accuracy_by_sorting()
    for accuracy in in_group(world, work):
        assert (accuracy.top1, accuracy.top5, accuracy.images) == (expected.top1, expected.top5, IMAGES)
        assert accuracy.loss == pytest.approx(expected.loss, rel=1e-6)
    assert 0 < expected.top1 < expected.top5 < 100


@pytest.mark.parametrize("ids", [range(IMAGES - 1), [*range(IMAGES), 0]])
def test_run_validation_wrong_image_count_is_an_error(ids: Any) -> None:
    with pytest.raises(RuntimeError, match=f"counted {len(ids)} images, but there are {IMAGES}"):
        validate(ProcessGroup(0, 0, 1, 1, torch.device("cpu")), batches(list(ids)))


def test_run_validation_eval_mode_without_gradients() -> None:
    model = PixelScores()
    validate(ProcessGroup(0, 0, 1, 1, torch.device("cpu")), batches(list(range(IMAGES))), model=model)
    assert set(model.calls) == {(False, False)} and len(model.calls) == 7
    assert model.training and model.norm.num_batches_tracked == 0


@pytest.mark.parametrize("world", [1, 2])
def test_run_validation_counts_by_class_over_all_ranks(world: int, in_group: Any) -> None:
    def work(group: ProcessGroup) -> list[list[int]]:
        confusion = torch.zeros(CLASSES, CLASSES, dtype=torch.int64)
        own = batches(list(range(IMAGES))[group.rank :: world])
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
    for confusion in in_group(world, work):
        assert confusion == expected.tolist()
