"""`imgnet-cluster data` on packed sets, as it is typed: results, what goes where, exit codes."""

import json
from pathlib import Path
from typing import Any

import pytest

Fixture = Any


@pytest.fixture(scope="session")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten and ten drawn images. Not to be changed."""
    from train.data.packing.synthetic import draw_sample_set

    folder = tmp_path_factory.mktemp("few") / "set"
    draw_sample_set(folder, train=10, val=10)
    return folder


def test_a_set_is_packed_resized_listed_verified_and_checked(place: Fixture, few: Path) -> None:
    packed = place.cli("data", "pack", str(few), "full")
    assert packed.code == 0 and packed.out == "full: 20 images packed, 0 were there, 0 files left out\n"
    resized = place.cli("data", "resize", "full", "sz", "--sizes", "64,96", "--shard-mb", "1")
    assert resized.code == 0 and resized.out == "sz: 40 images packed, 0 were there, 0 files left out\n"
    again = place.cli("data", "resize", "full", "sz", "--sizes", "96,64")
    assert again.code == 0 and again.out == "sz: 0 images packed, 40 were there, 0 files left out\n"
    listed = json.loads(place.cli("data", "ls", "sz", "-o", "json").out)
    assert [(one["root"], one["split"], one["copy"], one["images"]) for one in listed] == [
        (f"sz/{size}", split, size, 10) for size in (64, 96) for split in ("train", "val")
    ]
    table = place.cli("data", "ls", ".").out.splitlines()
    assert table[0].split() == ["set", "split", "copy", "images", "MB", "classes", "stored"]
    assert [line.split()[:4] for line in table if line.startswith("full")] == [
        ["full", split, "full", "10"] for split in ("train", "val")
    ]
    good = place.cli("data", "verify", "sz")
    assert good.code == 0 and good.out.endswith("40 images, 0 faults\n") and "verifying sz" in good.err
    checked = json.loads(place.cli("data", "check", "full", "-o", "json").out)
    assert (checked["train"], checked["val"], checked["bad"]) == (10, 10, {})


def test_every_fault_is_named_and_the_exit_code_says_so(place: Fixture, few: Path) -> None:
    assert place.cli("data", "pack", str(few), "full").code == 0
    shard = place.path / "full/train/shard-00000.bin"
    data = bytearray(shard.read_bytes())
    data[1000] ^= 1
    shard.write_bytes(data)
    talked = place.cli("data", "verify", "full")
    assert talked.code == 1 and talked.out.endswith("2 faults\n")
    damaged = [line for line in talked.err.splitlines() if line.startswith("damaged: ")]
    assert damaged[0].startswith("damaged: full/train/shard-00000.bin: ")
    assert damaged[1].startswith("damaged: full/train/shard-00000.bin, image 0 in it (id 0, checkers/")
    told = place.cli("data", "verify", "full", "-o", "json")
    assert told.code == 1 and len(json.loads(told.out)["faults"]) == 2
    assert place.cli("data", "check", "full").code == 1


def test_a_file_that_is_no_image_ends_packing_in_one_line(place: Fixture, few: Path) -> None:
    import shutil

    shutil.copytree(few, place.path / "set")
    broken = next((place.path / "set/train/disc").iterdir())
    broken.write_bytes(b"no image")
    ran = place.cli("data", "pack", "set", "full")
    last = ran.err.splitlines()[-1]
    assert ran.code == 1 and last.startswith(f"error: {broken.relative_to(place.path)}: not an image") and not ran.out
    skipped = place.cli("data", "pack", "set", "full", "--skip-bad")
    assert skipped.code == 0 and skipped.out.endswith("1 file left out\n")
    assert f"left out: {broken.relative_to(place.path)}: not an image" in skipped.err


def test_changed_sources_are_told(place: Fixture, few: Path) -> None:
    import shutil

    shutil.copytree(few, place.path / "set")
    assert place.cli("data", "pack", "set", "full").code == 0
    next((place.path / "set/train/disc").iterdir()).unlink()
    ran = place.cli("data", "pack", "set", "full")
    assert ran.code == 1 and "have changed since; give another folder, or replace it: --anew" in ran.err
    ran = place.cli("data", "pack", "set", "full", "--anew")
    assert ran.code == 0 and "full/train: the sources, or how they are packed, have changed; packed again" in ran.err
    assert ran.out == "full: 9 images packed, 10 were there, 0 files left out\n"


@pytest.mark.parametrize("words, code, said", [
    (["pack", "nowhere", "full"], 1, "nowhere: there is no such data folder"),
    (["pack", "SET", "SET"], 1, "among the images"),
    (["pack", "SET"], 2, "TARGET"),
    (["pack", "SET", "full", "--shard-mb", "0"], 2, "--shard-mb"),
    (["verify", "nowhere"], 1, "nowhere: there is no such folder"),
    (["verify", "SET"], 1, "imgnet-cluster data check"),
    (["verify", "."], 1, "has no sets of images"),
    (["ls", "nowhere"], 1, "nowhere: there is no such folder"),
    (["ls"], 2, "FOLDER"),
])  # fmt: skip
def test_what_cannot_be_done_is_one_line(place: Fixture, few: Path, words: list[str], code: int, said: str) -> None:
    ran = place.cli("data", *[str(few) if one == "SET" else one for one in words])
    assert ran.code == code and said in ran.err and not ran.out and "Traceback" not in ran.err
