"""The account without a run folder: what `gc` finds, with its price."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from click.testing import CliRunner
from support.simcloud.http_server import AwsFrontend
from support.specs import TINY

from cluster.backends.aws.admin import AwsAdministration
from cluster.backends.aws.terms.rental_spec import RentalSpec
from cluster.cli.app import cli
from cluster.errors import ClusterError
from cluster.jobs import submit
from cluster.planning.launch_options import make_launch_options
from infra.aws import tags
from infra.aws.client import Account
from infra.aws.stack import buckets, efs
from infra.aws.stack.resources import StackContext
from train.tools import host

REGION = "us-east-1"


def test_gc_names_what_is_left_with_its_price(front: AwsFrontend) -> None:
    ec2 = Account(REGION).ec2
    own_tags = tags.to_aws_tags({tags.STACK: tags.STACK_VALUE, tags.JOB: "job-3-9073e811"})

    def tagged(kind: str) -> dict[str, object]:
        return {"TagSpecifications": [{"ResourceType": kind, "Tags": own_tags}]}

    ec2.create_volume(AvailabilityZone="us-east-1a", Size=150, **tagged("volume"))
    ec2.allocate_address(Domain="vpc", **tagged("elastic-ip"))
    ec2.create_placement_group(GroupName="left", Strategy="cluster", **tagged("placement-group"))

    def found() -> str:
        (text,) = AwsAdministration().find_garbage(REGION, {}, include_unknown=True).remove.values()
        return text

    left = "an address ($3.65 a month)", "a disk of 150 GB ($12.00 a month)"
    assert all(text in found() for text in left)
    (row,) = AwsAdministration().rented_jobs(REGION)
    assert (row.uid, row.machines) == ("job-3-9073e811", 0) and all(text in row.state for text in left)
    image = ec2.describe_images(Owners=["amazon"])["Images"][0]["ImageId"]
    ec2.run_instances(ImageId=image, MinCount=2, MaxCount=2, InstanceType="p4d.24xlarge", **tagged("instance"))
    (row,) = AwsAdministration().rented_jobs(REGION)
    assert row.machines == 2 and "address" not in row.state
    assert found().startswith("job-3-9073e811: 2 machines (on demand $43.92 an hour), ")
    front.sim.stop_seconds = 0.0
    ids = [instance.id for instance in front.sim.instances()]
    ec2.stop_instances(InstanceIds=ids[:1])
    assert "1 machine (on demand $21.96 an hour), 1 stopped (disks, $12.00 a month or more)" in found()
    ec2.stop_instances(InstanceIds=ids)
    assert found().startswith("job-3-9073e811: 2 stopped (disks, $24.00 a month or more), ")


def test_gc_leaves_jobs_of_others_alone_although_the_clock_here_is_ahead(
    front: AwsFrontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    expires = tags.format_time(front.sim.now() + 3600)
    job_tags = tags.to_aws_tags({tags.STACK: tags.STACK_VALUE, tags.JOB: "job-3-9073e811", tags.EXPIRES: expires})
    specification = {"ResourceType": "elastic-ip", "Tags": job_tags}
    Account(REGION).ec2.allocate_address(Domain="vpc", TagSpecifications=[specification])
    monkeypatch.setattr(host, "steady_clock", host.SteadyClock(host.SteadyClock.wall_offset() + 5 * 3600))
    garbage = AwsAdministration().find_garbage(REGION, {}, include_unknown=False)
    assert not garbage.remove and "job-3-9073e811" in garbage.stay[0]


@pytest.fixture
def quick_stack(front: AwsFrontend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AwsFrontend:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("infra.aws.stack.resources.SETTLE_SECONDS", 0.02)
    monkeypatch.setattr("infra.aws.stack.resources.RESOURCE_POLL_SECONDS", 0.01)
    return front


def run(*words: str, code: int = 0) -> str:
    ran = CliRunner().invoke(cli, words)
    assert ran.exit_code == code, ran.output
    return " ".join(ran.output.split())


def test_stack_has_one_bucket_which_is_named_until_it_is_deleted(quick_stack: AwsFrontend) -> None:
    s3, up = Account(REGION).s3, ("up", "--stack", "--from", "203.0.113.7/32", "--bucket")
    s3.create_bucket(Bucket="imgnet-of-others")
    for words in ((*up, "foo"), (*up, "foo", "--dry-run")):
        assert "names that begin with imgnet- only; take --bucket imgnet-foo" in run(*words, code=1)
    assert "bucket imgnet-wb" in run(*up, "imgnet-wb", "--dry-run")
    run(*up, "imgnet-wb")
    for words in ((*up, "imgnet-b"), (*up, "imgnet-b", "--dry-run")):
        assert "the stack has the bucket imgnet-wb already" in run(*words, code=1)
    with patch.object(buckets, "list_own", wraps=buckets.list_own) as look:
        assert re.search(r"all but file system fs-\w+ and bucket imgnet-wb$", run("down", "--stack", "-y"))
    assert look.call_count == 1, "what the question has named goes, and no other"
    assert "imgnet-wb" in run("up", "--stack", "--dry-run", "--bucket", "imgnet-b", code=1), "it is empty, and stays"
    file_system = efs.find_file_system(StackContext(Account(REGION)))
    assert file_system
    Account(REGION).efs.delete_file_system(FileSystemId=file_system.id)  # by hand, or by a command that then failed
    quick_stack.sim.tick()
    assert AwsAdministration().has_stack(REGION), "else a self-test would take it for its own"
    assert "all data in bucket imgnet-wb?" in CliRunner().invoke(cli, ["down", "--stack", "--delete-data"]).output
    removed = run("down", "--stack", "--delete-data", "-y")
    assert removed.endswith(f"removed the stack of {REGION}, with all data in bucket imgnet-wb")
    assert [bucket["Name"] for bucket in s3.list_buckets()["Buckets"]] == ["imgnet-of-others"]
    assert run("down", "--stack", "--delete-data", "-y").endswith(f"removed the stack of {REGION}")


def plan_launch(**options: Any) -> Any:
    recipe = replace(TINY, gpus=8, types=("p4d.24xlarge",))
    return submit.plan(recipe, make_launch_options(backend="aws", **{"machines": 2, **options}))


def test_zone_without_efs_is_left_out_with_a_note(quick_stack: AwsFrontend) -> None:
    quick_stack.set(zone_without_efs="us-east-1b")
    assert "EFS does not serve us-east-1b: no machines will be launched there" in run("up", "--stack")
    assert run("up", "--stack", "--dry-run") == "nothing is missing"
    assert "us-east-1b: EFS does not serve it" in run("check", "--machines", "2", "--type", "p4d.24xlarge")
    plan = plan_launch()
    assert "us-east-1b" not in {place.zone for place in RentalSpec.from_json(plan.spec.cloud).places}
    assert "us-east-1b: EFS does not serve it, so no machines are rented there" in plan.notes
    with pytest.raises(ClusterError, match="not offered in us-east-1b where EFS serves, which leaves out us-east-1b"):
        plan_launch(zones=("us-east-1b",))
