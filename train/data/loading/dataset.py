"""The images of a run: the full-size set, the prepared copies that the phases name, all with the same image numbers."""

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from train.data.index.open import DataError, Index, check_layout, check_same_images, class_names, load_index
from train.data.order.rng import subset
from train.data.order.work import IndexKey
from train.recipe.components import Data
from train.recipe.schema import Phase, Recipe

LogFunction = Callable[[str], None]


@dataclass(frozen=True)
class Dataset:
    """The indexes by (split, copy), the recipe whose phases name only copies that are there, and when we began to look,
    in seconds of the wall clock.
    """

    indexes: dict[IndexKey, Index]
    recipe: Recipe
    load_start_time: float = 0.0

    @property
    def train(self) -> Index:
        """The training images."""
        return self.indexes["train", None]


def data_root(data: Data, override: Path | None) -> Path:
    """Return the folder of a run's images: the chosen one, or the recipe's."""
    return (override or Path(data.root)).expanduser()


def copies_root(images_root: Path, override: Path | None) -> Path:
    """Return the folder that holds the prepared copies of a data folder: as chosen, or the name with -sz."""
    return override.expanduser() if override else images_root.with_name(images_root.name + "-sz")


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
    """Index what the recipe needs, `scale` of it. A copy that is not there is replaced by the full-size images, aloud.

    Raises `DataError` for a folder that cannot be used, or a copy that has other images than the full-size set.
    """
    begun = time.time()
    check_layout(root)
    train = load_index(root, "train", skip_bad=skip_bad, progress=_indexing_progress(root / "train"))
    val = load_index(root, "val", train.classes, skip_bad=skip_bad, progress=_indexing_progress(root / "val"))
    indexes: dict[IndexKey, Index] = {("train", None): train, ("val", None): val}
    for split, index in (("train", train), ("val", val)):
        if index.skipped_files:
            first = ": ".join(index.skipped_files[0])
            log(f"{index.folder}: {len(index.skipped_files)} of its files left out (--skip-bad), the first: {first}")
        for copy in recipe.copy_sizes:
            folder = copies / str(copy)
            if not folder.is_dir():
                continue
            indexes[split, copy] = load_index(
                folder, split, train.classes, skip_bad=skip_bad, progress=_indexing_progress(folder / split)
            )
            check_same_images(index, indexes[split, copy])
    missing = [copy for copy in recipe.copy_sizes if ("train", copy) not in indexes]
    if missing:
        names = ",".join(map(str, missing))
        log(
            f"no copies of {names} pixels in {copies}: reading the full-size images, which takes longer; to make them: "
            f"imgnet-cluster data resize {root} {copies} --sizes {names}"
        )
    phases = tuple(_without_missing_copy(phase, missing) for phase in recipe.phases)
    if any(phase.copy is None for phase in phases):
        _check_images_present(train, val)
    if scale < 1:
        indexes = {key: one.take(subset(seed, len(one), scale)) for key, one in indexes.items()}
    return Dataset(indexes, replace(recipe, tables={}, phases=phases), begun)


def open_val_indexes(
    recipe: Recipe, root: Path, copies: Path, *, scale: float = 1.0, seed: int = 0, skip_bad: bool = False
) -> dict[IndexKey, Index]:
    """Index what the recipe's last phase validates on: the full-size images, and their copy where it is there.

    Raises `DataError` as `open_dataset` does.
    """
    check_layout(root)
    classes, copy = class_names(root, "train"), recipe.phases[-1].copy
    folders = {None: root, copy: root if copy is None else copies / str(copy)}
    indexes: dict[IndexKey, Index] = {}
    for short, folder in folders.items():
        if folder.is_dir():
            found = load_index(folder, "val", classes, skip_bad=skip_bad, progress=_indexing_progress(folder / "val"))
            check_same_images(indexes.setdefault(("val", None), found), found)
            indexes["val", short] = found
    if scale < 1:
        indexes = {key: one.take(subset(seed, len(one), scale)) for key, one in indexes.items()}
    return indexes


def _without_missing_copy(phase: Phase, missing: list[int]) -> Phase:
    return replace(phase, copy=None) if phase.copy in missing else phase


def _check_images_present(*indexes: Index) -> None:
    """A machine may have fetched names and numbers of the full-size images only."""
    for index in indexes:
        if not index.has_images:
            raise DataError(
                f"{index.folder}: has the index and no images, which a phase of the recipe reads in full size; fetch "
                f"all: imgnet-cluster data fetch SOURCE {index.folder.parent}"
            )


def _indexing_progress(folder: Path) -> Callable[[int, int], None]:
    """One line for each tenth of a look through a folder; nothing for a folder that is indexed already."""

    def say(done: int, total: int) -> None:
        if done == total or done % (100 * math.ceil(total / 1000)) == 0:
            print(f"indexing {folder}: {done} of {total}", file=sys.stderr, flush=True)

    return say


__all__ = ["DataError", "Dataset", "copies_root", "data_root", "open_dataset", "open_val_indexes"]
