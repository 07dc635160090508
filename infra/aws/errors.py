"""What AWS answers when it does not do what was asked, and what that means for us.

Matched on the code of the error, never on its text (botocore appends to that). Sources: AWS, "Error codes for the
Amazon EC2 API"; what SkyPilot, ParallelCluster and Karpenter do with them.
"""

from enum import Enum
from typing import Any

from botocore import exceptions as boto
from botocore.parsers import ResponseParserError


class CloudError(Exception):
    """Something at AWS that a person can mend, in one line; `code` is AWS's own word for it, "" when it has none."""

    def __init__(self, text: str, code: str = "") -> None:
        super().__init__(text)
        self.code = code


class NoCredentials(CloudError):
    """There are no keys, or no region, or AWS does not accept the keys (any more)."""


class Interrupted(CloudError):
    """The job is to stop: whoever waits for machines gives up."""


class ErrorKind(Enum):
    """What to do after an error."""

    NO_CAPACITY = "there are not enough machines there now: the next place"
    QUOTA_EXCEEDED = "the account may not have so many: skip all places of this quota"
    PRICE_TOO_LOW = "the price is above what was offered: the next place"
    THROTTLED = "too many calls: the same again, later"
    OUTCOME_UNKNOWN = "nobody knows whether it was done: the same again, with the same token"
    NOT_VISIBLE_YET = "something just made is not seen yet: the same again, soon"
    IN_USE = "something else must end first: the same again, later"
    ALREADY_EXISTS = "it is there already: look whose it is"
    NOT_FOUND = "it is not there"
    NO_FREE_ADDRESSES = "no free addresses: the next subnet"
    PERMANENT = "it would go wrong again: say so"


_CODES_BY_KIND = {
    ErrorKind.NO_CAPACITY: (
        "InsufficientInstanceCapacity UnfulfillableCapacity InsufficientCapacity InsufficientHostCapacity "
        "InsufficientReservedInstanceCapacity ReservationCapacityExceeded InsufficientCapacityOnHost "
        "Server.InsufficientInstanceCapacity Unsupported"
    ),
    ErrorKind.PRICE_TOO_LOW: "SpotMaxPriceTooLow",
    ErrorKind.QUOTA_EXCEEDED: (
        "MaxSpotInstanceCountExceeded VcpuLimitExceeded InstanceLimitExceeded MaxFleetCountExceeded "
        "SpotInstanceCountExceeded"
    ),
    ErrorKind.THROTTLED: (
        "RequestLimitExceeded EC2ThrottledException Throttling ThrottlingException ThrottledException "
        "TooManyRequestsException SlowDown"
    ),
    ErrorKind.OUTCOME_UNKNOWN: "InternalError InternalFailure Unavailable ServiceUnavailable InternalServerError 500 503",
    ErrorKind.NOT_VISIBLE_YET: (
        "InvalidInstanceID.NotFound InvalidGroup.NotFound InvalidSubnetID.NotFound InvalidKeyPair.NotFound "
        "InvalidPlacementGroup.Unknown InvalidSpotInstanceRequestID.NotFound InvalidAllocationID.NotFound"
    ),
    ErrorKind.IN_USE: (
        "InvalidPlacementGroup.InUse DependencyViolation FileSystemInUse IncorrectFileSystemLifeCycleState "
        "IncorrectMountTargetState DeleteConflict InvalidIPAddress.InUse Resource.AlreadyAssociated.InUse "
        "VolumeInUse"
    ),
    ErrorKind.ALREADY_EXISTS: (
        "InvalidGroup.Duplicate InvalidPermission.Duplicate RouteAlreadyExists Resource.AlreadyAssociated "
        "InvalidKeyPair.Duplicate InvalidPlacementGroup.Duplicate InvalidSubnet.Conflict FileSystemAlreadyExists "
        "MountTargetConflict EntityAlreadyExists LimitExceeded.AlreadyExists BucketAlreadyOwnedByYou "
        "AccessPointAlreadyExists"
    ),
    ErrorKind.NOT_FOUND: (
        "InvalidGroupId.NotFound InvalidVpcID.NotFound InvalidInternetGatewayID.NotFound InvalidRouteTableID.NotFound "
        "FileSystemNotFound MountTargetNotFound NoSuchEntity InvalidVpcEndpointId.NotFound NoSuchBucket "
        "PolicyNotFound AccessPointNotFound Gateway.NotAttached InvalidAssociationID.NotFound "
        "InvalidPermission.NotFound InvalidVolume.NotFound InvalidAddress.NotFound InvalidAddressID.NotFound"
    ),
    ErrorKind.NO_FREE_ADDRESSES: "InsufficientFreeAddressesInSubnet NoFreeAddressesInSubnet",
}
KIND_BY_CODE = {code: reaction for reaction, codes in _CODES_BY_KIND.items() for code in codes.split()}
AUTHENTICATION_CODES = (
    "AuthFailure", "InvalidClientTokenId", "SignatureDoesNotMatch", "ExpiredToken", "RequestExpired",
    "ExpiredTokenException", "UnrecognizedClientException", "InvalidAccessKeyId", "OptInRequired", "Blocked",
    "PendingVerification",
)  # fmt: skip
DENIED_CODES = ("UnauthorizedOperation", "AccessDenied", "AccessDeniedException", "UnauthorizedAccess")
MISSING_SPOT_ROLE_CODE = "ServiceLinkedRoleCreationNotPermitted"


