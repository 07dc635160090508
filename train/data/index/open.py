"""Opens a split by its folder, whether it holds image files or packed shards, and checks the layout of a data set.

A data set is a root folder with `train` and `val`. Each has a folder per class, or is packed and has a manifest.json.
Where a folder of files has no `val`, a part of `train` can be held out: both splits are indexes of the same folder.
"""

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

import numpy as np

from train.data.manifest import SPLITS
from train.data.validation_split import held_out_names
from train.tools.process_log import Progress, no_progress

from . import folder as index_folder
from . import packed
from .base import DataError as DataError  # also for those who import it from here
from .base import Index as Index
from .base import IntColumn, stem

ARCHIVE_SUFFIXES = {".tar", ".tgz", ".gz", ".bz2", ".xz", ".zst", ".zip", ".7z", ".rar"}  # more may follow: .part
UNKNOWN_CLASS = "a class that train/ lacks; remove it, or add it to train/"
OTHER_UNICODE_FORM = "a class that train/ has in another Unicode form (NFC, NFD); give both folders the same name"


def check_layout(root: Path, val_fraction: float = 0.0) -> None:
    """Raise `DataError` unless the root has train/ and val/ with classes, and every class of val/ is in train/ too.

    With `val_fraction`, val/ may be missing. It is quick: it reads folder names and manifests, `load_index` the files.
    """
    if not root.is_dir():
        folders = [path.name for path in root.parent.glob("*/")]
        similar = get_close_matches(root.name, folders, 1)
        hint = f"; did you mean {root.with_name(similar[0])}?" if similar else ""
        raise DataError(f"{root}: there is no such data folder{hint}")
    _refuse(layout_problems(root, val_fraction))


def has_held_out_val(root: Path, val_fraction: float) -> bool:
    """Return whether val is a part of train/. Raises `DataError` for an own val/, unless packed with that fraction."""
    if not val_fraction:
        return False
    val = root / "val"
    if not val.is_dir():
        return not packed.is_packed(root / "train")
    if packed.is_packed(val) and packed.read_manifest(val).packing_info.val_fraction == val_fraction:
        return False
    raise DataError(
        f"{val}: the data set has validation images of its own; to use them, leave out val_fraction in the recipe, or "
        "pass --val-fraction 0"
    )


def layout_problems(root: Path, val_fraction: float = 0.0) -> list[tuple[str, str]]:
    """Return (place, problem) for each image and broken link beside class folders, and each class that train/ lacks.

    Raises `DataError` as `class_names` does when a split has no classes at all.
    """
    splits = ("train",) if has_held_out_val(root, val_fraction) else SPLITS
    classes = {split: _split_classes(root, split) for split in splits}
    strays = [stray for split in splits for stray in _stray_entries(root / split)]
    return strays + _unknown_classes(root, classes.get("val", ()), classes["train"])


def doubtful_entries(root: Path) -> Iterator[tuple[str, str]]:
    """Yield (place, doubt) for what hinders no training: archives beside the class folders, which may be classes that
    were not unpacked, folders that count twice through a link, and classes whose names look alike.
    """
    places: dict[Path, Path] = {}
    for folder in (root / split for split in SPLITS if (root / split).is_dir()):
        if (first := places.setdefault(folder.resolve(), folder)) != folder:
            yield str(folder), f"the same folder as {first}"
            continue
        names: dict[str, str] = {}
        for path in sorted(folder.iterdir(), key=lambda path: (path.is_symlink(), path)):
            if path.is_dir() and not path.name.startswith("."):
                name = unicodedata.normalize("NFC", path.name).casefold().strip()
                if (first := places.setdefault(path.resolve(), path)) != path:
                    yield str(path), f"the same folder as {first}"
                elif (other := names.setdefault(name, path.name)) != path.name:
                    yield str(path), f"differs from {other!r} in case, spaces or Unicode form only"
                elif path.name != path.name.strip():
                    yield str(path), "its name begins or ends with a space"
            elif ARCHIVE_SUFFIXES & {*Path(path.name.lower()).suffixes} and path.is_file():
                yield str(path), "an archive beside the class folders; unpack or remove it"


def _unknown_classes(root: Path, val_classes: Sequence[str], train_classes: Sequence[str]) -> list[tuple[str, str]]:
    """Return (place, problem) of each class of val/ that train/ lacks."""
    return [
        (str(root / "val" / name), OTHER_UNICODE_FORM if has_other_unicode_form(name, train_classes) else UNKNOWN_CLASS)
        for name in sorted(set(val_classes) - set(train_classes))
    ]


def has_other_unicode_form(name: str, names: Sequence[str]) -> bool:
    """Return whether a name that is not among others is there in another Unicode form: both look the same."""
    return unicodedata.normalize("NFC", name) in {unicodedata.normalize("NFC", other) for other in names}


def _stray_entries(folder: Path) -> list[tuple[str, str]]:
    """Return what `index_folder.stray_entries` does; a packed split has none."""
    return [] if packed.is_packed(folder) else index_folder.stray_entries(folder)


