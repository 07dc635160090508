"""CUDA graphs: a training step's forward and backward passes are each captured once for a shape of batch, and replayed.

On small images the host takes longer to launch a step's kernels than the GPU to run them. A graph launches all with one
call. What is captured is the network: as a whole, or under DDP in stages, so that the sums of a stage's gradients run
beside the backward pass of the stages before it. Loss, hooks, optimizer and meters stay outside: they are few kernels,
and their numbers change from step to step. Batches of other shapes, and validation, run as they do without graphs.

A replay reads and writes the memory of the capture. Images are copied into it. Weights and running statistics are
changed in place only, so they lie there. Gradients that a parameter has taken over without a copy are copied before a
second chunk overwrites them. Dropout draws from torch's generator as it stands at the replay. What the host itself
counts in a forward pass, the steps of a batch norm, is counted here for each replay.

torch.cuda.make_graphed_callables does as much. But its capture fails when the loader's thread pins memory meanwhile,
calls the trainer's hooks, and returns gradients that the next replay overwrites.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from train.models.resnet import ResNet
from train.recipe.schema import Recipe
from train.tools.errors import TrainingError, first_line

from .gpu import full_memory_explained

WARM_UP_PASSES = 3  # before a capture, on its stream: libraries allocate and choose there, as torch does it
Log = Callable[[str], object]
BatchShape = tuple[int, int, int]  # images, height, width
Capture = Callable[[torch.cuda.CUDAGraph], contextlib.AbstractContextManager[None]]


class Preprocessor(Protocol):
    """What is to be known of `BatchPreprocessor`: the type of a network's images and of what it computes in."""

    device: torch.device
    compute_dtype: torch.dtype

    def autocast(self, cache_enabled: bool = True) -> torch.autocast:
        """Return the context of half precision."""


def open_graphs(
    recipe: Recipe, model: nn.Module, preprocessor: Preprocessor, is_distributed: bool, exact: bool, log: Log
) -> Callable[[Sequence[BatchShape], Callable[[], object]], None]:
    """Return the `capture` of a run's graphs; one that does nothing when it has none. `log` takes a line of why."""
    if recipe.graphs == "on":  # "auto" is off as long as they have not run on a GPU
        reason = "there is no GPU" if preprocessor.device.type != "cuda" else "--exact" if exact else ""
        reason = reason or ("the network is compiled" if recipe.model.compile else "")
        if not reason:
            return CudaGraphs(model, preprocessor, is_distributed, log).capture
        log(f"CUDA graphs are off: {reason}")
    return lambda *_: None


