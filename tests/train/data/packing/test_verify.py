"""Tests of listing data sets and of verifying packed ones: every fault is named."""

import hashlib
import json
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from train.data.index.open import DataError, load_index
from train.data.manifest import INDEX_FILE, MANIFEST_FILE, NAMES_FILE
from train.data.packing.verify import list_sets, verify_packed_sets
from train.tools.text_files import to_json_bytes


def find_faults(root: Path) -> list[str]:
    faults = verify_packed_sets(root).faults
    assert all("\n" not in f"{where}{what}" for where, what in faults)
    return [f"{where}: {what}" for where, what in faults]


def test_verify_of_intact_set_checks_everything(sets: Path) -> None:
    progress: list[tuple[int, int]] = []
    result = verify_packed_sets(sets / "data-sz", lambda *step: progress.append(step))
    files = [path for path in (sets / "data-sz").rglob("*") if path.is_file() and path.name[0] not in ".m"]
    assert (result.faults, result.images, result.files) == ([], 2 * 28, len(files))
    assert result.bytes == sum(path.stat().st_size for path in files)
    assert progress[-1] == (56, 56)
    assert verify_packed_sets(sets / "data-sz/32/train").images == 24


def flip_bit(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 8
    path.write_bytes(data)


def test_verify_names_changed_shard_and_images(full: Path) -> None:
    rows = np.load(full / "train" / INDEX_FILE)
    path = full / "train/shard-00001.bin"
    second = np.flatnonzero(rows["shard"] == 1)[1]
    flip_bit(path, int(rows["offset"][second]) + 100)
    flip_bit(path, 5)
    faults = find_faults(full)
    assert [fault.split(": ")[0] for fault in faults] == [
        str(path),
        f"{path}, image 0 in it (id {second - 1}, {image_name(second - 1)})",
        f"{path}, image 1 in it (id {second}, {image_name(second)})",
    ]
    assert "(sha256)" in faults[0] and all("(checksum)" in fault for fault in faults[1:])


def image_name(number: int) -> str:
    """Return an image's name by ID: each of the classes a, b, c has every third of 24 images."""
    return f"{'abc'[number // 8]}/{number // 8 + number % 8 * 3:02d}.JPEG"


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("file", ["shard-00000.bin", INDEX_FILE, NAMES_FILE])
@pytest.mark.parametrize("damage", ["bit", "cut", "longer", "gone"])
def test_verify_names_damaged_file(damage: str, file: str, split: str, full: Path) -> None:
    path = full / split / file
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    elif damage == "bit":
        flip_bit(path, -3)
    else:
        path.write_bytes({"cut": data[:-1], "longer": data + b"x"}[damage])
    faults = find_faults(full)
    assert faults[0].startswith(f"{path}: ") and len(faults) == (2 if damage == "bit" and "shard" in file else 1)
    reasons = {"bit": "changed (sha256)", "cut": "cut short", "longer": "was replaced", "gone": "No such file"}
    assert reasons[damage] in faults[0]


def rewrite_index(full: Path, change: Callable[[np.ndarray], None]) -> None:
    """Change the index together with its checksums, so that only reading the images reveals the change."""
    path = full / "train" / INDEX_FILE
    rows = np.load(path)
    change(rows)
    np.save(path, rows)
    replace_index(full, path.read_bytes())


def replace_index(full: Path, data: bytes) -> None:
    (full / "train" / INDEX_FILE).write_bytes(data)
    manifest = json.loads((full / "train" / MANIFEST_FILE).read_text())
    checksums = {"sha256": hashlib.sha256(data).hexdigest(), "crc32": zlib.crc32(data)}
    manifest["files"][INDEX_FILE] |= {"bytes": len(data), **checksums}
    (full / "train" / MANIFEST_FILE).write_bytes(to_json_bytes(manifest))


@pytest.mark.parametrize("column, value", [
    ("shard", 99), ("offset", 10**9), ("offset", 2**64 - 1), ("length", 2**32 - 1), ("label", 4 * 10**9),
])  # fmt: skip
def test_index_with_an_impossible_number_is_damaged(column: str, value: int, full: Path) -> None:
    rewrite_index(full, lambda rows: rows[column].__setitem__(3, value))
    (fault,) = find_faults(full)
    assert "is damaged: an image lies outside its shard, or its class does not exist" in fault
    with pytest.raises(DataError, match="is damaged"):
        load_index(full, "train")


@pytest.mark.parametrize("data", [b"", b"PK\3\4", b"\x93NUMPY\1\0\x10\0" + b"(" * 16])
def test_index_that_numpy_cannot_read_is_damaged(data: bytes, full: Path) -> None:
    replace_index(full, data)
    (fault,) = find_faults(full)
    assert f"{full}/train/index.npy: is damaged" in fault


def test_verify_reports_damaged_manifest_and_unfinished_split(full: Path) -> None:
    flip_bit(full / "val" / MANIFEST_FILE, 0)
    (full / "train" / MANIFEST_FILE).unlink()
    faults = find_faults(full)
    assert len(faults) == 2
    assert "train: is not finished" in faults[0] and "manifest.json: is damaged" in faults[1]


def test_verify_of_index_only_split_needs_no_shards(full: Path) -> None:
    path = full / "train" / MANIFEST_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), "fetched": "index"}))
    for shard in (full / "train").glob("*.bin"):
        shard.unlink()
    result = verify_packed_sets(full)
    assert not result.faults and result.images == 4


def test_list_sets_summarizes_every_split(sets: Path, full: Path) -> None:
    summaries = [*list_sets(sets), *list_sets(sets / "data-sz")]
    found = [(each.root.name, each.split, each.kind, each.copy, each.images, each.classes) for each in summaries]
    kinds = (("data", "files", None), ("full", "packed", None), ("32", "packed", 32), ("40", "packed", 40))
    splits = (("train", 24), ("val", 4))
    assert found == [(name, split, kind, copy, images, 3) for name, kind, copy in kinds for split, images in splits]
    assert summaries[0].bytes == sum(path.stat().st_size for path in (sets / "data/train").rglob("*.JPEG"))
    (full / "train" / MANIFEST_FILE).unlink()
    assert [summary.kind for summary in list_sets(full)] == ["unfinished", "packed"]
    assert [summary.split for summary in list_sets(full / "val")] == ["val"]


def image_of_zeros(rows: np.ndarray) -> None:
    rows["crc"][0] = zlib.crc32(bytes(int(rows["length"][0])))


@pytest.mark.parametrize(("change", "faults"), [
    (lambda rows: rows["width"].__setitem__(3, 60), [("(id 3, ", f"has 61x43 pixels, {INDEX_FILE} says otherwise")]),
    (lambda rows: rows["label"].__setitem__(0, 2), [("a/00.JPEG", f"{INDEX_FILE} and {MANIFEST_FILE} say class c")]),
    (image_of_zeros, [("shard-00000.bin", "(sha256)"), ("(id 0, ", "not an image")]),
])  # fmt: skip
def test_verify_finds_what_only_the_images_show(
    change: Callable[[np.ndarray], None], faults: list[tuple[str, str]], full: Path
) -> None:
    if change is image_of_zeros:
        path = full / "train/shard-00000.bin"
        size = int(np.load(full / "train" / INDEX_FILE)["length"][0])
        path.write_bytes(bytes(size) + path.read_bytes()[size:])
    rewrite_index(full, change)
    for found, (where, what) in zip(find_faults(full), faults, strict=True):
        assert where in found and what in found
