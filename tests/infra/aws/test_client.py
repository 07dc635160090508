"""Account and its clients: regions, credentials, retries, pagination, and the errors of AWS in one line."""

from pathlib import Path
from typing import Any

import pytest
from botocore import exceptions as boto
from botocore.parsers import ResponseParserError
from support.aws_gang import GangTestbed
from support.simcloud.http_server import AwsFrontend

from infra.aws import client as aws_client
from infra.aws.client import Account
from infra.aws.error_codes import ErrorKind, classify_error, explain_error
from infra.aws.s3 import S3Prefix
from infra.errors import CloudError, NoAnswer, NoCredentials
from train.tools import host


def test_account_region_is_found_in_the_order_of_aws(
    front: AwsFrontend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config").write_text("[profile corp]\nregion = sa-east-1\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "corp")
    assert (Account("eu-west-1").region, Account().region) == ("eu-west-1", "us-east-1"), "AWS_REGION"
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-3")
    assert Account().region == "us-east-1"
    monkeypatch.setenv("AWS_REGION", "")
    assert Account().region == "eu-west-3"
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    assert Account().region == "sa-east-1"
    monkeypatch.delenv("AWS_PROFILE")
    with pytest.raises(CloudError, match=r"AWS: no region is set; pass --region us-east-1"):
        Account()


@pytest.mark.parametrize("error_hours", [-5.0, 0.0, 5.0])
def test_answers_of_aws_set_the_clock(front: AwsFrontend, monkeypatch: pytest.MonkeyPatch, error_hours: float) -> None:
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


@pytest.mark.parametrize(("arn", "owner"), [
    ("arn:aws:iam::123456789012:user/team/ann", "ann"),
    ("arn:aws:sts::123456789012:assumed-role/AWSReservedSSO_x/ann@example.org", "ann@example.org"),
    ("arn:aws:sts::123456789012:assumed-role/trainer/botocore-session-1764374221", "trainer"),
    ("arn:aws:iam::123456789012:root", "arn:aws:iam::123456789012:root"),
])  # fmt: skip
def test_owner_is_the_same_in_each_process(monkeypatch: pytest.MonkeyPatch, arn: str, owner: str) -> None:
    """botocore names a role's session after the time. Rules of such an owner were never closed."""
    account = Account("us-east-1")
    account.__dict__["identity"] = ("123456789012", arn)
    monkeypatch.setattr("getpass.getuser", lambda: "me")
    assert account.owner == f"{owner} me"


def test_get_public_address_is_the_one_the_endpoint_sees(front: AwsFrontend, monkeypatch: pytest.MonkeyPatch) -> None:
    assert aws_client.get_public_address() == "127.0.0.1/32"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(CloudError, match=r"pass it: --from 203\.0\.113\.7/32"):
        aws_client.get_public_address()


