"""The machines behind the simulated EC2: they end with their instance, and cannot harm this computer."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.simcloud.in_process import Cloud, launch_machines
from support.simcloud.machines import SimulatedMachines
from support.ssh_machines import command_line
from support.waiting import wait_for


@pytest.fixture
def boot(cloud: Cloud, tmp_path: Path) -> Iterator[Callable[[int], list[Any]]]:
    """Launch instances, and return their machines when these are set up."""
    simulated = SimulatedMachines(cloud.sim, tmp_path / "cloud")
    machines = simulated.machines

    def boot(count: int) -> list[Any]:
        ids = launch_machines(cloud.ec2, cloud.image, count)
        cloud.sim.advance(0)
        wait_for(lambda: all(id in machines and (machines[id].home / ".imgnet/ready").exists() for id in ids))
        return [machines[id] for id in ids]

    yield boot
    simulated.close()
    assert not [command_line(pid) for machine in machines.values() for pid in machine.processes()]


def run(machine: Any, command: str) -> "subprocess.CompletedProcess[str]":
    """Run a shell command with the environment of a login on a machine."""
    argv = ["sh", "-c", command]
    return subprocess.run(argv, env=machine.env, capture_output=True, text=True, timeout=120)


def test_fake_commands_reject_other_uses(cloud: Cloud, boot: Any) -> None:
    (machine,) = boot(1)
    for command in ("imgnet-limit 5", "sudo imgnet-limit 5", "sudo -n imgnet-limit soon", "sudo -n shutdown -h now"):
        result = run(machine, command)
        assert result.returncode == 1 and result.stderr.count("\n") == 1, result
    assert cloud.state(machine.id) == "running" and machine.listens()


def test_end_of_an_instance_kills_everything_on_its_machine(cloud: Cloud, boot: Any) -> None:
    machine, other = boot(2)
    for each in (machine, other):
        run(each, "tmux -L imgnet new -d sleep 1000; setsid -f sleep 1000 >/dev/null 2>&1 </dev/null")
    assert len(machine.processes("sleep", "1000")) >= 2
    cloud.ec2.terminate_instances(InstanceIds=[machine.id])
    wait_for(lambda: cloud.state(machine.id) == "terminated" and not machine.processes())
    assert other.processes("sleep", "1000") and other.listens()
