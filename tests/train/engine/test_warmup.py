"""The warm-up: every shape once, the model unchanged; compiled networks share weights and checkpoints."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.trainer_in_process import RandomImages, make_phase, make_recipe, make_trainer
from torch import nn

from train.data.loading.loader import Batch
from train.data.order.batch_sampler import DistributedBatchSampler
from train.data.order.work import BatchRequest
from train.engine import warmup
from train.engine.inputs import IMAGENET_NORMALIZATION, BatchPreprocessor, normalization_of
from train.models import registry
from train.recipe import Model, Phase
from train.recipe.schedule import Schedule
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
