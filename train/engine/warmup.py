"""Run the coming shapes once before the first step, and take every trace of it back."""

import os
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from train.data.order.batch_sampler import DistributedBatchSampler
from train.recipe.schedule import Epoch, split_step
from train.tools.errors import TrainingError

BatchShape = tuple[int, int, int]  # images, height, width
COMPILE_BACKEND = "inductor"


def compile_per_shape(model: nn.Module) -> nn.Module:
    """Return the model compiled for each shape anew, sharing its weights; it stays what it is itself.

    Raises `Expected` where there is no compiler.
    """
    compiler = os.environ.get("CXX", "g++")
    if COMPILE_BACKEND == "inductor" and not shutil.which(compiler):
        raise TrainingError(
            f"model, compile: needs the compiler {compiler}, which is not here; install it, or compile=False"
        )
    return torch.compile(model, dynamic=False, backend=COMPILE_BACKEND)  # type: ignore[return-value]


def batch_shapes(
    sampler: DistributedBatchSampler, epochs: Sequence[Epoch]
) -> tuple[list[BatchShape], list[BatchShape]]:
    """Return the shapes that the epochs will train on, the same on all processes, and those of full validation batches.

    A last step that is not full has shapes of its own. The rests of validation are of any number: none is searched for.
    """
    train: dict[BatchShape, None] = {}
    val: dict[BatchShape, None] = {}
    for epoch in epochs:
        phase = epoch.scheduled_phase.phase
        for step in (0, epoch.steps - 1):
            for part in split_step(epoch.images_in_step(step), phase.batch):
                train |= {(max(2, part.stop - part.start), *one): None for one in sampler.step_shapes(epoch, step)}
        for plan in sampler.val_plans(phase).values():
            val |= {(len(ids), *shape): None for shape, ids in plan if len(ids) == phase.batch}
    return list(train), list(val)


def image_sizes(sampler: DistributedBatchSampler, epochs: Sequence[Epoch]) -> set[tuple[int, int]]:
    """Return all heights and widths that the epochs will meet, those of rests too."""
    plans = (plan for epoch in epochs for plan in sampler.val_plans(epoch.scheduled_phase.phase).values())
    return {one[1:] for one in batch_shapes(sampler, epochs)[0]} | {shape for plan in plans for shape, _ in plan}


def warm_up(
    wrapped_model: nn.Module,
    model: nn.Module,
    train_shapes: Sequence[BatchShape],
    val_shapes: Sequence[BatchShape],
    device: torch.device,
    autocast: Callable[[], Any],
    tick: Callable[[], None] = lambda: None,
) -> None:
    """Go forward and back on black images of each training shape through `net`, and forward through the bare `model` on
    those of validation; weights, statistics and gradients stay as they are. Raises `Expected` when it does not compile.

    On a GPU this searches the kernels of all phases before the first step (in 2018 each switch stood still for 7 to
    34 s), and where the net is compiled, it is compiled for each. On a CPU nothing else is searched, and one small
    batch is enough: it makes DDP settle its buckets, on which the order of its sums depends, before the first step of a
    resumed run as of an uninterrupted one.
    """
    inner = wrapped_model.module if isinstance(wrapped_model, nn.parallel.DistributedDataParallel) else wrapped_model
    is_compiled = inner is not model
    if device.type == "cpu":
        train_shapes, val_shapes = (train_shapes if is_compiled else [(2, *one[1:]) for one in train_shapes[:1]]), []
    if is_compiled:
        torch._dynamo.config.recompile_limit = 8 + len(train_shapes)  # more, and all would go on uncompiled
    torch.backends.cudnn.benchmark = True
    dtype = next(wrapped_model.parameters()).dtype
    kept = [buffer.clone() for buffer in wrapped_model.buffers()]

    def scores(through: nn.Module, shape: BatchShape) -> torch.Tensor:
        black = torch.zeros(shape[0], 3, *shape[1:], device=device, dtype=dtype)
        with autocast():
            return through(black.to(memory_format=torch.channels_last)).float()  # type: ignore[no-any-return]

    for shape in train_shapes:
        try:
            (scores(wrapped_model, shape).sum() * 0).backward()  # type: ignore[no-untyped-call]
        except torch._dynamo.exc.TorchDynamoException as error:
            first = str(error).strip().partition("\n")[0]
            raise TrainingError(
                f"model, compile: torch.compile failed, {first}; compile=False trains without it"
            ) from error
        tick()
    model.eval()
    with torch.no_grad():
        for shape in val_shapes:
            scores(model, shape)
            tick()
    model.train()
    wrapped_model.zero_grad(set_to_none=inner is wrapped_model)  # DDP's gradients are views of its buckets
    for buffer, before in zip(wrapped_model.buffers(), kept, strict=True):
        buffer.copy_(before)
