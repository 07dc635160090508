"""An AWS account in one region: boto3 clients that are created on first use, and helpers that call them.

Calls that rent machines go through `Account.ec2_no_retry`. botocore must not repeat them by itself: it would take a
lack of capacity (HTTP 500) for a transient error. The code above decides what to repeat, with the same client token.
All other clients retry up to eight times.
"""

import contextlib
import email.utils
import getpass
import logging
import os
import re
import socket
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, TypeVar

from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, CredentialRetrievalError, NoCredentialsError
from botocore.loaders import Loader

from infra.errors import NoAnswer, NoCredentials
from train.tools import host
from train.tools.errors import one_line_error

from .error_codes import ErrorKind, classify_error, explain_error, mfa_refusal
from .tags import Resource, Tags, make_filters

logger = logging.getLogger(__name__)

PRICING_API_REGION = "us-east-1"  # one of the three regions that serve the price list
CHECK_IP_URL = "https://checkip.amazonaws.com"
RETRY_CONFIG = Config(retries={"mode": "standard", "total_max_attempts": 8}, connect_timeout=10, read_timeout=60)
NO_RETRY_CONFIG = Config(retries={"mode": "standard", "total_max_attempts": 1}, connect_timeout=10, read_timeout=130)
QUICK_CONFIG = Config(retries={"mode": "standard", "total_max_attempts": 2}, connect_timeout=5, read_timeout=10)
MAX_CLOCK_ERROR_SECONDS = 20.0  # by which our clock may differ from AWS's: a Date has whole seconds and takes a way
CONSISTENCY_TIMEOUT_SECONDS = 60.0  # how long AWS may take to show in one call what another call has created
CONSISTENCY_POLL_SECONDS = 2.0
SESSION_TIME = r"\d{9}"  # in the name of a role's session, such as botocore-session-1764374221
Response = TypeVar("Response")
Client = Any  # boto3 makes the methods of its clients at run time and ships no types
_client_lock = threading.Lock()  # a boto3 session must not create clients in several threads at once
_loader = Loader()  # of the descriptions of AWS's services, for the accounts of all regions: EC2's takes 0.1 s to read


def _client_property(service: str, config: Config = RETRY_CONFIG) -> "cached_property[Client]":
    """Return a cached property of `Account` that creates the boto3 client of a service on first use."""
    return cached_property(lambda account: account.client(service, config))


