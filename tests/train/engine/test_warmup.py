"""The warm-up: every shape once, the model unchanged; compiled networks share weights and checkpoints."""

import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from support.known import known
from support.trainer_in_process import RandomImages, make_phase, make_recipe, make_trainer, open_trainer
from torch import nn

from train.data.loading.loader import Batch
from train.data.order.batch_sampler import DistributedBatchSampler
from train.data.order.work import BatchRequest
from train.distributed import ddp
from train.distributed.process_group import ProcessGroup
from train.engine import run, warmup
from train.engine import trainer as engine_trainer
from train.engine.inputs import IMAGENET_NORMALIZATION, BatchPreprocessor, normalization_of
from train.engine.main import choose_recipe
from train.engine.options import parse_run_options
from train.models import registry
from train.recipe import Comm, Model, Phase
from train.recipe.schedule import Schedule
from train.tools import checkpoint_io
from train.tools.errors import MachineTrouble, TrainingError

CPU = torch.device("cpu")


@pytest.fixture
def model() -> Any:
    return registry.build_model(Model(name="resnet10_tiny"), 10, 0)


@pytest.fixture
def compiled_shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The input shapes that were compiled, by a backend that runs the graph unchanged."""
    shapes: list[tuple[int, ...]] = []

    def backend(graph: Any, inputs: Any) -> Any:
        shapes.append(next(tuple(tensor.shape) for tensor in inputs if tensor.dim() == 4 and tensor.shape[2] > 3))
        return graph.forward

    monkeypatch.setattr(warmup, "COMPILE_BACKEND", backend)
    torch._dynamo.reset()
    return shapes


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float16, 1e-3), (torch.bfloat16, 8e-3)])
def test_normalize_in_one_pass_equals_three_operations(dtype: torch.dtype, tolerance: float) -> None:
    """On a GPU; the tolerance is that of rounding to the type."""
    preprocessor = BatchPreprocessor(CPU)
    preprocessor.compute_dtype = dtype
    pixels = torch.randint(256, (2, 5, 4, 3), dtype=torch.uint8)
    labels = np.arange(2)
    expected, _ = preprocessor.prepare(Batch(pixels, labels, BatchRequest("train", None, labels, (5, 4))))
    normalized = preprocessor.normalize_in_one_pass(pixels.permute(0, 3, 1, 2))
    assert normalized.dtype == dtype and normalized.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(normalized.float(), expected, rtol=tolerance, atol=tolerance)


def test_rank_without_images_of_the_last_validation_goes_on_from_the_checkpoint_before_it(tmp_path: Path) -> None:
    """The set has fewer validation images than the run has processes, so no batch is left for this one."""
    trainer = make_trainer(tmp_path, make_recipe(make_phase((0, 1), 8, 0.1)), RandomImages(train=16), plain=False)
    assert list(trainer.begin_run(trainer.schedule.epochs, iter(()))) == []


def test_warm_up_on_cpu_runs_one_small_batch_and_leaves_the_model_unchanged(model: Any) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    seen: list[tuple[int, ...]] = []
    model.register_forward_pre_hook(lambda _, inputs: seen.append(tuple(inputs[0].shape)))
    shapes = [(4, 32, 32), (3, 64, 64)]
    warmup.warm_up(model, model, shapes, [(4, 32, 48)], BatchPreprocessor(CPU))
    assert seen == [(2, 3, 64, 64)]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.training and all(tensor.grad is None for tensor in model.parameters())


def test_warm_up_compiles_each_training_shape_once(compiled_shapes: Any) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1))
    compiled = warmup.compile_per_shape(model)
    more_than_torchs_default_limit = [(n, 32, 32) for n in range(5, 13)]
    shapes = [(4, 32, 32), (3, 32, 32), (4, 64, 64), *more_than_torchs_default_limit]
    warmup.warm_up(compiled, model, shapes, [], BatchPreprocessor(CPU))
    assert compiled_shapes == [(n, 3, h, w) for n, h, w in shapes]
    for n, h, w in shapes:
        compiled(torch.ones(n, 3, h, w).to(memory_format=torch.channels_last)).sum().backward()
    assert len(compiled_shapes) == len(shapes)


def test_later_shapes_are_warmed_up_by_each_process_alone(in_group: Any) -> None:
    """A sum of gradients that are all 0 would spend the error memory of PowerSGD, and searches take unequal times."""

    def work(group: ProcessGroup) -> Any:
        net, bare_model, preprocessor = nn.Conv2d(3, 2, 3), nn.Identity(), BatchPreprocessor(CPU)
        wrapped = ddp.wrap_ddp(net, Comm())
        for shapes in [[(2, 8, 8)], [(2, 8, 8), (4, 8, 8)]][: 2 - group.rank]:
            warmup.warm_up(wrapped, bare_model, shapes, [], preprocessor)  # its model is another: as a compiled one
        wrapped(torch.full((2, 3, 8, 8), group.rank + 1.0)).sum().backward()
        return known(net.weight.grad).sum().item()

    own_sums = [value * 2 * 6 * 6 * 54 for value in (1.0, 2.0)]  # images, places and weights
    assert in_group(2, work) == [sum(own_sums) / 2] * 2


def test_compile_failure_is_one_line(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no Python.h\nand much more")

    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(TrainingError, match=r"the C\+\+ compiler no-such-compiler is not installed here; install it"):
        warmup.compile_per_shape(model)
    monkeypatch.setattr(warmup, "COMPILE_BACKEND", broken)
    torch._dynamo.reset()
    with pytest.raises(TrainingError, match=r"torch\.compile failed: .*set compile=False to train without it$"):
        warmup.warm_up(warmup.compile_per_shape(model), model, [(2, 32, 32)], [], BatchPreprocessor(CPU))


def test_restore_between_compiled_and_plain_trainers(
    tiny: Any, tiny_data: Any, tmp_path: Any, compiled_shapes: Any
) -> None:
    """A compiled trainer trains two steps, a plain one restores its state."""
    phases = [Phase(epochs=(0, 1), size=32, batch=8, lr=0.01)]

    def trainer(use_compile: bool) -> Any:
        recipe = tiny(phases=phases, model=Model(name="resnet10_tiny", compile=use_compile))
        return open_trainer(recipe, tiny_data, tmp_path / str(use_compile), max_steps=2)

    first_trainer, decoder = trainer(True)
    first_trainer.train(decoder, 0)
    assert compiled_shapes
    state = checkpoint_io.copy_to_cpu(first_trainer.state())
    second_trainer, _ = trainer(False)
    second_trainer.restore(state)
    assert second_trainer.state()["model"].keys() == state["model"].keys()
    assert all(torch.equal(value, state["model"][name]) for name, value in second_trainer.state()["model"].items())


class HalfTallIndex:
    """An index with only widths and heights: half of the images are square, half tall."""

    widths, heights = np.full(40, 100), np.repeat([100, 150], 20)

    def __len__(self) -> int:
        return 40


def test_batch_shapes_of_all_epochs_same_on_all_ranks(tiny: Any) -> None:
    phases = [
        Phase(epochs=(0, 2), size=32, batch=8, lr=0.01),
        Phase(epochs=(2, 3), size=64, batch=16, lr=0.01, rect_val=True),
    ]
    schedule = Schedule(tiny(phases=phases), 50, 2)

    def sampler(rank: int, world: int) -> DistributedBatchSampler:
        return DistributedBatchSampler(schedule, {("val", None): HalfTallIndex()}, 0, rank, world)  # type: ignore[dict-item]

    for rank in (0, 1):
        train_shapes, val_shapes = warmup.batch_shapes(sampler(rank, 2), schedule.epochs)
        assert train_shapes == [(8, 32, 32), (2, 32, 32), (16, 64, 64), (9, 64, 64)]  # 50 = 3 x 16 + 2 = 32 + 2 x 9
        # The rectangle with 10 images on each rank is filled up.
        assert val_shapes == [(8, 32, 32), (16, 96, 64), (16, 64, 64)]
        full_shapes, _ = warmup.batch_shapes(sampler(rank, 2), schedule.epochs, with_partial_steps=False)
        assert full_shapes == [(8, 32, 32), (16, 64, 64)]
    _, val_shapes = warmup.batch_shapes(sampler(0, 1), schedule.epochs[2:])
    assert val_shapes == [(16, 96, 64), (16, 64, 64)]
    assert warmup.image_sizes(sampler(0, 2), schedule.epochs) == {(32, 32), (64, 64), (96, 64)}


@pytest.mark.parametrize(("kernel_search", "is_exact"), [(False, False), (True, False), (True, True)])
def test_kernels_are_searched_only_on_request_for_warmed_shapes_and_never_in_an_exact_run(
    kernel_search: bool, is_exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which kernels are fastest differs from process to process, and their sums differ in the last bits."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", is_exact)
    preprocessor = BatchPreprocessor(CPU, kernel_search=kernel_search)
    preprocessor.warmed_shapes = {(2, 8, 8)}
    for number in (2, 1, 2):
        request = BatchRequest("val", None, np.arange(number), (8, 8))
        batch = Batch(torch.zeros(request.batch_shape, dtype=torch.uint8), np.zeros(number, np.int64), request)
        preprocessor.prepare(batch)
        assert torch.backends.cudnn.benchmark == (kernel_search and number == 2 and not is_exact)


def test_shapes_of_a_later_phase_are_warmed_up_when_it_begins(
    tiny: Any, tiny_data: Any, tmp_path: Any, compiled_shapes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That takes no part of its first step: it is a switch of its first epoch. A phase without new shapes has none.

    Only the largest shape is tried before the first step of all: a GPU may have too little memory for it.
    """
    sizes = (32, 48, 48)
    phases = [Phase(epochs=(n, n + 1), size=size, batch=8, lr=0.01) for n, size in enumerate(sizes)]
    recipe = tiny(phases=phases, model=Model(name="resnet10_tiny", compile=True))
    trainer, decoder = open_trainer(recipe, tiny_data, tmp_path)
    compiled_at = list[tuple[int, int]]()
    warm_up, added_seconds, clock = warmup.warm_up, [0.0], time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + sum(added_seconds))

    def slow_warm_up(*arguments: Any) -> None:
        count = len(compiled_shapes)
        warm_up(*arguments)
        if len(compiled_shapes) > count:
            compiled_at.append((trainer.steps_done, len(compiled_shapes)))
            added_seconds.append(1000.0)

    monkeypatch.setattr(engine_trainer, "warm_up", slow_warm_up)
    trainer.train(decoder, 0)
    assert compiled_at == [(0, 2), (0, 3), (4, 4)]
    assert [shape[0::2] for shape in compiled_shapes] == [(8, 32), (2, 32), (8, 48), (2, 48)]
    first, second, third = (epoch.where for epoch in trainer.history)
    assert second["switches"] > 1000 > max(first["switches"], third["switches"])
    assert max(second["other"], second["steps"], second["waits"]) < 1000
    assert known(trainer.history[1].gap_steps) > 10 and trainer.goodput < 0.5


