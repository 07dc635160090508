"""The simulated cloud in the test's own process: `cloud` for tests of the cloud itself, `front` for tests of our code.

A test file imports `cloud` and `served`; a conftest.py imports `front` and `front_of_session`.
"""

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import boto3
import botocore.loaders
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError
from support.simcloud.cloud import SimulatedAws
from support.simcloud.fixture import IMAGE
from support.simcloud.http_server import AwsFrontend, serve
from support.simcloud.machines import new_login

from infra.aws.client import Account

# Without this, each session reads EC2's service model again, in 0.3 s.
SHARED_LOADER = functools.cache(botocore.loaders.create_loader)
START = 1_795_291_200.0  # 2026-11-21 20:00:00 GMT


class Cloud:
    """A cloud with a clock that stands still until the test moves it."""

    def __init__(self, sim: SimulatedAws, front: AwsFrontend, url: str) -> None:
        self.sim = sim
        self.front = front
        self.url = url
        self.ec2 = self.client("ec2")
        self.image = self.client("ssm").get_parameter(Name=IMAGE)["Parameter"]["Value"]

    def client(self, service: str) -> Any:
        """Return a client of us-east-1 that does not retry."""
        return boto3.client(
            service,
            region_name="us-east-1",
            endpoint_url=self.url,
            config=Config(retries={"total_max_attempts": 1}),
            aws_access_key_id="key",
            aws_secret_access_key="secret",
        )

    def launch(self, count: int = 1, **changes: Any) -> list[str]:
        """Launch instances, g5.xlarge unless the changes say otherwise, and return their ids."""
        arguments = {
            "ImageId": self.image,
            "InstanceType": "g5.xlarge",
            "MinCount": count,
            "MaxCount": count,
            **changes,
        }
        return [instance["InstanceId"] for instance in self.ec2.run_instances(**arguments)["Instances"]]

    def state(self, id: str) -> str:
        """Return the state of an instance, as DescribeInstances says it."""
        reservations = self.ec2.describe_instances(InstanceIds=[id])["Reservations"]
        return str(reservations[0]["Instances"][0]["State"]["Name"])

    def network(self, zone: str = "us-east-1a") -> tuple[str, str, str]:
        """Create a VPC. Returns the ids of network, subnet and security group."""
        vpc = self.ec2.create_vpc(CidrBlock="10.7.0.0/16")["Vpc"]["VpcId"]
        subnet = self.ec2.create_subnet(VpcId=vpc, CidrBlock="10.7.0.0/20", AvailabilityZone=zone)["Subnet"]["SubnetId"]
        group = self.ec2.create_security_group(GroupName="ours", Description="d", VpcId=vpc)["GroupId"]
        return vpc, subnet, group


def refused(call: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[str, int]:
    """Make a call that must end with an error. Returns the error's code and its HTTP status."""
    with pytest.raises(ClientError) as caught:
        call(*arguments, **options)
    response = caught.value.response
    return str(response["Error"]["Code"]), int(response["ResponseMetadata"]["HTTPStatusCode"])


@pytest.fixture(scope="module")
def served() -> Iterator[Cloud]:
    """One server for the tests of a file."""
    sim = SimulatedAws(new_login())
    # No thread ticks: it might still be sending an event to a listener when a call returns.
    sim.ticking = True  # type: ignore[attr-defined]
    server, url = serve(sim=sim)
    yield Cloud(sim, server.front, url)
    server.shutdown()
    server.server_close()


@pytest.fixture
def cloud(served: Cloud) -> Iterator[Cloud]:
    """An empty cloud at 20:00."""
    served.front.reset()
    served.sim.clock = lambda: START
    served.sim.listeners = []
    served.sim.errors = []
    yield served
    assert not served.sim.errors, served.sim.errors


@functools.cache
def account_at(url: str, region: str) -> Account:
    """Return an account for the simulated AWS at an address. It is kept, because its clients take long to create."""
    return Account(region)


def shared_account(region: str = "us-east-1") -> Account:
    """Return an account for the simulated AWS of this process. Tests must not change it, nor its clients."""
    return account_at(os.environ["AWS_ENDPOINT_URL"], region)


@pytest.fixture(scope="session")
def front_of_session() -> Iterator[tuple[AwsFrontend, str]]:
    """The server of the simulated EC2, and its URL."""
    server, url = serve(sim=SimulatedAws())
    yield server.front, url
    server.shutdown()
    server.server_close()


@pytest.fixture
def front(front_of_session: tuple[AwsFrontend, str], monkeypatch: pytest.MonkeyPatch) -> AwsFrontend:
    """An empty simulated EC2 that boto3 in this process talks to. `front.sim` is the cloud behind it."""
    front, url = front_of_session
    for name in ("AWS_PROFILE", "AWS_DEFAULT_REGION", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("botocore.session.create_loader", SHARED_LOADER)
    front.reset()
    return front
