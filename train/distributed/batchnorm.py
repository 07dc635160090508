"""Batch-norm statistics of all ranks: average, gather, restore."""

import torch
import torch.distributed as dist
from torch import nn

from .process_group import ProcessGroup, sum_over_processes


def running_statistics(model: nn.Module) -> list[torch.Tensor]:
    """Return the running means and variances of all norms, by the name that every kind of norm gives them."""
    found = model.named_buffers()
    return [one for name, one in found if name.rpartition(".")[2].startswith("running_") and one.is_floating_point()]


@torch.no_grad()
def average_running_statistics(group: ProcessGroup, model: nn.Module) -> None:
    """Give every process the mean of all processes' running statistics: validation must not depend on the rank."""
    buffers = running_statistics(model)
    if group.world_size == 1 or not buffers:
        return
    flat = torch.cat([one.flatten() for one in buffers])
    copy_flat_into(sum_over_processes(group, flat) / group.world_size, buffers)


def copy_flat_into(flat: torch.Tensor, targets: list[torch.Tensor]) -> None:
    """Copy the parts of a flat tensor into the targets, in order."""
    sizes = [one.numel() for one in targets]
    for part, target in zip(torch.split(flat, sizes), targets, strict=True):
        target.copy_(part.view_as(target))


def gather_running_statistics(group: ProcessGroup, model: nn.Module) -> torch.Tensor:
    """Return every process's running statistics as [world, count], on the CPU: a checkpoint keeps them apart."""
    buffers = running_statistics(model)
    if not buffers:
        return torch.zeros(group.world_size, 0)
    flat = torch.cat([one.detach().flatten() for one in buffers])
    if group.world_size == 1:
        return flat[None].cpu()
    parts = [torch.empty_like(flat) for _ in range(group.world_size)]
    dist.all_gather(parts, flat)
    return torch.stack(parts).cpu()


@torch.no_grad()
def restore_running_statistics(group: ProcessGroup, model: nn.Module, stored: torch.Tensor) -> None:
    """Take back this process's own statistics, or the mean of all when the number of processes has changed."""
    mine = stored[group.rank] if len(stored) == group.world_size else stored.mean(0)
    copy_flat_into(mine.to(group.device), running_statistics(model))
