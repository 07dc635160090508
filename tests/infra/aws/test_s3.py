"""S3 as a source of packed sets: ranges, and every way in which it says no."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from support.simcloud.http_server import AwsFrontend

from infra.aws import s3 as aws_s3
from infra.aws.errors import CloudError, NoCredentials
from infra.aws.s3 import ObjectNotFound, S3Prefix, TransientError

WHOLE = bytes(range(256)) * 20
URL = "s3://imgnet-test/data/imagenet"


@pytest.fixture
def bucket(front: AwsFrontend) -> Any:
    """A bucket with one object; the client that made it."""
    s3 = boto3.client("s3")
    s3.create_bucket(Bucket="imgnet-test")
    s3.put_object(Bucket="imgnet-test", Key="data/imagenet/train/a.bin", Body=WHOLE)
    return s3


@pytest.fixture
def place(bucket: Any) -> S3Prefix:
    return S3Prefix(URL)


def read(place: S3Prefix, offset: int, length: int, size: int = len(WHOLE), path: str = "train/a.bin") -> bytes:
    return b"".join(place.read_range(path, offset, length, size))


@pytest.mark.parametrize("url, name", [
    (URL, URL), (f"{URL}/", URL), ("s3://imgnet-test", "s3://imgnet-test"), ("s3://imgnet-test/", "s3://imgnet-test"),
])  # fmt: skip
def test_a_place_is_a_bucket_and_what_lies_below(bucket: Any, url: str, name: str) -> None:
    there = S3Prefix(url)
    assert there.name == name
    path = "train/a.bin" if name == URL else "data/imagenet/train/a.bin"
    assert there.read(path) == WHOLE and read(there, 3, 4, path=path) == WHOLE[3:7]


@pytest.mark.parametrize("url", ["s3://", "s3:///x", "https://x/y", "/data"])
def test_what_is_no_place_in_s3_is_said(front: AwsFrontend, url: str) -> None:
    with pytest.raises(CloudError, match="one looks like s3://my-bucket/data/imagenet"):
        S3Prefix(url)


@pytest.mark.parametrize("offset, length", [(0, 1), (0, 5120), (5119, 1), (17, 1000), (5000, 120), (4, 0)])
def test_any_range_can_be_read(place: S3Prefix, offset: int, length: int) -> None:
    assert read(place, offset, length) == WHOLE[offset : offset + length]


def test_large_ranges_come_in_pieces(place: S3Prefix, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aws_s3, "PIECE", 1000)
    assert [len(one) for one in place.read_range("train/a.bin", 0, 5120, 5120)] == [1000] * 5 + [120]


def test_ranges_are_read_in_many_threads_with_one_client(place: S3Prefix, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[int, bytes] = {}

    def one(number: int) -> None:
        found[number] = read(place, number * 320, 320)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert b"".join(found[number] for number in range(16)) == WHOLE


# --- what it says when it cannot -------------------------------------------------------------------------------------


def line(said: Any) -> str:
    text = str(said.value)
    assert "\n" not in text
    return text


def test_what_is_not_there_is_gone_and_a_bucket_that_is_not_there_is_named(place: S3Prefix) -> None:
    with pytest.raises(ObjectNotFound, match=r"s3://imgnet-test/data/imagenet/train/b\.bin: is not there"):
        place.read("train/b.bin")
    with pytest.raises(CloudError) as said:
        S3Prefix("s3://imgnet-nobody/x").read("train/manifest.json")
    assert not isinstance(said.value, ObjectNotFound) and "there is no bucket imgnet-nobody" in line(said)


def test_another_size_than_the_manifests_is_not_read(place: S3Prefix) -> None:
    with pytest.raises(CloudError, match=r"a\.bin: has 5120 bytes, its manifest says 5121") as said:
        read(place, 0, 10, size=5121)
    assert not isinstance(said.value, TransientError)
    with pytest.raises(CloudError, match="is shorter than its manifest says") as said:
        read(place, 6000, 10, size=9000)
    assert not isinstance(said.value, TransientError)


def test_an_object_that_is_replaced_between_two_ranges_is_noticed(place: S3Prefix, bucket: Any) -> None:
    read(place, 0, 10)
    bucket.put_object(Bucket="imgnet-test", Key="data/imagenet/train/a.bin", Body=WHOLE[::-1])
    with pytest.raises(CloudError, match="was replaced while it was fetched; when it is finished, fetch again") as said:
        read(place, 10, 10)
    assert not isinstance(said.value, TransientError)
    assert read(S3Prefix(URL), 0, 2) == WHOLE[::-1][:2]


def test_a_denial_names_the_right_that_is_missing(place: S3Prefix, front: AwsFrontend) -> None:
    front.fault(service="s3", code="AccessDenied", status=403)
    with pytest.raises(CloudError) as said:
        read(place, 0, 10)
    told = line(said)
    assert "not permitted; it takes s3:GetObject on imgnet-test/data/imagenet*, and s3:ListBucket" in told
    assert "imgnet-cluster check --iam --data s3://imgnet-test/data/imagenet" in told
    assert not isinstance(said.value, TransientError)


@pytest.mark.parametrize("code", ["ExpiredToken", "InvalidAccessKeyId", "SignatureDoesNotMatch"])
def test_keys_that_are_not_accepted_are_said_and_not_tried_again(place: S3Prefix, front: AwsFrontend, code: str) -> None:
    front.fault(service="s3", code=code, status=400)
    with pytest.raises(NoCredentials, match=f"does not accept the credentials.*{code}.*aws sts get-caller-identity"):
        place.read("train/a.bin")


def test_without_keys_it_says_how_to_get_some(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(NoCredentials, match="aws configure"):
        S3Prefix(URL).read("train/a.bin")


def test_no_region_need_be_named(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_REGION")
    assert S3Prefix(URL).read("train/a.bin") == WHOLE


@pytest.mark.parametrize("code, status", [
    ("SlowDown", 503), ("InternalError", 500), ("ServiceUnavailable", 503), ("RequestTimeout", 400), ("Whatever", 502),
])  # fmt: skip
def test_what_may_pass_is_told_from_what_will_not_and_is_asked_once(
    place: S3Prefix, front: AwsFrontend, code: str, status: int
) -> None:
    front.fault(service="s3", code=code, status=status)
    before = front.count("GetObject")
    with pytest.raises(TransientError, match=code) as said:
        read(place, 0, 10)
    assert "s3://imgnet-test/data/imagenet/train/a.bin: " in line(said) and front.count("GetObject") == before + 1
    assert read(place, 0, 10) == WHOLE[:10]


def test_a_connection_that_is_cut_may_come_back(place: S3Prefix, front: AwsFrontend) -> None:
    front.fault(service="s3", drop=True)
    with pytest.raises(TransientError):
        read(place, 0, 10)
    assert read(place, 0, 10) == WHOLE[:10]


def test_a_connection_that_is_cut_in_the_middle_keeps_what_has_come(
    place: S3Prefix, front: AwsFrontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, cuts = front.do, [2]

    def cut(*words: Any) -> Any:
        status, headers, body = answer(*words)
        cuts[0] -= 1
        return status, headers, body[:2500] if cuts[0] >= 0 else body

    monkeypatch.setattr(front, "do", cut)
    monkeypatch.setattr(aws_s3, "PIECE", 1000)
    came = b""
    with pytest.raises(TransientError):
        for piece in place.read_range("train/a.bin", 0, 5120, 5120):
            came += piece
    assert len(came) >= 2000 and came == WHOLE[: len(came)]
    with pytest.raises(TransientError):
        place.read("train/a.bin")
    assert read(place, len(came), 5120 - len(came)) == WHOLE[len(came) :]


def test_a_dead_network_may_come_back(place: S3Prefix, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(TransientError, match="AWS cannot be reached"):
        S3Prefix(URL).read("train/a.bin")


# --- putting ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def parts_of_5_mb(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(aws_s3, "PART", 5 << 20)
    yield


def test_a_file_is_put_once(place: S3Prefix, front: AwsFrontend, tmp_path: Path) -> None:
    file = tmp_path / "b.bin"
    file.write_bytes(WHOLE)
    assert place.upload(file, "train/b.bin") and place.read("train/b.bin") == WHOLE
    before = front.count("PutObject")
    assert not place.upload(file, "train/b.bin") and front.count("PutObject") == before
    file.write_bytes(WHOLE[::-1])
    assert place.upload(file, "train/b.bin") and place.read("train/b.bin") == WHOLE[::-1]


def test_a_large_file_is_put_in_parts(
    place: S3Prefix, bucket: Any, front: AwsFrontend, tmp_path: Path, parts_of_5_mb: None
) -> None:
    file = tmp_path / "c.bin"
    file.write_bytes(bytes(11 << 20))
    assert place.upload(file, "c.bin", "0" * 64)
    assert bucket.head_object(Bucket="imgnet-test", Key="data/imagenet/c.bin")["ETag"].strip('"').endswith("-3")
    assert not place.upload(file, "c.bin", "0" * 64)


@pytest.mark.parametrize("number", [0, 1])
def test_a_denial_to_put_names_the_right_that_is_missing(
    place: S3Prefix, front: AwsFrontend, tmp_path: Path, number: int
) -> None:
    file = tmp_path / "b.bin"
    file.write_bytes(WHOLE)
    action, right = (("HeadObject", "s3:GetObject"), ("PutObject", "s3:PutObject"))[number]
    front.fault(action=action, service="s3", code="AccessDenied", status=403)
    with pytest.raises(CloudError, match=f"not permitted; it takes {right} on imgnet-test/data/imagenet") as said:
        place.upload(file, "train/b.bin")
    line(said)
