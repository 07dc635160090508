"""The stack's file system and its bucket."""

import json
import logging
from typing import Any

import pytest
from botocore.exceptions import ClientError
from support.aws_stack import OWN_CIDR, RecordingAccount, account, aws, home, work
from support.log_lines import log_lines

from infra.aws.stack import buckets, efs, network, security_group, stack
from infra.aws.stack.resources import StackContext
from infra.errors import CloudError

__all__ = ["account", "aws", "home", "work"]


@pytest.fixture
def subnets_and_group(work: StackContext) -> tuple[dict[str, str], str]:
    """The subnets by zone, and the security group."""
    stack_network = network.ensure(work)
    return stack_network.subnets, security_group.ensure_security_group(work, str(stack_network.vpc))


def test_ensure_creates_an_encrypted_file_system_in_each_zone(
    account: RecordingAccount, work: StackContext, subnets_and_group: tuple[dict[str, str], str]
) -> None:
    file_system, served = efs.ensure(work, *subnets_and_group)
    (description,) = account.efs.describe_file_systems()["FileSystems"]
    assert (
        description["Encrypted"]
        and description["ThroughputMode"] == "elastic"
        and description["PerformanceMode"] == "generalPurpose"
    )
    targets = account.efs.describe_mount_targets(FileSystemId=file_system.id)["MountTargets"]
    assert {target["SubnetId"] for target in targets} == {*served.values()} == {*subnets_and_group[0].values()}
    for target in targets:
        response = account.efs.describe_mount_target_security_groups(MountTargetId=target["MountTargetId"])
        assert response["SecurityGroups"] == [subnets_and_group[1]]


def test_ensure_requires_tls_and_a_role_and_maps_to_one_user(
    account: RecordingAccount, work: StackContext, subnets_and_group: tuple[dict[str, str], str]
) -> None:
    file_system, _ = efs.ensure(work, *subnets_and_group)
    statements = json.loads(account.efs.describe_file_system_policy(FileSystemId=file_system.id)["Policy"])["Statement"]
    deny, allow = statements
    assert deny["Effect"] == "Deny" and deny["Condition"] == {"Bool": {"aws:SecureTransport": "false"}}
    assert allow["Effect"] == "Allow" and allow["Principal"] == {"AWS": "arn:aws:iam::123456789012:root"}
    assert allow["Action"] == ["elasticfilesystem:ClientMount", "elasticfilesystem:ClientWrite"]
    (point,) = account.efs.describe_access_points(FileSystemId=file_system.id)["AccessPoints"]
    assert point["PosixUser"] == {"Uid": 1000, "Gid": 1000} and point["RootDirectory"]["Path"] == "/imgnet"


def test_ensure_leaves_out_zones_without_efs(
    account: RecordingAccount,
    work: StackContext,
    subnets_and_group: tuple[dict[str, str], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = account.efs.create_mount_target

    def create(**params: Any) -> Any:
        if params["SubnetId"] == subnets_and_group[0]["us-west-1a"]:
            raise ClientError({"Error": {"Code": "UnsupportedAvailabilityZone", "Message": "no"}}, "CreateMountTarget")
        return real(**params)

    monkeypatch.setattr(account.efs, "create_mount_target", create)
    assert list(stack.ensure(account, OWN_CIDR).subnets) == ["us-west-1b"]
    assert stack.missing_parts(account) == []
    second_account = RecordingAccount()
    assert stack.ensure(second_account, OWN_CIDR) == stack.find(account) and not second_account.changes()


def test_missing_parts_names_a_removed_mount_target(
    account: RecordingAccount, work: StackContext, subnets_and_group: tuple[dict[str, str], str]
) -> None:
    file_system, _ = efs.ensure(work, *subnets_and_group)
    target = account.efs.describe_mount_targets(FileSystemId=file_system.id)["MountTargets"][0]
    account.efs.delete_mount_target(MountTargetId=target["MountTargetId"])
    damaged = efs.find_file_system(work)
    assert damaged and damaged.missing_parts(subnets_and_group[0]) == [
        f"mount target in {target['AvailabilityZoneName']}"
    ]
    assert efs.ensure(work, *subnets_and_group)[0].missing_parts(subnets_and_group[0]) == []


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


def test_bucket_with_data_stays_without_delete_data(account: RecordingAccount) -> None:
    stack.ensure(account, OWN_CIDR, bucket="imgnet-data")
    account.s3.put_object(Bucket="imgnet-data", Key="data/one", Body=b"x")
    with log_lines("infra.aws.stack", logging.INFO) as lines:
        assert stack.remove(account, False) == [], "what is kept on purpose is no failure"
    kept = [line for line in lines if "stays with its data" in line]
    assert len(kept) == 2 and kept[0].startswith("bucket imgnet-data stays")
    assert stack.ensure(account, OWN_CIDR).bucket == "imgnet-data"
    assert stack.remove(account, True) == [] and not account.s3.list_buckets()["Buckets"]


def test_empty_bucket_is_deleted_while_the_file_system_stays(account: RecordingAccount) -> None:
    stack.ensure(account, OWN_CIDR, bucket="imgnet-data")
    assert stack.remove(account, False) == []
    assert not account.s3.list_buckets()["Buckets"] and stack.ensure(account, OWN_CIDR).bucket is None


@pytest.mark.parametrize("tagged", [True, False])
def test_foreign_bucket_is_refused_and_stays(account: RecordingAccount, work: StackContext, tagged: bool) -> None:
    location = {"LocationConstraint": "us-west-1"}
    account.s3.create_bucket(Bucket="imgnet-data", CreateBucketConfiguration=location)
    if tagged:
        account.s3.put_bucket_tagging(Bucket="imgnet-data", Tagging={"TagSet": [{"Key": "team", "Value": "x"}]})
    account.calls.clear()
    with pytest.raises(
        CloudError,
        match="bucket imgnet-data does not belong to imgnet-cluster: it has no tag imgnet:stack; take another",
    ):
        buckets.ensure(work, "imgnet-data", "fs-1")
    assert not account.changes()
