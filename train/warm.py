"""Run the coming shapes once before the first step, and take every trace of it back."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn


def warm(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    shapes: Sequence[tuple[int, int]],
    device: torch.device,
    autocast: Callable[[], Any],
    tick: Callable[[], None] = lambda: None,
) -> None:
    """Go forward and back on black images of each (batch, size); weights, statistics and gradients stay as they are.

    On a GPU this searches the kernels of all phases before the first step (in 2018 each switch stood still for 7 to
    34 s). On a CPU nothing is searched, and one small batch is enough: it makes DDP settle its buckets, on which the
    order of its sums depends, before the first step of a resumed run as of an uninterrupted one.
    """
    if device.type == "cpu":
        shapes = [(2, size) for _, size in shapes[:1]]
    dtype = next(net.parameters()).dtype
    kept = [buffer.clone() for buffer in net.buffers()]
    for batch, size in shapes:
        images = torch.zeros(batch, 3, size, size, device=device, dtype=dtype).to(memory_format=torch.channels_last)
        with autocast():
            scores = net(images)
        (scores.float().sum() * 0).backward()
        tick()
    optimizer.zero_grad(set_to_none=not isinstance(net, nn.parallel.DistributedDataParallel))
    for buffer, before in zip(net.buffers(), kept, strict=True):
        buffer.copy_(before)
