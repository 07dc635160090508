"""Thumbnails of validation images: few, small, of every shape, and never what a run fails of."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support.report_reader import draw_val

from train.data.index.open import load_index
from train.data.packing.pack import pack_set
from train.metrics import thumbnails


def test_images_are_few_small_and_of_every_shape(tmp_path: Path) -> None:
    shapes = ((600, 400), (400, 600), (500, 500), (4000, 40))
    thumbnails.write_thumbnails(
        load_index(draw_val(tmp_path / "data", "a", "b", "c", sizes=shapes), "val"), tmp_path, 1
    )
    found = thumbnails.read_thumbnails(tmp_path)
    assert len(found) == 6 and found[0]["size"] == [400, 600] and found[-1]["size"] == [4000, 40]
    assert {one["label"] for one in found} <= {"a", "b", "c"}
    for one in found:
        with Image.open(io.BytesIO(one["jpeg"])) as image:
            assert list(image.size) == one["shown"] and max(image.size) == thumbnails.THUMBNAIL_PIXELS
            assert image.size[0] / image.size[1] == pytest.approx(one["size"][0] / one["size"][1], rel=0.2)
    assert (tmp_path / "logs/val-000001.json").stat().st_size < 60_000


def test_they_come_from_a_packed_set_too_and_of_few_images_all(tmp_path: Path) -> None:
    pack_set(
        draw_val(tmp_path / "data", "a", split="train") and draw_val(tmp_path / "data", "a"),
        {None: tmp_path / "packed"},
    )
    thumbnails.write_thumbnails(load_index(tmp_path / "packed", "val"), tmp_path, 7)
    assert [one["size"] for one in thumbnails.read_thumbnails(tmp_path)] == [[48, 80], [60, 60], [90, 60]]


def test_a_broken_image_or_a_full_disk_is_told_and_no_more(tmp_path: Path, capsys: Any) -> None:
    index = load_index(draw_val(tmp_path / "data", "a"), "val")
    (tmp_path / "logs").write_text("in the way")
    thumbnails.write_thumbnails(index, tmp_path, 1)
    (tmp_path / "logs").unlink()
    (tmp_path / "data/val/a/48x80.JPEG").write_bytes(b"no image")
    thumbnails.write_thumbnails(index, tmp_path, 1)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2 and all(line.startswith("no thumbnails of validation images: ") for line in said)
    assert thumbnails.read_thumbnails(tmp_path) == []


def test_the_first_attempt_that_could_is_shown(tmp_path: Path) -> None:
    thumbnails.write_thumbnails(load_index(draw_val(tmp_path / "data", "a"), "val"), tmp_path, 2)
    thumbnails.write_thumbnails(load_index(draw_val(tmp_path / "other", "b"), "val"), tmp_path, 3)
    (tmp_path / "logs/val-000001.json").write_text(json.dumps([{"jpeg": 1}]))
    assert {one["label"] for one in thumbnails.read_thumbnails(tmp_path)} == {"a"}
