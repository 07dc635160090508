"""What the tests of the rules share: the real trainer, in this process, in float64, on images that are only numbers.

Nothing here computes what a rule says should come out; the tests do that, by formulas written out in numpy.
"""

import contextlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch._dynamo  # torch imports it with the first optimizer, which would take each forked rank seconds
from numpy.typing import NDArray
from torch import nn

from train.data.loading.loader import Batch
from train.data.order.batch_sampler import DistributedBatchSampler
from train.data.order.work import BatchRequest
from train.distributed import ddp
from train.distributed.process_group import ProcessGroup
from train.engine.agent_channel import AgentChannel
from train.engine.options import parse_train_options
from train.engine.trainer import Trainer
from train.models import freezing
from train.optim import factory
from train.recipe import Data, Model, Optim, Phase, Recipe
from train.recipe.schedule import Epoch, Schedule

Array = NDArray[np.float64]
ALONE = ProcessGroup(0, 0, 1, 1, torch.device("cpu"))
SIZE = 16  # pixels: the least that a phase may have


@cache
def drawn(number: int, height: int, width: int) -> NDArray[np.uint8]:
    """The pixels of an image: noise, which follows from its number and the shape asked for."""
    return np.random.default_rng([number, height, width]).integers(0, 256, (height, width, 3), np.uint8)


class Pixels:
    """A data set without files. It is asked like `train.data.loading.loader.Images`, and is its own index of validation."""

    def __init__(self, train: int, val: int = 0, classes: int = 3) -> None:
        dice = np.random.default_rng(train + val)
        self.train, self.val, self.classes = train, val, classes
        self.labels = dice.integers(0, classes, max(train, val))
        self.widths, self.heights = dice.integers(100, 500, (2, val))

    def __len__(self) -> int:
        return self.val

    def make(self, work: BatchRequest) -> Batch:
        images = [drawn(number, *work.shape) for number in work.ids.tolist()]
        return Batch(torch.from_numpy(np.stack(images)), self.labels[work.ids], work)

    def numbers(self, ids: Any, size: int = SIZE) -> Array:
        """The same images as `prepare` gives them to a net, [n, 3 h w], for references."""
        images = np.stack([drawn(int(number), size, size) for number in ids])
        return np.asarray(images.transpose(0, 3, 1, 2).reshape(len(images), -1) / 255 - 0.5)


def prepare(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    return batch.images.permute(0, 3, 1, 2).double() / 255 - 0.5, torch.from_numpy(batch.labels)


PLAIN: Any = SimpleNamespace(
    prepare=prepare, autocast=contextlib.nullcontext, score_dtype=torch.float64, compute_dtype=torch.float32
)


def row(epochs: tuple[int, int], batch: int, lr: Any, **more: Any) -> Phase:
    """A phase on the smallest images."""
    return Phase(**{"epochs": epochs, "size": SIZE, "batch": batch, "lr": lr, **more})


def recipe(*rows: Phase, gpus: int = 1, machines: int = 1, seed: int = 0, model: Any = None, **optim: Any) -> Recipe:
    """A recipe of these phases for so many GPUs; other words are the optimizer's."""
    data = Data(name="numbers", root="nowhere", train=1, val=1)
    model = model or Model(name="resnet10_tiny")
    return Recipe(name="rule", data=data, model=model, optim=Optim(**optim), gpus=gpus, machines=machines,
                  phases=rows, seed=seed)  # fmt: skip


def feed(plan: Schedule, pixels: Any, rank: int = 0, world: int = 1) -> DistributedBatchSampler:
    return DistributedBatchSampler(plan, {("val", None): pixels}, plan.recipe.seed, rank, world)


def trainer(
    folder: Path,
    what: Recipe,
    pixels: Pixels,
    net: nn.Module | None = None,
    group: ProcessGroup = ALONE,
    gpus: int = 0,
    plain: bool = True,
) -> Trainer:
    """The trainer of a recipe, of this net instead of the recipe's if one is given; in float64 on plain pixels, or as a
    run has them.
    """
    plan = Schedule(what, pixels.train, gpus or what.nominal_gpus)
    shares = feed(plan, pixels, group.rank, group.world_size)
    one = Trainer(
        parse_train_options(["rule", "--out", str(folder)]), what, group, shares, pixels.classes, AgentChannel()
    )
    if net is not None:
        one.model = one.wrapped_model = net  # type: ignore[assignment]
        one.optimizer, one.freezer = factory.build_optimizer(net, what.optim), freezing.Freezer(net)
    if plain:
        one.model.double()
        one.preprocessor = PLAIN
    if group.world_size > 1:
        one.wrapped_model = ddp.wrap_ddp(one.wrapped_model, what.comm)
    return one


def carry_out(one: Trainer, pixels: Pixels) -> Iterator[tuple[Epoch, int]]:
    """Do the steps of a trainer one by one, from where it stands; tell after each which one it was. Nothing else."""
    for place in range(one.epoch_index, len(one.schedule.epochs)):
        epoch = one.schedule.epochs[place]
        batches = map(pixels.make, one.sampler.train_requests(epoch, one.step))
        for step in range(one.step, epoch.steps):
            one.run_step(epoch, step, batches)
            one.meter.reset()
            one.step = step + 1
            yield epoch, step
        one.epoch_index, one.step = place + 1, 0


def rates(plan: Schedule) -> Array:
    """The rate of every step, by going through them all."""
    return np.array([epoch.lr_at(step) for epoch in plan.epochs for step in range(epoch.steps)])


def linear(classes: int = 3, seed: int = 1) -> nn.Sequential:
    """A softmax classifier of pixels: its gradient can be written down."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE * SIZE, classes)).double()
    generator = torch.Generator().manual_seed(seed)
    for one in net.parameters():
        nn.init.normal_(one, std=0.1, generator=generator)
    return net


def values(net: nn.Module) -> list[Array]:
    """Its parameters, as they are now."""
    return [one.detach().numpy().copy() for one in net.parameters()]


def softmax(scores: Array) -> Array:
    powers = np.exp(scores - scores.max(1, keepdims=True))
    return np.asarray(powers / powers.sum(1, keepdims=True))


def gradient(weight: Array, bias: Array, x: Array, labels: Any) -> list[Array]:
    """Of the mean cross entropy of `linear`, by hand: (p - y) x / n and (p - y) / n."""
    error = softmax(x @ weight.T + bias)
    error[np.arange(len(x)), labels] -= 1
    return [error.T @ x / len(x), error.mean(0)]


def order(seed: int, epoch: int, images: int) -> NDArray[np.int64]:
    """The epoch's shuffle as it is documented: numpy's Philox with the key (seed, epoch)."""
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(images)
