import json
from typing import Any

import pytest
from botocore.exceptions import ClientError
from support.aws_stack import HERE, Seen, account, aws, home, work

from infra.aws.errors import CloudError
from infra.aws.stack import buckets, efs, network, security_group, stack
from infra.aws.stack.resources import StackContext

__all__ = ["account", "aws", "home", "work"]


@pytest.fixture
def place(work: StackContext) -> tuple[dict[str, str], str]:
    net = network.ensure(work)
    return net.subnets, security_group.ensure_security_group(work, str(net.vpc))


def test_the_file_system_is_encrypted_elastic_and_in_each_zone(
    account: Seen, work: StackContext, place: tuple[dict[str, str], str]
) -> None:
    files, served = efs.ensure(work, *place)
    (one,) = account.efs.describe_file_systems()["FileSystems"]
    assert one["Encrypted"] and one["ThroughputMode"] == "elastic" and one["PerformanceMode"] == "generalPurpose"
    targets = account.efs.describe_mount_targets(FileSystemId=files.id)["MountTargets"]
    assert {target["SubnetId"] for target in targets} == {*served.values()} == {*place[0].values()}
    for target in targets:
        said = account.efs.describe_mount_target_security_groups(MountTargetId=target["MountTargetId"])
        assert said["SecurityGroups"] == [place[1]]


def test_it_is_mounted_by_tls_and_a_role_and_everybody_acts_as_one_user(
    account: Seen, work: StackContext, place: tuple[dict[str, str], str]
) -> None:
    files, _ = efs.ensure(work, *place)
    said = json.loads(account.efs.describe_file_system_policy(FileSystemId=files.id)["Policy"])["Statement"]
    deny, allow = said
    assert deny["Effect"] == "Deny" and deny["Condition"] == {"Bool": {"aws:SecureTransport": "false"}}
    assert allow["Effect"] == "Allow" and allow["Principal"] == {"AWS": "arn:aws:iam::123456789012:root"}
    assert allow["Action"] == ["elasticfilesystem:ClientMount", "elasticfilesystem:ClientWrite"]
    (point,) = account.efs.describe_access_points(FileSystemId=files.id)["AccessPoints"]
    assert point["PosixUser"] == {"Uid": 1000, "Gid": 1000} and point["RootDirectory"]["Path"] == "/imgnet"


def test_it_waits_until_the_file_system_can_be_used(
    account: Seen, work: StackContext, place: tuple[dict[str, str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = account.efs.get_paginator("describe_file_systems")
    states = ["creating"] * 4

    class Slow:
        def paginate(self, **words: Any) -> Any:
            for page in shown.paginate(**words):
                for one in page["FileSystems"]:
                    one["LifeCycleState"] = states.pop() if states else "available"
                yield page

    monkeypatch.setattr(account.efs, "get_paginator", lambda _: Slow())
    files, _ = efs.ensure(work, *place)
    assert files.state == "available" and not states
    actions = [action for action, _ in account.calls]
    assert actions.index("CreateMountTarget") > actions.index("CreateFileSystem") + 3


def test_a_zone_that_the_file_system_does_not_serve_has_no_machines(
    account: Seen, work: StackContext, place: tuple[dict[str, str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = account.efs.create_mount_target

    def create(**words: Any) -> Any:
        if words["SubnetId"] == place[0]["us-west-1a"]:
            raise ClientError({"Error": {"Code": "UnsupportedAvailabilityZone", "Message": "no"}}, "CreateMountTarget")
        return real(**words)

    monkeypatch.setattr(account.efs, "create_mount_target", create)
    assert list(stack.ensure(account, HERE).subnets) == ["us-west-1b"]
    assert stack.missing_parts(account) == []
    again = Seen()
    assert stack.ensure(again, HERE) == stack.find(account) and not again.changes()


def test_parts_that_somebody_took_away_are_named(
    account: Seen, work: StackContext, place: tuple[dict[str, str], str]
) -> None:
    files, _ = efs.ensure(work, *place)
    target = account.efs.describe_mount_targets(FileSystemId=files.id)["MountTargets"][0]
    account.efs.delete_mount_target(MountTargetId=target["MountTargetId"])
    found = efs.find_file_system(work)
    assert found and found.missing_parts(place[0]) == [f"mount target in {target['AvailabilityZoneName']}"]
    assert efs.ensure(work, *place)[0].missing_parts(place[0]) == []


# --- the bucket -----------------------------------------------------------------------------------------------------


def test_a_bucket_is_shut_encrypted_tagged_and_found_by_all(account: Seen) -> None:
    made = stack.ensure(account, HERE, bucket="imgnet-data")
    assert made.bucket == "imgnet-data" and stack.find(Seen()) == made == stack.ensure(Seen(), HERE)
    shut = account.s3.get_public_access_block(Bucket="imgnet-data")["PublicAccessBlockConfiguration"]
    assert len(shut) == 4 and all(shut.values())
    rules = account.s3.get_bucket_encryption(Bucket="imgnet-data")["ServerSideEncryptionConfiguration"]["Rules"]
    assert rules[0]["ApplyServerSideEncryptionByDefault"]["SSEAlgorithm"] == "AES256"


def test_a_bucket_with_data_stays_unless_it_is_named_too(account: Seen) -> None:
    stack.ensure(account, HERE, bucket="imgnet-data")
    account.s3.put_object(Bucket="imgnet-data", Key="data/one", Body=b"x")
    left = stack.remove(account, False)
    assert len(left) == 2 and left[0].startswith("bucket imgnet-data stays with its data")
    assert stack.ensure(account, HERE).bucket == "imgnet-data"
    assert stack.remove(account, True) == [] and not account.s3.list_buckets()["Buckets"]


def test_an_empty_bucket_goes_and_is_forgotten_while_the_file_system_stays(account: Seen) -> None:
    stack.ensure(account, HERE, bucket="imgnet-data")
    assert len(stack.remove(account, False)) == 1
    assert not account.s3.list_buckets()["Buckets"] and stack.ensure(account, HERE).bucket is None


@pytest.mark.parametrize("tagged", [True, False])
def test_a_bucket_of_somebody_else_is_refused_and_stays(account: Seen, work: StackContext, tagged: bool) -> None:
    where = {"LocationConstraint": "us-west-1"}
    account.s3.create_bucket(Bucket="imgnet-data", CreateBucketConfiguration=where)
    if tagged:
        account.s3.put_bucket_tagging(Bucket="imgnet-data", Tagging={"TagSet": [{"Key": "team", "Value": "x"}]})
    account.calls.clear()
    with pytest.raises(CloudError, match="bucket imgnet-data is not ours: it has no tag imgnet:stack; take another"):
        buckets.ensure(work, "imgnet-data", "fs-1")
    assert not account.changes()
