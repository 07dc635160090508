"""CUDA graphs on a CPU: a capture is recorded operation by operation, and replayed into the memory of its results."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

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
from train.tools.errors import WorkerLost

CPU = torch.device("cpu")
Tensors = list[torch.Tensor]
IMAGES = RandomImages(train=37)


class Recorder(TorchDispatchMode):
    """A CUDA graph: operations in their order. A replay runs them again and puts the results where the first ones lie.

    What the host counts (0-dimensional integers) is no work of a GPU: no replay repeats it.
    """

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

    def open_graphs(
        recipe: Recipe, model: nn.Module, preprocessor: Any, group: ProcessGroup, _: bool, folder: Path
    ) -> Any:
        folder.mkdir(parents=True, exist_ok=True)
        mark = folder / f"capturing-{group.rank}"
        is_on = recipe.graphs == "on"
        return cuda_graphs.CudaGraphs(model, preprocessor, mark).capture if is_on else lambda *_: None

    stream: Any = SimpleNamespace(wait_stream=lambda _: None)
    for name, value in {
        "CUDAGraph": graph,
        "graph": capture,
        "Stream": lambda _: stream,
        "current_stream": lambda _: stream,
        "stream": lambda _: contextlib.nullcontext(),
        "graph_pool_handle": lambda: None,
        "set_sync_debug_mode": lambda _: None,
        "synchronize": lambda _: None,
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


def test_dropout_of_a_graph_is_that_of_the_step(graphs: list[Recorder], tmp_path: Path) -> None:
    """The second chunk of a step also must not overwrite the first one's gradients."""
    model = nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(3 * 8 * 8, 3))
    opened = cuda_graphs.CudaGraphs(model, BatchPreprocessor(CPU), tmp_path / "mark")
    gradients = []
    for shapes in ([], [(2, 8, 8)]):
        assert not shapes or opened.try_capture(shapes, in_stages=False) == ""
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


def test_frozen_stages_have_no_backward_pass(graphs: list[Recorder], tmp_path: Path) -> None:
    """Layers that are not trained keep the mode that the phase gives them, and validation is eager."""
    model, preprocessor = registry.build_model(Model(name="resnet10_tiny"), 3, 0), BatchPreprocessor(CPU)
    for parameter in [*model.parameters()][:-2]:
        parameter.requires_grad_(False)
    opened = cuda_graphs.CudaGraphs(model.eval(), preprocessor, tmp_path / "mark")
    assert opened.try_capture([(2, 16, 16)], in_stages=True) == ""
    before = [recorder.replays for recorder in graphs]
    images = torch.rand(2, 3, 16, 16)
    scores = model(images)
    scores.sum().backward()
    assert [recorder.replays - number for recorder, number in zip(graphs, before, strict=True)] == [1, 0] * 5 + [1, 1]
    with torch.no_grad():
        assert torch.equal(model(images), scores.detach())
    assert sum(recorder.replays for recorder in graphs) == sum(before) + 7
    assert known([*model.parameters()][-1].grad).tolist() == [2.0] * 3


def forget_an_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one that changes the running statistics, or a gradient."""
    run = Recorder.replay

    def replay(recorder: Recorder) -> None:
        recorder.calls.pop()
        run(recorder)

    monkeypatch.setattr(Recorder, "replay", replay)


def read_old_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first batch is right."""
    run, seen = cuda_graphs.CapturedStage.replay_forward, set[int]()

    def replay(stage: Any, images: torch.Tensor) -> torch.Tensor:
        images = stage.inputs if id(stage) in seen else images
        seen.add(id(stage))
        return run(stage, images)

    monkeypatch.setattr(cuda_graphs.CapturedStage, "replay_forward", replay)


