"""`data split`: which images go where, that none is touched, and what is refused; killed calls and full disks."""

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.packed_sets import content
from support.small_disk import enlarge, fill

from train.data.index.open import DataError, load_index
from train.data.packing import split
from train.data.packing.pack import pack_set
from train.data.packing.synthetic import draw_image
from train.data.validation_split import held_out_names

COUNTS = {"cat": 10, "dog": 5, "eel": 1}


def draw(folder: Path) -> list[str]:
    """Draw images of three classes; return their names."""
    names = [f"{name}/{number}.JPEG" for name, count in COUNTS.items() for number in range(count)]
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(draw_image(0, "train", number))
    return names


def split_folder(source: Path, target: Path, progress: Callable[[int, int], object] = lambda *_: None) -> Any:
    return split.split_folder(source, target, 0.2, progress)


@pytest.mark.parametrize("below", [".", "train"])
@pytest.mark.parametrize("can_link", [True, False])
def test_split_has_each_image_once_as_a_launch_would_hold_them_out(
    tmp_path: Path, below: str, can_link: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "photos", tmp_path / "sets/own"
    names, before = draw(source / below), content(source)
    if not can_link:
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(errno.EXDEV, "another disk")))
    note = "1 of 3 classes have no validation images, so the accuracy does not count them: eel"
    assert split_folder(source, target) == (13, 3, [note])
    train, val = (load_index(target, part).names() for part in ("train", "val"))
    assert {*val} == held_out_names(names, 0.2) and sorted([*train, *val]) == sorted(names)
    placed = (target / "val" / val[0]).stat(), (source / below / val[0]).stat()
    assert os.path.samestat(*placed) == can_link and placed[0].st_mtime_ns == placed[1].st_mtime_ns
    assert content(source) == before
    assert {path.name for path in target.parent.iterdir()} == {"own"}, "no lock and no unfinished folder"


@pytest.mark.parametrize(("spoil", "target", "message"), [
    (lambda folder: (folder / "val").mkdir(), "new", "val: the data set is split already"),
    (lambda folder: (folder / "valid").mkdir(), "new", r"valid: the data set is split .* belong into val/"),
    (lambda folder: (folder.parent / "new").mkdir(), "new", "exists already, or lies among the images"),
    (lambda folder: None, "photos/train/new", "exists already, or lies among the images; name another"),
    (lambda folder: (folder / "train/9.png").touch(), "new", "9.png: an image beside the class folders"),
    (lambda folder: (folder / "train").rename(folder / "a"), "new", "too few|Is a directory"),
    (lambda folder: folder.rename(folder.parent / "gone"), "new", "photos: there is no such folder"),
    (lambda folder: (folder / "train/cat/more").mkdir(), "new", "Is a directory: .*cat/more"),
    (lambda folder: [*map(Path.unlink, folder.rglob("[1-9]*"))], "new", "photos/train: has too few images"),
    (lambda folder: pack_set(folder, {None: folder.parent / "packed"}, val_fraction=0.2), "new", "split already"),
])  # fmt: skip
def test_split_refuses_what_it_cannot_divide(tmp_path: Path, spoil: Any, target: str, message: str) -> None:
    source, packed = tmp_path / "photos", tmp_path / "packed"
    draw(source / "train")
    spoil(source)
    before = content(tmp_path)
    with pytest.raises((DataError, OSError), match=message):
        split_folder(packed if packed.exists() else source, tmp_path / target)
    assert content(tmp_path) == before


def test_killed_split_leaves_no_data_set_and_is_repeated(tmp_path: Path) -> None:
    names = draw(tmp_path / "photos")

    def die(done: int, total: int) -> None:
        if done == 7:
            os.kill(os.getpid(), signal.SIGKILL)

    if not (child := os.fork()):
        split_folder(tmp_path / "photos", tmp_path / "new", die)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert len(content(tmp_path / ".new.part")) == 7 and not (tmp_path / "new").exists()
    (tmp_path / ".new.part/train/cat/stale.JPEG").touch()
    split_folder(tmp_path / "photos", tmp_path / "new")
    assert len(content(tmp_path / "new")) == len(content(tmp_path / "photos")) == len(names)
    assert {path.name for path in tmp_path.iterdir()} == {"photos", "new"}


def test_split_on_a_full_disk_leaves_nothing(tmp_path: Path, small_disk: Path) -> None:
    draw(tmp_path / "photos")
    filling = fill(small_disk)
    os.truncate(filling, filling.stat().st_size - 40_000)  # room for a part of the images
    with pytest.raises(OSError, match="No space left"):
        split_folder(tmp_path / "photos", small_disk / "new")
    assert [*small_disk.iterdir()] == [filling]
    enlarge(small_disk, 8)
    assert split_folder(tmp_path / "photos", small_disk / "new")[:2] == (13, 3)
