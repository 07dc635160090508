"""The account at AWS: clients of one region, made when first used.

`once` is for calls that cost money: botocore never repeats them by itself, for it would take a lack of capacity (HTTP
500) for a hiccup; what to repeat is decided above it, with the same client token. The others are patient.
"""

import contextlib
import getpass
import os
import socket
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, TypeVar

import boto3
from botocore.config import Config

from .errors import CloudError, ErrorKind, NoCredentials, classify_error, explain_error

PRICING_API_REGION = "us-east-1"  # the price list is served in three regions, this is one
CHECK_IP_URL = "https://checkip.amazonaws.com"
RETRY_CONFIG = Config(retries={"mode": "standard", "total_max_attempts": 8}, connect_timeout=10, read_timeout=60)
NO_RETRY_CONFIG = Config(retries={"mode": "standard", "total_max_attempts": 1}, connect_timeout=10, read_timeout=130)
CONSISTENCY_TIMEOUT_SECONDS, CONSISTENCY_POLL_SECONDS = 60.0, 2.0
Response = TypeVar("Response")
_client_lock = threading.Lock()  # boto3 sessions are not safe to make clients in several threads at once


class Account:
    """One account in one region. Raises `CloudError` when there is no region."""

    def __init__(self, region: str | None = None, profile: str | None = None) -> None:
        self._profile = profile  # the session's own says "default" for none, and would then ignore keys in variables
        with _explain_errors("AWS"):
            self._session = boto3.session.Session(profile_name=profile, region_name=region)
        found = self._session.region_name or os.environ.get("AWS_REGION")
        if not found:
            raise NoCredentials("AWS: no region; say one: --region us-east-1, or set AWS_REGION")
        self.region: str = found

    def in_region(self, region: str) -> "Account":
        """The same account in another region."""
        return self if region == self.region else Account(region, self._profile)

    def client(self, service: str, config: Config = RETRY_CONFIG, region: str | None = None) -> Any:
        """Return a new client. Raises `CloudError`."""
        with _explain_errors("AWS"), _client_lock:
            return self._session.client(service, region_name=region or self.region, config=config)

    @cached_property
    def ec2(self) -> Any:
        """EC2, patient: to look, and to end things."""
        return self.client("ec2")

    @cached_property
    def ec2_no_retry(self) -> Any:
        """EC2, each call once: to rent machines."""
        return self.client("ec2", NO_RETRY_CONFIG)

    @cached_property
    def efs(self) -> Any:
        """The file systems."""
        return self.client("efs")

    @cached_property
    def iam(self) -> Any:
        """Roles and policies, the same in all regions."""
        return self.client("iam")

    @cached_property
    def ssm(self) -> Any:
        """Parameters: which machine image is the newest."""
        return self.client("ssm")

    @cached_property
    def s3(self) -> Any:
        """Buckets."""
        return self.client("s3")

    @cached_property
    def quotas(self) -> Any:
        """How much the account may have."""
        return self.client("service-quotas")

    @cached_property
    def pricing(self) -> Any:
        """The price list."""
        return self.client("pricing", region=PRICING_API_REGION)

    @cached_property
    def identity(self) -> tuple[str, str]:
        """The account's number and who we are in it. Raises `NoCredentials`, `CloudError`."""
        said = call("who am I (sts:GetCallerIdentity)", self.client("sts").get_caller_identity)
        return said["Account"], said["Arn"]

    @property
    def owner(self) -> str:
        """Who we are, as the tag of a machine says it: the last word of the ARN, and the person at this computer."""
        return f"{self.identity[1].rpartition('/')[2] or self.identity[1]} {getpass.getuser()}"[:250]


@contextlib.contextmanager
def _explain_errors(action: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise explain_error(error, action) from error


def call(action: str, function: Callable[..., Response], **params: Any) -> Response:
    """Call boto3. `what` is what it is for, as its error will say it. Raises `CloudError`."""
    with _explain_errors(action):
        return function(**params)


def call_with_retry(
    action: str,
    function: Callable[..., Response],
    *,
    retry_on: tuple[ErrorKind, ...] = (ErrorKind.NOT_VISIBLE_YET,),
    timeout_seconds: float = CONSISTENCY_TIMEOUT_SECONDS,
    pause: Callable[[float], None] = time.sleep,
    **params: Any,
) -> Response:
    """Call boto3 again and again while what it needs is not seen yet, or still in use (`on`). Raises `CloudError`."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            return function(**params)
        except Exception as error:
            if classify_error(error) not in retry_on or time.monotonic() > deadline:
                raise explain_error(error, action) from error
            pause(CONSISTENCY_POLL_SECONDS)


def paginate(action: str, client: Any, operation: str, result_key: str, **params: Any) -> list[dict[str, Any]]:
    """Return all items of an operation that answers in pages. Raises `CloudError`."""
    with _explain_errors(action):
        found: list[dict[str, Any]] = []
        for page in client.get_paginator(operation).paginate(**params):
            found += page.get(result_key, [])
        return found


def get_public_address() -> str:
    """Return the address by which the world sees this computer, as a /32. Raises `CloudError`.

    Where the endpoint is not AWS's own (AWS_ENDPOINT_URL), it is the address that faces that endpoint.
    """
    endpoint = os.environ.get("AWS_ENDPOINT_URL")
    try:
        if endpoint:
            place = urllib.parse.urlsplit(endpoint)
            with socket.create_connection((place.hostname or "", place.port or 443), 5) as one:
                text = str(one.getsockname()[0])
        else:
            with urllib.request.urlopen(CHECK_IP_URL, timeout=5) as said:
                text = said.read(64).decode().strip()
        return f"{socket.inet_ntoa(socket.inet_aton(text))}/32"
    except OSError as error:
        raise CloudError(
            f"this computer's address, from which alone ssh will be let in, is not known ({error}); "
            "say it: --from 203.0.113.7/32"
        ) from error
