"""The network that a run leaves: the last weights, the best ones, the classes, and who was taken for whom."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from train.inference.trained_network import open_trained
from train.metrics.confusion import PICTURED_PAIRS, Confusion
from train.metrics.thumbnails import read_class_thumbnails
from train.recipe import Phase
from train.recipe.history import EpochResult, best_epoch
from train.tools import checkpoint_io
from train.tools.agent_protocol import newest_intact_checkpoint
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
    out: Path = runs.folder / "forgetful"
    path = runs.recipe(tiny(name="forgetful", phases=PHASES))
    runs.run(out, "--gpus", "2", world=2, recipe=path)
    return out


def test_run_leaves_its_last_and_its_best_weights(forgetful: Path, tiny_data: Path) -> None:
    epochs = epochs_of(forgetful)
    best, last = best_epoch(epochs), epochs[-1]
    assert best is not None and best is not last, epochs
    last_network, best_network = (
        open_trained(forgetful / "network" / f"{name}.safetensors") for name in ("model", "model-best")
    )
    checkpoint = newest_intact_checkpoint(forgetful / "checkpoints" / "000001")
    assert checkpoint is not None
    expected = checkpoint_io.load_checkpoint(checkpoint)["model"]
    assert last_network.weights.keys() == expected.keys()
    assert all(torch.equal(last_network.weights[name], expected[name]) for name in expected)
    assert not torch.equal(best_network.weights["fc.weight"], expected["fc.weight"])
    for description, epoch in ((last_network.description, last), (best_network.description, best)):
        steps = sum(each.steps for each in epochs[: epoch.epoch])
        assert (description.epoch, description.top1, description.step) == (epoch.epoch, epoch.top1, steps)
        assert description.classes == tuple(sorted(path.name for path in (tiny_data / "train").glob("*/")))
    classes_file = read_record(forgetful / "network" / "classes.json", NetworkDescription)
    assert classes_file == last_network.description == open_trained(checkpoint).description


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
