"""The indexes of a run's images: the full-size set, and the prepared copies that the phases name."""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from train.data.index.open import (
    DataError,
    Index,
    check_layout,
    check_same_images,
    class_names,
    empty_classes,
    has_held_out_val,
    load_index,
    stems_of_packed,
)
from train.data.order.rng import subset
from train.data.order.work import IndexKey
from train.data.validation_split import note_on_missing_copies, notes_on_empty_classes
from train.recipe.components import Data
from train.recipe.schema import Recipe
from train.tools.host import unix_time

LogFunction = Callable[[str], None]


@dataclass(frozen=True)
class Dataset:
    """The images of a run.

    `indexes` are the indexes by (split, copy). `recipe` is the recipe of the run, whose phases name only copies that
    exist. `load_start_time` is when indexing began, in seconds since the epoch (wall clock).
    """

    indexes: dict[IndexKey, Index]
    recipe: Recipe
    load_start_time: float = 0.0

    @property
    def train(self) -> Index:
        """The full-size training images."""
        return self.indexes["train", None]


def data_root(data: Data, override: Path | None) -> Path:
    """Return the folder of a run's images: `override`, or the recipe's."""
    return (override or Path(data.root)).expanduser()


def copies_root(images_root: Path, override: Path | None) -> Path:
    """Return the folder of the prepared copies of a data folder: `override`, or the data folder's name with -sz."""
    return override.expanduser() if override else images_root.parent / f"{images_root.name}-sz"


def open_dataset(
    recipe: Recipe,
    root: Path,
    copies: Path,
    *,
    scale: float = 1.0,
    seed: int = 0,
    skip_bad: bool = False,
    log: LogFunction = print,
) -> Dataset:
    """Index the images that the recipe needs, or a share `scale` of them.

    A copy that does not exist is replaced by the full-size images, and `log` gets a line that says so; likewise about
    classes without images. Full-size files are not opened where all phases read packed copies and none needs the sizes
    of the former. Raises `DataError` for a folder that cannot be used, or a copy whose images are not those of the
    full-size set.
    """
    load_start_time = unix_time()
    fraction = recipe.data.val_fraction if has_held_out_val(root, recipe.data.val_fraction) else 0.0
    check_layout(root, fraction)
    load = partial(_load, skip_bad=skip_bad)
    stems = partial(_stems_of_copy, recipe, copies)
    train = load(root, "train", val_fraction=fraction, stems_of_copy=stems("train"))
    val = load(root, "val", train.classes, val_fraction=fraction, stems_of_copy=stems("val"))
    if fraction:
        log(f"{train.folder}: {len(val)} of {len(train) + len(val)} images are held out for validation")
    untrained, unvalidated = (empty_classes(index.classes, index.labels) for index in (train, val))
    for note in notes_on_empty_classes(untrained, unvalidated, len(val.classes)):
        log(f"warning: {note}")
    indexes: dict[IndexKey, Index] = {("train", None): train, ("val", None): val}
    for split, index in (("train", train), ("val", val)):
        if index.skipped_files:
            first = ": ".join(index.skipped_files[0])
            log(f"{index.folder}: bad files left out: {len(index.skipped_files)} (--skip-bad); the first: {first}")
        for copy in recipe.copy_sizes:
            folder = copies / str(copy)
            if not folder.is_dir():
                continue
            indexes[split, copy] = load(folder, split, train.classes)
            check_same_images(index, indexes[split, copy], fraction)
    missing_copies = [copy for copy in recipe.copy_sizes if ("train", copy) not in indexes]
    if note := note_on_missing_copies(missing_copies, root, copies, fraction, skip_bad):
        log(note)
    phases = tuple(replace(phase, copy=None) if phase.copy in missing_copies else phase for phase in recipe.phases)
    for index in (train, val):
        if not index.has_images and any(phase.copy is None for phase in phases):
            raise DataError(
                f"{index.folder}: has the index and no images, but a phase of the recipe reads full-size images; fetch "
                f"them too: imgnet-cluster data fetch SOURCE {index.folder.parent}"
            )
    if scale < 1:
        indexes = _take_subsets(indexes, seed, scale)
    return Dataset(indexes, replace(recipe, tables={}, phases=phases), load_start_time)


def open_val_indexes(
    recipe: Recipe, root: Path, copies: Path, *, scale: float = 1.0, seed: int = 0, skip_bad: bool = False
) -> dict[IndexKey, Index]:
    """Index the validation images of the recipe's last phase: full-size, and their copy where it exists.

    When the images are not those of the run and have a val/, that val/ is used. Raises `DataError` as
    `open_dataset` does.
    """
    fraction = 0.0 if (root / "val").is_dir() else recipe.data.val_fraction
    check_layout(root, fraction)
    classes = class_names(root, "train")
    last_copy = recipe.phases[-1].copy
    folders = {None: root, last_copy: root if last_copy is None else copies / str(last_copy)}
    indexes: dict[IndexKey, Index] = {}
    for copy, folder in folders.items():
        if folder.is_dir():
            index = _load(folder, "val", classes, val_fraction=fraction if copy is None else 0.0, skip_bad=skip_bad)
            check_same_images(indexes.setdefault(("val", None), index), index, fraction)
            indexes["val", copy] = index
    return _take_subsets(indexes, seed, scale) if scale < 1 else indexes


def _take_subsets(indexes: dict[IndexKey, Index], seed: int, scale: float) -> dict[IndexKey, Index]:
    """Return the same share of the images of every index."""
    return {key: index.take(subset(seed, len(index), scale)) for key, index in indexes.items()}


def _stems_of_copy(recipe: Recipe, copies: Path, split: str) -> str:
    """Return the digest of the names in a copy of a split, or "" where a phase needs the sizes of full-size images."""
    if any(phase.copy is None or phase.rect_train or phase.rect_val for phase in recipe.phases):
        return ""
    sizes = dict.fromkeys(phase.copy for phase in recipe.phases)  # phases share copies; each manifest is read once
    digests = [stems_of_packed(copies / f"{size}/{split}") for size in sizes]
    return digests[0] if all(digests) else ""


def _load(root: Path, split: str, classes: Sequence[str] | None = None, **options: Any) -> Index:  # of load_index
    """Return the index of root/split. Prints a line for each tenth of the files that are indexed, none if cached."""

    def print_progress(done: int, total: int) -> None:
        if done == total or done % (100 * math.ceil(total / 1000)) == 0:
            print(f"indexing {root / split}: {done} of {total}", file=sys.stderr, flush=True)

    return load_index(root, split, classes, progress=print_progress, **options)
