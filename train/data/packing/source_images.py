"""The source of packing: the images of one split in the order of their IDs, from a folder of files or a packed set.

Nothing is decoded here. Names, sizes and modification times show whether an image has changed since it was packed.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from train.data.index import folder as index_folder
from train.data.index import packed
from train.data.index.open import DataError, check_layout, class_names, has_held_out_val, too_few_images
from train.data.manifest import SPLITS
from train.data.validation_split import held_out_names


@dataclass(frozen=True)
class SourceImages:
    """The images of one split.

    `classes` are the class names of train/. `names` are `class/file name`. `change_marks` [n, 2] are two integers per
    image that change when the image does: size and modification time of a file, length and crc32 in a packed set.
    `read` returns the bytes of an image by ID, `location` its place. `val_fraction` of train/ is held out, 0 for none.
    """

    root: Path
    split: str
    classes: list[str]
    names: list[str]
    labels: NDArray[np.int64]
    change_marks: NDArray[np.int64]
    read: Callable[[int], bytes]
    location: Callable[[int], str]
    val_fraction: float = 0.0

    def digest(self, first: int = 0, end: int | None = None) -> str:
        """Return a digest that changes when one of the images from `first` to `end` does."""
        return index_folder.files_digest(self.names[first:end], self.change_marks[first:end])

    def take(self, numbers: list[int], split: str) -> Self:
        """Return only these images, as the images of a split."""
        return replace(
            self,
            split=split,
            names=[self.names[number] for number in numbers],
            labels=self.labels[numbers],
            change_marks=self.change_marks[numbers],
            read=lambda number: self.read(numbers[number]),
            location=lambda number: self.location(numbers[number]),
        )


def open_source_splits(root: Path, val_fraction: float = 0.0) -> list[SourceImages]:
    """Return the images of train and val (`val_fraction` of train/ without val/). Raises `DataError`, also for none."""
    check_layout(root, val_fraction)
    classes = class_names(root, "train")
    if not has_held_out_val(root, val_fraction):
        return [_open_split(root, split, classes) for split in SPLITS]
    all_images = replace(open_folder(root, "train", classes), val_fraction=val_fraction)
    held_out = held_out_names(all_images.names, val_fraction)
    numbers: dict[str, list[int]] = {split: [] for split in SPLITS}
    for number, name in enumerate(all_images.names):
        numbers["val" if name in held_out else "train"].append(number)
    if not held_out:
        raise too_few_images(all_images.root / "train", val_fraction)
    return [all_images.take(numbers[split], split) for split in SPLITS]


def _open_split(root: Path, split: str, classes: list[str]) -> SourceImages:
    folder = root / split
    if not packed.is_packed(folder):
        return open_folder(root, split, classes)
    index = packed.load_packed_index(folder, classes)
    if not index.has_images:
        raise DataError(f"{folder}: has the index and no images; fetch them too: imgnet-cluster data fetch")
    return SourceImages(
        root=root,
        split=split,
        classes=classes,
        names=index.names(),
        labels=np.asarray(index.labels),
        change_marks=np.stack([index.rows[column].astype(np.int64) for column in ("length", "crc")], axis=1),
        read=index.read,
        location=index.location,
        val_fraction=index.manifest.packing_info.val_fraction,
    )


def open_folder(root: Path, split: str, classes: list[str]) -> SourceImages:
    """Return the images of a split of files, whose class folders are `classes` or some of them. Raises `DataError`."""
    folder = root / split
    names, sizes_and_mtimes = index_folder.scan_class_folders(folder, class_names(root, split))
    if not names:
        raise DataError(f"{folder}: has no images; the layout is {split}/<class>/*.JPEG")
    if bad_name := next((name for name in names if "\n" in name), None):
        raise DataError(f"{folder}/{bad_name!r}: a name with a line break; rename it")
    label_by_class = {name: label for label, name in enumerate(classes)}
    return SourceImages(
        root=root,
        split=split,
        classes=classes,
        names=names,
        labels=np.array([label_by_class[name.split("/")[0]] for name in names], np.int64),
        change_marks=sizes_and_mtimes,
        read=lambda number: index_folder.read_image_file(folder / names[number]),
        location=lambda number: str(folder / names[number]),
    )
