"""The real trainer in the test's own process, in float64, on images that are random numbers or files.

Nothing here computes what a rule prescribes; the tests do that, by formulas written out in numpy.
"""

import contextlib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch._dynamo  # torch imports it with the first optimizer, which would take each forked rank seconds
from numpy.typing import NDArray
from torch import nn

from train.data.loading.dataset import open_dataset
from train.data.loading.loader import Batch, BatchDecoder
from train.data.order.batch_sampler import DistributedBatchSampler
from train.data.order.work import BatchRequest
from train.distributed import ddp
from train.distributed.batchnorm import RunningStatistics
from train.distributed.process_group import ProcessGroup
from train.engine.agent_channel import AgentChannel
from train.engine.inputs import Normalization
from train.engine.options import parse_run_options
from train.engine.trainer import Trainer
from train.models import freezing
from train.optim import factory
from train.recipe import Data, Model, Optim, Phase, Recipe
from train.recipe.schedule import Epoch, Schedule

Array = NDArray[np.float64]
SINGLE_PROCESS = ProcessGroup(0, 0, 1, 1, torch.device("cpu"))
SIZE = 16  # pixels: the smallest that a phase may have


@cache
def random_image(image_id: int, height: int, width: int) -> NDArray[np.uint8]:
    """Return an image [height, width, 3] of noise that depends on its id and shape only."""
    return np.random.default_rng([image_id, height, width]).integers(0, 256, (height, width, 3), np.uint8)


class RandomImages:
    """A data set without files. It stands in for `BatchDecoder` and for the index of the validation images."""

    def __init__(self, train: int, val: int = 0, classes: int = 3) -> None:
        generator = np.random.default_rng(train + val)
        self.train, self.val, self.classes = train, val, classes
        self.labels = generator.integers(0, classes, max(train, val))
        self.widths, self.heights = generator.integers(100, 500, (2, val))

    def __len__(self) -> int:
        return self.val

    def decode_batch(self, request: BatchRequest) -> Batch:
        images = [random_image(image_id, *request.shape) for image_id in request.ids.tolist()]
        return Batch(torch.from_numpy(np.stack(images)), self.labels[request.ids], request)

    def inputs(self, ids: Any, size: int = SIZE) -> Array:
        """Return the images as `prepare` gives them to a network, flattened to [n, 3 h w], for references."""
        images = np.stack([random_image(int(image_id), size, size) for image_id in ids])
        return np.asarray(images.transpose(0, 3, 1, 2).reshape(len(images), -1) / 255 - 0.5)


