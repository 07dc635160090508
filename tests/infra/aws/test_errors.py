"""Classification of AWS errors by code, and their one-line explanations."""

from typing import Any

import pytest
from botocore import exceptions as boto
from botocore.parsers import ResponseParserError
from support.simcloud.http_server import AwsFrontend

from infra.aws import errors
from infra.aws.client import NO_RETRY_CONFIG, Account
from infra.aws.errors import ErrorKind, classify_error, explain_error
from infra.errors import CloudError, NoAnswer, NoCredentials


def client_error(code: str, status: int = 400, message: str = "Said so.") -> boto.ClientError:
    response: Any = {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return boto.ClientError(response, "RunInstances")


@pytest.mark.parametrize(
    ("code", "status", "meaning"),
    [
        ("InsufficientInstanceCapacity", 500, ErrorKind.NO_CAPACITY),
        ("UnfulfillableCapacity", 400, ErrorKind.NO_CAPACITY),
        ("InsufficientHostCapacity", 500, ErrorKind.NO_CAPACITY),
        ("ReservationCapacityExceeded", 400, ErrorKind.NO_CAPACITY),
        ("SpotMaxPriceTooLow", 400, ErrorKind.PRICE_TOO_LOW),
        ("MaxSpotInstanceCountExceeded", 400, ErrorKind.QUOTA_EXCEEDED),
        ("VcpuLimitExceeded", 400, ErrorKind.QUOTA_EXCEEDED),
        ("InstanceLimitExceeded", 400, ErrorKind.QUOTA_EXCEEDED),
        ("MaxFleetCountExceeded", 400, ErrorKind.QUOTA_EXCEEDED),
        ("RequestLimitExceeded", 503, ErrorKind.THROTTLED),
        ("EC2ThrottledException", 400, ErrorKind.THROTTLED),
        ("ThrottlingException", 400, ErrorKind.THROTTLED),
        ("TooManyRequestsException", 429, ErrorKind.THROTTLED),
        ("InternalError", 500, ErrorKind.OUTCOME_UNKNOWN),
        ("Unavailable", 503, ErrorKind.OUTCOME_UNKNOWN),
        ("SomethingNew", 502, ErrorKind.OUTCOME_UNKNOWN),
        ("SomethingNew", 400, ErrorKind.PERMANENT),
        ("InvalidInstanceID.NotFound", 400, ErrorKind.NOT_VISIBLE_YET),
        ("InvalidPlacementGroup.Unknown", 400, ErrorKind.NOT_VISIBLE_YET),
        ("InvalidPlacementGroup.InUse", 400, ErrorKind.IN_USE),
        ("DependencyViolation", 400, ErrorKind.IN_USE),
        ("InvalidPlacementGroup.Duplicate", 400, ErrorKind.ALREADY_EXISTS),
        ("InvalidVolume.NotFound", 400, ErrorKind.NOT_FOUND),
        ("InsufficientFreeAddressesInSubnet", 400, ErrorKind.NO_FREE_ADDRESSES),
        ("UnauthorizedOperation", 403, ErrorKind.PERMANENT),
        ("ExpiredToken", 400, ErrorKind.PERMANENT),
        ("InvalidAMIID.NotFound", 400, ErrorKind.PERMANENT),
        ("AddressLimitExceeded", 400, ErrorKind.PERMANENT),
        ("VolumeLimitExceeded", 400, ErrorKind.PERMANENT),
        ("OperationNotPermitted", 400, ErrorKind.PERMANENT),
        ("IdempotentParameterMismatch", 400, ErrorKind.PERMANENT),
    ],
)
def test_classify_error_goes_by_the_code_alone(code: str, status: int, meaning: ErrorKind) -> None:
    assert classify_error(client_error(code, status)) is meaning
    assert classify_error(client_error(code, status, "Insufficient capacity; RequestLimitExceeded")) is meaning


@pytest.mark.parametrize(
    "error",
    [
        boto.ConnectionClosedError(endpoint_url="u"),
        boto.ReadTimeoutError(endpoint_url="u"),
        boto.ConnectTimeoutError(endpoint_url="u"),
        boto.EndpointConnectionError(endpoint_url="u", error="e"),
        boto.ResponseStreamingError(error="e"),
        boto.SSLError(endpoint_url="u", error="e"),
        ResponseParserError("html"),
    ],
)
def test_classify_error_lost_response_is_outcome_unknown(error: Exception) -> None:
    assert classify_error(error) is ErrorKind.OUTCOME_UNKNOWN


@pytest.mark.parametrize(
    "error",
    [
        boto.NoCredentialsError(),
        boto.ParamValidationError(report="r"),
        ValueError("x"),
        CloudError("message", "InsufficientInstanceCapacity"),
    ],
)
def test_classify_error_local_error_is_permanent(error: Exception) -> None:
    assert classify_error(error) is ErrorKind.PERMANENT


@pytest.mark.parametrize(
    "fault",
    [
        {"drop": True},
        {"drop": True, "after": True},
        {"code": "InternalError"},
        {"code": "ServiceUnavailable"},
    ],
)
def test_classify_error_of_a_dropped_connection_is_outcome_unknown(front: AwsFrontend, fault: dict[str, Any]) -> None:
    front.fault(action="DescribeVpcs", times=9, **fault)
    with pytest.raises((boto.ClientError, boto.BotoCoreError)) as caught:
        Account().client("ec2", NO_RETRY_CONFIG).describe_vpcs()
    assert classify_error(caught.value) is ErrorKind.OUTCOME_UNKNOWN
    assert "\n" not in str(explain_error(caught.value, "look"))


@pytest.mark.parametrize(
    ("error", "kind", "parts"),
    [
        (
            client_error(
                "UnauthorizedOperation", 403, "You may not. Encoded authorization failure message: " + "x" * 900
            ),
            NoAnswer,
            ["rent (ec2:RunInstances): not permitted (You may not.)", "imgnet-cluster check --iam"],
        ),
        (client_error("ExpiredToken"), NoCredentials, ["ExpiredToken", "aws sts get-caller-identity"]),
        (client_error("AuthFailure", 401), NoCredentials, ["does not accept the credentials"]),
        (
            client_error("AuthFailure.ServiceLinkedRoleCreationNotPermitted", 403),
            CloudError,
            ["aws iam create-service-linked-role --aws-service-name spot.amazonaws.com"],
        ),
        (client_error("Odd", 400, "two\nlines  here"), CloudError, ["rent (ec2:RunInstances): Odd: two lines here"]),
        (boto.NoCredentialsError(), NoCredentials, ["aws configure"]),
        (boto.ProfileNotFound(profile="p"), NoCredentials, ["aws configure list", "p"]),
        (boto.NoRegionError(), NoCredentials, ["--region us-east-1"]),
        (boto.EndpointConnectionError(endpoint_url="u", error="e"), NoAnswer, ["cannot be reached"]),
        (ValueError(""), CloudError, ["rent (ec2:RunInstances): ValueError"]),
        (boto.UnauthorizedSSOTokenError(), NoCredentials, ["the login has ended", "aws sso login --profile 'my corp'"]),
        (boto.SSOTokenLoadError(error_msg="no token"), NoCredentials, ["no token", "aws sso login"]),
        (boto.TokenRetrievalError(provider="sso", error_msg="too old"), NoCredentials, ["too old", "aws sso login"]),
        (boto.LoginTokenLoadError(error_msg="gone"), NoCredentials, ["gone", "aws login --profile"]),
        (boto.RefreshWithMFAUnsupportedError(), NoCredentials, ["MFA code", "aws configure export-credentials"]),
        (boto.CredentialRetrievalError(provider="x", error_msg="VPN is down"), NoCredentials, ["VPN is down"]),
        (boto.InvalidConfigError(error_msg="no such source_profile"), NoCredentials, ["no such source_profile"]),
        (
            client_error("AccessDenied", 403, "not authorized to perform: sts:AssumeRole"),
            NoCredentials,
            ["the profile's role"],
        ),
        (client_error("RequestTimeTooSkewed", 403, "too large"), NoCredentials, ["the clock of this computer"]),
        (
            client_error(
                "AccessDenied", 403, "You may not " + "x" * 400 + " with an explicit deny in a service control policy"
            ),
            NoAnswer,
            ["a policy forbids it", "You may not", "explicit deny in a service control policy", "ask who administers"],
        ),
    ],
)
def test_explain_error_is_one_line_with_the_next_command(
    error: Exception, kind: type, parts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "my corp")
    explained = explain_error(error, "rent (ec2:RunInstances)")
    assert type(explained) is kind and "\n" not in str(explained) and len(str(explained)) < 500
    for part in parts:
        assert part in str(explained)


def test_explain_error_keeps_a_cloud_error() -> None:
    error = CloudError("message", "Code")
    assert explain_error(error, "again") is error and errors.get_error_code(error) == "Code"
    assert errors.get_error_code(client_error("Odd", 400, "y" * 999)) == "Odd"
    assert len(errors.describe_error(client_error("Odd", 400, "y" * 999))) <= 300
