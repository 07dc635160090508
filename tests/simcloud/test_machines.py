"""The machines behind the simulated EC2: they boot from user data, and end with their instance or at its limit."""

import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from support.simcloud.logins import Keys
from support.simcloud.machines import SimulatedMachines
from support.simcloud.traffic import Moved
from support.ssh_machines import command_line, generate_key
from support.waiting import wait_for

from cluster.agent.watchdog import Watchdog
from train.tools import host


@dataclass(frozen=True)
class Instance:
    """The attributes of an instance that machines read."""

    id: str
    private: str
    key: str
    user_data: str
    public: str = ""
    type: str = "g5.xlarge"
    zone: str = "us-east-1b"


class FakeCloud:
    """A cloud that only knows which instances run, with a clock that can be moved forward."""

    needs_internet = False
    boot_download_bytes = 0

    def __init__(self) -> None:
        self.listeners: list[Any] = []
        self.powered_off: list[str] = []
        self.errors: list[str] = []
        self.clock_offset = 0.0
        self.login = ("", 0)
        self.running: dict[str, Instance] = {}

    def now(self) -> float:
        return time.time() + self.clock_offset

    def send_event(self, name: str, *arguments: Any) -> None:
        for listener in self.listeners:
            getattr(listener, name)(*arguments)

    def power_off(self, id: str) -> None:
        self.powered_off.append(id)
        self.send_event("on_dying", self.running[id])


class MachineTestbed:
    """A cloud with machines, a user key that they accept, and a host key for their boot."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cloud = FakeCloud()
        self.keys = Keys(folder)
        self.machines = SimulatedMachines(self.cloud, folder / "cloud", env={"OF_THE_TESTBED": "yes"})

    def run_instance(self, number: int = 0, **changes: Any) -> Instance:
        """Let an instance run, and return the instance."""
        key = (self.folder / "user.pub").read_text()
        instance = Instance(f"i-{number:017x}", f"127.1.77.{number + 1}", key, self.keys.user_data())
        instance = replace(instance, **changes)
        self.cloud.running[instance.id] = instance
        self.cloud.send_event("on_running", instance)
        return instance

    def boot_machine(self, number: int = 0, **changes: Any) -> Any:
        """Let an instance run, and return its machine when it is set up."""
        instance = self.run_instance(number, **changes)
        machine = wait_for(lambda: self.machines.machines.get(instance.id))
        wait_for(lambda: machine._sshd and machine.listens())
        wait_for(lambda: self.marker(instance) or machine.user_data.file_system is None)
        return machine

    def marker(self, instance: Instance) -> str:
        """Return the marker file that the setup of an instance's machine has written, "" while there is none."""
        folder = self.folder / "cloud" / instance.id / "home/.imgnet"
        return next((name for name in ("ready", "failed") if (folder / name).exists()), "")

    def ssh(self, machine: Any, *words: str, host_key: str = "") -> "subprocess.CompletedProcess[str]":
        """Run a command on a machine. Only one host key is trusted: `host_key`, or that of the boot."""
        return self.keys.ssh(machine.address, *self.cloud.login, *words, host_key=host_key)


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[MachineTestbed]:
    bed = MachineTestbed(tmp_path)
    yield bed
    bed.machines.close()
    assert not bed.cloud.errors
    assert not [command_line(pid) for machine in bed.machines.machines.values() for pid in machine.processes()]


def make_watchdog(machine: Any, tmp_path: Path) -> Watchdog:
    url = machine.env["AWS_EC2_METADATA_SERVICE_ENDPOINT"]
    return Watchdog(tmp_path, None, 0.0, url, lambda: None)


# --- booting ---------------------------------------------------------------------------------------------------------


