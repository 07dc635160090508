"""S3 as a source and a destination of packed data sets. AWS errors are translated into `ClusterError`."""

import contextlib
from pathlib import Path

from cluster.errors import ClusterError
from infra.aws.client import Account
from infra.aws.s3 import S3_SCHEME, ObjectNotFound, S3Prefix, parse_s3_url
from infra.aws.stack import efs, policies
from infra.aws.stack.resources import StackContext
from train.data.fetch.sources import FolderSource, fetch_manifest
from train.data.manifest import MANIFEST_FILE, SPLITS, Manifest
from train.tools.process_log import Progress


class S3Source(S3Prefix):
    """A packed data set under an S3 prefix such as s3://my-bucket/data/imagenet."""

    def read_small_file(self, path: str) -> bytes | None:
        """Return the content of a small file, None when it does not exist."""
        with contextlib.suppress(ObjectNotFound):
            return self.read(path)
        return None

    def describe_missing(self, split: str) -> str:
        """Return an error message: no packed set is here, and how to upload one."""
        upload_command = f"imgnet-cluster data put FOLDER {self.name}"
        return f"{self.name}/{split}/{MANIFEST_FILE}: not found; to upload a packed set: {upload_command}"

    def upload_set(self, folder: Path, progress: Progress) -> tuple[int, int]:
        """Upload a packed set, the manifests last. Returns the numbers of files that were sent and that S3 had."""
        manifests = {split: fetch_manifest(FolderSource(folder), split) for split in SPLITS}
        files = [
            (f"{split}/{name}", file)
            for split, manifest in manifests.items()
            for name, file in manifest.files_to_fetch(False).items()
        ]
        _check_complete(folder, manifests)
        total_bytes = sum(file.bytes for _, file in files)
        done_bytes = 0
        uploaded_count = 0
        for path, file in files:
            uploaded_count += self.upload(folder / path, path, file.sha256)
            done_bytes += file.bytes
            progress(done_bytes, total_bytes)
        for split in SPLITS:
            uploaded_count += self.upload(folder / split / MANIFEST_FILE, f"{split}/{MANIFEST_FILE}")
        return uploaded_count, len(files) + len(SPLITS) - uploaded_count


def machine_role_problems(url: str, account: Account) -> list[str]:
    """Return a line for the plan if the role of the machines cannot read an S3 location. Raises `ClusterError`."""
    bucket, prefix = parse_s3_url(url)
    file_system = efs.find_file_system(StackContext(account))
    stack_bucket = file_system.bucket if file_system else None
    if bucket == stack_bucket and f"{prefix}/".startswith(f"{policies.DATA_PREFIX}/"):
        return []
    readable = f"only {S3_SCHEME}{stack_bucket}/{policies.DATA_PREFIX}" if stack_bucket else "no bucket yet"
    return [
        f"the machines' IAM role reads {readable}; allow it to read {url} too: "
        f"imgnet-cluster check --iam --data {url} prints the policy"
    ]


def _check_complete(folder: Path, manifests: dict[str, Manifest]) -> None:
    """Raise `ClusterError` when a file of the set is missing or has another size than its manifest says."""
    for split, manifest in manifests.items():
        for name, file in manifest.files.items():
            path = folder / split / name
            if not path.is_file() or path.stat().st_size != file.bytes:
                index_only = "" if manifest.has_images else " (only the set's index was fetched)"
                raise ClusterError(
                    f"{path}: the file is incomplete{index_only}; run: imgnet-cluster data verify {folder}"
                )
