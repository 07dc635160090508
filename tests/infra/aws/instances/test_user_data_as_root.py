"""The setup script run by root for a user of another ID, so that the owners of files are those of a real machine.

It runs in a mount namespace (unshare(1)), where home folders, disks and apt's settings are in memory.
"""

import functools
import os
import subprocess
from pathlib import Path

import pytest

from cluster.backends.rented.provider import REMOTE_FOLDER
from cluster.connectors import ssh_scripts
from infra.aws.instances.user_data import EFS_UTILS_URL, SETUP_SCRIPT

UID = 4711
HOME = "/home/imgnet-test"
# $1: the folder with fakes, scripts and results; the other arguments are those of the setup script.
NAMESPACE_SCRIPT = f"""
set -e
folder=$1
shift
mount --make-rprivate /
for memory in /home /opt; do mount -t tmpfs memory $memory; done
mkdir -p {HOME} /opt/dlami/nvme
mount -t tmpfs nvme /opt/dlami/nvme
chown {UID}:{UID} {HOME}
for file in passwd uptime; do cp "$(ls /etc/$file /proc/$file 2>/dev/null)" "$folder/$file"; done
echo "test:x:{UID}:{UID}::{HOME}:/bin/sh" >>"$folder/passwd"
mount --bind "$folder/passwd" /etc/passwd
mount --bind "$folder/uptime" /proc/uptime
[ ! -d /etc/apt/apt.conf.d ] || mount -t tmpfs apt /etc/apt/apt.conf.d
as_user() {{
    set -- "$folder/$1"
    setpriv --reuid {UID} --regid {UID} --clear-groups env HOME={HOME} sh <"$1.sh" >"$1.out" 2>&1 || true
}}
as_user early
PATH="$folder/bin:$PATH" sh "$folder/setup.sh" "$@" || echo "the set-up ended with $?"
as_user late
as_user read
"""


@functools.cache
def why_unavailable() -> str:
    """Return why mount namespaces cannot be used on this computer, "" when they can."""
    if os.geteuid():
        return "mount namespaces need root"
    completed = subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "test", "/home"], capture_output=True)
    return "" if completed.returncode == 0 else f"no mount namespaces here: {completed.stderr.decode().strip()}"


def boot(folder: Path, *, fails: str) -> dict[str, str]:
    """Run the setup script while the program `fails` fails. Return what the user is shown, by script.

    The scripts are those that the supervisor sends over ssh: a command before the set-up ("early") and after it
    ("late"), and the reading of a file ("read").
    """
    (folder / "bin").mkdir()
    for name in ("curl", "mount.efs", "tmux", "sleep"):
        program = folder / "bin" / name
        program.write_text(f'#!/bin/sh\necho "9999999.00 0.00" >/proc/uptime\nexit {int(name == fails)}\n')
        program.chmod(0o755)
    show = ["sh", "-c", f"cd {REMOTE_FOLDER} && cat failed ready 2>/dev/null"]
    (folder / "setup.sh").write_text(SETUP_SCRIPT)
    (folder / "early.sh").write_bytes(ssh_scripts.run_script("early", REMOTE_FOLDER, show, timeout=20))
    (folder / "late.sh").write_bytes(ssh_scripts.run_script("late", REMOTE_FOLDER, show, timeout=20))
    (folder / "read.sh").write_bytes(ssh_scripts.read_script(f"{REMOTE_FOLDER}/failed", 0, 1000))
    argv = [
        "unshare",
        "-m",
        "sh",
        "-c",
        NAMESPACE_SCRIPT,
        "sh",
        str(folder),
        "fs-1",
        "fsap-1",
        "test",
        "",
        EFS_UTILS_URL,
    ]
    completed = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert completed.returncode == 0, completed.stderr
    return {name: (folder / f"{name}.out").read_text() for name in ("early", "late", "read")}


@pytest.mark.skipif(bool(why_unavailable()), reason=why_unavailable())
@pytest.mark.parametrize(
    ("fails", "reason"),
    [
        ("curl", f"no way to the internet: {EFS_UTILS_URL} cannot be fetched"),
        ("mount.efs", "the file system fs-1 cannot be mounted; see /var/log/amazon/efs/mount.log"),
    ],
)
def test_user_reads_why_the_boot_failed(tmp_path: Path, fails: str, reason: str) -> None:
    """The folder belonged to root until the last lines of the set-up: no command of the user could run in it."""
    shown = boot(tmp_path, fails=fails)
    assert reason in shown["late"] and "Permission denied" not in shown["early"] + shown["late"], shown
    assert shown["read"] == f"{reason}\n"
