"""Data sets that a job's machines fetch to their own disks before they train: what, from where and to where.

Used by the planner and on the machines, so both derive the same paths. Resized copies of a set are beside it, in a
folder whose name ends in -sz, at source and target. Of images that no phase reads, only the index is fetched.
"""

import contextlib
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from cluster.backends.planner import RENTED_DATA_FOLDER, MachinePlanner, SourceAccess
from cluster.errors import BadInput, ClusterError
from cluster.state.spec import JobSpec
from train.data.fetch.fetch import SetToFetch, format_bytes
from train.data.fetch.sources import FolderSource, Source, fetch_manifest
from train.data.manifest import MANIFEST_FILE, NAMES_FILE, SPLITS, FetchError, Manifest, ManifestError
from train.data.validation_split import held_out_count
from train.recipe.schema import FULL_SIZE, Recipe, reads_full_size


def is_in_object_store(location: str) -> bool:
    """Whether a location is in an object store, such as S3, and no folder."""
    return "://" in location


def open_source(location: str) -> Source:
    """Open a folder or a location in an object store as the source of a fetch. Raises `ClusterError`."""
    if is_in_object_store(location):
        from cluster.backends.aws.s3_source import S3Source  # late: boto3 takes time

        return S3Source(location)
    return FolderSource(Path(location).expanduser().absolute())


def copies_location(data_location: str, copies_root: str, short_side: int) -> str:
    """Return the location of the copies that are resized to a short side in pixels. `copies_root` may be ""."""
    if not copies_root and not is_in_object_store(data_location):
        data_location = str(Path(data_location).expanduser().absolute())
    root = (copies_root or data_location).rstrip("/")
    if not copies_root:  # the name of a bucket with -sz would be that of another bucket, perhaps of a stranger
        is_bucket = is_in_object_store(root) and "/" not in root.partition("://")[2]
        root += "/-sz" if is_bucket else "-sz"
    return f"{root}/{short_side}"


def set_to_fetch(source: str, target: Path, short_side: int | None, copies_root: str = "") -> SetToFetch:
    """Return the resized copies of a set as a part to fetch, or the full-size images where `short_side` is None."""
    if short_side is None:
        return SetToFetch(open_source(source), target)
    copy_source = open_source(copies_location(source, copies_root, short_side))
    return SetToFetch(copy_source, Path(copies_location(str(target), "", short_side)))


def sets_of_job(spec: JobSpec, say: Callable[[str], None]) -> list[SetToFetch]:
    """Return the sets that a machine of a job fetches: resized copies, the smallest first, then the full-size images.

    Those replace missing copies, of which `say` gets a line. Where no phase reads them, only their index, first.
    """
    target = Path(spec.train.data).expanduser().absolute()
    sets, missing_sizes = list[SetToFetch](), list[int]()
    for short_side in sorted(spec.recipe.copy_sizes):
        copies = set_to_fetch(spec.data_source, target, short_side, spec.copies_source)
        if copies.source.read_small_file(f"{SPLITS[0]}/{MANIFEST_FILE}") is None:
            missing_sizes.append(short_side)
        else:
            sets.append(copies)
    if missing_sizes:
        location = copies_location(spec.data_source, spec.copies_source, missing_sizes[0])
        names = ",".join(map(str, missing_sizes))
        say(f"{location}: not found; fetching the full-size images instead of {names}")
    full_size = set_to_fetch(spec.data_source, target, None)
    if missing_sizes or reads_full_size(spec.recipe):
        return [*sets, full_size]
    return [replace(full_size, index_only=True), *sets]


