"""Divides a folder of images into a data set with train/ and val/, without moving or changing any image."""

import os
import shutil
from pathlib import Path

from train.data.index.folder import class_folders
from train.data.index.open import DataError, class_names, too_few_images
from train.data.validation_split import held_out_names, notes_on_empty_classes
from train.tools.files import locked
from train.tools.process_log import Progress

from .source_images import open_folder


def split_folder(source: Path, target: Path, fraction: float, progress: Progress) -> tuple[int, int, list[str]]:
    """Write `target` with the images of source/<class> or source/train/<class>: hard links, or copies on another disk.

    `target` appears when it is complete; what a killed call has left is removed by the next. Returns how many images
    are in train/ and in val/, and notes. Raises `DataError` for a set that is split already, and an existing target.
    """
    if not source.is_dir():
        raise DataError(f"{source}: there is no such folder")
    train = source / "train"
    images = train if train.is_dir() and class_folders(train) else source
    if train.is_dir() and (others := [name for name in ("val", "valid", "validation") if (source / name).exists()]):
        raise DataError(f"{source / others[0]}: the data set is split already; its validation images belong into val/")
    if target.exists() or target.resolve().is_relative_to(images.resolve()):
        raise DataError(f"{target}: exists already, or lies among the images; name another folder: --out DIR")
    classes = class_names(images.parent, images.name)
    names = open_folder(images.parent, images.name, classes).names
    held_out = held_out_names(names, fraction)
    if not held_out:
        raise too_few_images(images, fraction)
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished, lock = (target.with_name(f".{target.name}.{suffix}") for suffix in ("part", "lock"))
    with locked(lock):
        try:
            shutil.rmtree(unfinished, ignore_errors=True)
            for done, name in enumerate(names, 1):
                place = unfinished / ("val" if name in held_out else "train") / name
                place.parent.mkdir(parents=True, exist_ok=True)
                try:
                    os.link((images / name).resolve(), place)
                except OSError:  # on another disk, or of another user
                    shutil.copy2(images / name, place)
                progress(done, len(names))
            unfinished.rename(target)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
            lock.unlink(missing_ok=True)
    unvalidated = sorted({*classes} - {name.partition("/")[0] for name in held_out})
    return len(names) - len(held_out), len(held_out), notes_on_empty_classes([], unvalidated, len(classes))
