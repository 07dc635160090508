"""What lies in a folder of sets, and whether every byte and every image of the packed ones is as it was written."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from train.data.decode import BadImage, decode
from train.data.index import folder as index_folder
from train.data.index import packed
from train.data.index.base import SPLITS, DataError, Progress, names_digest
from train.data.index.packed import INDEX, MANIFEST, NAMES, Manifest
from train.data.index.shards import shard_name, wrong_size
from train.data.threads import in_threads

PART = 1 << 22  # bytes read at once


@dataclass(frozen=True)
class Found:
    """One split of a set: `kind` is packed, files or unfinished, of which the numbers are not known."""

    root: Path
    split: str
    kind: str
    copy: int | None = None
    images: int | None = None
    bytes: int | None = None
    classes: int | None = None


@dataclass
class Verified:
    """What was looked at, and every fault as (where, what)."""

    files: int = 0
    bytes: int = 0
    images: int = 0
    faults: list[tuple[str, str]] = field(default_factory=list)


def splits_below(folder: Path) -> list[Path]:
    """Return the folders of the splits in a set, or in the sets of a folder of sets. Raises `DataError` for none."""
    if packed.is_packed(folder):
        return [folder]
    if not folder.is_dir():
        raise DataError(f"{folder}: there is no such folder")
    below = sorted(one for one in folder.iterdir() if one.is_dir() and one.name not in SPLITS)
    found = [root / split for root in (folder, *below) for split in SPLITS if (root / split).is_dir()]
    if not found:
        raise DataError(f"{folder}: has no sets of images: neither train/ and val/, nor folders that have them")
    return found


def list_sets(folder: Path) -> list[Found]:
    """Return what there is below a folder. Raises `DataError` for nothing, and a manifest that cannot be read."""
    return [_look(one) for one in splits_below(folder)]


def _look(folder: Path) -> Found:
    if packed.is_packed(folder):
        said = packed.read_manifest(folder)
        return Found(folder.parent, folder.name, "packed", said.short, said.images, said.bytes, len(said.classes))
    if packed.is_unfinished(folder):
        return Found(folder.parent, folder.name, "unfinished")
    classes = index_folder.class_folders(folder)
    paths, marks = index_folder.scan(folder, classes)
    return Found(folder.parent, folder.name, "files", None, len(paths), int(marks[:, 0].sum()), len(classes))


def verify(folder: Path, progress: Progress | None = None) -> Verified:
    """Check the sha256 of every file, the checksum and the pixels of every image of the packed sets below a folder.

    Raises `DataError` when there is none.
    """
    found = [one for one in splits_below(folder) if packed.is_packed(one) or packed.is_unfinished(one)]
    if not found:
        raise DataError(f"{folder}: has no packed set; a folder of files: imgnet-cluster data check {folder}")
    done, manifests = Verified(), dict[Path, Manifest]()
    for one in found:
        try:
            manifests[one] = packed.read_manifest(one)
        except DataError as error:
            unfinished = (str(one), "is not finished: call the command that makes it again")
            done.faults.append(unfinished if packed.is_unfinished(one) else _two(error))
    total, before = sum(one.images for one in manifests.values()), 0
    for one, manifest in manifests.items():

        def tell(count: int, before: int = before) -> None:
            if progress:
                progress(before + count, total)

        lost = _verify_files(one, manifest, done)
        if not {INDEX, NAMES} & lost:
            _verify_images(one, lost, done, tell)
        before += manifest.images
        tell(0, before)
    return done


def _two(error: Exception) -> tuple[str, str]:
    where, _, what = str(error).partition(": ")
    return where, what


def _verify_files(folder: Path, manifest: Manifest, done: Verified) -> set[str]:
    """Compare sizes and checksums; return the files of which the images need not be looked at any more."""

    names = [name for name in manifest.files if not (manifest.fetched == "index" and name.startswith("shard-"))]

    def look(name: str) -> str:
        path, said = folder / name, manifest.files[name]
        try:
            size = path.stat().st_size
            if size != said["bytes"]:
                return wrong_size(size, said["bytes"])
            return "" if _sha256(path) == said["sha256"] else "its bytes have changed (sha256)"
        except OSError as error:
            return error.strerror or str(error)

    lost = set()
    for name, why in zip(names, in_threads(look, names), strict=True):
        done.files += 1
        done.bytes += int(manifest.files[name]["bytes"])
        if why:
            done.faults.append((str(folder / name), why))
            if name in (INDEX, NAMES) or "sha256" not in why:
                lost.add(name)
    return lost


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while part := file.read(PART):
            digest.update(part)
    return digest.hexdigest()


def _verify_images(folder: Path, lost: set[str], done: Verified, tell: Callable[[int], None]) -> None:
    """Read and decode every image, but those in shards of which it is known that they are not whole."""
    try:
        index = packed.load(folder, None, whole=False)
        if names_digest(index.names()) != index.manifest.source or len(index.names()) != len(index):
            raise DataError(f"{folder / NAMES}: is not of the images in {INDEX}")
    except DataError as error:
        done.faults.append(_two(error))
        return
    for number, (name, label) in enumerate(zip(index.names(), index.labels[:].tolist(), strict=True)):
        if name.split("/")[0] != index.classes[label]:
            done.faults.append((index.where(number), f"{INDEX} and {MANIFEST} say class {index.classes[label]}"))
            break  # one tells it
    if not index.has_bytes:
        return
    gone = {number for number in range(len(index.manifest.shards)) if shard_name(number) in lost}

    def look(number: int) -> str:
        if int(index.rows[number]["shard"]) in gone:
            return ""
        try:
            height, width, _ = decode(index.read(number)).shape
        except (BadImage, DataError) as error:
            return str(error).removeprefix(f"{index.where(number)}: ").split("; to see all")[0]
        expected = int(index.widths[number]), int(index.heights[number])
        return "" if (width, height) == expected else f"has {width}x{height} pixels, {INDEX} says otherwise"

    for number, why in enumerate(in_threads(look, range(len(index)))):
        done.images += 1
        if why:
            done.faults.append((index.where(number), why))
        if number % 100 == 99:
            tell(number + 1)
