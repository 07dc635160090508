"""The machines behind the simulated EC2: they boot from user data, and end with their instance or at its limit."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.simcloud.in_process import Cloud, cloud, served
from support.simcloud.logins import Keys
from support.simcloud.machines import SimulatedMachines
from support.ssh_machines import command_line, generate_key
from support.waiting import wait_for

__all__ = ["cloud", "served"]


class MachineTestbed:
    """A cloud with machines, a user key that they accept, and a host key for their boot."""

    def __init__(self, cloud: Cloud, folder: Path) -> None:
        self.cloud = cloud
        self.folder = folder
        self.keys = Keys(folder)
        self.machines = SimulatedMachines(cloud.sim, folder / "cloud")
        cloud.ec2.import_key_pair(KeyName="mine", PublicKeyMaterial=(folder / "user.pub").read_bytes())

    def boot_machines(self, count: int = 1, **changes: Any) -> list[Any]:
        """Launch instances, and return their machines when these are set up."""
        arguments = {"KeyName": "mine", "UserData": self.keys.user_data(), **changes}
        ids = self.cloud.launch(count, InstanceInitiatedShutdownBehavior="terminate", **arguments)
        self.cloud.sim.advance(0)
        wait_for(lambda: all(id in self.machines.machines for id in ids))
        machines = [self.machines.machines[id] for id in ids]
        wait_for(lambda: all(machine._sshd and machine.listens() for machine in machines))
        wait_for(lambda: all((machine.home / ".imgnet/ready").exists() for machine in machines))
        return machines

    def ssh(self, machine: Any, command: str, host_key: str = "") -> "subprocess.CompletedProcess[str]":
        """Run a command on a machine. Only one host key is trusted: `host_key`, or that of the boot."""
        return self.keys.ssh(machine.address, *self.cloud.sim.login, command, host_key=host_key)

    def has_ended(self, machine: Any) -> bool:
        """Return whether an instance is terminated and nothing runs on its machine."""
        return self.cloud.state(machine.id) == "terminated" and not machine.processes()


@pytest.fixture
def bed(cloud: Cloud, tmp_path: Path) -> Iterator[MachineTestbed]:
    bed = MachineTestbed(cloud, tmp_path)
    yield bed
    bed.machines.close()
    assert not [command_line(pid) for machine in bed.machines.machines.values() for pid in machine.processes()]


def test_machine_has_the_host_key_of_its_user_data_and_admits_the_key_pair_only(bed: MachineTestbed) -> None:
    (machine,) = bed.boot_machines()
    assert bed.ssh(machine, "echo $HOME; ls ~/.imgnet").stdout.split() == [
        str(machine.home),
        "python",
        "ready",
        "shared",
    ]
    generate_key(bed.folder / "other")
    assert bed.ssh(machine, "true", host_key=(bed.folder / "other.pub").read_text()).returncode == 255
    (bed.folder / "user").write_text((bed.folder / "other").read_text())
    assert "Permission denied" in bed.ssh(machine, "true").stderr


def test_imgnet_hostkey_replaces_the_key_and_keeps_connections(bed: MachineTestbed) -> None:
    (machine,) = bed.boot_machines()
    result = bed.ssh(machine, "sudo -n imgnet-hostkey && echo still here")
    key, last_line = result.stdout.splitlines()
    assert key.startswith("ssh-ed25519 ") and last_line == "still here", result
    assert bed.ssh(machine, "true").returncode == 255
    # A caller that lost the answer may ask again.
    assert bed.ssh(machine, "sudo -n imgnet-hostkey", host_key=key).stdout == f"{key}\n"


def test_limit_of_the_user_data_powers_off_unless_imgnet_limit_replaces_it(bed: MachineTestbed) -> None:
    first, second = bed.boot_machines(2, UserData=bed.keys.user_data(600))
    assert bed.ssh(second, "sudo -n imgnet-limit 1000").returncode == 0
    bed.cloud.sim.advance(590)
    assert bed.ssh(first, "true").returncode == 0 and bed.cloud.state(first.id) == "running"
    bed.cloud.sim.advance(20)
    wait_for(lambda: bed.has_ended(first))
    assert bed.ssh(second, "true").returncode == 0 and bed.cloud.state(second.id) == "running"
    bed.cloud.sim.advance(400)
    wait_for(lambda: bed.has_ended(second))


def test_fake_commands_reject_other_uses(bed: MachineTestbed) -> None:
    (machine,) = bed.boot_machines()
    for command in (
        "imgnet-limit 5",
        "systemctl poweroff",
        "sudo imgnet-limit 5",
        "sudo -n imgnet-limit",
        "sudo -n reboot",
    ):
        result = bed.ssh(machine, command)
        assert result.returncode in (1, 2) and result.stderr.count("\n") == 1, result
    assert bed.cloud.state(machine.id) == "running" and machine.listens()


def test_end_of_an_instance_kills_everything_on_its_machine(bed: MachineTestbed) -> None:
    machine, other = bed.boot_machines(2)
    bed.ssh(machine, "tmux -L imgnet new -d sleep 1000; setsid -f sleep 1000 >/dev/null 2>&1 </dev/null")
    bed.ssh(other, "setsid -f sleep 1000 >/dev/null 2>&1 </dev/null")
    assert len(machine.processes("sleep", "1000")) >= 2
    bed.cloud.ec2.terminate_instances(InstanceIds=[machine.id])
    wait_for(lambda: bed.has_ended(machine))
    assert other.processes("sleep", "1000") and bed.ssh(other, "true").returncode == 0


def test_end_of_an_instance_during_its_boot_leaves_nothing(bed: MachineTestbed) -> None:
    for _ in range(4):
        ids = bed.cloud.launch(KeyName="mine", UserData=bed.keys.user_data())
        bed.cloud.sim.advance(0)
        bed.cloud.ec2.terminate_instances(InstanceIds=ids)
    (last,) = bed.boot_machines()
    wait_for(lambda: not any(machine.processes() for machine in bed.machines.machines.values() if machine is not last))


def test_metadata_service_requires_a_token_and_knows_each_machine(bed: MachineTestbed) -> None:
    script = (
        'url=$AWS_EC2_METADATA_SERVICE_ENDPOINT; "$HOME"/.imgnet/python - "$url" <<"E"\n'
        "import sys, urllib.error, urllib.request as r\n"
        "def ask(path, method='GET', **headers):\n"
        "    request = r.Request(sys.argv[1] + '/latest/' + path, method=method, headers=headers)\n"
        "    try: return r.urlopen(request).read().decode()\n"
        "    except urllib.error.HTTPError as error: return error.code\n"
        "token = ask('api/token', 'PUT', **{'X-aws-ec2-metadata-token-ttl-seconds': '60'})\n"
        "print(ask('meta-data/instance-id'), ask('api/token', 'PUT'))\n"
        "for path in ('instance-id', 'spot/instance-action', 'placement/availability-zone'):\n"
        "    print(ask('meta-data/' + path, **{'X-aws-ec2-metadata-token': token}))\n"
        "E\n"
    )
    for machine in bed.boot_machines(2):
        assert bed.ssh(machine, script).stdout.split() == ["401", "400", machine.id, "404", "us-east-1a"]
