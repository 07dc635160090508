"""Classification of AWS errors by code, and their one-line explanations."""

from typing import Any

import pytest
from botocore import exceptions as boto
from botocore.parsers import ResponseParserError

from infra.aws.errors import ErrorKind, classify_error, explain_error
from infra.errors import CloudError, NoAnswer, NoCredentials


def client_error(code: str, message: str = "Said so.", status: int = 400) -> boto.ClientError:
    response: Any = {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return boto.ClientError(response, "RunInstances")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        # By the code alone, whatever the message says
        (client_error("InsufficientInstanceCapacity"), ErrorKind.NO_CAPACITY),
        (client_error("MaxSpotInstanceCountExceeded", "Insufficient capacity"), ErrorKind.QUOTA_EXCEEDED),
        (client_error("UnauthorizedOperation", "RequestLimitExceeded"), ErrorKind.PERMANENT),
        (client_error("InvalidInstanceID.NotFound"), ErrorKind.NOT_VISIBLE_YET),
        (client_error("InvalidVolume.NotFound"), ErrorKind.NOT_FOUND),
        (client_error("InvalidPlacementGroup.InUse"), ErrorKind.IN_USE),
        (client_error("SomethingNew"), ErrorKind.PERMANENT),
        (client_error("SomethingNew", status=502), ErrorKind.OUTCOME_UNKNOWN),
        # Without a code
        (boto.ReadTimeoutError(endpoint_url="u"), ErrorKind.OUTCOME_UNKNOWN),
        (boto.ResponseStreamingError(error="e"), ErrorKind.OUTCOME_UNKNOWN),
        (ResponseParserError("html"), ErrorKind.OUTCOME_UNKNOWN),
        (boto.NoCredentialsError(), ErrorKind.PERMANENT),
    ],
)
def test_classify_error(error: Exception, kind: ErrorKind) -> None:
    assert classify_error(error) is kind


SKEWED = "Signature expired: 20261103T0102Z is now earlier than 20261103T"
LONG_REFUSAL = "You may not. Encoded authorization failure message: " + "x" * 900
LONG_POLICY = "You may not " + "x" * 400 + " with an explicit deny in a service control policy"
SPOT_ROLE = "aws iam create-service-linked-role --aws-service-name spot.amazonaws.com"


@pytest.mark.parametrize(
    ("kind", "error", "parts"),
    [
        (
            NoAnswer,
            client_error("UnauthorizedOperation", LONG_REFUSAL),
            ["not permitted (You may not.)", "check --iam"],
        ),
        (NoAnswer, client_error("AccessDenied", LONG_POLICY), ["a policy forbids it", "explicit deny", "--tag KEY="]),
        (NoAnswer, boto.SSLError(endpoint_url="u", error="self-signed"), ["AWS_CA_BUNDLE"]),
        (NoAnswer, boto.ProxyConnectionError(proxy_url="http://proxy:3128"), ["http://proxy:3128", "HTTPS_PROXY"]),
        (NoAnswer, boto.EndpointConnectionError(endpoint_url="u", error="e"), ["cannot be reached"]),
        (NoCredentials, client_error("ExpiredToken"), ["ExpiredToken", "aws sts get-caller-identity"]),
        (NoCredentials, client_error("AuthFailure"), ["accept the credentials, or the region is not enabled"]),
        (NoCredentials, client_error("SignatureDoesNotMatch", SKEWED), ["the clock of this computer is wrong", "NTP"]),
        (NoCredentials, client_error("RequestTimeTooSkewed"), ["the clock of this computer"]),
        (NoCredentials, client_error("AccessDenied", "to perform: sts:AssumeRole"), ["the profile's role"]),
        (NoCredentials, boto.NoCredentialsError(), ["aws configure"]),
        (NoCredentials, boto.ProfileNotFound(profile="p"), ["aws configure list", "p"]),
        (NoCredentials, boto.UnauthorizedSSOTokenError(), ["the login has ended", "aws sso login --profile 'my corp'"]),
        (NoCredentials, boto.SSOTokenLoadError(error_msg="no token"), ["no token", "aws sso login"]),
        (NoCredentials, boto.TokenRetrievalError(provider="sso", error_msg="too old"), ["too old", "aws sso login"]),
        (NoCredentials, boto.LoginTokenLoadError(error_msg="gone"), ["gone", "aws login --profile"]),
        (NoCredentials, boto.RefreshWithMFAUnsupportedError(), ["MFA code", "aws configure export-credentials"]),
        (NoCredentials, boto.CredentialRetrievalError(provider="x", error_msg="VPN is down"), ["VPN is down"]),
        (NoCredentials, boto.InvalidConfigError(error_msg="no such source_profile"), ["no such source_profile"]),
        (CloudError, client_error("AuthFailure.ServiceLinkedRoleCreationNotPermitted"), [SPOT_ROLE]),
        (CloudError, client_error("TagPolicyViolation", "key 'CostCenter'"), ["CostCenter", "--tag KEY=VALUE"]),
        (CloudError, client_error("Odd", "two\nlines  here"), ["rent (ec2:RunInstances): Odd: two lines here"]),
        (CloudError, ValueError(""), ["rent (ec2:RunInstances): ValueError"]),
    ],
)
def test_explain_error_is_one_line_with_the_next_command(
    kind: type, error: Exception, parts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "my corp")
    explained = explain_error(error, "rent (ec2:RunInstances)")
    assert type(explained) is kind and "\n" not in str(explained) and len(str(explained)) < 500
    for part in parts:
        assert part in str(explained)
