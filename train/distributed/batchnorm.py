"""Running statistics of batch norm: one update a step, by the mean over all chunks of the global batch.

    running = (1 - momentum) * running + momentum * mean over the chunks of (mean, unbiased variance) of a chunk

A norm normalizes each chunk by itself. In torch each forward pass also updates the running statistics, so that they
would depend on the number of processes: one with four chunks makes four updates. Here a norm's own momentum is 1, and
each forward pass leaves the statistics of its chunk in the norm's buffers. They are added up, and summed over all
processes while the backward pass goes on. Then the true running statistics, the same on all processes, are updated.
Before a validation or a checkpoint `write_to_norms` copies these to the buffers; training does not read them.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _NormBase  # of BatchNorm and InstanceNorm; torch has no public name for it

from . import regroup
from .exact_sum import round_to_grid
from .process_group import ProcessGroup, sum_over_processes


class RunningStatistics:
    """The running statistics of a model's norms in one flat tensor, while they are trained.

    Norms in eval mode, such as those of frozen layers, keep theirs. `exact` makes the statistics of any number of
    processes equal bit for bit: those of each chunk are rounded, so that their sum is exact.
    """

    def __init__(self, group: ProcessGroup, model: nn.Module, exact: bool = False) -> None:
        self.group = group
        self.exact = exact
        self.norms = [
            module for module in model.modules() if isinstance(module, _NormBase) and module.running_mean is not None
        ]
        self.momenta = [norm.momentum for norm in self.norms]  # None: the mean over all steps so far
        for norm in self.norms:
            norm.momentum = 1.0
            if norm.num_batches_tracked is not None:  # counted on the host: on a GPU each count is a kernel
                norm.num_batches_tracked = norm.num_batches_tracked.cpu()
        self.norm_buffers = [buffer for norm in self.norms for buffer in named_statistics(norm)]
        own_buffers = {id(buffer) for buffer in self.norm_buffers}
        self.foreign_buffers = [buffer for buffer in named_statistics(model) if id(buffer) not in own_buffers]
        self.begin()

    def begin(self) -> None:
        """Take the true running statistics from the norms that are in train mode now."""
        self.buffers: list[torch.Tensor] = []
        self.counters: list[torch.Tensor] = []
        self.trained_momenta: list[float | None] = []
        for norm, momentum in zip(self.norms, self.momenta, strict=True):
            if norm.training:
                assert norm.running_mean is not None and norm.running_var is not None
                assert norm.num_batches_tracked is not None
                self.buffers += [norm.running_mean, norm.running_var]
                self.counters.append(norm.num_batches_tracked)
                self.trained_momenta.append(momentum)
        self.own_chunks = 0
        self.work: dist.Work | regroup.Future | None = None
        if self.buffers:
            self.running = self._flat()
            self.chunk_sum = torch.zeros_like(self.running)

    def _flat(self) -> torch.Tensor:
        return torch.cat([buffer.flatten() for buffer in self.buffers])

    @torch.no_grad()
    def add_chunk(self, counts: bool) -> None:
        """Add the statistics of the chunk of the last forward pass; not of one that repeats another rank's chunk."""
        self.own_chunks += 1
        if self.buffers and counts:
            statistics = self._flat()
            self.chunk_sum += round_to_grid(statistics) if self.exact else statistics

    def start_sum(self) -> None:
        """Begin to sum over all processes. To be called after the forward pass of the last chunk of a step."""
        if self.buffers and self.group.world_size > 1:
            self.work = regroup.start_sum(self.chunk_sum)

    def wait_for_sum(self) -> None:
        """Wait until the chunks of all processes have been summed. Changes no running statistics."""
        if self.work:
            self.work.wait()
            self.work = None

    @torch.no_grad()
    def abandon_step(self) -> None:
        """Forget the chunks of a step that will not be finished."""
        if self.buffers and self.own_chunks:
            torch._foreach_sub_(self.counters, self.own_chunks)
            self.chunk_sum.zero_()
        self.own_chunks = 0
        self.work = None

    @torch.no_grad()
    def end_step(self, chunk_count: int) -> None:
        """Update the running statistics by the `chunk_count` chunks that all processes together had in this step."""
        if not self.buffers:
            return
        self.wait_for_sum()
        if self.own_chunks != 1:  # a step counts once
            torch._foreach_sub_(self.counters, self.own_chunks - 1)
        self.own_chunks = 0
        self.running.lerp_(self.chunk_sum / chunk_count, self._momentum())
        self.chunk_sum.zero_()

    def _momentum(self) -> float | torch.Tensor:
        """Return the momentum of all norms, or that of each number in the flat tensor where they differ."""
        first = self.trained_momenta[0]
        if first is not None and all(momentum == first for momentum in self.trained_momenta):
            return first
        parts = []
        for number, momentum in enumerate(self.trained_momenta):
            size = 2 * self.buffers[2 * number].numel()
            value = 1 / self.counters[number] if momentum is None else self.running.new_tensor(momentum)
            parts.append(value.to(self.running).expand(size))
        return torch.cat(parts)

    @torch.no_grad()
    def write_to_norms(self) -> None:
        """Put the true running statistics into the norms' buffers, for a validation or a checkpoint."""
        if self.buffers:
            parts = torch.split(self.running, [buffer.numel() for buffer in self.buffers])
            torch._foreach_copy_(
                self.buffers, [part.view_as(buffer) for part, buffer in zip(parts, self.buffers, strict=True)]
            )

    @torch.no_grad()
    def average_foreign_statistics(self) -> None:
        """Average the statistics of norms that are not torch's over all processes, which must all call it."""
        if self.group.world_size > 1:
            sums = [sum_over_processes(self.group, buffer.clone()) for buffer in self.foreign_buffers]
            self.group.confirm_sums()
            for buffer, total in zip(self.foreign_buffers, sums, strict=True):
                buffer.copy_(total / self.group.world_size)


def named_statistics(model: nn.Module) -> list[torch.Tensor]:
    """Return the running means and variances of all norms, by their names: running_*. Counters are left out."""
    return [
        buffer
        for name, buffer in model.named_buffers()
        if name.rpartition(".")[2].startswith("running_") and buffer.is_floating_point()
    ]
