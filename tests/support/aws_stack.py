"""AWS in this process (moto) for tests of the stack, and an account that records its calls, fails them, or dies."""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ["MOTO_EC2_LOAD_DEFAULT_AMIS"] = "false"  # moto reads it at its import: 1301 images cost seconds
from botocore.exceptions import ClientError
from moto import mock_aws
from support.simcloud.cloud import SimulatedAws
from support.simcloud.moto_patches import BUCKETS_WITHOUT_CONDITIONS

from infra.aws import client as aws_client
from infra.aws.client import Account
from infra.aws.stack import claims, resources
from infra.aws.stack.resources import StackContext

READING_ACTIONS = ("Describe", "Get", "List", "Head")
OWN_CIDR = "203.0.113.7/32"
REGION = "us-west-1"  # two zones


class Killed(BaseException):
    """Stands for the death of the process."""


class RecordingAccount(Account):
    """An account that records its calls.

    `changes_left` is the number of changing calls after which it raises `Killed`. `denied` maps the actions that fail
    to the codes of their errors.
    """

    def __init__(self, region: str = REGION) -> None:
        super().__init__(region)
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.changes_left: int | None = None
        self.denied: dict[str, str] = {}
        self.before: dict[str, Callable[[], None]] = {}  # by action: called once, just before the action
        self.after: dict[str, Callable[[], None]] = {}  # by action: called once, when the action is done

    def client(self, service: str, *args: Any, **options: Any) -> Any:
        client = super().client(service, *args, **options)
        client.meta.events.register("before-parameter-build", self._before_call)
        client.meta.events.register("after-call", self._after_call)
        return client

    def changes(self) -> list[str]:
        """Return the actions that have been called, without those that only read."""
        return [action for action, _ in self.calls if not action.startswith(READING_ACTIONS)]

    def _before_call(self, params: dict[str, Any], model: Any, **_: Any) -> None:
        for action, code in self.denied.items():
            if model.name.startswith(action):
                raise ClientError({"Error": {"Code": code, "Message": "no"}}, model.name)
        self.before.pop(model.name, lambda: None)()
        self.calls.append((model.name, dict(params)))

    def _after_call(self, model: Any, **_: Any) -> None:
        self.after.pop(model.name, lambda: None)()
        if self.changes_left is not None and not model.name.startswith(READING_ACTIONS):
            self.changes_left -= 1
            if self.changes_left <= 0:
                self.changes_left = None
                raise Killed(model.name)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder for this test, with fake credentials and short waiting times."""
    for name in ("AWS_ENDPOINT_URL", "AWS_PROFILE", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    credentials = {"AWS_ACCESS_KEY_ID": "fake", "AWS_SECRET_ACCESS_KEY": "fake", "AWS_DEFAULT_REGION": REGION}
    for name, text in {**credentials, "HOME": str(tmp_path), "AWS_EC2_METADATA_DISABLED": "true"}.items():
        monkeypatch.setenv(name, text)
    for module, name, seconds in (
        (resources, "SETTLE_SECONDS", 0.02), (resources, "RESOURCE_POLL_SECONDS", 0.01),
        (resources, "RESOURCE_IN_USE_SECONDS", 0.5), (resources, "RESOURCE_VISIBILITY_SECONDS", 0.5),
        (aws_client, "CONSISTENCY_POLL_SECONDS", 0.01), (claims, "SETTLE_SECONDS", 0.0),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, seconds)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # no test here cuts the power
    return tmp_path


@pytest.fixture
def aws(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty AWS, and a home folder for this test. A simulated cloud of this process creates EFS at once."""
    monkeypatch.setattr(*BUCKETS_WITHOUT_CONDITIONS)
    if sim := getattr(SimulatedAws, "current", None):
        sim.reset()
        sim.efs_seconds = 0.0
    with mock_aws():
        yield home


@pytest.fixture
def account(aws: Path) -> RecordingAccount:
    return RecordingAccount()


@pytest.fixture
def work(account: RecordingAccount) -> StackContext:
    return StackContext(account)


def count_resources(account: Account) -> dict[str, int]:
    """Return the number of resources with the stack tag by kind, and of all roles, file systems and access points."""
    filters = [{"Name": "tag:imgnet:stack", "Values": ["imgnet"]}]
    counts = {}
    for key in NETWORK_KINDS:
        operation = "describe" + re.sub("([A-Z])", r"_\1", key).lower()
        resources = getattr(account.ec2, operation)(Filters=filters)[key]
        counts[key] = len([resource for resource in resources if resource.get("State") != "deleted"])
    efs, iam = account.efs, account.iam
    file_systems = efs.describe_file_systems()["FileSystems"]
    mount_targets = [efs.describe_mount_targets(FileSystemId=row["FileSystemId"]) for row in file_systems]
    return {
        **counts,
        "FileSystems": len(file_systems),
        "MountTargets": sum(len(targets["MountTargets"]) for targets in mount_targets),
        "AccessPoints": len(efs.describe_access_points()["AccessPoints"]),
        "Roles": len(iam.list_roles()["Roles"]),
        "InstanceProfiles": len(iam.list_instance_profiles()["InstanceProfiles"]),
    }


NETWORK_KINDS = (
    "Vpcs", "Subnets", "RouteTables", "InternetGateways", "VpcEndpoints", "SecurityGroups", "KeyPairs",
)  # fmt: skip
COMPLETE_STACK = {
    **dict.fromkeys((*NETWORK_KINDS, "FileSystems", "AccessPoints", "Roles", "InstanceProfiles"), 1),
    **dict.fromkeys(("Subnets", "MountTargets"), 2),  # one in each zone
}
NO_RESOURCES = dict.fromkeys(COMPLETE_STACK, 0)
