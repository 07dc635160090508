"""The index of a folder of image files: path, class, width and height of each, built once and cached beside the folder.

The layout is ImageNet's: `train/<class>/*.JPEG` and `val/<class>/*.JPEG`. Every file is decoded once, so that a broken
file is named before the training and not in the middle of it. The cache holds numpy arrays without pickle. It is
rebuilt when a file's name, size or modification time differs. Names that begin with a dot are ignored.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from train.data.decode import BadImage, decode_image
from train.data.threads import map_in_threads
from train.tools import filesystem
from train.tools.filesystem import locked, read_with_checksum, with_checksum
from train.tools.process_log import Progress

from .base import DataError, ImageIds, Index, names_crc32, stems_sha256

Arrays = dict[str, Any]  # Any: numpy arrays, each with its own type of elements

FOLDER_INDEX_VERSION = 2
IMAGE_SUFFIXES = (".jpeg", ".jpg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
CACHED_ARRAYS = ("paths", "widths", "heights", "bad", "source", "names")


@dataclass(frozen=True, kw_only=True)
class FolderIndex(Index):
    """The images of a folder. `paths` are `class/file name`."""

    paths: NDArray[np.str_]

    def take(self, ids: ImageIds) -> Self:
        """Return an index of only these images, in this order."""
        arrays = {name: getattr(self, name)[ids] for name in ("paths", "labels", "widths", "heights")}
        return replace(self, **arrays, known_digests=None)

    def read(self, number: int) -> bytes:
        """Return the bytes of an image file. Raises `OSError`."""
        return (self.folder / self.name(number)).read_bytes()

    def names(self) -> list[str]:
        """Return `class/file name` of every image."""
        names: list[str] = self.paths.tolist()
        return names

    def name(self, number: int) -> str:
        """Return `class/file name` of one image."""
        return str(self.paths[number])

    def location(self, number: int) -> str:
        """Return the path of the image file."""
        return str(self.folder / self.name(number))


def class_folders(folder: Path) -> list[str]:
    """Return the names of the class folders, sorted."""
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def loose_images(folder: Path) -> list[str]:
    """Return the names of images that lie beside the class folders, where no index would find them."""
    with os.scandir(folder) as entries:
        return sorted(
            entry.name for entry in entries if entry.name.lower().endswith(IMAGE_SUFFIXES) and entry.is_file()
        )


def load_folder_index(
    root: Path,
    split: str,
    class_folder_names: Sequence[str],
    classes: Sequence[str],
    skip_bad: bool,
    progress: Progress,
) -> FolderIndex:
    """Return the index of the given class folders of root/split. It is built first where it is missing or stale.

    `classes` are the class names by label. Raises `DataError` when there are no images, and, unless `skip_bad`, when
    files cannot be decoded.
    """
    with _locked_cache_path(root, split) as cache:
        paths, sizes_and_mtimes = scan_class_folders(root / split, class_folder_names)
        digest = files_digest(paths, sizes_and_mtimes)
        signature = hashlib.sha256(f"{FOLDER_INDEX_VERSION} {digest}".encode()).hexdigest()
        arrays = _read_cache(cache, signature)
        if arrays is None:
            arrays = _build_index_arrays(root / split, paths, progress)
            _write_cache(cache, signature, arrays)
    return _index_from_arrays(root / split, classes, arrays, skip_bad)


@contextmanager
def _locked_cache_path(root: Path, split: str) -> Iterator[Path]:
    """Yield the path of the cached index under a lock, so that the ranks of a run build the index once.

    The cache lies in the root, or in the user's cache folder where the root is read-only.
    """
    cache = root / f".{split}.index.npz"
    if not os.access(root, os.W_OK):
        cache_folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "imgnet-cluster"
        cache_folder.mkdir(parents=True, exist_ok=True)
        root_id = hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:16]
        cache = cache_folder / f"{root_id}.{split}.index.npz"
    with locked(cache.with_suffix(".lock")):
        yield cache


def scan_class_folders(folder: Path, class_folder_names: Sequence[str]) -> tuple[list[str], NDArray[np.int64]]:
    """Return all files as `class/name`, sorted, and [n, 2] of their sizes (bytes) and modification times (ns).

    Folders inside a class folder and broken links are included: they are reported later as files that are not images.
    """
    paths, sizes_and_mtimes = [], []
    for class_name in class_folder_names:
        with os.scandir(folder / class_name) as entries:
            visible_entries = [entry for entry in entries if not entry.name.startswith(".")]
            rows = sorted((entry.name, entry.stat(follow_symlinks=entry.is_file())) for entry in visible_entries)
        for file_name, stat in rows:
            paths.append(f"{class_name}/{file_name}")
            sizes_and_mtimes.append((stat.st_size, stat.st_mtime_ns))
    return paths, np.array(sizes_and_mtimes, np.int64).reshape(-1, 2)


def files_digest(paths: Sequence[str], sizes_and_mtimes: NDArray[np.int64]) -> str:
    """Return a digest that changes when a file's name, size or modification time does."""
    digest = hashlib.sha256("\0".join(paths).encode("utf-8", "surrogateescape"))
    digest.update(np.ascontiguousarray(sizes_and_mtimes, "<i8").tobytes())
    return digest.hexdigest()


