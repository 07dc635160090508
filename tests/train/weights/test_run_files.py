"""The files of a run's network: their description, which of them are written, and where the best weights are found."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.train_records import make_epoch

from train.data.order.center_crop import resized_size
from train.data.order.rect_val import rect_crop_shape
from train.engine.options import parse_keep, parse_run_options
from train.metrics.confusion import Confusion
from train.recipe import Phase
from train.recipe.history import best_epoch
from train.recipe.schedule import Schedule
from train.tools.agent_protocol import checkpoint_folder
from train.tools.records import DamagedRecord, decode
from train.weights import run_files
from train.weights.network_description import Crop, NetworkDescription, parse_metadata
from train.weights.safetensors_file import read_metadata, read_safetensors

CLASSES = ("airplane", "ship")
CONFUSION = Confusion.from_counts(CLASSES, np.array([[3, 1], [0, 2]]))


def test_parse_keep() -> None:
    assert parse_keep("last, best") == parse_keep("best,last") == "best,last" and parse_keep("last") == "last"
    for text in ("best", "", "first", "best;last"):
        with pytest.raises(ValueError, match="is not one of best,last and last; the last network is always kept"):
            parse_keep(text)
    assert parse_run_options(["x", "--out", "y"]).keeps_best
    assert not parse_run_options(["x", "--out", "y", "--keep", "last"]).keeps_best


def test_best_epoch_is_the_latest_of_equals() -> None:
    history = [make_epoch(epoch=number, top1=top1) for number, top1 in enumerate((None, 40.0, 60.0, 60.0, 50.0), 1)]
    best = best_epoch(history)
    assert best is not None and best.epoch == 4
    assert best_epoch(history[:1]) is None and best_epoch([]) is None


class FinishedRun:
    """The end of a run of three epochs of four steps, whose second epoch was the best one."""

    def __init__(self, out: Path, recipe: Any) -> None:
        self.out, self.recipe, self.schedule = out, recipe, Schedule(recipe, 50, 2)
        self.history = [make_epoch(epoch=number, top1=top1) for number, top1 in enumerate((40.0, 60.0, 50.0), 1)]

    def describe(self, epoch: int) -> NetworkDescription:
        return NetworkDescription.of_run(
            self.recipe, CLASSES, epoch, self.schedule.steps_at(epoch, 0), self.history[epoch - 1],
            mean=(0.5, 0.5, 0.5), std=(0.2, 0.2, 0.2),
        )  # fmt: skip

    def write_best(self, epoch: int, attempt: int = 1) -> None:
        folder = checkpoint_folder(self.out, attempt)
        folder.mkdir(parents=True, exist_ok=True)
        write = run_files.best_writer(folder, self.describe(epoch), self.recipe)
        write({"model": {"weight": torch.full((2,), float(epoch))}})

    def publish(self, attempts: Iterable[int] = (1,), confusion: Confusion | None = None) -> Path:
        weights = {"weight": torch.full((2,), 3.0)}
        best = run_files.find_best_weights(self.out, attempts, self.history, self.schedule)
        run_files.publish_network(self.out, weights, best, self.describe(3), self.recipe, confusion)
        return self.out / "network"


@pytest.fixture
def run(tiny: Any, tmp_path: Path) -> FinishedRun:
    return FinishedRun(tmp_path, tiny(phases=[Phase(epochs=(0, 3), size=32, batch=8, lr=0.1)]))


def file_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_publish_network_writes_last_and_best(run: FinishedRun) -> None:
    run.write_best(2)
    folder = run.publish(confusion=CONFUSION)
    expected_names = ["classes.json", "confusion.json", "model-best.safetensors", "model.safetensors"]
    assert file_names(folder) == expected_names
    for name, epoch, top1 in (("model", 3, 50.0), ("model-best", 2, 60.0)):
        path = folder / f"{name}.safetensors"
        assert read_safetensors(path)["weight"].tolist() == [epoch, epoch]
        description, its_recipe = parse_metadata(read_metadata(path), path)
        assert (description.epoch, description.top1, its_recipe) == (epoch, top1, run.recipe)
    run.publish(attempts=())
    assert file_names(folder) == ["classes.json", "model.safetensors"], "files of the earlier run are left"


def test_best_weights_before_the_newest_are_kept_for_a_crash(run: FinishedRun) -> None:
    """A trainer that is killed may have written the newest best weights, but not yet the checkpoint of their step."""
    for epoch in (1, 2, 3):
        run.write_best(epoch)
    names = file_names(checkpoint_folder(run.out, 1))
    assert names == ["best-00000008.safetensors", "best-00000012.safetensors"]


@pytest.mark.parametrize(("attempts", "is_found"), [((3, 2, 1), True), ((3,), False)])
def test_best_weights_are_looked_for_in_the_folders_of_some_attempts(
    attempts: tuple[int, ...], is_found: bool, run: FinishedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run.write_best(2, attempt=1)
    folder = run.publish(attempts)
    assert (folder / "model-best.safetensors").exists() is is_found
    assert ("after epoch 2, are lost" in capsys.readouterr().out) is not is_found
    assert (folder / "model.safetensors").exists()


def test_publish_network_leaves_out_damaged_best_weights(run: FinishedRun) -> None:
    run.write_best(2)
    path = checkpoint_folder(run.out, 1) / "best-00000008.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert not (run.publish() / "model-best.safetensors").exists()


@pytest.mark.parametrize(("tensor", "kind"), [
    (torch.zeros(1, dtype=torch.complex128), "complex128"), (torch.eye(2).to_sparse(), "sparse"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore")  # deprecation warnings of torch
def test_write_weights_that_the_format_cannot_hold_is_one_line(
    tensor: torch.Tensor, kind: str, run: FinishedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run itself is not harmed: its checkpoints can hold such tensors."""
    weights = {"fine": torch.zeros(1), "odd": tensor}
    assert not run_files.write_weights(run.out / "w.safetensors", weights, run.describe(1), run.recipe)
    assert capsys.readouterr().out.startswith("w.safetensors is not written: ")
    assert not list(run.out.iterdir())


