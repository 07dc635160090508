"""Dropout in a user's network: the same values on any number of processes and after a resume."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.trainer_in_process import open_trainer
from torch import nn

from train.distributed.process_group import ProcessGroup
from train.engine.inputs import seed_dropout
from train.recipe import Model, Optim, Phase
from train.tools.errors import TrainingError


def dropout_net(classes: int) -> nn.Module:
    """Return a network that drops half of its few features, so that other random numbers give another run."""
    features = (nn.Conv2d(3, 8, 8, 8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 4 * 4, 16))
    return nn.Sequential(*features, nn.Dropout(0.5), nn.Linear(16, classes))


def test_dropout_same_on_one_and_two_processes(
    tiny: Any, tiny_data: Path, tmp_path: Path, in_group: Any, mine: Any
) -> None:
    mine.net = dropout_net
    phases = [Phase(epochs=(0, 1), size=32, batch=8, lr=0.5), Phase(epochs=(1, 2), size=48, batch=8, lr=0.1)]
    recipe = tiny(model=Model(name="mine:net", fc_std=0.1), optim=Optim(), phases=phases)

    def work(group: ProcessGroup) -> Any:
        trainer, decoder = open_trainer(recipe, tiny_data, tmp_path / str(group.world_size), group)
        trainer.train(decoder, 0)
        return [values.tolist() for values in trainer.model.parameters()]

    parameters = [torch.cat([torch.tensor(value).flatten() for value in in_group(world, work)[0]]) for world in (1, 2)]
    torch.testing.assert_close(*parameters, rtol=1e-3, atol=1e-5)


def test_seed_dropout_depends_on_seed_step_and_chunk_only() -> None:
    def draw(*key: int) -> tuple[float, ...]:
        seed_dropout(*key)
        return tuple(torch.rand(3).tolist())

    keys = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 10, 1), (0, 1, 101), (0, 110, 1)]
    draws = [draw(*key) for key in keys]
    assert len(set(draws)) == len(keys)
    assert [draw(*key) for key in reversed(keys)] == draws[::-1]


def test_fixed_size_network_trains_at_its_size_only(tiny: Any, tiny_data: Path, tmp_path: Path, mine: Any) -> None:
    mine.positions = lambda classes: nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, classes))
    phases = [Phase(epochs=(0, 1), size=32, batch=8, lr=0.01), Phase(epochs=(1, 2), size=64, batch=8, lr=0.01)]
    model = Model(name="mine:positions", zero_gamma=False)
    trainer, decoder = open_trainer(tiny(model=model, phases=phases[:1]), tiny_data, tmp_path / "own")
    trainer.train(decoder, 0)
    trainer, decoder = open_trainer(tiny(model=model, phases=phases), tiny_data, tmp_path / "other")
    with pytest.raises(TrainingError, match="mine:positions accepts no images of 64 x 64 pixels"):
        trainer.train(decoder, 0)
