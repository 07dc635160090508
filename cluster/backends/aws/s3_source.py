"""S3 as a place to fetch packed sets from and to put them to, with what goes wrong there as errors of ours."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from cluster.errors import ClusterError
from infra.aws.client import Account
from infra.aws.s3 import S3_SCHEME, ObjectNotFound, S3Prefix, TransientError, parse_s3_url
from infra.aws.stack import efs, policies
from infra.aws.stack.resources import StackContext
from train.data.fetch.download import fetch_manifest
from train.data.fetch.fetch import STALL_TIMEOUT_SECONDS
from train.data.fetch.sources import FolderSource
from train.data.manifest import FETCHED_KEY, MANIFEST_FILE, SPLITS, SourceManifest

from .errors import aws_errors_as_cluster_errors


class S3Source:
    """The root of a packed set, such as s3://my-bucket/data/imagenet. Raises `ClusterError`."""

    def __init__(self, url: str) -> None:
        with aws_errors_as_cluster_errors():
            self.s3_prefix = S3Prefix(url)
        self.name = self.s3_prefix.name

    @contextlib.contextmanager
    def _translate_errors(self, path: str) -> Iterator[None]:
        """What may pass becomes a `ConnectionError`, all else a `ClusterError`."""
        try:
            with aws_errors_as_cluster_errors():
                yield
        except ClusterError as error:
            if isinstance(error.__cause__, TransientError):
                raise ConnectionError(str(error).removeprefix(f"{self.name}/{path}: ")) from error
            raise

    def read_small_file(self, path: str) -> bytes | None:
        """Return a small file, None when it is not there."""
        with self._translate_errors(path), contextlib.suppress(ObjectNotFound):
            return self.s3_prefix.read(path)
        return None

    def read_range(self, path: str, offset: int, length: int, size: int) -> Iterator[bytes]:
        """Yield a range of a file piece by piece."""
        with self._translate_errors(path):
            yield from self.s3_prefix.read_range(path, offset, length, size)

    def describe_missing(self, split: str) -> str:
        """Say that there is no packed set, and how to put one there."""
        put = f"imgnet-cluster data put FOLDER {self.name}"
        return f"{self.name}/{split}/{MANIFEST_FILE}: is not there; to put a packed set there: {put}"


def machine_role_problems(url: str, account: Account) -> list[str]:
    """Return a line when the role of the stack's machines does not reach a place. Raises `ClusterError`."""
    bucket, prefix = parse_s3_url(url)
    with aws_errors_as_cluster_errors():
        files = efs.find_file_system(StackContext(account))
    own = files.bucket if files else None
    if bucket == own and f"{prefix}/".startswith(f"{policies.DATA_PREFIX}/"):
        return []
    mine = f"{S3_SCHEME}{own}/{policies.DATA_PREFIX}" if own else "no bucket yet"
    return [f"the machines' role reads {mine}; it has to be given {url} too: imgnet-cluster check --iam --data {url}"]


def upload_dataset(folder: Path, url: str, on_progress: Callable[[int, int], None]) -> tuple[int, int]:
    """Put a packed set there, what is there already not again, manifests last. `progress` is told bytes.

    Returns how many files were put, and how many were there. Raises `FetchError`, `ClusterError`, `OSError`.
    """
    target, put, done = S3Source(url), 0, 0
    found = {split: fetch_manifest(FolderSource(folder), split, STALL_TIMEOUT_SECONDS) for split in SPLITS}
    files = [
        (f"{split}/{name}", one)
        for split, manifest in found.items()
        for name, one in manifest.files_to_fetch(False).items()
    ]
    _check_complete(folder, found)
    total = sum(one.bytes for _, one in files)
    with aws_errors_as_cluster_errors():
        for path, one in files:
            put += target.s3_prefix.upload(folder / path, path, one.sha256)
            done += one.bytes
            on_progress(done, total)
        for split in SPLITS:
            put += target.s3_prefix.upload(folder / split / MANIFEST_FILE, f"{split}/{MANIFEST_FILE}")
    return put, len(files) + len(SPLITS) - put


def _check_complete(folder: Path, manifests: dict[str, SourceManifest]) -> None:
    for split, manifest in manifests.items():
        for name, one in manifest.files.items():
            path = folder / split / name
            if not path.is_file() or path.stat().st_size != one.bytes:
                more = " (only its index was fetched)" if FETCHED_KEY in manifest.fields else ""
                raise ClusterError(f"{path}: is not whole{more}; look: imgnet-cluster data verify {folder}")
