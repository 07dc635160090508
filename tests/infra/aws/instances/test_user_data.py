"""User data: parsed as cloud-init does, and its scripts run below a temporary root folder."""

import json
import os
import re
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.aws_gang import public_key
from support.aws_journal import IMAGE, STACK

from infra.aws.instances.user_data import (
    ARM_SCRIPT,
    EFS_UTILS_URL,
    HOST_KEY_SCRIPT,
    LIMIT_SCRIPT,
    SETUP_SCRIPT,
    build_user_data,
)
from infra.aws.launch_request import Internet
from infra.aws.stack import key_pairs


def build(internet: Internet = Internet.PUBLIC, cards: int = 1) -> tuple[str, dict[str, Any]]:
    text = build_user_data(STACK, IMAGE, cards, internet, key_pairs.generate_key_pair(), poweroff_seconds=4321)
    first_line, _, json_text = text.partition("\n")
    assert first_line == "#cloud-config"
    return text, json.loads(json_text)


def test_user_data_arms_the_poweroff_first_and_has_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, "very-secret")
    text, config = build()
    assert len(text.encode()) < 16_384 and text.isascii(), "EC2 takes no more"
    assert next(iter(config)) == "bootcmd"
    assert config["bootcmd"] == [["sh", "-c", ARM_SCRIPT, "sh", "4321"]], "cloud-init runs bootcmd in its first stage"
    assert config["ssh_deletekeys"] is True and set(config["ssh_keys"]) == {"ed25519_private", "ed25519_public"}
    private = config["ssh_keys"].pop("ed25519_private")
    assert private.startswith("-----BEGIN OPENSSH PRIVATE KEY-----") and text.count("PRIVATE KEY-----") == 2
    assert not re.search(r"PRIVATE|(?i:password|secret|AKIA)", json.dumps(config))
    tried = [build(way)[1]["runcmd"][0][-1] for way in Internet]
    assert tried == [EFS_UTILS_URL, EFS_UTILS_URL, "", ""], "a firewall of the user's may let out what is needed alone"
    ways = (Internet.PUBLIC, 1), (Internet.NAT, 4), (Internet.PUBLIC, 4)
    assert [build(*way)[1]["runcmd"][0][-2] for way in ways] == ["50", "50", "600"], "the last one's address comes late"


class Machine:
    """A temporary root folder with fake programs that log their arguments."""

    def __init__(self, path: Path) -> None:
        self.path, self.log, self.bin = path, path / "log", path / "bin"
        self.bin.mkdir()
        for folder in ("etc/ssh", "etc/apt/apt.conf.d", "var/lib/cloud/instances/i-1", "opt", "home/me", "proc"):
            (path / folder).mkdir(parents=True)
        self.log.touch()
        (path / "proc/uptime").write_text("100.00 0.00\n")  # the fake `sleep` and `curl` move it on

    def fake(self, name: str, script: str = "") -> None:
        """Install a program that logs its arguments and then runs `script`."""
        program = self.bin / name
        program.write_text(f'#!/bin/sh\necho "{name} $*" >>"{self.log}"\n{script}\n')
        program.chmod(0o755)

    def fake_if_missing(self, name: str, script: str = "") -> None:
        if not (self.bin / name).exists():
            self.fake(name, script)

    def pass_time(self, seconds: str) -> str:
        uptime = self.path / "proc/uptime"
        return f'read -r now _ <"{uptime}"; echo "$((${{now%.*}} + {seconds})).00 0.00" >"{uptime}"'

    def run(self, script: str, *args: str) -> "subprocess.CompletedProcess[str]":
        for folder in ("/etc/ssh", "/etc/apt", "/var/lib/", "/opt/", "/proc/uptime"):
            script = script.replace(folder, f"{self.path}{folder}")
        env = {"PATH": f"{self.bin}:{os.environ['PATH']}", "HOME": str(self.path)}
        return subprocess.run(["sh", "-c", script, "sh", *args], env=env, text=True, capture_output=True, timeout=120)

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


TIMERS = "echo 'imgnet-limit.timer loaded active waiting x'; echo 'imgnet-limit-77.timer loaded active waiting x'"


def stopped_timers(machine: Machine) -> list[str]:
    return [call.removeprefix("systemctl stop ") for call in machine.calls if " stop " in call]


