"""Prepared copies: sizes, what is kept, what happens on the way."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from train.data.decode import decode
from train.data.index import DataError, load, same_images
from train.data.resize import resize_set, shrink
from train.data.sample import draw


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Six drawn images of two classes."""
    for number in range(4):
        write(tmp_path / f"data/train/{'ab'[number % 2]}/{number}.JPEG", draw(0, "train", number))
    for number in range(2):
        write(tmp_path / f"data/val/{'ab'[number]}/v{number}.JPEG", draw(0, "val", number))
    return tmp_path / "data"


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def tree(root: Path) -> dict[str, tuple[bytes, int]]:
    files = (path for path in root.rglob("*") if path.is_file() and path.suffix != ".lock")
    return {str(path.relative_to(root)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


@pytest.mark.parametrize(("size", "short", "expected"), [
    ((500, 375), 160, (213, 160)),
    ((375, 500), 160, (160, 213)),
    ((400, 400), 64, (64, 64)),
    ((3000, 100), 50, (1500, 50)),
    ((161, 160), 160, (161, 160)),
    ((100, 90), 160, (100, 90)),
])  # fmt: skip
def test_the_short_side_becomes_the_asked_one_the_aspect_stays_and_nothing_grows(
    size: tuple[int, int], short: int, expected: tuple[int, int]
) -> None:
    pixels = np.zeros((size[1], size[0], 3), np.uint8)
    assert shrink(pixels, short).shape == (expected[1], expected[0], 3)


def test_a_small_image_stays_as_it_is() -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (40, 60, 3), np.uint8)
    assert (shrink(pixels, 40) == pixels).all() and (shrink(pixels, 41) == pixels).all()


def test_copies_lie_by_size_and_show_the_same_picture(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "copies"
    done = resize_set(source, target, [64, 96])
    assert (done.written, done.kept, done.bad) == (12, 0, [])
    originals = tree(source)
    assert set(tree(target)) == {f"{size}/{name}" for size in (64, 96) for name in originals}
    for size in (64, 96):
        for name in originals:
            with Image.open(target / str(size) / name) as copy, Image.open(source / name) as original:
                assert copy.format == "JPEG" and min(copy.size) == size
                assert copy.width / copy.height == pytest.approx(original.width / original.height, rel=0.02)
                small = original.convert("RGB").resize(copy.size, Image.Resampling.BICUBIC)
                assert np.abs(np.asarray(copy.convert("RGB"), int) - np.asarray(small, int)).mean() < 8
        same_images(load(source, "train"), load(target / str(size), "train"))


def test_a_second_call_writes_nothing(source: Path, tmp_path: Path) -> None:
    resize_set(source, tmp_path / "copies", [64])
    before = tree(tmp_path / "copies")
    done = resize_set(source, tmp_path / "copies", [64])
    assert (done.written, done.kept) == (0, 6)
    assert tree(tmp_path / "copies") == before


def test_a_call_after_a_stop_makes_what_is_missing(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "copies"

    def stop(done: int, _: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resize_set(source, target, [64, 96], workers=1, progress=stop)
    before = tree(target)
    assert len(before) >= 6 and not any(Path(name).name.startswith(".") for name in before)
    for name in before:
        decode((target / name).read_bytes())
    write(target / "64/train/a/.0.JPEG.0123", b"left by a kill")
    done = resize_set(source, target, [64, 96])
    assert (done.written, done.kept) == (12 - len(before), len(before))
    assert before.items() <= tree(target).items()
    assert len(load(target / "64", "train")) == 4


def test_a_size_more_is_made_without_the_others(source: Path, tmp_path: Path) -> None:
    resize_set(source, tmp_path / "copies", [64])
    done = resize_set(source, tmp_path / "copies", [64, 96])
    assert (done.written, done.kept) == (6, 6)


def test_a_changed_source_is_copied_again(source: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copies/64/train/a/0.JPEG"
    resize_set(source, tmp_path / "copies", [64])
    before = copy.read_bytes()
    write(source / "train/a/0.JPEG", draw(0, "train", 20))
    later = copy.stat().st_mtime_ns + 10**9
    os.utime(source / "train/a/0.JPEG", ns=(later, later))
    assert resize_set(source, tmp_path / "copies", [64]).written == 1
    assert copy.read_bytes() != before


def test_odd_images_become_plain_jpegs(source: Path, tmp_path: Path) -> None:
    with Image.open(source / "train/a/0.JPEG") as image:
        image.convert("CMYK").save(source / "train/a/cmyk.JPEG", "JPEG")
        image.convert("L").save(source / "train/a/grey.JPEG", "JPEG")
        image.convert("RGBA").save(source / "train/a/png.JPEG", "PNG")
    resize_set(source, tmp_path / "copies", [64])
    for name in ("cmyk", "grey", "png"):
        with Image.open(tmp_path / f"copies/64/train/a/{name}.JPEG") as copy:
            assert (copy.format, copy.mode, min(copy.size)) == ("JPEG", "RGB", 64)


def test_a_broken_file_ends_it_by_name_and_is_left_out_only_when_asked(source: Path, tmp_path: Path) -> None:
    broken = source / "train/b/1.JPEG"
    broken.write_bytes(broken.read_bytes()[:2000])
    with pytest.raises(DataError) as caught:
        resize_set(source, tmp_path / "copies", [64])
    assert str(caught.value).startswith(f"{broken}: ") and "\n" not in str(caught.value)
    done = resize_set(source, tmp_path / "copies", [64, 96], skip_bad=True)
    assert [path for path, _ in done.bad] == [broken] and done.bad[0][1]
    assert done.written + done.kept == 10
    assert not (tmp_path / "copies/64/train/b/1.JPEG").exists()


def test_progress_counts_the_images_to_their_end(source: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    resize_set(source, tmp_path / "copies", [64, 96], progress=lambda *step: seen.append(step))
    assert seen == [(number, 6) for number in range(1, 7)]


@pytest.mark.parametrize("sizes", [[], [31], [160, 0]])
def test_sizes_below_32_or_none_are_refused(sizes: list[int], source: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="sizes: must be 32 pixels or more"):
        resize_set(source, tmp_path / "copies", sizes)
    assert not (tmp_path / "copies").exists()


def gone(source: Path) -> None:
    for path in source.rglob("*.JPEG"):
        path.unlink()


def elsewhere(source: Path) -> None:
    source.rename(source.with_name("moved"))


@pytest.mark.parametrize("act", [gone, elsewhere])
def test_a_source_without_images_is_named(act: Any, source: Path, tmp_path: Path) -> None:
    act(source)
    with pytest.raises(DataError, match=str(source)):
        resize_set(source, tmp_path / "copies", [64])
    assert not (tmp_path / "copies").exists()
