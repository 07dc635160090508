"""`imgnet-cluster data` on packed data sets: results, what goes to stdout and stderr, exit codes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.packed_sets import make_set


@pytest.fixture(scope="session")
def small_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of ten training and ten validation images. Tests must not change it."""
    from train.data.packing.synthetic import draw_sample_set

    folder = tmp_path_factory.mktemp("small") / "set"
    draw_sample_set(folder, train=10, val=10)
    return folder


def test_data_pack_resize_ls_verify_check_in_sequence(sandbox: Any, small_set: Path) -> None:
    packed = sandbox.cli("data", "pack", str(small_set), "full")
    assert packed.code == 0 and packed.out == "full: 20 images packed\n"
    resized = sandbox.cli("data", "resize", "full", "sz", "--sizes", "64,96", "--shard-mb", "1")
    assert resized.code == 0 and resized.out == "sz: 40 images packed\n"
    again = sandbox.cli("data", "resize", "full", "sz", "--sizes", "96,64")
    assert again.code == 0 and again.out == "sz: 40 images already packed\n"
    listed = json.loads(sandbox.cli("data", "ls", "sz", "-o", "json").out)
    assert [(split["root"], split["split"], split["copy"], split["images"]) for split in listed] == [
        (f"sz/{size}", split, size, 10) for size in (64, 96) for split in ("train", "val")
    ]
    table = sandbox.cli("data", "ls", ".").out.splitlines()
    assert table[0].split() == ["set", "split", "copy", "images", "MB", "classes", "stored"]
    assert [line.split()[:4] for line in table if line.startswith("full")] == [
        ["full", split, "full", "10"] for split in ("train", "val")
    ]
    good = sandbox.cli("data", "verify", "sz")
    assert good.code == 0 and good.out.endswith("40 images, 0 faults\n") and "verifying sz" in good.err
    checked = json.loads(sandbox.cli("data", "check", "full", "-o", "json").out)
    assert (checked["train"], checked["val"], checked["bad"]) == (10, 10, {})
    shard = sandbox.path / "full/train/shard-00000.bin"
    shard.write_bytes(shard.read_bytes().replace(b"JFIF", b"jfif", 1))
    damaged = sandbox.cli("data", "verify", "full")
    assert damaged.code == 1 and damaged.out.endswith("2 faults\n"), damaged
    assert "damaged: full/train/shard-00000.bin, image 0 in it (id 0, checkers/" in damaged.err
    assert len(json.loads(sandbox.cli("data", "verify", "full", "-o", "json").out)["faults"]) == 2
    assert sandbox.cli("data", "check", "full").code == 1


def test_data_check_lists_all_problems_in_one_run(sandbox: Any, small_set: Path) -> None:
    root = sandbox.path / "set"
    shutil.copytree(small_set, root)
    image = next((root / "train/disc").iterdir())
    shutil.rmtree(root / "val/disc")
    (root / "val/disc").mkdir()
    shutil.rmtree(root / "val/checkers")
    (root / "train/empty").mkdir()
    (root / "train/unpacked-never.tar.part").touch()
    for place in ("train/stray.png", "val/stray.JPEG", "val/extra/a.JPEG", "train/disc/nested/a.JPEG"):
        (root / place).parent.mkdir(exist_ok=True)
        shutil.copyfile(image, root / place)
    (root / "train/disc/readme.txt").write_text("not an image")
    ran, unvalidated = sandbox.cli("data", "check", "set"), ["checkers", "disc", "empty"]
    problems = [line.split(": ")[:2] for line in ran.err.splitlines() if line.startswith(("mis", "bro", "warn"))]
    assert (ran.code, sorted(problems)) == (1, [
        ["broken", "set/train/disc/nested"], ["broken", "set/train/disc/readme.txt"],
        ["misplaced", "set/train/stray.png"], ["misplaced", "set/val/extra"], ["misplaced", "set/val/stray.JPEG"],
        ["missing", "set/train/empty"],
        ["warning", "set/train/unpacked-never.tar.part"], *(["warning", f"set/val/{name}"] for name in unvalidated),
    ])  # fmt: skip
    assert ran.out == (
        "set: 11 classes, 10 + 8 images, 2 broken files, 3 misplaced\n"
        "images of a class: train 0 (empty) to 1 (checkers); val 0 (checkers) to 1 (crescent)\n"
    )
    as_json = json.loads(sandbox.cli("data", "check", "set", "-o", "json").out)
    assert len(as_json["bad"]) == 6 and as_json["without_validation"] == unvalidated
    assert list(as_json["doubtful"]) == ["set/train/unpacked-never.tar.part"]