class Account:
    """An AWS account in one region. Raises `NoCredentials` when no region is set."""

    def __init__(self, region: str | None = None) -> None:
        import boto3  # late: offline planning imports this module and does without

        with _explain_errors("AWS"):
            # boto3 itself knows AWS_DEFAULT_REGION and the profile's region, which come after AWS_REGION.
            region = region or os.environ.get("AWS_REGION") or None
            self._session = boto3.session.Session(region_name=region)
            self._session._session.register_component("data_loader", _loader)
            _forbid_questions(self._session)
            _guard_keys(self._session)
            _follow_clock(self._session)
        if not self._session.region_name:
            with _explain_errors("AWS"):
                has_credentials = self._session.get_credentials() is not None
            more = "" if has_credentials else "; there are no credentials either; type: aws configure"
            raise NoCredentials(f"AWS: no region is set; pass --region us-east-1, or set AWS_REGION{more}")
        self.region: str = self._session.region_name

    def in_region(self, region: str) -> "Account":
        """Return the same account in another region."""
        return self if region == self.region else Account(region)

    def require_credentials(self) -> None:
        """Raise `NoCredentials` when no credentials are found. AWS is not asked whether it accepts them."""
        with _explain_errors("AWS"):
            if self._session.get_credentials() is None:
                raise NoCredentialsError

    def client(self, service: str, config: Config = RETRY_CONFIG, region: str | None = None) -> Client:
        """Return a new boto3 client of a service. Raises `CloudError`."""
        with _explain_errors("AWS"), _client_lock:
            return self._session.client(service, region_name=region or self.region, config=config)

    ec2 = _client_property("ec2")  # with retries: describes and terminates
    ec2_no_retry = _client_property("ec2", NO_RETRY_CONFIG)  # sends each call once: rents machines
    instance_connect = _client_property("ec2-instance-connect")  # lets a key log in to a machine that does not know it
    efs = _client_property("efs")
    iam = _client_property("iam")  # the same in all regions
    ssm = _client_property("ssm")  # its public parameters name the newest machine images
    s3 = _client_property("s3")
    quotas = _client_property("service-quotas")
    cloudwatch = _client_property("cloudwatch", QUICK_CONFIG)

    @cached_property
    def identity(self) -> tuple[str, str]:
        """The account number, and the ARN of the caller. Raises `NoCredentials`, `CloudError`."""
        return self._ask_identity(RETRY_CONFIG)

    def require_answer(self) -> None:
        """Raise `NoAnswer` or `NoCredentials` within seconds if AWS does not answer. Other calls repeat for longer."""
        self.identity = self._ask_identity(QUICK_CONFIG)

    def _ask_identity(self, config: Config) -> tuple[str, str]:
        response = call("look up the caller (sts:GetCallerIdentity)", self.client("sts", config).get_caller_identity)
        return response["Account"], response["Arn"]

    @property
    def owner(self) -> str:
        """The owner tag of what we create: the last part of the caller's ARN, then the user name on this computer.

        In the characters that all services take in tags. EC2 alone would take any, such as DOMAIN\\user. A session of a
        role that is named after a time, as botocore and others do, has another name in each process: then the role.
        """
        *parts, name = self.identity[1].split("/")
        owner = parts[-1] if parts and re.search(SESSION_TIME, name) else name
        return re.sub(r"[^\w .:/=+@-]", "_", f"{owner} {getpass.getuser()}")[:250]


@contextlib.contextmanager
def _explain_errors(action: str) -> Iterator[None]:
    """Raise every error of the block as a one-line `CloudError` that begins with `action`."""
    try:
        yield
    except Exception as error:
        raise explain_error(error, action) from error


def call(action: str, function: Callable[..., Response], **params: object) -> Response:
    """Call a boto3 function once. `action` names the purpose in its error. Raises `CloudError`."""
    with _explain_errors(action):
        return function(**params)


def call_with_retry(
    action: str,
    function: Callable[..., Response],
    *,
    retry_on: tuple[ErrorKind, ...] = (ErrorKind.NOT_VISIBLE_YET,),
    timeout_seconds: float = CONSISTENCY_TIMEOUT_SECONDS,
    **params: object,
) -> Response:
    """Call a boto3 function, and repeat the call every 2 s while its error is one of `retry_on`.

    Raises `CloudError` for every other error, and for the last one when `timeout_seconds` have passed. A resource that
    is in use is logged.
    """
    deadline = time.monotonic() + timeout_seconds
    is_waiting = False
    while True:
        try:
            return function(**params)
        except Exception as error:
            kind = classify_error(error)
            if kind not in retry_on or time.monotonic() > deadline:
                raise explain_error(error, action) from error
            if kind is ErrorKind.IN_USE and not is_waiting:
                is_waiting = True
                logger.info(f"{action} is still in use: waiting at most {timeout_seconds:.0f} s")
            time.sleep(CONSISTENCY_POLL_SECONDS)


def paginate(action: str, client: Client, operation: str, result_key: str, **params: object) -> list[Resource]:
    """Return all items of an operation: the lists under `result_key` of all its pages. Raises `CloudError`."""
    with _explain_errors(action):
        if client.can_paginate(operation):
            pages = client.get_paginator(operation).paginate(**params)
        else:
            pages = [getattr(client, operation)(**params)]
        return [item for page in pages for item in page.get(result_key, [])]


