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

No graph is trusted: each one is compared with the same pass without it before it is used. A network that cannot be
captured, or whose replay computes something else, trains without graphs, and the log says why.
"""

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from train.models.resnet import ResNet
from train.recipe.schema import Recipe
from train.tools.errors import MachineTrouble, first_line

from .process_group import ProcessGroup, read_sum

WARM_UP_PASSES = 3  # before a capture, on its stream: libraries allocate and choose there, as torch does it
COMPARED_BATCHES = 2  # for each shape: a replay that reads old memory is right for the first one
# Where a GPU does not repeat its own bits, because kernels add in any order: the largest difference of a tensor from
# the same pass without a graph, over the tensor's norm. bfloat16 rounds each value by at most 0.4 %.
MAX_DIFFERENCE = 0.02
BatchShape = tuple[int, int, int]  # images, height, width
Capture = Callable[[torch.cuda.CUDAGraph], contextlib.AbstractContextManager[None]]
CaptureShapes = Callable[[Sequence[BatchShape], Callable[[], object], ProcessGroup], None]


class Preprocessor(Protocol):
    """What is to be known of `BatchPreprocessor`: the type of a network's images and of what it computes in."""

    device: torch.device
    compute_dtype: torch.dtype

    def autocast(self, cache_enabled: bool = True) -> torch.autocast:
        """Return the context of half precision."""


def open_graphs(
    recipe: Recipe, model: nn.Module, preprocessor: Preprocessor, group: ProcessGroup, exact: bool, folder: Path
) -> CaptureShapes:
    """Return the `capture` of a run's graphs; one that does nothing where it has none, which the log says.

    "auto" is on for networks of this project that one process trains: other networks may choose at random, or count,
    in Python, which a replay would not repeat. `folder` outlives the attempts on this machine.
    """
    is_automatic, is_on_gpu = recipe.graphs == "auto", preprocessor.device.type == "cuda"
    if recipe.graphs == "off" or (is_automatic and not is_on_gpu):
        return lambda *_: None
    reason = "there is no GPU" if not is_on_gpu else "--exact" if exact else ""
    reason = reason or ("the network is compiled" if recipe.model.compile else "")
    if is_automatic and not isinstance(model, ResNet):
        reason = reason or "they are automatic for this project's networks only; graphs='on' tries them"
    if reason:
        group.log(f"CUDA graphs are off: {reason}")
        return lambda *_: None
    mark = folder / f"capturing-{group.local_rank}"
    return CudaGraphs(model, preprocessor, mark, is_automatic).capture


