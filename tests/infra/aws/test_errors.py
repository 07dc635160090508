"""What an answer of AWS means, by its code alone."""

from typing import Any

import pytest
from botocore import exceptions as boto
from botocore.parsers import ResponseParserError
from support.simcloud.http_server import Front

from infra.aws import errors
from infra.aws.client import ONCE, Account
from infra.aws.errors import CloudError, NoCredentials, Reaction, explain, reaction


def client_error(code: str, status: int = 400, message: str = "Said so.") -> boto.ClientError:
    said: Any = {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return boto.ClientError(said, "RunInstances")


@pytest.mark.parametrize(("code", "status", "meaning"), [
    ("InsufficientInstanceCapacity", 500, Reaction.CAPACITY), ("UnfulfillableCapacity", 400, Reaction.CAPACITY),
    ("InsufficientHostCapacity", 500, Reaction.CAPACITY), ("ReservationCapacityExceeded", 400, Reaction.CAPACITY),
    ("SpotMaxPriceTooLow", 400, Reaction.PRICE),
    ("MaxSpotInstanceCountExceeded", 400, Reaction.QUOTA), ("VcpuLimitExceeded", 400, Reaction.QUOTA),
    ("InstanceLimitExceeded", 400, Reaction.QUOTA), ("MaxFleetCountExceeded", 400, Reaction.QUOTA),
    ("RequestLimitExceeded", 503, Reaction.THROTTLED), ("EC2ThrottledException", 400, Reaction.THROTTLED),
    ("ThrottlingException", 400, Reaction.THROTTLED), ("TooManyRequestsException", 429, Reaction.THROTTLED),
    ("InternalError", 500, Reaction.UNKNOWN), ("Unavailable", 503, Reaction.UNKNOWN),
    ("SomethingNew", 502, Reaction.UNKNOWN), ("SomethingNew", 400, Reaction.STOP),
    ("InvalidInstanceID.NotFound", 400, Reaction.LATER), ("InvalidPlacementGroup.Unknown", 400, Reaction.LATER),
    ("InvalidPlacementGroup.InUse", 400, Reaction.BUSY), ("DependencyViolation", 400, Reaction.BUSY),
    ("InvalidPlacementGroup.Duplicate", 400, Reaction.THERE), ("InvalidVolume.NotFound", 400, Reaction.GONE),
    ("InsufficientFreeAddressesInSubnet", 400, Reaction.ADDRESSES),
    ("UnauthorizedOperation", 403, Reaction.STOP), ("ExpiredToken", 400, Reaction.STOP),
    ("InvalidAMIID.NotFound", 400, Reaction.STOP), ("AddressLimitExceeded", 400, Reaction.STOP),
    ("VolumeLimitExceeded", 400, Reaction.STOP), ("OperationNotPermitted", 400, Reaction.STOP),
    ("IdempotentParameterMismatch", 400, Reaction.STOP),
])  # fmt: skip
def test_a_code_has_one_meaning(code: str, status: int, meaning: Reaction) -> None:
    assert reaction(client_error(code, status)) is meaning
    assert reaction(client_error(code, status, "Insufficient capacity; RequestLimitExceeded")) is meaning


def test_no_code_has_two_meanings() -> None:
    codes = [code for words in errors._CODES.values() for code in words.split()]
    assert len(codes) == len(set(codes)) == len(errors.REACTIONS)
    assert not set(codes) & {*errors.AUTHENTICATION, *errors.DENIED}


@pytest.mark.parametrize("error", [
    boto.ConnectionClosedError(endpoint_url="u"), boto.ReadTimeoutError(endpoint_url="u"),
    boto.ConnectTimeoutError(endpoint_url="u"), boto.EndpointConnectionError(endpoint_url="u", error="e"),
    boto.ResponseStreamingError(error="e"), boto.SSLError(endpoint_url="u", error="e"), ResponseParserError("html"),
])  # fmt: skip
def test_after_a_lost_answer_nobody_knows(error: Exception) -> None:
    assert reaction(error) is Reaction.UNKNOWN


@pytest.mark.parametrize("error", [boto.NoCredentialsError(), boto.ParamValidationError(report="r"), ValueError("x"),
                                   CloudError("said", "InsufficientInstanceCapacity")])  # fmt: skip
def test_what_never_reached_aws_goes_wrong_again(error: Exception) -> None:
    assert reaction(error) is Reaction.STOP


@pytest.mark.parametrize("fault", [
    {"drop": True}, {"drop": True, "after": True}, {"code": "InternalError"}, {"code": "ServiceUnavailable"},
])  # fmt: skip
def test_answers_are_lost_for_real(front: Front, fault: dict[str, Any]) -> None:
    front.fault(action="DescribeVpcs", times=9, **fault)
    with pytest.raises((boto.ClientError, boto.BotoCoreError)) as caught:
        Account().client("ec2", ONCE).describe_vpcs()
    assert reaction(caught.value) is Reaction.UNKNOWN
    assert "\n" not in str(explain(caught.value, "look"))


@pytest.mark.parametrize(("error", "kind", "parts"), [
    (client_error("UnauthorizedOperation", 403, "You may not. Encoded authorization failure message: " + "x" * 900),
     CloudError, ["rent (ec2:RunInstances): not permitted (You may not.)", "imgnet-cluster check --iam"]),
    (client_error("ExpiredToken"), NoCredentials, ["ExpiredToken", "aws sts get-caller-identity"]),
    (client_error("AuthFailure", 401), NoCredentials, ["does not accept the credentials"]),
    (client_error("AuthFailure.ServiceLinkedRoleCreationNotPermitted", 403), CloudError,
     ["aws iam create-service-linked-role --aws-service-name spot.amazonaws.com"]),
    (client_error("Odd", 400, "two\nlines  here"), CloudError, ["rent (ec2:RunInstances): Odd: two lines here"]),
    (boto.NoCredentialsError(), NoCredentials, ["aws configure"]),
    (boto.ProfileNotFound(profile="p"), NoCredentials, ["aws configure list", "p"]),
    (boto.NoRegionError(), NoCredentials, ["--region us-east-1"]),
    (boto.EndpointConnectionError(endpoint_url="u", error="e"), CloudError, ["cannot be reached"]),
    (ValueError(""), CloudError, ["rent (ec2:RunInstances): ValueError"]),
])  # fmt: skip
def test_an_error_is_one_line_that_says_what_to_type(error: Exception, kind: type, parts: list[str]) -> None:
    said = explain(error, "rent (ec2:RunInstances)")
    assert type(said) is kind and "\n" not in str(said) and len(str(said)) < 500
    for part in parts:
        assert part in str(said)


def test_an_error_that_is_one_line_already_stays_so() -> None:
    once = CloudError("said", "Code")
    assert explain(once, "again") is once and errors.code_of(once) == "Code"
    assert errors.answer(client_error("Odd", 400, "y" * 999))["code"] == "Odd"
    assert len(errors.answer(client_error("Odd", 400, "y" * 999))["said"]) <= 300
