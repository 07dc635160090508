"""`Index`, the interface of a split however it is stored: sizes, labels and bytes by image ID, and names for messages.

An image's ID is its position in the order of class and file name. It is the same in the full-size set and its copies.
"""

import functools
import hashlib
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

ImageIds = NDArray[np.int64]


class DataError(Exception):
    """A data set that cannot be used. The text is one line: where, what is wrong, what to do."""


class IntColumn(Protocol):
    """An integer for each image, such as its width. `column[ids]` and `np.asarray(column)` are int64."""

    def __len__(self) -> int: ...
    def __getitem__(self, ids: Any, /) -> Any: ...  # Any: an int, a slice or an array of IDs, as numpy takes them
    def __array__(self) -> NDArray[np.int64]: ...


@dataclass(frozen=True, kw_only=True)
class Index(ABC):
    """The images of one split, sorted by class and file name.

    `classes` are the class names by label. `skipped_files` are the files that were left out as (path, reason).
    `known_digests` are (stems_digest, names_checksum), if stored. `has_images` is False where only the index is here.
    """

    folder: Path
    classes: tuple[str, ...]
    labels: IntColumn
    widths: IntColumn
    heights: IntColumn
    skipped_files: tuple[tuple[str, str], ...] = ()
    known_digests: tuple[str, int] | None = field(default=None, repr=False)
    has_images: bool = True

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, ids: ImageIds) -> Self:
        """Return an index of only these images, in this order."""
        columns = {name: getattr(self, name)[ids] for name in ("labels", "widths", "heights")}
        return replace(self, **columns, known_digests=None)

    @abstractmethod
    def read(self, number: int) -> bytes:
        """Return the bytes of an image file. Raises `DataError` or `OSError`."""

    @abstractmethod
    def names(self) -> list[str]:
        """Return `class/file name` of every image, for comparisons of sets, not for training. Raises `DataError`."""

    @abstractmethod
    def name(self, number: int) -> str:
        """Return `class/file name` of one image, for messages."""

    @abstractmethod
    def location(self, number: int) -> str:
        """Return where an image is stored, as the beginning of an error message."""

    @property
    def names_checksum(self) -> int:
        """A crc32 of the file names. Ranks compare it: another machine may have other images."""
        return self.known_digests[1] if self.known_digests else names_crc32(self.names())

    @property
    def sizes_checksum(self) -> int:
        """A crc32 of the images' widths and heights, on which crop boxes and rectangles depend."""
        columns = (np.ascontiguousarray(column, dtype=np.int64) for column in (self.widths, self.heights))
        return functools.reduce(lambda crc, column: zlib.crc32(column.data, crc), columns, 0)

    @property
    def stems_digest(self) -> str:
        """A digest of the names without suffix. Sets with equal digests have the same images in the same order."""
        return self.known_digests[0] if self.known_digests else stems_sha256(self.names())


def names_crc32(names: Iterable[str]) -> int:
    """Return the checksum of names.txt, that is of each name with its line break."""
    return functools.reduce(lambda crc, name: zlib.crc32(encode_name_line(name), crc), names, 0)


def stems_sha256(names: Iterable[str]) -> str:
    """Return the sha256 of the names without suffix, one a line: a copy may be stored in another file format."""
    digest = hashlib.sha256()
    for name in names:
        digest.update(encode_name_line(stem(name)))
    return digest.hexdigest()


def stem(name: str) -> str:
    """Return a name without its suffix."""
    return os.path.splitext(name)[0]  # noqa: PTH122 (pathlib is several times slower, and there are a million names)


def encode_name_line(name: str) -> bytes:
    """Return a name as a line of names.txt. Names that are not valid UTF-8 keep their bytes."""
    return f"{name}\n".encode("utf-8", "surrogateescape")
