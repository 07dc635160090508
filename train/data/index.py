"""A folder of images, looked through once: path, class, width and height of each, kept beside the folder.

Layout as ImageNet's: `train/<class>/*.JPEG` and `val/<class>/*.JPEG`. Every file is decoded once, so that a broken one
is named before the training and not in the middle of it. The index is arrays of numpy without pickle; it is made anew
when a file's name, size or time of change differs. Names that begin with a dot are not looked at.
"""

import hashlib
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from io import BytesIO
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ..files import locked, replace, seal, unseal
from .decode import BadImage, decode
from .threads import in_threads

VERSION = 1
SPLITS = ("train", "val")
Progress = Callable[[int, int], None]


class DataError(Exception):
    """A folder of images that cannot be used; the text is one line: what, where, what to do."""


@dataclass(frozen=True)
class Index:
    """The images of one split, sorted by class and name: arrays of equal length, `classes` by label."""

    folder: Path
    classes: tuple[str, ...]
    paths: NDArray[np.str_]
    labels: NDArray[np.int64]
    widths: NDArray[np.int64]
    heights: NDArray[np.int64]
    bad: tuple[tuple[str, str], ...] = ()

    def __len__(self) -> int:
        return len(self.paths)

    def take(self, ids: NDArray[np.int64]) -> Self:
        """Return the index of these images only, in this order."""
        arrays = {name: getattr(self, name)[ids] for name in ("paths", "labels", "widths", "heights")}
        return replace_fields(self, **arrays)

    @property
    def fingerprint(self) -> int:
        """A number of 32 bits that differs when the names of the files do: another machine may have other images."""
        return zlib.crc32(np.ascontiguousarray(self.paths).view(np.uint8).data)

    def read(self, number: int) -> bytes:
        """Return the bytes of an image's file."""
        return (self.folder / str(self.paths[number])).read_bytes()


def check_layout(root: Path) -> None:
    """Raise `DataError` unless the folder has train/ and val/ with classes, and val has no class that train lacks.

    Looks at folders only, so it is quick; `load` looks into the files.
    """
    if not root.is_dir():
        raise DataError(f"{root}: there is no such data folder; say --data DIR, or --data sample for the built-in set")
    train, val = (class_names(root, split) for split in SPLITS)
    _check_known(root, val, train)


def _check_known(root: Path, val: Sequence[str], train: Sequence[str]) -> None:
    unknown = sorted(set(val) - set(train))
    if unknown:
        raise DataError(f"{root / 'val' / unknown[0]}: a class that train/ lacks; remove it, or add it to train/")


def class_names(root: Path, split: str) -> list[str]:
    """Return the names of the class folders, sorted. Raises `DataError` when there are none."""
    folder = root / split
    if not folder.is_dir():
        raise DataError(f"{root}: has no {split}/; the layout is train/<class>/*.JPEG and val/<class>/*.JPEG")
    found = sorted(one.name for one in os.scandir(folder) if one.is_dir() and not one.name.startswith("."))
    if not found:
        raise DataError(f"{folder}: has no class folders; the layout is {split}/<class>/*.JPEG")
    return found


def load(
    root: Path,
    split: str,
    classes: Sequence[str] | None = None,
    *,
    skip_bad: bool = False,
    progress: Progress | None = None,
) -> Index:
    """Return the index of root/split, made first where it is missing or stale.

    `classes` gives the labels (those of train/ for val/). Raises `DataError` for an empty folder, a class that is not
    among `classes`, and, without `skip_bad`, for files that are not images: they are counted and the first is named.
    """
    names = class_names(root, split)
    if classes is not None:
        _check_known(root, names, classes)
    with _one_at_a_time(root, split) as cache:
        files, signature = _scan(root / split, names)
        stored = _read(cache, signature)
        if stored is None:
            stored = _build(root / split, files, progress)
            _write(cache, signature, stored)
    return _index(root / split, classes or names, stored, skip_bad)


@contextmanager
def _one_at_a_time(root: Path, split: str) -> Iterator[Path]:
    """Yield the index's path; other processes wait, so that the ranks of a run make it once."""
    cache = root / f".{split}.index.npz"
    if not os.access(root, os.W_OK):
        home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "imgnet-cluster"
        home.mkdir(parents=True, exist_ok=True)
        cache = home / f"{hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:16]}.{split}.index.npz"
    with locked(cache.with_suffix(".lock")):
        yield cache