def read_old_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they were at the capture: those that begin at zero have changed by the comparison."""
    call, run, weights = torch.func.functional_call, Recorder.replay, set[int]()

    def call_with_copies(part: nn.Module, twins: dict[str, torch.Tensor], inputs: Any) -> Any:
        weights.update(twin.data_ptr() for twin in twins.values())
        return call(part, {name: twin.clone() for name, twin in twins.items()}, inputs)

    def replay(recorder: Recorder) -> None:
        recorder.calls = [
            each for each in recorder.calls
            if each[0] != torch.ops.aten.clone.default or each[1][0].data_ptr() not in weights
        ]  # fmt: skip
        run(recorder)

    monkeypatch.setattr(torch.func, "functional_call", call_with_copies)
    monkeypatch.setattr(Recorder, "replay", replay)


def wait_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch finds it before a capture, and the end of a capture would fail too."""
    modes = list[str]()

    def differentiate(*_: Any) -> Any:
        if modes[-1:] == ["error"]:
            try:
                raise RuntimeError("called a synchronizing CUDA operation\nand more")
            finally:
                raise ValueError("previous error")
        return ()

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(cuda_graphs.CapturedStage, "differentiate", differentiate)


@pytest.mark.parametrize(("break_graphs", "reason"), [
    (forget_an_operation, "a batch of 4 images of 16 x 16 pixels is replayed with another result"),
    (read_old_images, "a batch of 4 images of 16 x 16 pixels is replayed with another result"),
    (read_old_weights, "a batch of 4 images of 16 x 16 pixels is replayed with another result"),
    (wait_for_the_gpu, "the network cannot be captured: called a synchronizing CUDA operation"),
])  # fmt: skip
def test_a_network_whose_graphs_are_wrong_trains_without_them(
    break_graphs: Any, reason: str, tmp_path: Path, graphs: list[Recorder], monkeypatch: Any, capsys: Any
) -> None:
    """To the bit, and one line says why."""
    expected = train(tmp_path, "off", momentum=0.9)
    break_graphs(monkeypatch)
    assert_same(train(tmp_path, "on", momentum=0.9), expected)
    assert capsys.readouterr().out == f"CUDA graphs are off: {reason}\n" and not (tmp_path / "on/capturing-0").exists()


@pytest.mark.parametrize(("error", "problem"), [
    (0.001, ""), (0.1, "a batch of 2 images of 16 x 16 pixels is replayed with another result"),
])  # fmt: skip
def test_a_gpu_that_does_not_repeat_its_bits_may_replay_others(
    error: float, problem: str, graphs: list[Recorder], monkeypatch: Any, tmp_path: Path
) -> None:
    """Kernels that add in any order: no pass is equal to another one, and a graph's may not be far from them."""
    model = registry.build_model(Model(name="resnet10_tiny"), 3, 0).train()
    opened = cuda_graphs.CudaGraphs(model, BatchPreprocessor(CPU), tmp_path / "mark")
    run, passes = opened._pass, list[object]()

    def noisy(forward: Any, *arguments: Any) -> Tensors:
        passes.append(forward)
        factor = 1 + (error if forward == opened._forward else 1e-6 * len(passes))
        return [each * factor if each.is_floating_point() else each for each in run(forward, *arguments)]

    monkeypatch.setattr(opened, "_pass", noisy)
    assert opened.try_capture([(2, 16, 16)], in_stages=False) == problem


def test_an_attempt_that_died_while_it_captured_leaves_graphs_off(
    tmp_path: Path, graphs: list[Recorder], monkeypatch: Any, capsys: Any
) -> None:
    """A GPU that is out of order fails while the mark of the capture is there; the next attempt captures nothing."""

    def fail(*_: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    expected = train(tmp_path, "off")
    (tmp_path / "on").mkdir()
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="illegal memory access"):
        patch.setattr(cuda_graphs.CudaGraphs, "_pass", fail)
        train(tmp_path, "on")
    graphs.clear()
    assert_same(train(tmp_path, "on"), expected)
    mark = tmp_path / "on/capturing-0"
    line = f"an earlier attempt ended while it captured them; without {mark} they are tried again"
    assert capsys.readouterr().out == f"CUDA graphs are off: {line}\n" and not graphs
    mark.unlink()
    assert_same(train(tmp_path, "on"), expected)
    assert "shapes of batch captured" in capsys.readouterr().out and graphs and not mark.exists()


def test_a_lost_loader_process_is_no_fault_of_the_graphs(
    tmp_path: Path, graphs: list[Recorder], monkeypatch: Any
) -> None:
    monkeypatch.setattr(cuda_graphs.CapturedStage, "capture_forward", Mock(side_effect=WorkerLost("killed")))
    with pytest.raises(WorkerLost, match="killed"):
        train(tmp_path, "on")
    assert not (tmp_path / "on/capturing-0").exists()


