"""Packed sets in S3: put there, fetched from there, and what a person is told when S3 does not do it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from support.packed_sets import content, make_set
from support.simcloud.cloud import SimulatedAws
from support.simcloud.http_server import AwsFrontend, serve

from cluster.backends.aws.s3_source import S3Source, machine_role_problems, upload_dataset
from cluster.errors import AwsNotConfigured, ClusterError
from infra.aws.client import Account
from infra.aws.stack import efs as stack_efs
from infra.aws.stack.resources import StackContext
from train.data.fetch import download
from train.data.fetch.fetch import FetchResult, SetToFetch, fetch_sets
from train.data.manifest import FetchError

Fixture = Any
PLACE = "s3://imgnet-sets/data/set"


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[AwsFrontend, str]]:
    server, url = serve(sim=SimulatedAws())
    yield server.front, url  # type: ignore[attr-defined]
    server.shutdown()
    server.server_close()


@pytest.fixture
def front(served: tuple[AwsFrontend, str], monkeypatch: pytest.MonkeyPatch) -> AwsFrontend:
    """A cloud with an empty bucket, which boto3 in this process takes for AWS."""
    found, url = served
    for name in ("AWS_PROFILE", "AWS_DEFAULT_REGION", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/dev/null")
    for name, value in {"ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret", "REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    monkeypatch.setattr(download, "FIRST_PAUSE", 0.01)
    found.reset()
    boto3.client("s3").create_bucket(Bucket="imgnet-sets")
    return found


@pytest.fixture
def root(tmp_path: Path, front: AwsFrontend) -> Path:
    """A set that was put there."""
    made = make_set(tmp_path / "set")
    assert upload_dataset(made, PLACE, lambda done, total: None) == (10, 0)
    return made


def bring(target: Path, patience: float = 20.0, place: str = PLACE) -> FetchResult:
    return fetch_sets(
        [SetToFetch(S3Source(place), target)], range_bytes=1000, stall_timeout=patience, log=lambda _: None
    )


def test_what_was_put_there_comes_back_and_is_not_put_twice(root: Path, front: AwsFrontend, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    before = front.count("PutObject")
    assert upload_dataset(root, PLACE, lambda *both: told.append(both)) == (0, 10)
    assert front.count("PutObject") == before and told[-1][0] == told[-1][1] > 0
    bring(tmp_path / "t")
    assert content(tmp_path / "t") == content(root)


def test_manifests_are_put_last(tmp_path: Path, front: AwsFrontend) -> None:
    front.fault(action="PutObject", code="AccessDenied", status=403, skip=8)
    with pytest.raises(ClusterError, match=r"not permitted; it takes s3:PutObject on imgnet-sets/data/set"):
        upload_dataset(make_set(tmp_path / "set"), PLACE, lambda done, total: None)
    there = [one["Key"] for one in boto3.client("s3").list_objects_v2(Bucket="imgnet-sets")["Contents"]]
    assert len(there) == 8 and not [key for key in there if "manifest" in key]


def test_a_set_that_is_not_whole_is_not_put_there(tmp_path: Path, front: AwsFrontend) -> None:
    made = make_set(tmp_path / "set")
    (made / "train/shard-00001.bin").unlink()
    with pytest.raises(ClusterError, match=r"shard-00001\.bin: is not whole; look: imgnet-cluster data verify"):
        upload_dataset(made, PLACE, lambda done, total: None)
    with pytest.raises(FetchError, match="has single files"):
        (tmp_path / "files/train/a").mkdir(parents=True)
        upload_dataset(tmp_path / "files", PLACE, lambda done, total: None)


def test_hiccups_of_all_kinds_pass(root: Path, front: AwsFrontend, tmp_path: Path) -> None:
    for code, status in (("SlowDown", 503), ("InternalError", 500), ("RequestTimeout", 400)):
        front.fault(service="s3", code=code, status=status, times=3, skip=2)
    front.fault(service="s3", drop=True, times=3, skip=8)
    bring(tmp_path / "t")
    assert content(tmp_path / "t") == content(root)


def test_what_does_not_pass_is_one_line_at_once_or_in_the_end(root: Path, front: AwsFrontend, tmp_path: Path) -> None:
    front.fault(action="GetObject", service="s3", code="AccessDenied", status=403, skip=6, times=99)
    with pytest.raises(ClusterError, match=r"s3://imgnet-sets/data/set/\S+: not permitted; .* --data s3://imgnet-sets"):
        bring(tmp_path / "t")
    front.faults.clear()
    front.fault(service="s3", code="ExpiredToken", status=400, times=99)
    with pytest.raises(AwsNotConfigured, match="does not accept the credentials"):
        bring(tmp_path / "t")
    front.faults.clear()
    front.fault(service="s3", code="SlowDown", message="Reduce your rate", status=503, skip=6, times=9999)
    with pytest.raises(FetchError) as said:
        bring(tmp_path / "t", patience=0.3)
    line = str(said.value)
    assert ", bytes " in line and "SlowDown: Reduce your rate; nothing came for 0 s; fetch again" in line
    assert "\n" not in line and line.count("s3://") == 1
    front.faults.clear()
    bring(tmp_path / "t")
    assert content(tmp_path / "t") == content(root)


def test_what_is_not_there_says_how_to_put_it_there(front: AwsFrontend, tmp_path: Path) -> None:
    with pytest.raises(FetchError, match=r"train/manifest\.json: is not there; .* data put FOLDER s3://imgnet-sets/x$"):
        bring(tmp_path / "t", place="s3://imgnet-sets/x")
    with pytest.raises(ClusterError, match="there is no bucket imgnet-nobody"):
        bring(tmp_path / "t", place="s3://imgnet-nobody/x")


def test_it_says_so_when_the_machines_role_does_not_reach_a_place(front: AwsFrontend) -> None:
    (line,) = machine_role_problems(PLACE, Account())
    assert "the machines' role reads no bucket yet" in line and f"check --iam --data {PLACE}" in line
    efs = boto3.client("efs", region_name="us-east-1")
    made = efs.create_file_system(
        CreationToken=stack_efs._creation_token(StackContext(Account())),
        Tags=[{"Key": "imgnet:stack", "Value": "imgnet"}],
    )
    efs.tag_resource(ResourceId=made["FileSystemId"], Tags=[{"Key": "imgnet:bucket", "Value": "imgnet-sets"}])
    assert machine_role_problems(PLACE, Account()) == []
    (line,) = machine_role_problems("s3://imgnet-sets/database/x", Account())
    assert "reads s3://imgnet-sets/data;" in line


def test_the_rights_to_read_another_bucket_are_printed(place: Fixture) -> None:
    said = json.loads(place.cli("check", "--iam", "--data", "s3://theirs/sets/imagenet").out)
    assert [one["Action"] for one in said["data"]["Statement"]] == [["s3:GetObject"], ["s3:ListBucket"]]
    assert "data" not in json.loads(place.cli("check", "--iam").out)
    bad = place.cli("check", "--iam", "--data", "/x")
    assert bad.code == 1 and "is no place in S3" in bad.err
