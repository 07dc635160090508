"""Gradient sums that are equal bit for bit on any number of processes (option --exact).

Slow. For tests of recovery, where "nearly equal" would hide a fault. Each chunk's gradient is computed in float64 and
rounded to multiples of 2**-30. Sums of such numbers are exact as long as they stay below 2**22, so neither the
distribution over processes nor the order of an all-reduce can change them.
"""

import torch
import torch.distributed as dist
from torch import nn

GRID = 2.0**30


def round_to_grid(values: torch.Tensor) -> torch.Tensor:
    """Return the values rounded to multiples of 2**-30."""
    return torch.round(values * GRID) / GRID


def make_gradients_exact(model: nn.Module) -> None:
    """Convert the model to float64, and round each gradient to multiples of 2**-30 before it is accumulated.

    On a GPU, cuDNN is asked for deterministic kernels in the whole process: others add weight gradients in any order.
    """
    model.double()
    for parameter in model.parameters():
        torch.backends.cudnn.deterministic |= parameter.is_cuda
        if parameter.requires_grad:
            parameter.register_hook(round_to_grid)  # type: ignore[no-untyped-call]


def exact_sum_hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """DDP communication hook that sums without dividing by the world size: a third of a number is not exact."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    future: torch.futures.Future[list[torch.Tensor]] = work.get_future()
    return future.then(lambda done: done.value()[0])
