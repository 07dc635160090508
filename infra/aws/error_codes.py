"""Errors of AWS: what each error code means for us, and how an error reads in one line.

Decisions go by the error's code, not by its text, to which botocore appends; `FREE_PLAN_CODE` is the exception.
Sources: AWS, "Error codes for the Amazon EC2 API"; the code of SkyPilot, ParallelCluster and Karpenter.
"""

import os
import re
import shlex
from enum import Enum

from botocore import exceptions as boto
from botocore.parsers import ResponseParserError

from infra.errors import CloudError, NoAnswer, NoCredentials


class ErrorKind(Enum):
    """What an error code means, and what to do next."""

    NO_CAPACITY = "the place has too few free machines: try the next place"
    QUOTA_EXCEEDED = "the account's quota is too small: skip all places of this quota"
    THROTTLED = "too many calls: repeat the call later"
    OUTCOME_UNKNOWN = "the call may have been executed: repeat it with the same client token"
    NOT_VISIBLE_YET = "a resource that was just created is not visible yet: repeat the call soon"
    IN_USE = "another resource must end first: repeat the call later"
    ALREADY_EXISTS = "the resource exists: check whether it has the stack tag"
    NOT_FOUND = "the resource does not exist"
    PLACE_UNSUITABLE = "the place cannot have such machines: never try it again for this job"
    PERMANENT = "a repeated call would fail again: report the error"


_CODES_BY_KIND = {
    ErrorKind.NO_CAPACITY: (
        "InsufficientInstanceCapacity UnfulfillableCapacity InsufficientCapacity InsufficientHostCapacity "
        "InsufficientReservedInstanceCapacity ReservationCapacityExceeded InsufficientCapacityOnHost "
        "Server.InsufficientInstanceCapacity SpotMaxPriceTooLow"
    ),
    # "Unsupported" is also said of a type that one zone cannot place just now, with or without the word "zone".
    ErrorKind.PLACE_UNSUITABLE: (
        "Unsupported UnsupportedOperation InsufficientFreeAddressesInSubnet NoFreeAddressesInSubnet"
    ),
    ErrorKind.QUOTA_EXCEEDED: (
        "MaxSpotInstanceCountExceeded VcpuLimitExceeded InstanceLimitExceeded MaxFleetCountExceeded "
        "SpotInstanceCountExceeded"
    ),
    ErrorKind.THROTTLED: (
        "RequestLimitExceeded EC2ThrottledException Throttling ThrottlingException ThrottledException "
        "TooManyRequestsException SlowDown RequestThrottled RequestThrottledException BandwidthLimitExceeded"
    ),
    ErrorKind.OUTCOME_UNKNOWN: (
        "InternalError InternalFailure Unavailable ServiceUnavailable InternalServerError 500 503"
    ),
    ErrorKind.NOT_VISIBLE_YET: (
        "InvalidInstanceID.NotFound InvalidGroup.NotFound InvalidSubnetID.NotFound InvalidKeyPair.NotFound "
        "InvalidPlacementGroup.Unknown InvalidSpotInstanceRequestID.NotFound InvalidAllocationID.NotFound "
        "InvalidElasticIpID.NotFound SubnetNotFound SecurityGroupNotFound"
    ),
    ErrorKind.IN_USE: (
        "InvalidPlacementGroup.InUse DependencyViolation FileSystemInUse IncorrectFileSystemLifeCycleState "
        "IncorrectMountTargetState DeleteConflict InvalidIPAddress.InUse Resource.AlreadyAssociated.InUse "
        "VolumeInUse IncorrectState IncorrectInstanceState"
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
        "InvalidPermission.NotFound InvalidVolume.NotFound InvalidAddress.NotFound InvalidAddressID.NotFound "
        "NatGatewayNotFound InvalidRouteTableId.NotFound InvalidNetworkInterfaceID.NotFound InvalidGatewayID.NotFound "
        "InvalidNatGatewayID.NotFound"
    ),
}
KIND_BY_CODE = {code: kind for kind, codes in _CODES_BY_KIND.items() for code in codes.split()}
_AUTHENTICATION = (
    "AuthFailure InvalidClientTokenId SignatureDoesNotMatch ExpiredToken RequestExpired ExpiredTokenException "
    "UnrecognizedClientException InvalidAccessKeyId OptInRequired InvalidToken TokenRefreshRequired Blocked "
    "PendingVerification"
)
AUTHENTICATION_CODES = _AUTHENTICATION.split()
# Those that say of a launch that the terms of an image are not accepted, or that the account is not verified yet.
LAUNCH_REFUSAL_CODES = ("OptInRequired", "PendingVerification", "Blocked")
DISABLED_REGION_CODES = ("AuthFailure", "InvalidClientTokenId")  # a region that is not enabled refuses all credentials
DENIED_CODES = ("UnauthorizedOperation", "AccessDenied", "AccessDeniedException", "UnauthorizedAccess")
# Errors of botocore without a code of AWS: a login in a browser that has ended, and keys that cannot be had otherwise.
LOGIN_ERRORS = (boto.SSOError, boto.TokenRetrievalError, boto.LoginError, boto.NoAuthTokenError)
CREDENTIAL_ERRORS = (
    boto.CredentialRetrievalError,
    boto.UnknownCredentialError,
    boto.InvalidConfigError,
    boto.MissingDependencyException,
)
EXPIRED_KEYS = "refreshed credentials are still expired"  # botocore's words
# Calls by which botocore itself gets the keys of a profile. This program makes none of them.
KEY_CALLS = ("AssumeRole", "AssumeRoleWithWebIdentity", "GetRoleCredentials", "CreateOAuth2Token")
# A denial that our policy does not lift (AWS, "Troubleshoot access denied error messages"): of an organization, say.
OTHER_POLICY = re.compile(r"explicit deny|because no (?!identity-based|resource-based)")
MISSING_SPOT_ROLE_CODE = "ServiceLinkedRoleCreationNotPermitted"
TAG_POLICY_CODE = "TagPolicyViolation"
FREE_PLAN_CODE = "FreePlan"  # ours: AWS says it in the text alone, and its code is that of many other errors
NETWORKS_QUOTA = "L-F678F1CE"  # VPCs in a region, a quota of the service vpc; all others of ours are EC2's
# Refusals of a launch that concern the account, the caller or the key of all machines: every place would answer so.
# Any other refusal that is not known concerns the place that was asked.
ACCOUNT_CODES = (
    *AUTHENTICATION_CODES,
    *DENIED_CODES,
    TAG_POLICY_CODE,
    FREE_PLAN_CODE,
    MISSING_SPOT_ROLE_CODE,
    "AuthFailure.ServiceLinkedRoleCreationNotPermitted",
    "AccountDisabled",
    "IncompleteSignature",
    "InvalidKeyPair.NotFound",
    "MissingAuthenticationToken",
)


