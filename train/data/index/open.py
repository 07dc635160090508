"""Opens a split by its folder, whether it holds image files or packed shards, and checks the layout of a data set.

A data set is a root folder with `train` and `val`. Each has a folder per class, or is packed and has a manifest.json.
"""

from collections.abc import Sequence
from pathlib import Path

from train.tools.process_log import Progress, no_progress

from . import folder as index_folder
from . import packed
from .base import SPLITS, DataError, Index, stem

UNKNOWN_CLASS = "a class that train/ lacks; remove it, or add it to train/"


def check_layout(root: Path) -> None:
    """Raise `DataError` unless the root has train/ and val/ with classes, and every class of val/ is in train/ too.

    Reads only folder names and manifests, so it is quick; `load_index` reads the files.
    """
    if not root.is_dir():
        raise DataError(f"{root}: there is no such data folder; pass --data DIR, or --data sample for the built-in set")
    train_classes, val_classes = (class_names(root, split) for split in SPLITS)
    _check_val_classes(root, val_classes, train_classes)


def layout_problems(root: Path) -> list[tuple[str, str]]:
    """Return (place, problem) for each image beside the class folders, and each class of val/ that train/ lacks.

    Raises `DataError` as `class_names` does when a split has no classes at all.
    """
    train_classes, val_classes = (_split_classes(root, split) for split in SPLITS)
    stray_images = [
        str(root / split / name)
        for split in SPLITS
        if not packed.is_packed(root / split)
        for name in index_folder.loose_images(root / split)
    ]
    return [
        *((place, "an image beside the class folders; move it into the folder of its class") for place in stray_images),
        *((str(root / "val" / name), UNKNOWN_CLASS) for name in sorted(set(val_classes) - set(train_classes))),
    ]


def _check_val_classes(root: Path, val_classes: Sequence[str], train_classes: Sequence[str]) -> None:
    unknown_classes = sorted(set(val_classes) - set(train_classes))
    if unknown_classes:
        raise DataError(f"{root / 'val' / unknown_classes[0]}: {UNKNOWN_CLASS}")


def class_names(root: Path, split: str) -> list[str]:
    """Return the class names of a split, sorted.

    Raises `DataError` when there are none, packing is unfinished, or images lie beside the class folders.
    """
    classes = _split_classes(root, split)
    folder = root / split
    if not packed.is_packed(folder) and (stray_images := index_folder.loose_images(folder)):
        raise DataError(
            f"{folder}: {len(stray_images)} images lie beside the class folders, the first: {stray_images[0]}; move "
            "each into the folder of its class"
        )
    return classes


def _split_classes(root: Path, split: str) -> list[str]:
    folder = root / split
    if not folder.is_dir():
        raise DataError(f"{root}: has no {split}/; the layout is train/<class>/*.JPEG and val/<class>/*.JPEG")
    if packed.is_packed(folder):
        return list(packed.read_manifest(folder).classes)
    if packed.is_unfinished(folder):
        raise DataError(
            f"{folder}: a packed set that is not finished; run the command that creates it again (imgnet-cluster data "
            "resize, pack or fetch), which resumes where it stopped"
        )
    classes = index_folder.class_folders(folder)
    if not classes:
        raise DataError(f"{folder}: has no class folders; the layout is {split}/<class>/*.JPEG")
    return classes


def load_index(
    root: Path,
    split: str,
    classes: Sequence[str] | None = None,
    *,
    skip_bad: bool = False,
    skip_layout_problems: bool = False,
    progress: Progress = no_progress,
) -> Index:
    """Return the index of root/split. For a folder of files it is built first, where it is missing or stale.

    `classes` are the class names by label; val/ gets those of train/. Raises `DataError` for an empty folder, a class
    that is not in `classes`, a packed set that is damaged or incomplete, and, unless `skip_bad`, for files that are not
    images: the error counts them and names the first. With `skip_layout_problems`, what `layout_problems` names is left
    out of a folder of files.
    """
    if skip_layout_problems and not packed.is_packed(root / split):
        names = [name for name in _split_classes(root, split) if classes is None or name in classes]
    else:
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
    full_size_stems, copy_stems = ({stem(name) for name in index.names()} for index in (full_size, copy))
    missing = len(full_size_stems - copy_stems)
    extra = len(copy_stems - full_size_stems)
    reason = f"{missing} are missing, {extra} too many" if missing or extra else "they are in another order"
    raise DataError(
        f"{copy.folder}: does not have the same images as {full_size.folder} ({reason}); "
        f"create it again: imgnet-cluster data resize {full_size.folder.parent} {copy.folder.parent.parent} "
        f"--sizes {copy.folder.parent.name} --anew"
    )


__all__ = [
    "SPLITS",
    "DataError",
    "Index",
    "check_layout",
    "check_same_images",
    "class_names",
    "layout_problems",
    "load_index",
]
