"""For tests of the stack: AWS in this process (moto), an account whose calls are seen, refused, and die where told."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ["MOTO_EC2_LOAD_DEFAULT_AMIS"] = "false"  # read when moto is imported; 1301 images cost seconds
from botocore.exceptions import ClientError
from botocore.loaders import Loader
from moto import mock_aws
from support.simcloud.cloud import SimulatedAws

from infra.aws import client as aws_client
from infra.aws.client import Account
from infra.aws.stack import resources
from infra.aws.stack.resources import StackContext

LOADER = Loader()  # one for all tests: to read what EC2 can do takes half a second
LOOKS = ("Describe", "Get", "List", "Head")
HERE = "203.0.113.7/32"
REGION = "us-west-1"  # two zones


class Killed(BaseException):
    """The process has died."""


class Seen(Account):
    """An account whose calls are written down; `die`: how many more changes it lives; `deny`: what it may not."""

    def __init__(self, region: str = REGION) -> None:
        super().__init__(region)
        self._session._session.register_component("data_loader", LOADER)
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.die: int | None = None
        self.deny: dict[str, str] = {}  # action -> code
        self.before: dict[str, Callable[[], None]] = {}  # action -> done once, just before it is asked for
        self.after: dict[str, Callable[[], None]] = {}  # action -> done once, when it has been executed

    def client(self, service: str, *args: Any, **words: Any) -> Any:
        made = super().client(service, *args, **words)
        made.meta.events.register("before-parameter-build", self._asked)
        made.meta.events.register("after-call", self._answered)
        return made

    def changes(self) -> list[str]:
        return [action for action, _ in self.calls if not action.startswith(LOOKS)]

    def _asked(self, params: dict[str, Any], model: Any, **_: Any) -> None:
        for action, code in self.deny.items():
            if model.name.startswith(action):
                raise ClientError({"Error": {"Code": code, "Message": "no"}}, model.name)
        self.before.pop(model.name, lambda: None)()
        self.calls.append((model.name, dict(params)))

    def _answered(self, model: Any, **_: Any) -> None:
        self.after.pop(model.name, lambda: None)()
        if self.die is not None and not model.name.startswith(LOOKS):
            self.die -= 1
            if self.die <= 0:
                self.die = None
                raise Killed(model.name)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of one's own, keys that are none, and no wait longer than it must be."""
    for name in ("AWS_ENDPOINT_URL", "AWS_PROFILE", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    fake = {"AWS_ACCESS_KEY_ID": "fake", "AWS_SECRET_ACCESS_KEY": "fake", "AWS_DEFAULT_REGION": REGION}
    for name, text in {**fake, "HOME": str(tmp_path), "AWS_EC2_METADATA_DISABLED": "true"}.items():
        monkeypatch.setenv(name, text)
    for module, name, seconds in (
        (resources, "SETTLE", 0.02), (resources, "EACH", 0.01), (resources, "BUSY_SECONDS", 0.5), (resources, "SEEN_SECONDS", 0.5),
        (aws_client, "LATER_EACH", 0.01),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, seconds)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # no test here cuts the power
    return tmp_path


@pytest.fixture
def aws(home: Path) -> Iterator[Path]:
    """AWS with nothing in it, a home of one's own. A simulated cloud in this process waits for nothing."""
    if there := getattr(SimulatedAws, "current", None):
        there.reset()
        there.efs_seconds = 0.0
    with mock_aws():
        yield home


@pytest.fixture
def account(aws: Path) -> Seen:
    """An account in a region with two zones."""
    return Seen()


@pytest.fixture
def work(account: Seen) -> StackContext:
    """Work in it, whose words nobody hears."""
    return StackContext(account)


def counts(account: Account) -> dict[str, int]:
    """How many things bear our tag, by kind, whoever has made them."""
    where = [{"Name": "tag:imgnet:stack", "Values": ["imgnet"]}]
    found = {
        key: len([one for one in getattr(account.ec2, operation)(Filters=where)[key] if one.get("State") != "deleted"])
        for operation, key in (
            ("describe_vpcs", "Vpcs"), ("describe_subnets", "Subnets"), ("describe_route_tables", "RouteTables"),
            ("describe_internet_gateways", "InternetGateways"), ("describe_vpc_endpoints", "VpcEndpoints"),
            ("describe_security_groups", "SecurityGroups"), ("describe_key_pairs", "KeyPairs"),
        )
    }  # fmt: skip
    files = account.efs.describe_file_systems()["FileSystems"]
    targets = [account.efs.describe_mount_targets(FileSystemId=one["FileSystemId"])["MountTargets"] for one in files]
    found |= {"FileSystems": len(files), "MountTargets": sum(map(len, targets))}
    found["AccessPoints"] = len(account.efs.describe_access_points()["AccessPoints"])
    found["Roles"] = len(account.iam.list_roles()["Roles"])
    return found | {"InstanceProfiles": len(account.iam.list_instance_profiles()["InstanceProfiles"])}


WHOLE = {
    "Vpcs": 1, "Subnets": 2, "RouteTables": 1, "InternetGateways": 1, "VpcEndpoints": 1, "SecurityGroups": 1,
    "KeyPairs": 1, "FileSystems": 1, "MountTargets": 2, "AccessPoints": 1, "Roles": 1, "InstanceProfiles": 1,
}  # fmt: skip
NOTHING = dict.fromkeys(WHOLE, 0)
