"""Tests of the index of a folder of files: its content, when it is rebuilt, and one-line errors."""

import errno
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.error_lines import error_line
from support.run_outputs import damage_pixels

from train.data.index import folder as folder_module
from train.data.index.base import IntColumn, names_crc32
from train.data.index.folder import FolderIndex
from train.data.index.open import DataError, check_layout, load_index
from train.data.packing.synthetic import draw_image

data_error_of = partial(error_line, DataError)


def jpeg(number: int, size: tuple[int, int] = (40, 30)) -> bytes:
    """Return a small image file with the colors of `number`."""
    pixels = np.random.default_rng(number).integers(0, 255, (size[1] // 10, size[0] // 10, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).resize(size).save(buffer, "JPEG")
    return buffer.getvalue()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A set of two classes, with two and one training images, and one validation image each."""
    for number, name in enumerate(("train/cat/b.JPEG", "train/cat/a.JPEG", "train/dog/c.JPEG")):
        write(tmp_path / "data" / name, jpeg(number, size=(40 + 10 * number, 30)))
    write(tmp_path / "data/val/cat/v.JPEG", jpeg(7))
    write(tmp_path / "data/val/dog/w.JPEG", jpeg(8))
    return tmp_path / "data"


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def load_folder_index(*arguments: Any, **options: Any) -> FolderIndex:
    """Call `load_index` for a folder of files."""
    index = load_index(*arguments, **options)
    assert isinstance(index, FolderIndex)
    return index


def load_and_watch(root: Path, split: str = "train", **options: bool) -> tuple[FolderIndex, bool]:
    progress: list[tuple[int, int]] = []
    return load_folder_index(root, split, progress=lambda *step: progress.append(step), **options), bool(progress)


def numbers(column: IntColumn) -> list[int]:
    return np.asarray(column).tolist()


def test_load_index_sorts_by_class_and_name(root: Path) -> None:
    (root / "train/bee").mkdir()  # a class without images
    write(root / "train/dog/größer 犬 #1.JPEG", jpeg(11))
    for hidden in ("cat/.hidden.JPEG", ".cache/x.JPEG", "dog/.folder/x.JPEG"):
        write(root / "train" / hidden, b"no image")
    index = load_folder_index(root, "train")
    assert index.folder == root / "train" and index.classes == ("bee", "cat", "dog")
    assert index.names() == ["cat/a.JPEG", "cat/b.JPEG", "dog/c.JPEG", "dog/größer 犬 #1.JPEG"]
    assert numbers(index.labels) == [1, 1, 2, 2]
    assert numbers(index.widths) == [50, 40, 60, 40] and numbers(index.heights) == [30] * 4
    assert len(index) == 4 and index.skipped_files == ()
    assert index.read(3) == (root / "train/dog/größer 犬 #1.JPEG").read_bytes()
    assert numbers(load_index(root, "val", index.classes).labels) == [1, 2], "those of train/"


def touch(path: Path) -> None:
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))


@pytest.mark.parametrize("change_files", [
    pytest.param(lambda train: write(train / "dog/new.JPEG", jpeg(9)), id="add"),
    pytest.param(lambda train: (train / "cat/a.JPEG").unlink(), id="remove"),
    pytest.param(lambda train: write(train / "cat/a.JPEG", jpeg(10, size=(90, 70))), id="change"),
    pytest.param(lambda train: touch(train / "cat/a.JPEG"), id="touch"),
    pytest.param(lambda train: (train / "cat/a.JPEG").rename(train / "dog/a.JPEG"), id="move"),
])  # fmt: skip
def test_load_index_after_file_change_rebuilds(change_files: Callable[[Path], None], root: Path) -> None:
    load_and_watch(root)
    change_files(root / "train")
    index, was_decoded = load_and_watch(root)
    assert was_decoded and not load_and_watch(root)[1]
    files = sorted(str(path.relative_to(root / "train")) for path in (root / "train").rglob("*.JPEG"))
    assert index.names() == files
    for number, path in enumerate(index.paths):
        with Image.open(root / "train" / path) as image:
            assert (index.widths[number], index.heights[number]) == image.size
        assert index.classes[index.labels[number]] == path.split("/")[0]


def test_load_index_with_damaged_cache_rebuilds(root: Path) -> None:
    before, _ = load_and_watch(root)
    (cache,) = root.glob(".train.*.npz")
    content = cache.read_bytes()
    for length in (0, 1, 60, len(content) - 200, len(content) - 1):
        cache.write_bytes(content[:length])
        after, was_decoded = load_and_watch(root)
        assert was_decoded and after.names() == before.names()
    for position in np.random.default_rng(0).choice(len(content), 60, replace=False):
        cache.write_bytes(content[:position] + bytes([content[position] ^ 0x55]) + content[position + 1 :])
        assert load_folder_index(root, "train").names() == before.names(), position


@pytest.mark.parametrize(("function", "error_number"), [
    ("locked", errno.EACCES), ("locked", errno.EROFS), ("locked", errno.ENOSYS), ("write_atomic", errno.EPERM),
])  # fmt: skip
def test_cache_moves_to_the_user_or_is_left_out(
    function: str,
    error_number: int,
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The data folder cannot be written or locked; then the user's cache folder cannot, either."""
    refused, work = [root], getattr(folder_module, function)

    def refuse(path: Path, *content: bytes, **permissions: int) -> Any:
        if any(path.is_relative_to(folder) for folder in refused):
            raise OSError(error_number, os.strerror(error_number), str(path))
        return work(path, *content, **permissions)

    monkeypatch.setattr(folder_module, function, refuse)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first, _ = load_and_watch(root)
    assert not load_and_watch(root)[1] and not list(root.glob(".train*.npz")) and not caplog.records
    shutil.rmtree(tmp_path / "cache")
    refused.append(tmp_path / "cache")
    for _ in range(2):
        index, was_decoded = load_and_watch(root)
        assert was_decoded and index.names() == first.names()
    assert "cannot be cached" in caplog.messages[0] and "XDG_CACHE_HOME" in caplog.messages[0]


def test_load_index_with_bad_files_raises_or_skips(root: Path) -> None:
    for number, data in enumerate((b"", b"hello, world" * 50, draw_image(0, "train", 3)[:3000])):
        write(root / f"train/cat/x{number}.JPEG", data)
    for _ in range(2):  # first without, then with a cached index
        message = data_error_of(load_index, root, "train")
        assert message.startswith(f"{root}/train/cat/x0.JPEG and 2 more") and "--skip-bad" in message
        assert "3 of 6 files" in message
    index = load_folder_index(root, "train", skip_bad=True)
    assert index.names() == ["cat/a.JPEG", "cat/b.JPEG", "dog/c.JPEG"]
    assert [path for path, reason in index.skipped_files if reason] == [f"cat/x{number}.JPEG" for number in range(3)]


def test_load_index_reads_headers_and_decodes_with_skip_bad(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(root / "train/cat/a.JPEG", jpeg(1, size=(400, 300)))
    damage_pixels(root / "train/cat/a.JPEG")
    with monkeypatch.context() as patch:
        patch.setattr(folder_module, "decode_image", None)
        for _ in range(2):  # without and with a cached index
            index = load_folder_index(root, "train")
            assert index.names() == ["cat/a.JPEG", "cat/b.JPEG", "dog/c.JPEG"]
            assert (numbers(index.widths), numbers(index.heights)) == ([400, 40, 60], [300, 30, 30])
    for was_read in (True, False):
        index, was_decoded = load_and_watch(root, skip_bad=True)
        assert was_decoded == was_read and [path for path, _ in index.skipped_files] == ["cat/a.JPEG"]
    assert "a part of its pixels is lost" in data_error_of(load_index, root, "train"), "now it is known"


def remove_train_classes(root: Path) -> None:
    for path in (root / "train").iterdir():
        shutil.rmtree(path)


def write_class_in_two_unicode_forms(root: Path) -> None:
    write(root / "train/ka\u0308fer/x.JPEG", jpeg(1))
    write(root / "val/k\u00e4fer/x.JPEG", jpeg(1))


@pytest.mark.parametrize(("change", "message"), [
    (lambda root: shutil.rmtree(root), "ROOT: there is no such data folder"),
    (lambda root: shutil.rmtree(root / "train"), "ROOT: has no train/"),
    (lambda root: shutil.rmtree(root / "val"), "ROOT: has no val/"),
    (remove_train_classes, "ROOT/train: has no class folders"),
    (lambda root: write(root / "val/eel/x.JPEG", jpeg(1)), "ROOT/val/eel: a class that train/ lacks"),
    (write_class_in_two_unicode_forms, "ROOT/val/k\u00e4fer: a class that train/ has in another Unicode form"),
    (lambda root: write(root / "val/loose.JPEG", jpeg(2)), "ROOT/val/loose.JPEG: an image beside the class folders"),
    (lambda root: (root / "train/eel").symlink_to("/mnt/gone/eel"), "ROOT/train/eel: a broken symbolic link beside"),
    (lambda root: (root / "train/eel").symlink_to("eel"), "ROOT/train/eel: a broken symbolic link beside"),
])  # fmt: skip
def test_check_layout_names_the_first_problem(change: Callable[[Path], None], message: str, root: Path) -> None:
    change(root)
    assert data_error_of(check_layout, root).replace(str(root), "ROOT").startswith(message)


def test_load_index_without_images_raises(root: Path) -> None:
    for path in (root / "train").rglob("*.JPEG"):
        path.unlink()
    check_layout(root)
    assert data_error_of(load_index, root, "train").startswith(f"{root}/train: has no images")
    write(root / "train/cat/x.JPEG", b"no image")
    assert data_error_of(load_index, root, "train", skip_bad=True).startswith(f"{root}/train: has no images")


def test_load_index_reports_misplaced_entries(root: Path, tmp_path: Path) -> None:
    write(root / "train/cat/sub/a.JPEG", jpeg(1))
    (root / "train/cat/circle.JPEG").symlink_to("circle.JPEG")
    with (root / "train/cat/sparse.JPEG").open("wb") as file:
        file.truncate(10**12)  # more than any memory
    (root / "train/dog/z.JPEG").symlink_to(tmp_path / "nothing")
    os.mkfifo(root / "train/dog/pipe.JPEG")
    os.utime(root / "train/cat/a.JPEG", (10**10, 10**10))  # a date in the far future is no fault
    index = load_folder_index(root, "train", skip_bad=True)
    assert index.names() == ["cat/a.JPEG", "cat/b.JPEG", "dog/c.JPEG"]
    assert index.skipped_files == (
        ("cat/circle.JPEG", "a broken symbolic link"),
        ("cat/sparse.JPEG", "1000.0 GB are too many for an image"),
        ("cat/sub", "a folder inside a class folder"),
        ("dog/pipe.JPEG", "a pipe, socket or device"),
        ("dog/z.JPEG", "a broken symbolic link"),
    )


def test_file_that_could_not_be_read_is_tried_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for error, reason in (
        (OSError(errno.EIO, "Input/output error"), "Input/output error"),
        (MemoryError(), "this computer has too little memory to decode it"),
    ):

        def fail(path: Path, error: Exception = error) -> bytes:
            if path.name == "b.JPEG":
                raise error
            return path.read_bytes()

        with monkeypatch.context() as patch:
            patch.setattr(folder_module, "read_image_file", fail)
            index = load_folder_index(root, "train", skip_bad=True)
            assert index.skipped_files == (("cat/b.JPEG", reason),)
            assert index.names() == ["cat/a.JPEG", "dog/c.JPEG"]
    index, was_decoded = load_and_watch(root)
    assert was_decoded and len(index) == 3 and index.skipped_files == () and not load_and_watch(root)[1]
    assert (numbers(index.widths), index.names_checksum) == ([50, 40, 60], names_crc32(index.names()))


def test_cache_of_one_locale_serves_another_with_the_bytes_of_the_names(root: Path) -> None:
    for name in (b"cat/gr\xfc\xdf.JPEG", "dog/gr\u00f6\u00dfer.JPEG".encode()):
        write(root / "train" / os.fsdecode(name), jpeg(1))
    write(root / "train/cat" / os.fsdecode(b"b\xe4d.JPEG"), b"no image")
    index = load_folder_index(root, "train", skip_bad=True)
    script = (
        "import os, sys; from pathlib import Path; from train.data.index.open import load_index\n"
        "index = load_index(Path(sys.argv[1]), 'train', skip_bad=True, progress=None)\n"  # decoding would call it
        "print([os.fsencode(name) for name in (*index.names(), *index.skipped_files[0])])"
    )
    ascii_locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    shown = subprocess.check_output([sys.executable, "-c", script, root], text=True, env={**os.environ, **ascii_locale})
    assert shown == f"{[os.fsencode(name) for name in (*index.names(), *index.skipped_files[0])]}\n" and len(index) == 5
