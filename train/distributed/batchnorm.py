"""Batch-norm running statistics of all ranks: average them, gather them for a checkpoint, restore them.

Each rank updates its own running means and variances from its own chunks, so they differ between ranks.
"""

import torch
import torch.distributed as dist
from torch import nn

from .process_group import ProcessGroup, sum_over_processes


def running_statistics(model: nn.Module) -> list[torch.Tensor]:
    """Return the running means and variances of all norms.

    They are found by their names, running_*, which norms of every kind use. Integer counters are left out.
    """
    return [
        buffer
        for name, buffer in model.named_buffers()
        if name.rpartition(".")[2].startswith("running_") and buffer.is_floating_point()
    ]


@torch.no_grad()
def average_running_statistics(group: ProcessGroup, model: nn.Module) -> None:
    """Set every rank's running statistics to the mean over all ranks, so that all ranks validate the same network."""
    buffers = running_statistics(model)
    if group.world_size == 1 or not buffers:
        return
    flat = torch.cat([buffer.flatten() for buffer in buffers])
    copy_flat_into(sum_over_processes(group, flat) / group.world_size, buffers)


def copy_flat_into(flat: torch.Tensor, targets: list[torch.Tensor]) -> None:
    """Copy consecutive parts of a flat tensor into the targets, in order."""
    sizes = [target.numel() for target in targets]
    for part, target in zip(torch.split(flat, sizes), targets, strict=True):
        target.copy_(part.view_as(target))


def gather_running_statistics(group: ProcessGroup, model: nn.Module) -> torch.Tensor:
    """Return the running statistics of every rank as [world_size, count], on the CPU. For checkpoints."""
    buffers = running_statistics(model)
    if not buffers:
        return torch.zeros(group.world_size, 0)
    flat = torch.cat([buffer.detach().flatten() for buffer in buffers])
    if group.world_size == 1:
        return flat[None].cpu()
    rows = [torch.empty_like(flat) for _ in range(group.world_size)]
    dist.all_gather(rows, flat)
    return torch.stack(rows).cpu()


@torch.no_grad()
def restore_running_statistics(group: ProcessGroup, model: nn.Module, stored: torch.Tensor) -> None:
    """Restore this rank's statistics from [world_size, count].

    When the number of ranks has changed, every rank gets the mean of the stored ones.
    """
    statistics = stored[group.rank] if len(stored) == group.world_size else stored.mean(0)
    copy_flat_into(statistics.to(group.device), running_statistics(model))
