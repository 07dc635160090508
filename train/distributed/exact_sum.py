"""The same bits on any number of processes. Slow; for tests of recovery, where "nearly equal" would hide a fault.

Each chunk's gradient is computed in float64 and rounded to multiples of 2**-30. Sums of such numbers are exact as long
as they stay below 2**22, so neither the split over processes nor the order of an all-reduce can change them.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

GRADIENT_GRID = 2.0**30


def make_gradients_exact(model: nn.Module) -> None:
    """Make the model float64, and its gradients multiples of 2**-30 before they are added up."""
    model.double()
    for parameter in (one for one in model.parameters() if one.requires_grad):
        parameter.register_hook(lambda gradient: torch.round(gradient * GRADIENT_GRID) / GRADIENT_GRID)  # type: ignore[no-untyped-call]


def exact_sum_hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """Be a hook of DistributedDataParallel that adds and does not divide: a third of a number is not exact."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    future: torch.futures.Future[Any] = work.get_future()
    return future.then(lambda done: done.value()[0])
