"""What every set of images has, however it is stored: numbers and bytes by id, names for messages, one kind of error.

An id is an image's place in the order of class and name. It is the same in the full-size set and in its copies.
"""

import functools
import hashlib
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

SPLITS = ("train", "val")
ImageIds = NDArray[np.int64]
ProgressCallback = Callable[[int, int], None]


class DataError(Exception):
    """A set of images that cannot be used; the text is one line: what, where, what to do."""


class IntColumn(Protocol):
    """A whole number for each image, int64 as soon as it is taken out: `numbers[ids]`, `np.asarray(numbers)`."""

    def __len__(self) -> int: ...
    def __getitem__(self, ids: Any, /) -> Any: ...
    def __array__(self) -> NDArray[Any]: ...


@dataclass(frozen=True, kw_only=True)
class Index(ABC):
    """The images of one split, sorted by class and name; `classes` by label, `bad` are files that were left out."""

    folder: Path
    classes: tuple[str, ...]
    labels: IntColumn
    widths: IntColumn
    heights: IntColumn
    skipped_files: tuple[tuple[str, str], ...] = ()

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def take(self, ids: ImageIds) -> Self:
        """Return the index of these images only, in this order."""

    @abstractmethod
    def read(self, number: int) -> bytes:
        """Return the bytes of an image's file. Raises `DataError` or `OSError`."""

    @abstractmethod
    def names(self) -> list[str]:
        """Return `class/file name` of every image: for comparisons, not for training. Raises `DataError`."""

    @abstractmethod
    def name(self, number: int) -> str:
        """Return `class/file name` of one image, for messages."""

    @abstractmethod
    def location(self, number: int) -> str:
        """Return where an image's bytes lie, as an error begins."""

    @property
    def has_images(self) -> bool:
        """Whether the images are here, and not their names and numbers only."""
        return True

    @property
    def names_checksum(self) -> int:
        """A number of 32 bits that differs when the names of the files do: another machine may have other images."""
        return names_crc32(self.names())

    @property
    def sizes_checksum(self) -> int:
        """A number of 32 bits that differs when the images' widths or heights do: boxes and rectangles hang on them."""
        shapes = (np.ascontiguousarray(one, dtype=np.int64) for one in (self.widths, self.heights))
        return functools.reduce(lambda crc, one: zlib.crc32(one.data, crc), shapes, 0)

    @property
    def stems_digest(self) -> str:
        """A digest of the names without suffix: sets of which it is equal have the same images in the same order."""
        return stems_sha256(self.names())


def names_crc32(names: Iterable[str]) -> int:
    """Return the checksum of names.txt: of each name and its line break."""
    crc = 0
    for name in names:
        crc = zlib.crc32(encode_name_line(name), crc)
    return crc


def stems_sha256(names: Iterable[str]) -> str:
    """Return the sha256 of the names without their suffix, a line each: a copy may be stored as another format."""
    digest = hashlib.sha256()
    for name in names:
        digest.update(encode_name_line(stem(name)))
    return digest.hexdigest()


def stem(name: str) -> str:
    """Return a name without its suffix."""
    return os.path.splitext(name)[0]


def encode_name_line(name: str) -> bytes:
    """Return a name as a line of names.txt; names that are not UTF-8 keep their bytes."""
    return f"{name}\n".encode("utf-8", "surrogateescape")
