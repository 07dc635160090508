"""The simulated cloud for tests: one process for a whole test run, an empty cloud for each test, and the leak oracle.

    from simcloud.fixture import simcloud

    def test_something(simcloud): ...

Something foreign of our name but without our tags is there from the start, and must be there, unchanged, at the end.
"""

import contextlib
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.simcloud.__main__ import ask, environment

from train.tools.process import die_with_parent

COMMAND = [sys.executable, str(Path(__file__).resolve().parent)]
IMAGE = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id"
OURS = "imgnet"  # a name that our things bear too
STARTED = pytest.StashKey["Simcloud"]()


class Simcloud:
    """A simulated cloud in a process of its own: `url`; `env`, which makes a command take it for AWS; `folder`, disks.

    `expect_leaks` is set by a test that leaves something on purpose.
    """

    def __init__(self, boot_seconds: float = 0.2) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="simcloud-"))
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [*COMMAND, "--port=0", f"--boot-seconds={boot_seconds}", f"--folder={self.folder}"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        self.url = self._first_words()
        self.env = environment(self.url)
        self.foreign: list[dict[str, Any]] = []
        self.expect_leaks = False

    def _first_words(self) -> str:
        """Wait until it serves, and return its address."""
        for line in self.process.stdout or []:
            name, _, value = line.removeprefix("export ").strip().partition("=")
            if name == "AWS_ENDPOINT_URL":
                return shlex.split(value)[0]
        raise RuntimeError(f"the simulated cloud did not start: {self.log[-2000:]}")

    @property
    def log(self) -> str:
        """What its process has said of errors."""
        return (self.folder / "log").read_text(errors="replace")

    def close(self) -> None:
        """End it and all its machines. Raises `AssertionError` when a process outlives it."""
        from support.simcloud.process_keeper import end, everything

        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)
        if self.process.stdout:
            self.process.stdout.close()
        with contextlib.suppress(AssertionError):
            self.wait(lambda: not everything(self.folder), 10)  # when it was killed, its keeper needs a moment
        left = everything(self.folder)
        end(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)
        assert not left, f"processes outlived the simulated cloud: {sorted(left)}"

    # --- what can be said to it ---------------------------------------------------------------------------------------

    def post(self, what: str, **words: Any) -> Any:
        """Post to its control (`simcloud.front`)."""
        return ask(self.url, what, **words)

    def instances(self) -> list[dict[str, Any]]:
        """Our instances, the terminated ones too; a foreign one is none of ours."""
        foreign = {one["id"] for one in self.foreign}
        return [one for one in self.post("instances") if one["id"] not in foreign]

    def interrupt(self, id: str, notice: float = 2.0) -> None:
        """Take a spot machine back: IMDS says so now, and it ends in so many seconds."""
        self.post("interrupt", id=id, notice=notice)

    def bill(self) -> dict[str, Any]:
        """What our things have cost; a foreign instance is taken off (its disk of 1 GB is not: 0.0001 $/h)."""
        bill: dict[str, Any] = self.post("bill")
        for one in self.foreign:
            bill["total"] -= bill["instances"].pop(one["id"], 0.0)
        return bill

    def leaks(self) -> list[dict[str, Any]]:
        """What of ours still costs something."""
        foreign = {one["id"] for one in self.foreign}
        return [one for one in self.post("leaks") if one["id"] not in foreign]

    def machine(self, id: str) -> Path:
        """The home folder of an instance's machine."""
        return self.folder / id / "home"

    # --- tests --------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Be an empty cloud in which something foreign stands."""
        self.post("reset")
        self.foreign, self.expect_leaks, self._errors = [], False, len(self.post("errors"))
        before = {one["id"] for one in self._everything()}
        self._make_foreign()
        self.foreign = [one for one in self._everything() if one["id"] not in before]

    def _everything(self) -> list[dict[str, Any]]:
        return [*self.post("leaks"), *self.post("leftovers")]

    def _make_foreign(self) -> None:
        """A stranger's security group, placement group and instance of our name."""
        ec2, ssm = (self.client(name) for name in ("ec2", "ssm"))
        tags = [{"Key": "Name", "Value": OURS}, {"Key": "owner", "Value": "somebody else"}]
        group = ec2.create_security_group(GroupName=OURS, Description="not ours")["GroupId"]
        ec2.create_tags(Resources=[group], Tags=tags)
        ec2.create_placement_group(GroupName=OURS, Strategy="cluster")
        usual = self.post("set")["image_gb"]
        self.post("set", image_gb=1)  # so that its disk does not count on our bill
        ec2.run_instances(
            ImageId=ssm.get_parameter(Name=IMAGE)["Parameter"]["Value"],
            InstanceType="c5.large",
            MinCount=1,
            MaxCount=1,
            Placement={"GroupName": OURS},
            BlockDeviceMappings=[{"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 1, "DeleteOnTermination": True}}],
            NetworkInterfaces=[{"DeviceIndex": 0, "Groups": [group], "AssociatePublicIpAddress": False}],
            TagSpecifications=[{"ResourceType": "instance", "Tags": tags}],
        )
        self.wait(lambda: all(one.get("state", "running") == "running" for one in self.post("leaks")))
        self.post("set", image_gb=usual)
        self.post("forget_calls")

    def client(self, service: str) -> Any:
        """A boto3 client of this cloud."""
        import boto3

        return boto3.client(
            service,
            endpoint_url=self.url,
            region_name=self.env["AWS_REGION"],
            aws_access_key_id=self.env["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=self.env["AWS_SECRET_ACCESS_KEY"],
        )

    def wait(self, condition: Any, seconds: float = 30.0) -> Any:
        """Return what the condition gave as soon as it is true. Raises `AssertionError` at the deadline."""
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < deadline, f"not in {seconds:g} s"
            time.sleep(0.02)
        return found

    def check(self) -> None:
        """The oracle: raises `AssertionError` when something of ours still costs, or a foreign thing was touched."""
        now = {one["id"]: one for one in self._everything()}
        touched = [one for one in self.foreign if now.get(one["id"]) != one]
        assert not touched, f"foreign things were touched: {touched}, now {[now.get(one['id']) for one in touched]}"
        errors = self.post("errors")[self._errors :]
        assert not errors, f"the simulated cloud itself failed: {errors[0]}"
        left = [] if self.expect_leaks else self.leaks()
        assert not left, f"left behind, and costing: {left}"


@pytest.fixture
def simcloud(request: pytest.FixtureRequest) -> Iterator[Simcloud]:
    """An empty simulated cloud for this test, which fails when it leaves something that costs."""
    one = request.config.stash.get(STARTED, None)
    if one is None or one.process.poll() is not None:
        one = request.config.stash[STARTED] = Simcloud()
        request.config.add_cleanup(one.close)
    one.begin()
    yield one
    try:
        one.check()
    finally:
        with contextlib.suppress(OSError, RuntimeError):
            one.post("reset")
