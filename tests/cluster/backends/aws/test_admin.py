"""The account without a run folder: what `gc` finds, with its price."""

import pytest
from support.simcloud.http_server import AwsFrontend

from cluster.backends.aws.admin import AwsAdministration
from infra.aws import tags
from infra.aws.client import Account
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