KNOWN: Any = {"epoch": 3, "step": 40, "mean": (0.5, 0.4, 0.3), "std": (0.2, 0.2, 0.2), "classes": ["airplane", "ship"]}


def test_of_run_takes_the_view_of_the_validation_or_of_the_last_phase(tiny: Any) -> None:
    phases = [
        Phase(epochs=(0, 1), size=96, batch=8, lr=0.1),
        Phase(epochs=(1, 2), size=200, batch=8, lr=0.1, rect_val=True),
    ]
    rect = NetworkDescription.of_run(tiny(phases=phases), validated=make_epoch(top1=71.5, top5=90.0), **KNOWN)
    assert (rect.crop, rect.image_size, rect.top1, rect.top5) == (Crop.RECT, 192, 71.5, 90.0)
    shape = rect_crop_shape(300, 200, 200)
    assert min(shape) == rect.image_size and min(resized_size((200, 300), shape)) == rect.resize_short_side
    first_epoch = make_epoch(size=96, view="square", top1=80.0)
    best = NetworkDescription.of_run(tiny(phases=phases), validated=first_epoch, **KNOWN)
    assert (best.crop, best.image_size, best.resize_short_side, best.top1) == (Crop.SQUARE, 96, 109, 80.0)
    square = NetworkDescription.of_run(tiny(phases=phases[:1]), validated=None, **KNOWN)
    assert (square.crop, square.image_size, square.resize_short_side, square.top1) == (Crop.SQUARE, 96, 109, None)
    assert (square.model, square.recipe, square.classes) == ("resnet10_tiny", "tiny", ("airplane", "ship"))


def test_parse_metadata_reads_what_was_written_and_refuses_that_of_another_program(tiny: Any) -> None:
    description = NetworkDescription.of_run(tiny(), validated=None, **KNOWN | {"classes": ["\udcff", "b\n"]})
    metadata = description.metadata(tiny())
    assert parse_metadata(metadata, Path()) == (description, tiny())
    for changes in ({"recipe": "{}"}, {"recipe": "{"}, {"imgnet-cluster": "{}"}, {"imgnet-cluster": "7"}, None):
        with pytest.raises(DamagedRecord, match=r"w\.safetensors: ") as caught:
            parse_metadata({"format": "pt"} if changes is None else {**metadata, **changes}, Path("w.safetensors"))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("changes", [
    {"image_size": 10**9}, {"image_size": 0}, {"resize_short_side": -1}, {"std": (1.0, 0.0, 1.0)}, {"classes": ()},
])  # fmt: skip
def test_description_that_fits_no_image_is_refused(changes: dict[str, Any]) -> None:
    """It comes with the network, from machines: an image of a billion pixels a side would fill the memory."""
    values: dict[str, Any] = {
        "recipe": "r", "model": "resnet18", "epoch": 1, "step": 1, "seed": 1, "image_size": 224, "crop": "square",
        "resize_short_side": 256, "mean": (0.5, 0.5, 0.5), "std": (0.2, 0.2, 0.2), "classes": ("cat", "dog"),
    }  # fmt: skip
    decode(NetworkDescription, values)
    with pytest.raises(DamagedRecord):
        decode(NetworkDescription, {**values, **changes})
