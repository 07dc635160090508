"""Sums gradients over all processes: DistributedDataParallel with the recipe's buckets and communication hook.

    Comm(hook="fp16", bucket=25.0, overlap=True)

DDP collects gradients in flat buckets, in the order in which the backward pass makes them. So small tensors are sent
together: a step of ResNet-50 makes 5 all-reduces, not 161. Each bucket is summed as soon as it is full, while the
backward pass goes on. The rings or trees that carry the bytes are NCCL's choice.

    auto            bf16 where GPUs of several machines send over sockets, not by EFA or InfiniBand; else none
    none            float32, unchanged
    fp16, bf16      half the bytes; float16 has a relative error of 5e-4, bfloat16 of 4e-3 but any magnitude
    powersgd        1.5 % of ResNet-50's bytes, but approximate sums: for a network that is by far the bottleneck
    hierarchical    inside each machine, between machines, inside again: for Gloo, and for many small machines on a slow
                    network. NCCL detects machines itself
"""

import contextlib
import inspect
import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from train.recipe.components import Comm
from train.tools.errors import Diverged, TrainingError

from . import comm_hooks, process_group, regroup
from .exact_sum import exact_sum_hook

POWERSGD_EXACT_STEPS = 1000  # torch's own default of start_powerSGD_iter
# Batch-norm statistics stay each rank's own. PyTorch 2.13 renamed the option; older versions know the old name only.
_DDP_OPTIONS = inspect.signature(DistributedDataParallel.__init__).parameters
NO_BUFFER_SYNC: dict[str, Any] = {  # Any: else its bool would be checked against every argument
    "forward_sync_buffers" if "forward_sync_buffers" in _DDP_OPTIONS else "broadcast_buffers": False
}
MIB = 1 << 20  # bytes; the unit of DDP's bucket_cap_mb
# DDP's error message: indices of the parameters, among those with requires_grad, that got no gradient
UNUSED_PARAMETERS_PATTERN = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")


class DDP(DistributedDataParallel):
    """DistributedDataParallel that names an unused parameter in a one-line error."""

    def forward(self, *inputs: object, **named: object) -> object:
        """Return what the wrapped module returns.

        Raises `TrainingError` when some parameter got no gradient in the step before, so that its bucket was not
        summed.
        """
        try:
            return super().forward(*inputs, **named)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            match = UNUSED_PARAMETERS_PATTERN.search(str(error))
            if match is None:
                raise
            trainable = [name for name, parameter in self.module.named_parameters() if parameter.requires_grad]
            first, *others = (trainable[int(index)] for index in match[1].split())
            more = f" and {len(others)} more" if others else ""
            raise TrainingError(
                f"model: its scores do not depend on {first.removeprefix('_orig_mod.')}{more}, and with several "
                "processes every trainable parameter needs a gradient; set requires_grad=False on unused parameters, "
                "or train with --procs 1"
            ) from error


def wrap_ddp(
    net: nn.Module,
    comm: Comm,
    dtype: torch.dtype = torch.float32,
    *,
    exact: bool = False,
    exact_steps: int = POWERSGD_EXACT_STEPS,
) -> DDP:
    """Wrap a network so that each backward pass averages its gradients over all processes.

    All processes must call it at the same time. Nothing is copied from rank 0: the weights are equal by seed or
    checkpoint, and batch-norm statistics are each rank's own. It may be called again, with the network or its wrapper,
    when other parameters need gradients; their old ones are dropped. `dtype` is what the network computes in: float16
    has a loss scale. `exact` selects `exact_sum`, which sums instead of averaging. PowerSGD compresses after
    `exact_steps` steps; its error memory is as large as the gradients, differs between ranks, is in no checkpoint, and
    starts empty with each call. Raises `TrainingError` for an unusable hook.
    """
    net = net.module if isinstance(net, DDP) else net
    net.zero_grad(set_to_none=True)
    device = next(net.parameters()).device
    state, hook = select_hook(comm, exact, device, dtype, exact_steps)
    if regroup.may_abort(device):
        hook = comm_hooks.with_abort(hook or allreduce_hook)
    # None is DDP's default: a first bucket of 1 MiB, then 25 MiB.
    bucket_mib = None if comm.bucket == Comm().bucket else comm.bucket * 1e6 / MIB
    wrapped = DDP(net, **NO_BUFFER_SYNC, init_sync=False, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mib)
    if not comm.overlap:
        hook = comm_hooks.without_overlap(hook or allreduce_hook)
    if hook is not None:
        wrapped.register_comm_hook(state, hook)
    return wrapped


def choose_hook(comm: Comm, over_sockets: bool, exact: bool) -> Comm:
    """Return the sums that "auto" stands for; others unchanged. `over_sockets` is that of `print_transport`."""
    return replace(comm, hook="bf16") if comm.hook == "auto" and over_sockets and not exact else comm


def without_sums(net: nn.Module, unless: bool) -> contextlib.AbstractContextManager[None]:
    """Return a context in which gradients are accumulated locally, without an all-reduce; no effect if `unless`."""
    if unless or not isinstance(net, DDP):
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[None] = net.no_sync()
    return context


