"""What a machine does when it boots: read as cloud-init does, and its scripts run in a folder of their own."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.aws_gang import public_key

from infra.aws.instances.user_data import HOST_KEY_SCRIPT, LIMIT_SCRIPT, SETUP_SCRIPT, build_user_data
from infra.aws.stack import key_pairs

SCRIPTS = {"limit": LIMIT_SCRIPT, "host key": HOST_KEY_SCRIPT, "set up": SETUP_SCRIPT}
PLAIN = ("imgnet-limit.timer", "imgnet-limit-77.timer")


def made(**changes: Any) -> tuple[str, dict[str, Any]]:
    private, public = key_pairs.generate_key_pair()
    words: dict[str, Any] = {
        "poweroff_seconds": 7200, "private_key": private, "public_key": public, "file_system": "fs-0d4", "access_point": "fsap-0e5",
        "region": "us-east-1", "ssh_user": "ubuntu", "python": "/opt/pytorch/bin/python", **changes,
    }  # fmt: skip
    text = build_user_data(**words)
    first, _, rest = text.partition("\n")
    assert first == "#cloud-config"
    return text, json.loads(rest)


def test_it_is_json_after_the_first_line_and_small_enough_for_ec2() -> None:
    text, config = made()
    assert len(text.encode()) < 16_384 and text.isascii()
    assert config["ssh_deletekeys"] is True and set(config["ssh_keys"]) == {"ed25519_private", "ed25519_public"}


def test_the_limit_is_armed_before_anything_else() -> None:
    _, config = made(poweroff_seconds=4321)
    assert next(iter(config)) == "bootcmd"
    (words,) = config["bootcmd"]
    assert [words[0], *words[3:]] == [
        *("systemd-run", "--unit=imgnet-limit", "--on-active=4321", "systemctl", "poweroff"),
    ], "cloud-init runs bootcmd in its first stage, and the rest later"
    assert set(words[1:3]) == {"--no-block", "--timer-property=DefaultDependencies=no"}, (
        "there nothing may be waited for that comes after sysinit.target, as timers do: the boot would hang"
    )


def test_the_only_secret_is_the_host_key_of_the_first_login(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = {"AWS_SECRET_ACCESS_KEY": "very-secret", "AWS_ACCESS_KEY_ID": "AKIA0", "AWS_SESSION_TOKEN": "tokentoken"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    text, config = made()
    private = config["ssh_keys"].pop("ed25519_private")
    assert private.startswith("-----BEGIN OPENSSH PRIVATE KEY-----") and text.count("PRIVATE KEY-----") == 2
    rest = json.dumps(config)
    assert "PRIVATE" not in rest and not any(value in rest for value in secrets.values())
    assert not re.search(r"(?i)password|secret|AKIA", rest)


def test_the_programs_for_root_are_where_the_agent_looks_for_them() -> None:
    _, config = made()
    files = {one["path"]: one for one in config["write_files"]}
    assert set(files) == {"/usr/local/sbin/imgnet-limit", "/usr/local/sbin/imgnet-hostkey"}
    assert {one["permissions"] for one in files.values()} == {"0755"}
    assert all(one["content"].startswith("#!/bin/sh\n") for one in files.values())
    (run,) = config["runcmd"]
    assert run == [
        "sh", "-c", SETUP_SCRIPT, "sh", "fs-0d4", "fsap-0e5", "us-east-1", "ubuntu", "/opt/pytorch/bin/python"
    ]  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_valid(name: str) -> None:
    ran = subprocess.run(["sh", "-n"], input=SCRIPTS[name], text=True, capture_output=True)
    assert ran.returncode == 0 and not ran.stderr
    if shutil.which("shellcheck"):  # where it is installed
        words = ["shellcheck", "--shell=sh", "--exclude=SC2086", "-"]  # the list of disks is to be split
        ran = subprocess.run(words, input=SCRIPTS[name], text=True, capture_output=True)
        assert ran.returncode == 0, ran.stdout


# --- the scripts, run ------------------------------------------------------------------------------------------------


class Machine:
    """A root folder, and programs that only write down how they were called."""

    def __init__(self, path: Path) -> None:
        self.path, self.log, self.bin = path, path / "log", path / "bin"
        self.bin.mkdir()
        for folder in ("etc/ssh", "var/lib/cloud/instances/i-1", "opt", "home/me"):
            (path / folder).mkdir(parents=True)
        self.log.touch()

    def fake(self, name: str, script: str = "") -> None:
        """A program that logs its words, and then does this."""
        program = self.bin / name
        program.write_text(f'#!/bin/sh\necho "{name} $*" >>"{self.log}"\n{script}\n')
        program.chmod(0o755)

    def run(self, script: str, *words: str) -> "subprocess.CompletedProcess[str]":
        """Run a script with this folder in place of the root."""
        for folder in ("/etc/ssh", "/var/lib/cloud", "/opt/"):
            script = script.replace(folder, f"{self.path}{folder}")
        env = {"PATH": f"{self.bin}:{os.environ['PATH']}", "HOME": str(self.path)}
        return subprocess.run(["sh", "-c", script, "sh", *words], env=env, text=True, capture_output=True, timeout=30)

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_the_limit_runs_anew_before_the_old_ones_are_stopped(machine: Machine) -> None:
    machine.fake("systemd-run")
    rows = "".join(f"{name} loaded active waiting x\\n" for name in PLAIN)
    machine.fake("systemctl", f'[ "$1" != list-units ] || printf "{rows}"')
    ran = machine.run(LIMIT_SCRIPT, "3600")
    assert ran.returncode == 0, ran.stderr
    first, *rest = machine.calls
    new = re.fullmatch(r"systemd-run --quiet --unit=(imgnet-limit-\d+) --on-active=3600 systemctl poweroff", first)
    assert new and new[1] + ".timer" not in PLAIN
    assert [one for one in rest if " stop " in one] == [f"systemctl stop {name}" for name in PLAIN]


def test_the_new_limit_does_not_stop_itself(machine: Machine) -> None:
    machine.fake("systemd-run", f'echo "${{2#--unit=}}.timer loaded" >>"{machine.path}/timers"')
    machine.fake("systemctl", f'[ "$1" != list-units ] || cat "{machine.path}/timers"')
    assert machine.run(LIMIT_SCRIPT, "60").returncode == 0
    assert not [one for one in machine.calls if " stop " in one]
    assert machine.run(LIMIT_SCRIPT, "90").returncode == 0
    first = (machine.path / "timers").read_text().split()[0]
    assert [one for one in machine.calls if " stop " in one] == [f"systemctl stop {first}"]


def test_when_the_new_limit_cannot_be_armed_the_old_one_stays(machine: Machine) -> None:
    machine.fake("systemd-run", "exit 1")
    machine.fake("systemctl", f'[ "$1" != list-units ] || echo {PLAIN[0]}')
    assert machine.run(LIMIT_SCRIPT, "soon").returncode != 0
    assert not [one for one in machine.calls if " stop " in one]


def booted(machine: Machine, *, reload: str = "") -> Path:
    """As cloud-init leaves it: with the host key of the user data."""
    etc, cloud = machine.path / "etc/ssh", machine.path / "var/lib/cloud/instances/i-1"
    (etc / "ssh_host_ed25519_key").write_text("bootstrap")
    (etc / "ssh_host_ed25519_key.pub").write_text(public_key())
    for name in ("user-data.txt", "user-data.txt.i", "cloud-config.txt", "vendor-data.txt"):
        (cloud / name).write_text("PRIVATE")
    machine.fake("sshd")
    machine.fake("systemctl", reload)
    return etc


def test_the_host_key_of_the_user_data_is_replaced_and_wiped(machine: Machine) -> None:
    etc = booted(machine)
    ran = machine.run(HOST_KEY_SCRIPT)
    assert ran.returncode == 0, ran.stderr
    assert re.fullmatch(r"ssh-ed25519 [A-Za-z0-9+/=]{60,}\n", ran.stdout) and ran.stdout.strip() != public_key()
    assert key_pairs.read_public_key(etc / "imgnet_host_key") == ran.stdout.strip()
    assert (etc / "imgnet_host_key").stat().st_mode & 0o777 == 0o600
    assert sorted(one.name for one in etc.iterdir()) == ["imgnet_host_key", "imgnet_host_key.pub", "sshd_config.d"]
    assert (etc / "sshd_config.d/00-imgnet.conf").read_text() == f"HostKey {etc}/imgnet_host_key\n"
    kept = [one.name for one in (machine.path / "var/lib/cloud").rglob("*") if one.is_file()]
    assert kept == ["vendor-data.txt"], "the user data holds the private half"
    assert machine.calls == ["sshd -t", "systemctl reload ssh"]


def test_asked_twice_it_tells_the_same_key(machine: Machine) -> None:
    booted(machine)
    first, second = machine.run(HOST_KEY_SCRIPT), machine.run(HOST_KEY_SCRIPT)
    assert first.returncode == second.returncode == 0 and first.stdout == second.stdout != ""


def test_killed_while_it_makes_the_key_and_asked_again_it_has_one(machine: Machine) -> None:
    etc = booted(machine)
    (etc / "imgnet_new").write_text("half a k")
    (etc / "imgnet_host_key.pub").write_text("ssh-ed25519 OLD")
    ran = machine.run(HOST_KEY_SCRIPT)
    assert ran.returncode == 0 and key_pairs.read_public_key(etc / "imgnet_host_key") == ran.stdout.strip()


def test_where_the_daemon_has_another_name_that_one_is_told(machine: Machine) -> None:
    booted(machine, reload='[ "$2" = sshd ]')
    assert machine.run(HOST_KEY_SCRIPT).returncode == 0
    assert machine.calls[-2:] == ["systemctl reload ssh", "systemctl reload sshd"]


def test_with_a_configuration_that_sshd_refuses_the_old_key_stays(machine: Machine) -> None:
    etc = booted(machine)
    machine.fake("sshd", "exit 255")
    ran = machine.run(HOST_KEY_SCRIPT)
    assert ran.returncode != 0 and ran.stdout == ""
    assert (etc / "ssh_host_ed25519_key").exists() and not [one for one in machine.calls if "reload" in one]


def set_up(machine: Machine, python: str = "") -> tuple[Path, "subprocess.CompletedProcess[str]"]:
    """Run the set-up as root would; returns ~/.imgnet and how it ended."""
    home = machine.path / "home/me"
    machine.fake("getent", f'echo "me:x:1000:1000::{home}:/bin/sh"')
    for name in ("chown", "mkfs.ext4", "mdadm", "mount.efs", "tmux", "sleep"):
        machine.fake(name)
    ran = machine.run(SETUP_SCRIPT, "fs-1", "fsap-1", "us-east-1", "me", python)
    return home / ".imgnet", ran


@pytest.mark.parametrize(("disks", "told"), [
    ("", []),
    ("/dev/nvme1n1 Amazon EC2 NVMe Instance Storage\\n",
     ["mkfs.ext4 -q -E nodiscard /dev/nvme1n1", "mount -o noatime /dev/nvme1n1 "]),
    ("/dev/nvme0n1 Amazon Elastic Block Store\\n/dev/nvme1n1 NVMe Instance Storage\\n/dev/nvme2n1 Instance Storage\\n",
     ["mdadm --create /dev/md0 --run --force --level=0 --raid-devices=2 /dev/nvme1n1 /dev/nvme2n1",
      "mkfs.ext4 -q -E nodiscard /dev/md0", "mount -o noatime /dev/md0 "]),
])  # fmt: skip
def test_the_fast_disks_become_one_and_the_file_system_is_mounted_with_tls(
    machine: Machine, disks: str, told: list[str]
) -> None:
    machine.fake("mountpoint", "exit 1")
    machine.fake("lsblk", f'printf "{disks}"')
    machine.fake("mount")
    folder, ran = set_up(machine, "/bin/sh")
    assert ran.returncode == 0 and (folder / "ready").exists() and not (folder / "failed").exists(), ran.stderr
    mounts = [one for one in machine.calls if one.startswith(("mdadm", "mkfs", "mount "))]
    assert len(mounts) == len(told) + 1 and all(a.startswith(b) for a, b in zip(mounts, told, strict=False))
    assert re.fullmatch(rf"mount -t efs -o tls,iam,\S*,accesspoint=fsap-1 fs-1:/ {folder}/shared", mounts[-1])
    assert machine.calls[-1] == f"chown me {folder}/ready", "the marker is last"
    said = subprocess.run([folder / "python", "-c", "echo $0 $1", "a", "b c"], text=True, capture_output=True)
    assert said.stdout == "a b c\n", "a program that runs the Python of the image"


def test_a_disk_that_the_image_has_mounted_is_used_as_it_is(machine: Machine) -> None:
    machine.fake("mountpoint")
    machine.fake("mount")
    folder, ran = set_up(machine, "/bin/sh")
    assert ran.returncode == 0 and (folder / "ready").exists(), ran.stderr
    nvme = f"{machine.path}/opt/dlami/nvme/imgnet"
    assert f"mount --bind {nvme} {folder}" in machine.calls and not [one for one in machine.calls if "mkfs" in one]


def test_a_file_system_that_cannot_be_mounted_is_told_after_a_minute(machine: Machine) -> None:
    machine.fake("mountpoint", "exit 1")
    machine.fake("lsblk")
    machine.fake("mount", "exit 1")
    folder, ran = set_up(machine, "/bin/sh")
    assert ran.returncode == 1 and not (folder / "ready").exists()
    assert (folder / "failed").read_text().startswith("the file system fs-1 cannot be mounted")
    assert machine.calls.count("sleep 5") == 11


def test_the_first_python_that_is_there_is_taken(machine: Machine) -> None:
    machine.fake("mountpoint", "exit 1")
    machine.fake("lsblk")
    machine.fake("mount")
    python = machine.path / "opt/pytorch/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho torch\n")
    python.chmod(0o755)
    folder, ran = set_up(machine, "/nowhere/python")
    assert ran.returncode == 0, ran.stderr
    assert subprocess.run([folder / "python"], text=True, capture_output=True).stdout == "torch\n"