def test_limit_script_arms_before_it_stops_old_timers_and_not_its_own(machine: Machine) -> None:
    machine.fake("systemd-run", f'echo "${{2#--unit=}}.timer loaded" >>"{machine.path}/timers"')
    machine.fake("systemctl", f'[ "$1" != list-units ] || {{ {TIMERS}; cat "{machine.path}/timers"; }}')
    before = int(time.time())
    completed = machine.run(LIMIT_SCRIPT, "3600")
    assert completed.returncode == 0, completed.stderr
    armed = r"systemd-run --quiet --unit=imgnet-limit-\d+ --on-active=3600 systemctl poweroff"
    assert re.fullmatch(armed, machine.calls[0])
    assert stopped_timers(machine) == ["imgnet-limit.timer", "imgnet-limit-77.timer"]
    end, seconds = (machine.path / "var/lib/imgnet-limit").read_text().split()
    assert seconds == "3600" and before <= int(end) - 3600 <= time.time()


def test_limit_scripts_at_once_leave_the_timer_of_one(machine: Machine) -> None:
    timers = machine.path / "timers"
    timers.mkdir()
    machine.fake("systemd-run", f'touch "{timers}/${{2#--unit=}}.timer"; sleep 1')
    machine.fake("systemctl", f'case $1 in list-units) ls "{timers}";; stop) rm -f "{timers}/$2";; esac')
    with ThreadPoolExecutor() as pool:
        both = [*pool.map(lambda seconds: machine.run(LIMIT_SCRIPT, seconds), ("600", "3600"))]
    assert [completed.returncode for completed in both] == [0, 0] and len([*timers.iterdir()]) == 1


def test_limit_script_keeps_old_timers_when_arming_fails(machine: Machine) -> None:
    machine.fake("systemd-run", "exit 1")
    machine.fake("systemctl", f'[ "$1" != list-units ] || {{ {TIMERS}; }}')
    assert machine.run(LIMIT_SCRIPT, "soon").returncode != 0 and stopped_timers(machine) == []


@pytest.mark.parametrize(("seconds_left", "limit", "expected"), [
    pytest.param(None, None, 7200, id="first boot"),
    pytest.param(500, 7200, 500, id="rebooted"),
    pytest.param(-500, 7200, 1, id="its time is over"),
    pytest.param(10**9, 9000, 9000, id="the clock jumped back, and `imgnet-limit` had set 9000"),
    pytest.param(0, None, 7200, id="crashed before the file was on the disk"),
])  # fmt: skip
def test_arm_script_gives_a_rebooted_machine_what_is_left(
    machine: Machine, seconds_left: int | None, limit: int | None, expected: int
) -> None:
    if seconds_left is not None:
        text = f"{int(time.time()) + seconds_left} {limit}\n" if limit else ""
        (machine.path / "var/lib/imgnet-limit").write_text(text)
    machine.fake("systemd-run")
    completed = machine.run(ARM_SCRIPT, "7200")
    assert completed.returncode == 0, completed.stderr
    command = r"systemd-run --no-block --timer-property=DefaultDependencies=no --unit=imgnet-limit --on-active=(\d+) "
    match = re.fullmatch(command + "systemctl poweroff", machine.calls[-1])
    assert match, "the boot would hang on what comes after sysinit.target"
    assert expected - 30 <= int(match[1]) <= expected


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


def test_host_key_script_replaces_and_deletes_the_boot_key_and_prints_the_same_key_twice(machine: Machine) -> None:
    etc = boot(machine, reload='[ "$2" = sshd ]')
    (etc / "imgnet_new").write_text("half a k")  # as a kill leaves it
    (etc / "imgnet_host_key.pub").write_text("ssh-ed25519 OLD")
    completed, repeated = machine.run(HOST_KEY_SCRIPT), machine.run(HOST_KEY_SCRIPT)
    assert completed.returncode == repeated.returncode == 0, completed.stderr
    assert re.fullmatch(r"ssh-ed25519 [A-Za-z0-9+/=]{60,}\n", completed.stdout)
    assert completed.stdout == repeated.stdout and completed.stdout.strip() != public_key()
    assert key_pairs.read_public_key(etc / "imgnet_host_key") == completed.stdout.strip()
    assert (etc / "imgnet_host_key").stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in etc.iterdir()) == ["imgnet_host_key", "imgnet_host_key.pub", "sshd_config.d"]
    assert (etc / "sshd_config.d/00-imgnet.conf").read_text() == f"HostKey {etc}/imgnet_host_key\n"
    kept_files = [path.name for path in (machine.path / "var/lib/cloud").rglob("*") if path.is_file()]
    assert kept_files == ["vendor-data.txt"], "the user data holds the private half"
    reloads = ["systemctl reload ssh", "systemctl reload sshd"]  # the unit has either name
    assert machine.calls == ["sshd -t", *reloads] * 2