def get_error_code(error: Exception) -> str:
    """Return AWS's code of an error, "" when it came from elsewhere."""
    if isinstance(error, CloudError):
        return error.code
    return str(error.response.get("Error", {}).get("Code", "")) if isinstance(error, boto.ClientError) else ""


def classify_error(error: Exception) -> ErrorKind:
    """Return what to do after an error of boto3. A lost answer means that nobody knows whether it was done."""
    if isinstance(error, boto.ClientError):
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        unknown = ErrorKind.OUTCOME_UNKNOWN if status >= 500 else ErrorKind.PERMANENT
        return KIND_BY_CODE.get(get_error_code(error), unknown)
    lost = (boto.ConnectionError, boto.HTTPClientError, ResponseParserError)
    return ErrorKind.OUTCOME_UNKNOWN if isinstance(error, lost) else ErrorKind.PERMANENT


def explain_error(error: Exception, action: str) -> CloudError:
    """Return an error of boto3 as one line: what could not be done, why, what to type next."""
    if isinstance(error, CloudError):
        return error
    code, said = get_error_code(error), " ".join(str(error).split())
    if isinstance(error, boto.NoCredentialsError | boto.PartialCredentialsError | boto.CredentialRetrievalError):
        return NoCredentials(
            "AWS: no credentials; type: aws configure, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    if isinstance(error, boto.ProfileNotFound | boto.ConfigParseError):
        return NoCredentials(f"AWS: {said}; see: aws configure list")
    if isinstance(error, boto.NoRegionError):
        return NoCredentials("AWS: no region; say one: --region us-east-1, or set AWS_REGION")
    if isinstance(error, boto.ClientError):
        said = " ".join(str(error.response["Error"].get("Message", "")).split())
    if MISSING_SPOT_ROLE_CODE in code:
        return CloudError(
            f"{action}: the account has no role for spot machines yet; "
            "type: aws iam create-service-linked-role --aws-service-name spot.amazonaws.com",
            code,
        )
    if code in AUTHENTICATION_CODES:
        return NoCredentials(f"AWS does not accept the credentials ({code}: {said}); see: aws sts get-caller-identity")
    if code in DENIED_CODES:
        return CloudError(
            f"{action}: not permitted ({_shorten(said)}); the least policy: imgnet-cluster check --iam", code
        )
    if isinstance(error, boto.EndpointConnectionError | boto.ConnectTimeoutError):
        return CloudError(f"{action}: AWS cannot be reached ({_shorten(said)}); is the region right, the network up?")
    return CloudError(f"{action}: {f'{code}: ' if code else ''}{_shorten(said) or type(error).__name__}", code)


def _shorten(text: str) -> str:
    """Without the encoded message that AWS appends to a denial: 1500 letters that only AWS can read."""
    text = text.partition(" Encoded authorization failure message")[0]
    return text if len(text) < 300 else text[:297] + "..."


def error_to_dict(error: Exception) -> dict[str, Any]:
    """Return an error as plain data for a journal."""
    return {"code": get_error_code(error), "said": _shorten(" ".join(str(error).split()))}
