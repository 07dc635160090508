"""The account: who asks how often, and what it says when it cannot ask."""

from typing import Any

import boto3
import pytest
from support.aws_gang import Bed, bed
from support.simcloud.http_server import AwsFrontend

from infra.aws import client as aws_client
from infra.aws.client import Account
from infra.aws.errors import CloudError, ErrorKind, NoCredentials

__all__ = ["bed"]


def test_the_region_is_the_one_that_is_named_or_the_one_of_the_variables(
    front: AwsFrontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Account("eu-west-1").region == "eu-west-1" and Account().region == "us-east-1"
    monkeypatch.setenv("AWS_DEFAULT_REGION", "ap-south-1")
    assert Account().region == "ap-south-1"
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    monkeypatch.delenv("AWS_REGION")
    with pytest.raises(CloudError, match=r"AWS: no region; say one: --region us-east-1"):
        Account()


def test_another_region_is_asked_with_the_same_keys(front: AwsFrontend) -> None:
    here = Account()
    there = here.in_region("us-west-2")
    zones = there.ec2.describe_availability_zones()["AvailabilityZones"]
    assert {one["RegionName"] for one in zones} == {"us-west-2"} and here.in_region("us-east-1") is here


def test_without_keys_it_says_how_to_get_some(front: AwsFrontend, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(NoCredentials, match="aws configure"):
        _ = Account().identity
    with pytest.raises(NoCredentials, match="aws configure list"):
        Account("us-east-1", "nobody")


@pytest.mark.parametrize(("client", "code", "calls"), [
    ("once", "InternalError", 1), ("once", "InsufficientInstanceCapacity", 1), ("once", "RequestLimitExceeded", 1),
    ("ec2", "InternalError", 3),
])  # fmt: skip
def test_what_costs_money_is_asked_once_and_all_else_patiently(bed: Bed, client: str, code: str, calls: int) -> None:
    bed.front.fault(action="DescribeVpcs", code=code, times=2)
    before = bed.front.count("DescribeVpcs")
    try:
        aws_client.call("look", getattr(bed.account, client).describe_vpcs)
        assert client == "ec2"
    except CloudError as error:
        assert client == "once" and error.code == code
    assert bed.front.count("DescribeVpcs") - before == calls


def test_who_rents_waits_long_for_an_answer() -> None:
    assert (
        aws_client.NO_RETRY_CONFIG.read_timeout >= 120 and aws_client.NO_RETRY_CONFIG.retries["total_max_attempts"] == 1
    )


def test_what_is_not_seen_yet_is_asked_for_again_and_nothing_else(bed: Bed) -> None:
    ask = bed.account.ec2.describe_vpcs
    bed.front.fault(action="DescribeVpcs", code="InvalidSubnetID.NotFound", times=3)
    assert aws_client.call_with_retry("look", ask, pause=bed.clock.sleep)["Vpcs"]
    assert bed.clock.pauses == [2, 2, 2]
    bed.front.fault(action="DescribeVpcs", code="DependencyViolation", times=99)
    with pytest.raises(CloudError, match=r"^look: DependencyViolation"):
        aws_client.call_with_retry("look", ask, pause=bed.clock.sleep)
    assert len(bed.clock.pauses) == 3
    with pytest.raises(CloudError):
        aws_client.call_with_retry(
            "look", ask, retry_on=(ErrorKind.IN_USE,), timeout_seconds=9.0, pause=bed.clock.sleep
        )
    assert len(bed.clock.pauses) == 3 + 5


def test_all_pages_are_read(bed: Bed) -> None:
    bed.acquire(n=7)
    words: dict[str, Any] = {"PaginationConfig": {"PageSize": 5}}
    before = bed.front.count("DescribeInstances")
    found = aws_client.paginate("look", bed.account.ec2, "describe_instances", "Reservations", **words)
    assert sum(len(one["Instances"]) for one in found) == 7
    assert bed.front.count("DescribeInstances") == before + 2


def test_the_owner_is_the_role_and_the_person(front: AwsFrontend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("getpass.getuser", lambda: "ann")
    account = Account()
    number, arn = account.identity
    assert number == "123456789012" and account.owner == f"{arn.rpartition('/')[2]} ann"


def test_this_computers_address_is_the_one_that_the_endpoint_sees(
    front: AwsFrontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert aws_client.get_public_address() == "127.0.0.1/32"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(CloudError, match=r"say it: --from 203\.0\.113\.7/32"):
        aws_client.get_public_address()


def test_clients_are_made_when_they_are_used(front: AwsFrontend, monkeypatch: pytest.MonkeyPatch) -> None:
    account = Account()
    monkeypatch.setattr(boto3.session.Session, "client", lambda *_, **__: pytest.fail("made too early"))
    assert not {"ec2", "once", "iam"} & vars(account).keys()
