"""Classification of AWS errors by code, and their one-line explanations."""

from typing import Any

import pytest
from botocore import exceptions as boto
from botocore.parsers import ResponseParserError

from infra.aws.errors import ErrorKind, classify_error, explain_error
from infra.errors import CloudError, NoAnswer, NoCredentials


def client_error(code: str, status: int = 400, message: str = "Said so.") -> boto.ClientError:
    response: Any = {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return boto.ClientError(response, "RunInstances")


@pytest.mark.parametrize(
    ("kind", "codes"),
    [
        (ErrorKind.NO_CAPACITY, "InsufficientInstanceCapacity ReservationCapacityExceeded"),
        (ErrorKind.PRICE_TOO_LOW, "SpotMaxPriceTooLow"),
        (ErrorKind.QUOTA_EXCEEDED, "MaxSpotInstanceCountExceeded VcpuLimitExceeded"),
        (ErrorKind.THROTTLED, "RequestLimitExceeded"),
        (ErrorKind.OUTCOME_UNKNOWN, "InternalError Unavailable"),
        (ErrorKind.NOT_VISIBLE_YET, "InvalidInstanceID.NotFound InvalidPlacementGroup.Unknown"),
        (ErrorKind.IN_USE, "InvalidPlacementGroup.InUse DependencyViolation"),
        (ErrorKind.ALREADY_EXISTS, "InvalidPlacementGroup.Duplicate"),
        (ErrorKind.NOT_FOUND, "InvalidVolume.NotFound"),
        (ErrorKind.NO_FREE_ADDRESSES, "InsufficientFreeAddressesInSubnet"),
        (ErrorKind.PERMANENT, "UnauthorizedOperation ExpiredToken IdempotentParameterMismatch SomethingNew"),
    ],
)
def test_classify_error_goes_by_the_code_alone(kind: ErrorKind, codes: str) -> None:
    for code in codes.split():
        for message in ("Said so.", "Insufficient capacity; RequestLimitExceeded"):
            assert classify_error(client_error(code, 400, message)) is kind, code
    assert classify_error(client_error("SomethingNew", 502)) is ErrorKind.OUTCOME_UNKNOWN


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (boto.ReadTimeoutError(endpoint_url="u"), ErrorKind.OUTCOME_UNKNOWN),
        (boto.ResponseStreamingError(error="e"), ErrorKind.OUTCOME_UNKNOWN),
        (ResponseParserError("html"), ErrorKind.OUTCOME_UNKNOWN),
        (boto.NoCredentialsError(), ErrorKind.PERMANENT),
    ],
)
def test_classify_error_without_a_code(error: Exception, kind: ErrorKind) -> None:
    assert classify_error(error) is kind


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
        (client_error("AuthFailure", 401), NoCredentials, ["accept the credentials, or the region is not enabled"]),
        (
            client_error(
                "SignatureDoesNotMatch", 403, "Signature expired: 20261103T0102Z is now earlier than 20261103T"
            ),
            NoCredentials,
            ["the clock of this computer is wrong (Signature expired", "NTP"],
        ),
        (boto.SSLError(endpoint_url="u", error="self-signed certificate"), NoAnswer, ["AWS_CA_BUNDLE"]),
        (boto.ProxyConnectionError(proxy_url="http://proxy:3128"), NoAnswer, ["http://proxy:3128", "HTTPS_PROXY"]),
        (
            client_error("AuthFailure.ServiceLinkedRoleCreationNotPermitted", 403),
            CloudError,
            ["aws iam create-service-linked-role --aws-service-name spot.amazonaws.com"],
        ),
        (client_error("Odd", 400, "two\nlines  here"), CloudError, ["rent (ec2:RunInstances): Odd: two lines here"]),
        (boto.NoCredentialsError(), NoCredentials, ["aws configure"]),
        (boto.ProfileNotFound(profile="p"), NoCredentials, ["aws configure list", "p"]),
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
            ["a policy forbids it", "You may not", "explicit deny in a service control policy", "--tag KEY=VALUE"],
        ),
        (client_error("TagPolicyViolation", 400, "key 'CostCenter'"), CloudError, ["CostCenter", "--tag KEY=VALUE"]),
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
