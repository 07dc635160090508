"""Tests of S3Prefix: downloads, uploads, and the errors of S3."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
import botocore.endpoint
import pytest
from support.simcloud.http_server import AwsFrontend

from infra.aws import s3 as aws_s3
from infra.aws.s3 import S3Prefix
from infra.errors import CloudError

WHOLE = bytes(range(256)) * 20
URL = "s3://imgnet-test/data/imagenet"


@pytest.fixture
def bucket(front: AwsFrontend, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A bucket with one object; boto3 repeats failed reads at once. The value is the client that created it."""
    monkeypatch.setattr(botocore.endpoint, "time", SimpleNamespace(sleep=lambda seconds: None))
    s3 = boto3.client("s3")
    s3.create_bucket(Bucket="imgnet-test")
    s3.put_object(Bucket="imgnet-test", Key="data/imagenet/train/a.bin", Body=WHOLE)
    return s3


@pytest.fixture
def place(bucket: Any) -> S3Prefix:
    return S3Prefix(URL)


def download(place: S3Prefix, folder: Path, path: str = "train/a.bin") -> tuple[bytes, list[int]]:
    counts = list[int]()
    place.download(path, folder / "a.bin", counts.append)
    return (folder / "a.bin").read_bytes(), counts


@pytest.mark.parametrize("url, path", [(f"{URL}/", "train/a.bin"), ("s3://imgnet-test", "data/imagenet/train/a.bin")])
def test_s3_prefix_reads_below_bucket_and_prefix_without_a_region(
    bucket: Any, url: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_REGION")
    prefix = S3Prefix(url)
    assert prefix.name == url.rstrip("/") and prefix.read(path) == WHOLE
    assert download(prefix, tmp_path, path) == (WHOLE, [len(WHOLE)])


@pytest.mark.parametrize("url", ["s3://", "s3:///x", "https://x/y", "/data"])
def test_s3_prefix_rejects_other_addresses(front: AwsFrontend, url: str) -> None:
    with pytest.raises(CloudError, match="write it like s3://my-bucket/data/imagenet"):
        S3Prefix(url)


@pytest.mark.parametrize(
    ("action", "permission"), [("", "s3:GetObject"), ("HeadObject", "s3:GetObject"), ("PutObject", "s3:PutObject")]
)
def test_denied_download_or_upload_names_the_missing_permission(
    place: S3Prefix, front: AwsFrontend, tmp_path: Path, action: str, permission: str
) -> None:
    (tmp_path / "b.bin").write_bytes(WHOLE)
    front.fault(action=action, service="s3", code="AccessDenied", status=403)
    message = (
        rf"not permitted; it takes {permission} on imgnet-test/data/imagenet\*, and s3:ListBucket: "
        f"imgnet-cluster check --iam --data {URL}$"
    )
    with pytest.raises(CloudError, match=message):
        if action:
            place.upload(tmp_path / "b.bin", "train/b.bin")
        else:
            download(place, tmp_path)


def test_download_that_another_policy_denies_says_so(place: S3Prefix, front: AwsFrontend, tmp_path: Path) -> None:
    message = "Not authorized, with an explicit deny in a service control policy"
    front.fault(action="GetObject", service="s3", code="AccessDenied", status=403, message=message)
    with pytest.raises(CloudError, match=r"a policy forbids it, .*service control policy"):
        place.read("train/a.bin")


@pytest.mark.parametrize("code, status, drop", [("SlowDown", 503, False), ("InternalError", 500, False), ("", 0, True)])
def test_download_repeats_what_fails_for_a_moment(
    place: S3Prefix, front: AwsFrontend, tmp_path: Path, code: str, status: int, drop: bool
) -> None:
    front.fault(service="s3", code=code, status=status, drop=drop, times=4, skip=1)
    before = front.count("GetObject")
    assert download(place, tmp_path)[0] == WHOLE and front.count("GetObject") == before + 5


def test_download_cut_in_the_middle_begins_anew(
    place: S3Prefix, front: AwsFrontend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real_do, cuts = front.do, [2]

    def cut(*args: Any) -> Any:
        status, headers, body = real_do(*args)
        if body:  # of GET, not of HEAD
            cuts[0] -= 1
        return status, headers, body[:2500] if cuts[0] >= 0 else body

    monkeypatch.setattr(front, "do", cut)
    content, counts = download(place, tmp_path)
    assert content == WHOLE and sum(counts) == len(WHOLE) and min(counts) < 0
    (tmp_path / "a.bin").unlink()
    cuts[0] = 99
    with pytest.raises(CloudError, match=r"train/a\.bin: "):
        download(place, tmp_path)
    assert not [*tmp_path.iterdir()]


def test_upload_sends_parts_and_skips_what_the_bucket_has(
    place: S3Prefix, bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aws_s3, "UPLOAD_PART_BYTES", 5 << 20)
    file = tmp_path / "c.bin"
    for content in (bytes(11 << 20), b"x" * (11 << 20)):
        file.write_bytes(content)
        assert place.upload(file, "c.bin") and not place.upload(file, "c.bin")
        stored = bucket.head_object(Bucket="imgnet-test", Key="data/imagenet/c.bin")
        assert stored["ETag"].strip('"').endswith("-3") and place.read("c.bin") == content