def client_error(
    code: str, message: str = "Said so.", status: int = 400, operation: str = "RunInstances"
) -> boto.ClientError:
    response: Any = {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return boto.ClientError(response, operation)


@pytest.mark.parametrize(("error", "kind"), [
    (client_error("SomethingNew"), ErrorKind.PERMANENT),
    (client_error("SomethingNew", status=502), ErrorKind.OUTCOME_UNKNOWN),
    (boto.ReadTimeoutError(endpoint_url="u"), ErrorKind.OUTCOME_UNKNOWN),
    (boto.ResponseStreamingError(error="e"), ErrorKind.OUTCOME_UNKNOWN),
    (ResponseParserError("html"), ErrorKind.OUTCOME_UNKNOWN),
    (boto.NoCredentialsError(), ErrorKind.PERMANENT),
    (client_error("SubnetNotFound", operation="CreateMountTarget"), ErrorKind.NOT_VISIBLE_YET),
    (client_error("SecurityGroupNotFound", operation="CreateMountTarget"), ErrorKind.NOT_VISIBLE_YET),
    (client_error("InvalidElasticIpID.NotFound", operation="CreateNatGateway"), ErrorKind.NOT_VISIBLE_YET),
    (client_error("InvalidRouteTableId.NotFound", operation="ModifyVpcEndpoint"), ErrorKind.NOT_FOUND),
])  # fmt: skip
def test_classify_error(error: Exception, kind: ErrorKind) -> None:
    assert classify_error(error) is kind


SKEWED = "Signature expired: 20261103T0102Z is now earlier than 20261103T"
LONG_REFUSAL = "You may not. Encoded authorization failure message: " + "x" * 900
LONG_POLICY = "You may not " + "x" * 400 + " with an explicit deny in a service control policy"
SPOT_ROLE = "aws iam create-service-linked-role --aws-service-name spot.amazonaws.com"


@pytest.mark.parametrize(("kind", "error", "parts"), [
    (NoAnswer, client_error("UnauthorizedOperation", LONG_REFUSAL), ["permitted (You may not.)", "check --iam"]),
    (NoAnswer, client_error("AccessDenied", LONG_POLICY), ["a policy forbids it", "explicit deny", "--tag KEY="]),
    (NoAnswer, client_error("AccessDenied", "Not so, because no service control policy allows"), ["forbids"]),
    (NoAnswer, client_error("AccessDenied", "Not so, because no identity-based policy allows"), ["check --iam"]),
    (NoAnswer, boto.SSLError(endpoint_url="u", error="self-signed"), ["AWS_CA_BUNDLE"]),
    (NoAnswer, boto.ProxyConnectionError(proxy_url="http://proxy:3128"), ["http://proxy:3128", "HTTPS_PROXY"]),
    (NoAnswer, boto.EndpointConnectionError(endpoint_url="u", error="e"), ["cannot be reached"]),
    (NoCredentials, client_error("ExpiredToken"), ["ExpiredToken", "aws sts get-caller-identity"]),
    (NoCredentials, client_error("AuthFailure"), ["accept the credentials, or the region is not enabled"]),
    (NoCredentials, client_error("SignatureDoesNotMatch", SKEWED), ["the clock of this computer is wrong", "NTP"]),
    (NoCredentials, client_error("RequestTimeTooSkewed"), ["the clock of this computer"]),
    (NoCredentials, client_error("AccessDenied", "It is hers.", operation="AssumeRole"), ["the profile's role"]),
    (NoCredentials, client_error("ForbiddenException", "No access", 403, "GetRoleCredentials"),
     ["ForbiddenException: No access", "aws sts get-caller-identity"]),
    (CloudError, client_error("Throttling", "Rate exceeded", operation="AssumeRole"), ["Throttling"]),
    (CloudError, RuntimeError("cannot schedule new futures"), ["cannot schedule new futures"]),
    (NoCredentials, boto.NoCredentialsError(), ["aws configure"]),
    (NoCredentials, boto.ProfileNotFound(profile="p"), ["aws configure list", "p"]),
    (NoCredentials, boto.UnauthorizedSSOTokenError(), ["the login has ended", "aws sso login --profile 'my corp'"]),
    (NoCredentials, boto.SSOTokenLoadError(error_msg="no token"), ["no token", "aws sso login"]),
    (NoCredentials, boto.TokenRetrievalError(provider="sso", error_msg="too old"), ["too old", "aws sso login"]),
    (NoCredentials, boto.LoginTokenLoadError(error_msg="gone"), ["gone", "aws login --profile"]),
    (NoCredentials, boto.RefreshWithMFAUnsupportedError(), ["MFA code", "aws configure export-credentials"]),
    (NoCredentials, boto.CredentialRetrievalError(provider="x", error_msg="VPN is down"), ["VPN is down"]),
    (NoCredentials, boto.MissingDependencyException(msg="install botocore[crt]"), ["install botocore[crt]"]),
    (NoCredentials, boto.InvalidConfigError(error_msg="no such source_profile"), ["no such source_profile"]),
    (CloudError, client_error("AuthFailure.ServiceLinkedRoleCreationNotPermitted"), [SPOT_ROLE]),
    (CloudError, client_error("TagPolicyViolation", "key 'CostCenter'"), ["CostCenter", "--tag KEY=VALUE"]),
    (CloudError, client_error("OptInRequired", "Accept the terms"), ["OptInRequired: Accept the terms"]),
    (NoCredentials, client_error("OptInRequired", operation="DescribeVpcs"), ["accept the credentials"]),
    (CloudError, client_error("Odd", "two\nlines  here"), ["rent (ec2:RunInstances): Odd: two lines here"]),
    (CloudError, ValueError(""), ["rent (ec2:RunInstances): ValueError"]),
])  # fmt: skip
def test_explain_error_is_one_line_with_the_next_command(
    kind: type, error: Exception, parts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "my corp")
    explained = explain_error(error, "rent (ec2:RunInstances)")
    assert type(explained) is kind and "\n" not in str(explained) and len(str(explained)) < 500
    for part in parts:
        assert part in str(explained)


def test_keys_whose_expiry_has_passed_are_no_credentials(front: AwsFrontend, monkeypatch: pytest.MonkeyPatch) -> None:
    # `aws configure export-credentials --format env` tells when the keys end; botocore then sends no request.
    monkeypatch.setenv("AWS_CREDENTIAL_EXPIRATION", "2020-01-01T00:00:00+00:00")
    with pytest.raises(NoCredentials, match=r"^AWS: the keys have expired.*aws sts get-caller-identity$"):
        Account("us-east-1").require_answer()
    with pytest.raises(NoCredentials, match="the keys have expired"):
        S3Prefix("s3://imgnet-test/data").read("manifest.json")


ROLE = "role_arn = arn:aws:iam::123456789012:role/Trainer"
BASE = "source_profile = base\n[profile base]\naws_access_key_id = a\naws_secret_access_key = b"
NO_KEYS = r"^AWS: no credentials \(.*\); see: aws sts get-caller-identity$"


@pytest.mark.parametrize(("profile", "message"), [
    ("credential_process = /no/program", NO_KEYS),
    ("credential_process = echo Log in first", NO_KEYS),
    ("""credential_process = echo '{"Version": 1, "AccessKeyId": "", "SecretAccessKey": "", "Expiration": "x"}'""",
     NO_KEYS),
    (f"{ROLE}\nweb_identity_token_file = /no/token", NO_KEYS),
    # A supervisor would wait for the code in a window that nobody sees.
    (f"{ROLE}\nmfa_serial = arn:aws:iam::123456789012:mfa/me\n{BASE}", "configure export-credentials --profile odd"),
])  # fmt: skip
def test_whatever_keeps_botocore_from_getting_keys_is_no_credentials(
    front: AwsFrontend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profile: str, message: str
) -> None:
    """A supervisor then says so, and hands the job over to a command that has keys."""
    (tmp_path / "config").write_text(f"[profile odd]\n{profile}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "odd")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(NoCredentials, match=message):
        Account("us-east-1").require_answer()
    with pytest.raises(NoCredentials):
        S3Prefix("s3://imgnet-test/data").read("manifest.json")
