"""Runs shapes of batch once before the first step of a phase, and leaves the model as it was."""

import math
import os
import shutil
from collections.abc import Callable, Sequence

import torch
from torch import nn

from train.data.order.batch_sampler import DistributedBatchSampler
from train.distributed import ddp
from train.distributed.gpu import full_memory_explained
from train.recipe.schedule import Epoch, split_step
from train.tools.errors import TrainingError, first_line

from .inputs import BatchPreprocessor, allow_kernel_search

BatchShape = tuple[int, int, int]  # images, height, width
COMPILE_BACKEND = "inductor"


def compile_per_shape(model: nn.Module) -> nn.Module:
    """Return a compiled wrapper of the model, which is compiled again for each new shape of batch.

    It shares the model's weights; the model itself stays as it is. Raises `TrainingError` when no C++ compiler is
    installed.
    """
    compiler = os.environ.get("CXX", "g++")
    if COMPILE_BACKEND == "inductor" and not shutil.which(compiler):
        raise TrainingError(
            f"model, compile: the C++ compiler {compiler} is not installed here; install it, or set compile=False"
        )
    return torch.compile(model, dynamic=False, backend=COMPILE_BACKEND)  # type: ignore[return-value]


def batch_shapes(
    sampler: DistributedBatchSampler, epochs: Sequence[Epoch], with_partial_steps: bool = True
) -> tuple[list[BatchShape], list[BatchShape]]:
    """Return the shapes of training batches, and of full validation batches, that the epochs will use.

    The training shapes are the same on all ranks. Those of an epoch's last step, which may have fewer images, are left
    out without `with_partial_steps`, unless an epoch has no other step: each runs once an epoch, and to search kernels
    for it takes longer than they save. The last validation batch of each shape may have any number of images; on a
    GPU it is filled up to a full one.
    """
    train: dict[BatchShape, None] = {}  # dicts, because they keep the order of insertion
    val: dict[BatchShape, None] = {}
    for epoch in epochs:
        phase = epoch.scheduled_phase.phase
        for step in (0, epoch.steps - 1) if with_partial_steps else (0,):
            for chunk in split_step(epoch.images_in_step(step), phase.batch):
                # A chunk of one image is repeated, so the smallest batch has two.
                images = max(2, chunk.stop - chunk.start)
                train |= {(images, *size): None for size in sampler.step_shapes(epoch, step)}
        for plan in sampler.val_plans(epoch.scheduled_phase).values():
            val |= {(phase.batch, *size): None for size, _ in plan}
    return list(train), list(val)


def largest_train_shape(sampler: DistributedBatchSampler, epochs: Sequence[Epoch], is_compiled: bool) -> BatchShape:
    """Return the largest training shape of epochs, without those in which other parameters are frozen than first.

    It is tried at the start of a run, because a later phase that does not fit into a GPU's memory costs hours.
    """
    frozen = epochs[0].scheduled_phase.phase.frozen
    alike = [epoch for epoch in epochs if epoch.scheduled_phase.phase.frozen == frozen]
    return max(batch_shapes(sampler, alike, is_compiled)[0], key=math.prod)


def image_sizes(sampler: DistributedBatchSampler, epochs: Sequence[Epoch]) -> set[tuple[int, int]]:
    """Return all (height, width) that the epochs will use in training and validation."""
    train_shapes, _ = batch_shapes(sampler, epochs)
    plans = (plan for epoch in epochs for plan in sampler.val_plans(epoch.scheduled_phase).values())
    return {shape[1:] for shape in train_shapes} | {size for plan in plans for size, _ in plan}


def warm_up(
    wrapped_model: nn.Module,
    model: nn.Module,
    train_shapes: Sequence[BatchShape],
    val_shapes: Sequence[BatchShape],
    preprocessor: BatchPreprocessor,
    tick: Callable[[], None] = lambda: None,
) -> None:
    """Run forward and backward on black images of the largest training shape, so that memory and libraries are ready.

    A compiled model is compiled for each training shape. With `kernel_search`, cuDNN on a GPU searches kernels for each
    training shape, and for each validation shape by a forward pass; a search takes some 20 s for a shape of ResNet-50.
    Shapes in the preprocessor's `warmed_shapes` are left out, all others added to it.

    Training shapes go through `wrapped_model` (compiled, DDP), validation shapes through the bare `model`. Weights,
    buffers and gradients are unchanged afterwards. `tick` is called after each shape. Raises `TrainingError` when the
    model does not compile.

    On a CPU one small batch is enough: it makes DDP fix its buckets, and with them the order of its sums, before the
    first step, so that a resumed run sums in the same order as an uninterrupted one.
    """
    is_ddp = isinstance(wrapped_model, nn.parallel.DistributedDataParallel)
    inner = wrapped_model.module if is_ddp else wrapped_model
    is_compiled = inner is not model
    device, warmed_shapes = preprocessor.device, preprocessor.warmed_shapes
    is_first = not warmed_shapes
    train_shapes = [shape for shape in train_shapes if shape not in warmed_shapes]
    val_shapes = [shape for shape in val_shapes if shape not in warmed_shapes]
    warmed_shapes |= {*train_shapes, *val_shapes}
    if device.type == "cpu" or not preprocessor.kernel_search:
        val_shapes = []
        train_shapes = train_shapes if is_compiled else sorted(train_shapes, key=math.prod)[-1:]
    if device.type == "cpu" and not is_compiled:
        train_shapes = [(2, *shape[1:]) for shape in train_shapes if is_first]
    if is_compiled:
        # Beyond this limit, of all phases together, torch would silently run everything uncompiled.
        torch._dynamo.config.recompile_limit += len(train_shapes)
    allow_kernel_search(preprocessor.kernel_search)
    dtype = next(wrapped_model.parameters()).dtype
    saved_buffers = [buffer.clone() for buffer in wrapped_model.buffers()]

    def forward(net: nn.Module, shape: BatchShape) -> torch.Tensor:
        images, height, width = shape
        black = torch.zeros(images, 3, height, width, device=device, dtype=dtype)
        with preprocessor.autocast():
            return net(black.to(memory_format=torch.channels_last)).float()  # type: ignore[no-any-return]

    try:
        for shape in train_shapes:
            images, height, width = shape
            subject = f"a batch of {images} images of {width} x {height} pixels"
            try:
                # Nothing is summed later: PowerSGD would spend its error memory.
                with full_memory_explained(device, subject), ddp.without_sums(wrapped_model, unless=is_first):
                    (forward(wrapped_model, shape).sum() * 0).backward()  # type: ignore[no-untyped-call]
            except torch._dynamo.exc.TorchDynamoException as error:
                raise TrainingError(
                    f"model, compile: torch.compile failed: {first_line(error)}; set compile=False to train without it"
                ) from error
            tick()
        model.eval()
        with torch.no_grad():
            for shape in val_shapes:
                forward(model, shape)
                tick()
    finally:  # also when another process is gone, because this one may keep the model
        model.train()
        # DDP's gradients are views of its buckets, so under DDP they are zeroed in place.
        wrapped_model.zero_grad(set_to_none=not is_ddp)
        for buffer, saved in zip(wrapped_model.buffers(), saved_buffers, strict=True):
            buffer.copy_(saved)
