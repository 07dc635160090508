"""The machines behind the fake EC2: they boot from user data, end with their instance, and obey its limit."""

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from support.simcloud.machines import SimulatedMachines
from support.ssh_machines import command_line, generate_key

from cluster.agent.watchdog import Watchdog

BOOT = ("systemd-run", "--no-block", "--unit=imgnet-limit")


@dataclass(frozen=True)
class Instance:
    """What the cloud tells of an instance, as far as machines look."""

    id: str
    private: str
    key: str
    user_data: str
    public: str = ""
    type: str = "g5.xlarge"
    zone: str = "us-east-1b"


class Cloud:
    """A cloud that only knows who runs."""

    def __init__(self) -> None:
        self.listeners: list[Any] = []
        self.off: list[str] = []
        self.errors: list[str] = []
        self.later = 0.0
        self.login = ("", 0)
        self.running: dict[str, Instance] = {}

    def now(self) -> float:
        return time.time() + self.later

    def tell(self, name: str, *words: Any) -> None:
        for one in self.listeners:
            getattr(one, name)(*words)

    def power_off(self, id: str) -> None:
        self.off.append(id)
        self.tell("on_dying", self.running[id])


class World:
    """A cloud with machines, a key that opens them, and a bootstrap host key."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.cloud = folder, Cloud()
        for name in ("user", "host"):
            generate_key(folder / name)
        self.machines = SimulatedMachines(self.cloud, folder / "cloud", env={"OF_THE_BED": "yes"})

    def user_data(self, limit: float = 600, **changes: Any) -> str:
        config = {
            "bootcmd": [
                [*BOOT, f"--on-active={limit:.0f}", "systemctl", "poweroff"],
            ],
            "ssh_keys": {
                "ed25519_private": (self.folder / "host").read_text(),
                "ed25519_public": (self.folder / "host.pub").read_text(),
            },
            "ssh_deletekeys": True,
            "runcmd": [["sh", "-c", "exit 1", "sh", "fs-0123", "us-east-1"]],
            **changes,
        }
        return f"#cloud-config\n{json.dumps(config)}"

    def run(self, number: int = 0, **changes: Any) -> Any:
        """Let an instance run, and return its machine when that is ready."""
        key = (self.folder / "user.pub").read_text()
        one = replace(Instance(f"i-{number:017x}", f"127.1.77.{number + 1}", key, self.user_data()), **changes)
        self.cloud.running[one.id] = one
        self.cloud.tell("on_running", one)
        return one

    def machine(self, number: int = 0, **changes: Any) -> Any:
        """Let an instance run, and return its machine when it can be logged in to."""
        one = self.run(number, **changes)
        machine = wait_for(lambda: self.machines.machines.get(one.id))
        wait_for(lambda: machine._sshd and machine.listens())
        wait_for(lambda: self.marker(one) or machine.user_data.file_system is None)
        return machine

    def marker(self, one: Any) -> str:
        """The marker that runcmd leaves, "" before."""
        folder = self.folder / "cloud" / one.id / "home/.imgnet"
        return next((name for name in ("ready", "failed") if (folder / name).exists()), "")

    def ssh(self, machine: Any, *words: str, pin: str = "", **more: Any) -> "subprocess.CompletedProcess[str]":
        """Run a command there over OpenSSH, believing this host key alone: the bootstrap key, or `pin`."""
        known = self.folder / f"known-{time.monotonic_ns()}"
        key = pin or " ".join((self.folder / "host.pub").read_text().split()[:2])
        known.write_text(f"imgnet {key}\n")
        options = [
            "HostKeyAlias=imgnet", f"UserKnownHostsFile={known}", "StrictHostKeyChecking=yes", "BatchMode=yes",
            "IdentitiesOnly=yes", "LogLevel=ERROR",
        ]  # fmt: skip
        user, port = self.cloud.login
        argv = ["ssh", "-F", "none", "-i", str(self.folder / "user"), "-p", str(port), *(f"-o{one}" for one in options)]
        return subprocess.run(
            [*argv, f"{user}@{machine.address}", *words], capture_output=True, text=True, timeout=30, **more
        )


def wait_for(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.01)
    return found


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    one = World(tmp_path)
    yield one
    one.machines.close()
    assert not one.cloud.errors
    assert not [command_line(pid) for machine in one.machines.machines.values() for pid in machine.processes()]


def guard(machine: Any, tmp_path: Path) -> Watchdog:
    url = machine.env["AWS_EC2_METADATA_SERVICE_ENDPOINT"]
    return Watchdog(tmp_path, None, 0.0, url, lambda: None)


# --- booting ---------------------------------------------------------------------------------------------------------


def test_the_key_of_the_user_data_is_the_host_key_and_the_key_pair_opens_the_door(world: World) -> None:
    machine = world.machine()
    said = world.ssh(machine, "echo", "$HOME", "$OF_THE_BED", "$AWS_EC2_METADATA_SERVICE_ENDPOINT")
    assert said.stdout.split() == [str(machine.home), "yes", world.machines.metadata.url(machine.id)], said
    generate_key(world.folder / "other")
    assert world.ssh(machine, "true", pin=(world.folder / "other.pub").read_text()).returncode == 255
    (world.folder / "user").write_text((world.folder / "other").read_text())
    assert "Permission denied" in world.ssh(machine, "true").stderr


def test_it_leaves_what_runcmd_leaves(world: World) -> None:
    one, other = world.machine(0), world.machine(1)
    assert world.ssh(one, "echo seen > ~/.imgnet/shared/file; ls ~/.imgnet").stdout == "python\nready\nshared\n"
    assert world.ssh(other, "cat ~/.imgnet/shared/file").stdout == "seen\n"
    assert world.ssh(one, "~/.imgnet/python -c 'import torch; print(torch.__name__)'").stdout == "torch\n"
    assert (world.folder / "cloud/efs/fs-0123/file").exists()


def test_a_setting_up_that_fails_says_so_and_is_not_ready(world: World) -> None:
    world.machines.failing_machines = {"127.1.77.2", 2}
    _, failed, _ = [world.machine(number) for number in range(3)]
    assert [world.marker(one) for one in world.cloud.running.values()] == ["ready", "failed", "failed"]
    assert world.ssh(failed, "cat ~/.imgnet/failed; ls ~/.imgnet").stdout.splitlines()[1:] == ["failed"]


def test_sshd_comes_late_and_the_marker_later(world: World) -> None:
    world.machines.ssh_delay_seconds, world.machines.ready_delay_seconds = 3600, 3600
    one = world.run(user_data=world.user_data(limit=1e6))
    machine = wait_for(lambda: world.machines.machines.get(one.id))
    assert machine._sshd is None
    world.cloud.later = 3601
    wait_for(lambda: machine._sshd and machine.listens())
    assert world.marker(one) == ""
    world.cloud.later = 7300
    wait_for(lambda: world.marker(one) == "ready")


@pytest.mark.parametrize("text", ["", "#!/bin/sh\necho", "#cloud-config\nnot json", "#cloud-config\n[]"])
def test_a_machine_of_other_user_data_makes_a_host_key_of_its_own(world: World, text: str) -> None:
    machine = world.machine(user_data=text)
    assert world.ssh(machine, "echo in", pin=machine.host_key).stdout == "in\n"
    assert world.ssh(machine, "ls -A ~", pin=machine.host_key).stdout == ""


def test_where_nobody_could_log_in_nothing_is_started(world: World) -> None:
    one = world.run(key="")
    world.machine(1)
    assert one.id not in world.machines.machines


# --- what root may do ------------------------------------------------------------------------------------------------


def test_after_a_new_host_key_only_that_is_shown_and_open_connections_go_on(world: World) -> None:
    machine = world.machine()
    said = world.ssh(machine, "sudo -n imgnet-hostkey && echo still here")
    key, after = said.stdout.splitlines()
    assert key.startswith("ssh-ed25519 ") and after == "still here", said
    assert world.ssh(machine, "echo in", pin=key).stdout == "in\n"
    assert world.ssh(machine, "true").returncode == 255
    assert (
        world.ssh(machine, "sudo -n imgnet-hostkey", pin=key).stdout == f"{key}\n"
    )  # whoever did not hear it asks again


def test_the_limit_of_the_user_data_cuts_the_power(world: World) -> None:
    machine = world.machine(user_data=world.user_data(limit=600))
    world.cloud.later = 590
    assert world.ssh(machine, "true").returncode == 0 and world.cloud.off == []
    world.cloud.later = 601
    wait_for(lambda: world.cloud.off == [machine.id] and not machine.processes())


def test_the_limit_is_armed_anew_and_holds_then(world: World) -> None:
    machine = world.machine(user_data=world.user_data(limit=600))
    assert world.ssh(machine, "sudo -n imgnet-limit 1000").returncode == 0
    world.cloud.later = 800
    assert world.ssh(machine, "true").returncode == 0 and world.cloud.off == []
    assert world.ssh(machine, "sudo -n imgnet-limit 0.2").returncode == 0
    wait_for(lambda: world.cloud.off == [machine.id] and not machine.processes())


@pytest.mark.parametrize("words", ["systemctl poweroff", "shutdown -h now", "poweroff"])
def test_a_shutdown_ends_the_instance(world: World, words: str) -> None:
    machine = world.machine()
    world.ssh(machine, f"sudo -n {words}")
    wait_for(lambda: world.cloud.off == [machine.id] and not machine.processes())


@pytest.mark.parametrize(
    "words", ["imgnet-limit 5", "systemctl poweroff", "sudo imgnet-limit 5", "sudo -n imgnet-limit", "sudo -n reboot"]
)
def test_what_is_no_roots_command_does_nothing(world: World, words: str) -> None:
    machine = world.machine()
    said = world.ssh(machine, words)
    assert said.returncode in (1, 2) and said.stderr.count("\n") == 1, said
    assert world.cloud.off == [] and machine.listens()


# --- the end ---------------------------------------------------------------------------------------------------------


def test_with_its_instance_everything_on_a_machine_dies(world: World) -> None:
    machine, other = world.machine(0), world.machine(1)
    world.ssh(machine, "tmux -L imgnet new -d sleep 1000; setsid -f sleep 1000 >/dev/null 2>&1 </dev/null")
    world.ssh(other, "setsid -f sleep 1000 >/dev/null 2>&1 </dev/null")
    assert len(machine.processes("sleep", "1000")) >= 2
    world.cloud.tell("on_dying", world.cloud.running[machine.id])
    wait_for(lambda: not machine.processes())
    assert world.ssh(machine, "true").returncode == 255
    assert other.processes("sleep", "1000") and world.ssh(other, "true").returncode == 0


def test_an_instance_that_dies_while_it_boots_leaves_nothing(world: World) -> None:
    for number in range(4):
        one = world.run(number)
        world.cloud.tell("on_dying", one)
    world.machine(9)
    dead = [one for id, one in world.machines.machines.items() if id in list(world.cloud.running)[:4]]
    wait_for(lambda: not any(one.processes() for one in dead))
    assert not world.cloud.off


def test_after_a_reset_all_is_as_new(world: World) -> None:
    machine = world.machine()
    world.machines.ssh_delay_seconds = 7.0
    world.machines.reset()
    assert not machine.processes() and not list((world.folder / "cloud").iterdir())
    assert world.machines.ssh_delay_seconds == 0 and world.ssh(world.machine(), "true").returncode == 0


def test_sixteen_machines_stand_in_seconds(world: World) -> None:
    begun = time.monotonic()
    wanted = [world.run(number) for number in range(16)]
    wait_for(lambda: all(world.marker(one) for one in wanted))
    machines = [world.machines.machines[one.id] for one in wanted]
    wait_for(lambda: all(one.listens() for one in machines))
    for one in wanted:
        world.cloud.tell("on_dying", one)
    wait_for(lambda: not any(one.processes() for one in machines))
    assert time.monotonic() - begun < 20  # half a second on a quiet computer


# --- metadata --------------------------------------------------------------------------------------------------------


def test_the_agents_guard_hears_notice_and_recommendation(world: World, tmp_path: Path) -> None:
    machine, other = world.machine(0), world.machine(1)
    one = guard(machine, tmp_path)
    assert one.query_metadata() == "" and one._metadata_token
    world.cloud.tell("on_notice", world.cloud.running[machine.id], 0.0, "rebalance")
    assert one.query_metadata() == "events/recommendations/rebalance: rebalance at 1970-01-01T00:00:00Z"
    world.cloud.tell("on_notice", world.cloud.running[machine.id], 61.0, "terminate")
    assert one.query_metadata() == "spot/instance-action: terminate at 1970-01-01T00:01:01Z"
    assert guard(other, tmp_path).query_metadata() == ""


def test_the_metadata_service_wants_a_token_and_knows_each_machine(world: World) -> None:
    machine, other = world.machine(0), world.machine(1)
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
    for one in (machine, other):
        assert world.ssh(one, script).stdout.split() == ["401", "400", one.id, "404", "us-east-1b"]
