"""User data: parsed as cloud-init does, and its scripts run below a temporary root folder."""

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
OLD_TIMERS = ("imgnet-limit.timer", "imgnet-limit-77.timer")


def build(**changes: Any) -> tuple[str, dict[str, Any]]:
    private, public = key_pairs.generate_key_pair()
    params: dict[str, Any] = {
        "poweroff_seconds": 7200,
        "private_key": private,
        "public_key": public,
        "file_system": "fs-0d4",
        "access_point": "fsap-0e5",
        "region": "us-east-1",
        "ssh_user": "ubuntu",
        "python": "/opt/pytorch/bin/python",
        **changes,
    }
    text = build_user_data(**params)
    first_line, _, json_text = text.partition("\n")
    assert first_line == "#cloud-config"
    return text, json.loads(json_text)


def test_build_user_data_is_json_and_small_enough_for_ec2() -> None:
    text, config = build()
    assert len(text.encode()) < 16_384 and text.isascii()
    assert config["ssh_deletekeys"] is True and set(config["ssh_keys"]) == {"ed25519_private", "ed25519_public"}


def test_build_user_data_arms_the_poweroff_first() -> None:
    _, config = build(poweroff_seconds=4321)
    assert next(iter(config)) == "bootcmd"
    (argv,) = config["bootcmd"]
    assert [argv[0], *argv[3:]] == [
        *("systemd-run", "--unit=imgnet-limit", "--on-active=4321", "systemctl", "poweroff"),
    ], "cloud-init runs bootcmd in its first stage"
    assert set(argv[1:3]) == {"--no-block", "--timer-property=DefaultDependencies=no"}, (
        "bootcmd must not wait for what comes after sysinit.target, such as timers: the boot would hang"
    )


