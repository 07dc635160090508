"""Packed sets in S3: upload, fetch, and the messages when S3 fails."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import pytest
from click.testing import CliRunner
from support.packed_sets import content, make_set
from support.simcloud.http_server import AwsFrontend
from support.specs import TINY

from cluster.backends.aws.s3_source import S3Source, machine_role_problems
from cluster.backends.planner import Plan
from cluster.cli.app import cli
from cluster.errors import ClusterError
from cluster.jobs import submit
from cluster.planning.launch_options import make_launch_options
from infra.aws.client import Account
from infra.aws.launch_request import Internet
from infra.aws.stack import efs as stack_efs
from infra.aws.stack.resources import StackContext
from infra.errors import NoCredentials
from train.data.fetch.fetch import FetchResult, SetToFetch, fetch_sets
from train.data.manifest import FetchError

SET_URL = "s3://imgnet-sets/data/set"


@pytest.fixture(autouse=True)
def bucket(front: AwsFrontend) -> None:
    boto3.client("s3").create_bucket(Bucket="imgnet-sets")


def ignore_progress(done_bytes: int, total_bytes: int) -> None:
    pass


def fetch(target: Path, url: str = SET_URL) -> FetchResult:
    return fetch_sets([SetToFetch(S3Source(url), target)], log=lambda _: None)


def test_upload_dataset_uploads_manifests_last(tmp_path: Path, front: AwsFrontend) -> None:
    front.fault(action="PutObject", code="AccessDenied", status=403, skip=8)
    with pytest.raises(ClusterError, match=r"not permitted; it takes s3:PutObject on imgnet-sets/data/set"):
        S3Source(SET_URL).upload_set(make_set(tmp_path / "set"), ignore_progress)
    keys = [entry["Key"] for entry in boto3.client("s3").list_objects_v2(Bucket="imgnet-sets")["Contents"]]
    assert len(keys) == 8 and not [key for key in keys if "manifest" in key]


def test_upload_of_a_damaged_or_incomplete_set_is_refused(tmp_path: Path, front: AwsFrontend) -> None:
    folder = make_set(tmp_path / "set")
    shard = folder / "train/shard-00001.bin"
    shard.write_bytes(bytes(shard.stat().st_size))
    with pytest.raises(ClusterError, match=r"shard-00001\.bin: its bytes have changed .* imgnet-cluster data verify"):
        S3Source(SET_URL).upload_set(folder, ignore_progress)
    shard.unlink()
    with pytest.raises(ClusterError, match=r"00001\.bin: the file is incomplete; run: imgnet-cluster data verify"):
        S3Source(SET_URL).upload_set(folder, ignore_progress)
    with pytest.raises(FetchError, match="has single files"):
        (tmp_path / "files/train/a").mkdir(parents=True)
        S3Source(SET_URL).upload_set(tmp_path / "files", ignore_progress)


def test_fetch_goes_on_after_a_lasting_error_and_upload_skips_what_is_there(front: AwsFrontend, tmp_path: Path) -> None:
    root = make_set(tmp_path / "set")
    assert S3Source(SET_URL).upload_set(root, ignore_progress) == (10, 0)
    front.fault(action="GetObject", service="s3", code="AccessDenied", status=403, skip=4, times=99)
    with pytest.raises(ClusterError, match=r"s3://imgnet-sets/data/set/\S+: not permitted; .* --data s3://imgnet-sets"):
        fetch(tmp_path / "t")
    front.faults.clear()
    front.fault(service="s3", code="ExpiredToken", status=400, times=99)
    with pytest.raises(NoCredentials, match="does not accept the credentials"):
        fetch(tmp_path / "t")
    front.faults.clear()
    fetch(tmp_path / "t")
    assert content(tmp_path / "t") == content(root)
    progress: list[tuple[int, int]] = []
    assert S3Source(SET_URL).upload_set(root, lambda *counts: progress.append(counts)) == (0, 10)
    assert progress[-1][0] == progress[-1][1] > 0


def test_fetch_of_a_missing_set_says_how_to_upload_one(front: AwsFrontend, tmp_path: Path) -> None:
    with pytest.raises(FetchError, match=r"train/manifest\.json: not found; .* data put FOLDER s3://imgnet-sets/x$"):
        fetch(tmp_path / "t", url="s3://imgnet-sets/x")
    with pytest.raises(ClusterError, match="there is no bucket imgnet-nobody"):
        fetch(tmp_path / "t", url="s3://imgnet-nobody/x")


def test_machine_role_problems_of_an_unreadable_location(front: AwsFrontend) -> None:
    (line,) = machine_role_problems(SET_URL, Account())
    assert "the machines' IAM role reads no bucket yet" in line and f"check --iam --data {SET_URL}" in line
    efs = boto3.client("efs", region_name="us-east-1")
    file_system = efs.create_file_system(
        CreationToken=stack_efs._creation_token(StackContext(Account())),
        Tags=[{"Key": "imgnet:stack", "Value": "imgnet"}],
    )
    efs.tag_resource(ResourceId=file_system["FileSystemId"], Tags=[{"Key": "imgnet:bucket", "Value": "imgnet-sets"}])
    assert machine_role_problems(SET_URL, Account()) == []
    (line,) = machine_role_problems("s3://imgnet-sets/database/x", Account())
    assert "reads only s3://imgnet-sets/data;" in line


@pytest.mark.parametrize(("name", "region", "line"), [
    ("imgnet-far", "eu-west-1", "images from S3 in eu-west-1, another region: each GB costs $0.02"),
    ("imgnet-near", "us-east-1", "images from S3, free but for the requests"),
])  # fmt: skip
def test_plan_names_the_region_of_a_bucket_elsewhere_which_needs_the_internet(
    front: AwsFrontend, tmp_path: Path, name: str, region: str, line: str
) -> None:
    is_far = region != "us-east-1"
    location: Any = {"CreateBucketConfiguration": {"LocationConstraint": region}} if is_far else {}
    boto3.client("s3", region_name=region).create_bucket(Bucket=name, **location)
    url = f"s3://{name}/data/set"
    S3Source(url).upload_set(make_set(tmp_path / "set"), ignore_progress)

    def plan(**options: Any) -> Plan:
        launch_options = make_launch_options(backend="aws", types=["p4d.24xlarge"], data=url, **options)
        return submit.plan(replace(TINY, gpus=8), launch_options)

    rental = plan().rental_plan
    assert rental and [text for text in rental.traffic if text.startswith(line)], rental
    obstacles = plan(internet=Internet.NONE).obstacles
    assert len(obstacles) == is_far and all("the bucket is in eu-west-1" in text for text in obstacles)
    assert front.count("HeadBucket") == 2, "once for each plan"


def test_check_says_which_images_a_launch_would_not_find(tmp_path: Path) -> None:
    def check(*words: str) -> tuple[int, list[str]]:
        ran = CliRunner().invoke(cli, ["check", "--machines", "2", *words])
        return ran.exit_code, [line for line in ran.output.splitlines() if line.startswith(("error", "warning"))]

    on_p4d = ("--type", "p4d.24xlarge", "--data")
    code, problems = check(*on_p4d, "sample")
    assert (code, len(problems)) == (0, 1) and "cannot be tried before the stack is there" in problems[0]
    S3Source(SET_URL).upload_set(make_set(tmp_path / "set"), ignore_progress)
    for words, expected_code, line in (
        (("recipes/resnet50_18min.py",), 1, "error    ~/data/imagenet: rented machines have no folder of this"),
        ((*on_p4d, "photos"), 1, "error    ~/.imgnet/shared/photos: the shared file system does not exist yet"),
        ((*on_p4d, "s3://imgnet-sets/x"), 1, "error    s3://imgnet-sets/x/train/manifest.json: not found"),
        ((*on_p4d, SET_URL), 0, "warning  the machines' IAM role reads no bucket yet"),
    ):
        code, problems = check(*words)
        assert code == expected_code and problems[-1].startswith(line), problems


def test_check_iam_prints_the_policy_for_another_bucket(sandbox: Any) -> None:
    policies = json.loads(sandbox.cli("check", "--iam", "--data", "s3://theirs/sets/imagenet").out)
    assert [statement["Action"] for statement in policies["data"]["Statement"]] == [["s3:GetObject"], ["s3:ListBucket"]]
    assert "data" not in json.loads(sandbox.cli("check", "--iam").out)
    refused = sandbox.cli("check", "--iam", "--data", "/x")
    assert refused.code == 1 and "not an S3 address" in refused.err
