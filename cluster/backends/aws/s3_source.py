"""S3 as a place to fetch packed sets from and to put them to, with what goes wrong there as errors of ours."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from cluster.errors import ClusterError
from infra.aws.client import Account
from infra.aws.s3 import SCHEME, Gone, Objects, Passing, place
from infra.aws.stack import efs, policies
from infra.aws.stack.resources import Work
from train.data.fetch.download import read_manifest
from train.data.fetch.fetch import PATIENCE
from train.data.fetch.sources import Folder
from train.data.manifest import FETCHED, MANIFEST, SPLITS, Manifest

from .errors import lines


class S3:
    """The root of a packed set, such as s3://my-bucket/data/imagenet. Raises `ClusterError`."""

    def __init__(self, url: str) -> None:
        with lines():
            self.objects = Objects(url)
        self.name = self.objects.name

    @contextlib.contextmanager
    def _errors(self, path: str) -> Iterator[None]:
        """What may pass becomes a `ConnectionError`, all else a `ClusterError`."""
        try:
            with lines():
                yield
        except ClusterError as error:
            if isinstance(error.__cause__, Passing):
                raise ConnectionError(str(error).removeprefix(f"{self.name}/{path}: ")) from error
            raise

    def small(self, path: str) -> bytes | None:
        """Return a small file, None when it is not there."""
        with self._errors(path), contextlib.suppress(Gone):
            return self.objects.read(path)
        return None

    def pieces(self, path: str, offset: int, length: int, size: int) -> Iterator[bytes]:
        """Yield a range of a file piece by piece."""
        with self._errors(path):
            yield from self.objects.pieces(path, offset, length, size)

    def missing(self, split: str) -> str:
        """Say that there is no packed set, and how to put one there."""
        put = f"imgnet-cluster data put FOLDER {self.name}"
        return f"{self.name}/{split}/{MANIFEST}: is not there; to put a packed set there: {put}"


def unreadable(url: str, account: Account) -> list[str]:
    """Return a line when the role of the stack's machines does not reach a place. Raises `ClusterError`."""
    bucket, prefix = place(url)
    with lines():
        files = efs.look(Work(account))
    own = files.bucket if files else None
    if bucket == own and f"{prefix}/".startswith(f"{policies.DATA}/"):
        return []
    mine = f"{SCHEME}{own}/{policies.DATA}" if own else "no bucket yet"
    return [f"the machines' role reads {mine}; it has to be given {url} too: imgnet-cluster check --iam --data {url}"]


def put_set(folder: Path, url: str, progress: Callable[[int, int], None]) -> tuple[int, int]:
    """Put a packed set there, what is there already not again, manifests last. `progress` is told bytes.

    Returns how many files were put, and how many were there. Raises `FetchError`, `ClusterError`, `OSError`.
    """
    target, put, done = S3(url), 0, 0
    found = {split: read_manifest(Folder(folder), split, PATIENCE) for split in SPLITS}
    files = [
        (f"{split}/{name}", one) for split, manifest in found.items() for name, one in manifest.wanted(False).items()
    ]
    _check_whole(folder, found)
    total = sum(one.bytes for _, one in files)
    with lines():
        for path, one in files:
            put += target.objects.put(folder / path, path, one.sha256)
            done += one.bytes
            progress(done, total)
        for split in SPLITS:
            put += target.objects.put(folder / split / MANIFEST, f"{split}/{MANIFEST}")
    return put, len(files) + len(SPLITS) - put


def _check_whole(folder: Path, found: dict[str, Manifest]) -> None:
    for split, manifest in found.items():
        for name, one in manifest.files.items():
            path = folder / split / name
            if not path.is_file() or path.stat().st_size != one.bytes:
                more = " (only its index was fetched)" if FETCHED in manifest.said else ""
                raise ClusterError(f"{path}: is not whole{more}; look: imgnet-cluster data verify {folder}")