# --- jobs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RemoteDataset:
    """The data set that each machine of a job fetches to its own disk."""

    source: str  # a folder on the machines, or a location in an object store
    copies_source: str  # root of the resized copies; "": beside `source`
    target: Path  # folder on each machine
    # By short side (None: full size) and split, as far as this computer can read the source.
    manifests: dict[int | None, dict[str, Manifest]]

    @classmethod
    def resolve(cls, source: str, recipe: Recipe, copies: str, fetch_folder: str, planner: MachinePlanner) -> Self:
        """Derive the target, and read the manifests if this computer can. Raises `ClusterError`."""
        if copies and planner.is_this_computer and not is_in_object_store(copies):
            copies = str(Path(copies).expanduser().absolute())
        dataset = cls(source, copies, fetch_target(source, fetch_folder, planner), {})
        access = planner.source_access(is_in_object_store(source))
        if access is SourceAccess.NONE:
            return dataset
        try:
            return replace(dataset, manifests=dataset._manifests_by_size(recipe))
        except (FetchError, ClusterError) as error:
            if access is SourceAccess.OPTIONAL:
                return dataset
            raise ClusterError(str(error)) from error

    def _manifests_by_size(self, recipe: Recipe) -> dict[int | None, dict[str, Manifest]]:
        """Read the manifests of the full-size images, and of those resized copies that exist. Raises `FetchError`."""
        manifests: dict[int | None, dict[str, Manifest]] = {None: _read_split_manifests(self.source)}
        for short_side in recipe.copy_sizes:
            with contextlib.suppress(FetchError):
                location = copies_location(self.source, self.copies_source, short_side)
                manifests[short_side] = _read_split_manifests(location)
        return manifests

    @property
    def image_counts(self) -> tuple[int, int]:
        """The numbers of training and validation images; 0 when the manifests could not be read."""
        if not self.manifests:
            return 0, 0
        train, val = (self.manifests[None][split].images for split in ("train", "val"))
        return train, val

    def check_val_fraction(self, val_fraction: float) -> None:
        """Raise `BadInput` if images are to be held out of a set that was packed with another validation split."""
        val = self.manifests.get(None, {}).get("val")
        if val and val_fraction and val.packing_info.val_fraction != val_fraction:
            raise BadInput(
                f"{self.source}: the data set has validation images of its own; to use them, pass --val-fraction 0"
            )

    def describe(self, recipe: Recipe) -> str:
        """Return one line for the plan: what is fetched, with sizes where they are known."""
        missing_sizes = [size for size in recipe.copy_sizes if self.manifests and size not in self.manifests]
        parts = []
        for size in (*recipe.copy_sizes, None):
            index_only = size is None and not reads_full_size(recipe) and not missing_sizes
            manifests = self.manifests.get(size, {}).values()
            details = []
            if manifests:
                files = (file for manifest in manifests for file in manifest.files_to_fetch(index_only).values())
                details.append(format_bytes(sum(file.bytes for file in files)))
            if index_only:
                details.append("index only")
            elif size in missing_sizes:
                details.append("not found")
            name = f"{size or FULL_SIZE}"
            parts.append(f"{name}: {', '.join(details)}" if details else name)
        return f"data: {'; '.join(parts)}; each machine fetches it from {self.source} to {self.target} before it trains"


def _read_split_manifests(location: str) -> dict[str, Manifest]:
    source = open_source(location)
    return {split: fetch_manifest(source, split) for split in SPLITS}


def fetch_target(source: str, fetch_folder: str, planner: MachinePlanner) -> Path:
    """Return the folder on the machines that gets the data set, by the name of its source. Raises `BadInput`."""
    fetch_folder = fetch_folder or planner.default_fetch_folder or ""
    if not fetch_folder:
        raise BadInput(
            f"{source}: the machines copy this data set to their own disks before training; "
            "name the folder there: --fetch DIR"
        )
    folder = Path(fetch_folder)
    if planner.is_this_computer:
        folder = folder.expanduser().absolute()
    if not folder.is_absolute() and folder.parts[:1] != ("~",):
        raise BadInput(
            f"--fetch {folder}: is a folder on the machines; give an absolute path, such as {RENTED_DATA_FOLDER}"
        )
    source_name = (source.partition("://")[2] or source).rstrip("/").rpartition("/")[2]
    return folder / (source_name or "data")


@dataclass(frozen=True)
class SetCounts:
    """Image and class counts of a data folder (0: none found), and the classes without images."""

    train: int = 0
    val: int = 0
    classes: int = 0
    untrained: tuple[str, ...] = ()
    unvalidated: tuple[str, ...] = ()


def count_set(root: Path, val_fraction: float) -> SetCounts:
    """Count the images of a data folder by listings and manifests; `val_fraction` is held out without val/."""
    train_folder, val_folder = root / "train", root / "val"
    val_counts = (_count_names if (val_folder / MANIFEST_FILE).exists() else _count_files)(val_folder)
    try:
        manifest = Manifest.parse((train_folder / MANIFEST_FILE).read_bytes())
        train_counts = dict.fromkeys(manifest.classes, 1)  # a manifest has only their sum
        train = manifest.images
    except (OSError, ManifestError):
        train_counts = _count_files(train_folder)
        train = sum(train_counts.values())
        if val_fraction and not val_folder.is_dir():
            val_counts = {name: held_out_count(count, val_fraction) for name, count in train_counts.items()}
            train -= sum(val_counts.values())
    val = sum(val_counts.values())
    untrained = tuple(name for name, count in train_counts.items() if not count)
    unvalidated = tuple(name for name in train_counts if not val_counts.get(name)) if val else ()
    return SetCounts(train, val, len(train_counts), untrained, unvalidated)


def _count_files(folder: Path) -> dict[str, int]:
    """Return the number of files in each class folder of a split, {} when the split does not exist."""
    with contextlib.suppress(OSError):
        return {
            entry.name: sum(not file.name.startswith(".") for file in os.scandir(entry))
            for entry in sorted(os.scandir(folder), key=lambda entry: entry.name)
            if entry.is_dir() and not entry.name.startswith(".")
        }
    return {}


def _count_names(folder: Path) -> dict[str, int]:
    """Return the number of images of each class in a packed split, {} when its list of names cannot be read."""
    with contextlib.suppress(OSError), (folder / NAMES_FILE).open("rb") as names:
        counts = Counter(line.partition(b"/")[0] for line in names)
        return {name.decode("utf-8", "surrogateescape"): count for name, count in counts.items()}
    return {}
