"""S3Prefix: ranges, uploads, and every way in which S3 refuses."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from support.simcloud.http_server import AwsFrontend

from infra.aws import s3 as aws_s3
from infra.aws.s3 import ObjectNotFound, S3Prefix, TransientError
from infra.errors import CloudError, NoCredentials

WHOLE = bytes(range(256)) * 20
URL = "s3://imgnet-test/data/imagenet"


@pytest.fixture
def bucket(front: AwsFrontend) -> Any:
    """A bucket with one object. The value is the client that created it."""
    s3 = boto3.client("s3")
    s3.create_bucket(Bucket="imgnet-test")
    s3.put_object(Bucket="imgnet-test", Key="data/imagenet/train/a.bin", Body=WHOLE)
    return s3


@pytest.fixture
def place(bucket: Any) -> S3Prefix:
    return S3Prefix(URL)


def read(place: S3Prefix, offset: int, length: int, size: int = len(WHOLE), path: str = "train/a.bin") -> bytes:
    return b"".join(place.read_range(path, offset, length, size))


@pytest.mark.parametrize(
    "url, name",
    [
        (URL, URL),
        (f"{URL}/", URL),
        ("s3://imgnet-test", "s3://imgnet-test"),
        ("s3://imgnet-test/", "s3://imgnet-test"),
    ],
)
def test_s3_prefix_reads_below_bucket_and_prefix(bucket: Any, url: str, name: str) -> None:
    prefix = S3Prefix(url)
    assert prefix.name == name
    path = "train/a.bin" if name == URL else "data/imagenet/train/a.bin"
    assert prefix.read(path) == WHOLE and read(prefix, 3, 4, path=path) == WHOLE[3:7]


@pytest.mark.parametrize("url", ["s3://", "s3:///x", "https://x/y", "/data"])
def test_s3_prefix_rejects_other_addresses(front: AwsFrontend, url: str) -> None:
    with pytest.raises(CloudError, match="write it like s3://my-bucket/data/imagenet"):
        S3Prefix(url)


@pytest.mark.parametrize("offset, length", [(0, 1), (0, 5120), (5119, 1), (17, 1000), (5000, 120), (4, 0)])
def test_read_range_returns_the_bytes(place: S3Prefix, offset: int, length: int) -> None:
    assert read(place, offset, length) == WHOLE[offset : offset + length]


def test_read_range_in_many_threads_with_one_client(place: S3Prefix, monkeypatch: pytest.MonkeyPatch) -> None:
    parts: dict[int, bytes] = {}

    def read_part(number: int) -> None:
        parts[number] = read(place, number * 320, 320)

    threads = [threading.Thread(target=read_part, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert b"".join(parts[number] for number in range(16)) == WHOLE


# --- errors -------------------------------------------------------------------------------------


def one_line(caught: Any) -> str:
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_read_missing_object_or_bucket_is_named(place: S3Prefix) -> None:
    with pytest.raises(ObjectNotFound, match=r"s3://imgnet-test/data/imagenet/train/b\.bin: does not exist"):
        place.read("train/b.bin")
    with pytest.raises(CloudError) as caught:
        S3Prefix("s3://imgnet-nobody/x").read("train/manifest.json")
    assert not isinstance(caught.value, ObjectNotFound) and "there is no bucket imgnet-nobody" in one_line(caught)


def test_read_range_with_another_object_size_is_refused(place: S3Prefix) -> None:
    with pytest.raises(CloudError, match=r"a\.bin: has 5120 bytes, its manifest says 5121") as caught:
        read(place, 0, 10, size=5121)
    assert not isinstance(caught.value, TransientError)
    with pytest.raises(CloudError, match="is shorter than its manifest says") as caught:
        read(place, 6000, 10, size=9000)
    assert not isinstance(caught.value, TransientError)


def test_read_range_notices_a_replaced_object(place: S3Prefix, bucket: Any) -> None:
    read(place, 0, 10)
    bucket.put_object(Bucket="imgnet-test", Key="data/imagenet/train/a.bin", Body=WHOLE[::-1])
    with pytest.raises(CloudError, match=r"was replaced while it was fetched; .* fetch again") as caught:
        read(place, 10, 10)
    assert not isinstance(caught.value, TransientError)
    assert read(S3Prefix(URL), 0, 2) == WHOLE[::-1][:2]


def test_read_denied_names_the_missing_permission(place: S3Prefix, front: AwsFrontend) -> None:
    front.fault(service="s3", code="AccessDenied", status=403)
    with pytest.raises(CloudError) as caught:
        read(place, 0, 10)
    message = one_line(caught)
    assert "not permitted; it takes s3:GetObject on imgnet-test/data/imagenet*, and s3:ListBucket" in message
    assert "imgnet-cluster check --iam --data s3://imgnet-test/data/imagenet" in message
    assert not isinstance(caught.value, TransientError)


@pytest.mark.parametrize("code", ["ExpiredToken", "InvalidAccessKeyId", "SignatureDoesNotMatch"])
def test_read_with_rejected_credentials_raises_no_credentials(place: S3Prefix, front: AwsFrontend, code: str) -> None:
    front.fault(service="s3", code=code, status=400)
    with pytest.raises(NoCredentials, match=f"does not accept the credentials.*{code}.*aws sts get-caller-identity"):
        place.read("train/a.bin")


def test_read_without_credentials_names_aws_configure(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(NoCredentials, match="aws configure"):
        S3Prefix(URL).read("train/a.bin")


def test_s3_prefix_works_without_a_region(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_REGION")
    assert S3Prefix(URL).read("train/a.bin") == WHOLE


@pytest.mark.parametrize(
    "code, status",
    [
        ("SlowDown", 503),
        ("InternalError", 500),
        ("ServiceUnavailable", 503),
        ("RequestTimeout", 400),
        ("Whatever", 502),
    ],
)
def test_read_range_raises_transient_errors_without_a_retry(
    place: S3Prefix, front: AwsFrontend, code: str, status: int
) -> None:
    front.fault(service="s3", code=code, status=status)
    before = front.count("GetObject")
    with pytest.raises(TransientError, match=code) as caught:
        read(place, 0, 10)
    assert "s3://imgnet-test/data/imagenet/train/a.bin: " in one_line(caught) and front.count("GetObject") == before + 1
    assert read(place, 0, 10) == WHOLE[:10]


def test_read_range_after_a_dropped_connection_is_transient(place: S3Prefix, front: AwsFrontend) -> None:
    front.fault(service="s3", drop=True)
    with pytest.raises(TransientError):
        read(place, 0, 10)
    assert read(place, 0, 10) == WHOLE[:10]


def test_read_range_cut_in_the_middle_keeps_the_received_bytes(
    place: S3Prefix, front: AwsFrontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_do, cuts = front.do, [2]

    def cut(*args: Any) -> Any:
        status, headers, body = real_do(*args)
        cuts[0] -= 1
        return (status, [*headers, ("Connection", "close")], body[:2500]) if cuts[0] >= 0 else (status, headers, body)

    monkeypatch.setattr(front, "do", cut)
    monkeypatch.setattr(aws_s3, "READ_CHUNK_BYTES", 1000)
    received = b""
    with pytest.raises(TransientError):
        for chunk in place.read_range("train/a.bin", 0, 5120, 5120):
            received += chunk
    assert len(received) >= 2000 and received == WHOLE[: len(received)]
    with pytest.raises(TransientError):
        place.read("train/a.bin")
    assert read(place, len(received), 5120 - len(received)) == WHOLE[len(received) :]


def test_read_without_network_is_transient(place: S3Prefix, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(TransientError, match="AWS cannot be reached"):
        S3Prefix(URL).read("train/a.bin")


# --- uploads ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def upload_parts_of_5_mb(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(aws_s3, "UPLOAD_PART_BYTES", 5 << 20)
    yield


def test_upload_skips_a_file_that_the_bucket_has(place: S3Prefix, front: AwsFrontend, tmp_path: Path) -> None:
    file = tmp_path / "b.bin"
    file.write_bytes(WHOLE)
    assert place.upload(file, "train/b.bin") and place.read("train/b.bin") == WHOLE
    before = front.count("PutObject")
    assert not place.upload(file, "train/b.bin") and front.count("PutObject") == before
    file.write_bytes(WHOLE[::-1])
    assert place.upload(file, "train/b.bin") and place.read("train/b.bin") == WHOLE[::-1]


def test_upload_sends_a_large_file_in_parts(
    place: S3Prefix, bucket: Any, front: AwsFrontend, tmp_path: Path, upload_parts_of_5_mb: None
) -> None:
    file = tmp_path / "c.bin"
    file.write_bytes(bytes(11 << 20))
    assert place.upload(file, "c.bin", "0" * 64)
    assert bucket.head_object(Bucket="imgnet-test", Key="data/imagenet/c.bin")["ETag"].strip('"').endswith("-3")
    assert not place.upload(file, "c.bin", "0" * 64)


@pytest.mark.parametrize("number", [0, 1])
def test_upload_denied_names_the_missing_permission(
    place: S3Prefix, front: AwsFrontend, tmp_path: Path, number: int
) -> None:
    file = tmp_path / "b.bin"
    file.write_bytes(WHOLE)
    action, right = (("HeadObject", "s3:GetObject"), ("PutObject", "s3:PutObject"))[number]
    front.fault(action=action, service="s3", code="AccessDenied", status=403)
    with pytest.raises(CloudError, match=f"not permitted; it takes {right} on imgnet-test/data/imagenet") as caught:
        place.upload(file, "train/b.bin")
    one_line(caught)