def get_error_code(error: Exception) -> str:
    """Return AWS's code of an error, "" when the error does not come from AWS."""
    if isinstance(error, CloudError):
        return error.code
    code = str(error.response.get("Error", {}).get("Code", "")) if isinstance(error, boto.ClientError) else ""
    return FREE_PLAN_CODE if code == "InvalidParameterCombination" and "Free Tier" in str(error) else code


def classify_error(error: Exception) -> ErrorKind:
    """Return what an error of boto3 means. When the response was lost, the outcome of the call is unknown."""
    if isinstance(error, boto.ClientError):
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        default_kind = ErrorKind.OUTCOME_UNKNOWN if status >= 500 else ErrorKind.PERMANENT
        return KIND_BY_CODE.get(get_error_code(error), default_kind)
    lost_response = (boto.ConnectionError, boto.HTTPClientError, ResponseParserError)
    return ErrorKind.OUTCOME_UNKNOWN if isinstance(error, lost_response) else ErrorKind.PERMANENT


def explain_error(error: Exception, action: str) -> CloudError:
    """Return an error of boto3 as one line: what could not be done, why, and what to type next."""
    if isinstance(error, CloudError):
        return error
    code = get_error_code(error)
    message = str(error.response["Error"].get("Message", "") if isinstance(error, boto.ClientError) else error)
    message = " ".join(message.split())
    reason = _shorten(message)
    if isinstance(error, boto.NoCredentialsError | boto.PartialCredentialsError):
        return NoCredentials(
            "AWS: no credentials; type: aws configure, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    if isinstance(error, LOGIN_ERRORS):
        login = "login" if isinstance(error, boto.LoginError) else "sso login"
        return NoCredentials(f"AWS: the login has ended ({reason}); type: aws {login}{_profile_option()}")
    if isinstance(error, boto.RefreshWithMFAUnsupportedError):
        return mfa_refusal()
    if EXPIRED_KEYS in message:  # as AWS_CREDENTIAL_EXPIRATION tells, for example
        return NoCredentials(
            "AWS: the keys have expired, and there are no newer ones; get new ones as you got these; "
            "see: aws sts get-caller-identity"
        )
    if isinstance(error, CREDENTIAL_ERRORS):
        return NoCredentials(f"AWS: no credentials ({reason}); see: aws sts get-caller-identity")
    if isinstance(error, boto.ProfileNotFound | boto.ConfigParseError):
        return NoCredentials(f"AWS: {message}; see: aws configure list")
    if MISSING_SPOT_ROLE_CODE in code:
        return CloudError(
            f"{action}: the account has no service role for spot instances yet; "
            "type: aws iam create-service-linked-role --aws-service-name spot.amazonaws.com",
            code,
        )
    if code == "RequestTimeTooSkewed" or message.startswith(("Signature expired", "Signature not yet current")):
        return NoCredentials(f"AWS: the clock of this computer is wrong ({reason}); set it, by NTP for example")
    operation = error.operation_name if isinstance(error, boto.ClientError) else ""
    if operation == "RunInstances" and code in LAUNCH_REFUSAL_CODES:
        return CloudError(f"{action}: {code}: {reason}", code)
    if code in AUTHENTICATION_CODES:
        other_cause = ", or the region is not enabled for the account" if code in DISABLED_REGION_CODES else ""
        return NoCredentials(
            f"AWS does not accept the credentials{other_cause} ({code}: {message}); see: aws sts get-caller-identity"
        )
    if operation in KEY_CALLS and classify_error(error) is ErrorKind.PERMANENT:
        return NoCredentials(
            f"AWS: the profile's role cannot be assumed ({code}: {reason}); see: aws sts get-caller-identity"
        )
    if code in DENIED_CODES and OTHER_POLICY.search(message):
        return NoAnswer(
            f"{action}: a policy forbids it, whatever else permits it ({reason}); if the organization "
            "demands tags, pass them: --tag KEY=VALUE; else ask who administers the account or the organization",
            code,
        )
    if code == FREE_PLAN_CODE:
        return CloudError(
            f"{action}: the account is on AWS's Free plan, which has no such machines ({reason}); "
            "type: aws freetier upgrade-account-plan --account-plan-type PAID",
            code,
        )
    if code == TAG_POLICY_CODE:
        return CloudError(
            f"{action}: the organization's tag policy refuses it ({reason}); pass the tag as the "
            "policy wants it: --tag KEY=VALUE",
            code,
        )
    if code in DENIED_CODES:
        hint = "print the policy you need: imgnet-cluster check --iam"
        return NoAnswer(f"{action}: not permitted ({reason}); {hint}", code)
    if isinstance(error, boto.SSLError):
        return NoAnswer(
            f"{action}: what answers has no certificate of AWS ({reason}); behind a company's proxy, set "
            "AWS_CA_BUNDLE to the file of its certificates"
        )
    if isinstance(error, boto.ProxyConnectionError):
        return NoAnswer(f"{action}: {reason}; check HTTPS_PROXY")
    if isinstance(error, boto.EndpointConnectionError | boto.ConnectTimeoutError):
        return NoAnswer(f"{action}: AWS cannot be reached ({reason}); check the region's name and your network")
    return CloudError(f"{action}: {f'{code}: ' if code else ''}{reason or type(error).__name__}", code)


def quota_service(code: str) -> str:
    """Return the service whose quota has this code."""
    return "vpc" if code == NETWORKS_QUOTA else "ec2"


def quota_increase_command(region: str, code: str, value: int) -> str:
    """Return the shell command that requests a quota of this value."""
    return (
        f"aws service-quotas request-service-quota-increase --region {region} --service-code {quota_service(code)} "
        f"--quota-code {code} --desired-value {value}"
    )


def mfa_refusal() -> NoCredentials:
    """Return the error of a profile that wants a code from an MFA device: a job renews its keys without its user."""
    return NoCredentials(
        "AWS: the profile wants an MFA code, for which a job cannot ask; type: "
        f'eval "$(aws configure export-credentials{_profile_option()} --format env)", and unset AWS_PROFILE'
    )


def _profile_option() -> str:
    profile = os.environ.get("AWS_PROFILE")
    return f" --profile {shlex.quote(profile)}" if profile else ""


def _shorten(text: str) -> str:
    """Return at most 300 characters of a message, without the encoded text that AWS appends to a denial.

    That text has 1,500 characters, and only AWS can decode it. The end is kept: it says which policy denies.
    """
    text = text.partition(" Encoded authorization failure message")[0]
    return text if len(text) < 300 else f"{text[:150]} ... {text[-145:]}"


def may_succeed_later(error: CloudError) -> bool:
    """Whether EC2 may accept a call later that ended with this error. An error without a code is not from EC2."""
    return not error.code or KIND_BY_CODE.get(error.code) not in (None, ErrorKind.PLACE_UNSUITABLE)
