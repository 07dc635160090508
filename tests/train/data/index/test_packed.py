"""Reading packed sets: the same as of the folder, each damage by name, a million images in little memory."""

import contextlib
import json
import multiprocessing
import os
import shutil
import sys
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg

from train.data.index import shards
from train.data.index.base import names_crc32, stems_sha256
from train.data.index.open import DataError, Index, check_layout, check_same_images, class_names, load_index
from train.data.index.packed import INDEX_FILE, NAMES_FILE, ROW_DTYPE, file_crc32
from train.data.manifest import MANIFEST_FILE, PackedManifest
from train.data.order.rect_val import plan_rect_validation
from train.data.order.rng import permutation
from train.data.packing.pack import copy_targets, pack_set
from train.tools.filesystem import to_json_bytes, write_atomic

COUNT = 24


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of small images, `data`, packed in full size, and copies of 32 pixels. Copy it before changing it."""
    root = tmp_path_factory.mktemp("made")
    dice = np.random.default_rng(0)
    for number in range(COUNT + 4):
        split, name = ("train" if number < COUNT else "val"), "abc"[number % 3]
        pixels = dice.integers(0, 255, (34 + number, 70 - number, 3), np.uint8)
        path = root / f"data/{split}/{name}/{number:02d}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(simplejpeg.encode_jpeg(pixels))
    pack_set(root / "data", {None: root / "full"}, shard_bytes=12_000)
    pack_set(root / "data", copy_targets(root / "data-sz", [32]), shard_bytes=8_000)
    return root


@pytest.fixture
def full(made: Path, tmp_path: Path) -> Path:
    """The packed full-size set, to be damaged."""
    shutil.copytree(made / "full", tmp_path / "full")
    return tmp_path / "full"


def error_of(function: Callable[..., object], *how: object) -> str:
    with pytest.raises(DataError) as caught:
        function(*how)
    said = str(caught.value)
    assert "\n" not in said
    return said


def read_all(index: Index) -> list[bytes]:
    return [index.read(number) for number in range(len(index))]


# --- the same as of the folder ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["train", "val"])
def test_packed_index_equals_folder_index(split: str, made: Path) -> None:
    files, packed = load_index(made / "data", split), load_index(made / "full", split)
    assert len(files) == len(packed) and files.classes == packed.classes
    assert files.names() == packed.names() and read_all(files) == read_all(packed)
    assert (files.names_checksum, files.stems_digest) == (packed.names_checksum, packed.stems_digest)
    ids = np.array([3, 0, 2])
    for name in ("labels", "widths", "heights"):
        one, other = getattr(files, name), getattr(packed, name)
        assert np.asarray(other).dtype == other[ids].dtype == np.int64
        assert np.asarray(one).tolist() == np.asarray(other).tolist() and one[ids].tolist() == other[ids].tolist()
    for rank in range(2):
        plans = [plan_rect_validation(one.widths, one.heights, 64, 3, rank, 2) for one in (files, packed)]
        assert [(s, i.tolist()) for s, i in plans[0]] == [(s, i.tolist()) for s, i in plans[1]]


def test_take_twice_agrees_for_folder_and_packed(made: Path) -> None:
    for ids in (np.array([5, 1, 17, 0]), np.arange(COUNT)[::-1]):
        files, packed = (load_index(made / of, "train").take(ids).take(np.array([2, 0])) for of in ("data", "full"))
        assert packed.names() == files.names() == [load_index(made / "data", "train").names()[i] for i in ids[[2, 0]]]
        assert read_all(packed) == read_all(files)
        assert packed.labels[:].tolist() == files.labels[:].tolist()
        assert packed.widths[:].tolist() == files.widths[:].tolist() and len(packed) == 2
        assert (packed.names_checksum, packed.stems_digest) == (files.names_checksum, files.stems_digest)
        assert packed.name(1) == files.name(1) and f"(id {ids[0]}, {files.name(1)})" in packed.location(1)


def test_check_layout_accepts_folder_and_packed(made: Path) -> None:
    for of in ("data", "full", "data-sz/32"):
        check_layout(made / of)
        assert class_names(made / of, "train") == ["a", "b", "c"]


def test_load_index_of_packed_maps_labels_to_given_classes(made: Path) -> None:
    plain = load_index(made / "full", "val")
    index = load_index(made / "full", "val", ("0", "a", "b", "c"))
    assert index.labels[:].tolist() == (np.asarray(plain.labels) + 1).tolist() and index.classes[0] == "0"
    assert f"{made}/full/val/c: a class that train/ lacks" in error_of(load_index, made / "full", "val", ("a", "b"))


@pytest.mark.parametrize("full_as", ["data", "full"])
@pytest.mark.parametrize("copy_as", ["data-sz/32", "full", "data"])
def test_check_same_images_accepts_folder_and_packed_mixes(full_as: str, copy_as: str, made: Path) -> None:
    for split in ("train", "val"):
        check_same_images(load_index(made / full_as, split), load_index(made / copy_as, split))


@pytest.mark.parametrize("full_as", ["data", "full"])
def test_check_same_images_refuses_other_images(full_as: str, made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "data", tmp_path / "data")
    (tmp_path / "data/train/a/00.JPEG").unlink()
    (tmp_path / "data/train/b/01.JPEG").rename(tmp_path / "data/train/b/y.JPEG")
    shutil.copy(tmp_path / "data/train/b/y.JPEG", tmp_path / "data/train/b/z.JPEG")
    pack_set(tmp_path / "data", copy_targets(tmp_path / "sz", [32]))
    for copy in (tmp_path / "sz/32", tmp_path / "data"):
        said = error_of(check_same_images, load_index(made / full_as, "train"), load_index(copy, "train"))
        assert said.startswith(f"{copy}/train: ") and "(2 are missing, 2 too many)" in said
        assert f"imgnet-cluster data resize {made / full_as} {copy.parent} --sizes {copy.name}" in said


def test_check_same_images_refuses_other_order(made: Path) -> None:
    index = load_index(made / "full", "train")
    backwards = index.take(np.arange(COUNT)[::-1])
    assert "(they are in another order)" in error_of(check_same_images, index, backwards)


# --- damage ----------------------------------------------------------------------------------------------------------


def test_read_of_changed_bytes_names_image(full: Path) -> None:
    index = load_index(full, "train")
    rows = np.load(full / "train" / INDEX_FILE)
    number = next(n for n in range(2, COUNT) if rows["shard"][n] == 1 and rows["offset"][n])
    path = full / "train/shard-00001.bin"
    with path.open("r+b") as file:
        file.seek(int(rows["offset"][number]) + 300)
        old = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([old[0] ^ 1]))
    said = error_of(index.read, number)
    place = number - int(np.argmax(rows["shard"] == 1))
    assert said.startswith(f"{path}, image {place} in it (id {number}, {index.name(number)}): its bytes have changed")
    assert said.endswith(f"imgnet-cluster data verify {full}")
    assert place and index.read(number - 1) and index.read(number + 1)


@pytest.mark.parametrize("opened", [True, False])
def test_read_of_truncated_shard_raises(opened: bool, full: Path) -> None:
    index, last = load_index(full, "train"), COUNT - 1
    if opened:
        index.read(last)
    path = sorted((full / "train").glob("*.bin"))[-1]
    os.truncate(path, path.stat().st_size - 10)
    said = error_of(index.read, last)
    assert said.startswith(f"{path}, image ") and f"(id {last}, " in said and "the file is cut short" in said


def test_read_of_deleted_shard_raises_unless_open(full: Path) -> None:
    index, other = load_index(full, "train"), load_index(full, "train")
    before = index.read(0)
    (full / "train/shard-00000.bin").unlink()
    assert index.read(0) == before
    assert "shard-00000.bin, image 0 in it (id 0, a/00.JPEG): No such file" in error_of(other.read, 0)


def test_read_of_replaced_shard_raises(full: Path) -> None:
    index, path = load_index(full, "train"), full / "train/shard-00000.bin"
    before = index.read(0)
    write_atomic(path, bytes(path.stat().st_size))
    assert index.read(0) == before  # of the file that is open
    assert "its bytes have changed (checksum)" in error_of(load_index(full, "train").read, 0)
    write_atomic(path, path.read_bytes() + b"more")
    assert "the file was replaced: " in error_of(load_index, full, "train")


def test_read_tells_replaced_from_overwritten_shard(full: Path) -> None:
    index, path = load_index(full, "train"), full / "train/shard-00000.bin"
    index.read(0)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.write(bytes(size))
    write_atomic(path, bytes(size))
    assert "the file was replaced during the run (checksum)" in error_of(index.read, 0)


@pytest.mark.parametrize("how", ["cut", "gone"])
def test_load_index_with_incomplete_shard_raises(how: str, full: Path) -> None:
    path = full / "train/shard-00001.bin"
    os.truncate(path, 100) if how == "cut" else path.unlink()
    said = error_of(load_index, full, "train")
    assert said.startswith(f"{path}: ") and said.endswith(f"imgnet-cluster data verify {full}")
    assert ("cut short: 100 bytes instead of" if how == "cut" else "missing") in said


@pytest.mark.parametrize("damage", ["bit", "cut", "empty", "gone", "other rows", "pickle"])
def test_load_index_with_damaged_index_file_raises(damage: str, full: Path) -> None:
    path = full / "train" / INDEX_FILE
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    elif damage == "other rows":
        np.save(path, np.load(path)[:-1])
    elif damage == "pickle":
        np.save(path, np.array([{}] * COUNT, object))
    else:
        path.write_bytes({"bit": data[:-9] + bytes([data[-9] ^ 4]) + data[-8:], "cut": data[:-1], "empty": b""}[damage])
    said = error_of(load_index, full, "train")
    assert said.startswith(f"{path}: ") and said.endswith(f"imgnet-cluster data verify {full}")


@pytest.mark.parametrize("change, said", [
    ({"version": 1}, "format version 1, this program reads 2"),
    ({"format": "other"}, "is damaged, or not a manifest"),
    ({"files": {}}, "is damaged"),
    ({"files": {"index.npy": 3}}, "is damaged"),
    ({"images": "many"}, "is damaged"),
    (None, "is damaged"),
])  # fmt: skip
def test_read_manifest_damaged_or_other_version_raises(change: Any, said: str, full: Path) -> None:
    path = full / "train" / MANIFEST_FILE
    text = path.read_text()
    path.write_text(text[:-20] if change is None else json.dumps({**json.loads(text), **change}))
    for call in (load_index, class_names):
        found = error_of(call, full, "train")
        assert found.startswith(f"{full}/train") and said in found


def test_read_manifest_with_missing_key_raises(full: Path) -> None:
    path = full / "train" / MANIFEST_FILE
    whole = json.loads(path.read_text())
    for name in whole:
        path.write_text(json.dumps({key: value for key, value in whole.items() if key != name}))
        assert str(path) in error_of(load_index, full, "train")


def test_names_with_damaged_file_raises(full: Path, made: Path) -> None:
    path = full / "train" / NAMES_FILE
    path.write_text("x\n" * 3)
    index = load_index(full, "train")
    assert error_of(index.names).startswith(f"{path}: is damaged")
    check_same_images(load_index(made / "data", "train"), index)  # by digests, which need no names
    assert "(id 20, ?)" in index.location(20)
    path.unlink()
    assert "(id 20, ?)" in index.location(20) and "No such file" in error_of(index.names)


def test_load_index_of_unfinished_set_raises(full: Path) -> None:
    (full / "train" / MANIFEST_FILE).unlink()
    for call in (load_index, class_names):
        said = error_of(call, full, "train")
        assert said.startswith(f"{full}/train: ") and "not finished" in said and "goes on where it stopped" in said


def test_read_of_index_only_set_raises(full: Path) -> None:
    path = full / "train" / MANIFEST_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), "fetched": "index"}))
    for shard in (full / "train").glob("*.bin"):
        shard.unlink()
    index = load_index(full, "train")
    assert len(index) == COUNT and index.names() and not index.has_images and load_index(full, "val").has_images
    assert "image 0 in it (id 0, a/00.JPEG): No such file" in error_of(index.read, 0)


# --- handles and processes -------------------------------------------------------------------------------------------


def handles(folder: Path) -> int:
    """How many files below a folder this process has open."""
    found = 0
    for one in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found += str(one.readlink()).startswith(str(folder))
    return found


def test_shard_reader_bounds_and_closes_open_files(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = len(list((full / "train").glob("*.bin")))
    index = load_index(full, "train")
    before = handles(full)
    read_all(index)
    assert count > 3 and handles(full) == before + count
    del index
    assert handles(full) == 0
    monkeypatch.setattr(shards, "MAX_OPEN_SHARDS", 2)
    index = load_index(full, "train")
    expected = [(full.parent / "full/train").joinpath(f"shard-{n:05d}.bin").read_bytes() for n in range(count)]
    order = permutation(0, 0, COUNT).tolist()
    found = {number: index.read(number) for number in order}
    assert b"".join(found[number] for number in range(COUNT)) == b"".join(expected)
    assert handles(full) - before <= 2


def test_read_is_safe_in_threads_and_forks(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "MAX_OPEN_SHARDS", 1)
    index = load_index(full, "train")
    expected = [zlib.crc32(one) for one in read_all(index)]
    fork = multiprocessing.get_context("fork")
    line: Any = fork.Queue()

    def work(seed: int) -> None:
        good = [zlib.crc32(index.read(n)) == expected[n] for e in range(20) for n in permutation(seed, e, COUNT)]
        line.put((len(good), all(good)))

    children = [fork.Process(target=work, args=(seed,)) for seed in range(3)]
    for one in children:
        one.start()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(index.read, [*range(COUNT)] * 20))
    assert [zlib.crc32(one) for one in found] == expected * 20
    assert [line.get(timeout=30) for _ in children] == [(20 * COUNT, True)] * 3
    for one in children:
        one.join(30)


# --- a million -------------------------------------------------------------------------------------------------------

MILLION = 1_281_167


@pytest.fixture(scope="module")
def million(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The index of a set of ImageNet's size, without images."""
    root = tmp_path_factory.mktemp("million")
    folder = root / "train"
    folder.mkdir()
    dice = np.random.default_rng(0)
    rows = np.zeros(MILLION, ROW_DTYPE)
    rows["label"] = np.sort(dice.integers(0, 1000, MILLION))
    rows["width"], rows["height"] = dice.integers(100, 1000, (2, MILLION))
    np.save(folder / INDEX_FILE, rows)
    classes = [f"n{number:08d}" for number in range(1000)]
    names = [f"{classes[label]}/{number}.JPEG" for number, label in enumerate(rows["label"].tolist())]
    (folder / NAMES_FILE).write_text("".join(f"{one}\n" for one in names))
    files = {
        INDEX_FILE: {
            "bytes": (folder / INDEX_FILE).stat().st_size,
            "sha256": "",
            "crc32": file_crc32(folder / INDEX_FILE),
        }
    }
    files[NAMES_FILE] = {"bytes": (folder / NAMES_FILE).stat().st_size, "sha256": ""}
    manifest = PackedManifest(
        split="train", short_side=None, images=MILLION, classes=classes, stems_digest=stems_sha256(names),
        names_checksum=names_crc32(names), files=files, packing_info={}, fetched="index",
    )  # fmt: skip
    write_atomic(folder / MANIFEST_FILE, to_json_bytes(manifest.to_json()))
    return root


