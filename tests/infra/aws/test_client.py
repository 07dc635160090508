"""Account and its clients: regions, credentials, retries, pagination."""

from pathlib import Path
from typing import Any

import pytest
from support.aws_gang import GangTestbed
from support.simcloud.http_server import AwsFrontend

from infra.aws import client as aws_client
from infra.aws.client import Account
from infra.aws.errors import ErrorKind
from infra.errors import CloudError, NoCredentials
from train.tools import host


def test_account_region_is_found_in_the_order_of_aws(
    front: AwsFrontend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config").write_text("[profile corp]\nregion = sa-east-1\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    variables = {"AWS_REGION": "us-west-2", "AWS_DEFAULT_REGION": "ap-south-1", "AWS_PROFILE": "corp"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert Account("eu-west-1").region == "eu-west-1"
    for name, region in zip(variables, ("us-west-2", "ap-south-1", "sa-east-1"), strict=True):
        assert Account().region == region
        monkeypatch.delenv(name)
    with pytest.raises(CloudError, match=r"AWS: no region is set; pass --region us-east-1"):
        Account()


def test_profile_that_wants_an_mfa_code_fails_instead_of_asking(
    front: AwsFrontend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervisor would wait for the code in a window that nobody sees."""
    base = "[profile base]\naws_access_key_id = a\naws_secret_access_key = b\n"
    role = "role_arn = arn:aws:iam::123456789012:role/Trainer\nmfa_serial = arn:aws:iam::123456789012:mfa/me\n"
    (tmp_path / "config").write_text(f"{base}[profile mfa]\n{role}source_profile = base\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "mfa")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(NoCredentials, match="aws configure export-credentials --profile mfa"):
        Account("us-east-1").ec2.describe_vpcs()


@pytest.mark.parametrize("error_hours", [-5.0, 0.0, 5.0])
def test_answers_of_aws_set_a_wrong_clock(
    front: AwsFrontend, monkeypatch: pytest.MonkeyPatch, error_hours: float
) -> None:
    """For example after a boot. A small difference is only the way of the answer."""
    right_offset = host.SteadyClock.wall_offset()
    clock = host.SteadyClock(right_offset + 3600 * error_hours + 3)
    monkeypatch.setattr(host, "steady_clock", clock)
    Account("us-east-1").ec2.describe_vpcs()
    assert abs(clock.offset - right_offset) < aws_client.MAX_CLOCK_ERROR_SECONDS
    assert (clock.offset == right_offset + 3) == (error_hours == 0.0)


def test_call_with_retry_repeats_only_the_given_kinds(bed: GangTestbed) -> None:
    describe_vpcs = bed.account.ec2.describe_vpcs
    bed.front.fault(action="DescribeVpcs", code="InvalidSubnetID.NotFound", times=3)
    assert aws_client.call_with_retry("look", describe_vpcs)["Vpcs"]
    assert bed.clock.pauses == [2, 2, 2]
    bed.front.fault(action="DescribeVpcs", code="DependencyViolation", times=99)
    with pytest.raises(CloudError, match=r"^look: DependencyViolation"):
        aws_client.call_with_retry("look", describe_vpcs)
    assert len(bed.clock.pauses) == 3
    with pytest.raises(CloudError):
        aws_client.call_with_retry("look", describe_vpcs, retry_on=(ErrorKind.IN_USE,), timeout_seconds=9.0)
    assert len(bed.clock.pauses) == 3 + 5


def test_paginate_returns_the_items_of_all_pages_and_repeats_what_fails_for_a_moment(bed: GangTestbed) -> None:
    bed.acquire(n=7)
    bed.front.fault(action="DescribeInstances", code="InternalError", times=2)
    params: dict[str, Any] = {"PaginationConfig": {"PageSize": 5}}
    before = bed.front.count("DescribeInstances")
    reservations = aws_client.paginate("look", bed.account.ec2, "describe_instances", "Reservations", **params)
    assert sum(len(reservation["Instances"]) for reservation in reservations) == 7
    assert bed.front.count("DescribeInstances") == before + 4


def test_owner_has_only_characters_that_all_services_take_in_tags(monkeypatch: pytest.MonkeyPatch) -> None:
    account = Account("us-east-1")
    account.__dict__["identity"] = ("123456789012", "arn:aws:sts::123456789012:assumed-role/admin/ann,o'hara*")
    monkeypatch.setattr("getpass.getuser", lambda: "DOMAIN\\änn")
    assert account.owner == "ann_o_hara_ DOMAIN_änn"


def test_get_public_address_is_the_one_that_the_endpoint_sees(
    front: AwsFrontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert aws_client.get_public_address() == "127.0.0.1/32"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(CloudError, match=r"pass it: --from 203\.0\.113\.7/32"):
        aws_client.get_public_address()
