"""How one bucket of gradients becomes its mean over all processes: the hooks that comm.py gives to DDP.

A hook gets the flat buffer of a bucket, a few million numbers in one piece, and returns a future of the same buffer
with the mean in it. All processes meet their buckets in the same order.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket as Bucket
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

Future = torch.futures.Future[torch.Tensor]
Hook = Callable[[Any, Bucket], Future]

FP16_GRADIENT_SCALE = 1024.0  # what gradients carry while they are float16: the loss scale of 2018 (facts/seeds.md 1.2)
FP16_CLIP_VALUE = 60_000.0  # of float16's 65,504; the rest is for what the processes' roundings add up to
# Of the matrices that stand for a layer's gradients: Vogels et al. 2019 take 1 to 4. With 1 and 2 torch divides by the
# length of a column, and a layer whose gradients are zero once (a block behind a zero gamma) has no numbers ever after.
POWERSGD_RANK = 4


def completed_future(buffer: torch.Tensor) -> Future:
    """Return a future that is done, as far as the host is concerned."""
    future: Future = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else [])
    future.set_result(buffer)
    return future


# --- half as many bytes ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HalfPrecision:
    """Two bytes for a number: `dtype` is float16 or bfloat16. `scaled`: the gradients carry a loss scale already."""

    dtype: torch.dtype
    has_loss_scale: bool

    @property
    def gradient_scale(self) -> float:
        """What gradients are multiplied by before they become small, and divided by afterwards."""
        return 1.0 if self.has_loss_scale or self.dtype != torch.float16 else FP16_GRADIENT_SCALE


def half_precision_hook(precision: HalfPrecision, bucket: Bucket) -> Future:
    """Send two bytes for each number.

    As torch's fp16_compress_hook, but divided by the number of processes before the numbers become small, so that what
    fits as a mean fits on the way, and as its bf16_compress_hook, which refuses Gloo. Unscaled gradients are multiplied
    by 1024, for below 6e-8 float16 knows nothing, and cut at +-58 instead of becoming infinite: nobody would skip the
    step. With a loss scale nothing is cut: its scaler wants to see what does not fit.
    """
    buffer, world = bucket.buffer(), dist.get_world_size()
    shares = buffer * (precision.gradient_scale / world)
    if precision.gradient_scale != 1.0:
        shares.clamp_(-FP16_CLIP_VALUE / world, FP16_CLIP_VALUE / world)
    work = dist.all_reduce(shares.to(precision.dtype), async_op=True)
    assert work is not None

    def widened(done: Any) -> torch.Tensor:
        return buffer.copy_(done.value()[0]).div_(precision.gradient_scale)

    future: Future = work.get_future().then(widened)
    return future


# --- machine by machine ----------------------------------------------------------------------------------------------


class MachineGroups:
    """The processes by machine: one group inside each, and one of the first process of each.

    All processes must make one at the same time: torch makes groups on all of them, in the same order.
    """

    def __init__(self, ranks_by_machine: list[list[int]], timeout: Any) -> None:
        rank = dist.get_rank()
        groups = [dist.new_group(team, timeout=timeout) for team in ranks_by_machine]
        leaders = dist.new_group([team[0] for team in ranks_by_machine], timeout=timeout)
        number = next(number for number, team in enumerate(ranks_by_machine) if rank in team)
        self.machine_ranks, self.machine_group, self.leader_rank = (
            ranks_by_machine[number],
            groups[number],
            ranks_by_machine[number][0],
        )
        self.leaders_group = leaders if rank == self.leader_rank else None
        self.world_size = sum(map(len, ranks_by_machine))
        self.stream: Any = None

    def side_stream(self, buffer: torch.Tensor) -> Any:
        """A context in which a GPU's sums follow each other without holding up the backward pass."""
        if not buffer.is_cuda:
            return contextlib.nullcontext()
        self.stream = self.stream or torch.cuda.Stream(buffer.device)  # type: ignore[no-untyped-call]
        self.stream.wait_stream(torch.cuda.current_stream(buffer.device))
        return torch.cuda.stream(self.stream)


def hierarchical_hook(groups: MachineGroups, bucket: Bucket) -> Future:
    """Sum up inside each machine to its first process, among those in a ring, and hand the mean out inside again
    (Jia et al. 2018, section 4.2; Goyal et al. 2017, section 4). Between M machines a bucket of S bytes costs each
    2(M-1)/M x S, instead of 2(P-1)/P x S in a ring of all P processes, and fewer hops.
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


# --- few numbers for many --------------------------------------------------------------------------------------------


def powersgd_state(exact_steps: int) -> PowerSGDState:
    """Return a fresh state of PowerSGD (Vogels et al. 2019), which sums exactly for the first `plain` steps, 2 at least
    (torch settles its buckets in them), and then sends matrices of rank 4 and keeps what they miss for the next step.
    """
    return PowerSGDState(
        process_group=None, matrix_approximation_rank=POWERSGD_RANK, start_powerSGD_iter=max(2, exact_steps)
    )


def low_rank_hook(state: PowerSGDState, bucket: Bucket) -> Future:
    """Send a layer's gradients as the product of two slim matrices. On Gloo one bucket after the other: each makes
    three sums, the later ones from Gloo's own threads, which would start those of two buckets in any order.
    """
    future: Future = powerSGD_hook(state, bucket)
    if not bucket.buffer().is_cuda:
        future.wait()
    return future


# --- when --------------------------------------------------------------------------------------------------------


def without_overlap(hook: Hook) -> Hook:
    """Return a hook that only notes the buckets, and has them all summed by `hook` when the last one is ready."""
    ready: list[Bucket] = []

    def late(state: Any, bucket: Bucket) -> Future:
        ready.append(bucket)
        if not bucket.is_last():
            return completed_future(bucket.buffer())
        buckets = ready.copy()
        ready.clear()
        *sums, last = [hook(state, one) for one in buckets]
        for one in sums:
            one.wait()  # they are written where they were read
        return last

    return late
