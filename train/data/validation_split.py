"""Chooses the images of train/ that are held out for validation where there is no val/; names classes without images.

The same fraction of each class is held out, so the proportions of the classes stay the same. The choice is a pure
function of the names: neither machine nor seed nor order of files counts. Imports no numpy, so that plans are quick.
"""

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

MAX_NAMED_CLASSES = 3  # in the notes on classes without images


def held_out_count(images: int, fraction: float) -> int:
    """Return how many images of a class are held out: the fraction, but at least one, and never all."""
    if not fraction or images < 2:
        return 0
    return min(images - 1, max(1, round(images * fraction)))


def held_out_names(names: Iterable[str], fraction: float) -> set[str]:
    """Return the names of the images that are held out. A name is `class/file name`.

    In each class they are the first in the order of a hash of the name. So an image that is added or removed moves at
    most one other image to the other side. The suffix is not hashed: a copy may be stored in another file format.
    """
    names_by_class = defaultdict[str, list[str]](list)
    for name in names:
        names_by_class[name.partition("/")[0]].append(name)
    return {
        name
        for class_names in names_by_class.values()
        for name in sorted(class_names, key=_hash_order)[: held_out_count(len(class_names), fraction)]
    }


def notes_on_empty_classes(untrained: Sequence[str], unvalidated: Sequence[str], class_count: int) -> list[str]:
    """Return a line each about the classes that have no training images, and no validation images."""

    def named(classes: Sequence[str]) -> str:
        others = len(classes) - MAX_NAMED_CLASSES
        return ", ".join(classes[:MAX_NAMED_CLASSES]) + (f" and {others} more" if others > 0 else "")

    notes = []
    if untrained:
        notes.append(f"{len(untrained)} of {class_count} classes have no training images: {named(untrained)}")
    if unvalidated:
        notes.append(
            f"{len(unvalidated)} of {class_count} classes have no validation images, so the accuracy does not count "
            f"them: {named(unvalidated)}"
        )
    return notes


def note_on_missing_copies(sizes: Sequence[int], root: Path, copies: Path, fraction: float, skip_bad: bool) -> str:
    """Return one line about resized copies that do not exist, with the command that makes them; "" without sizes."""
    if not sizes:
        return ""
    size_list = ",".join(map(str, sizes))
    options = (f" --val-fraction {fraction:g}" if fraction else "") + (" --skip-bad" if skip_bad else "")
    return (
        f"no copies of {size_list} pixels in {copies}: reading the full-size images, which is slower; to make the "
        f"copies: imgnet-cluster data resize {root} {copies} --sizes {size_list}{options}"
    )


def _hash_order(name: str) -> tuple[bytes, str]:
    stem = os.path.splitext(name)[0]  # noqa: PTH122 (pathlib is several times slower, and there are a million names)
    return hashlib.sha256(stem.encode("utf-8", "surrogateescape")).digest(), name