def list_tagged(account: Account, operation: str, tags: Tags, **filters: Sequence[str]) -> list[Resource]:
    """Return the EC2 resources of one kind that have these tags, as EC2 describes them. Raises `CloudError`.

    `operation` is that of boto3 ("describe_subnets"), and names the kind. `filters` are further filters, as of
    `make_filters`.
    """
    api_name = account.ec2.meta.method_to_api_mapping[operation]  # "DescribeSubnets"
    action = f"{operation.replace('_', ' ')} (ec2:{api_name})"
    result_key = api_name.removeprefix("Describe")
    return paginate(action, account.ec2, operation, result_key, Filters=make_filters(tags, **filters))


def _forbid_questions(session: Any) -> None:  # Any: boto3 ships no types
    """Let a profile that wants an MFA code fail: a supervisor would wait for the code in a window that nobody sees."""

    def refuse(_prompt: str) -> str:
        raise mfa_refusal()

    provider = session._session.get_component("credential_provider").get_provider("assume-role")
    provider._prompter = refuse


@contextlib.contextmanager
def _name_key_errors() -> Iterator[None]:
    """Raise what keeps botocore from getting keys as an error of its own, also of a profile's program or file.

    The program may be gone, for example, or may print something else than keys.
    """
    try:
        yield
    except (NoCredentials, BotoCoreError, ClientError):
        raise
    except Exception as error:
        raise CredentialRetrievalError(provider="environment or profile", error_msg=one_line_error(error)) from error


def _guard_keys(session: Any) -> None:  # Any: boto3 ships no types
    """Let the session get its keys within `_name_key_errors`, at once and when they are renewed."""
    resolver = session._session.get_component("credential_provider")
    load_credentials = resolver.load_credentials

    @_name_key_errors()
    def load() -> Any:
        if (credentials := load_credentials()) is not None:
            credentials.get_frozen_credentials = _name_key_errors()(credentials.get_frozen_credentials)
        return credentials

    resolver.load_credentials = load


def _follow_clock(session: Any) -> None:  # Any: boto3 ships no types
    """Let the clock of this process follow that of AWS, which each answer tells: nobody sets it.

    So limits of time and money hold although the clock of this computer is wrong, for example after a reboot.
    """

    def note_start(context: dict[str, float], **_: object) -> None:
        context["imgnet_start"] = host.seconds_since_boot()

    def compare(http_response: Any, context: dict[str, float], **_: object) -> None:
        answer_time = email.utils.parsedate_tz(http_response.headers.get("Date"))
        is_quick = host.seconds_since_boot() - context["imgnet_start"] < MAX_CLOCK_ERROR_SECONDS
        if answer_time and is_quick:  # a slow answer may have been on its way for long
            aws_time = float(email.utils.mktime_tz(answer_time))
            if abs(aws_time - host.unix_time()) > MAX_CLOCK_ERROR_SECONDS:
                host.steady_clock.set_time(aws_time)

    session.events.register("before-call", note_start)
    session.events.register("after-call", compare)


def get_public_address() -> str:
    """Return this computer's public IPv4 address as a /32 range. Raises `CloudError`.

    With an endpoint other than AWS's (AWS_ENDPOINT_URL) it is the address that faces that endpoint.
    """
    endpoint = os.environ.get("AWS_ENDPOINT_URL")
    try:
        if endpoint:
            url = urllib.parse.urlsplit(endpoint)
            with socket.create_connection((url.hostname or "", url.port or 443), 5) as connection:
                text = str(connection.getsockname()[0])
        else:
            with urllib.request.urlopen(CHECK_IP_URL, timeout=5) as response:
                text = response.read(64).decode().strip()
        return f"{socket.inet_ntoa(socket.inet_aton(text))}/32"
    except OSError as error:
        raise NoAnswer(
            f"cannot find this computer's public address, the only one that may use ssh ({error}); "
            "pass it: --from 203.0.113.7/32"
        ) from error
