"""A whole step on fake tensors, which have no values: whatever would make the host wait for a GPU raises an error."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.trainer_in_process import RandomImages, make_phase, make_recipe, make_trainer
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from train.engine.trainer import Trainer
from train.optim import factory
from train.recipe import Model

IMAGES = RandomImages(train=12)


def run_fake_steps(folder: Path, **optim: Any) -> Trainer:
    """Make a step of two chunks with a loss scale, and one of one chunk."""
    model = Model(name="resnet10_tiny", zero_gamma=False)
    recipe = make_recipe(make_phase((0, 1), 4, 0.1), gpus=2, model=model, **optim)
    with FakeTensorMode(allow_non_fake_inputs=True):
        trainer = make_trainer(folder, recipe, IMAGES, plain=False)
        trainer.scaler = torch.amp.GradScaler("cpu")
        epoch = trainer.schedule.epochs[0]
        batches = map(IMAGES.decode_batch, trainer.sampler.train_requests(epoch))
        for step in range(2):
            trainer.run_step(epoch, step, batches)
    return trainer


@pytest.fixture(autouse=True)
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Optimizers are fused, as on a GPU. A fake tensor does not change its device in place."""
    monkeypatch.setattr(nn.Module, "to", lambda module, *_, **__: module)
    monkeypatch.setattr(factory, "can_fuse", lambda _: True)


@pytest.mark.parametrize("optim", [
    {"momentum": 0.9, "nesterov": True}, {"name": "lars", "trust": 0.02}, {"name": "lamb", "clip": 1.0},
    {"name": "adamw", "mixup": 0.2, "ema": 0.9},
], ids=lambda optim: optim.get("name", "sgd"))  # fmt: skip
def test_a_step_never_waits_for_the_gpu(optim: Any, tmp_path: Path) -> None:
    trainer = run_fake_steps(tmp_path, **optim)
    assert trainer.meter.steps == 2


def test_a_wait_in_a_step_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    update = factory.update_weights

    def wait(optimizer: Any, *arguments: Any) -> None:
        assert optimizer.param_groups[0]["params"][0].grad.isfinite().all()
        update(optimizer, *arguments)

    monkeypatch.setattr(factory, "update_weights", wait)
    with pytest.raises(DataDependentOutputException):
        run_fake_steps(tmp_path)
