"""What lies in a folder of sets, and whether every byte and every image of the packed ones is as it was written."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from train.data.decode import BadImage, decode_image
from train.data.index import folder as index_folder
from train.data.index import packed
from train.data.index.base import SPLITS, DataError, ProgressCallback, stems_sha256
from train.data.index.packed import INDEX_FILE, MANIFEST_FILE, NAMES_FILE, PackedManifest
from train.data.index.shards import describe_size_mismatch, shard_name
from train.data.threads import map_in_threads

READ_CHUNK_BYTES = 1 << 22  # bytes read at once


@dataclass(frozen=True)
class SplitSummary:
    """One split of a set: `kind` is packed, files or unfinished, of which the numbers are not known."""

    root: Path
    split: str
    kind: str
    copy: int | None = None
    images: int | None = None
    bytes: int | None = None
    classes: int | None = None


@dataclass
class VerifyResult:
    """What was looked at, and every fault as (where, what)."""

    files: int = 0
    bytes: int = 0
    images: int = 0
    faults: list[tuple[str, str]] = field(default_factory=list)


def find_splits(folder: Path) -> list[Path]:
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


def list_sets(folder: Path) -> list[SplitSummary]:
    """Return what there is below a folder. Raises `DataError` for nothing, and a manifest that cannot be read."""
    return [_summarize_split(one) for one in find_splits(folder)]


def _summarize_split(folder: Path) -> SplitSummary:
    if packed.is_packed(folder):
        said = packed.read_manifest(folder)
        return SplitSummary(
            folder.parent, folder.name, "packed", said.short_side, said.images, said.bytes, len(said.classes)
        )
    if packed.is_unfinished(folder):
        return SplitSummary(folder.parent, folder.name, "unfinished")
    classes = index_folder.class_folders(folder)
    paths, marks = index_folder.scan_class_folders(folder, classes)
    return SplitSummary(folder.parent, folder.name, "files", None, len(paths), int(marks[:, 0].sum()), len(classes))


def verify_packed_sets(folder: Path, progress: ProgressCallback | None = None) -> VerifyResult:
    """Check the sha256 of every file, the checksum and the pixels of every image of the packed sets below a folder.

    Raises `DataError` when there is none.
    """
    found = [one for one in find_splits(folder) if packed.is_packed(one) or packed.is_unfinished(one)]
    if not found:
        raise DataError(f"{folder}: has no packed set; a folder of files: imgnet-cluster data check {folder}")
    done, manifests = VerifyResult(), dict[Path, PackedManifest]()
    for one in found:
        try:
            manifests[one] = packed.read_manifest(one)
        except DataError as error:
            unfinished = (str(one), "is not finished: call the command that makes it again")
            done.faults.append(unfinished if packed.is_unfinished(one) else _split_message(error))
    total, before = sum(one.images for one in manifests.values()), 0
    for one, manifest in manifests.items():

        def tell(count: int, before: int = before) -> None:
            if progress:
                progress(before + count, total)

        lost = _verify_files(one, manifest, done)
        if not {INDEX_FILE, NAMES_FILE} & lost:
            _verify_images(one, lost, done, tell)
        before += manifest.images
        tell(0, before)
    return done


def _split_message(error: Exception) -> tuple[str, str]:
    where, _, what = str(error).partition(": ")
    return where, what


def _verify_files(folder: Path, manifest: PackedManifest, result: VerifyResult) -> set[str]:
    """Compare sizes and checksums; return the files of which the images need not be looked at any more."""

    names = [name for name in manifest.files if not (manifest.fetched == "index" and name.startswith("shard-"))]

    def look(name: str) -> str:
        path, said = folder / name, manifest.files[name]
        try:
            size = path.stat().st_size
            if size != said["bytes"]:
                return describe_size_mismatch(size, said["bytes"])
            return "" if _file_sha256(path) == said["sha256"] else "its bytes have changed (sha256)"
        except OSError as error:
            return error.strerror or str(error)

    lost = set()
    for name, why in zip(names, map_in_threads(look, names), strict=True):
        result.files += 1
        result.bytes += int(manifest.files[name]["bytes"])
        if why:
            result.faults.append((str(folder / name), why))
            if name in (INDEX_FILE, NAMES_FILE) or "sha256" not in why:
                lost.add(name)
    return lost


def _file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while part := file.read(READ_CHUNK_BYTES):
            digest.update(part)
    return digest.hexdigest()


def _verify_images(
    folder: Path, damaged_files: set[str], result: VerifyResult, report_progress: Callable[[int], None]
) -> None:
    """Read and decode every image, but those in shards of which it is known that they are not whole."""
    try:
        index = packed.load_packed_index(folder, None, check_shard_sizes=False)
        if stems_sha256(index.names()) != index.manifest.stems_digest or len(index.names()) != len(index):
            raise DataError(f"{folder / NAMES_FILE}: is not of the images in {INDEX_FILE}")
    except DataError as error:
        result.faults.append(_split_message(error))
        return
    for number, (name, label) in enumerate(zip(index.names(), index.labels[:].tolist(), strict=True)):
        if name.split("/")[0] != index.classes[label]:
            result.faults.append(
                (index.location(number), f"{INDEX_FILE} and {MANIFEST_FILE} say class {index.classes[label]}")
            )
            break  # one tells it
    if not index.has_images:
        return
    gone = {number for number in range(len(index.manifest.shard_sizes)) if shard_name(number) in damaged_files}

    def look(number: int) -> str:
        if int(index.rows[number]["shard"]) in gone:
            return ""
        try:
            height, width, _ = decode_image(index.read(number)).shape
        except (BadImage, DataError) as error:
            return str(error).removeprefix(f"{index.location(number)}: ").split("; to see all")[0]
        expected = int(index.widths[number]), int(index.heights[number])
        return "" if (width, height) == expected else f"has {width}x{height} pixels, {INDEX_FILE} says otherwise"

    for number, why in enumerate(map_in_threads(look, range(len(index)))):
        result.images += 1
        if why:
            result.faults.append((index.location(number), why))
        if number % 100 == 99:
            report_progress(number + 1)
