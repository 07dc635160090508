"""The network that a run leaves: the last weights, the best ones, the classes, and who was taken for whom."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from train.evaluation.trained_network import open_trained
from train.metrics.confusion import PICTURED_PAIRS, Confusion
from train.metrics.thumbnails import read_class_thumbnails
from train.recipe import Phase
from train.recipe.history import EpochResult, best_epoch
from train.tools import checkpoint_io
from train.tools.records import decode, read_record
from train.weights.network_description import NetworkDescription

pytestmark = pytest.mark.rehearsal  # whole processes, which take long

# After two epochs that learn, the last one has a learning rate at which everything is forgotten.
PHASES = [
    Phase(epochs=(0, 2), size=32, batch=8, lr=0.02, min_scale=0.5),
    Phase(epochs=(2, 3), size=32, batch=8, lr=20.0, min_scale=0.5),
]


def epochs_of(out: Path) -> list[EpochResult]:
    return decode(list[EpochResult], json.loads((out / "result.json").read_text())["epochs"])


@pytest.fixture(scope="module")
def forgetful(runs: Any, tiny: Any) -> Path:
    """A run of two processes whose best network is not its last."""
    out: Path = runs.folder / "forgetful"
    path = runs.recipe(tiny(name="forgetful", phases=PHASES))
    runs.run(out, "--gpus", "2", world=2, recipe=path)
    return out


def test_run_leaves_its_last_weights_and_its_classes(forgetful: Path, tiny_data: Path) -> None:
    trained = open_trained(forgetful / "network" / "model.safetensors")
    checkpoint = checkpoint_io.newest_checkpoint(forgetful / "checkpoints" / "000001")
    assert checkpoint and open_trained(checkpoint).description == trained.description
    expected = checkpoint_io.load_checkpoint(checkpoint)["model"]
    assert trained.weights.keys() == expected.keys()
    assert all(torch.equal(trained.weights[name], expected[name]) for name in expected)
    classes = tuple(sorted(path.name for path in (tiny_data / "train").iterdir() if path.is_dir()))
    description = read_record(forgetful / "network" / "classes.json", NetworkDescription)
    assert description == trained.description and trained.description.classes == classes
    last = epochs_of(forgetful)[-1]
    assert (trained.description.epoch, trained.description.top1) == (3, last.top1)


def test_run_leaves_the_weights_of_the_best_validation(forgetful: Path) -> None:
    epochs = epochs_of(forgetful)
    best = best_epoch(epochs)
    assert best is not None and best is not epochs[-1], epochs
    trained = open_trained(forgetful / "network" / "model-best.safetensors")
    assert (trained.description.epoch, trained.description.top1) == (best.epoch, best.top1)
    assert trained.description.step == sum(epoch.steps for epoch in epochs[: best.epoch])
    last = open_trained(forgetful / "network" / "model.safetensors")
    assert not torch.equal(trained.weights["fc.weight"], last.weights["fc.weight"])


def test_run_counts_the_last_validation_by_class(forgetful: Path) -> None:
    confusion = read_record(forgetful / "network" / "confusion.json", Confusion)
    last = epochs_of(forgetful)[-1]
    assert confusion is not None and sum(confusion.images) == last.val_images == 20
    assert 100 * sum(confusion.right) / 20 == pytest.approx(last.top1)
    assert sum(images for _, _, images in confusion.pairs) == 20 - sum(confusion.right)
    pictured = {thumbnail.label for thumbnail in read_class_thumbnails(forgetful)}
    assert pictured == {confusion.classes[label] for label in confusion.confused_labels(PICTURED_PAIRS)} != set()


def test_run_with_keep_last_leaves_one_network(runs: Any, tiny: Any) -> None:
    out = runs.folder / "keeps-last"
    path = runs.recipe(tiny(name="keeps-last", phases=PHASES))
    runs.run(out, "--gpus", "2", "--keep", "last", recipe=path)
    names = sorted(file.name for file in (out / "network").iterdir())
    assert names == ["classes.json", "confusion.json", "model.safetensors"]
    assert not list((out / "checkpoints/000001").glob("best-*"))