def read_image_file(path: Path) -> bytes:
    """Return the bytes of an image file. Raises `BadImage` for what is no file, and for a broken link, else `OSError`.

    A pipe, for example, would be read for ever.
    """
    try:
        mode = path.stat().st_mode
        if not S_ISREG(mode):
            raise BadImage("a folder inside a class folder" if S_ISDIR(mode) else "a pipe, socket or device")
        return path.read_bytes()
    except FileNotFoundError:
        if path.is_symlink():
            raise BadImage("a broken symbolic link") from None
        raise


def _probe_image(path: Path) -> tuple[int, int, str]:
    """Return an image's (width, height, ""), or (0, 0, reason) when it cannot be decoded."""
    try:
        height, width, _ = decode_image(read_image_file(path)).shape
        return width, height, ""
    except (BadImage, OSError) as error:
        return 0, 0, str(error)


def _build_index_arrays(folder: Path, paths: list[str], progress: Progress) -> Arrays:
    """Decode every file, in threads: the decoder releases the interpreter lock."""
    rows = []
    for row in map_in_threads(_probe_image, (folder / path for path in paths)):
        rows.append(row)
        if len(rows) % 100 == 0 or len(rows) == len(paths):
            progress(len(rows), len(paths))
    good_positions = [position for position, (_, _, reason) in enumerate(rows) if not reason]
    bad_files = [(path, reason) for path, (_, _, reason) in zip(paths, rows, strict=True) if reason]
    names = [paths[position] for position in good_positions]
    return {
        "paths": np.array(names, np.str_),
        "widths": np.array([rows[position][0] for position in good_positions], np.int64),
        "heights": np.array([rows[position][1] for position in good_positions], np.int64),
        "bad": np.array(bad_files, np.str_).reshape(-1, 2),
        "source": np.array(stems_sha256(names)),
        "names": np.array(names_crc32(names)),
    }


def _read_cache(cache: Path, signature: str) -> Arrays | None:
    """Return the cached arrays, or None when there are none, they are stale, or the file is damaged."""
    with (
        suppress(OSError, ValueError, KeyError),
        np.load(BytesIO(read_with_checksum(cache)), allow_pickle=False) as stored,
    ):
        if str(stored["signature"]) == signature:
            return {name: stored[name] for name in CACHED_ARRAYS}
    return None


def _write_cache(cache: Path, signature: str, arrays: Arrays) -> None:
    buffer = BytesIO()
    np.savez_compressed(buffer, signature=np.array(signature), **arrays)
    filesystem.write_atomic(cache, with_checksum(buffer.getvalue()))


def _index_from_arrays(folder: Path, classes: Sequence[str], arrays: Arrays, skip_bad: bool) -> FolderIndex:
    bad_files = tuple((str(path), str(reason)) for path, reason in arrays["bad"])
    if bad_files and not skip_bad:
        path, reason = bad_files[0]
        others = f" and {len(bad_files) - 1} more" if len(bad_files) > 1 else ""
        raise DataError(
            f"{folder / path}{others}: {reason}; repair or remove, or pass --skip-bad to leave out {len(bad_files)} "
            f"of {len(bad_files) + len(arrays['paths'])} files; to list them: imgnet-cluster data check {folder.parent}"
        )
    if not len(arrays["paths"]):
        raise DataError(f"{folder}: has no images; the layout is {folder.name}/<class>/*.JPEG")
    label_by_class = {name: label for label, name in enumerate(classes)}
    return FolderIndex(
        folder=folder,
        classes=tuple(classes),
        paths=arrays["paths"],
        labels=np.array([label_by_class[str(path).split("/")[0]] for path in arrays["paths"]], np.int64),
        widths=arrays["widths"],
        heights=arrays["heights"],
        skipped_files=bad_files,
        known_digests=(str(arrays["source"]), int(arrays["names"])),
    )
