"""The whole simulated cloud, as other tests and a person use it: EC2 calls boot and end machines; the leak check."""

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.simcloud.__main__ import post_command
from support.simcloud.fixture import COMMAND, IMAGE, CloudProcess, simcloud  # noqa: F401  # pytest finds the fixture by its name here
from support.simcloud.logins import Keys
from support.simcloud.process_keeper import process_ids

pytestmark = pytest.mark.rehearsal  # whole processes, which take long

Fixture = Any


class User:
    """A user who launches machines on a cloud and logs in to them."""

    def __init__(self, cloud: CloudProcess, folder: Path) -> None:
        self.cloud = cloud
        self.ec2 = cloud.client("ec2")
        self.keys = Keys(folder)
        self.ec2.import_key_pair(KeyName="mine", PublicKeyMaterial=(folder / "user.pub").read_bytes())

    def launch(self, count: int = 1) -> list[str]:
        """Launch spot instances, and return their ids."""
        image = self.cloud.client("ssm").get_parameter(Name=IMAGE)["Parameter"]["Value"]
        reservation = self.ec2.run_instances(
            ImageId=image,
            InstanceType="g5.xlarge",
            MinCount=count,
            MaxCount=count,
            KeyName="mine",
            UserData=self.keys.user_data(),
            InstanceMarketOptions={"MarketType": "spot"},
            InstanceInitiatedShutdownBehavior="terminate",
            BlockDeviceMappings=[{"DeviceName": "/dev/sda1", "Ebs": {"DeleteOnTermination": True, "VolumeSize": 100}}],
        )
        return [instance["InstanceId"] for instance in reservation["Instances"]]

    def wait_until_ready(self, *ids: str) -> None:
        """Wait until these machines are set up and can be logged in to."""
        self.cloud.wait_for(lambda: all((self.cloud.machine_home(id) / ".imgnet/ready").exists() for id in ids))
        self.cloud.wait_for(lambda: all(self.ssh(id, "true").returncode == 0 for id in ids))

    def ssh(self, id: str, command: str) -> "subprocess.CompletedProcess[str]":
        """Run a command on a machine. EC2 says its address, and its image's tags say the user and the port."""
        (instance,) = self.ec2.describe_instances(InstanceIds=[id])["Reservations"][0]["Instances"]
        (image,) = self.ec2.describe_images(ImageIds=[instance["ImageId"]])["Images"]
        tags = {tag["Key"]: tag["Value"] for tag in image["Tags"]}
        address, user, port = instance["PublicIpAddress"], tags["imgnet:user"], int(tags["imgnet:port"])
        return self.keys.ssh(address, user, port, command)


@pytest.fixture
def user(simcloud: CloudProcess, tmp_path: Path) -> User:  # noqa: F811
    return User(simcloud, tmp_path)


def test_run_instances_boots_machines_and_terminate_ends_them(user: User) -> None:
    ids = user.launch(3)
    user.wait_until_ready(*ids)
    assert [user.ssh(id, "echo $HOME").stdout.strip() for id in ids] == [str(user.cloud.machine_home(id)) for id in ids]
    user.ssh(ids[0], "setsid -f sleep 1000 >/dev/null 2>&1 </dev/null")
    assert process_ids(user.cloud.folder / ids[0])
    user.ec2.terminate_instances(InstanceIds=ids)
    user.cloud.wait_for(lambda: not process_ids(user.cloud.folder))
    user.cloud.wait_for(lambda: not user.cloud.leaks())
    assert {instance["id"]: instance["state"] for instance in user.cloud.instances()} == dict.fromkeys(
        ids, "terminated"
    )


# --- leak check ----------------------------------------------------------------------------------------------------


def test_assert_clean_fails_on_a_left_instance_or_address(user: User) -> None:
    (id,) = user.launch()
    with pytest.raises(AssertionError, match=id):
        user.cloud.assert_clean()
    user.ec2.terminate_instances(InstanceIds=[id])
    user.cloud.wait_for(lambda: not user.cloud.leaks())
    address = user.ec2.allocate_address(Domain="vpc")["AllocationId"]
    with pytest.raises(AssertionError, match=address):
        user.cloud.assert_clean()
    user.cloud.expect_leaks = True


@pytest.mark.parametrize("change", ["end", "tag"])
def test_assert_clean_fails_on_a_changed_foreign_resource(user: User, change: str) -> None:
    (foreign_id,) = [row["id"] for row in user.cloud.foreign_resources if row["kind"] == "instance"]
    user.cloud.assert_clean()
    if change == "end":
        user.ec2.terminate_instances(InstanceIds=[foreign_id])
    else:
        user.ec2.create_tags(Resources=[foreign_id], Tags=[{"Key": "imgnet:stack", "Value": "imgnet"}])
    with pytest.raises(AssertionError, match="touched"):
        user.cloud.assert_clean()
    user.cloud.begin()


def test_begin_creates_foreign_resources_that_cost_us_nothing(user: User) -> None:
    kinds = {row["kind"] for row in user.cloud.foreign_resources}
    assert {"instance", "volume", "security-group", "placement-group"} <= kinds
    assert user.cloud.instances() == [] == user.cloud.leaks() and user.cloud.bill()["total"] < 1e-5
    assert user.cloud.post("calls")["calls"] == [["ec2", "ImportKeyPair"]]


# --- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture
def own_cloud() -> Iterator[CloudProcess]:
    """A cloud of this test's own, which the test may end."""
    cloud = CloudProcess()
    yield cloud
    cloud.close()


def test_main_ls_bill_and_interrupt(own_cloud: CloudProcess, tmp_path: Path) -> None:
    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        port = f"--port={own_cloud.url.rpartition(':')[2]}"
        return subprocess.run([*COMMAND, *arguments, port], capture_output=True, text=True, timeout=120)

    (id,) = User(own_cloud, tmp_path).launch()
    own_cloud.wait_for(lambda: "running" in run("ls").stdout)
    assert run("interrupt", id, "--notice", "0").returncode == 0
    own_cloud.wait_for(lambda: "terminated" in run("ls").stdout)
    assert json.loads(run("bill").stdout)["instances"][id] > 0
    second = run("serve")
    assert (second.returncode, second.stdout) == (1, "") and "make simcloud PORT=" in second.stderr, second
    result = run("interrupt", "i-00000000000000000")
    assert result.returncode == 1, result
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_a_signal_to_the_cloud(own_cloud: CloudProcess, tmp_path: Path, signal_number: int) -> None:
    user = User(own_cloud, tmp_path)
    ids = user.launch(2)
    user.wait_until_ready(*ids)
    user.ssh(ids[0], "tmux -L imgnet new -d sleep 1000; setsid -f sleep 1000 >/dev/null 2>&1 </dev/null")
    assert len(process_ids(own_cloud.folder)) >= 4
    own_cloud.process.send_signal(signal_number)
    exit_code = own_cloud.process.wait(120)
    assert exit_code == (-signal_number if signal_number == signal.SIGKILL else 0), own_cloud.log
    own_cloud.wait_for(lambda: not process_ids(own_cloud.folder))
    with pytest.raises(OSError):
        post_command(own_cloud.url, "instances")
