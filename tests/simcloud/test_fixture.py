"""The whole simulated cloud, as other tests and a person use it: EC2's calls make and end machines, the oracle sees."""

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.simcloud.__main__ import post_command
from support.simcloud.fixture import COMMAND, IMAGE, CloudProcess, simcloud  # noqa: F401  # pytest finds the fixture by its name here
from support.simcloud.process_keeper import process_ids
from support.ssh_machines import generate_key

from cluster.agent.watchdog import Watchdog

Fixture = Any

BOOT = ("systemd-run", "--no-block", "--unit=imgnet-limit")


class User:
    """Somebody who launches machines on a cloud and logs in to them."""

    def __init__(self, cloud: CloudProcess, folder: Path) -> None:
        self.cloud, self.folder, self.ec2 = cloud, folder, cloud.client("ec2")
        for name in ("user", "host"):
            generate_key(folder / name)
        self.ec2.import_key_pair(KeyName="mine", PublicKeyMaterial=(folder / "user.pub").read_bytes())

    def launch(self, count: int = 1, limit: float = 600, **more: Any) -> list[str]:
        """Launch spot machines; their ids."""
        config = {
            "bootcmd": [
                [*BOOT, f"--on-active={limit:.0f}", "systemctl", "poweroff"],
            ],
            "ssh_keys": {
                "ed25519_private": (self.folder / "host").read_text(),
                "ed25519_public": (self.folder / "host.pub").read_text(),
            },
            "runcmd": [["sh", "-c", "exit 1", "sh", "fs-0123", "us-east-1"]],
        }
        image = self.cloud.client("ssm").get_parameter(Name=IMAGE)["Parameter"]["Value"]
        answer = self.ec2.run_instances(
            ImageId=image,
            InstanceType="g5.xlarge",
            MinCount=count,
            MaxCount=count,
            KeyName="mine",
            UserData=f"#cloud-config\n{json.dumps(config)}",
            InstanceMarketOptions={"MarketType": "spot"},
            InstanceInitiatedShutdownBehavior="terminate",
            BlockDeviceMappings=[{"DeviceName": "/dev/sda1", "Ebs": {"DeleteOnTermination": True, "VolumeSize": 100}}],
            **more,
        )
        return [one["InstanceId"] for one in answer["Instances"]]

    def ready(self, *ids: str) -> None:
        """Wait until these machines can be worked with."""
        self.cloud.wait_for(lambda: all((self.cloud.machine_home(id) / ".imgnet/ready").exists() for id in ids))
        self.cloud.wait_for(lambda: all(self.ssh(id, "true").returncode == 0 for id in ids))

    def ssh(self, id: str, command: str) -> "subprocess.CompletedProcess[str]":
        """Run a command on a machine, as EC2 says where it is, how to log in by its image's tags."""
        (one,) = self.ec2.describe_instances(InstanceIds=[id])["Reservations"][0]["Instances"]
        (image,) = self.ec2.describe_images(ImageIds=[one["ImageId"]])["Images"]
        tags = {tag["Key"]: tag["Value"] for tag in image["Tags"]}
        known = self.folder / "known"
        known.write_text(f"imgnet {(self.folder / 'host.pub').read_text()}")
        options = [
            "HostKeyAlias=imgnet", f"UserKnownHostsFile={known}", "StrictHostKeyChecking=yes", "BatchMode=yes",
            "IdentitiesOnly=yes", "LogLevel=ERROR", f"Port={tags['imgnet:port']}", f"User={tags['imgnet:user']}",
        ]  # fmt: skip
        words = ["ssh", "-F", "none", "-i", str(self.folder / "user"), *(f"-o{option}" for option in options)]
        return subprocess.run([*words, one["PublicIpAddress"], command], capture_output=True, text=True, timeout=30)

    def state(self, id: str) -> str:
        """What EC2 says of it, and why."""
        (one,) = self.ec2.describe_instances(InstanceIds=[id])["Reservations"][0]["Instances"]
        return " ".join([one["State"]["Name"], one.get("StateReason", {}).get("Code", "")]).strip()


@pytest.fixture
def user(simcloud: CloudProcess, tmp_path: Path) -> User:  # noqa: F811
    return User(simcloud, tmp_path)


def test_what_run_instances_starts_can_be_logged_in_to_and_ends_with_terminate_instances(user: User) -> None:
    ids = user.launch(3)
    user.ready(*ids)
    assert [user.ssh(id, "echo $HOME").stdout.strip() for id in ids] == [str(user.cloud.machine_home(id)) for id in ids]
    user.ssh(ids[0], "setsid -f sleep 1000 >/dev/null 2>&1 </dev/null")
    assert process_ids(user.cloud.folder / ids[0])
    user.ec2.terminate_instances(InstanceIds=ids)
    user.cloud.wait_for(lambda: not process_ids(user.cloud.folder))
    user.cloud.wait_for(lambda: not user.cloud.leaks())
    assert {one["id"]: one["state"] for one in user.cloud.instances()} == dict.fromkeys(ids, "terminated")


