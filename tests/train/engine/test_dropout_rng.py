"""Networks that drop out, of somebody's own: the same draws on any number of processes and after a resume."""

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from train.data.loading.dataset import open_dataset
from train.data.loading.loader import BatchDecoder
from train.data.order.batch_sampler import DistributedBatchSampler
from train.distributed.process_group import ProcessGroup
from train.engine import trainer
from train.engine.agent_channel import AgentChannel
from train.engine.inputs import seed_dropout
from train.engine.options import parse_train_options
from train.optim import factory
from train.recipe import Model, Optim, Phase
from train.recipe.schedule import Schedule
from train.tools.errors import TrainingError


def net(classes: int) -> nn.Module:
    """Half of its few features are dropped: other draws are another run."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 8, 8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 4 * 4, 16),
        nn.Dropout(0.5),
        nn.Linear(16, classes),
    )


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("mine")
    module.net = net  # type: ignore[attr-defined]
    module.positions = lambda classes: nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, classes))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mine", module)
    factory.build_optimizer(nn.Linear(1, 1), Optim())  # what that imports is imported before the fork


def trained(recipe: Any, data: Path, out: Path, group: ProcessGroup) -> trainer.Trainer:
    found = open_dataset(recipe, data, data)
    feed = DistributedBatchSampler(
        Schedule(recipe, len(found.train), 2), found.indexes, 0, group.rank, group.world_size
    )
    one = trainer.Trainer(
        parse_train_options(["x", "--out", str(out)]), recipe, group, feed, len(found.train.classes), AgentChannel()
    )
    one.train(BatchDecoder(found.indexes, 0), 0)
    return one


@pytest.mark.usefixtures("mine")
def test_one_process_and_two_drop_out_the_same(tiny: Any, tiny_data: Path, tmp_path: Path, in_group: Any) -> None:
    phases = [Phase(epochs=(0, 1), size=32, batch=8, lr=0.5), Phase(epochs=(1, 2), size=48, batch=8, lr=0.1)]
    recipe = tiny(model=Model(name="mine:net", fc_std=0.1), optim=Optim(), phases=phases)

    def work(group: ProcessGroup) -> Any:
        model = trained(recipe, tiny_data, tmp_path / str(group.world_size), group).model
        return [one.tolist() for one in model.parameters()]

    found = [torch.cat([torch.tensor(one).flatten() for one in in_group(world, work)[0]]) for world in (1, 2)]
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-5)


def test_draws_depend_on_seed_step_and_chunk_only() -> None:
    def drawn(*place: int) -> tuple[float, ...]:
        seed_dropout(*place)
        return tuple(torch.rand(3).tolist())

    places = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 10, 1), (0, 1, 101), (0, 110, 1)]
    first = [drawn(*place) for place in places]
    assert len(set(first)) == len(places)
    assert [drawn(*place) for place in reversed(places)] == first[::-1]


@pytest.mark.usefixtures("mine")
def test_a_network_that_is_bound_to_its_size_trains_at_it_and_at_no_other(
    tiny: Any, tiny_data: Path, tmp_path: Path
) -> None:
    group = ProcessGroup(0, 0, 1, 1, torch.device("cpu"))
    rows = [Phase(epochs=(0, 1), size=32, batch=8, lr=0.01), Phase(epochs=(1, 2), size=64, batch=8, lr=0.01)]
    model = Model(name="mine:positions", zero_gamma=False)
    trained(tiny(model=model, phases=rows[:1]), tiny_data, tmp_path / "own", group)
    with pytest.raises(TrainingError, match="mine:positions takes no images of 64 x 64 pixels"):
        trained(tiny(model=model, phases=rows), tiny_data, tmp_path / "other", group)