def on_gradients_ready(net: nn.Module, callback: Callable[[], object]) -> Callable[[], None]:
    """Call a function at the end of each backward pass: the gradients are computed, and not yet summed over processes.

    It ends with the parameter that is used first, in most networks the first one. Returns what removes the callback.
    """

    def hook(_: torch.Tensor) -> None:
        callback()

    first = next(parameter for parameter in net.parameters() if parameter.requires_grad)
    handle = first.register_hook(hook)  # type: ignore[no-untyped-call]
    remove: Callable[[], None] = handle.remove
    return remove


def select_hook(
    comm: Comm, exact: bool, device: torch.device, dtype: torch.dtype, exact_steps: int
) -> tuple[object, comm_hooks.Hook | None]:
    """Return the state and the communication hook of a recipe; hook None for DDP's own all-reduce.

    Raises `TrainingError` when the hook cannot be used with --exact or in this precision.
    """
    if exact:
        if comm.hook not in ("auto", "none"):
            raise TrainingError(f"comm, hook: --exact does not work with {comm.hook}, which rounds; set comm='none'")
        return None, exact_sum_hook
    has_loss_scale = dtype == torch.float16
    if comm.hook in ("fp16", "bf16"):
        dtype = torch.float16 if comm.hook == "fp16" else torch.bfloat16
        return comm_hooks.HalfPrecision(dtype, has_loss_scale), comm_hooks.half_precision_hook
    if comm.hook == "powersgd":
        if has_loss_scale:  # an overflow would stay in its error memory for good
            raise TrainingError(
                "comm, hook: powersgd does not work with float16; set precision='bf16' on GPUs that "
                "have it, or comm='fp16'"
            )
        return comm_hooks.powersgd_state(exact_steps), comm_hooks.low_rank_hook
    if comm.hook == "hierarchical":
        groups = machine_groups(dist.group.WORLD, device)
        if groups:
            return groups, comm_hooks.hierarchical_hook
    return None, None


@cache
def machine_groups(world_group: dist.ProcessGroup | None, device: torch.device) -> comm_hooks.MachineGroups | None:
    """Return the groups for sums by machine, cached by `world_group`; None for one machine, or one process on each."""
    rank = dist.get_rank()
    first_rank_here = torch.tensor([rank - int(os.environ.get("LOCAL_RANK", 0))], device=device)
    first_ranks = [torch.empty_like(first_rank_here) for _ in range(dist.get_world_size())]
    dist.all_gather(first_ranks, first_rank_here)
    ranks_by_machine: dict[int, list[int]] = {}
    for other_rank, first_rank in enumerate(first_ranks):
        ranks_by_machine.setdefault(int(first_rank.item()), []).append(other_rank)
    if len(ranks_by_machine) == 1 or len(ranks_by_machine) == len(first_ranks):
        return None
    return comm_hooks.MachineGroups(list(ranks_by_machine.values()), process_group.FIRST_STEP_TIMEOUT)


# Each step whose gradients are infinite or not a number is left out and halves the scale, which starts at 1024 or more.
MIN_LOSS_SCALE = 2.0**-10


class CappedGradScaler(torch.amp.GradScaler):
    """Loss scaler that starts at 1024, as 2018's did, and never grows beyond it.

    torch's own starts at 65,536, where a gradient of 1 does not fit into float16, and doubles after 2000 good steps.
    """

    def __init__(self, device: str) -> None:
        super().__init__(device, init_scale=comm_hooks.FP16_GRADIENT_SCALE)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Update the scale as torch does, then cap it."""
        super().update(new_scale)
        if self._scale is not None:
            self._scale.clamp_(max=comm_hooks.FP16_GRADIENT_SCALE)


def loss_scale(scaler: torch.amp.GradScaler, device: torch.device) -> torch.Tensor:
    """Return the loss scale as a tensor [1] on the device, without waiting for it; 1 where there is none."""
    scale = scaler._scale if scaler.is_enabled() else None  # get_scale() would wait for the device
    return torch.ones(1, device=device) if scale is None else scale.detach().reshape(1)


def check_loss_scale(scale: float, where: str) -> None:
    """Raise `Diverged` when nearly every step has been left out: the loss may stay finite then. `where` is a step."""
    if scale < MIN_LOSS_SCALE:
        raise Diverged(
            f"the loss scale of float16 has fallen to {scale:.2g} at {where}: the gradients of step after step were "
            "infinite or not a number, and changed nothing; lower the learning rate, or use bfloat16 (--precision bf16)"
        )


def build_grad_scaler(comm: Comm, device: torch.device, precision: torch.dtype) -> torch.amp.GradScaler:
    """Return the loss scaler: enabled only for float16, and capped where the gradients are summed in float16 too."""
    if precision == torch.float16 and comm.hook == "fp16":
        return CappedGradScaler(device.type)
    return torch.amp.GradScaler(device.type, enabled=precision == torch.float16)
