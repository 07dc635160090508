"""Tests of broken images in training: named, replaced by the next of their class, counted once by all processes."""

import io
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.run_outputs import damage_pixels

from train.data.index.open import DataError, Index, load_index
from train.data.loading.broken_images import BrokenImages
from train.data.loading.loader import Batch, BatchDecoder, BatchStream
from train.data.order.work import BatchRequest
from train.distributed.process_group import read_sum


@pytest.fixture
def index(tiny_data: Path, tmp_path: Path) -> Index:
    shutil.copytree(tiny_data, tmp_path / "data")
    return load_index(tmp_path / "data", "train")


@pytest.mark.parametrize("workers", [0, 2])
def test_next_image_of_its_class_takes_the_place_of_a_broken_one(
    workers: int, index: Index, tiny_data: Path, tmp_path: Path, in_group: Any
) -> None:
    last = int(np.flatnonzero(np.asarray(index.labels) == 0)[-1])
    places = {1: 3, 2: 3, last: 0}  # the next one may be broken too; behind the last follows the first
    shutil.copytree(tiny_data, tmp_path / "repaired")
    for number, other in places.items():
        (tmp_path / "repaired/train" / index.name(number)).write_bytes(index.read(other))
        damage_pixels(Path(index.location(number)))
    repaired = BatchDecoder({("train", None): load_index(tmp_path / "repaired", "train")}, 7)
    decoder = BatchDecoder({("train", None): index}, 7, replaces_broken=True)
    parts = ([0, *places, 0], [2], [last])
    requests = [BatchRequest("train", None, np.array(ids), (32, 32), 5, 0.35) for ids in parts]

    def decode(_: object) -> list[Any]:
        batches = BatchStream(decoder, iter(requests), workers, torch.device("cpu"), 10**6)
        return [(batch.images.numpy().copy(), dict(batch.broken)) for batch in batches]

    (batches,) = in_group(1, decode)
    for (images, _), request in zip(batches, requests, strict=True):
        assert (images == repaired.decode_batch(request).images.numpy()).all(), request.ids
    told = batches[0][1]
    assert list(told) == [1, 2, last] and all("a part of its pixels is lost" in text for text in told.values())
    assert told[2].startswith(index.location(2)) and told[2].endswith(f"; {index.name(3)} takes its place")
    next_class = np.flatnonzero(np.asarray(index.labels) == 1)
    for number in next_class.tolist():
        damage_pixels(Path(index.location(number)))
    with pytest.raises(DataError, match="no other image of its class can be decoded"):
        decoder.decode_batch(BatchRequest("train", None, next_class[:1], (32, 32), 0, 0.5))
    validation = BatchDecoder({("val", None): index}, 7, replaces_broken=True)
    with pytest.raises(DataError, match="a part of its pixels is lost"):  # an accuracy counts each image once
        validation.decode_batch(BatchRequest("val", None, np.array([1]), (32, 32)))


def test_all_processes_count_each_broken_image_once(index: Index, in_group: Any) -> None:
    def count(group: Any) -> tuple[Any, ...]:
        sys.stdout = printed = io.StringIO()  # of this process: the lines of two would mix
        broken = BrokenImages({("train", None): index}, 2, lambda values: read_sum(group, values), print)

        def meet(*numbers: int) -> None:
            request = BatchRequest("train", None, np.arange(3), (32, 32))
            batch = Batch(torch.empty(0), np.arange(3), request, tuple((number, f"is {number}") for number in numbers))
            assert list(broken.watch([batch, batch])) == [batch, batch]

        meet(*((3,), (3, 9))[group.rank])
        broken.agree()
        known = sorted(number for _, _, number in broken.known)
        meet(3)
        assert not broken.new
        broken.agree()
        meet(*[4] * group.rank)
        with pytest.raises(DataError) as caught:
            broken.agree()
        return known, str(caught.value), printed.getvalue()

    results = in_group(2, count)
    assert [known for known, _, _ in results] == [[3, 9]] * 2
    for _, error, text in results:
        assert "broken images replaced so far: 3" in error and "more than --max-bad 2" in error and "\n" not in error
        assert text.count("warning: broken image: is 3\n") == 1
