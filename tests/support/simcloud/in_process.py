"""The simulated cloud in the test's own process, for tests of itself: `from simcloud.in_process import cloud`."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError
from support.simcloud.cloud import Sim
from support.simcloud.http_server import Front, serve

NAME = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id"
START = 1_795_291_200.0  # 2026-11-21 20:00:00 GMT


class Cloud:
    """A cloud with a clock that stands still until the test moves it."""

    def __init__(self, sim: Sim, front: Front, url: str) -> None:
        self.sim, self.front, self.url = sim, front, url
        self.client = functools.cache(self._client)

    def _client(self, service: str, region: str = "us-east-1", **options: Any) -> Any:
        """A client that tries once."""
        config = Config(retries={"total_max_attempts": 1}, **options)
        keys = {"aws_access_key_id": "key", "aws_secret_access_key": "secret"}
        return boto3.client(service, region_name=region, endpoint_url=self.url, config=config, **keys)

    @property
    def ec2(self) -> Any:
        return self.client("ec2")

    def image(self, region: str = "us-east-1") -> str:
        """The image's number, as the public parameter tells it."""
        return str(self.client("ssm", region).get_parameter(Name=NAME)["Parameter"]["Value"])

    def request(self, **changes: Any) -> dict[str, Any]:
        """A request for one g5.xlarge, with changes; None takes a word out."""
        words = {"ImageId": self.image(), "InstanceType": "g5.xlarge", "MinCount": 1, "MaxCount": 1, **changes}
        return {name: value for name, value in words.items() if value is not None}

    def launch(self, number: int = 1, **changes: Any) -> list[str]:
        """Launch so many; their ids."""
        words = self.request(**{"MinCount": number, "MaxCount": number, **changes})
        return [one["InstanceId"] for one in self.ec2.run_instances(**words)["Instances"]]

    def instance(self, id: str) -> dict[str, Any]:
        """What DescribeInstances says of one."""
        found: dict[str, Any] = self.ec2.describe_instances(InstanceIds=[id])["Reservations"][0]["Instances"][0]
        return found

    def state(self, id: str) -> str:
        return str(self.instance(id)["State"]["Name"])

    def found(self, **filters: str) -> list[str]:
        """The ids that DescribeInstances finds by filters, with _ for -."""
        asked = [{"Name": name.replace("_", "-"), "Values": [value]} for name, value in filters.items()]
        pages = self.ec2.describe_instances(Filters=asked)["Reservations"]
        return [one["InstanceId"] for page in pages for one in page["Instances"]]

    def network(self, zone: str = "us-east-1a", public: bool = False) -> tuple[str, str, str]:
        """A VPC of its own: the ids of network, subnet, security group."""
        vpc = self.ec2.create_vpc(CidrBlock="10.7.0.0/16")["Vpc"]["VpcId"]
        subnet = self.subnet(vpc, zone)
        if public:
            self.ec2.modify_subnet_attribute(SubnetId=subnet, MapPublicIpOnLaunch={"Value": True})
        group = self.ec2.create_security_group(GroupName="ours", Description="d", VpcId=vpc)["GroupId"]
        return vpc, subnet, group

    def subnet(self, vpc: str, zone: str, block: str = "10.7.0.0/20") -> str:
        made = self.ec2.create_subnet(VpcId=vpc, CidrBlock=block, AvailabilityZone=zone)
        return str(made["Subnet"]["SubnetId"])


def refused(call: Callable[..., Any], *words: Any, **options: Any) -> tuple[str, int]:
    """The code and HTTP status of the error that a call must end with."""
    with pytest.raises(ClientError) as caught:
        call(*words, **options)
    answer = caught.value.response
    return str(answer["Error"]["Code"]), int(answer["ResponseMetadata"]["HTTPStatusCode"])


@pytest.fixture(scope="module")
def served() -> Iterator[Cloud]:
    """One server for a file of tests."""
    sim = Sim()
    sim.ticking = True  # type: ignore[attr-defined]  # no ticker: it might still be telling a listener when a call returns
    server, url = serve(sim=sim)
    yield Cloud(sim, server.front, url)  # type: ignore[attr-defined]
    server.shutdown()
    server.server_close()


@pytest.fixture
def cloud(served: Cloud) -> Iterator[Cloud]:
    """An empty cloud at 20:00."""
    served.front.reset()
    served.sim.clock = lambda: START
    served.sim.listeners, served.sim.errors = [], []
    yield served
    assert not served.sim.errors, served.sim.errors
