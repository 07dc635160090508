"""Validation with exact numbers: every image counted once, as whole numbers, at any world size and batch."""

from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from train.data.loading.loader import Batch
from train.distributed.process_group import ProcessGroup, sum_over_processes
from train.metrics.accuracy import Accuracy, count_correct
from train.metrics.time_breakdown import TimeBreakdown

from .inputs import BatchPreprocessor


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
) -> Accuracy:
    """Take `count` batches and return the accuracy over all processes' images, of which there must be `images`.

    `model` is the bare module: under DDP a process with one batch more than the others would wait for them for ever.
    `tick` is called after each batch. Raises `RuntimeError` when the processes together did not see each image once.
    """
    model.eval()
    losses = torch.zeros(1, dtype=torch.float64, device=group.device)
    counts = torch.zeros(3, dtype=torch.int64, device=group.device)
    for _ in range(batch_count):
        time_breakdown.begin_step("val")
        batch = time_breakdown.next_batch(batches)
        pixels, labels = preprocessor.prepare(batch)
        with preprocessor.autocast():
            scores = model(pixels).float()
        losses += cross_entropy(scores, labels, reduction="sum")
        top1, top5 = count_correct(scores, labels)
        counts += torch.stack([top1, top5, torch.full_like(top1, len(labels))])
        time_breakdown.end_step("val", batch.images.shape)
        tick()
    model.train()
    loss = sum_over_processes(group, losses).item()
    top1_count, top5_count, seen = sum_over_processes(group, counts).tolist()
    if seen != expected_images:
        raise RuntimeError(f"validation counted {seen} images, but there are {expected_images}")
    return Accuracy(loss / seen, 100 * top1_count / seen, 100 * top5_count / seen, seen)
