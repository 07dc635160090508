"""What is to be packed: the images of one split in the order of their ids, from a folder of files or a packed set.

Nothing is decoded here; names, sizes and times tell whether anything has changed since a shard was written.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from train.data.index import folder as index_folder
from train.data.index import packed
from train.data.index.open import SPLITS, DataError, check_layout, class_names


@dataclass(frozen=True)
class SourceImages:
    """`names` as `class/file name`, `marks` [n, 2] what changes with an image, `classes` those of train/."""

    root: Path
    split: str
    classes: list[str]
    names: list[str]
    labels: NDArray[np.int64]
    change_marks: NDArray[np.int64]
    read: Callable[[int], bytes]
    location: Callable[[int], str]

    def digest(self, first: int = 0, end: int | None = None) -> str:
        """Return what changes when one of these images does."""
        return index_folder.files_digest(self.names[first:end], self.change_marks[first:end])


def open_source_splits(root: Path) -> list[SourceImages]:
    """Return the images of train and val. Raises `DataError` for a root of another layout, or a split without any."""
    check_layout(root)
    classes = class_names(root, "train")
    return [_open_split(root, split, classes) for split in SPLITS]


def _open_split(root: Path, split: str, classes: list[str]) -> SourceImages:
    folder = root / split
    if packed.is_packed(folder):
        index = packed.load_packed_index(folder, classes)
        if not index.has_images:
            raise DataError(f"{folder}: has the index and no images; fetch them too: imgnet-cluster data fetch")
        marks = np.stack([index.rows[column].astype(np.int64) for column in ("length", "crc")], axis=1)
        return SourceImages(
            root, split, classes, index.names(), np.asarray(index.labels), marks, index.read, index.location
        )
    names, marks = index_folder.scan_class_folders(folder, class_names(root, split))
    if not names:
        raise DataError(f"{folder}: has no images; the layout is {split}/<class>/*.JPEG")
    if odd := next((name for name in names if "\n" in name), None):
        raise DataError(f"{folder}/{odd!r}: a name with a line break; rename it")
    label = {name: number for number, name in enumerate(classes)}
    labels = np.array([label[name.split("/")[0]] for name in names], np.int64)
    return SourceImages(
        root, split, classes, names, labels, marks,
        lambda number: index_folder.read_image_file(folder / names[number]), lambda number: str(folder / names[number]),
    )  # fmt: skip