def test_build_user_data_has_no_secret_but_the_boot_host_key(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = {"AWS_SECRET_ACCESS_KEY": "very-secret", "AWS_ACCESS_KEY_ID": "AKIA0", "AWS_SESSION_TOKEN": "tokentoken"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    text, config = build()
    private = config["ssh_keys"].pop("ed25519_private")
    assert private.startswith("-----BEGIN OPENSSH PRIVATE KEY-----") and text.count("PRIVATE KEY-----") == 2
    other_text = json.dumps(config)
    assert "PRIVATE" not in other_text and not any(value in other_text for value in secrets.values())
    assert not re.search(r"(?i)password|secret|AKIA", other_text)


def test_build_user_data_installs_the_root_programs() -> None:
    _, config = build()
    files = {file["path"]: file for file in config["write_files"]}
    assert set(files) == {"/usr/local/sbin/imgnet-limit", "/usr/local/sbin/imgnet-hostkey"}
    assert {file["permissions"] for file in files.values()} == {"0755"}
    assert all(file["content"].startswith("#!/bin/sh\n") for file in files.values())
    (run,) = config["runcmd"]
    assert run == [
        "sh",
        "-c",
        SETUP_SCRIPT,
        "sh",
        "fs-0d4",
        "fsap-0e5",
        "us-east-1",
        "ubuntu",
        "/opt/pytorch/bin/python",
    ]


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_valid_shell(name: str) -> None:
    completed = subprocess.run(["sh", "-n"], input=SCRIPTS[name], text=True, capture_output=True)
    assert completed.returncode == 0 and not completed.stderr
    if shutil.which("shellcheck"):  # where it is installed
        argv = ["shellcheck", "--shell=sh", "--exclude=SC2086", "-"]  # the list of disks is to be split
        completed = subprocess.run(argv, input=SCRIPTS[name], text=True, capture_output=True)
        assert completed.returncode == 0, completed.stdout


# --- the scripts, run ------------------------------------------------------------------------------------------------


class Machine:
    """A temporary root folder with fake programs that log their arguments."""

    def __init__(self, path: Path) -> None:
        self.path, self.log, self.bin = path, path / "log", path / "bin"
        self.bin.mkdir()
        for folder in ("etc/ssh", "var/lib/cloud/instances/i-1", "opt", "home/me"):
            (path / folder).mkdir(parents=True)
        self.log.touch()

    def fake(self, name: str, script: str = "") -> None:
        """Install a program that logs its arguments and then runs `script`."""
        program = self.bin / name
        program.write_text(f'#!/bin/sh\necho "{name} $*" >>"{self.log}"\n{script}\n')
        program.chmod(0o755)

    def run(self, script: str, *args: str) -> "subprocess.CompletedProcess[str]":
        """Run a script with this folder as its root."""
        for folder in ("/etc/ssh", "/var/lib/cloud", "/opt/"):
            script = script.replace(folder, f"{self.path}{folder}")
        env = {"PATH": f"{self.bin}:{os.environ['PATH']}", "HOME": str(self.path)}
        return subprocess.run(["sh", "-c", script, "sh", *args], env=env, text=True, capture_output=True, timeout=30)

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_limit_script_arms_before_it_stops_old_timers(machine: Machine) -> None:
    machine.fake("systemd-run")
    rows = "".join(f"{name} loaded active waiting x\\n" for name in OLD_TIMERS)
    machine.fake("systemctl", f'[ "$1" != list-units ] || printf "{rows}"')
    completed = machine.run(LIMIT_SCRIPT, "3600")
    assert completed.returncode == 0, completed.stderr
    first_call, *other_calls = machine.calls
    new_timer = re.fullmatch(
        r"systemd-run --quiet --unit=(imgnet-limit-\d+) --on-active=3600 systemctl poweroff", first_call
    )
    assert new_timer and new_timer[1] + ".timer" not in OLD_TIMERS
    assert [call for call in other_calls if " stop " in call] == [f"systemctl stop {name}" for name in OLD_TIMERS]


def test_limit_script_does_not_stop_its_own_timer(machine: Machine) -> None:
    machine.fake("systemd-run", f'echo "${{2#--unit=}}.timer loaded" >>"{machine.path}/timers"')
    machine.fake("systemctl", f'[ "$1" != list-units ] || cat "{machine.path}/timers"')
    assert machine.run(LIMIT_SCRIPT, "60").returncode == 0
    assert not [call for call in machine.calls if " stop " in call]
    assert machine.run(LIMIT_SCRIPT, "90").returncode == 0
    first_timer = (machine.path / "timers").read_text().split()[0]
    assert [call for call in machine.calls if " stop " in call] == [f"systemctl stop {first_timer}"]


def test_limit_script_keeps_old_timers_when_arming_fails(machine: Machine) -> None:
    machine.fake("systemd-run", "exit 1")
    machine.fake("systemctl", f'[ "$1" != list-units ] || echo {OLD_TIMERS[0]}')
    assert machine.run(LIMIT_SCRIPT, "soon").returncode != 0
    assert not [call for call in machine.calls if " stop " in call]


def boot(machine: Machine, *, reload: str = "") -> Path:
    """Create the files that cloud-init leaves: the boot host key and the user data."""
    etc, cloud = machine.path / "etc/ssh", machine.path / "var/lib/cloud/instances/i-1"
    (etc / "ssh_host_ed25519_key").write_text("bootstrap")
    (etc / "ssh_host_ed25519_key.pub").write_text(public_key())
    for name in ("user-data.txt", "user-data.txt.i", "cloud-config.txt", "vendor-data.txt"):
        (cloud / name).write_text("PRIVATE")
    machine.fake("sshd")
    machine.fake("systemctl", reload)
    return etc


def test_host_key_script_replaces_and_deletes_the_boot_key(machine: Machine) -> None:
    etc = boot(machine)
    completed = machine.run(HOST_KEY_SCRIPT)
    assert completed.returncode == 0, completed.stderr
    assert (
        re.fullmatch(r"ssh-ed25519 [A-Za-z0-9+/=]{60,}\n", completed.stdout)
        and completed.stdout.strip() != public_key()
    )
    assert key_pairs.read_public_key(etc / "imgnet_host_key") == completed.stdout.strip()
    assert (etc / "imgnet_host_key").stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in etc.iterdir()) == ["imgnet_host_key", "imgnet_host_key.pub", "sshd_config.d"]
    assert (etc / "sshd_config.d/00-imgnet.conf").read_text() == f"HostKey {etc}/imgnet_host_key\n"
    kept_files = [path.name for path in (machine.path / "var/lib/cloud").rglob("*") if path.is_file()]
    assert kept_files == ["vendor-data.txt"], "the user data holds the private half"
    assert machine.calls == ["sshd -t", "systemctl reload ssh"]


def test_host_key_script_run_twice_prints_the_same_key(machine: Machine) -> None:
    boot(machine)
    first, second = machine.run(HOST_KEY_SCRIPT), machine.run(HOST_KEY_SCRIPT)
    assert first.returncode == second.returncode == 0 and first.stdout == second.stdout != ""


def test_host_key_script_recovers_from_a_kill(machine: Machine) -> None:
    etc = boot(machine)
    (etc / "imgnet_new").write_text("half a k")
    (etc / "imgnet_host_key.pub").write_text("ssh-ed25519 OLD")
    completed = machine.run(HOST_KEY_SCRIPT)
    assert completed.returncode == 0 and key_pairs.read_public_key(etc / "imgnet_host_key") == completed.stdout.strip()


def test_host_key_script_reloads_sshd_under_either_name(machine: Machine) -> None:
    boot(machine, reload='[ "$2" = sshd ]')
    assert machine.run(HOST_KEY_SCRIPT).returncode == 0
    assert machine.calls[-2:] == ["systemctl reload ssh", "systemctl reload sshd"]


def test_host_key_script_keeps_the_old_key_when_sshd_refuses(machine: Machine) -> None:
    etc = boot(machine)
    machine.fake("sshd", "exit 255")
    completed = machine.run(HOST_KEY_SCRIPT)
    assert completed.returncode != 0 and completed.stdout == ""
    assert (etc / "ssh_host_ed25519_key").exists() and not [call for call in machine.calls if "reload" in call]


def run_setup(machine: Machine, python: str = "") -> tuple[Path, "subprocess.CompletedProcess[str]"]:
    """Run the setup script as root would. Return ~/.imgnet and the completed process."""
    home = machine.path / "home/me"
    machine.fake("getent", f'echo "me:x:1000:1000::{home}:/bin/sh"')
    for name in ("chown", "mkfs.ext4", "mdadm", "mount.efs", "tmux", "sleep"):
        machine.fake(name)
    completed = machine.run(SETUP_SCRIPT, "fs-1", "fsap-1", "us-east-1", "me", python)
    return home / ".imgnet", completed


@pytest.mark.parametrize(
    ("disks", "commands"),
    [
        ("", []),
        (
            "/dev/nvme1n1 Amazon EC2 NVMe Instance Storage\\n",
            ["mkfs.ext4 -q -E nodiscard /dev/nvme1n1", "mount -o noatime /dev/nvme1n1 "],
        ),
        (
            "/dev/nvme0n1 Amazon Elastic Block Store\\n/dev/nvme1n1 NVMe Instance Storage\\n"
            "/dev/nvme2n1 Instance Storage\\n",
            [
                "mdadm --create /dev/md0 --run --force --level=0 --raid-devices=2 /dev/nvme1n1 /dev/nvme2n1",
                "mkfs.ext4 -q -E nodiscard /dev/md0",
                "mount -o noatime /dev/md0 ",
            ],
        ),
    ],
)
def test_setup_script_joins_fast_disks_and_mounts_efs_with_tls(
    machine: Machine, disks: str, commands: list[str]
) -> None:
    machine.fake("mountpoint", "exit 1")
    machine.fake("lsblk", f'printf "{disks}"')
    machine.fake("mount")
    folder, completed = run_setup(machine, "/bin/sh")
    assert completed.returncode == 0 and (folder / "ready").exists() and not (folder / "failed").exists(), (
        completed.stderr
    )
    mounts = [call for call in machine.calls if call.startswith(("mdadm", "mkfs", "mount "))]
    assert len(mounts) == len(commands) + 1
    assert all(call.startswith(command) for call, command in zip(mounts, commands, strict=False))
    assert re.fullmatch(rf"mount -t efs -o tls,iam,\S*,accesspoint=fsap-1 fs-1:/ {folder}/shared", mounts[-1])
    assert machine.calls[-1] == f"chown me {folder}/ready", "the marker is written last"
    output = subprocess.run([folder / "python", "-c", "echo $0 $1", "a", "b c"], text=True, capture_output=True)
    assert output.stdout == "a b c\n", "python is a script that runs the image's Python"


def test_setup_script_uses_a_mounted_disk_as_it_is(machine: Machine) -> None:
    machine.fake("mountpoint")
    machine.fake("mount")
    folder, completed = run_setup(machine, "/bin/sh")
    assert completed.returncode == 0 and (folder / "ready").exists(), completed.stderr
    nvme = f"{machine.path}/opt/dlami/nvme/imgnet"
    assert f"mount --bind {nvme} {folder}" in machine.calls and not [call for call in machine.calls if "mkfs" in call]


def test_setup_script_reports_a_failed_mount_after_a_minute(machine: Machine) -> None:
    machine.fake("mountpoint", "exit 1")
    machine.fake("lsblk")
    machine.fake("mount", "exit 1")
    folder, completed = run_setup(machine, "/bin/sh")
    assert completed.returncode == 1 and not (folder / "ready").exists()
    assert (folder / "failed").read_text().startswith("the file system fs-1 cannot be mounted")
    assert machine.calls.count("sleep 5") == 11


def test_setup_script_uses_the_first_existing_python(machine: Machine) -> None:
    machine.fake("mountpoint", "exit 1")
    machine.fake("lsblk")
    machine.fake("mount")
    python = machine.path / "opt/pytorch/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho torch\n")
    python.chmod(0o755)
    folder, completed = run_setup(machine, "/nowhere/python")
    assert completed.returncode == 0, completed.stderr
    assert subprocess.run([folder / "python"], text=True, capture_output=True).stdout == "torch\n"