def test_warm_up_says_what_to_change_when_the_memory_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    class Large(nn.Linear):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 392.00 MiB. GPU 0 has a total ...")

    def warm_up() -> None:
        warmup.warm_up(net, net, [(512, 128, 96)], [], BatchPreprocessor(CPU))

    net, free_bytes = Large(1, 1), 100_000_000
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free_bytes, 16_000_000_000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 15_000_000_000)
    with pytest.raises(TrainingError, match=r"a batch of 2 images of 96 x 128 pixels needs .*: 16.0 GB; lower batch"):
        warm_up()
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 6_000_000_000)
    with pytest.raises(MachineTrouble, match=r"of which other processes use 9\.9 GB; end them"):
        warm_up()


def test_normalization_of_timm_config_else_imagenet() -> None:
    net = torch.nn.Linear(1, 1)
    assert normalization_of(net) == IMAGENET_NORMALIZATION
    net.pretrained_cfg = {"mean": (0.5, 0.5, 0.5), "std": [0.25, 0.25, 0.5]}  # type: ignore[assignment]
    preprocessor = BatchPreprocessor(CPU, normalization=normalization_of(net))
    request = BatchRequest("val", None, np.arange(1), (2, 2))
    image = torch.full(request.batch_shape, 255, dtype=torch.uint8)
    prepared, _ = preprocessor.prepare(Batch(image, np.zeros(1, np.int64), request))
    assert prepared[0, :, 0, 0].tolist() == pytest.approx([2.0, 2.0, 1.0])
    assert str(preprocessor.normalization) == "mean 0.5, 0.5, 0.5, standard deviation 0.25, 0.25, 0.5"
    for config in ({"mean": (0.5,), "std": (0.5,)}, {"mean": None, "std": None}, {}, "vit"):
        net.pretrained_cfg = config  # type: ignore[assignment]
        assert normalization_of(net) == IMAGENET_NORMALIZATION


def test_standby_keeps_the_images_that_it_has_opened_when_its_network_cannot_be_built(
    runs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(run, "Trainer", Mock(side_effect=RuntimeError("no memory")))
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    options = parse_run_options(runs.words(tmp_path / "out", ("--gpus", "1"), None))
    dataset, trainer = run.prepare(options, choose_recipe(options))
    assert len(dataset.train) > 0 and trainer is None and "RuntimeError: no memory" in capsys.readouterr().out
