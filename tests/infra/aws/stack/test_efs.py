"""The stack's file system and its bucket."""

import json
from typing import Any

import pytest
from botocore.exceptions import ClientError
from support.aws_stack import OWN_CIDR, RecordingAccount

from infra.aws.stack import efs, network, security_group, stack
from infra.aws.stack.resources import StackContext


@pytest.fixture
def subnets(work: StackContext) -> dict[str, str]:
    """The subnets by zone."""
    return network.ensure(work).subnets


@pytest.fixture
def group(work: StackContext) -> str:
    """The security group, in the same network."""
    return security_group.ensure_security_group(work, str(network.ensure(work).vpc))


def test_ensure_creates_an_encrypted_file_system_in_each_zone_for_tls_and_a_role(
    account: RecordingAccount, work: StackContext, subnets: dict[str, str], group: str
) -> None:
    file_system, served = efs.ensure(work, subnets, group)
    (description,) = account.efs.describe_file_systems()["FileSystems"]
    assert description["Encrypted"] and description["ThroughputMode"] == "elastic"
    assert description["PerformanceMode"] == "generalPurpose"
    targets = account.efs.describe_mount_targets(FileSystemId=file_system.id)["MountTargets"]
    assert {target["SubnetId"] for target in targets} == {*served.values()} == {*subnets.values()}
    for target in targets:
        response = account.efs.describe_mount_target_security_groups(MountTargetId=target["MountTargetId"])
        assert response["SecurityGroups"] == [group]
    policy = json.loads(account.efs.describe_file_system_policy(FileSystemId=file_system.id)["Policy"])
    deny, allow = policy["Statement"]
    assert deny["Effect"] == "Deny" and deny["Condition"] == {"Bool": {"aws:SecureTransport": "false"}}
    assert allow["Effect"] == "Allow" and allow["Principal"] == {"AWS": "arn:aws:iam::123456789012:root"}
    assert allow["Action"] == ["elasticfilesystem:ClientMount", "elasticfilesystem:ClientWrite"]
    (point,) = account.efs.describe_access_points(FileSystemId=file_system.id)["AccessPoints"]
    assert point["PosixUser"] == {"Uid": 1000, "Gid": 1000} and point["RootDirectory"]["Path"] == "/imgnet"


def test_ensure_leaves_out_zones_without_efs(
    account: RecordingAccount, subnets: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = account.efs.create_mount_target

    def create(**params: Any) -> Any:
        if params["SubnetId"] == subnets["us-west-1a"]:
            raise ClientError({"Error": {"Code": "UnsupportedAvailabilityZone", "Message": "no"}}, "CreateMountTarget")
        return real(**params)

    monkeypatch.setattr(account.efs, "create_mount_target", create)
    assert list(stack.ensure(account, OWN_CIDR).subnets) == ["us-west-1b"]
    assert stack.missing_parts(account) == []
    second_account = RecordingAccount()
    assert stack.ensure(second_account, OWN_CIDR) == stack.find(account) and not second_account.changes()


def test_ensure_restores_a_mount_target(
    account: RecordingAccount, work: StackContext, subnets: dict[str, str], group: str
) -> None:
    file_system, _ = efs.ensure(work, subnets, group)
    target = account.efs.describe_mount_targets(FileSystemId=file_system.id)["MountTargets"][0]
    account.efs.delete_mount_target(MountTargetId=target["MountTargetId"])
    damaged = efs.find_file_system(work)
    assert damaged and damaged.missing_parts(subnets) == [f"mount target in {target['AvailabilityZoneName']}"]
    assert efs.ensure(work, subnets, group)[0].missing_parts(subnets) == []


# --- the bucket -----------------------------------------------------------------------------------------------------


def test_bucket_is_private_encrypted_and_found_by_others(account: RecordingAccount) -> None:
    own_stack = stack.ensure(account, OWN_CIDR, bucket="imgnet-data")
    assert own_stack.bucket == "imgnet-data" and stack.find(RecordingAccount()) == own_stack == stack.ensure(
        RecordingAccount(), OWN_CIDR
    )
    public_access = account.s3.get_public_access_block(Bucket="imgnet-data")["PublicAccessBlockConfiguration"]
    assert len(public_access) == 4 and all(public_access.values())
    lifecycle = account.s3.get_bucket_lifecycle_configuration(Bucket="imgnet-data")["Rules"]
    assert [rule["AbortIncompleteMultipartUpload"] for rule in lifecycle] == [{"DaysAfterInitiation": 7}]
    rules = account.s3.get_bucket_encryption(Bucket="imgnet-data")["ServerSideEncryptionConfiguration"]["Rules"]
    assert rules[0]["ApplyServerSideEncryptionByDefault"]["SSEAlgorithm"] == "AES256"


def test_empty_bucket_is_deleted_while_the_file_system_stays(account: RecordingAccount) -> None:
    stack.ensure(account, OWN_CIDR, bucket="imgnet-data")
    assert stack.remove(account, False) == []
    assert not account.s3.list_buckets()["Buckets"] and stack.ensure(account, OWN_CIDR).bucket is None
