"""The simulated cloud for tests: one process for a whole test run, an empty cloud for each test, and a leak check.

    from support.simcloud.fixture import simcloud

    def test_something(simcloud): ...

From the start the cloud contains resources of somebody else that have our name but not our tags. They must be there,
unchanged, when the test ends.
"""

import contextlib
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.simcloud.__main__ import environment, post_command
from support.simcloud.process_keeper import kill_all, process_ids
from support.waiting import wait_for

from train.tools.process import die_with_parent

COMMAND = [sys.executable, str(Path(__file__).resolve().parent)]
IMAGE = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id"
OUR_NAME = "imgnet"  # the name of our resources, which the foreign ones have too
RUNNING_CLOUD = pytest.StashKey["CloudProcess"]()


class CloudProcess:
    """A simulated cloud in a process of its own.

    `url` is its address, `env` makes a command take it for AWS, and `folder` has its machines' disks. A test that
    leaves something on purpose sets `expect_leaks`.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="simcloud-"))
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [*COMMAND, "--port=0", "--boot-seconds=0.2", f"--folder={self.folder}"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        self.url = self._wait_for_url()
        self.env = environment(self.url)
        self.foreign_resources: list[dict[str, Any]] = []
        self.expect_leaks = False

    def _wait_for_url(self) -> str:
        """Wait until the cloud serves, and return its address. Raises `RuntimeError` when it does not start."""
        for line in self.process.stdout or []:
            name, _, value = line.removeprefix("export ").strip().partition("=")
            if name == "AWS_ENDPOINT_URL":
                return shlex.split(value)[0]
        raise RuntimeError(f"the simulated cloud did not start: {self.log[-2000:]}")

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def close(self) -> None:
        """End the cloud and all its machines. Raises `AssertionError` when a process outlives it."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait(120)
        if self.process.stdout:
            self.process.stdout.close()
        with contextlib.suppress(AssertionError):  # after a kill of the cloud its process keeper needs a moment
            self.wait_for(lambda: not process_ids(self.folder))
        leftover_pids = process_ids(self.folder)
        kill_all(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)
        assert not leftover_pids, f"processes outlived the simulated cloud: {sorted(leftover_pids)}"

    # --- control ------------------------------------------------------------------------------------------------------

    def post(self, command: str, **arguments: Any) -> Any:
        """Give the cloud a command of `support.simcloud.control` and return the answer."""
        return post_command(self.url, command, **arguments)

    def _ours(self, command: str) -> list[dict[str, Any]]:
        foreign_ids = {resource["id"] for resource in self.foreign_resources}
        return [resource for resource in self.post(command) if resource["id"] not in foreign_ids]

    def instances(self) -> list[dict[str, Any]]:
        return self._ours("instances")

    def interrupt(self, id: str, notice: float) -> None:
        """Interrupt a spot instance: its metadata says so now, and it ends in `notice` seconds."""
        self.post("interrupt", id=id, notice=notice)

    def bill(self) -> dict[str, Any]:
        """Return what our resources have cost; nobody bills the foreign ones."""
        return self.post("bill")

    def leaks(self) -> list[dict[str, Any]]:
        return self._ours("leaks")

    def all_resources(self) -> list[dict[str, Any]]:
        """Return all resources of the cloud, foreign ones and free ones too."""
        return [*self.post("leaks"), *self.post("leftovers")]

    def machine_home(self, id: str) -> Path:
        return self.folder / id / "home"

    def client(self, service: str) -> Any:
        import boto3

        return boto3.client(
            service,
            endpoint_url=self.url,
            region_name=self.env["AWS_REGION"],
            **{name: self.env[name.upper()] for name in ("aws_access_key_id", "aws_secret_access_key")},
        )

    wait_for = staticmethod(wait_for)

    # --- tests --------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Empty the cloud, and create the foreign resources."""
        self.post("reset")
        self.foreign_resources = []
        self.expect_leaks = False
        self._error_count = len(self.post("errors"))
        ids_before = {resource["id"] for resource in self.all_resources()}
        self._create_foreign_resources()
        self.post("set", needs_internet=True)
        self.foreign_resources = [resource for resource in self.all_resources() if resource["id"] not in ids_before]

    def _create_foreign_resources(self) -> None:
        """Create a security group, a placement group and an instance with our name and somebody else's tags."""
        ec2 = self.client("ec2")
        image = self.client("ssm").get_parameter(Name=IMAGE)["Parameter"]["Value"]
        tags = [{"Key": "Name", "Value": OUR_NAME}, {"Key": "owner", "Value": "somebody else"}]
        security_group = ec2.create_security_group(GroupName=OUR_NAME, Description="not ours")["GroupId"]
        ec2.create_tags(Resources=[security_group], Tags=tags)
        ec2.create_placement_group(GroupName=OUR_NAME, Strategy="cluster")
        ec2.run_instances(
            ImageId=image,
            InstanceType="c5.large",
            MinCount=1,
            MaxCount=1,
            Placement={"GroupName": OUR_NAME},
            NetworkInterfaces=[{"DeviceIndex": 0, "Groups": [security_group], "AssociatePublicIpAddress": False}],
            TagSpecifications=[{"ResourceType": "instance", "Tags": tags}],
        )
        self.wait_for(lambda: all(row.get("state", "running") == "running" for row in self.post("leaks")))
        self.post("forget_past")

    def assert_clean(self) -> None:
        """Raises `AssertionError` when a resource of ours still costs, a foreign one changed, or the cloud failed."""
        resources_by_id = {resource["id"]: resource for resource in self.all_resources()}
        touched = [row for row in self.foreign_resources if resources_by_id.get(row["id"]) != row]
        now = [resources_by_id.get(row["id"]) for row in touched]
        assert not touched, f"foreign resources were touched: {touched}, now {now}"
        errors = self.post("errors")[self._error_count :]
        assert not errors, f"the simulated cloud itself failed: {errors[0]}"
        leaks = [] if self.expect_leaks else self.leaks()
        assert not leaks, f"left behind, and costing: {leaks}"


@pytest.fixture
def simcloud(request: pytest.FixtureRequest) -> Iterator[CloudProcess]:
    """An empty simulated cloud for this test, which fails when it leaves something that costs."""
    cloud = request.config.stash.get(RUNNING_CLOUD, None)
    if cloud is None or cloud.process.poll() is not None:
        cloud = request.config.stash[RUNNING_CLOUD] = CloudProcess()
        request.config.add_cleanup(cloud.close)
    cloud.begin()
    yield cloud
    try:
        cloud.assert_clean()
    finally:
        with contextlib.suppress(OSError, RuntimeError):
            cloud.post("reset")
