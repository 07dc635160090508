"""Thumbnails of validation images: few, small, of every shape; a run does not fail of them."""

import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support.report_reader import draw_val

from train.data.index.open import load_index
from train.metrics import thumbnails


def test_write_thumbnails_chooses_small_images_of_every_shape(tmp_path: Path) -> None:
    shapes = ((600, 400), (400, 600), (500, 500), (4000, 40))
    thumbnails.write_thumbnails(load_index(draw_val(tmp_path / "d", "a", "b", "c", sizes=shapes), "val"), tmp_path, 1)
    images = thumbnails.read_thumbnails(tmp_path)
    assert len(images) == 6 and images[0].size == (400, 600) and images[-1].size == (4000, 40)
    assert {thumbnail.label for thumbnail in images} <= {"a", "b", "c"}
    for thumbnail in images:
        with Image.open(io.BytesIO(thumbnail.jpeg)) as image:
            assert image.size == thumbnail.shown and max(image.size) == thumbnails.THUMBNAIL_PIXELS
            assert image.size[0] / image.size[1] == pytest.approx(thumbnail.size[0] / thumbnail.size[1], rel=0.2)
    assert (tmp_path / "logs/val-000001.json").stat().st_size < 60_000


def test_write_thumbnails_prints_errors_and_continues(tmp_path: Path, capsys: Any) -> None:
    index = load_index(draw_val(tmp_path / "data", "a"), "val")
    (tmp_path / "logs").write_text("in the way")
    thumbnails.write_thumbnails(index, tmp_path, 1)
    (tmp_path / "logs").unlink()
    (tmp_path / "data/val/a/48x80.JPEG").write_bytes(b"no image")
    thumbnails.write_thumbnails(index, tmp_path, 1)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and all(line.startswith("no thumbnails of validation images: ") for line in lines)
    assert thumbnails.read_thumbnails(tmp_path) == []
