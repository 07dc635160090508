"""Looking into packed sets: what is there, and every fault by name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import simplejpeg

from train.data.index.open import DataError
from train.data.index.packed import INDEX_FILE, MANIFEST_FILE, NAMES_FILE
from train.data.packing.pack import copy_targets, pack_set
from train.data.packing.verify import list_sets, verify_packed_sets
from train.tools.filesystem import to_json_bytes


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 12 + 3 small images, packed in full size, and two sizes of copies. Copy it before changing it."""
    root = tmp_path_factory.mktemp("made")
    dice = np.random.default_rng(0)
    for number in range(15):
        path = root / f"data/{'train' if number < 12 else 'val'}/{'abc'[number % 3]}/{number:02d}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(simplejpeg.encode_jpeg(dice.integers(0, 255, (50, 60, 3), np.uint8)))
    pack_set(root / "data", {None: root / "full"}, shard_bytes=30_000)
    pack_set(root / "data", copy_targets(root / "sz", [32, 40]), shard_bytes=8_000)
    return root


@pytest.fixture
def full(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made / "full", tmp_path / "full")
    return tmp_path / "full"


def faults(root: Path) -> list[str]:
    found = verify_packed_sets(root).faults
    assert all("\n" not in f"{where}{what}" for where, what in found)
    return [f"{where}: {what}" for where, what in found]


def test_a_whole_set_has_no_fault_and_everything_was_looked_at(made: Path) -> None:
    seen: list[tuple[int, int]] = []
    done = verify_packed_sets(made / "sz", lambda *step: seen.append(step))
    files = [path for path in (made / "sz").rglob("*") if path.is_file() and path.name[0] not in ".m"]
    assert (done.faults, done.images, done.files) == ([], 2 * 15, len(files))
    assert done.bytes == sum(path.stat().st_size for path in files)
    assert seen[-1] == (30, 30)
    assert verify_packed_sets(made / "sz/32/train").images == 12


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 8
    path.write_bytes(data)


def test_changed_bytes_are_named_by_file_and_by_image_and_no_more(full: Path) -> None:
    rows = np.load(full / "train" / INDEX_FILE)
    path = full / "train/shard-00001.bin"
    second = np.flatnonzero(rows["shard"] == 1)[1]
    flip(path, int(rows["offset"][second]) + 100)
    flip(path, 5)
    said = faults(full)
    assert [one.split(": ")[0] for one in said] == [
        str(path),
        f"{path}, image 0 in it (id {second - 1}, {name(second - 1)})",
        f"{path}, image 1 in it (id {second}, {name(second)})",
    ]
    assert "(sha256)" in said[0] and all("(checksum)" in one for one in said[1:])


def name(number: int) -> str:
    """The name by id: classes a, b, c have every third of 12 images."""
    return f"{'abc'[number // 4]}/{number // 4 + number % 4 * 3:02d}.JPEG"


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("file", ["shard-00000.bin", INDEX_FILE, NAMES_FILE])
@pytest.mark.parametrize("how", ["bit", "cut", "longer", "gone"])
def test_each_file_that_is_not_as_it_was_is_named(how: str, file: str, split: str, full: Path) -> None:
    path = full / split / file
    data = path.read_bytes()
    if how == "gone":
        path.unlink()
    elif how == "bit":
        flip(path, -3)
    else:
        path.write_bytes({"cut": data[:-1], "longer": data + b"x"}[how])
    said = faults(full)
    assert said[0].startswith(f"{path}: ") and len(said) == (2 if how == "bit" and "shard" in file else 1)
    words = {"bit": "changed (sha256)", "cut": "cut short", "longer": "was replaced", "gone": "No such file"}
    assert words[how] in said[0]


