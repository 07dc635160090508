"""Batch-norm statistics of all ranks: average, gather, restore."""

import torch
import torch.distributed as dist
from torch import nn

from .process_group import Group, total


def statistics(model: nn.Module) -> list[torch.Tensor]:
    """Return the running means and variances of all norms, by the name that every kind of norm gives them."""
    found = model.named_buffers()
    return [one for name, one in found if name.rpartition(".")[2].startswith("running_") and one.is_floating_point()]


@torch.no_grad()
def average_statistics(group: Group, model: nn.Module) -> None:
    """Give every process the mean of all processes' running statistics: validation must not depend on the rank."""
    buffers = statistics(model)
    if group.world == 1 or not buffers:
        return
    flat = torch.cat([one.flatten() for one in buffers])
    scatter(total(group, flat) / group.world, buffers)


def scatter(flat: torch.Tensor, targets: list[torch.Tensor]) -> None:
    """Copy the parts of a flat tensor into the targets, in order."""
    sizes = [one.numel() for one in targets]
    for part, target in zip(torch.split(flat, sizes), targets, strict=True):
        target.copy_(part.view_as(target))


def gather_statistics(group: Group, model: nn.Module) -> torch.Tensor:
    """Return every process's running statistics as [world, count], on the CPU: a checkpoint keeps them apart."""
    buffers = statistics(model)
    if not buffers:
        return torch.zeros(group.world, 0)
    flat = torch.cat([one.detach().flatten() for one in buffers])
    if group.world == 1:
        return flat[None].cpu()
    parts = [torch.empty_like(flat) for _ in range(group.world)]
    dist.all_gather(parts, flat)
    return torch.stack(parts).cpu()


@torch.no_grad()
def restore_statistics(group: Group, model: nn.Module, stored: torch.Tensor) -> None:
    """Take back this process's own statistics, or the mean of all when the number of processes has changed."""
    mine = stored[group.rank] if len(stored) == group.world else stored.mean(0)
    scatter(mine.to(group.device), statistics(model))