def test_machine_has_the_host_key_of_its_user_data(bed: MachineTestbed) -> None:
    machine = bed.boot_machine()
    result = bed.ssh(machine, "echo", "$HOME", "$OF_THE_TESTBED", "$AWS_EC2_METADATA_SERVICE_ENDPOINT")
    assert result.stdout.split() == [str(machine.home), "yes", bed.machines.metadata.url(machine.id)], result
    generate_key(bed.folder / "other")
    assert bed.ssh(machine, "true", host_key=(bed.folder / "other.pub").read_text()).returncode == 255
    (bed.folder / "user").write_text((bed.folder / "other").read_text())
    assert "Permission denied" in bed.ssh(machine, "true").stderr


def test_key_of_instance_connect_logs_in_for_a_minute_where_the_image_has_it(bed: MachineTestbed) -> None:
    machine = bed.boot_machine()
    generate_key(bed.folder / "other")
    for suffix in ("", ".pub"):
        (bed.folder / f"other{suffix}").replace(bed.folder / f"user{suffix}")
    key = (bed.folder / "user.pub").read_text().strip()
    user, instance = bed.cloud.login[0], bed.cloud.running[machine.id]
    for has_it, name, code in ((False, user, 255), (True, f"not-{user}", 255), (True, user, 0)):
        bed.machines.configure(has_instance_connect=has_it)
        bed.machines.on_login_key(instance, name, key)
        assert bed.ssh(machine, "true").returncode == code
    machine.admit_keys()  # a minute later
    assert "Permission denied" in bed.ssh(machine, "true").stderr


def test_finish_setup_makes_shared_folder_python_and_marker(bed: MachineTestbed) -> None:
    first = bed.boot_machine(0)
    second = bed.boot_machine(1)
    assert bed.ssh(first, "echo seen > ~/.imgnet/shared/file; ls ~/.imgnet").stdout == "python\nready\nshared\n"
    assert bed.ssh(second, "cat ~/.imgnet/shared/file").stdout == "seen\n"
    assert bed.ssh(first, "~/.imgnet/python -c 'import torch; print(torch.__name__)'").stdout == "torch\n"
    assert (bed.folder / "cloud/efs/fs-0123/file").exists()


def test_kernel_of_a_machine_counts_what_the_cloud_says_that_it_moved(bed: MachineTestbed) -> None:
    machine = bed.boot_machine()
    root = Path(bed.ssh(machine, f"printenv {host.ROOT_VARIABLE}").stdout.strip())
    shared = Path(bed.ssh(machine, "readlink -f ~/.imgnet/shared").stdout.strip())
    instance = bed.cloud.running[machine.id]
    for moved in (Moved(), Moved(efs_read=3 << 20, efs_written=5 << 20, internet=700)):
        bed.cloud.send_event("on_transfer", instance, moved)
        counters = host.read_nfs_counters(shared / "job-1", root)
        assert counters and (counters.read_bytes, counters.written_bytes) == (moved.efs_read, moved.efs_written)
        assert (counters.reads, counters.writes) == (moved.efs_read >> 20, moved.efs_written >> 20)
        assert sum(host.read_interface_bytes(root)["eth0"]) == moved.efs_read + moved.efs_written + moved.internet


def test_machine_downloads_when_it_is_set_up(bed: MachineTestbed) -> None:
    downloads: list[tuple[str, int]] = []
    bed.cloud.boot_download_bytes = 5
    bed.cloud.transfer = lambda id, internet: downloads.append((id, internet))  # type: ignore[attr-defined]
    machine = bed.boot_machine()
    assert downloads == [(machine.id, 5)]


def test_failing_machines_write_the_failure_and_no_marker(bed: MachineTestbed) -> None:
    bed.machines.failing_machines = {"127.1.77.2", 2}
    _, failed, _ = [bed.boot_machine(number) for number in range(3)]
    assert [bed.marker(instance) for instance in bed.cloud.running.values()] == ["ready", "failed", "failed"]
    assert bed.ssh(failed, "cat ~/.imgnet/failed; ls ~/.imgnet").stdout.splitlines()[1:] == ["failed"]