def _scan(folder: Path, names: Sequence[str]) -> tuple[list[str], str]:
    """All files as `class/name`, sorted, and a digest that changes when any of them does."""
    digest, files = hashlib.sha256(f"{VERSION}".encode()), []
    for name in names:
        with os.scandir(folder / name) as entries:
            rows = sorted((e.name, e.stat()) for e in entries if not e.name.startswith(".") and e.is_file())
        for file, stat in rows:
            files.append(f"{name}/{file}")
            digest.update(f"{name}/{file}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
    return files, digest.hexdigest()


def _look(path: Path) -> tuple[int, int, str]:
    """An image's (width, height, ""), or (0, 0, what is wrong with it)."""
    try:
        height, width, _ = decode(path.read_bytes()).shape
        return width, height, ""
    except (BadImage, OSError) as error:
        return 0, 0, str(error)


def _build(folder: Path, files: list[str], progress: Progress | None) -> dict[str, Any]:
    """Decode every file, in threads: the decoder works outside the interpreter's lock."""
    rows = []
    for row in in_threads(_look, (folder / one for one in files)):
        rows.append(row)
        if progress and (len(rows) % 100 == 0 or len(rows) == len(files)):
            progress(len(rows), len(files))
    good = [i for i, row in enumerate(rows) if not row[2]]
    bad = [(files[i], row[2]) for i, row in enumerate(rows) if row[2]]
    return {
        "paths": np.array([files[i] for i in good], np.str_),
        "widths": np.array([rows[i][0] for i in good], np.int64),
        "heights": np.array([rows[i][1] for i in good], np.int64),
        "bad": np.array(bad, np.str_).reshape(-1, 2),
    }


def _read(cache: Path, signature: str) -> dict[str, Any] | None:
    """The stored arrays, None when there are none, they are stale or the file is damaged."""
    with suppress(OSError, ValueError, KeyError), np.load(BytesIO(unseal(cache)), allow_pickle=False) as stored:
        if str(stored["signature"]) == signature:
            return {name: stored[name] for name in ("paths", "widths", "heights", "bad")}
    return None


def _write(cache: Path, signature: str, arrays: dict[str, Any]) -> None:
    buffer = BytesIO()
    np.savez_compressed(buffer, signature=np.array(signature), **arrays)
    replace(cache, seal(buffer.getvalue()))


def _index(folder: Path, classes: Sequence[str], stored: dict[str, Any], skip_bad: bool) -> Index:
    bad = tuple((str(path), str(why)) for path, why in stored["bad"])
    if bad and not skip_bad:
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        raise DataError(
            f"{folder / bad[0][0]}{more}: {bad[0][1]}; mend or remove, or say --skip-bad to leave out {len(bad)} "
            f"of {len(bad) + len(stored['paths'])} files; all of them: imgnet-cluster data check {folder.parent}"
        )
    if not len(stored["paths"]):
        raise DataError(f"{folder}: has no images; the layout is {folder.name}/<class>/*.JPEG")
    label = {name: number for number, name in enumerate(classes)}
    labels = np.array([label[str(path).split("/")[0]] for path in stored["paths"]], np.int64)
    return Index(
        folder,
        tuple(classes),
        stored["paths"],
        labels,
        stored["widths"],
        stored["heights"],
        bad,
    )


def same_images(full: Index, copy: Index) -> None:
    """Raise `DataError` unless a prepared copy has the same images in the same order as the full-size set."""
    mine, theirs = ({os.path.splitext(str(p))[0] for p in one.paths} for one in (full, copy))  # noqa: PTH122
    missing, extra = len(mine - theirs), len(theirs - mine)
    if missing or extra:
        raise DataError(
            f"{copy.folder}: is not of the same images as {full.folder} ({missing} are missing, {extra} too many); "
            f"make it again: imgnet-cluster data resize {full.folder.parent} {copy.folder.parent.parent} "
            f"--sizes {copy.folder.parent.name}"
        )