def test_host_key_script_keeps_the_old_key_when_sshd_refuses(machine: Machine) -> None:
    etc = boot(machine)
    machine.fake("sshd", "exit 255")
    completed = machine.run(HOST_KEY_SCRIPT)
    assert completed.returncode != 0 and completed.stdout == ""
    assert (etc / "ssh_host_ed25519_key").exists() and not [call for call in machine.calls if "reload" in call]


def run_setup(
    machine: Machine, python: str = "/bin/sh", script: str = SETUP_SCRIPT
) -> tuple[Path, "subprocess.CompletedProcess[str]"]:
    """Run the setup script as root would. Return ~/.imgnet and the completed process."""
    home = machine.path / "home/me"
    machine.fake("getent", f'echo "me:x:1000:1000::{home}:/bin/sh"')
    for name, code in (("sleep", machine.pass_time("$1")), ("curl", machine.pass_time("5"))):
        machine.fake_if_missing(name, code)
    for name in ("chown", "lsblk", "mdadm", "mkfs.ext4", "mount", "mount.efs", "mountpoint", "tmux"):
        machine.fake_if_missing(name)
    completed = machine.run(script, "fs-1", "fsap-1", "me", python, "50", "https://example.org/")
    return home / ".imgnet", completed


@pytest.mark.parametrize(("disks", "commands"), [
    ("", []),
    ("/dev/nvme1n1 Amazon EC2 NVMe Instance Storage\\n",
     ["mkfs.ext4 -q -E nodiscard /dev/nvme1n1", "mount -o noatime /dev/nvme1n1 "]),
    (
        "/dev/nvme0n1 Amazon Elastic Block Store\\n/dev/nvme1n1 NVMe Instance Storage\\n"
        "/dev/nvme2n1 Instance Storage\\n",
        [
            "mdadm --create /dev/md0 --run --force --level=0 --raid-devices=2 /dev/nvme1n1 /dev/nvme2n1",
            "mkfs.ext4 -q -E nodiscard /dev/md0",
            "mount -o noatime /dev/md0 ",
        ],
    ),
])  # fmt: skip
def test_setup_script_joins_disks_and_mounts_efs_with_tls(machine: Machine, disks: str, commands: list[str]) -> None:
    machine.fake("mountpoint", "exit 1")
    machine.fake("lsblk", f'printf "{disks}"')
    folder, completed = run_setup(machine)
    assert completed.returncode == 0 and not (folder / "failed").exists(), completed.stderr
    assert (folder / "ready").exists()
    mounts = [call for call in machine.calls if call.startswith(("mdadm", "mkfs", "mount "))]
    assert len(mounts) == len(commands) + 1
    assert all(call.startswith(command) for call, command in zip(mounts, commands, strict=False))
    assert re.fullmatch(rf"mount -t efs -o tls,iam,\S*,accesspoint=fsap-1 fs-1:/ {folder}/shared", mounts[-1])
    assert machine.calls[-1] == f"chown me {folder}/.ready", "the marker is written last, by a rename"
    assert (machine.path / "etc/apt/apt.conf.d/99imgnet").read_text() == 'DPkg::Lock::Timeout "300";\n'
    output = subprocess.run([folder / "python", "-c", "echo $0 $1", "a", "b c"], text=True, capture_output=True)
    assert output.stdout == "a b c\n", "python is a script that runs the image's Python"