def test_machines_have_gpus_that_can_be_lost_and_a_driver_that_can_hang(bed: MachineTestbed) -> None:
    assert bed.ssh(bed.boot_machine(), "command -v nvidia-smi").stdout == "", "machines have no GPUs unless told so"
    bed.machines.configure(gpus=2)
    losing, hanging = bed.boot_machine(1), bed.boot_machine(2)
    query = "nvidia-smi --query-gpu=index,uuid,power.limit --format=csv,noheader"
    both = [f"{index}, GPU-00000000-0000-0000-0000-00000000000{index}, [N/A]" for index in range(2)]
    assert bed.ssh(losing, query).stdout.splitlines() == both
    bed.machines.break_gpu(losing.id, "lost")
    answer = bed.ssh(losing, query)
    assert answer.returncode == 15 and answer.stdout.splitlines()[0] == both[0]
    assert answer.stdout.splitlines()[1:] == [
        "Unable to determine the device handle for GPU 0000:00:1E.0: Unknown Error"
    ]
    bed.machines.break_gpu(hanging.id, "hangs")
    assert bed.ssh(hanging, f"timeout 1 {query}").returncode == 124
    assert bed.ssh(losing, query).returncode == 15, "another machine is not concerned"
    with pytest.raises(ValueError, match="lost, hangs"):
        bed.machines.break_gpu(hanging.id, "melts")


def test_delay_holds_back_sshd(bed: MachineTestbed) -> None:
    bed.machines.ssh_delay_seconds = 3600
    instance = bed.run_instance(user_data=bed.keys.user_data(limit=1e6))
    machine = wait_for(lambda: bed.machines.machines.get(instance.id))
    assert machine._sshd is None and bed.marker(instance) == ""
    bed.cloud.clock_offset = 3601
    wait_for(lambda: machine._sshd and machine.listens() and bed.marker(instance) == "ready")


@pytest.mark.parametrize("text", ["", "#!/bin/sh\necho", "#cloud-config\nnot json", "#cloud-config\n[]"])
def test_machine_without_cloud_config_makes_its_own_host_key(bed: MachineTestbed, text: str) -> None:
    machine = bed.boot_machine(user_data=text)
    assert bed.ssh(machine, "echo in", host_key=machine.host_key).stdout == "in\n"
    assert bed.ssh(machine, "ls -A ~", host_key=machine.host_key).stdout == ""


# --- root commands -------------------------------------------------------------------------------------------------


def test_imgnet_hostkey_replaces_the_key_and_keeps_connections(bed: MachineTestbed) -> None:
    machine = bed.boot_machine()
    result = bed.ssh(machine, "sudo -n imgnet-hostkey && echo still here")
    key, last_line = result.stdout.splitlines()
    assert key.startswith("ssh-ed25519 ") and last_line == "still here", result
    assert bed.ssh(machine, "echo in", host_key=key).stdout == "in\n"
    assert bed.ssh(machine, "true").returncode == 255
    # A caller that lost the answer may ask again.
    assert bed.ssh(machine, "sudo -n imgnet-hostkey", host_key=key).stdout == f"{key}\n"


def test_limit_of_the_user_data_powers_off(bed: MachineTestbed) -> None:
    machine = bed.boot_machine(user_data=bed.keys.user_data(limit=600))
    bed.cloud.clock_offset = 590
    assert bed.ssh(machine, "true").returncode == 0 and bed.cloud.powered_off == []
    bed.cloud.clock_offset = 601
    wait_for(lambda: bed.cloud.powered_off == [machine.id] and not machine.processes())


def test_imgnet_limit_replaces_the_limit(bed: MachineTestbed) -> None:
    machine = bed.boot_machine(user_data=bed.keys.user_data(limit=600))
    assert bed.ssh(machine, "sudo -n imgnet-limit 1000").returncode == 0
    bed.cloud.clock_offset = 800
    assert bed.ssh(machine, "true").returncode == 0 and bed.cloud.powered_off == []
    assert bed.ssh(machine, "sudo -n imgnet-limit 0.2").returncode == 0
    wait_for(lambda: bed.cloud.powered_off == [machine.id] and not machine.processes())


