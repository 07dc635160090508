"""DDP communication hooks: how one bucket of gradients becomes its mean over all processes.

A hook gets the flat buffer of a bucket, a few million numbers, and returns a future of the same buffer with the mean in
it. All processes handle their buckets in the same order. `ddp.select_hook` chooses the hook of a recipe.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket as Bucket
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from . import regroup

Future = torch.futures.Future[torch.Tensor]
Hook = Callable[[Any, Bucket], Future]  # Any: the state is what the hook was registered with

FP16_GRADIENT_SCALE = 1024.0  # factor on gradients while they are float16: the loss scale of diux-dev/imagenet18 (2018)
FP16_CLIP_VALUE = 60_000.0  # float16 ends at 65,504; the rest leaves room for the rounding errors of all processes
# Rank of the matrices that stand for a layer's gradients; Vogels et al. 2019 use 1 to 4. With 1 and 2, torch divides by
# the norm of a column, so a layer whose gradients are once all zero (a block behind a zero gamma) stays NaN for good.
POWERSGD_RANK = 4


def completed_future(buffer: torch.Tensor) -> Future:
    """Return a future that is complete from the host's point of view."""
    future: Future = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else [])
    future.set_result(buffer)
    return future


@dataclass(frozen=True)
class HalfPrecision:
    """State of `half_precision_hook`: float16 or bfloat16, and whether gradients already carry a loss scale."""

    dtype: torch.dtype
    has_loss_scale: bool

    @property
    def gradient_scale(self) -> float:
        """Factor by which gradients are multiplied before the conversion and divided after it."""
        return 1.0 if self.has_loss_scale or self.dtype != torch.float16 else FP16_GRADIENT_SCALE


def half_precision_hook(precision: HalfPrecision, bucket: Bucket) -> Future:
    """Sum the gradients in half precision: two bytes per number.

    Differs from torch's fp16_compress_hook in that it divides by the world size before the conversion, so a mean that
    fits into float16 cannot overflow on the way; and from its bf16_compress_hook in that it works with Gloo. Gradients
    without a loss scale are multiplied by 1024, because float16 has no numbers below 6e-8, and clipped at +-58 instead
    of becoming infinite, because no scaler would skip the step. With a loss scale nothing is clipped: the scaler must
    see an overflow.
    """
    buffer = bucket.buffer()
    world_size = dist.get_world_size()
    shares = buffer * (precision.gradient_scale / world_size)
    if precision.gradient_scale != 1.0:
        shares.clamp_(-FP16_CLIP_VALUE / world_size, FP16_CLIP_VALUE / world_size)
    work = dist.all_reduce(shares.to(precision.dtype), async_op=True)
    assert work is not None

    def copy_back(done: Future) -> torch.Tensor:
        return buffer.copy_(done.value()[0]).div_(precision.gradient_scale)

    future: Future = work.get_future().then(copy_back)
    return future


class MachineGroups:
    """Process groups for sums by machine: one inside each machine, and one of each machine's first process (leader).

    `ranks_by_machine` lists the global ranks of each machine. All processes must create it at the same time, because
    torch creates process groups on all of them, in the same order.
    """

    def __init__(self, ranks_by_machine: list[list[int]], timeout: timedelta | None) -> None:
        rank = dist.get_rank()
        machine_groups = [dist.new_group(ranks, timeout=timeout) for ranks in ranks_by_machine]
        leaders_group = dist.new_group([ranks[0] for ranks in ranks_by_machine], timeout=timeout)
        machine = next(machine for machine, ranks in enumerate(ranks_by_machine) if rank in ranks)
        self.machine_ranks = ranks_by_machine[machine]
        self.machine_group = machine_groups[machine]
        self.leader_rank = self.machine_ranks[0]
        self.leaders_group = leaders_group if rank == self.leader_rank else None
        self.world_size = sum(len(ranks) for ranks in ranks_by_machine)
        self.stream: torch.cuda.Stream | None = None

    def side_stream(self, buffer: torch.Tensor) -> contextlib.AbstractContextManager[object]:
        """Return a context in which a GPU runs the sums one after the other, beside the backward pass."""
        if not buffer.is_cuda:
            return contextlib.nullcontext()
        self.stream = self.stream or torch.cuda.Stream(buffer.device)  # type: ignore[no-untyped-call]
        self.stream.wait_stream(torch.cuda.current_stream(buffer.device))
        return torch.cuda.stream(self.stream)


def hierarchical_hook(groups: MachineGroups, bucket: Bucket) -> Future:
    """Reduce inside each machine to its leader, all-reduce among the leaders, broadcast inside each machine.

    (Jia et al. 2018, section 4.2; Goyal et al. 2017, section 4.) With M machines, P processes and a bucket of S bytes,
    each machine sends 2(M-1)/M x S instead of 2(P-1)/P x S in a ring of all processes, and with fewer hops.
    """
    buffer = bucket.buffer()
    with groups.side_stream(buffer):
        buffer.div_(groups.world_size)
        if len(groups.machine_ranks) > 1:
            dist.reduce(buffer, groups.leader_rank, group=groups.machine_group)
        if groups.leaders_group is not None:
            dist.all_reduce(buffer, group=groups.leaders_group)
        if len(groups.machine_ranks) > 1:
            dist.broadcast(buffer, groups.leader_rank, group=groups.machine_group)
        return completed_future(buffer)


def powersgd_state(exact_steps: int) -> PowerSGDState:
    """Return a new state of PowerSGD (Vogels et al. 2019).

    It sums exactly for the first `exact_steps` steps, at least 2 (torch fixes its buckets in them). Then it sends
    matrices of rank 4, and adds what they leave out to the next step's gradients.
    """
    return PowerSGDState(
        process_group=None, matrix_approximation_rank=POWERSGD_RANK, start_powerSGD_iter=max(2, exact_steps)
    )


def low_rank_hook(state: PowerSGDState, bucket: Bucket) -> Future:
    """Send a layer's gradients as the product of two narrow matrices.

    On a CPU each bucket is finished before the next one starts. A bucket makes three sums, the later ones from Gloo's
    own threads; with two buckets at once, their order could differ between processes.
    """
    future: Future = powerSGD_hook(state, bucket)
    if not bucket.buffer().is_cuda:
        future.wait()
    return future


def with_abort(hook: Hook) -> Hook:
    """Return a hook whose sums end with an error once the collectives are aborted (`regroup.abort_collectives`)."""

    def abortable_hook(state: object, bucket: Bucket) -> Future:
        return regroup.abortable(hook(state, bucket))

    return abortable_hook


def without_overlap(hook: Hook) -> Hook:
    """Return a hook that collects the buckets, and sums them all with `hook` when the last one is ready."""
    collected: list[Bucket] = []

    def deferred_hook(state: object, bucket: Bucket) -> Future:
        collected.append(bucket)
        if not bucket.is_last():
            return completed_future(bucket.buffer())
        buckets = collected.copy()
        collected.clear()
        *earlier, last = [hook(state, bucket) for bucket in buckets]
        for future in earlier:
            future.wait()  # DDP waits for the last future only; the others' results are in their own buffers
        return last

    return deferred_hook
