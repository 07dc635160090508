"""The images of one split by id: a folder of files or a packed set, whichever lies there; and what both must keep to.

A set is a root with `train` and `val`, each with a folder per class, or packed, with a manifest.json.
"""

from collections.abc import Sequence
from pathlib import Path

from . import folder as index_folder
from . import packed
from .base import SPLITS, DataError, Index, ProgressCallback, stem


def check_layout(root: Path) -> None:
    """Raise `DataError` unless the folder has train/ and val/ with classes, and val has no class that train lacks.

    Looks at folders and manifests only, so it is quick; `load` looks into the files.
    """
    if not root.is_dir():
        raise DataError(f"{root}: there is no such data folder; say --data DIR, or --data sample for the built-in set")
    train, val = (class_names(root, split) for split in SPLITS)
    _check_val_classes(root, val, train)


def _check_val_classes(root: Path, val_classes: Sequence[str], train_classes: Sequence[str]) -> None:
    unknown = sorted(set(val_classes) - set(train_classes))
    if unknown:
        raise DataError(f"{root / 'val' / unknown[0]}: a class that train/ lacks; remove it, or add it to train/")


def class_names(root: Path, split: str) -> list[str]:
    """Return the names of the classes, sorted. Raises `DataError` when there are none, or the set is not finished."""
    folder = root / split
    if not folder.is_dir():
        raise DataError(f"{root}: has no {split}/; the layout is train/<class>/*.JPEG and val/<class>/*.JPEG")
    if packed.is_packed(folder):
        return list(packed.read_manifest(folder).classes)
    if packed.is_unfinished(folder):
        raise DataError(
            f"{folder}: a packed set that is not finished; call the command that makes it again, it goes on where it "
            "stopped: imgnet-cluster data resize, pack or fetch"
        )
    found = index_folder.class_folders(folder)
    if not found:
        raise DataError(f"{folder}: has no class folders; the layout is {split}/<class>/*.JPEG")
    if loose := index_folder.loose_images(folder):
        raise DataError(
            f"{folder}: {len(loose)} images lie beside the class folders, the first: {loose[0]}; move each into the "
            "folder of its class"
        )
    return found


def load_index(
    root: Path,
    split: str,
    classes: Sequence[str] | None = None,
    *,
    skip_bad: bool = False,
    progress: ProgressCallback | None = None,
) -> Index:
    """Return the index of root/split; that of a folder of files is made first where it is missing or stale.

    `classes` gives the labels (those of train/ for val/). Raises `DataError` for an empty folder, a class that is not
    among `classes`, a packed set that is not whole, and, without `skip_bad`, for files that are not images: they are
    counted and the first is named.
    """
    names = class_names(root, split)
    if classes is not None:
        _check_val_classes(root, names, classes)
    if packed.is_packed(root / split):
        return packed.load_packed_index(root / split, classes)
    return index_folder.load_folder_index(root, split, names, classes or names, skip_bad, progress)


def check_same_images(full_size: Index, copy: Index) -> None:
    """Raise `DataError` unless a prepared copy has the same images in the same order as the full-size set."""
    if full_size.stems_digest == copy.stems_digest:
        return
    mine, theirs = ({stem(name) for name in one.names()} for one in (full_size, copy))
    missing, extra = len(mine - theirs), len(theirs - mine)
    why = f"{missing} are missing, {extra} too many" if missing or extra else "they are in another order"
    raise DataError(
        f"{copy.folder}: is not of the same images as {full_size.folder} ({why}); "
        f"make it again: imgnet-cluster data resize {full_size.folder.parent} {copy.folder.parent.parent} "
        f"--sizes {copy.folder.parent.name} --anew"
    )


__all__ = [
    "SPLITS",
    "DataError",
    "Index",
    "ProgressCallback",
    "check_layout",
    "check_same_images",
    "class_names",
    "load_index",
]
