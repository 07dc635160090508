"""The index of a folder of image files: path, class, width and height of each, built once and cached beside the folder.

The layout is ImageNet's: `train/<class>/*.JPEG` and `val/<class>/*.JPEG`. The header of every file is read once. So a
file that is no image, and a JPEG without an end, are named before the training; pixels that are lost in the middle of a
file are found when it is decoded. With `skip_bad` every file is decoded, as packing does: both leave out the same ones.
The cache holds numpy arrays without pickle. It is rebuilt when a file's name, size or modification time differs. A file
that could not be read (its mode, a disk, too little memory) is tried again. Names that begin with a dot are ignored.

The cache is optional: where it cannot be written or locked beside the folder, it lies in the user's cache folder, and
where that fails too, every process reads the images for itself.
"""

import errno
import hashlib
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from io import BytesIO
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from train.data.decode import BadImage, decode_image, size_in_header
from train.data.threads import map_in_threads
from train.tools.errors import one_line_error
from train.tools.files import SHARED_LOCK, locked, write_atomic
from train.tools.process_log import Progress
from train.tools.sealed_files import read_with_checksum, with_checksum

from .base import DataError, ImageIds, Index, names_crc32, stems_sha256

logger = logging.getLogger(__name__)

FOLDER_INDEX_VERSION = 6
MAX_IMAGE_BYTES = 1 << 30  # of a file: more than the largest image takes without compression
IMAGE_SUFFIXES = (".jpeg", ".jpg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
STRAY_IMAGE = "an image beside the class folders; move it into the folder of its class"
BROKEN_LINK = "a broken symbolic link beside the class folders; remove it, or restore the class that it leads to"


class Texts:
    """Texts in one block of bytes: numpy's own arrays of text give each the width of the longest."""

    def __init__(self, block: NDArray[np.uint8]) -> None:
        """Take a block in which each text ends with a zero byte."""
        self.block = block
        self._ends = np.flatnonzero(block == 0)

    @classmethod
    def of(cls, texts: Iterable[str]) -> Self:
        """Return a block of these texts. The bytes of file names are kept, whatever the locale."""
        return cls(np.frombuffer(b"".join(os.fsencode(text) + b"\0" for text in texts), np.uint8))

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, number: int) -> str:
        start = self._ends[number - 1] + 1 if number else 0
        return os.fsdecode(self.block[start : self._ends[number]].tobytes())

    def __iter__(self) -> Iterator[str]:
        return map(os.fsdecode, self.block.tobytes().split(b"\0")[:-1])


@dataclass
class ProbedFiles:
    """The outcome of reading the files of a split, by their position in the scan.

    `sizes` [n, 2] are (width, height), zeros for a bad file; `reasons` say what is wrong with each bad file. `unread`
    are those that could not be read, or were not tried yet. `digests` are (stems_digest, names_checksum) of the good
    files.
    """

    sizes: NDArray[np.int64]
    unread: list[int]
    reasons: dict[int, str] = field(default_factory=dict)
    digests: tuple[str, int] = ("", 0)


@dataclass(frozen=True, kw_only=True)
class FolderIndex(Index):
    """The images of a folder. `paths` are `class/file name`."""

    paths: Texts

    def take(self, ids: ImageIds) -> Self:
        """Return an index of only these images, in this order."""
        return replace(super().take(ids), paths=Texts.of(self.paths[number] for number in ids.tolist()))

    def read(self, number: int) -> bytes:
        """Return the bytes of an image file. Raises `OSError`."""
        return (self.folder / self.name(number)).read_bytes()

    def names(self) -> list[str]:
        """Return `class/file name` of every image."""
        return list(self.paths)

    def name(self, number: int) -> str:
        """Return `class/file name` of one image."""
        return self.paths[number]

    def location(self, number: int) -> str:
        """Return the path of the image file."""
        return str(self.folder / self.name(number))


def class_folders(folder: Path) -> list[str]:
    """Return the names of the class folders, sorted."""
    return [path.name for path in sorted(folder.iterdir()) if path.is_dir() and not path.name.startswith(".")]


def stray_entries(folder: Path) -> list[tuple[str, str]]:
    """Return (place, problem) of each image and each broken link beside the class folders: each may be a class."""
    paths = sorted(folder.iterdir())
    images = [path for path in paths if path.name.lower().endswith(IMAGE_SUFFIXES) and path.is_file()]
    broken_links = [path for path in paths if path.is_symlink() and not path.exists()]
    return [*((str(path), STRAY_IMAGE) for path in images), *((str(path), BROKEN_LINK) for path in broken_links)]