def test_data_check_names_classes_that_look_alike_or_are_links_to_each_other(sandbox: Any, small_set: Path) -> None:
    train, val = (shutil.copytree(small_set / split, sandbox.path / "set" / split) for split in ("train", "val"))
    for split in (train, val):
        for name in ("Disc", "disc ", " star", "k\u00e4fer", "ka\u0308fer"):
            shutil.copytree(split / "disc", split / name)
    (train / "a-link").symlink_to("ring")
    (val / "a-link").symlink_to("../train/ring")
    ran = sandbox.cli("data", "check", "set")
    doubts = [line for line in ran.err.splitlines() if line.startswith("warning")]
    alike = "differs from {!r} in case, spaces or Unicode form only"
    same_names = [(" star", "its name begins or ends with a space"), ("disc", alike.format("Disc"))]
    same_names += [
        ("disc ", alike.format("Disc")),
        ("k\u00e4fer", alike.format("ka\u0308fer")),
        ("star", alike.format(" star")),
    ]
    assert (ran.code, doubts) == (0, [
        *(f"warning: set/train/{name}: {doubt}" for name, doubt in same_names),
        "warning: set/train/a-link: the same folder as set/train/ring",
        *(f"warning: set/val/{name}: {doubt}" for name, doubt in same_names),
        "warning: set/val/a-link: the same folder as set/train/ring",
    ])  # fmt: skip
    shutil.rmtree(val)
    val.symlink_to("train")
    assert "warning: set/val: the same folder as set/train\n" in sandbox.cli("data", "check", "set").err


def test_data_pack_with_a_file_that_is_no_image_fails_or_leaves_it_out(sandbox: Any, small_set: Path) -> None:
    shutil.copytree(small_set, sandbox.path / "set")
    (sandbox.path / "set/train/disc/a.JPEG").write_bytes(b"no image")
    packed = sandbox.cli("data", "pack", "set", "full")
    assert packed.code == 1 and "error: set/train/disc/a.JPEG: not an image" in packed.err
    packed = sandbox.cli("data", "pack", "set", "full", "--skip-bad")
    assert packed.code == 0 and packed.out.endswith("1 file left out\n")


def test_data_check_holds_out_validation_images(sandbox: Any, small_set: Path) -> None:
    for name in ("disc", "ring"):
        shutil.copytree(small_set / "train" / name, sandbox.path / "set/train" / name)
    for number in range(9):
        image = next((small_set / "train/disc").iterdir())
        shutil.copyfile(image, sandbox.path / f"set/train/disc/copy{number}.JPEG")
    refused = sandbox.cli("data", "check", "set")
    assert refused.code == 1 and "set: has no val/" in refused.err and "--val-fraction 0.1" in refused.err
    checked = sandbox.cli("data", "check", "set", "--val-fraction", "0.2")
    assert checked.code == 0 and "warning: set/val/ring: a class without validation images" in checked.err
    assert "set: 2 classes, 9 + 2 images (0.2 of each class held out), 0 broken files\n" in checked.out
    (sandbox.path / "set/train/ring").rename(sandbox.path / "set/train/.ring")
    assert "warning: only one class: " in sandbox.cli("data", "check", "set", "--val-fraction", "0.2").err


@pytest.mark.parametrize("arguments, code, message", [
    (["pack", "nowhere", "full"], 1, "nowhere: there is no such data folder"),
    (["pack", "SET", "SET"], 1, "among the images"),
    (["pack", "SET", "full", "--shard-mb", "0"], 2, "--shard-mb"),
    (["verify", "nowhere"], 1, "nowhere: there is no such folder"),
    (["verify", "SET"], 1, "imgnet-cluster data check"),
    (["verify", "empty"], 1, "has no sets of images"),
    (["resize", "SET", "copies", "--sizes=31"], 2, "from 32"),
    (["resize", "SET", "SET/val/disc", "--sizes", "64"], 1, "val"),
    (["check", "nowhere"], 1, "nowhere: there is no such data folder"),
    (["sample", "--train", "9", "x"], 2, "--train"),
    (["sample", "/dev/null"], 1, "/dev/null"),
    (["fetch", "nowhere", "t"], 1, "nowhere: there is no such folder"),
    (["fetch", "packed", "t", "--sizes", "full,x"], 2, "--sizes: must be full, or whole numbers of 32 or more"),
    (["fetch", "packed", "t", "--sizes", "128"], 1, "packed-sz/128: there is no such folder"),
    (["fetch", "s3://", "t"], 1, "s3://: not an S3 address"),
    (["fetch", "packed", "packed/file"], 1, "packed/file: File exists"),
])  # fmt: skip
def test_data_bad_input_is_refused_in_one_line(
    sandbox: Any, small_set: Path, arguments: list[str], code: int, message: str
) -> None:
    make_set(sandbox.path / "packed")
    (sandbox.path / "packed/file").touch()
    (sandbox.path / "empty").mkdir()
    ran = sandbox.cli("data", *[argument.replace("SET", str(small_set)) for argument in arguments])
    assert ran.code == code and message in ran.err and not ran.out and "Traceback" not in ran.err