def _refuse(problems: Sequence[tuple[str, str]]) -> None:
    for place, problem in problems:
        raise DataError(f"{place}: {problem}")


def class_names(root: Path, split: str) -> list[str]:
    """Return the class names of a split, sorted. Raises `DataError` for none, an unfinished set, and stray entries."""
    classes = _split_classes(root, split)
    _refuse(_stray_entries(root / split))
    return classes


def _split_classes(root: Path, split: str) -> list[str]:
    folder = root / split
    if not folder.is_dir():
        divide = f"to divide {root}/<class> into both: imgnet-cluster data split {root}"
        hint = "to hold out a part of train/: --val-fraction 0.1" if split == "val" else divide
        raise DataError(f"{root}: has no {split}/; the layout is train/<class>/*.JPEG and val/<class>/*.JPEG; {hint}")
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
    val_fraction: float = 0.0,
    skip_bad: bool = False,
    skip_layout_problems: bool = False,
    progress: Progress = no_progress,
    stems_of_copy: str = "",
) -> Index:
    """Return the index of root/split. For a folder of files it is built first, where it is missing or stale.

    `classes` are the class names by label; val/ gets those of train/. `val_fraction` of train/ is held out where the
    root has no val/. Raises `DataError` for an empty folder, a class that is not in `classes`, a packed set that is
    damaged or incomplete, and, unless `skip_bad`, for files that are not images. With `skip_layout_problems`, what
    `layout_problems` names is left out of a folder of files. `stems_of_copy`: see `load_folder_index`.
    """
    is_held_out = has_held_out_val(root, val_fraction)
    folder_name = "train" if is_held_out else split
    if skip_layout_problems and not packed.is_packed(root / folder_name):
        names = [name for name in _split_classes(root, folder_name) if classes is None or name in classes]
    else:
        names = class_names(root, folder_name)
    if classes is not None:
        _refuse(_unknown_classes(root, names, classes))
    if packed.is_packed(root / folder_name):
        return packed.load_packed_index(root / folder_name, classes)
    stems = "" if is_held_out else stems_of_copy
    index = index_folder.load_folder_index(root, folder_name, names, classes or names, skip_bad, progress, stems)
    return _take_split(index, split, val_fraction) if is_held_out else index


def stems_of_packed(folder: Path) -> str:
    """Return the digest of the names in a packed split; "" where the folder has none. Raises `DataError`."""
    return packed.read_manifest(folder).stems_digest if packed.is_packed(folder) else ""


def _take_split(index: index_folder.FolderIndex, split: str, val_fraction: float) -> index_folder.FolderIndex:
    """Return the part of train/ that is trained on, or the part that is held out.

    Files that are no images take part in the choice, as in packing, which does not know them yet: both choose alike.
    """
    names = index.names()
    held_out = held_out_names([*names, *(path for path, _ in index.skipped_files)], val_fraction)
    is_val = split == "val"
    ids = np.array([number for number, name in enumerate(names) if (name in held_out) == is_val], np.int64)
    if not len(ids):
        raise too_few_images(index.folder, val_fraction)
    skipped_files = tuple(row for row in index.skipped_files if (row[0] in held_out) == is_val)
    return replace(index.take(ids), skipped_files=skipped_files)


def too_few_images(folder: Path, val_fraction: float) -> DataError:
    """Return the error for a folder that has too few images to hold some out."""
    return DataError(
        f"{folder}: has too few images for validation: --val-fraction {val_fraction:g} takes them from classes of at "
        "least two images"
    )


def images_by_class(index: Index) -> dict[str, int]:
    """Return how many images each class has in an index, by class name."""
    counts = np.bincount(np.asarray(index.labels), minlength=len(index.classes))
    return dict(zip(index.classes, counts.tolist(), strict=True))


def empty_classes(classes: Sequence[str], labels: IntColumn) -> list[str]:
    """Return the classes that none of the images belongs to."""
    labels_of_images = set(np.unique(np.asarray(labels)).tolist())
    return [name for label, name in enumerate(classes) if label not in labels_of_images]


def check_same_images(full_size: Index, copy: Index, val_fraction: float = 0.0) -> None:
    """Raise `DataError` unless a prepared copy has the same images in the same order as the full-size set."""
    if full_size.stems_digest == copy.stems_digest:
        return
    full_size_stems, copy_stems = ({stem(name) for name in index.names()} for index in (full_size, copy))
    missing = len(full_size_stems - copy_stems)
    extra = len(copy_stems - full_size_stems)
    reason = f"{missing} are missing, {extra} too many" if missing or extra else "they are in another order"
    fraction = f" --val-fraction {val_fraction:g}" if val_fraction else ""
    raise DataError(
        f"{copy.folder}: does not have the same images as {full_size.folder} ({reason}); "
        f"create it again: imgnet-cluster data resize {full_size.folder.parent} {copy.folder.parent.parent} "
        f"--sizes {copy.folder.parent.name}{fraction} --overwrite"
    )
