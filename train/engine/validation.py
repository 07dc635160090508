"""Exact validation: every image is counted once, as an integer, on any number of ranks and with any batch size."""

from collections.abc import Callable, Collection, Iterator

import torch
from torch import nn
from torch.nn.functional import cross_entropy, pad

from train.data.loading.loader import Batch
from train.distributed.exact_sum import round_to_grid
from train.distributed.process_group import ProcessGroup, read_sum, sum_over_processes
from train.metrics.accuracy import Accuracy, count_confusion, count_correct
from train.metrics.time_breakdown import TimeBreakdown

from .inputs import BatchPreprocessor


def fill_batch(images: torch.Tensor, warmed_shapes: Collection[tuple[int, ...]]) -> torch.Tensor:
    """Return images [n, 3, h, w] with black ones behind them, up to the number of a full batch of their size.

    So cuDNN knows the kernels for that shape. The scores of the first n images stay the same: in validation each
    image is computed by itself. Without such a shape the images are returned as they are.
    """
    count, _, *size = images.shape
    larger = [warmed for warmed, *warmed_size in warmed_shapes if warmed_size == size and warmed > count]
    if not larger or (count, *size) in warmed_shapes:
        return images
    return pad(images, (0, 0, 0, 0, 0, 0, 0, min(larger) - count))


@torch.no_grad()
def run_validation(
    group: ProcessGroup,
    model: nn.Module,
    batches: Iterator[Batch],
    batch_count: int,
    expected_images: int,
    preprocessor: BatchPreprocessor,
    time_breakdown: TimeBreakdown,
    tick: Callable[[], None] = lambda: None,
    confusion: torch.Tensor | None = None,
) -> Accuracy:
    """Validate on the next `batch_count` batches and return the accuracy over the images of all ranks.

    `model` is the network itself, not its DDP wrapper: ranks may have different numbers of batches, and under DDP the
    rank with one batch more would wait for the others forever. `tick` is called after each batch. Each image is
    counted in `confusion` [classes, classes], if given: in the row of its class and the column of the network's answer,
    over all ranks. Raises `RuntimeError` unless the ranks together have counted `expected_images` images.
    """
    model.eval()
    loss_sum = torch.zeros(1, dtype=torch.float64, device=group.device)
    counts = torch.zeros(3, dtype=torch.int64, device=group.device)  # top-1 correct, top-5 correct, images
    for _ in range(batch_count):
        time_breakdown.begin_step("val")
        batch = time_breakdown.next_batch(batches)
        images, labels = preprocessor.prepare(batch)
        if group.device.type == "cuda":
            images = fill_batch(images, preprocessor.warmed_shapes)
        with preprocessor.autocast():
            scores = model(images)[: len(labels)].float()
        # Rounded losses have the same sum in any order, and so on any number of ranks.
        loss_sum += round_to_grid(cross_entropy(scores, labels, reduction="none").double()).sum()
        top1, top5 = count_correct(scores, labels)
        counts += torch.stack([top1, top5, torch.full_like(top1, len(labels))])
        if confusion is not None:
            count_confusion(confusion, scores, labels)
        time_breakdown.end_step("val", batch.images.shape)
        tick()
    model.train()
    if confusion is not None:
        sum_over_processes(group, confusion)
    total_loss = read_sum(group, loss_sum).item()
    top1_count, top5_count, image_count = read_sum(group, counts).tolist()
    if image_count != expected_images:
        raise RuntimeError(f"validation counted {image_count} images, but there are {expected_images}")
    return Accuracy(
        total_loss / image_count, 100 * top1_count / image_count, 100 * top5_count / image_count, image_count
    )
