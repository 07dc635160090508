"""Validation with exact numbers: every image counted once, as whole numbers, at any world size and batch."""

from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from train.data.loading.loader import Batch
from train.distributed.process_group import Group, total
from train.metrics.accuracy import Accuracy, hits
from train.metrics.time_breakdown import Times

from .inputs import Inputs


@torch.no_grad()
def evaluate(
    group: Group,
    model: nn.Module,
    batches: Iterator[Batch],
    count: int,
    images: int,
    inputs: Inputs,
    times: Times,
    tick: Callable[[], None] = lambda: None,
) -> Accuracy:
    """Take `count` batches and return the accuracy over all processes' images, of which there must be `images`.

    `model` is the bare module: under DDP a process with one batch more than the others would wait for them for ever.
    `tick` is called after each batch. Raises `RuntimeError` when the processes together did not see each image once.
    """
    model.eval()
    losses = torch.zeros(1, dtype=torch.float64, device=group.device)
    counts = torch.zeros(3, dtype=torch.int64, device=group.device)
    for _ in range(count):
        times.begin("val")
        batch = times.wait(batches)
        pixels, labels = inputs.prepare(batch)
        with inputs.autocast():
            scores = model(pixels).float()
        losses += cross_entropy(scores, labels, reduction="sum")
        top1, top5 = hits(scores, labels)
        counts += torch.stack([top1, top5, torch.full_like(top1, len(labels))])
        times.end("val", batch.images.shape)
        tick()
    model.train()
    loss = total(group, losses).item()
    top1_count, top5_count, seen = total(group, counts).tolist()
    if seen != images:
        raise RuntimeError(f"validation counted {seen} images, but there are {images}")
    return Accuracy(loss / seen, 100 * top1_count / seen, 100 * top5_count / seen, seen)