class CapturedStage:
    """The forward and backward passes of a part of a network for one shape of its input.

    `inputs` is the memory that a replay reads: for a later stage the output of the one before it.
    """

    def __init__(self, part: nn.Module, inputs: torch.Tensor, autocast: Callable[[], torch.autocast]) -> None:
        self.part, self.inputs, self.autocast = part, inputs, autocast
        named = {name: parameter for name, parameter in part.named_parameters() if parameter.requires_grad}
        self.parameters = list(named.values())
        # The same memory under other names: without the hooks of DDP and the trainer.
        self.twins = {name: parameter.detach().requires_grad_() for name, parameter in named.items()}
        self.sources = [*self.twins.values(), *([inputs] if inputs.requires_grad else [])]
        self.forward_graph, self.backward_graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        self.input_gradient: torch.Tensor | None = None
        self.gradients: list[torch.Tensor | None] = []  # of the parameters

    def run(self) -> torch.Tensor:
        """Run the part on its input, as it is captured."""
        with self.autocast():
            return torch.func.functional_call(self.part, self.twins, (self.inputs,))  # type: ignore[no-any-return]

    def differentiate(self, outputs: torch.Tensor, gradient: torch.Tensor) -> Sequence[torch.Tensor | None]:
        """Return the gradients of the sources from that of the outputs; none when nothing here is trained."""
        return torch.autograd.grad(outputs, self.sources, gradient, allow_unused=True) if self.sources else ()

    def capture_forward(self, capture: Capture) -> None:
        """Capture the forward pass."""
        for _ in range(WARM_UP_PASSES):
            outputs = self.run()
            self.differentiate(outputs, torch.zeros_like(outputs))
        with capture(self.forward_graph):
            self.outputs = self.run()

    def capture_backward(self, capture: Capture, output_gradient: torch.Tensor | None) -> None:
        """Capture the backward pass. `output_gradient` is the memory that it reads; None: memory of its own."""
        self.output_gradient = torch.zeros_like(self.outputs) if output_gradient is None else output_gradient
        if self.sources:
            with capture(self.backward_graph):
                gradients = list(self.differentiate(self.outputs, self.output_gradient))
            self.gradients = gradients[: len(self.parameters)]
            self.input_gradient = gradients[-1] if self.inputs.requires_grad else None
        self.outputs = self.outputs.detach()

    def replay_forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs: memory that the next replay overwrites."""
        if inputs.data_ptr() != self.inputs.data_ptr():
            self.inputs.copy_(inputs)
        self.forward_graph.replay()
        return self.outputs.detach()

    def replay_backward(self, output_gradient: torch.Tensor) -> list[torch.Tensor | None]:
        """Return the gradients of the input and of the parameters: memory that the next replay overwrites."""
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            if parameter.grad is not None and gradient is not None and parameter.grad.data_ptr() == gradient.data_ptr():
                parameter.grad = parameter.grad.clone()
        if output_gradient.data_ptr() != self.output_gradient.data_ptr():
            self.output_gradient.copy_(output_gradient)
        self.backward_graph.replay()
        return [None if each is None else each.detach() for each in (self.input_gradient, *self.gradients)]


class _Replay(torch.autograd.Function):
    """A captured stage as autograd sees it: `ctx` keeps it for the backward pass."""

    @staticmethod
    def forward(ctx: Any, stage: CapturedStage, inputs: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        ctx.stage = stage
        return stage.replay_forward(inputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, output_gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, *ctx.stage.replay_backward(output_gradient))


class CudaGraphs:
    """The graphs of a network's training. They take the place of its `forward` in train mode, for captured shapes."""

    def __init__(self, model: nn.Module, preprocessor: Preprocessor, in_stages: bool, log: Log) -> None:
        self.model, self.device, self.dtype = model, preprocessor.device, preprocessor.compute_dtype
        self.autocast = partial(preprocessor.autocast, cache_enabled=False)  # a capture must not read the cache
        self.in_stages, self.log = in_stages, log
        self.stages: dict[BatchShape, list[CapturedStage]] = {}
        self.counters: list[torch.Tensor] = []
        self.eager_forward = model.forward
        model.forward = self._forward

    def capture(self, shapes: Sequence[BatchShape], set_train_mode: Callable[[], object]) -> None:
        """Capture training batches of these shapes, with the layers in the mode of `set_train_mode`.

        Other shapes are forgotten. The network is unchanged afterwards. Raises `TrainingError` when the network cannot
        be captured, such as one that waits for the GPU in its forward pass.
        """
        start = time.perf_counter()
        self.stages.clear()
        set_train_mode()
        norms = [norm for norm in self.model.modules() if isinstance(norm, _BatchNorm) and norm.training]
        counters = [norm.num_batches_tracked for norm in norms]
        self.counters = [counter for counter in counters if counter is not None and not counter.is_cuda]
        stream, pool = torch.cuda.Stream(self.device), torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]
        captured, saved_buffers = {}, [buffer.clone() for buffer in self.model.buffers()]
        for shape in shapes:
            images, height, width = shape
            subject = f"the CUDA graph of a batch of {images} images of {width} x {height} pixels"
            black = torch.zeros(images, height, width, 3, device=self.device, dtype=self.dtype).permute(0, 3, 1, 2)
            try:
                with full_memory_explained(self.device, subject):
                    stream.wait_stream(torch.cuda.current_stream(self.device))
                    with torch.cuda.stream(stream):
                        captured[shape] = self._capture_shape(black, stream, pool)
                    torch.cuda.current_stream(self.device).wait_stream(stream)
            except RuntimeError as error:
                text = f"graphs: the network cannot be captured: {first_line(error)}; set graphs='off'"
                raise TrainingError(text) from error
        for buffer, saved in zip(self.model.buffers(), saved_buffers, strict=True):
            buffer.copy_(saved)
        self.stages = captured
        self.log(f"CUDA graphs: {len(shapes)} shapes of batch captured in {time.perf_counter() - start:.1f} s")

    def _capture_shape(self, inputs: torch.Tensor, stream: torch.cuda.Stream, pool: object) -> list[CapturedStage]:
        def capture(graph: torch.cuda.CUDAGraph) -> contextlib.AbstractContextManager[None]:
            # "thread_local": other threads may go on to ask for memory, as the one that pins the loader's batches.
            return torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")  # type: ignore[arg-type]

        stages: list[CapturedStage] = []
        in_parts = self.in_stages and isinstance(self.model, ResNet)
        for part in self.model.stages() if in_parts else [self.model]:  # type: ignore[operator]
            stages.append(CapturedStage(part, inputs, self.autocast))
            stages[-1].capture_forward(capture)
            outputs = stages[-1].outputs
            inputs = outputs.detach().requires_grad_(outputs.requires_grad)
        output_gradient = None
        for stage in reversed(stages):  # in the order of replays, because all share one pool of memory
            stage.capture_backward(capture, output_gradient)
            output_gradient = stage.input_gradient
        return stages

    def _forward(self, images: torch.Tensor) -> Any:
        stages = self.stages.get((images.shape[0], images.shape[2], images.shape[3]))
        if stages is None or not torch.is_grad_enabled():  # the latter in validation
            return self.eager_forward(images)
        if self.counters:
            torch._foreach_add_(self.counters, 1)
        for stage in stages:
            images = _Replay.apply(stage, images, *stage.parameters)  # type: ignore[no-untyped-call]
        return images