@pytest.mark.parametrize(
    "command", ["imgnet-limit 5", "systemctl poweroff", "sudo imgnet-limit 5", "sudo -n imgnet-limit", "sudo -n reboot"]
)
def test_fake_commands_reject_other_uses(bed: MachineTestbed, command: str) -> None:
    machine = bed.boot_machine()
    result = bed.ssh(machine, command)
    assert result.returncode in (1, 2) and result.stderr.count("\n") == 1, result
    assert bed.cloud.powered_off == [] and machine.listens()


# --- the end ---------------------------------------------------------------------------------------------------------


def test_end_of_an_instance_kills_everything_on_its_machine(bed: MachineTestbed) -> None:
    machine = bed.boot_machine(0)
    other = bed.boot_machine(1)
    bed.ssh(machine, "tmux -L imgnet new -d sleep 1000; setsid -f sleep 1000 >/dev/null 2>&1 </dev/null")
    bed.ssh(other, "setsid -f sleep 1000 >/dev/null 2>&1 </dev/null")
    assert len(machine.processes("sleep", "1000")) >= 2
    bed.cloud.send_event("on_dying", bed.cloud.running[machine.id])
    wait_for(lambda: not machine.processes())
    assert bed.ssh(machine, "true").returncode == 255
    assert other.processes("sleep", "1000") and bed.ssh(other, "true").returncode == 0


def test_end_of_an_instance_during_its_boot_leaves_nothing(bed: MachineTestbed) -> None:
    for number in range(4):
        instance = bed.run_instance(number)
        bed.cloud.send_event("on_dying", instance)
    bed.boot_machine(9)
    ended_ids = list(bed.cloud.running)[:4]
    ended_machines = [machine for id, machine in bed.machines.machines.items() if id in ended_ids]
    wait_for(lambda: not any(machine.processes() for machine in ended_machines))
    assert not bed.cloud.powered_off


def test_reset_removes_machines_and_restores_settings(bed: MachineTestbed) -> None:
    machine = bed.boot_machine()
    bed.machines.ssh_delay_seconds = 7.0
    bed.machines.reset()
    assert not machine.processes() and not list((bed.folder / "cloud").iterdir())
    assert bed.machines.ssh_delay_seconds == 0 and bed.ssh(bed.boot_machine(), "true").returncode == 0


# --- metadata --------------------------------------------------------------------------------------------------------


def test_watchdog_reads_notice_and_recommendation(bed: MachineTestbed, tmp_path: Path) -> None:
    machine = bed.boot_machine(0)
    other = bed.boot_machine(1)
    watchdog = make_watchdog(machine, tmp_path)
    watchdog.poll_metadata()
    assert watchdog.leave_reason == "" == watchdog.risk_reason and watchdog._metadata_token
    bed.cloud.send_event("on_notice", bed.cloud.running[machine.id], 0.0, "rebalance")
    watchdog.poll_metadata()
    assert "rebalance recommendation at 1970-01-01T00:00:00Z" in watchdog.risk_reason and watchdog.leave_reason == ""
    bed.cloud.send_event("on_notice", bed.cloud.running[machine.id], 61.0, "terminate")
    watchdog.poll_metadata()
    assert watchdog.leave_reason == "spot/instance-action: terminate at 1970-01-01T00:01:01Z"
    other_watchdog = make_watchdog(other, tmp_path)
    other_watchdog.poll_metadata()
    assert other_watchdog.leave_reason == "" == other_watchdog.risk_reason


def test_metadata_service_requires_a_token_and_knows_each_machine(bed: MachineTestbed) -> None:
    machine = bed.boot_machine(0)
    other = bed.boot_machine(1)
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
    for asking in (machine, other):
        assert bed.ssh(asking, script).stdout.split() == ["401", "400", asking.id, "404", "us-east-1b"]
