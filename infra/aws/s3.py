"""Objects in S3 below s3://bucket/prefix: reads small objects and ranges of large ones, and uploads files.

Reads are sent once, without botocore's retries: the caller decides how long to retry. Transient errors raise
`TransientError`. The bucket's region need not be known: S3 names it in its answer, and botocore follows.
"""

import hashlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from boto3.s3.transfer import S3UploadFailedError, TransferConfig
from botocore import exceptions as boto
from botocore.config import Config

from infra.errors import CloudError, NoCredentials

from .client import Account
from .errors import DENIED_CODES, ErrorKind, classify_error, explain_error, get_error_code

S3_SCHEME = "s3://"
FALLBACK_REGION = "us-east-1"
READ_CONFIG = Config(
    retries={"mode": "standard", "total_max_attempts": 1}, connect_timeout=10, read_timeout=20, max_pool_connections=32
)
READ_CHUNK_BYTES = 1 << 20
UPLOAD_PART_BYTES = 64 << 20
SHA256_METADATA_KEY = "sha256"  # in the metadata of uploaded objects
TRANSIENT_CODES = ("RequestTimeout", "IncompleteBody", "BadDigest")  # besides those that `classify_error` knows


class TransientError(CloudError):
    """An S3 error that may go away: the same call can succeed later."""


class ObjectNotFound(CloudError):
    """An S3 object does not exist."""


def parse_s3_url(url: str) -> tuple[str, str]:
    """Return bucket and prefix of s3://bucket/prefix. Raises `CloudError` when `url` has another form."""
    bucket, _, prefix = url.removeprefix(S3_SCHEME).partition("/")
    if not url.startswith(S3_SCHEME) or not bucket:
        raise CloudError(f"{url}: not an S3 address; write it like s3://my-bucket/data/imagenet")
    return bucket, prefix.strip("/")


class S3Prefix:
    """The objects below one s3://bucket/prefix.

    Raises `CloudError` when the address has another form, `NoCredentials` when there are no credentials.
    """

    def __init__(self, url: str) -> None:
        self.bucket, self.prefix = parse_s3_url(url)
        self.name = f"{S3_SCHEME}{self.bucket}/{self.prefix}".rstrip("/")
        try:
            self.account = Account()
        except NoCredentials:  # no region is set
            self.account = Account(FALLBACK_REGION)
        self.s3 = self.account.client("s3", READ_CONFIG)
        self._etags: dict[str, str] = {}

    def read(self, path: str) -> bytes:
        """Return a small object. Raises `ObjectNotFound`, `TransientError`, `CloudError`."""
        try:
            return bytes(self.s3.get_object(**self._object_params(path))["Body"].read())
        except Exception as error:
            raise self._explain(error, path) from error

    def read_range(self, path: str, offset: int, length: int, size: int) -> Iterator[bytes]:
        """Yield `length` bytes of an object from `offset`, in chunks of 1 MiB at most.

        Raises `TransientError`; `CloudError` when the object does not have `size` bytes, or was replaced since its
        first range was read.
        """
        params = self._object_params(path)
        if (etag := self._etags.get(path)) is not None:
            params["IfMatch"] = etag
        if not length:
            return
        try:
            response = self.s3.get_object(**params, Range=f"bytes={offset}-{offset + length - 1}")
            if (object_size := str(response.get("ContentRange", "")).rpartition("/")[2]) != str(size):
                raise CloudError(f"{self.name}/{path}: has {object_size} bytes, its manifest says {size}")
            self._etags.setdefault(path, response["ETag"])
            with closing(response["Body"]) as body:
                yield from body.iter_chunks(READ_CHUNK_BYTES)
        except Exception as error:
            raise self._explain(error, path) from error

    def upload(self, file: Path, path: str, sha256: str = "") -> bool:
        """Upload a file, and return True; return False when the bucket has the same file already.

        `sha256` is the file's hash where the caller knows it, as for large files; else it is computed here.
        Raises `CloudError`, `OSError`.
        """
        sha256 = sha256 or hashlib.sha256(file.read_bytes()).hexdigest()
        try:
            existing = self.account.s3.head_object(**self._object_params(path))
            existing_version = (existing["ContentLength"], existing["Metadata"].get(SHA256_METADATA_KEY))
            if existing_version == (file.stat().st_size, sha256):
                return False
        except boto.ClientError as error:
            if get_error_code(error) not in ("404", "NoSuchKey"):
                raise self._explain(error, path) from error
        except boto.BotoCoreError as error:
            raise self._explain(error, path) from error
        try:
            self.account.s3.upload_file(
                str(file),
                self.bucket,
                self._key(path),
                ExtraArgs={"Metadata": {SHA256_METADATA_KEY: sha256}},
                Config=TransferConfig(multipart_chunksize=UPLOAD_PART_BYTES),
            )
        except (S3UploadFailedError, boto.ClientError, boto.BotoCoreError) as error:
            cause = error.__context__ if isinstance(error, S3UploadFailedError) else error
            raise self._explain(cause if isinstance(cause, Exception) else error, path, "s3:PutObject") from error
        return True

    def _key(self, path: str) -> str:
        return f"{self.prefix}/{path}".lstrip("/")

    def _object_params(self, path: str) -> dict[str, str]:
        return {"Bucket": self.bucket, "Key": self._key(path)}

    def _explain(self, error: Exception, path: str, permission: str = "s3:GetObject") -> CloudError:
        """Return an error as one line; as a `TransientError` when the same call can succeed later."""
        if isinstance(error, CloudError):
            return error
        code = get_error_code(error)
        url = f"{self.name}/{path}"
        if code in ("NoSuchKey", "404"):
            return ObjectNotFound(f"{url}: does not exist", code)
        if code == "NoSuchBucket":
            return CloudError(f"{url}: there is no bucket {self.bucket}; list your buckets: aws s3 ls", code)
        if code in ("PreconditionFailed", "412"):
            return CloudError(
                f"{url}: was replaced while it was fetched; when the upload has finished, fetch again", code
            )
        if code in ("InvalidRange", "416"):
            return CloudError(f"{url}: is shorter than its manifest says", code)
        if code in (*DENIED_CODES, "403", "AllAccessDisabled"):
            permissions = f"{permission} on {self.bucket}/{self.prefix}*, and s3:ListBucket"
            return CloudError(
                f"{url}: not permitted; it takes {permissions}: imgnet-cluster check --iam --data {self.name}", code
            )
        explained = explain_error(error, url)
        if isinstance(explained, NoCredentials):
            return explained
        is_transient = (
            isinstance(error, boto.IncompleteReadError | boto.ResponseStreamingError | boto.ReadTimeoutError)
            or code in TRANSIENT_CODES
            or classify_error(error) in (ErrorKind.THROTTLED, ErrorKind.OUTCOME_UNKNOWN)
        )
        return TransientError(str(explained), code) if is_transient else explained