def load_folder_index(
    root: Path,
    split: str,
    class_folder_names: Sequence[str],
    classes: Sequence[str],
    skip_bad: bool,
    progress: Progress,
    stems_of_copy: str = "",
) -> FolderIndex:
    """Return the index of the given class folders of root/split. It is built first where it is missing or stale.

    `classes` are the class names by label. With `skip_bad` all files are decoded, and bad ones left out. Without it
    their headers are read, and bad files raise `DataError`, also those that a run with `skip_bad` has found; so does a
    set without images. No file is read, and all sizes are 0, where `stems_of_copy` is the digest of the files' names.
    """
    paths, sizes_and_mtimes = scan_class_folders(root / split, class_folder_names)
    if stems_of_copy and stems_sha256(paths) == stems_of_copy:
        unread = ProbedFiles(np.zeros((len(paths), 2), np.int64), [], digests=(stems_of_copy, names_crc32(paths)))
        return _make_index(root / split, classes, paths, unread, skip_bad)
    digest = files_digest(paths, sizes_and_mtimes)
    kinds = ("pixels",) if skip_bad else ("pixels", "headers")
    signatures = [f"{FOLDER_INDEX_VERSION} {kind} {digest}" for kind in kinds]
    files = _probe_files(root, split, signatures, paths, skip_bad, progress)
    return _make_index(root / split, classes, paths, files, skip_bad)


def _cache_paths(root: Path, split: str) -> Iterator[Path]:
    """Yield where the index may be cached: in the root, and in the user's cache folder."""
    yield root / f".{split}.index.npz"
    with suppress(RuntimeError):  # the user has no home
        cache_folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "imgnet-cluster"
        root_id = hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:16]
        yield cache_folder / f"{root_id}.{split}.index.npz"


@contextmanager
def _locked_caches(root: Path, split: str) -> Iterator[list[Path]]:
    """Yield where the index may be written, the best first, which is locked: one rank of a run builds it."""
    caches, faults = list(_cache_paths(root, split)), []
    with ExitStack() as stack:
        for number, cache in enumerate(caches):
            try:
                cache.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(cache.with_suffix(".lock"), permissions=SHARED_LOCK))
            except OSError as error:
                faults.append(one_line_error(error))
                continue
            yield caches[number:]
            return
        _warn_of_no_cache(root, faults)
        yield []


def _warn_of_no_cache(root: Path, faults: Sequence[str]) -> None:
    logger.warning(
        "%s: its index cannot be cached, so each process reads all images at its start (%s); set XDG_CACHE_HOME to a "
        "folder that can be written and locked",
        root,
        "; ".join(faults),
    )


def _probe_files(
    root: Path, split: str, signatures: Sequence[str], paths: list[str], must_decode: bool, progress: Progress
) -> ProbedFiles:
    """Read the headers of the files of a split, or decode them, except those whose outcome is cached.

    A cache with one of the `signatures` will do; a new one gets the last of them.
    """
    if (cached := _read_cache(root, split, signatures)) and not cached.unread:
        return cached
    with _locked_caches(root, split) as caches:
        cached = _read_cache(root, split, signatures)
        files = cached or ProbedFiles(np.zeros((len(paths), 2), np.int64), list(range(len(paths))))
        before, files.unread = files.unread, []
        probe = partial(_probe_image, must_decode=must_decode)
        probed = map_in_threads(probe, (root / split / paths[number] for number in before))
        for done, (number, (size, reason, is_unread)) in enumerate(zip(before, probed, strict=True), 1):
            files.sizes[number] = size
            files.reasons.pop(number, None)
            if reason:
                files.reasons[number] = reason
            if is_unread:
                files.unread.append(number)
            if done % 100 == 0 or done == len(before):
                progress(done, len(before))
        if files.unread != before:
            names = [path for number, path in enumerate(paths) if number not in files.reasons]
            files.digests = stems_sha256(names), names_crc32(names)
            _write_cache(root, caches, signatures[-1], files)
    return files


def scan_class_folders(folder: Path, class_folder_names: Sequence[str]) -> tuple[list[str], NDArray[np.int64]]:
    """Return all files as `class/name`, sorted, and [n, 2] of their sizes (bytes) and modification times (ns).

    Folders inside a class folder and broken links are included: they are reported later as files that are not images.
    """
    paths, sizes_and_mtimes = [], []
    for class_name in class_folder_names:
        with os.scandir(folder / class_name) as entries:
            visible_entries = [entry for entry in entries if not entry.name.startswith(".")]
            rows = sorted((entry.name, _stat(entry)) for entry in visible_entries)
        for file_name, stat in rows:
            paths.append(f"{class_name}/{file_name}")
            sizes_and_mtimes.append((stat.st_size, stat.st_mtime_ns % (1 << 63)))  # a wrong date may lie in 2300
    return paths, np.array(sizes_and_mtimes, np.int64).reshape(-1, 2)


def _stat(entry: os.DirEntry[str]) -> os.stat_result:
    """Return the status of what a link leads to, or of the link itself where it leads nowhere or in a circle."""
    try:
        return entry.stat()
    except OSError:
        return entry.stat(follow_symlinks=False)