@contextlib.contextmanager
def _waits_refused() -> Iterator[None]:
    """Let torch raise `RuntimeError` where the host waits for the GPU, of which it finds most."""
    with warnings.catch_warnings(action="ignore"):  # that it does not find all
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


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
            with _waits_refused():  # here, because a capture that fails leaves CUDA in a state that nobody promises
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
    """The graphs of a network's training. They take the place of its `forward` in train mode, for captured shapes.

    `mark` is a file that exists while shapes are captured, so that it outlives a process that dies of it. `problem` is
    why this process has no graphs, "" as long as it may have.
    """

    def __init__(self, model: nn.Module, preprocessor: Preprocessor, mark: Path, is_automatic: bool = False) -> None:
        self.model, self.device, self.dtype = model, preprocessor.device, preprocessor.compute_dtype
        self.autocast = partial(preprocessor.autocast, cache_enabled=False)  # a capture must not read the cache
        self.mark, self.is_automatic, self.problem, self.told = mark, is_automatic, "", ""
        self.stages: dict[BatchShape, list[CapturedStage]] = {}
        self.captured_state: object = None
        self.counters: list[torch.Tensor] = []
        self.eager_forward = model.forward
        model.forward = self._forward

    def capture(self, shapes: Sequence[BatchShape], set_train_mode: Callable[[], object], group: ProcessGroup) -> None:
        """Capture training batches of these shapes, with the layers in the mode of `set_train_mode`.

        Other shapes are forgotten. Shapes that are captured already stay so. All ranks call it, and all have graphs
        afterwards or none has. The network is unchanged. Raises `RuntimeError` only when the GPU is out of order.
        """
        if self.is_automatic and group.world_size > 1:
            self.stages.clear()
            if group.is_first:
                self._tell("they have never run with several processes; graphs='on' uses them there too")
            return
        start = time.perf_counter()
        set_train_mode()
        state = self._state(shapes, in_stages := group.world_size > 1)
        is_new = not self.stages or state != self.captured_state
        if not self.problem and self.mark.exists():
            self.problem = f"an earlier attempt ended while it captured them; without {self.mark} they are tried again"
        if not self.problem and is_new:
            self.mark.touch()
            self.problem = self.try_capture(shapes, in_stages)
            self.mark.unlink()
        if read_sum(group, torch.tensor([float(bool(self.problem))])).item():
            self.stages.clear()
            self.problem = self.problem or "another process cannot use them, as its log says"
            self._tell(self.problem)
        elif is_new:
            self.captured_state = state
            seconds = time.perf_counter() - start
            group.log(f"CUDA graphs: {len(shapes)} shapes of batch captured and compared in {seconds:.1f} s")

    def _tell(self, reason: str) -> None:
        if reason != self.told:
            self.told = reason
            print(f"CUDA graphs are off: {reason}", flush=True)

    def _state(self, shapes: Sequence[BatchShape], in_stages: bool) -> object:
        """Return what a capture depends on: shapes, where weights and buffers lie, what is trained, and the modes."""
        parameters = [(each.data_ptr(), each.requires_grad) for each in self.model.parameters()]
        buffers = [each.data_ptr() for each in self.model.buffers()]
        return [*shapes], in_stages, parameters, buffers, [module.training for module in self.model.modules()]

    def try_capture(self, shapes: Sequence[BatchShape], in_stages: bool) -> str:
        """Capture shapes. Returns why they cannot be used, "" when they can; the network is unchanged."""
        self.stages.clear()
        norms = [norm for norm in self.model.modules() if isinstance(norm, _BatchNorm) and norm.training]
        counters = [norm.num_batches_tracked for norm in norms]
        self.counters = [counter for counter in counters if counter is not None and not counter.is_cuda]
        stream, pool = torch.cuda.Stream(self.device), torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]
        saved_buffers = [buffer.clone() for buffer in self.model.buffers()]
        # A block whose last norm begins at zero passes nothing back: there would be nothing to compare.
        zeros = [each for each in self.model.parameters() if each.dim() == 1 and not each.any()]
        problem = ""
        try:
            stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(stream):
                for shape in shapes:
                    self.stages[shape] = self._capture_shape(self._images(shape), stream, pool, in_stages)
            torch.cuda.current_stream(self.device).wait_stream(stream)
            self._set(zeros, 0.5)
            problem = self._find_difference(shapes, saved_buffers)
        except MachineTrouble:  # any statement raises it when a loader's process is lost
            self.mark.unlink(missing_ok=True)
            raise
        except Exception as error:  # whatever a network raises: it has passed the warm-up, so the graph is the reason
            problem = f"the network cannot be captured: {first_line(_first_cause(error))}"
        self._set(zeros, 0.0)
        if problem:
            self.stages.clear()
            self._clean_up(pool)
            # As a step does it, so that a GPU that is out of order fails here, where the mark still says why.
            self._pass(self.eager_forward, self._images(shapes[0]), saved_buffers)
        self._restore(saved_buffers)
        torch.cuda.synchronize(self.device)
        return problem

    def _restore(self, buffers: Sequence[torch.Tensor]) -> None:
        for buffer, saved in zip(self.model.buffers(), buffers, strict=True):
            buffer.copy_(saved)

    @staticmethod
    @torch.no_grad()
    def _set(parameters: Sequence[torch.Tensor], value: float) -> None:
        for parameter in parameters:
            parameter.fill_(value)

    def _images(self, shape: BatchShape) -> torch.Tensor:
        """Return a batch of noise, in the layout of a loader's batch."""
        images, height, width = shape
        return torch.randn(images, height, width, 3, device=self.device, dtype=self.dtype).permute(0, 3, 1, 2)

    def _find_difference(self, shapes: Sequence[BatchShape], buffers: Sequence[torch.Tensor]) -> str:
        """Return what replays compute otherwise than the same passes without a graph, "" when nothing.

        The passes keep two sets of gradients beside the graphs, so that an optimizer's memory will fit too.
        """
        for images, height, width in [*shapes] * COMPARED_BATCHES:
            batch = self._images((images, height, width))
            expected, again, replayed = (
                self._pass(forward, batch, buffers)
                for forward in (self.eager_forward, self.eager_forward, self._forward)
            )
            repeats_bits = all(map(torch.equal, expected, again))
            for graphed, eager in zip(replayed, expected, strict=True):
                difference, norm = torch.dist(graphed.double(), eager.double()), eager.double().norm()
                if not (torch.equal(graphed, eager) if repeats_bits else bool(difference <= MAX_DIFFERENCE * norm)):
                    return f"a batch of {images} images of {width} x {height} pixels is replayed with another result"
        return ""

    def _pass(
        self, forward: Callable[[torch.Tensor], torch.Tensor], images: torch.Tensor, buffers: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return scores, gradients and running statistics of one pass that begins with these buffers."""
        self._restore(buffers)
        torch.manual_seed(0)  # of dropout
        with self.autocast():
            scores = forward(images)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        weights = torch.linspace(-1, 1, scores.numel(), device=self.device, dtype=scores.dtype).view_as(scores)
        gradients = torch.autograd.grad(scores, trained, weights, allow_unused=True)
        return [each.detach().clone() for each in (scores, *gradients, *self.model.buffers()) if each is not None]

    def _clean_up(self, pool: Any) -> None:
        """Mend what a failed capture leaves in torch (CUDAGraph::capture_end of torch 2.13), as far as is known."""
        with contextlib.suppress(Exception):  # it was perhaps not begun, or ended well
            torch._C._cuda_endAllocateToPool(self.device.index or 0, pool)
        with contextlib.suppress(Exception):
            generator = torch.cuda.default_generators[self.device.index or 0]
            generator.graphsafe_set_state(generator.clone_state())

    def _capture_shape(
        self, inputs: torch.Tensor, stream: torch.cuda.Stream, pool: object, in_stages: bool
    ) -> list[CapturedStage]:
        def capture(graph: torch.cuda.CUDAGraph) -> contextlib.AbstractContextManager[None]:
            # "thread_local": other threads may go on to ask for memory, as the one that pins the loader's batches.
            return torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")  # type: ignore[arg-type]

        stages: list[CapturedStage] = []
        in_parts = in_stages and isinstance(self.model, ResNet)
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


def _first_cause(error: BaseException) -> BaseException:
    """Return the error during which others were raised: the end of a failed capture fails too."""
    while error.__context__:
        error = error.__context__
    return error
