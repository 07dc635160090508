"""A folder of images, looked through once: path, class, width and height of each, kept beside the folder.

Layout as ImageNet's: `train/<class>/*.JPEG` and `val/<class>/*.JPEG`. Every file is decoded once, so that a broken one
is named before the training and not in the middle of it. The index is arrays of numpy without pickle; it is made anew
when a file's name, size or time of change differs. Names that begin with a dot are not looked at.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from train.data.decode import BadImage, decode_image
from train.data.threads import map_in_threads
from train.tools import filesystem
from train.tools.filesystem import locked, read_with_checksum, with_checksum

from .base import DataError, ImageIds, Index, ProgressCallback, names_crc32, stems_sha256

FOLDER_INDEX_VERSION = 2
CACHED_ARRAYS = ("paths", "widths", "heights", "bad", "source", "names")


@dataclass(frozen=True, kw_only=True)
class FolderIndex(Index):
    """The images of `folder` as `class/file name`; `told` are the digests of all names, as kept with the index."""

    paths: NDArray[np.str_]
    known_digests: tuple[str, int] | None = field(default=None, repr=False)

    def take(self, ids: ImageIds) -> Self:
        """Return the index of these images only, in this order."""
        arrays = {name: getattr(self, name)[ids] for name in ("paths", "labels", "widths", "heights")}
        return replace(self, **arrays, known_digests=None)

    def read(self, number: int) -> bytes:
        """Return the bytes of an image's file."""
        return (self.folder / self.name(number)).read_bytes()

    def names(self) -> list[str]:
        """Return `class/file name` of every image."""
        found: list[str] = self.paths.tolist()
        return found

    def name(self, number: int) -> str:
        """Return `class/file name` of one image."""
        return str(self.paths[number])

    def location(self, number: int) -> str:
        """Return the image's file."""
        return str(self.folder / self.name(number))

    @property
    def stems_digest(self) -> str:
        """The digest of the names without suffix."""
        return self.known_digests[0] if self.known_digests else super().stems_digest

    @property
    def names_checksum(self) -> int:
        """The checksum of the names."""
        return self.known_digests[1] if self.known_digests else super().names_checksum


def class_folders(folder: Path) -> list[str]:
    """Return the names of the class folders, sorted."""
    with os.scandir(folder) as entries:
        return sorted(one.name for one in entries if one.is_dir() and not one.name.startswith("."))


def loose_images(folder: Path) -> list[str]:
    """Return the names of images that lie beside the class folders, where nothing would look for them."""
    with os.scandir(folder) as entries:
        return sorted(one.name for one in entries if one.name.lower().endswith((".jpeg", ".jpg")) and one.is_file())


def load_folder_index(
    root: Path,
    split: str,
    class_folder_names: Sequence[str],
    classes: Sequence[str],
    skip_bad: bool,
    progress: ProgressCallback | None,
) -> FolderIndex:
    """Return the index of the class folders `names` of root/split, made first where it is missing or stale."""
    with _locked_cache_path(root, split) as cache:
        paths, marks = scan_class_folders(root / split, class_folder_names)
        signature = hashlib.sha256(f"{FOLDER_INDEX_VERSION} {files_digest(paths, marks)}".encode()).hexdigest()
        stored = _read_cache(cache, signature)
        if stored is None:
            stored = _build_index_arrays(root / split, paths, progress)
            _write_cache(cache, signature, stored)
    return _index_from_arrays(root / split, classes, stored, skip_bad)


@contextmanager
def _locked_cache_path(root: Path, split: str) -> Iterator[Path]:
    """Yield the index's path; other processes wait, so that the ranks of a run make it once."""
    cache = root / f".{split}.index.npz"
    if not os.access(root, os.W_OK):
        home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "imgnet-cluster"
        home.mkdir(parents=True, exist_ok=True)
        cache = home / f"{hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:16]}.{split}.index.npz"
    with locked(cache.with_suffix(".lock")):
        yield cache


