"""The warm-up: every shape once, no trace of it; compiled nets share their weights and their checkpoints."""

import contextlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from train.data.loading.dataset import open_dataset
from train.data.loading.loader import Batch, BatchDecoder
from train.data.order.batch_sampler import DistributedBatchSampler
from train.data.order.work import BatchRequest
from train.distributed.process_group import ProcessGroup
from train.engine import trainer as engine_trainer
from train.engine import warmup
from train.engine.agent_channel import AgentChannel
from train.engine.inputs import IMAGENET_NORMALIZATION, BatchPreprocessor, normalization_of
from train.engine.options import parse_train_options
from train.models import registry
from train.recipe import Model, Phase
from train.recipe.schedule import Schedule
from train.tools import checkpoint_io
from train.tools.errors import TrainingError

CPU = torch.device("cpu")


@pytest.fixture
def model() -> Any:
    return registry.build_model(Model(name="resnet10_tiny"), 10, 0)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes that were compiled, by a backend that runs the graph as it is."""
    found: list[tuple[int, ...]] = []

    def backend(graph: Any, inputs: Any) -> Any:
        found.append(next(tuple(one.shape) for one in inputs if one.dim() == 4 and one.shape[2] > 3))
        return graph.forward

    monkeypatch.setattr(warmup, "COMPILE_BACKEND", backend)
    torch._dynamo.reset()
    return found


def test_a_warm_up_leaves_no_trace(model: Any) -> None:
    before = {name: one.clone() for name, one in model.state_dict().items()}
    warmup.warm_up(model, model, [(4, 32, 32), (2, 64, 64)], [(4, 32, 48)], CPU, contextlib.nullcontext)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert model.training and all(one.grad is None for one in model.parameters())


def test_on_a_cpu_one_small_batch_is_enough_unless_it_compiles(model: Any, graphs: Any) -> None:
    seen: list[tuple[int, ...]] = []
    model.register_forward_pre_hook(lambda _, inputs: seen.append(tuple(inputs[0].shape)))
    shapes = [(4, 32, 32), (3, 64, 64)]
    warmup.warm_up(model, model, shapes, [(4, 32, 48)], CPU, contextlib.nullcontext)
    assert seen == [(2, 3, 32, 32)]


def test_a_compiled_net_is_compiled_for_each_training_shape_before_the_clock_and_never_after(
    graphs: Any,
) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1))
    net = warmup.compile_per_shape(model)
    shapes = [(4, 32, 32), (3, 32, 32), (4, 64, 64)] + [(n, 32, 32) for n in range(5, 13)]  # more than torch allows
    warmup.warm_up(net, model, shapes, [], CPU, contextlib.nullcontext)
    assert graphs == [(n, 3, h, w) for n, h, w in shapes]
    for n, h, w in shapes:
        net(torch.ones(n, 3, h, w).to(memory_format=torch.channels_last)).sum().backward()
    assert len(graphs) == len(shapes)


def test_a_compiled_net_computes_the_same_and_keeps_the_names_of_its_state(model: Any, graphs: Any) -> None:
    net = warmup.compile_per_shape(model)
    images = torch.rand(4, 3, 32, 32)
    torch.testing.assert_close(net(images), model(images))
    assert graphs and not any(name.startswith("_orig") for name in model.state_dict())
    assert [id(one) for one in net.parameters()] == [id(one) for one in model.parameters()]


def test_without_a_compiler_it_says_so_in_one_line(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        TrainingError, match="the C\+\+ compiler no-such-compiler is not installed here; install it, or set comp"
    ):
        warmup.compile_per_shape(model)


def test_what_does_not_compile_is_one_line(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no Python.h\nand much more")

    monkeypatch.setattr(warmup, "COMPILE_BACKEND", broken)
    torch._dynamo.reset()
    with pytest.raises(TrainingError, match=r"torch\.compile failed: .*set compile=False to train without it") as caught:
        warmup.warm_up(warmup.compile_per_shape(model), model, [(2, 32, 32)], [], CPU, contextlib.nullcontext)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("first", [True, False])
def test_a_checkpoint_goes_on_compiled_or_not(
    first: bool, tiny: Any, tiny_data: Any, tmp_path: Any, graphs: Any
) -> None:
    """An epoch by one trainer and the same again by another, from its weights: one of the two is compiled."""
    rows = [Phase(epochs=(0, 1), size=32, batch=8, lr=0.01)]

    def trainer(compile: bool, name: str, attempt: int) -> Any:
        made = tiny(phases=rows, model=Model(name="resnet10_tiny", compile=compile))
        options = parse_train_options(["tiny", "--out", str(tmp_path / name), "--attempt", str(attempt)])
        data = open_dataset(made, tiny_data, tiny_data)
        group = ProcessGroup(0, 0, 1, 1, CPU)
        feed = DistributedBatchSampler(Schedule(made, len(data.train), 2, max_steps=2), data.indexes, 0, 0, 1)
        return engine_trainer.Trainer(
            options, made, group, feed, len(data.train.classes), AgentChannel()
        ), BatchDecoder(data.indexes, 0)

    one, images = trainer(first, "one", 1)
    one.train(images, 0)
    assert bool(graphs) is first
    path = checkpoint_io.newest_checkpoint(tmp_path / "one" / "checkpoints" / "000001")
    assert path is not None
    state = checkpoint_io.load_checkpoint(path)
    other, _ = trainer(not first, "two", 1)
    other.restore(state)
    plain, _ = trainer(False, "three", 1)
    assert other.state()["model"].keys() == plain.state()["model"].keys()
    assert all(torch.equal(value, state["model"][name]) for name, value in other.state()["model"].items())
    other.epoch_index, other.step = 0, 0
    other.history.pop()
    other.train(images, 0)
    assert bool(graphs) and other.steps_done == 2


class Tall:
    """An index of which only widths and heights are looked at: one half square, one half tall."""

    widths, heights = np.full(40, 100), np.repeat([100, 150], 20)

    def __len__(self) -> int:
        return 40


def test_the_shapes_of_all_epochs_are_known_and_those_of_training_are_the_same_on_all_processes(tiny: Any) -> None:
    rows = [
        Phase(epochs=(0, 2), size=32, batch=8, lr=0.01),
        Phase(epochs=(2, 3), size=64, batch=16, lr=0.01, rect_val=True),
    ]
    plan = Schedule(tiny(phases=rows), 50, 2)
    found = [
        warmup.batch_shapes(DistributedBatchSampler(plan, {("val", None): Tall()}, 0, r, 2), plan.epochs)
        for r in (0, 1)
    ]  # type: ignore[dict-item]
    train = [(8, 32, 32), (2, 32, 32), (16, 64, 64), (9, 64, 64)]  # 50 = 3 x 16 + 2 = 32 + 2 x 9
    assert found[0][0] == found[1][0] == train
    assert found[0][1] == found[1][1] == [(8, 32, 32), (16, 64, 64)]  # rests, and rectangles of 10, are not searched
    assert warmup.batch_shapes(DistributedBatchSampler(plan, {("val", None): Tall()}, 0, 0, 1), plan.epochs[2:])[1] == [  # type: ignore[dict-item]
        (16, 96, 64), (16, 64, 64),
    ]  # fmt: skip
    assert warmup.image_sizes(DistributedBatchSampler(plan, {("val", None): Tall()}, 0, 0, 2), plan.epochs) == {
        (32, 32),
        (64, 64),
        (96, 64),
    }  # type: ignore[dict-item]


def test_the_shapes_of_rectangular_steps_are_those_that_may_come(tiny: Any) -> None:
    """A full step may have any shape between the extremes of the images; the last has the shape of their mean."""
    rows = [Phase(epochs=(0, 2), size=64, batch=8, lr=0.01, rect_train=True)]
    plan = Schedule(tiny(phases=rows), 50, 2)
    wide = SimpleNamespace(widths=np.array([400, 300] * 25), heights=np.full(50, 300))
    feed = DistributedBatchSampler(plan, {("train", None): wide, ("val", None): Tall()}, 0, 0, 1)  # type: ignore[dict-item]
    assert warmup.batch_shapes(feed, plan.epochs)[0] == [(8, 64, 64), (8, 56, 72), (2, 56, 72)]
    come = {(len(work.ids), *work.shape) for epoch in plan.epochs for work in feed.train_requests(epoch)}
    assert come == {(8, 64, 64), (8, 56, 72), (2, 56, 72)}


def test_kernels_are_searched_for_shapes_that_were_warmed_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    inputs = BatchPreprocessor(CPU)
    inputs.warmed_shapes = {(2, 8, 8)}
    for number, searched in ((2, True), (1, False), (2, True)):
        work = BatchRequest("val", None, np.arange(number), (8, 8))
        batch = Batch(torch.zeros(work.batch_shape, dtype=torch.uint8), np.zeros(number, np.int64), work)
        inputs.prepare(batch)
        assert torch.backends.cudnn.benchmark is searched


def test_pixels_are_normalised_as_a_library_s_configuration_says_and_else_as_imagenet_s() -> None:
    net = torch.nn.Linear(1, 1)
    assert normalization_of(net) == IMAGENET_NORMALIZATION
    net.pretrained_cfg = {"mean": (0.5, 0.5, 0.5), "std": [0.25, 0.25, 0.5]}  # type: ignore[assignment]
    inputs = BatchPreprocessor(CPU, normalization=normalization_of(net))
    work = BatchRequest("val", None, np.arange(1), (2, 2))
    image = torch.full(work.batch_shape, 255, dtype=torch.uint8)
    prepared, _ = inputs.prepare(Batch(image, np.zeros(1, np.int64), work))
    assert prepared[0, :, 0, 0].tolist() == pytest.approx([2.0, 2.0, 1.0])
    assert str(inputs.normalization) == "mean 0.5, 0.5, 0.5, standard deviation 0.25, 0.25, 0.5"
    for odd in ({"mean": (0.5,), "std": (0.5,)}, {"mean": None, "std": None}, {}, "vit"):
        net.pretrained_cfg = odd  # type: ignore[assignment]
        assert normalization_of(net) == IMAGENET_NORMALIZATION