def rewrite(full: Path, change: Callable[[np.ndarray], None]) -> None:
    """Change the index, with checksums that fit: what only a look at the images can tell."""
    import hashlib
    import zlib

    path = full / "train" / INDEX_FILE
    rows = np.load(path)
    change(rows)
    np.save(path, rows)
    manifest = json.loads((full / "train" / MANIFEST_FILE).read_text())
    data = path.read_bytes()
    manifest["files"][INDEX_FILE] |= {"sha256": hashlib.sha256(data).hexdigest(), "crc32": zlib.crc32(data)}
    (full / "train" / MANIFEST_FILE).write_bytes(to_json_bytes(manifest))


def test_an_index_that_says_other_sizes_is_a_fault(full: Path) -> None:
    rewrite(full, lambda rows: rows["width"].__setitem__(3, 61))
    (said,) = faults(full)
    assert "(id 3, " in said and said.endswith(f"has 60x50 pixels, {INDEX_FILE} says otherwise")


def test_an_index_that_points_elsewhere_is_a_fault(full: Path) -> None:
    rewrite(full, lambda rows: rows["shard"].__setitem__(3, 99))
    rewrite(full, lambda rows: rows["offset"].__setitem__(4, 10**9))
    said = faults(full)
    assert len(said) == 2 and "no such shard" in said[0] and "cut short" in said[1]


def test_bytes_that_are_whole_but_no_image_are_a_fault(full: Path) -> None:
    import zlib

    path = full / "train/shard-00000.bin"
    size = int(np.load(full / "train" / INDEX_FILE)["length"][0])
    path.write_bytes(bytes(size) + path.read_bytes()[size:])
    rewrite(full, lambda rows: rows["crc"].__setitem__(0, zlib.crc32(bytes(size))))
    said = faults(full)
    assert len(said) == 2 and said[1].endswith("not an image")


def test_a_damaged_manifest_and_an_unfinished_set_are_faults(full: Path) -> None:
    flip(full / "val" / MANIFEST_FILE, 0)
    (full / "train" / MANIFEST_FILE).unlink()
    said = faults(full)
    assert len(said) == 2 and "train: is not finished" in said[0] and "manifest.json: is damaged" in said[1]


def test_of_an_index_fetched_alone_the_images_are_not_missed(full: Path) -> None:
    path = full / "train" / MANIFEST_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), "fetched": "index"}))
    for shard in (full / "train").glob("*.bin"):
        shard.unlink()
    done = verify_packed_sets(full)
    assert not done.faults and done.images == 3


def test_what_is_no_packed_set_is_refused_with_what_to_type(made: Path, tmp_path: Path) -> None:
    for folder, said in ((made / "data", "imgnet-cluster data check"), (tmp_path, "no sets"), (made / "x", "no such")):
        with pytest.raises(DataError, match=said):
            verify_packed_sets(folder)


def test_the_list_has_every_set_with_its_numbers(made: Path, full: Path) -> None:
    found = {(str(one.root.relative_to(made)), one.split): one for one in list_sets(made)}
    assert set(found) == {(root, split) for root in ("data", "full") for split in ("train", "val")}
    files, packed = found["data", "train"], found["full", "train"]
    assert (files.kind, files.copy, files.images, files.classes) == ("files", None, 12, 3)
    assert (packed.kind, packed.copy, packed.images, packed.classes) == ("packed", None, 12, 3)
    assert files.bytes == sum(path.stat().st_size for path in (made / "data/train").rglob("*.JPEG"))
    copies = list_sets(made / "sz")
    assert [(one.root.name, one.split, one.copy) for one in copies] == [
        (size, split, int(size)) for size in ("32", "40") for split in ("train", "val")
    ]
    (full / "train" / MANIFEST_FILE).unlink()
    assert [one.kind for one in list_sets(full)] == ["unfinished", "packed"]
    assert [one.split for one in list_sets(full / "val")] == ["val"]


def test_classes_in_another_order_than_the_names_say_are_a_fault(full: Path) -> None:
    said = json.loads((full / "train" / MANIFEST_FILE).read_text())
    said["classes"].reverse()
    (full / "train" / MANIFEST_FILE).write_text(json.dumps(said))
    (fault,) = faults(full)
    assert "a/00.JPEG" in fault and f"{INDEX_FILE} and {MANIFEST_FILE} say class c" in fault
