"""Batches as each Work asks for them, whoever makes them."""

import io
import itertools
import multiprocessing
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from train.data.index import DataError, Index, load
from train.data.loader import Batch, Images, Work, stream
from train.data.order import random_boxes
from train.data.shapes import MARGIN, rectangle

CPU = torch.device("cpu")
LARGEST = 3 * 8 * 96 * 96
SEED = 7

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than processors here


@pytest.fixture(scope="module")
def images(tiny_data: Path) -> Images:
    """All images, and a "copy of 48 pixels" that is the training set backwards."""
    train = load(tiny_data, "train")
    val = load(tiny_data, "val", train.classes)
    backwards = train.take(np.arange(len(train))[::-1])
    return Images({("train", None): train, ("train", 48): backwards, ("val", None): val}, SEED)


@pytest.fixture(autouse=True)
def no_worker_is_left() -> Iterator[None]:
    yield
    assert multiprocessing.active_children() == []


def works() -> list[Work]:
    """Training and validation of all sizes, batches and epochs, mixed."""
    dice = np.random.default_rng(0)
    found = []
    for number in range(12):
        ids = dice.choice(20, dice.integers(1, 9), replace=False)
        if number % 3 == 2:
            found.append(Work("val", None, ids, (64, 96) if number % 2 else (32, 32), number))
        else:
            size = int(dice.choice([32, 48, 96]))
            found.append(Work("train", 48 if number % 2 else None, ids, (size, size), number, 0.2, number / 8))
    return found


def run(images: Images, asked: list[Work], workers: int) -> list[Batch]:
    return list(stream(images, iter(asked), workers, CPU, LARGEST))


def opened(index: Index, number: int) -> Image.Image:
    return Image.open(io.BytesIO(index.read(number))).convert("RGB")


def assert_near(found: torch.Tensor, expected: Image.Image) -> None:
    assert (np.abs(found.numpy().astype(int) - np.asarray(expected, int))).max() <= 2


def test_a_training_batch_is_what_pil_makes_of_the_drawn_boxes(images: Images) -> None:
    ids, flipped = np.array([3, 0, 19, 7, 42, 8]), set()
    for epoch, size, min_scale in ((0, 32, 0.08), (5, 64, 0.5), (6, 96, 0.9)):
        batch = images[Work("train", None, ids, (size, size), epoch, min_scale)]
        index = images.indexes["train", None]
        assert batch.images.shape == (6, size, size, 3) and batch.images.dtype == torch.uint8
        assert batch.labels.dtype == np.int64 and batch.labels.tolist() == index.labels[ids].tolist()
        boxes, flips = random_boxes(SEED, epoch, ids, index.widths[ids], index.heights[ids], min_scale)
        for row, (top, left, height, width) in enumerate(boxes.tolist()):
            part = opened(index, ids[row]).crop((left, top, left + width, top + height))
            part = part.resize((size, size), Image.Resampling.BILINEAR)
            flipped.add(bool(flips[row]))
            assert_near(batch.images[row], part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flips[row] else part)
    assert flipped == {True, False}


@pytest.mark.parametrize("size", [32, 64, 96])
@pytest.mark.parametrize("rect", [False, True])
def test_a_validation_batch_is_the_middle_of_the_image_made_a_little_larger(
    size: int, rect: bool, images: Images
) -> None:
    index = images.indexes["val", None]
    for number in range(len(index)):
        shape = rectangle(int(index.widths[number]), int(index.heights[number]), size) if rect else (size, size)
        (found,) = images[Work("val", None, np.array([number]), shape)].images
        whole = opened(index, number)
        factor = round(size * MARGIN) / min(whole.size)
        width, height = (round(side * factor) for side in whole.size)
        left, top = (width - shape[1]) // 2, (height - shape[0]) // 2
        whole = whole.resize((width, height), Image.Resampling.BILINEAR)
        assert found.shape == (*shape, 3)
        assert_near(found, whole.crop((left, top, left + shape[1], top + shape[0])))


def single(folder: Path, pixels: Any) -> Images:
    """One image, stored without loss."""
    (folder / "train" / "one").mkdir(parents=True)
    Image.fromarray(pixels).save(folder / "train" / "one" / "x.JPEG", "PNG")
    return Images({("val", None): load(folder, "train")}, 0)


def test_where_nothing_is_resized_the_centre_crop_is_exact(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (73, 101, 3), np.uint8)  # 73 = round(64 x 1.14)
    (found,) = single(tmp_path, pixels)[Work("val", None, np.array([0]), (64, 64))].images
    assert (found.numpy() == pixels[4:68, 18:82]).all()


