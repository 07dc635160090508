"""Images that a job's machines fetch to their own disks before they train: from where, which of them, to where.

`data fetch` on a machine and the plan at home mean the same by the same words: a set's copies lie beside it, in its
name with -sz, at the source and at the target. What no phase reads is not fetched: of the full-size images then the
index alone, which tells names and classes.
"""

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from train.data.manifest import MANIFEST_FILE
from train.tools.filesystem import read_json

if TYPE_CHECKING:
    pass

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from cluster.errors import BadInput, ClusterError
from train.data.fetch.download import fetch_manifest, fetch_small_file
from train.data.fetch.fetch import STALL_TIMEOUT_SECONDS, SetToFetch, format_bytes
from train.data.fetch.sources import FolderSource, Source
from train.data.manifest import SPLITS, FetchError, SourceManifest
from train.recipe.schema import FULL_SIZE, Recipe, reads_full_size

S3_SCHEME = "s3://"
RENTED_DATA_FOLDER = "~/.imgnet/data"  # on the fast disk, where there is one: infra/aws/instances/user_data.py
MANIFEST_TIMEOUT_SECONDS = 10.0  # for a plan


def is_s3(location: str) -> bool:
    """Whether a place is in S3."""
    return location.startswith(S3_SCHEME)


def open_source(location: str) -> Source:
    """Return a folder or a place in S3 as a source. Raises `ClusterError`."""
    if is_s3(location):
        from cluster.backends.aws.s3_source import S3Source

        return S3Source(location)
    return FolderSource(Path(location).expanduser().absolute())


def copies_location(data_location: str, copies_root: str, short_side: int) -> str:
    """Return where the copies of a short side lie."""
    if not copies_root and not is_s3(data_location):
        data_location = str(Path(data_location).expanduser().absolute())
    return f"{copies_root.rstrip('/') if copies_root else data_location.rstrip('/') + '-sz'}/{short_side}"


def list_parts(
    source: str,
    target: Path,
    sizes: Sequence[int | None],
    *,
    index_only: bool = False,
    copies: str = "",
    full_if_missing: bool = False,
    say: Callable[[str], None] = print,
) -> list[SetToFetch]:
    """Return what is to be fetched: copies by short side, the smallest first, then the full-size images (None).

    `index_only`: of those no images. `else_full`: they take the place of a copy that the source has not, aloud.
    """
    found, lacking = list[SetToFetch](), list[int]()
    for short in sorted(one for one in sizes if one is not None):
        there = open_source(copies_location(source, copies, short))
        if full_if_missing and fetch_small_file(there, f"{SPLITS[0]}/{MANIFEST_FILE}", STALL_TIMEOUT_SECONDS) is None:
            lacking.append(short)
        else:
            found.append(SetToFetch(there, Path(copies_location(str(target), "", short))))
    if lacking:
        names = ",".join(map(str, lacking))
        say(
            f"{copies_location(source, copies, lacking[0])}: is not there; the full-size images are fetched in place of {names}"
        )
    if None in sizes or lacking:
        full = SetToFetch(open_source(source), target, index_only and not lacking)
        found = [full, *found] if full.index_only else [*found, full]
    return found


# --- jobs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RemoteDataset:
    """What a job fetches: from `source`, and `copies` where they are not beside it, to `target` of each machine.

    `manifests` by short side are what can be seen of it from here.
    """

    source: str
    copies_source: str
    target: Path
    manifests: dict[int | None, dict[str, SourceManifest]]

    @classmethod
    def resolve(cls, source: str, recipe: Recipe, copies: str, fetch_folder: str, backend: str, offline: bool) -> Self:
        """Work it out, and look at the source where it can be seen from here.

        Raises `ClusterError` when nobody has said where to, or the source is no packed set.
        """
        if copies and backend == "local" and not is_s3(copies):
            copies = str(Path(copies).expanduser().absolute())
        found = cls(source, copies, fetch_target(source, fetch_folder, backend), {})
        try:
            if backend == "local" or (backend == "aws" and is_s3(source) and not offline):
                return replace(found, manifests=found._manifests_by_size(recipe))
        except FetchError as error:
            raise ClusterError(str(error)) from error
        with contextlib.suppress(FetchError, ClusterError):
            if backend == "ssh":  # its machines may be allowed to what this computer is not
                return replace(found, manifests=found._manifests_by_size(recipe))
        return found

    def _manifests_by_size(self, recipe: Recipe) -> dict[int | None, dict[str, SourceManifest]]:
        found: dict[int | None, dict[str, SourceManifest]] = {None: _read_split_manifests(self.source)}
        for short in recipe.copy_sizes:
            with contextlib.suppress(FetchError):
                found[short] = _read_split_manifests(copies_location(self.source, self.copies_source, short))
        return found

    @property
    def image_counts(self) -> tuple[int, int]:
        """How many images there are for training and validation, 0 when that is not known."""
        if not self.manifests:
            return 0, 0
        train, val = (int(self.manifests[None][split].fields["images"]) for split in ("train", "val"))
        return train, val

    def describe(self, recipe: Recipe) -> str:
        """Return what is fetched in one line, with sizes where they are known."""
        said = []
        for short in (*recipe.copy_sizes, None):
            lacking = [one for one in recipe.copy_sizes if self.manifests and one not in self.manifests]
            index_only = short is None and not reads_full_size(recipe) and not lacking
            splits = self.manifests.get(short, {}).values()
            amount = sum(one.bytes for split in splits for one in split.files_to_fetch(index_only).values())
            words = [format_bytes(amount)] if splits else []
            words += ["index only"] if index_only else ["not there"] if short in lacking else []
            said.append(f"{short or FULL_SIZE}: {', '.join(words)}" if words else f"{short or FULL_SIZE}")
        return f"data: {'; '.join(said)}; fetched from {self.source} to {self.target} of each machine before it trains"


def _read_split_manifests(location: str) -> dict[str, SourceManifest]:
    there = open_source(location)
    return {split: fetch_manifest(there, split, MANIFEST_TIMEOUT_SECONDS) for split in SPLITS}


def fetch_target(source: str, fetch_folder: str, backend: str) -> Path:
    """Return the folder that a job's images are fetched to. Raises `BadInput` when nobody has said where."""
    if not fetch_folder and backend in ("local", "ssh"):
        raise BadInput(f"{source}: is fetched to the machines' disks first; say where to: --fetch DIR")
    folder = Path(fetch_folder or RENTED_DATA_FOLDER)
    if backend == "local":
        folder = folder.expanduser().absolute()
    if not folder.is_absolute() and folder.parts[:1] != ("~",):
        raise BadInput(f"--fetch {folder}: is on the machines; say an absolute path, such as {RENTED_DATA_FOLDER}")
    return folder / (source.removeprefix(S3_SCHEME).rstrip("/").rpartition("/")[2] or "data")


def count_splits(root: Path) -> tuple[int, int]:
    """Return the numbers of images for training and validation, 0 where there are none."""
    return count_images(root / "train"), count_images(root / "val")


def count_images(folder: Path) -> int:
    """Return the number of images of a packed split, or of files in the class folders; 0 when there is none."""
    packed = read_json(folder / MANIFEST_FILE)
    if isinstance(packed, dict):
        return int(packed.get("images", 0))
    with contextlib.suppress(OSError):
        return sum(
            1 for one in os.scandir(folder) if one.is_dir() for file in os.scandir(one) if not file.name.startswith(".")
        )
    return 0
