"""Lists the data sets in a folder, and verifies that every byte and every image of the packed ones is as written."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from train.data.decode import BadImage, decode_image
from train.data.index import folder as index_folder
from train.data.index import packed
from train.data.index.base import DataError, stems_sha256
from train.data.manifest import INDEX_FILE, MANIFEST_FILE, NAMES_FILE, SPLITS, Manifest, is_shard, shard_name
from train.data.threads import map_in_threads
from train.tools.process_log import Progress, no_progress


@dataclass(frozen=True)
class SplitSummary:
    """One split of a set. `kind` is "packed", "files" or "unfinished"; of an unfinished split the numbers are None.

    `copy` is the short side of packed copies in pixels, None for full size.
    """

    root: Path
    split: str
    kind: str
    copy: int | None = None
    images: int | None = None
    bytes: int | None = None
    classes: int | None = None


@dataclass
class VerifyResult:
    """What was verified, and every fault as (where, what)."""

    files: int = 0
    bytes: int = 0
    images: int = 0
    faults: list[tuple[str, str]] = field(default_factory=list)


def find_splits(folder: Path) -> list[Path]:
    """Return the split folders of a set, or of all sets in a folder. Raises `DataError` when there are none."""
    if packed.is_packed(folder):
        return [folder]
    if not folder.is_dir():
        raise DataError(f"{folder}: there is no such folder")
    subfolders = sorted(path for path in folder.iterdir() if path.is_dir() and path.name not in SPLITS)
    splits = [root / split for root in (folder, *subfolders) for split in SPLITS if (root / split).is_dir()]
    if not splits:
        raise DataError(f"{folder}: has no sets of images: neither train/ and val/, nor folders that have them")
    return splits


def list_sets(folder: Path) -> list[SplitSummary]:
    """Return a summary of every split in a folder. Raises `DataError` for no split, or a manifest that is damaged."""
    return [_summarize_split(split_folder) for split_folder in find_splits(folder)]


def _summarize_split(folder: Path) -> SplitSummary:
    root, split = folder.parent, folder.name
    if packed.is_packed(folder):
        manifest = packed.read_manifest(folder)
        copy, classes = manifest.short_side, len(manifest.classes)
        return SplitSummary(root, split, "packed", copy, manifest.images, manifest.bytes, classes)
    if packed.is_unfinished(folder):
        return SplitSummary(root, split, "unfinished")
    class_names = index_folder.class_folders(folder)
    paths, sizes_and_mtimes = index_folder.scan_class_folders(folder, class_names)
    return SplitSummary(root, split, "files", None, len(paths), int(sizes_and_mtimes[:, 0].sum()), len(class_names))


def verify_packed_sets(folder: Path, progress: Progress = no_progress) -> VerifyResult:
    """Verify the sha256 of all files, and all images, of the packed sets in a folder. Raises `DataError` for none."""
    split_folders = [path for path in find_splits(folder) if packed.is_packed(path) or packed.is_unfinished(path)]
    if not split_folders:
        raise DataError(
            f"{folder}: has no packed set; to check a folder of image files: imgnet-cluster data check {folder}"
        )
    result = VerifyResult()
    manifests: dict[Path, Manifest] = {}
    for split_folder in split_folders:
        try:
            manifests[split_folder] = packed.read_manifest(split_folder)
        except DataError as error:
            is_unfinished = packed.is_unfinished(split_folder)
            unfinished_fault = (str(split_folder), "is not finished: run the command that creates it again")
            result.faults.append(unfinished_fault if is_unfinished else _split_message(error))
    total = sum(manifest.images for manifest in manifests.values())
    done_before = 0
    for split_folder, manifest in manifests.items():

        def report_progress(done_in_split: int, done_before: int = done_before) -> None:
            progress(done_before + done_in_split, total)

        damaged_files = _verify_files(split_folder, manifest, result)
        if not {INDEX_FILE, NAMES_FILE} & damaged_files:
            _verify_images(split_folder, damaged_files, result, report_progress)
        done_before += manifest.images
        report_progress(0, done_before)
    return result


def _split_message(error: Exception) -> tuple[str, str]:
    """Return (where, what) of a `DataError`, whose text is "where: what"."""
    where, _, what = str(error).partition(": ")
    return where, what


def _verify_files(folder: Path, manifest: Manifest, result: VerifyResult) -> set[str]:
    """Compare sizes and checksums of the files with the manifest, and add to `result`.

    Returns the damaged files whose images are not worth reading. A shard of the right size with changed bytes is not
    among them: reading its images tells which of them have changed.
    """
    names = [name for name in manifest.files if not (is_shard(name) and not manifest.has_images)]

    def find_fault(name: str) -> str:
        path = folder / name
        entry = manifest.files[name]
        try:
            size = path.stat().st_size
            if size != entry.bytes:
                return packed.describe_size_mismatch(size, entry.bytes)
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            return "" if digest == entry.sha256 else "its bytes have changed (sha256)"
        except OSError as error:
            return error.strerror or str(error)

    damaged_files = set()
    for name, fault in zip(names, map_in_threads(find_fault, names), strict=True):
        result.files += 1
        result.bytes += manifest.files[name].bytes
        if fault:
            result.faults.append((str(folder / name), fault))
            if name in (INDEX_FILE, NAMES_FILE) or "sha256" not in fault:
                damaged_files.add(name)
    return damaged_files


def _verify_images(
    folder: Path, damaged_files: set[str], result: VerifyResult, report_progress: Callable[[int], None]
) -> None:
    """Read and decode every image, except those in damaged shards, and add to `result`."""
    try:
        index = packed.load_packed_index(folder, None, check_shard_sizes=False)
        names = index.names()
        if stems_sha256(names) != index.manifest.stems_digest or len(names) != len(index):
            raise DataError(f"{folder / NAMES_FILE}: does not belong to the images in {INDEX_FILE}")
    except DataError as error:
        result.faults.append(_split_message(error))
        return
    for number, (name, label) in enumerate(zip(names, index.labels[:].tolist(), strict=True)):
        if name.split("/")[0] != index.classes[label]:
            fault = f"{INDEX_FILE} and {MANIFEST_FILE} say class {index.classes[label]}"
            result.faults.append((index.location(number), fault))
            break  # the other images would repeat this fault
    if not index.has_images:
        return
    shard_count = len(index.manifest.shard_sizes)
    damaged_shards = {number for number in range(shard_count) if shard_name(number) in damaged_files}

    def find_fault(number: int) -> str:
        if int(index.rows[number]["shard"]) in damaged_shards:
            return ""
        try:
            height, width, _ = decode_image(index.read(number)).shape
        except (BadImage, DataError) as error:
            return str(error).removeprefix(f"{index.location(number)}: ").split("; to list all")[0]
        indexed_size = int(index.widths[number]), int(index.heights[number])
        return "" if (width, height) == indexed_size else f"has {width}x{height} pixels, {INDEX_FILE} says otherwise"

    for number, fault in enumerate(map_in_threads(find_fault, range(len(index)))):
        result.images += 1
        if fault:
            result.faults.append((index.location(number), fault))
        if number % 100 == 99:
            report_progress(number + 1)
