"""Tests of broken images in training: named, replaced by the next of their class, counted once by all processes."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.run_outputs import damage_pixels

from train.data.decode import Pixels
from train.data.index.open import DataError, Index, load_index
from train.data.loading import crop
from train.data.loading.broken_images import BrokenImages
from train.data.loading.loader import Batch, BatchDecoder, stream_batches
from train.data.order.rng import random_boxes
from train.data.order.work import BatchRequest
from train.distributed.process_group import sum_from_cpu


@pytest.fixture
def index(tiny_data: Path, tmp_path: Path) -> Index:
    """The training images of a set of its own."""
    shutil.copytree(tiny_data, tmp_path / "data")
    return load_index(tmp_path / "data", "train")


@pytest.mark.parametrize("workers", [0, 2])
def test_next_image_of_its_class_takes_the_place_of_a_broken_one(workers: int, index: Index, in_group: Any) -> None:
    last, next_class = np.flatnonzero(np.asarray(index.labels) == 0)[-1], np.flatnonzero(np.asarray(index.labels) == 1)
    for number in (1, 2, int(last)):
        damage_pixels(Path(index.location(number)))
    pairs = {1: 3, 2: 3, int(last): 0, 0: 0}  # the next one may be broken too; behind the last follows the first
    decoder = BatchDecoder({("train", None): index}, 7, replaces_broken=True)
    requests = [
        BatchRequest("train", None, np.array(ids), (32, 32), 5, 0.35) for ids in ([0, *pairs], [2], [int(last)])
    ]

    def decode(_: object) -> list[Any]:
        batches = stream_batches(decoder, iter(requests), workers, torch.device("cpu"), 10**6)
        return [(batch.request.ids.tolist(), batch.images.numpy().copy(), dict(batch.broken)) for batch in batches]

    def expected(number: int) -> Pixels:
        other = np.array([pairs[number]])
        boxes, mirrored = random_boxes(7, 5, np.array([number]), index.widths[other], index.heights[other], 0.35)
        size = int(index.heights[other[0]]), int(index.widths[other[0]])
        out = torch.empty(1, 32, 32, 3, dtype=torch.uint8)
        box = tuple(boxes[0].tolist())
        crop.crop_and_resize(index.read(int(other[0])), size, box, bool(mirrored[0]), crop.image_views(out)[0])
        return out[0].numpy()

    (batches,) = in_group(1, decode)
    for ids, images, _ in batches:
        for number, pixels in zip(ids, images, strict=True):
            assert (pixels == expected(number)).all(), number
    told = batches[0][2]
    assert list(told) == [1, 2, int(last)] and all("a part of its pixels is lost" in text for text in told.values())
    assert told[2].startswith(index.location(2)) and told[2].endswith(f"; {index.name(3)} takes its place")
    for number in next_class.tolist():
        damage_pixels(Path(index.location(number)))
    with pytest.raises(DataError, match="no other image of its class can be decoded"):
        decoder.decode_batch(BatchRequest("train", None, next_class[:1], (32, 32), 0, 0.5))
    validation = BatchDecoder({("val", None): index}, 7, replaces_broken=True)
    with pytest.raises(DataError, match="a part of its pixels is lost"):  # an accuracy counts each image once
        validation.decode_batch(BatchRequest("val", None, np.array([1]), (32, 32)))


def test_all_processes_count_each_broken_image_once(index: Index, in_group: Any, capfd: Any) -> None:
    def count(group: Any) -> tuple[Any, ...]:
        broken = BrokenImages({("train", None): index}, 2, lambda values: sum_from_cpu(group, values), print)

        def meet(*numbers: int) -> None:
            request = BatchRequest("train", None, np.arange(3), (32, 32))
            batch = Batch(torch.empty(0), np.arange(3), request, tuple((number, f"is {number}") for number in numbers))
            assert list(broken.watch([batch, batch])) == [batch, batch]

        meet(*((3,), (3, 9))[group.rank])
        broken.agree()
        known = sorted(number for _, _, number in broken.known)
        meet(3)
        broken.agree()
        assert not broken.new
        if group.rank:
            meet(4)
        try:
            broken.agree()
        except DataError as error:
            return known, str(error)
        return known, ""

    results = in_group(2, count)
    assert [known for known, _ in results] == [[3, 9]] * 2
    for _, error in results:
        assert "broken images replaced so far: 3" in error and "more than --max-bad 2" in error and "\n" not in error
    assert capfd.readouterr().out.count("warning: broken image: is 3\n") == 2  # one of each process
