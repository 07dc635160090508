"""Tests of packing: what is stored, what a repeated call keeps, and what happens on errors."""

import errno
import json
import multiprocessing
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
from PIL import Image
from support.error_lines import error_line
from support.small_disk import enlarge
from support.waiting import wait_for

from train.data.index.open import DataError, Index, check_same_images, load_index
from train.data.packing.pack import PackResult, copy_targets, pack_set
from train.data.packing.synthetic import draw_image


@pytest.fixture(scope="module")
def drawn_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set of six drawn images of two classes. Tests must not change it."""
    folder = tmp_path_factory.mktemp("drawn") / "data"
    for number in range(4):
        write(folder / f"train/{'ab'[number % 2]}/{number}.JPEG", draw_image(0, "train", number))
    for number in range(2):
        write(folder / f"val/{'ab'[number]}/v{number}.JPEG", draw_image(0, "val", number))
    return folder


@pytest.fixture
def source(drawn_set: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(drawn_set, tmp_path / "data"))


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def contents(root: Path) -> dict[str, bytes]:
    return {name: content for name, (content, _) in read_tree(root).items()}


def read_tree(root: Path) -> dict[str, tuple[bytes, int]]:
    """Return (content, modification time in ns) of all files but locks, by relative path."""
    files = (path for path in root.rglob("*") if path.is_file() and path.suffix != ".lock")
    return {str(path.relative_to(root)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def resize(source: Path, target: Path, sizes: list[int], **options: Any) -> PackResult:
    return pack_set(source, copy_targets(target, sizes), **options)


def open_image(index: Index, number: int) -> Image.Image:
    return Image.open(BytesIO(index.read(number)))


def read_images(root: Path) -> dict[str, bytes]:
    index = load_index(root, "train")
    return {name: index.read(number) for number, name in enumerate(index.names())}


@pytest.mark.parametrize("shard_bytes", [1, 5_000, 10**9])
def test_pack_set_copies_keep_order_and_contents(shard_bytes: int, source: Path, tmp_path: Path) -> None:
    with Image.open(source / "train/a/0.JPEG") as image:
        image.resize((50, 40)).save(source / "train/a/0.JPEG", "PNG")
    result = resize(source, tmp_path / "copies", [64, 96], shard_bytes=shard_bytes)
    assert (result.written, result.kept, result.skipped_files, result.messages) == (12, 0, [], [])
    for size in (64, 96):
        for split, count in (("train", 4), ("val", 2)):
            full, copy = load_index(source, split), load_index(tmp_path / f"copies/{size}", split)
            check_same_images(full, copy)
            assert len(copy) == count and copy.names() == full.names() and copy.classes == full.classes
            assert copy.names_checksum == full.names_checksum
            shards = [path.stat().st_size for path in copy.folder.glob("*.bin")]
            assert max(shards) <= max(shard_bytes, *(len(copy.read(number)) for number in range(count)))
            assert shard_bytes > 1 or len(shards) == count
            for number in range(count):
                assert copy.labels[number] == full.labels[number]
                with open_image(copy, number) as resized, open_image(full, number) as original:
                    if original.size == (50, 40):
                        assert copy.read(number) == full.read(number), "it is small enough"
                        continue
                    assert resized.format == "JPEG" and min(resized.size) == size
                    assert (copy.widths[number], copy.heights[number]) == resized.size
                    assert resized.width / resized.height == pytest.approx(original.width / original.height, rel=0.02)
                    expected = original.convert("RGB").resize(resized.size, Image.Resampling.BICUBIC)
                    assert np.abs(np.asarray(resized.convert("RGB"), int) - np.asarray(expected, int)).mean() < 8


def test_pack_set_full_size_keeps_the_bytes_of_every_format(source: Path, tmp_path: Path) -> None:
    with Image.open(source / "train/a/0.JPEG") as image:
        for mode, kind in (("L", "JPEG"), ("CMYK", "JPEG"), ("RGBA", "PNG"), ("RGB", "WEBP"), ("RGB", "TIFF")):
            image.convert(mode).save(source / f"train/a/{mode}-{kind}.JPEG", kind)
        image.save(source / "train/a/progressive.JPEG", "JPEG", progressive=True)
    plain = (source / "train/a/0.JPEG").read_bytes()
    write(source / "train/a/early.JPEG", plain[:-2] + b"junk" + plain[-2:])  # PIL reads it, simplejpeg does not
    pack_set(source, {None: tmp_path / "full"})
    index, files = load_index(tmp_path / "full", "train"), load_index(source, "train")
    assert index.names() == files.names() and len(index) == 4 + 7
    assert index.widths[:].tolist() == files.widths[:].tolist()
    assert [index.read(number) for number in range(11)] == [files.read(number) for number in range(11)]


def test_pack_set_from_packed_source_equals_from_files(source: Path, tmp_path: Path) -> None:
    pack_set(source, {None: tmp_path / "full"}, shard_bytes=60_000)
    resize(source, tmp_path / "of-files", [64])
    resize(tmp_path / "full", tmp_path / "of-packed", [64])
    assert {path.name for path in (tmp_path / "of-packed/64/train").iterdir()} == {
        "shard-00000.bin", "index.npy", "names.txt", "manifest.json"
    }  # fmt: skip
    of_files, of_packed = (contents(tmp_path / name / "64/train") for name in ("of-files", "of-packed"))
    assert {**of_files, "manifest.json": b""} == {**of_packed, "manifest.json": b""}
    before = read_tree(tmp_path / "of-packed")
    result = resize(tmp_path / "full", tmp_path / "of-packed", [64])
    assert (result.written, result.kept, result.messages) == (0, 6, [])
    assert read_tree(tmp_path / "of-packed") == before, "a repeated call changes nothing"


@pytest.mark.parametrize("change_source", [
    pytest.param(lambda train: write(train / "a/0.JPEG", draw_image(0, "train", 20)), id="change"),
    pytest.param(lambda train: write(train / "b/zz.JPEG", draw_image(0, "train", 21)), id="add"),
    pytest.param(lambda train: (train / "a/0.JPEG").unlink(), id="remove"),
])  # fmt: skip
def test_pack_set_after_source_change_needs_overwrite(change_source: Any, source: Path, tmp_path: Path) -> None:
    copies = tmp_path / "copies"
    resize(source, copies, [64])
    change_source(source / "train")
    before = read_tree(copies)
    with pytest.raises(DataError, match=r"64/train: .*have changed since; .*--overwrite"):
        resize(source, copies, [64])
    assert before == read_tree(copies)
    result = resize(source, copies, [64], overwrite=True)
    assert result.kept == 2 and result.written == len(load_index(source, "train"))  # val has not changed
    (message,) = result.messages
    assert message.startswith(f"{copies}/64/train: ") and "packed again" in message
    check_same_images(load_index(source, "train"), load_index(copies / "64", "train"))
    resize(source, tmp_path / "fresh", [64])
    assert read_images(copies / "64") == read_images(tmp_path / "fresh/64")


@pytest.mark.parametrize("name", ["shard-00001.bin", "index.npy", "names.txt", "manifest.json"])
@pytest.mark.parametrize("cut", [True, False])
def test_pack_set_repacks_lost_or_truncated_files(name: str, cut: bool, source: Path, tmp_path: Path) -> None:
    resize(source, tmp_path, [64], shard_bytes=5_000)
    path = tmp_path / "64/train" / name
    before = path.read_bytes()
    path.write_bytes(before[:-7]) if cut else path.unlink()
    result = resize(source, tmp_path, [64], shard_bytes=5_000, overwrite=cut and name == "manifest.json")
    assert result.written == 4 and path.read_bytes() == before
    assert bool(result.messages) == (cut or name != "manifest.json")


def write_small_images(folder: Path, count: int = 60) -> Path:
    """Write a source of small images, enough to interrupt packing in the middle. Returns the folder."""
    pixels = np.random.default_rng(0).integers(0, 255, (count + 2, 40, 50, 3), np.uint8)
    for number in range(count):
        write(folder / f"train/{'ab'[number % 2]}/{number:03d}.JPEG", simplejpeg.encode_jpeg(pixels[number]))
    for number in range(2):
        write(folder / f"val/{'ab'[number]}/v{number}.JPEG", simplejpeg.encode_jpeg(pixels[-number - 1]))
    return folder


def test_pack_set_after_kill_resumes_behind_finished_shards(tmp_path: Path) -> None:
    source, target = write_small_images(tmp_path / "data"), tmp_path / "copies"

    def pack_slowly() -> None:
        resize(source, target, [32, 36], shard_bytes=10_000, progress=lambda *_: time.sleep(0.01))

    for least_shards in (2, 4):

        def has_finished_shards(least: int = least_shards) -> bool:
            return len(list((target / "36/train").glob(".rows-*"))) >= least

        child = multiprocessing.get_context("fork").Process(target=pack_slowly, daemon=True)
        child.start()
        wait_for(has_finished_shards)
        child.kill()
        child.join()
        with pytest.raises(DataError, match="not finished; run the command that creates it again"):
            load_index(target / "36", "train")
    before = {name: file for name, file in read_tree(target).items() if name.endswith(".bin") and "/.shard" not in name}
    assert len(before) >= 4
    finished = [name for name in before if (target / name).with_name(f".rows-{name[-9:-4]}").exists()]
    result = resize(source, target, [32, 36], shard_bytes=10_000)
    assert result.kept > 10 and result.written + result.kept == 2 * 62
    after = read_tree(target)
    # Also the modification times are equal: finished shards are not written again.
    assert {name: before[name] for name in finished} == {name: after[name] for name in finished}
    resize(source, tmp_path / "fresh", [32, 36], shard_bytes=10_000)
    assert contents(target) == contents(tmp_path / "fresh")


@pytest.mark.parametrize("damaged", ["32/train/.rows-00001", "32/train/shard-00001.bin", "source"])
def test_pack_set_does_not_resume_behind_damage_or_changed_images(damaged: str, tmp_path: Path) -> None:
    source, target = write_small_images(tmp_path / "data"), tmp_path / "copies"

    def stop(done: int, _: int) -> None:
        if done == 50:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resize(source, target, [32], shard_bytes=10_000, progress=stop)
    assert len(list((target / "32/train").glob("shard-*.bin"))) > 4
    if damaged == "source":
        write(source / "train/a/040.JPEG", (source / "train/a/042.JPEG").read_bytes())  # its ID is 20
    else:
        (target / damaged).write_bytes((target / damaged).read_bytes()[:-50])
    result = resize(source, target, [32], shard_bytes=10_000)
    assert 0 < result.kept <= 20
    resize(source, tmp_path / "fresh", [32], shard_bytes=10_000)
    assert read_images(target / "32") == read_images(tmp_path / "fresh/32")


def test_pack_set_twice_at_once_packs_once(tmp_path: Path) -> None:
    source = write_small_images(tmp_path / "data")
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(resize, source, tmp_path / "copies", [32, 36]) for _ in range(2)]
        results = [call.result(60) for call in calls]
    assert sorted((result.written, result.kept) for result in results) == [(0, 124), (124, 0)]


def test_pack_set_on_full_disk_keeps_finished_shards(small_disk: Path, tmp_path: Path) -> None:
    source = write_small_images(tmp_path / "data", 400)
    with pytest.raises(OSError, match="No space left on device") as caught:
        pack_set(source, {None: small_disk / "full"}, shard_bytes=20_000)
    assert caught.value.errno == errno.ENOSPC and str(small_disk / "full/train") in str(caught.value.filename)
    with pytest.raises(OSError, match="No space left on device"):
        pack_set(source, {None: small_disk / "full"})  # the disk fills up in the middle of one large shard
    assert not list(small_disk.rglob("*.tmp"))
    enlarge(small_disk, 8)
    result = pack_set(source, {None: small_disk / "full"}, shard_bytes=20_000)
    assert result.kept > 30 and result.kept + result.written == 402
    assert read_images(small_disk / "full") == read_images(source)


def test_pack_set_with_bad_file_raises_or_skips(source: Path, tmp_path: Path) -> None:
    broken, target = source / "train/b/1.JPEG", tmp_path / "copies"
    broken.write_bytes(broken.read_bytes()[:2000])

    def assert_refused() -> None:
        assert error_line(DataError, resize, source, target, [64]).startswith(f"{broken}: ")

    assert_refused()
    for written in (10 - 2, 0):  # the two images before it were packed already
        result = resize(source, target, [64, 96], skip_bad=True)
        assert [path for path, _ in result.skipped_files] == [str(broken)] and result.skipped_files[0][1]
        assert (result.written, result.kept) == (written, 10 - written)
        assert_refused()  # also when the file was left out before
    for size in (64, 96):
        assert load_index(target / str(size), "train").names() == ["a/0.JPEG", "a/2.JPEG", "b/3.JPEG"]
    check_same_images(load_index(source, "train", skip_bad=True), load_index(target / "64", "train"))


def test_pack_set_over_other_set_raises(source: Path, tmp_path: Path) -> None:
    pack_set(source, {None: tmp_path / "full"})
    before, other = contents(tmp_path / "full"), tmp_path / "other"
    for split in ("train", "val"):
        write(other / split / "c" / "0.JPEG", draw_image(0, "train", 30))
        write(other / split / "d" / "0.JPEG", b"no image")
    with pytest.raises(DataError, match="a packed set of other images"):
        pack_set(other, {None: tmp_path / "full"})
    assert contents(tmp_path / "full") == before
    manifest = tmp_path / "full/val/manifest.json"
    manifest.write_text(manifest.read_text().replace('"version": 2', '"version": 99'))
    before = contents(tmp_path / "full")
    with pytest.raises(DataError, match=r"format version 99.*--overwrite"):
        pack_set(source, {None: tmp_path / "full"})
    assert contents(tmp_path / "full") == before


def test_pack_set_from_index_only_source_raises(source: Path, tmp_path: Path) -> None:
    pack_set(source, {None: tmp_path / "full"})
    manifest = tmp_path / "full/train/manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "fetched": "index"}))
    with pytest.raises(DataError, match="full/train: has the index and no images; fetch them too"):
        resize(tmp_path / "full", tmp_path / "small", [64])


@pytest.mark.parametrize(("target", "message"), [
    *((target, "among the images; give a folder beside") for target in ("data", "data/train", "data/val/a")),
    ("mine", "mine/val/c: a folder of images is there"),
])  # fmt: skip
def test_pack_set_among_images_raises(target: str, message: str, source: Path, tmp_path: Path) -> None:
    write(tmp_path / "mine/val/c/0.JPEG", draw_image(0, "val", 1))
    before = read_tree(tmp_path)
    with pytest.raises(DataError, match=message):
        pack_set(source, {None: tmp_path / target}, overwrite=True)
    assert read_tree(tmp_path) == before


def test_pack_set_keeps_non_utf8_names_and_refuses_line_breaks(source: Path, tmp_path: Path) -> None:
    non_utf8_name = os.fsdecode(b"gr\xfc\xdf.JPEG")
    write(source / "train/a" / non_utf8_name, draw_image(0, "train", 9))
    pack_set(source, {None: tmp_path / "full"})
    index = load_index(tmp_path / "full", "train")
    assert index.names() == load_index(source, "train").names() and index.name(2) == f"a/{non_utf8_name}"
    write(source / "train/a/two\nlines.JPEG", draw_image(0, "train", 9))
    error_line(DataError, pack_set, source, {None: tmp_path / "other"}, match="a name with a line break")
