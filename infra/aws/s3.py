"""Objects in S3 below s3://bucket/prefix: reads small ones, downloads and uploads files.

boto3 repeats what fails for a moment. The bucket's region need not be known: S3 names it in its answer, and botocore
follows.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path

from boto3.exceptions import Boto3Error
from boto3.s3.transfer import RetriesExceededError, S3UploadFailedError, TransferConfig
from botocore import exceptions as boto
from botocore.config import Config

from infra.errors import CloudError, NoCredentials

from .client import Account, call
from .error_codes import DENIED_CODES, OTHER_POLICY, explain_error, get_error_code

S3_SCHEME = "s3://"
FALLBACK_REGION = "us-east-1"
# Machines that wait for their images cost money, and a failed download ends the job: retries for about 90 s.
DOWNLOAD_CLIENT_CONFIG = Config(
    retries={"mode": "standard", "total_max_attempts": 14}, connect_timeout=10, read_timeout=20, max_pool_connections=32
)
# In the caller's thread, by one HEAD and one GET.
DOWNLOAD_CONFIG = TransferConfig(multipart_threshold=1 << 40, use_threads=False, preferred_transfer_client="classic")
UPLOAD_PART_BYTES = 64 << 20
SHA256_METADATA_KEY = "sha256"  # in the metadata of uploaded objects
NOT_FOUND_CODES = ("404", "NoSuchKey")
S3_ERRORS = (Boto3Error, boto.ClientError, boto.BotoCoreError)


class ObjectNotFound(CloudError):
    """An S3 object does not exist."""


def parse_s3_url(url: str) -> tuple[str, str]:
    """Return bucket and prefix of s3://bucket/prefix. Raises `CloudError` when `url` has another form."""
    bucket, _, prefix = url.removeprefix(S3_SCHEME).partition("/")
    if not url.startswith(S3_SCHEME) or not bucket:
        raise CloudError(f"{url}: not an S3 address; write it like s3://my-bucket/data/imagenet")
    return bucket, prefix.strip("/")


def find_bucket_region(account: Account, bucket: str) -> str:
    """Return the region of a bucket, "" when S3 does not tell it. S3 tells it also those who may not read the bucket.

    Source: AWS, API reference, HeadBucket.
    """
    try:
        response = call(f"bucket {bucket}", account.s3.head_bucket, Bucket=bucket)
    except CloudError as error:
        response = getattr(error.__cause__, "response", {})
    return str(response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("x-amz-bucket-region", ""))


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
        self.download_client = self.account.client("s3", DOWNLOAD_CLIENT_CONFIG)

    def read(self, path: str) -> bytes:
        """Return a small object. Raises `ObjectNotFound`, `CloudError`."""
        try:
            return bytes(self.account.s3.get_object(**self._object_params(path))["Body"].read())
        except S3_ERRORS as error:
            raise self._explain(error, path) from error

    def download(self, path: str, file: Path, on_bytes: Callable[[int], object]) -> None:
        """Download an object to a file. `on_bytes` is called with each number of bytes that have arrived.

        When boto3 begins a broken download anew, that number is negative. Raises `CloudError`, `OSError`.
        """
        try:
            self.download_client.download_file(
                self.bucket, self._key(path), str(file), Callback=on_bytes, Config=DOWNLOAD_CONFIG
            )
        except S3_ERRORS as error:
            raise self._explain(error, path) from error

    def upload(self, file: Path, path: str, sha256: str = "") -> bool:
        """Upload a file, and return True; return False when the bucket has the same file already.

        `sha256` is the hash that the file must have, "" for any; a file that the bucket has already is not read.
        Raises `CloudError`, `OSError`.
        """
        sha256 = sha256 or hashlib.sha256(file.read_bytes()).hexdigest()
        try:
            existing = self.account.s3.head_object(**self._object_params(path))
            existing_version = (existing["ContentLength"], existing["Metadata"].get(SHA256_METADATA_KEY))
            if existing_version == (file.stat().st_size, sha256):
                return False
        except S3_ERRORS as error:
            if get_error_code(error) not in NOT_FOUND_CODES:
                raise self._explain(error, path) from error
        with file.open("rb") as content:  # a damaged file under this hash would never be sent again
            if hashlib.file_digest(content, "sha256").hexdigest() != sha256:
                raise CloudError(f"{file}: its bytes have changed (sha256); to list all: imgnet-cluster data verify")
        try:
            self.account.s3.upload_file(
                str(file),
                self.bucket,
                self._key(path),
                ExtraArgs={"Metadata": {SHA256_METADATA_KEY: sha256}},
                Config=TransferConfig(multipart_chunksize=UPLOAD_PART_BYTES),
            )
        except S3_ERRORS as error:
            raise self._explain(error, path, "s3:PutObject") from error
        return True

    def _key(self, path: str) -> str:
        return f"{self.prefix}/{path}".lstrip("/")

    def _object_params(self, path: str) -> dict[str, str]:
        return {"Bucket": self.bucket, "Key": self._key(path)}

    def _explain(self, error: Exception, path: str, permission: str = "s3:GetObject") -> CloudError:
        """Return an error as one line."""
        cause = error.__context__ if isinstance(error, S3UploadFailedError) else None
        cause = error.last_exception if isinstance(error, RetriesExceededError) else cause
        error = cause if isinstance(cause, Exception) else error
        code = get_error_code(error)
        url = f"{self.name}/{path}"
        if code in NOT_FOUND_CODES:
            return ObjectNotFound(f"{url}: does not exist", code)
        if code == "NoSuchBucket":
            return CloudError(f"{url}: there is no bucket {self.bucket}; list your buckets: aws s3 ls", code)
        if code in (*DENIED_CODES, "403", "AllAccessDisabled") and not OTHER_POLICY.search(str(error)):
            permissions = f"{permission} on {self.bucket}/{self.prefix}*, and s3:ListBucket"
            return CloudError(
                f"{url}: not permitted; it takes {permissions}: imgnet-cluster check --iam --data {self.name}", code
            )
        return explain_error(error, url)
