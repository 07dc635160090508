"""CUDA graphs on a CPU: a capture is recorded operation by operation, and replayed into the memory of its results."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.known import known
from support.trainer_in_process import SINGLE_PROCESS, RandomImages, make_phase, make_recipe, make_trainer
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from train.distributed import cuda_graphs
from train.distributed.process_group import ProcessGroup
from train.engine import trainer
from train.engine.inputs import BatchPreprocessor, seed_dropout
from train.models import registry
from train.recipe import Model, Recipe
from train.tools.errors import TrainingError

CPU = torch.device("cpu")
Tensors = list[torch.Tensor]
IMAGES = RandomImages(train=37)


class Recorder(TorchDispatchMode):
    """A CUDA graph: operations in their order. A replay runs them again and puts the results where the first ones lie.
    What the host counts (0-dimensional integers) is no work of a GPU: no replay repeats it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], Any, Any, Tensors]] = []
        self.replays = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = function(*arguments, **(options or {}))
        results = [each for each in torch.utils._pytree.tree_leaves(result) if isinstance(each, torch.Tensor)]
        if not all(each.dtype == torch.int64 and each.dim() == 0 for each in results):
            self.calls.append((function, arguments, options or {}, results))
        return result

    def replay(self) -> None:
        self.replays += 1
        for function, arguments, options, results in self.calls:
            again = torch.utils._pytree.tree_leaves(function(*arguments, **options))
            for old, new in zip(results, (each for each in again if isinstance(each, torch.Tensor)), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    """All graphs that were captured. The trainer takes the CPU for a GPU that can capture."""
    made: list[Recorder] = []

    def graph() -> Recorder:
        made.append(Recorder())
        return made[-1]

    def capture(graph: Recorder, **options: Any) -> Recorder:
        assert options["capture_error_mode"] == "thread_local", "the loader's thread pins memory meanwhile"
        return graph

    def open_graphs(recipe: Recipe, model: nn.Module, preprocessor: Any, distributed: bool, _: bool, log: Any) -> Any:
        is_on = recipe.graphs == "on"
        return cuda_graphs.CudaGraphs(model, preprocessor, distributed, log).capture if is_on else lambda *_: None

    stream: Any = SimpleNamespace(wait_stream=lambda _: None)
    for name, value in {
        "CUDAGraph": graph,
        "graph": capture,
        "Stream": lambda _: stream,
        "current_stream": lambda _: stream,
        "stream": lambda _: contextlib.nullcontext(),
        "graph_pool_handle": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(trainer, "open_graphs", open_graphs)
    return made


def train(
    folder: Path, graphs: str, steps: int = 20, group: Any = SINGLE_PROCESS, model: Any = None, **optim: Any
) -> Any:
    """Return a trainer after some steps of a recipe for two GPUs, whose batch and size grow; each epoch ends with a
    smaller step."""
    model = model or Model(name="resnet10_tiny", zero_gamma=False)
    phases = [make_phase((0, 2), 4, 0.02), make_phase((2, 3), 8, 0.02), make_phase((3, 7), 8, 0.02, size=24)]
    recipe = replace(make_recipe(*phases, gpus=2, model=model, label_smoothing=0.1, **optim), graphs=graphs)
    trained = make_trainer(folder / graphs, recipe, IMAGES, group=group, plain=False)
    epochs = trained.schedule.epochs
    for epoch in epochs:
        if epoch is epochs[0] or epoch.scheduled_phase != epochs[epoch.number - 1].scheduled_phase:
            trained.begin_phase(epoch, is_first=epoch is epochs[0])
        trained.freezer.set_train_mode()
        trained.running_statistics.begin()
        batches = map(IMAGES.decode_batch, trained.sampler.train_requests(epoch))
        for step in range(min(epoch.steps, steps - epoch.first_step)):
            trained.run_step(epoch, step, batches)
            trained.meter.end_step()
        trained.running_statistics.write_to_norms()
    return trained


def assert_same(trained: Any, expected: Any) -> None:
    parts = [(each.model.state_dict(), each.optimizer.state_dict()["state"], each.meter.losses) for each in
             (trained, expected)]  # fmt: skip
    torch.testing.assert_close(*parts, rtol=0, atol=0)


@pytest.mark.parametrize("optim", [
    {"name": "sgd", "momentum": 0.9, "nesterov": True}, {"name": "lars", "trust": 0.02}, {"name": "lamb", "clip": 1.0},
    {"name": "adamw", "mixup": 0.2, "ema": 0.9},
], ids=lambda optim: optim["name"])  # fmt: skip
def test_graphs_train_as_without_them(optim: Any, tmp_path: Path, graphs: list[Recorder]) -> None:
    """To the bit, over 20 steps of growing batch and size; each full step has two chunks."""
    assert_same(train(tmp_path, "on", **optim), train(tmp_path, "off", **optim))
    assert [recorder.replays > 0 for recorder in graphs] == [True] * 6, "forward and backward passes of three shapes"


def test_dropout_of_a_graph_is_that_of_the_step(graphs: list[Recorder]) -> None:
    """The second chunk of a step also must not overwrite the first one's gradients."""
    model = nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(3 * 8 * 8, 3))
    opened = cuda_graphs.CudaGraphs(model, BatchPreprocessor(CPU), in_stages=False, log=print)
    gradients = []
    for shapes in ([], [(2, 8, 8)]):
        opened.capture(shapes, model.train)
        model.zero_grad()
        for chunk in range(2):
            seed_dropout(0, 5, chunk)
            model(torch.ones(2, 3, 8, 8)).square().sum().backward()
        gradients.append(known(next(model.parameters()).grad))
    assert len(graphs) == 2 and torch.equal(gradients[0], gradients[1]) and gradients[0].count_nonzero() > 0


def test_stages_of_several_processes_train_as_without_graphs(
    tmp_path: Path, graphs: list[Recorder], in_group: Any
) -> None:
    """Each process captures the network in six stages, and DDP sums the gradients of each."""

    def work(group: ProcessGroup) -> int:
        assert_same(*(train(tmp_path / str(group.rank), mode, group=group, momentum=0.9) for mode in ("on", "off")))
        return sum(recorder.replays > 0 for recorder in graphs)

    assert in_group(2, work) == [3 * 2 * 6] * 2


def test_frozen_stages_have_no_backward_pass(graphs: list[Recorder]) -> None:
    """Layers that are not trained keep the mode that the phase gives them, and validation is eager."""
    model, preprocessor = registry.build_model(Model(name="resnet10_tiny"), 3, 0), BatchPreprocessor(CPU)
    for parameter in [*model.parameters()][:-2]:
        parameter.requires_grad_(False)
    opened = cuda_graphs.CudaGraphs(model, preprocessor, in_stages=True, log=print)
    opened.capture([(2, 16, 16)], model.eval)
    images = torch.rand(2, 3, 16, 16)
    scores = model(images)
    scores.sum().backward()
    assert [recorder.replays for recorder in graphs] == [1, 0] * 5 + [1, 1]
    with torch.no_grad():
        assert torch.equal(model(images), scores.detach())
    assert sum(recorder.replays for recorder in graphs) == 7
    assert known([*model.parameters()][-1].grad).tolist() == [2.0] * 3


def test_a_network_that_waits_for_the_gpu_is_told_in_one_line(graphs: list[Recorder]) -> None:
    class Waits(nn.Linear):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nand more")

    opened = cuda_graphs.CudaGraphs(Waits(1, 1), BatchPreprocessor(CPU), in_stages=False, log=print)
    with pytest.raises(TrainingError, match=r"^graphs: .*captured: CUDA error: .* is capturing; set graphs='off'$"):
        opened.capture([(2, 16, 16)], lambda: None)


@pytest.mark.parametrize(("graphs", "device", "exact", "compiled", "line"), [
    ("auto", "cuda", False, False, None), ("off", "cuda", False, False, None), ("on", "cuda", False, False, ""),
    ("on", "cpu", False, False, "there is no GPU"), ("on", "cuda", True, False, "--exact"),
    ("on", "cuda", False, True, "the network is compiled"),
])  # fmt: skip
def test_graphs_are_off_where_they_cannot_be(
    graphs: str, device: str, exact: bool, compiled: bool, line: str | None
) -> None:
    """`line`: the reason in the log; None where nothing asks for graphs."""
    recipe = replace(make_recipe(make_phase((0, 1), 8, 0.1), model=Model(name="resnet10_tiny", compile=compiled)),
                     graphs=graphs)  # fmt: skip
    preprocessor: Any = SimpleNamespace(device=torch.device(device), compute_dtype=torch.bfloat16, autocast=print)
    lines = list[str]()
    capture: Any = cuda_graphs.open_graphs(recipe, nn.Linear(1, 1), preprocessor, False, exact, lines.append)
    assert hasattr(capture, "__self__") == (line == "")
    assert lines == ([f"CUDA graphs are off: {line}"] if line else [])
