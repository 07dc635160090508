"""Tests of packed sets: equal to their folder of files, and damage is named."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.error_lines import error_line

from train.data.index import packed as packed_module
from train.data.index.open import DataError, Index, check_same_images, class_names, load_index
from train.data.manifest import INDEX_FILE, MANIFEST_FILE, NAMES_FILE
from train.data.packing.pack import copy_targets, pack_set
from train.tools.files import write_atomic

COUNT = 24
data_error_of = partial(error_line, DataError)


def read_all(index: Index) -> list[bytes]:
    return [index.read(number) for number in range(len(index))]


@pytest.mark.parametrize("split", ["train", "val"])
def test_packed_index_equals_folder_index(split: str, sets: Path) -> None:
    files, packed = load_index(sets / "data", split), load_index(sets / "full", split)
    assert len(files) == len(packed) and files.classes == packed.classes
    assert files.names() == packed.names() and read_all(files) == read_all(packed)
    assert (files.names_checksum, files.stems_digest) == (packed.names_checksum, packed.stems_digest)
    ids = np.array([3, 0, 2])
    for name in ("labels", "widths", "heights"):
        file_column, packed_column = getattr(files, name), getattr(packed, name)
        assert np.asarray(packed_column).dtype == packed_column[ids].dtype == np.int64
        assert np.asarray(file_column).tolist() == np.asarray(packed_column).tolist()
        assert file_column[ids].tolist() == packed_column[ids].tolist()


def test_take_twice_agrees_for_folder_and_packed(sets: Path) -> None:
    ids = np.array([5, 1, 17, 0])
    files, packed = (load_index(sets / name, "train").take(ids).take(np.array([2, 0])) for name in ("data", "full"))
    assert packed.names() == files.names() == [load_index(sets / "data", "train").names()[i] for i in (17, 5)]
    assert read_all(packed) == read_all(files)
    assert packed.labels[:].tolist() == files.labels[:].tolist()
    assert packed.widths[:].tolist() == files.widths[:].tolist() and len(packed) == 2
    assert (packed.names_checksum, packed.stems_digest) == (files.names_checksum, files.stems_digest)
    assert packed.name(1) == files.name(1) and f"(id 5, {files.name(1)})" in packed.location(1)


def test_load_index_of_packed_maps_labels_to_given_classes(sets: Path) -> None:
    plain = load_index(sets / "full", "val")
    index = load_index(sets / "full", "val", ("0", "a", "b", "c"))
    assert index.labels[:].tolist() == (np.asarray(plain.labels) + 1).tolist() and index.classes[0] == "0"
    assert f"{sets}/full/val/c: a class that train/" in data_error_of(load_index, sets / "full", "val", ("a", "b"))


@pytest.mark.parametrize("full_as", ["data", "full"])
def test_check_same_images_refuses_other_images(full_as: str, sets: Path, tmp_path: Path) -> None:
    shutil.copytree(sets / "data", tmp_path / "data")
    (tmp_path / "data/train/a/03.JPEG").rename(tmp_path / "data/train/a/03.png")  # suffixes are not compared
    (tmp_path / "data/train/a/00.JPEG").unlink()
    (tmp_path / "data/train/b/01.JPEG").rename(tmp_path / "data/train/b/y.JPEG")
    shutil.copy(tmp_path / "data/train/b/y.JPEG", tmp_path / "data/train/b/z.JPEG")
    pack_set(tmp_path / "data", copy_targets(tmp_path / "sz", [32]))
    index = load_index(sets / full_as, "train")
    assert "another order)" in data_error_of(check_same_images, index, index.take(np.arange(COUNT)[::-1]))
    for copy in (tmp_path / "sz/32", tmp_path / "data"):
        message = data_error_of(check_same_images, index, load_index(copy, "train"))
        assert message.startswith(f"{copy}/train: ") and "(2 are missing, 2 too many)" in message
        assert f"imgnet-cluster data resize {sets / full_as} {copy.parent} --sizes {copy.name}" in message


def flip_bit(path: Path, position: int = -9) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize(("name", "damage", "reason"), [
    ("shard-00001.bin", lambda path: os.truncate(path, 100), "cut short: 100 bytes instead of"),
    ("shard-00001.bin", lambda path: write_atomic(path, path.read_bytes() + b"more"), "the file was replaced: "),
    ("shard-00001.bin", Path.unlink, "missing"),
    (INDEX_FILE, Path.unlink, "No such file"),
    (INDEX_FILE, flip_bit, "is damaged"),
])  # fmt: skip
def test_load_index_names_a_damaged_file(name: str, damage: Callable[[Path], object], reason: str, full: Path) -> None:
    path = full / "train" / name
    damage(path)
    message = data_error_of(load_index, full, "train")
    assert message.startswith(f"{path}: ") and reason in message
    assert message.endswith(f"imgnet-cluster data verify {full}")


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))


def replace(path: Path) -> None:
    write_atomic(path, bytes(path.stat().st_size))


@pytest.mark.parametrize(("is_open", "damages", "reason"), [
    (True, [lambda path: os.truncate(path, 10)], "the file is cut short"),
    (False, [lambda path: os.truncate(path, 10)], "the file is cut short"),
    (False, [Path.unlink], "No such file"),
    (False, [replace], "its bytes have changed (checksum)"),
    (True, [overwrite, replace], "the file was replaced during the run (checksum)"),
    (True, [Path.unlink], ""),  # the open file is still as it was
    (True, [replace], ""),
])  # fmt: skip
def test_read_from_a_shard_that_changes_during_the_run(
    is_open: bool, damages: list[Callable[[Path], object]], reason: str, full: Path
) -> None:
    index, path = load_index(full, "train"), full / "train/shard-00000.bin"
    before = index.read(0) if is_open else b""
    for damage in damages:
        damage(path)
    if reason:
        message = data_error_of(index.read, 0)
        assert message.startswith(f"{path}, image 0 in it (id 0, a/00.JPEG): ") and reason in message
        assert message.endswith(f"imgnet-cluster data verify {full}")
    else:
        assert index.read(0) == before


@pytest.mark.parametrize("change, reason", [
    ({"version": 1}, "format version 1, this program reads 2"),
    ({"format": "other"}, "is damaged, or not a manifest"),
    ({"files": {}}, "is damaged"),
    ({"files": {"index.npy": 3}}, "is damaged"),
    ({"images": "many"}, "is damaged"),
    (None, "is damaged"),
    pytest.param("[" * 100_000, "is damaged", id="nested too deep"),
])  # fmt: skip
def test_read_manifest_damaged_or_other_version_raises(change: Any, reason: str, full: Path) -> None:
    path = full / "train" / MANIFEST_FILE
    text = path.read_text()
    damaged = change if isinstance(change, str) else change and json.dumps({**json.loads(text), **change})
    path.write_text(damaged or text[:-20])
    for call in (load_index, class_names):
        message = data_error_of(call, full, "train")
        assert message.startswith(f"{full}/train") and reason in message


def test_names_with_damaged_file_raises(full: Path, sets: Path) -> None:
    path = full / "train" / NAMES_FILE
    path.write_text("x\n" * 3)
    index = load_index(full, "train")
    assert data_error_of(index.names).startswith(f"{path}: is damaged")
    check_same_images(load_index(sets / "data", "train"), index)  # compares digests, which needs no names
    assert "(id 20, ?)" in index.location(20)
    path.unlink()
    assert "(id 20, ?)" in index.location(20) and "No such file" in data_error_of(index.names)


def count_open_files(folder: Path) -> int:
    count = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            count += str(descriptor.readlink()).startswith(str(folder))
    return count


def test_shard_reader_bounds_and_closes_open_files(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = len(list((full / "train").glob("*.bin")))
    index = load_index(full, "train")
    before = count_open_files(full)
    read_all(index)
    assert count > 3 and count_open_files(full) == before + count
    del index
    assert count_open_files(full) == 0
    monkeypatch.setattr(packed_module, "MAX_OPEN_SHARDS", 2)
    index = load_index(full, "train")
    read_all(index)
    assert count_open_files(full) - before <= 2


def test_read_is_safe_in_threads(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread may close the shard from which another one reads."""
    index = load_index(full, "train")
    expected = read_all(index)
    monkeypatch.setattr(packed_module, "MAX_OPEN_SHARDS", 1)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(index.read, [*range(COUNT)] * 20)) == expected * 20