def scan_class_folders(folder: Path, class_folder_names: Sequence[str]) -> tuple[list[str], NDArray[np.int64]]:
    """Return all files as `class/name`, sorted, and of each its size and its time of change in nanoseconds.

    Folders in a class and links to nothing are among them: they are told as files that are not images.
    """
    paths, marks = [], []
    for name in class_folder_names:
        with os.scandir(folder / name) as entries:
            seen = [one for one in entries if not one.name.startswith(".")]
            rows = sorted((one.name, one.stat(follow_symlinks=one.is_file())) for one in seen)
        for file, stat in rows:
            paths.append(f"{name}/{file}")
            marks.append((stat.st_size, stat.st_mtime_ns))
    return paths, np.array(marks, np.int64).reshape(-1, 2)


def files_digest(paths: Sequence[str], sizes_and_mtimes: NDArray[np.int64]) -> str:
    """Return what changes when a file's name, size or time does."""
    both = hashlib.sha256("\0".join(paths).encode("utf-8", "surrogateescape"))
    both.update(np.ascontiguousarray(sizes_and_mtimes, "<i8").tobytes())
    return both.hexdigest()


def read_image_file(path: Path) -> bytes:
    """Return an image's bytes. Raises `BadImage` for a folder and a link to nothing, `OSError`."""
    try:
        return path.read_bytes()
    except IsADirectoryError:
        raise BadImage("a folder in a class's folder") from None
    except FileNotFoundError:
        if path.is_symlink():
            raise BadImage("a link to nothing") from None
        raise


def _probe_image(path: Path) -> tuple[int, int, str]:
    """An image's (width, height, ""), or (0, 0, what is wrong with it)."""
    try:
        height, width, _ = decode_image(read_image_file(path)).shape
        return width, height, ""
    except (BadImage, OSError) as error:
        return 0, 0, str(error)


def _build_index_arrays(folder: Path, paths: list[str], progress: ProgressCallback | None) -> dict[str, Any]:
    """Decode every file, in threads: the decoder works outside the interpreter's lock."""
    rows = []
    for row in map_in_threads(_probe_image, (folder / one for one in paths)):
        rows.append(row)
        if progress and (len(rows) % 100 == 0 or len(rows) == len(paths)):
            progress(len(rows), len(paths))
    good = [i for i, row in enumerate(rows) if not row[2]]
    bad = [(paths[i], row[2]) for i, row in enumerate(rows) if row[2]]
    names = [paths[i] for i in good]
    return {
        "paths": np.array(names, np.str_),
        "widths": np.array([rows[i][0] for i in good], np.int64),
        "heights": np.array([rows[i][1] for i in good], np.int64),
        "bad": np.array(bad, np.str_).reshape(-1, 2),
        "source": np.array(stems_sha256(names)),
        "names": np.array(names_crc32(names)),
    }


def _read_cache(cache: Path, signature: str) -> dict[str, Any] | None:
    """The stored arrays, None when there are none, they are stale or the file is damaged."""
    with (
        suppress(OSError, ValueError, KeyError),
        np.load(BytesIO(read_with_checksum(cache)), allow_pickle=False) as stored,
    ):
        if str(stored["signature"]) == signature:
            return {name: stored[name] for name in CACHED_ARRAYS}
    return None


def _write_cache(cache: Path, signature: str, arrays: dict[str, Any]) -> None:
    buffer = BytesIO()
    np.savez_compressed(buffer, signature=np.array(signature), **arrays)
    filesystem.write_atomic(cache, with_checksum(buffer.getvalue()))


def _index_from_arrays(folder: Path, classes: Sequence[str], arrays: dict[str, Any], skip_bad: bool) -> FolderIndex:
    bad = tuple((str(path), str(why)) for path, why in arrays["bad"])
    if bad and not skip_bad:
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        raise DataError(
            f"{folder / bad[0][0]}{more}: {bad[0][1]}; mend or remove, or say --skip-bad to leave out {len(bad)} "
            f"of {len(bad) + len(arrays['paths'])} files; all of them: imgnet-cluster data check {folder.parent}"
        )
    if not len(arrays["paths"]):
        raise DataError(f"{folder}: has no images; the layout is {folder.name}/<class>/*.JPEG")
    label = {name: number for number, name in enumerate(classes)}
    return FolderIndex(
        folder=folder,
        classes=tuple(classes),
        paths=arrays["paths"],
        labels=np.array([label[str(path).split("/")[0]] for path in arrays["paths"]], np.int64),
        widths=arrays["widths"],
        heights=arrays["heights"],
        skipped_files=bad,
        known_digests=(str(arrays["source"]), int(arrays["names"])),
    )
