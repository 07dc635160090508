"""The simulated cloud in the test's own process: `cloud` for tests of the cloud itself, `front` for tests of our code.

A conftest.py imports the fixtures that its tests use, and `front_of_session`.
"""

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import botocore.loaders
import pytest
from botocore.exceptions import ClientError
from support.aws_journal import user_data
from support.simcloud.__main__ import environment
from support.simcloud.cloud import SimulatedAws
from support.simcloud.fixture import IMAGE
from support.simcloud.http_server import AwsFrontend, serve
from support.simcloud.machines import new_login

from infra.aws.client import Account
from infra.aws.stack.key_pairs import generate_key_pair

# Without this, each session reads EC2's service model again, in 0.3 s.
SHARED_LOADER = functools.cache(botocore.loaders.create_loader)
START = 1_795_291_200.0  # 2026-11-21 20:00:00 GMT


class Cloud:
    """A cloud with a clock that stands still until the test moves it."""

    def __init__(self, front: AwsFrontend, url: str) -> None:
        self.sim = front.sim
        self.front = front
        self.url = url
        self.account = shared_account()
        self.ec2 = self.account.ec2_no_retry
        self.image = self.account.ssm.get_parameter(Name=IMAGE)["Parameter"]["Value"]

    def launch(self, count: int = 1, **changes: Any) -> list[str]:
        """Launch instances, g5.xlarge unless the changes say otherwise, and return their ids."""
        return launch(self.ec2, self.image, count, **changes)

    def state(self, id: str) -> str:
        reservations = self.ec2.describe_instances(InstanceIds=[id])["Reservations"]
        return str(reservations[0]["Instances"][0]["State"]["Name"])

    def network(self, zone: str = "us-east-1a") -> tuple[str, str, str]:
        """Create a VPC. Returns the ids of network, subnet and security group."""
        vpc = self.ec2.create_vpc(CidrBlock="10.7.0.0/16")["Vpc"]["VpcId"]
        subnet = self.ec2.create_subnet(VpcId=vpc, CidrBlock="10.7.0.0/20", AvailabilityZone=zone)["Subnet"]["SubnetId"]
        group = self.ec2.create_security_group(GroupName="ours", Description="d", VpcId=vpc)["GroupId"]
        return vpc, subnet, group


def launch(ec2: Any, image: str, count: int, **changes: Any) -> list[str]:
    arguments = {"ImageId": image, "InstanceType": "g5.xlarge", "MinCount": count, "MaxCount": count, **changes}
    return [instance["InstanceId"] for instance in ec2.run_instances(**arguments)["Instances"]]


def launch_machines(ec2: Any, image: str, count: int = 1) -> list[str]:
    """Launch instances with a key pair and user data, so that they have machines. Returns their ids."""
    private_key, public_key = generate_key_pair()
    ec2.import_key_pair(KeyName="mine", PublicKeyMaterial=public_key.encode())
    return launch(ec2, image, count, KeyName="mine", UserData=user_data(private_key, public_key))


def refused(call: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[str, int]:
    """Make a call that must end with an error. Returns the error's code and its HTTP status."""
    with pytest.raises(ClientError) as caught:
        call(*arguments, **options)
    response = caught.value.response
    return str(response["Error"]["Code"]), int(response["ResponseMetadata"]["HTTPStatusCode"])


@functools.cache
def account_at(url: str, region: str) -> Account:
    """Return an account for the simulated AWS at an address. It is kept, because its clients take long to create."""
    return Account(region)


def shared_account(region: str = "us-east-1") -> Account:
    """Return an account for the simulated AWS of this process. Tests must not change it, nor its clients."""
    return account_at(os.environ["AWS_ENDPOINT_URL"], region)


@pytest.fixture(scope="session")
def front_of_session() -> Iterator[tuple[AwsFrontend, str]]:
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
    no_files = dict.fromkeys(("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"), "/dev/null")
    for name, value in {**environment(url), **no_files}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("botocore.session.create_loader", SHARED_LOADER)
    front.reset()
    return front


@pytest.fixture
def cloud(front: AwsFrontend, front_of_session: tuple[AwsFrontend, str]) -> Iterator[Cloud]:
    """An empty cloud at 20:00, whose machines can be logged in to."""
    sim = front.sim
    image_login, sim.login = sim.login, new_login()
    sim.reset()
    sim.clock = lambda: START
    yield Cloud(front, front_of_session[1])
    sim.login, sim.machines = image_login, None
    errors, sim.errors = sim.errors, []
    assert not errors, errors
