"""What lies in S3 below s3://bucket/prefix: small files, ranges of large ones, and files put there.

What is read is asked for once, without botocore's own repeats: who fetches knows better how long to be patient. What
may pass is a `Passing`. The region need not be known: S3 says where a bucket is, and botocore goes there.
"""

import hashlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from boto3.s3.transfer import S3UploadFailedError, TransferConfig
from botocore import exceptions as boto
from botocore.config import Config

from .client import Account
from .errors import DENIED_CODES, CloudError, ErrorKind, NoCredentials, classify_error, explain_error, get_error_code

S3_SCHEME = "s3://"
FALLBACK_REGION = "us-east-1"
READ_CONFIG = Config(
    retries={"mode": "standard", "total_max_attempts": 1}, connect_timeout=10, read_timeout=20, max_pool_connections=32
)
READ_CHUNK_BYTES = 1 << 20
UPLOAD_PART_BYTES = 64 << 20  # of an upload
SHA256_METADATA_KEY = "sha256"  # in the metadata of what `put` has put
TRANSIENT_CODES = ("RequestTimeout", "IncompleteBody", "BadDigest")  # beside what `reaction` knows


class TransientError(CloudError):
    """An error that may pass: the same again, later."""


class ObjectNotFound(CloudError):
    """An object is not there."""


def parse_s3_url(url: str) -> tuple[str, str]:
    """Return bucket and prefix of s3://bucket/prefix. Raises `CloudError` when that is no such name."""
    bucket, _, prefix = url.removeprefix(S3_SCHEME).partition("/")
    if not url.startswith(S3_SCHEME) or not bucket:
        raise CloudError(f"{url}: is no place in S3; one looks like s3://my-bucket/data/imagenet")
    return bucket, prefix.strip("/")


class S3Prefix:
    """All below one s3://bucket/prefix. Raises `CloudError` when that is no such name, or there are no keys."""

    def __init__(self, url: str) -> None:
        self.bucket, self.prefix = parse_s3_url(url)
        self.name = f"{S3_SCHEME}{self.bucket}/{self.prefix}".rstrip("/")
        try:
            self.account = Account()
        except NoCredentials:  # no region is named
            self.account = Account(FALLBACK_REGION)
        self.s3 = self.account.client("s3", READ_CONFIG)
        self._etags: dict[str, str] = {}

    def read(self, path: str) -> bytes:
        """Return a small object. Raises `Gone`, `Passing`, `CloudError`."""
        try:
            return bytes(self.s3.get_object(**self._object_params(path))["Body"].read())
        except Exception as error:
            raise self._explain(error, path) from error

    def read_range(self, path: str, offset: int, length: int, size: int) -> Iterator[bytes]:
        """Yield a range of an object piece by piece.

        Raises `Passing`, and `CloudError` when it has not `size` bytes or was replaced since it was first read.
        """
        words = self._object_params(path)
        if (tag := self._etags.get(path)) is not None:
            words["IfMatch"] = tag
        if not length:
            return
        try:
            said = self.s3.get_object(**words, Range=f"bytes={offset}-{offset + length - 1}")
            if (whole := str(said.get("ContentRange", "")).rpartition("/")[2]) != str(size):
                raise CloudError(f"{self.name}/{path}: has {whole} bytes, its manifest says {size}")
            self._etags.setdefault(path, said["ETag"])
            with closing(said["Body"]) as body:
                yield from body.iter_chunks(READ_CHUNK_BYTES)
        except Exception as error:
            raise self._explain(error, path) from error

    def upload(self, file: Path, path: str, sha256: str = "") -> bool:
        """Put a file there, False when the same is there already. Raises `CloudError`, `OSError`.

        `sha256` is known of large files; small ones are hashed here.
        """
        sha256 = sha256 or hashlib.sha256(file.read_bytes()).hexdigest()
        try:
            there = self.account.s3.head_object(**self._object_params(path))
            if (there["ContentLength"], there["Metadata"].get(SHA256_METADATA_KEY)) == (file.stat().st_size, sha256):
                return False
        except boto.ClientError as error:
            if get_error_code(error) not in ("404", "NoSuchKey"):
                raise self._explain(error, path) from error
        except boto.BotoCoreError as error:
            raise self._explain(error, path) from error
        try:
            more = {
                "ExtraArgs": {"Metadata": {SHA256_METADATA_KEY: sha256}},
                "Config": TransferConfig(multipart_chunksize=UPLOAD_PART_BYTES),
            }
            self.account.s3.upload_file(str(file), self.bucket, self._key(path), **more)
        except (S3UploadFailedError, boto.ClientError, boto.BotoCoreError) as error:
            cause = error.__context__ if isinstance(error, S3UploadFailedError) else error
            raise self._explain(cause if isinstance(cause, Exception) else error, path, "s3:PutObject") from error
        return True

    def _key(self, path: str) -> str:
        return f"{self.prefix}/{path}".lstrip("/")

    def _object_params(self, path: str) -> dict[str, Any]:
        return {"Bucket": self.bucket, "Key": self._key(path)}

    def _explain(self, error: Exception, path: str, permission: str = "s3:GetObject") -> CloudError:
        """Return what went wrong as one line, of the class that says whether it may pass."""
        if isinstance(error, CloudError):
            return error
        code, where = get_error_code(error), f"{self.name}/{path}"
        if code in ("NoSuchKey", "404"):
            return ObjectNotFound(f"{where}: is not there", code)
        if code == "NoSuchBucket":
            return CloudError(f"{where}: there is no bucket {self.bucket}; what there is: aws s3 ls", code)
        if code in ("PreconditionFailed", "412"):
            return CloudError(f"{where}: was replaced while it was fetched; when it is finished, fetch again", code)
        if code in ("InvalidRange", "416"):
            return CloudError(f"{where}: is shorter than its manifest says", code)
        if code in (*DENIED_CODES, "403", "AllAccessDisabled"):
            rights = f"{permission} on {self.bucket}/{self.prefix}*, and s3:ListBucket"
            return CloudError(
                f"{where}: not permitted; it takes {rights}: imgnet-cluster check --iam --data {self.name}", code
            )
        told = explain_error(error, where)
        if isinstance(told, NoCredentials):
            return told
        lost = isinstance(error, boto.IncompleteReadError | boto.ResponseStreamingError | boto.ReadTimeoutError)
        passes = (
            lost or code in TRANSIENT_CODES or classify_error(error) in (ErrorKind.THROTTLED, ErrorKind.OUTCOME_UNKNOWN)
        )
        return TransientError(str(told), code) if passes else told
