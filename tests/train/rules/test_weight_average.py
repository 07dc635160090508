"""Rules of averaged weights: TensorFlow's `ExponentialMovingAverage`, and Busbridge et al. 2023 for other batches."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.trainer_in_process import RandomImages, make_phase, make_recipe, make_trainer

from train.engine.trainer import Trainer
from train.recipe.schedule import Schedule

IMAGES = RandomImages(train=12, val=7)


def make_run(folder: Path, **optim: Any) -> Trainer:
    """Return a trainer of two epochs of three steps."""
    return make_trainer(folder, make_recipe(make_phase((0, 2), 4, 0.05), **optim), IMAGES, plain=False)


def network(trainer: Trainer) -> list[np.ndarray[Any, Any]]:
    """Return copies of the parameters and the running statistics of the trained network."""
    tensors = [*trainer.model.parameters(), *trainer.running_statistics.norm_buffers]
    return [tensor.detach().numpy().copy() for tensor in tensors]


def train_recording(trainer: Trainer) -> list[list[np.ndarray[Any, Any]]]:
    """Train to the end. Returns the network before the first step and after each step."""
    networks = [network(trainer)]
    update = trainer.average.update

    def record(step: int) -> None:
        trainer.running_statistics.write_to_norms()
        networks.append(network(trainer))
        update(step)

    trainer.average.update = record  # type: ignore[method-assign]
    trainer.train(IMAGES, workers=0)  # type: ignore[arg-type]
    return networks


def test_average_is_that_of_tensorflow_is_validated_and_leaves_training_alone(tmp_path: Path) -> None:
    """The decay is min(decay, (1 + t) / (10 + t)) for step t: 2/11, 3/12, 4/13, ... and no more than `decay`."""
    decay = 0.3
    plain, averaged = make_run(tmp_path / "plain"), make_run(tmp_path / "averaged", ema=decay)
    plain_networks, networks = train_recording(plain), train_recording(averaged)
    assert len(networks) == 7
    for arrays, plain_arrays in zip(networks, plain_networks, strict=True):
        assert all(np.array_equal(array, other) for array, other in zip(arrays, plain_arrays, strict=True))
    expected = networks[0]
    for step, arrays in enumerate(networks[1:], 1):
        rate = min(decay, (1 + step) / (10 + step))
        expected = [rate * average + (1 - rate) * array for average, array in zip(expected, arrays, strict=True)]
    for average, array in zip(averaged.average.averages, expected, strict=True):
        np.testing.assert_allclose(average.numpy(), array, rtol=1e-6, atol=1e-9)
    losses = [epoch.val_loss for epoch in averaged.history]
    assert [epoch.train_loss for epoch in averaged.history] == [epoch.train_loss for epoch in plain.history]
    assert all(loss != epoch.val_loss for loss, epoch in zip(losses, plain.history, strict=True))
    state = averaged.state()
    assert state["average"].keys() == state["model"].keys() and plain.state()["average"] == {}
    plain.model.load_state_dict(copy.deepcopy(state["average"]))
    plain.running_statistics.begin()
    epoch = plain.schedule.epochs[-1]
    batches = map(IMAGES.decode_batch, plain.sampler.val_requests(epoch)["square"])
    assert plain.validate(epoch, batches)["square"].loss == losses[-1]


@pytest.mark.parametrize(
    ("gpus", "scaling", "decay"), [(2, "linear", 0.81), (1, "linear", 0.9), (4, "sqrt", 0.6561), (4, "none", 0.9)]
)
def test_k_times_the_gpus_raise_the_decay_to_the_power_k(gpus: int, scaling: str, decay: float) -> None:
    """Definition 1.2 of Busbridge et al.: k steps of the nominal batch become one, so do k factors of the decay."""
    recipe = make_recipe(make_phase((0, 1), 1, 0.05), ema=0.9, scaling=scaling)
    assert Schedule(recipe, 12, gpus).ema_decay == pytest.approx(decay)