def private(function: Callable[[], Any]) -> tuple[int, float]:
    """Bytes of its own that a fresh process has more after a call, and the seconds of the call.

    Mapped pages of a file are not its own: all processes have the same.
    """

    def size() -> int:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return sum(1024 * int(one.split()[1]) for one in lines if one.startswith("Anonymous"))

    reader, writer = os.pipe()
    if not (child := os.fork()):
        try:
            before, begun = size(), time.perf_counter()
            kept = function()
            seconds = time.perf_counter() - begun
            os.write(writer, json.dumps([size() - before, seconds]).encode())
            del kept
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as file:
        said = file.read()
    os.waitpid(child, 0)
    memory, seconds = json.loads(said)
    return memory, seconds


def test_load_index_of_a_million_uses_little_memory(million: Path) -> None:
    memory, seconds = private(lambda: load_index(million, "train"))
    assert memory < 8e6 and seconds < 3.0  # benchmarks/index_million.py has the numbers: 50 ms

    def use() -> Any:
        index = load_index(million, "train")
        order = permutation(0, 1, len(index))
        for start in range(0, 200_000, 256):
            assert index.labels[order[start : start + 256]].dtype == np.int64
        return index, order

    memory, seconds = private(use)
    assert memory < 8 * MILLION + 8e6 and seconds < 6.0  # the order, and little more


def test_plan_rect_validation_of_a_million_allocates_few_objects(million: Path) -> None:
    index = load_index(million, "train")
    begun = time.perf_counter()
    permutation(0, 1, len(index))
    assert time.perf_counter() - begun < 3.0
    before = sys.getallocatedblocks()
    memory, seconds = private(lambda: plan_rect_validation(index.widths, index.heights, 288, 256, 0, 1))
    assert memory < 100e6 and seconds < 5.0
    plan = plan_rect_validation(index.widths, index.heights, 288, 256, 0, 2)
    assert sys.getallocatedblocks() - before < MILLION / 10
    assert abs(sum(len(ids) for _, ids in plan) - MILLION / 2) <= 1


def test_name_in_a_million_is_found(million: Path) -> None:
    index = load_index(million, "train")
    assert index.name(MILLION - 1).endswith(f"/{MILLION - 1}.JPEG") and f"(id {MILLION - 1}, " in index.location(
        -1 % MILLION
    )
    check_same_images(index, load_index(million, "train"))