@pytest.mark.parametrize("size", [(1, 1), (1, 40), (500, 3), (33, 32)])
@pytest.mark.parametrize("min_scale", [None, 0.08])
def test_an_image_of_any_size_fills_any_shape(size: tuple[int, int], min_scale: float | None, tmp_path: Path) -> None:
    pixels = np.full((*size, 3), 77, np.uint8)
    for shape in ((32, 32), (64, 96), (96, 64)):
        (found,) = single(tmp_path / str(shape), pixels)[Work("val", None, np.array([0]), shape, 0, min_scale)].images
        assert found.shape == (*shape, 3) and (found == 77).all()


def test_the_same_work_gives_the_same_pixels_and_another_epoch_or_seed_others(images: Images) -> None:
    ids = np.arange(5)

    def pixels(epoch: int, seed: int = SEED) -> torch.Tensor:
        return Images(images.indexes, seed)[Work("train", None, ids, (32, 32), epoch, 0.08)].images

    assert torch.equal(pixels(3), pixels(3))
    assert not torch.equal(pixels(3), pixels(4)) and not torch.equal(pixels(3), pixels(3, seed=8))


def test_an_image_is_cropped_alike_in_whatever_batch_it_comes(images: Images) -> None:
    together = images[Work("train", None, np.array([4, 9, 2]), (32, 32), 1, 0.08)].images
    alone = images[Work("train", None, np.array([9]), (32, 32), 1, 0.08)].images
    assert torch.equal(together[1], alone[0])


def test_a_work_reads_the_copy_that_it_names(images: Images) -> None:
    full, copy = (images[Work("train", key, np.array([1]), (32, 32), 0, 1.0)] for key in (None, 48))
    assert copy.labels[0] == images.indexes["train", None].labels[-2]
    assert not torch.equal(full.images, copy.images)


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_batches_come_in_order_and_the_same_from_any_number_of_workers(workers: int, images: Images) -> None:
    asked = works()
    got = run(images, asked, workers)
    assert len(got) == len(asked)
    for batch, work in zip(got, asked, strict=True):
        direct = images[work]
        assert torch.equal(batch.images, direct.images) and (batch.labels == direct.labels).all()
        assert (batch.work.split, batch.work.copy, batch.work.shape, batch.work.epoch, batch.work.share) == (
            work.split, work.copy, work.shape, work.epoch, work.share,
        )  # fmt: skip
        assert batch.work.ids.tolist() == work.ids.tolist()


def test_the_same_workers_serve_every_size_batch_and_epoch(images: Images) -> None:
    batches = stream(images, itertools.cycle(works()), 2, CPU, LARGEST)  # also: an endless run is not read to its end
    shapes, workers = set(), set()
    for batch in itertools.islice(batches, 40):
        shapes.add(tuple(batch.images.shape))
        workers |= {one.pid for one in multiprocessing.active_children()}
    assert len(shapes) > 8 and len(workers) == 2
    del batches


def test_a_long_folder_for_temporary_files_is_no_wait_for_ever(
    images: Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_group: Any
) -> None:
    """Workers hand batches over by sockets that lie in it; a socket's path has 107 characters at most."""
    long = tmp_path / ("t" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))

    def work(_: object) -> int:
        return len(list(stream(images, works(), 1, CPU, LARGEST)))

    assert in_group(1, work) == [len(works())]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_file_that_broke_since_is_named_in_one_line(
    workers: int, tiny_data: Path, tmp_path: Path, in_group: Any
) -> None:
    """In a process of its own: an error, the frames it passed and the stream in them hold each other, and workers."""
    shutil.copytree(tiny_data / "train", tmp_path / "train")
    index = load(tmp_path, "train")
    (tmp_path / "train" / str(index.paths[2])).write_bytes(b"no image")
    (tmp_path / "train" / str(index.paths[3])).unlink()
    broken = Images({("train", None): index}, 0)

    def work(_: object) -> list[str]:
        found = []
        for number in (2, 3):
            with pytest.raises(DataError) as caught:
                run(broken, [Work("train", None, np.array([0, number]), (32, 32), 0, 0.5)], workers)
            found.append(str(caught.value))
        return found

    (found,) = in_group(1, work)
    for number, said in zip((2, 3), found, strict=True):
        assert said.startswith(f"{tmp_path}/train/{index.paths[number]}: ") and "\n" not in said


def test_a_worker_that_dies_is_an_error_and_not_a_wait_for_ever(images: Images, in_group: Any) -> None:
    """In a process of its own: torch raises the error wherever that is when the signal comes."""

    def work(_: object) -> str:
        try:
            batches = stream(images, itertools.cycle(works()), 2, CPU, LARGEST)
            next(batches)
            os.kill(multiprocessing.active_children()[0].pid or 0, signal.SIGKILL)
            return f"{len(list(itertools.islice(batches, 200)))} batches"
        except RuntimeError as error:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return str(error)

    (said,) = in_group(1, work)
    assert said.startswith("DataLoader worker")
