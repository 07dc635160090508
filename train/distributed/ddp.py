"""How gradients are added up over the processes: DistributedDataParallel, its buckets, its hooks.

    Comm(hook="fp16", bucket=25.0, overlap=True)

DDP lays the gradients into flat buckets in the order in which the backward pass makes them, which is how small tensors
are fused: a step of ResNet-50 makes 5 sums, not 161. Each bucket is summed as soon as it is full, beside the rest of
the backward pass. Along which rings or trees the bytes go is NCCL's choice, and left to it.

    none            float32, as they are
    fp16, bf16      half the bytes; float16 errs by 5e-4 of a number, bfloat16 by 4e-3 but knows all magnitudes
    powersgd        1.5 % of ResNet-50's bytes, and not the same sums: for networks that are the bottleneck by far
    hierarchical    inside the machines, between them, inside: for Gloo, and for many small machines on a slow network.
                    NCCL knows what is inside by itself
"""

import os
import re
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from train.recipe.components import Comm
from train.tools.errors import TrainingError

from . import comm_hooks as hooks
from . import exact_sum as exactly
from . import process_group

POWERSGD_EXACT_STEPS = 1000  # steps: torch's own start_powerSGD_iter
MIB = 1 << 20  # DDP's "MB"
UNUSED_PARAMETERS_PATTERN = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")  # of those that learn


class DDP(DistributedDataParallel):
    """DDP, but a parameter that a step's loss does not depend on is told in one line, and by its name."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """As DDP's. Raises `Expected`: a bucket that waits for such a parameter was not summed in the step before."""
        try:
            return super().forward(*inputs, **named)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            told = UNUSED_PARAMETERS_PATTERN.search(str(error))
            if told is None:
                raise
            learning = [name for name, one in self.module.named_parameters() if one.requires_grad]
            first, *others = (learning[int(number)] for number in told[1].split())
            more = f" and {len(others)} more" if others else ""
            raise TrainingError(
                f"model: its scores do not depend on {first.removeprefix('_orig_mod.')}{more}, and several processes "
                "sum all that learns; give what is not used requires_grad=False, or train with --procs 1"
            ) from error


def wrap_ddp(net: nn.Module, comm: Comm, exact: bool = False, exact_steps: int = POWERSGD_EXACT_STEPS) -> DDP:
    """Return the net with its gradients summed over all processes after each backward pass, divided by their number.

    Nothing is copied from rank 0: the weights are the same by seed or checkpoint, the statistics are not. All processes
    must call it at the same time. It may be called again, with what it returned or the bare net, when other parameters
    want gradients; those of the earlier call are dropped. `plain`: the steps in which PowerSGD sums exactly, before it
    begins. What it remembers is each process's own and as large as the gradients: it is in no checkpoint, and begins
    anew with each call. Raises `Expected` when the hook cannot be had.
    """
    net = net.module if isinstance(net, DDP) else net
    net.zero_grad(set_to_none=True)
    state, hook = select_hook(comm, exact, next(net.parameters()).device, exact_steps)
    wrapped = DDP(
        net,
        forward_sync_buffers=False,
        init_sync=False,
        gradient_as_bucket_view=True,
        bucket_cap_mb=bucket_cap_mib(comm),
    )
    if not comm.overlap:
        hook = hooks.without_overlap(hook or allreduce_hook)
    if hook is not None:
        wrapped.register_comm_hook(state, hook)
    return wrapped


def bucket_cap_mib(comm: Comm) -> Any:
    """The size of a bucket as DDP wants it; None where it is left to DDP: a first one of 1 MiB, then 25 MiB."""
    return None if comm.bucket == Comm().bucket else comm.bucket * 1e6 / MIB


def select_hook(comm: Comm, exact: bool, device: torch.device, exact_steps: int) -> tuple[Any, hooks.Hook | None]:
    """Return a hook's state and the hook; None for what DDP does without. Raises `Expected`."""
    if exact:
        if comm.hook != "none":
            raise TrainingError(f"comm, hook: {comm.hook} rounds as it likes, and --exact must not; take comm='none'")
        return None, exactly.exact_sum_hook
    scaled = process_group.compute_dtype(device) == torch.float16  # then there is a scaler
    if comm.hook in ("fp16", "bf16"):
        return hooks.HalfPrecision(
            torch.float16 if comm.hook == "fp16" else torch.bfloat16, scaled
        ), hooks.half_precision_hook
    if comm.hook == "powersgd":
        if scaled:  # what does not fit would stay in its memory for ever
            raise TrainingError(
                "comm, hook: powersgd needs GPUs with bfloat16, and these compute in float16; take 'fp16'"
            )
        return hooks.powersgd_state(exact_steps), hooks.low_rank_hook
    found = machine_groups(dist.group.WORLD, device) if comm.hook == "hierarchical" else None
    return (found, hooks.hierarchical_hook) if found else (None, None)


@cache
def machine_groups(world_group: Any, device: torch.device) -> hooks.MachineGroups | None:
    """Return the groups for sums by machine, made once for a `world`; None where all of it is one machine, or each
    machine has one process.
    """
    rank = dist.get_rank()
    mine = torch.tensor([rank - int(os.environ.get("LOCAL_RANK", 0))], device=device)
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    teams: dict[int, list[int]] = {}
    for one, first in enumerate(found):
        teams.setdefault(int(first.item()), []).append(one)
    if len(teams) == 1 or len(teams) == len(found):
        return None
    return hooks.MachineGroups(list(teams.values()), process_group.FIRST_STEP_TIMEOUT)


# --- the loss scale --------------------------------------------------------------------------------------------------


class CappedGradScaler(torch.amp.GradScaler):
    """A loss scale that begins at 1024, as 2018's was, and never grows beyond. torch's own begins at 65,536, where a
    gradient of 1 does not fit float16, and goes back to float16's edge whenever 2000 steps went well.
    """

    def __init__(self, device: str) -> None:
        super().__init__(device, init_scale=hooks.FP16_GRADIENT_SCALE)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """As torch's."""
        super().update(new_scale)
        if self._scale is not None:
            self._scale.clamp_(max=hooks.FP16_GRADIENT_SCALE)


def build_grad_scaler(comm: Comm, device: torch.device, precision: torch.dtype) -> torch.amp.GradScaler:
    """Return what scales the loss: nothing, unless float16 is computed in; capped where the sums are float16 too."""
    if precision == torch.float16 and comm.hook == "fp16":
        return CappedGradScaler(device.type)
    return torch.amp.GradScaler(device.type, enabled=precision == torch.float16)