def test_the_limit_ends_the_instance_and_the_bill(user: User) -> None:
    (id,) = user.launch(limit=1)
    user.cloud.wait_for(lambda: user.state(id) == "terminated Client.InstanceInitiatedShutdown")
    user.cloud.wait_for(lambda: not process_ids(user.cloud.folder))
    assert 0 < user.cloud.bill()["total"] == pytest.approx(user.cloud.bill()["total"], abs=1e-5)


def test_a_machine_that_is_taken_away_hears_it_first(user: User, tmp_path: Path) -> None:
    (id,) = user.launch()
    user.ready(id)
    url = user.ssh(id, "echo $AWS_EC2_METADATA_SERVICE_ENDPOINT").stdout.strip()
    guard = Watchdog(tmp_path, None, 0.0, url, lambda: None)
    assert guard.query_metadata() == "" and guard._metadata_token
    user.cloud.interrupt(id, notice=1.5)
    assert user.cloud.wait_for(guard.query_metadata).startswith("spot/instance-action: terminate at 20")
    assert user.state(id) == "running"
    user.cloud.wait_for(lambda: user.state(id) == "terminated Server.SpotInstanceTermination")
    user.cloud.wait_for(lambda: not process_ids(user.cloud.folder))


def test_machines_can_be_slow_and_fail_as_the_test_says(user: User) -> None:
    user.cloud.post("machines", failing_machines=[0], ssh_delay_seconds=0.5)
    first, second = user.launch(2)
    user.ready(second)
    assert "not mounted" in (user.cloud.machine_home(first) / ".imgnet/failed").read_text()
    user.ec2.terminate_instances(InstanceIds=[first, second])
    user.cloud.begin()
    assert user.cloud.post("machines")["ssh_delay_seconds"] == 0


# --- the oracle ------------------------------------------------------------------------------------------------------


def test_the_oracle_sees_an_instance_and_an_address_that_are_left(user: User) -> None:
    (id,) = user.launch()
    with pytest.raises(AssertionError, match=id):
        user.cloud.assert_clean()
    user.ec2.terminate_instances(InstanceIds=[id])
    user.cloud.wait_for(lambda: not user.cloud.leaks())
    address = user.ec2.allocate_address(Domain="vpc")["AllocationId"]
    with pytest.raises(AssertionError, match=address):
        user.cloud.assert_clean()
    user.cloud.expect_leaks = True


@pytest.mark.parametrize("what", ["end", "tag"])
def test_the_oracle_sees_that_something_foreign_was_touched(user: User, what: str) -> None:
    (foreign,) = [one["id"] for one in user.cloud.foreign_resources if one["kind"] == "instance"]
    user.cloud.assert_clean()
    if what == "end":
        user.ec2.terminate_instances(InstanceIds=[foreign])
    else:
        user.ec2.create_tags(Resources=[foreign], Tags=[{"Key": "imgnet:stack", "Value": "imgnet"}])
    with pytest.raises(AssertionError, match="touched"):
        user.cloud.assert_clean()
    user.cloud.begin()


def test_a_foreign_instance_group_and_placement_group_of_our_name_are_there_and_cost_us_nothing(user: User) -> None:
    kinds = {one["kind"] for one in user.cloud.foreign_resources}
    assert {"instance", "volume", "security-group", "placement-group"} <= kinds
    assert user.cloud.instances() == [] == user.cloud.leaks() and user.cloud.bill()["total"] < 1e-5
    assert user.cloud.post("calls")["calls"] == [["ec2", "ImportKeyPair"]]


# --- for a person ----------------------------------------------------------------------------------------------------


@pytest.fixture
def person(tmp_path: Path) -> Iterator[CloudProcess]:
    """A cloud of this test's own, that it may end as it likes."""
    one = CloudProcess()
    yield one
    one.close()


def test_ls_bill_and_interrupt_are_commands(person: CloudProcess, tmp_path: Path) -> None:
    def command(*words: str) -> "subprocess.CompletedProcess[str]":
        port = f"--port={person.url.rpartition(':')[2]}"
        return subprocess.run([*COMMAND, *words, port], capture_output=True, text=True, timeout=60)

    (id,) = User(person, tmp_path).launch()
    person.wait_for(lambda: "running" in command("ls").stdout)
    assert command("interrupt", id, "--notice", "0").returncode == 0
    person.wait_for(lambda: "terminated" in command("ls").stdout)
    assert json.loads(command("bill").stdout)["instances"][id] > 0
    said = command("interrupt", "i-00000000000000000")
    assert said.returncode == 1 and said.stderr.startswith("error: ") and said.stderr.count("\n") == 1, said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_the_cloud_whatever_ends_it(person: CloudProcess, tmp_path: Path, number: int) -> None:
    user = User(person, tmp_path)
    ids = user.launch(2)
    user.ready(*ids)
    user.ssh(ids[0], "tmux -L imgnet new -d sleep 1000; setsid -f sleep 1000 >/dev/null 2>&1 </dev/null")
    assert len(process_ids(person.folder)) >= 4
    person.process.send_signal(number)
    code = person.process.wait(30)
    assert code == (-number if number == signal.SIGKILL else 0), person.log
    person.wait_for(lambda: not process_ids(person.folder))
    with pytest.raises(OSError):
        post_command(person.url, "instances")