def test_setup_script_uses_a_mounted_disk_and_waits_for_a_late_public_address(machine: Machine) -> None:
    machine.fake("curl", f'{machine.pass_time("5")}; [ "$(grep -c curl "{machine.log}")" -ge 5 ]')
    python = machine.path / "opt/pytorch/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho torch\n")
    python.chmod(0o755)
    folder, completed = run_setup(machine, "/nowhere/python")
    assert (folder / "ready").exists(), completed.stderr
    assert len([call for call in machine.calls if call.startswith("curl ")]) == 5
    nvme = f"{machine.path}/opt/dlami/nvme/imgnet"
    assert f"mount --bind {nvme} {folder}" in machine.calls and not [call for call in machine.calls if "mkfs" in call]
    assert subprocess.run([folder / "python"], text=True, capture_output=True).stdout == "torch\n"


@pytest.mark.parametrize(("program", "script", "reason"), [
    ("curl", "pass_time; exit 28", "no way to the internet: https://example.org/ cannot be fetched"),
    ("mount", '[ "$1" = --bind ]', "the file system fs-1 cannot be mounted; see /var/log/amazon/efs/mount.log"),
])  # fmt: skip
def test_setup_script_fails_in_a_minute_and_says_why(machine: Machine, program: str, script: str, reason: str) -> None:
    machine.fake(program, script.replace("pass_time", machine.pass_time("5")))
    folder, completed = run_setup(machine)
    assert (folder / "failed").read_text() == f"{reason}\n" and completed.returncode == 1
    assert not (folder / "ready").exists()
    assert f"imgnet: boot failed: {reason}" in completed.stdout, "the console shows it too"
    assert 45 <= float((machine.path / "proc/uptime").read_text().split()[0]) - 100 <= 65
    # A command of the user runs in the folder and reads the reason, which a folder of root would forbid.
    assert f"chown me {machine.path}/home/me {folder}" in machine.calls
    assert machine.calls[-1] == f"chown me {folder} {folder}/failed"


@pytest.mark.parametrize(("seconds_left", "is_shortened"), [(7200, True), (600, False), (None, True)])
def test_machine_whose_setup_failed_powers_itself_off(
    machine: Machine, seconds_left: int | None, is_shortened: bool
) -> None:
    """Nobody may look at it before its time limit."""
    machine.fake("curl", f"{machine.pass_time('5')}; exit 28")
    machine.fake("imgnet-limit", "exit 1")
    if seconds_left:
        (machine.path / "var/lib/imgnet-limit").write_text(f"{int(time.time()) + seconds_left} 7200\n")
    folder, completed = run_setup(machine)
    assert ("imgnet-limit 900" in machine.calls) == is_shortened, completed.stderr
    assert (folder / "failed").exists()


@pytest.mark.parametrize(("installer", "reason"), [
    (None, f"{EFS_UTILS_URL} cannot be fetched"),
    ("exit 1", "amazon-efs-utils cannot be installed; take an image that has it: --ami"),
    ("exit 0", "amazon-efs-utils cannot be installed; take an image that has it: --ami"),
    ('[ "$1" = --install ] && mv "$PREPARED" "$TARGET"', ""),
], ids=["not fetched", "fails", "installs nothing", "installs"])  # fmt: skip
def test_setup_script_installs_efs_utils_from_a_file(machine: Machine, installer: str | None, reason: str) -> None:
    """`curl | sh` ended with 0 when curl failed."""
    fetched = f'cp "{machine.path}/installer" "$8"' if installer else "exit 22"
    machine.fake("curl", f'{machine.pass_time("5")}; [ $# != 9 ] || [ "$6" != -f ] || {{ {fetched}; }}')
    machine.fake("prepared")
    script = SETUP_SCRIPT.replace("mount.efs", "mount.new")
    prepared, target = machine.bin / "prepared", machine.bin / "mount.new"
    text = (installer or "").replace("$PREPARED", str(prepared)).replace("$TARGET", str(target))
    (machine.path / "installer").write_text(text)
    folder, completed = run_setup(machine, script=script)
    failed = folder / "failed"
    assert (failed.read_text().strip() if failed.exists() else "") == reason, completed.stderr


def test_setup_script_installs_tmux_by_a_fresh_list_of_packages(machine: Machine) -> None:
    machine.fake("apt-get")
    folder, completed = run_setup(machine, script=SETUP_SCRIPT.replace("command -v tmux", "command -v no-tmux"))
    assert (folder / "ready").exists(), completed.stderr
    assert [call for call in machine.calls if "apt" in call] == ["apt-get -q update", "apt-get -q -y install tmux"]