def test_all_processes_have_graphs_or_none_has(tmp_path: Path, graphs: list[Recorder], in_group: Any) -> None:
    def work(group: ProcessGroup) -> int:
        folder = tmp_path / str(group.rank)
        (folder / "on").mkdir(parents=True)
        if group.rank == 1:
            (folder / "on/capturing-1").touch()
        assert_same(*(train(folder, mode, group=group, momentum=0.9) for mode in ("on", "off")))
        opened_and_compared = 2 * cuda_graphs.COMPARED_BATCHES // 2
        return sum(recorder.replays > opened_and_compared for recorder in graphs)

    assert in_group(2, work) == [0, 0]


def test_captures_are_kept_as_long_as_they_hold(graphs: list[Recorder], tmp_path: Path, capsys: Any) -> None:
    """Over a regroup, for example; not when other shapes are trained, or other layers, or in another mode."""
    model = registry.build_model(Model(name="resnet10_tiny"), 3, 0)
    opened = cuda_graphs.CudaGraphs(model, BatchPreprocessor(CPU), tmp_path / "mark")
    counts = []
    for change, shape in (
        (model.train, (2, 16, 16)), (model.train, (2, 16, 16)), (model.eval, (2, 16, 16)), (model.eval, (2, 24, 24)),
        (lambda: next(model.parameters()).requires_grad_(False), (2, 24, 24)), (lambda: None, (2, 24, 24)),
    ):  # fmt: skip
        opened.capture([shape], change, SINGLE_PROCESS)
        counts.append(len(graphs))
    assert counts == [2, 2, 4, 6, 8, 8] and len(capsys.readouterr().out.splitlines()) == 4


def test_graphs_are_automatic_for_one_process(graphs: list[Recorder], tmp_path: Path, capsys: Any) -> None:
    model = registry.build_model(Model(name="resnet10_tiny"), 3, 0)
    opened = cuda_graphs.CudaGraphs(model, BatchPreprocessor(CPU), tmp_path / "mark", is_automatic=True)
    opened.capture([(2, 16, 16)], model.train, SINGLE_PROCESS)
    assert len(graphs) == 2 and len(opened.stages) == 1
    for _ in range(2):
        opened.capture([(2, 16, 16)], model.train, replace(SINGLE_PROCESS, world_size=2))
    assert not opened.stages and capsys.readouterr().out.splitlines()[1:] == [
        "CUDA graphs are off: they have never run with several processes; graphs='on' uses them there too"
    ]


FOREIGN = "they are automatic for this project's networks only; graphs='on' tries them"


@pytest.mark.parametrize(("graphs", "device", "exact", "compiled", "network", "line"), [
    ("off", "cuda", False, False, "own", None), ("auto", "cpu", False, False, "own", None),
    ("auto", "cuda", False, False, "own", ""), ("on", "cuda", False, False, "own", ""),
    ("auto", "cuda", False, False, "foreign", FOREIGN), ("on", "cuda", False, False, "foreign", ""),
    ("on", "cpu", False, False, "own", "there is no GPU"), ("auto", "cuda", True, False, "foreign", "--exact"),
    ("on", "cuda", True, False, "own", "--exact"), ("on", "cuda", False, True, "own", "the network is compiled"),
])  # fmt: skip
def test_graphs_are_off_where_they_cannot_be(
    graphs: str, device: str, exact: bool, compiled: bool, network: str, line: str | None, tmp_path: Path, capsys: Any
) -> None:
    """`line`: the reason in the log; None where nothing asks for graphs."""
    recipe = replace(make_recipe(make_phase((0, 1), 8, 0.1), model=Model(name="resnet10_tiny", compile=compiled)),
                     graphs=graphs)  # fmt: skip
    preprocessor: Any = SimpleNamespace(device=torch.device(device), compute_dtype=torch.bfloat16, autocast=print)
    model = nn.Linear(1, 1) if network == "foreign" else registry.build_model(Model(name="resnet10_tiny"), 3, 0)
    capture: Any = cuda_graphs.open_graphs(recipe, model, preprocessor, SINGLE_PROCESS, exact, tmp_path)
    assert hasattr(capture, "__self__") == (line == "")
    assert capsys.readouterr().out == (f"CUDA graphs are off: {line}\n" if line else "")