def files_digest(paths: Sequence[str], sizes_and_mtimes: NDArray[np.int64]) -> str:
    """Return a digest that changes when a file's name, size or modification time does."""
    digest = hashlib.sha256("\0".join(paths).encode("utf-8", "surrogateescape"))
    digest.update(np.ascontiguousarray(sizes_and_mtimes, "<i8").tobytes())
    return digest.hexdigest()


def read_image_file(path: Path) -> bytes:
    """Return the bytes of an image file. Raises what `open_image_file` does."""
    with open_image_file(path) as file:
        return file.read()


def open_image_file(path: Path) -> BinaryIO:
    """Open an image file. Raises `BadImage` for what is no file, and for a broken link, else `OSError`.

    A pipe, for example, would be read for ever, and a sparse file may claim more bytes than the memory has.
    """
    try:
        status = path.stat()
        if not S_ISREG(status.st_mode):
            raise BadImage("a folder inside a class folder" if S_ISDIR(status.st_mode) else "a pipe, socket or device")
        if status.st_size > MAX_IMAGE_BYTES:
            raise BadImage(f"{status.st_size / 1e9:.1f} GB are too many for an image")
        return path.open("rb")
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP) and path.is_symlink():
            raise BadImage("a broken symbolic link") from None
        raise


def _probe_image(path: Path, must_decode: bool) -> tuple[tuple[int, int], str, bool]:
    """Return an image's (width, height), what is wrong with it ("" for nothing), and whether it could not be read.

    Only the header is read, unless `must_decode` is set or the header is wrong: then decoding finds the fault.
    """
    try:
        with open_image_file(path) as file:
            size = None if must_decode else size_in_header(file)
        height, width = size or decode_image(read_image_file(path)).shape[:2]
    except BadImage as error:
        return (0, 0), str(error), False
    except OSError as error:
        return (0, 0), error.strerror or str(error), True
    except MemoryError:
        return (0, 0), "this computer has too little memory to decode it", True
    return (width, height), "", False


def _read_cache(root: Path, split: str, signatures: Sequence[str]) -> ProbedFiles | None:
    """Return what is cached, or None when there is nothing, it is stale, or the file is damaged."""
    for cache in _cache_paths(root, split):
        with (
            suppress(OSError, ValueError, KeyError),
            np.load(BytesIO(read_with_checksum(cache)), allow_pickle=False) as stored,
        ):
            if str(stored["signature"]) in signatures:
                reasons = dict(zip(stored["bad"].tolist(), Texts(stored["reasons"]), strict=True))
                digests = str(stored["source"]), int(stored["names"])
                return ProbedFiles(stored["sizes"], stored["unread"].tolist(), reasons, digests)
    return None


def _write_cache(root: Path, caches: Sequence[Path], signature: str, files: ProbedFiles) -> None:
    buffer, bad = BytesIO(), sorted(files.reasons)
    np.savez_compressed(
        buffer,
        signature=np.array(signature),
        sizes=files.sizes,
        unread=np.array(files.unread, np.int64),
        bad=np.array(bad, np.int64),
        reasons=Texts.of(files.reasons[number] for number in bad).block,
        source=np.array(files.digests[0]),
        names=np.array(files.digests[1]),
    )
    faults = []
    for cache in caches:
        try:
            cache.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(cache, with_checksum(buffer.getvalue()))
            return
        except OSError as error:
            faults.append(one_line_error(error))
    if faults:
        _warn_of_no_cache(root, faults)


def _make_index(
    folder: Path, classes: Sequence[str], paths: list[str], files: ProbedFiles, skip_bad: bool
) -> FolderIndex:
    bad_files = tuple((paths[number], files.reasons[number]) for number in sorted(files.reasons))
    if bad_files and not skip_bad:
        path, reason = bad_files[0]
        others = f" and {len(bad_files) - 1} more" if len(bad_files) > 1 else ""
        raise DataError(
            f"{folder / path}{others}: {reason}; repair or remove, or pass --skip-bad to leave out {len(bad_files)} "
            f"of {len(paths)} files; to list them: imgnet-cluster data check {folder.parent}"
        )
    good = [number for number in range(len(paths)) if number not in files.reasons]
    names = [paths[number] for number in good]
    if not names:
        raise DataError(f"{folder}: has no images; the layout is {folder.name}/<class>/*.JPEG")
    label_by_class = {name: label for label, name in enumerate(classes)}
    widths, heights = files.sizes[good].T
    return FolderIndex(
        folder=folder,
        classes=tuple(classes),
        paths=Texts.of(names),
        labels=np.array([label_by_class[name.split("/")[0]] for name in names], np.int64),
        widths=widths,
        heights=heights,
        skipped_files=bad_files,
        known_digests=files.digests,
    )
