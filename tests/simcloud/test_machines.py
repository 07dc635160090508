"""The machines behind the simulated EC2: they end with their instance, and cannot harm this computer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.simcloud.in_process import Cloud, cloud, served
from support.simcloud.logins import Keys
from support.simcloud.machines import SimulatedMachines
from support.ssh_machines import command_line
from support.waiting import wait_for

__all__ = ["cloud", "served"]


@pytest.fixture
def keys(cloud: Cloud, tmp_path: Path) -> Keys:
    """The keys of a user, which EC2 has, and of the machines' boot."""
    keys = Keys(tmp_path)
    cloud.ec2.import_key_pair(KeyName="mine", PublicKeyMaterial=(tmp_path / "user.pub").read_bytes())
    return keys


@pytest.fixture
def machines(cloud: Cloud, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """The machines of the cloud, by the ID of their instance."""
    simulated = SimulatedMachines(cloud.sim, tmp_path / "cloud")
    yield simulated.machines
    simulated.close()
    assert not [command_line(pid) for machine in simulated.machines.values() for pid in machine.processes()]


def boot(cloud: Cloud, keys: Keys, machines: dict[str, Any], count: int = 1) -> list[Any]:
    """Launch instances, and return their machines when these are set up."""
    ids = cloud.launch(count, KeyName="mine", UserData=keys.user_data())
    cloud.sim.advance(0)
    wait_for(lambda: all(id in machines and (machines[id].home / ".imgnet/ready").exists() for id in ids))
    return [machines[id] for id in ids]


def test_fake_commands_reject_other_uses(cloud: Cloud, keys: Keys, machines: dict[str, Any]) -> None:
    (machine,) = boot(cloud, keys, machines)
    for command in (
        "imgnet-limit 5",
        "systemctl poweroff",
        "sudo imgnet-limit 5",
        "sudo -n imgnet-limit",
        "sudo -n reboot",
    ):
        result = keys.ssh(machine.address, *cloud.sim.login, command)
        assert result.returncode in (1, 2) and result.stderr.count("\n") == 1, result
    assert cloud.state(machine.id) == "running" and machine.listens()


def test_end_of_an_instance_kills_everything_on_its_machine(cloud: Cloud, keys: Keys, machines: dict[str, Any]) -> None:
    machine, other = boot(cloud, keys, machines, 2)
    script = "tmux -L imgnet new -d sleep 1000; setsid -f sleep 1000 >/dev/null 2>&1 </dev/null"
    for each in (machine, other):
        keys.ssh(each.address, *cloud.sim.login, script)
    assert len(machine.processes("sleep", "1000")) >= 2
    cloud.ec2.terminate_instances(InstanceIds=[machine.id])
    wait_for(lambda: cloud.state(machine.id) == "terminated" and not machine.processes())
    assert other.processes("sleep", "1000") and other.listens()