def prepare(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    return batch.images.permute(0, 3, 1, 2).double() / 255 - 0.5, torch.from_numpy(batch.labels)


def class_names(count: int) -> tuple[str, ...]:
    return tuple(f"class {number}" for number in range(count))


# Stands in for `BatchPreprocessor`: float64, no normalization but to [-0.5, 0.5].
PLAIN_PREPROCESSOR: Any = SimpleNamespace(
    prepare=prepare,
    autocast=contextlib.nullcontext,
    score_dtype=torch.float64,
    compute_dtype=torch.float32,
    normalization=Normalization((0.5, 0.5, 0.5), (1.0, 1.0, 1.0)),
)


def make_phase(epochs: tuple[int, int], batch: int, lr: Any, **more: Any) -> Phase:
    return Phase(**{"epochs": epochs, "size": SIZE, "batch": batch, "lr": lr, **more})


def make_recipe(
    *phases: Phase, gpus: int = 1, machines: int = 1, seed: int = 0, model: Any = None, **optim: Any
) -> Recipe:
    """Return a recipe of these phases for `gpus` GPUs. Further arguments are those of `Optim`."""
    return Recipe(
        name="rule",
        data=Data(name="numbers", root="nowhere", train=1, val=1),
        model=model or Model(name="resnet10_tiny"),
        optim=Optim(**optim),
        gpus=gpus,
        machines=machines,
        phases=phases,
        seed=seed,
    )


def make_sampler(schedule: Schedule, images: Any, rank: int = 0, world: int = 1) -> DistributedBatchSampler:
    return DistributedBatchSampler(schedule, {("val", None): images}, schedule.recipe.seed, rank, world)


def make_trainer(
    folder: Path,
    recipe: Recipe,
    images: RandomImages,
    net: nn.Module | None = None,
    group: ProcessGroup = SINGLE_PROCESS,
    gpus: int = 0,
    plain: bool = True,
) -> Trainer:
    """Return the trainer of a recipe.

    `net` replaces the recipe's network. With `plain` it computes in float64 on plain pixels, else as a run does.
    """
    schedule = Schedule(recipe, images.train, gpus or recipe.nominal_gpus)
    sampler = make_sampler(schedule, images, group.rank, group.world_size)
    options = parse_run_options(["rule", "--out", str(folder)])
    trainer = Trainer(options, recipe, group, sampler, class_names(images.classes), AgentChannel())
    if net is not None:
        trainer.model = trainer.wrapped_model = net
        trainer.optimizer = factory.build_optimizer(net, recipe.optim)
        trainer.freezer = freezing.Freezer(net)
    if plain:
        trainer.model.double()
        trainer.preprocessor = PLAIN_PREPROCESSOR
    if net is not None:
        trainer.running_statistics = RunningStatistics(group, net)
    trainer.running_statistics.begin()
    if group.world_size > 1:
        trainer.wrapped_model = ddp.wrap_ddp(trainer.wrapped_model, recipe.comm, trainer.preprocessor.compute_dtype)
    return trainer


def open_trainer(
    recipe: Recipe, data: Path, out: Path, group: ProcessGroup = SINGLE_PROCESS, max_steps: int | None = None
) -> tuple[Trainer, BatchDecoder]:
    """Return the trainer of a recipe for two GPUs on image files, as a run has it, and what decodes its batches."""
    dataset = open_dataset(recipe, data, data)
    schedule = Schedule(recipe, len(dataset.train), 2, max_steps=max_steps)
    sampler = DistributedBatchSampler(schedule, dataset.indexes, 0, group.rank, group.world_size)
    options = parse_run_options(["tiny", "--out", str(out)])
    trainer = Trainer(options, recipe, group, sampler, dataset.train.classes, AgentChannel())
    return trainer, BatchDecoder(dataset.indexes, 0, recipe.transform)


def run_steps(trainer: Trainer, images: RandomImages) -> Iterator[tuple[Epoch, int]]:
    """Run a trainer's remaining steps, and nothing else; yield (epoch, step) after each."""
    for epoch_index in range(trainer.epoch_index, len(trainer.schedule.epochs)):
        epoch = trainer.schedule.epochs[epoch_index]
        batches = map(images.decode_batch, trainer.sampler.train_requests(epoch, trainer.step))
        for step in range(trainer.step, epoch.steps):
            trainer.run_step(epoch, step, batches)
            trainer.meter.reset()
            trainer.step = step + 1
            yield epoch, step
        trainer.epoch_index, trainer.step = epoch_index + 1, 0


def learning_rates(schedule: Schedule) -> Array:
    return np.array([epoch.lr_at(step) for epoch in schedule.epochs for step in range(epoch.steps)])


def linear_classifier(classes: int = 3, seed: int = 1) -> nn.Sequential:
    """Return a linear softmax classifier of pixels in float64. `cross_entropy_gradient` is its gradient."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE * SIZE, classes)).double()
    generator = torch.Generator().manual_seed(seed)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.1, generator=generator)
    return net


def parameter_values(net: nn.Module) -> list[Array]:
    return [parameter.detach().numpy().copy() for parameter in net.parameters()]


def softmax(scores: Array) -> Array:
    powers = np.exp(scores - scores.max(1, keepdims=True))
    return np.asarray(powers / powers.sum(1, keepdims=True))


def cross_entropy_gradient(weights: Sequence[Array], x: Array, labels: Any) -> list[Array]:
    """Return the gradient of `linear_classifier`'s mean cross entropy: (p - y) x / n and (p - y) / n."""
    weight, bias = weights
    error = softmax(x @ weight.T + bias)
    error[np.arange(len(x)), labels] -= 1
    return [error.T @ x / len(x), error.mean(0)]


def epoch_permutation(seed: int, epoch: int, images: int) -> NDArray[np.int64]:
    """Return an epoch's order of images as documented: numpy's Philox with the key (seed, epoch)."""
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(images)
