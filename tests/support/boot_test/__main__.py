"""make boot-test: boots the user data of a rented machine in QEMU and reaches it with the program's own ssh code.

Two machines boot at the same time: one has all it needs, the other has no internet. The first one is then rebooted, and
left to power off at its time limit. The disk image is built once, in .boot-test; for a new one, delete that folder.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from support.aws_journal import IMAGE, user_data
from support.boot_test.virtual_machine import USER, VirtualMachine
from support.toy_cloud import make_machine

from cluster.backends.aws.renting import boot
from cluster.backends.aws.renting.boot import BootFailed
from cluster.backends.aws.renting.instance_history import REMOTE_FOLDER
from cluster.connectors.hosts_file import Host
from cluster.connectors.ssh import SSHConnector, SSHRefused, Unreachable
from infra.aws.instances.user_data import EFS_UTILS_URL
from infra.aws.stack import key_pairs

ROOT = Path(__file__).resolve().parents[3]
IMAGE_FOLDER = ROOT / ".boot-test"
BOOT_SECONDS = 1500.0  # without KVM and beside another machine
LIMIT_SECONDS = 4000
PROGRAMS = {"genisoimage": "genisoimage"}
BUILD_PROGRAMS = {"mmdebstrap": "mmdebstrap", "mkfs.ext4": "e2fsprogs", "openssl": "openssl"}
MACHINE = make_machine("i-0", "0", "127.0.0.1")


class BootTest:
    """A virtual machine, and the program's view of it. `checks` are the results, shared by all machines of the test."""

    def __init__(self, folder: Path, name: str, checks: list[bool], *, has_internet: bool) -> None:
        self.name = name
        self.checks = checks
        self.start_time = time.monotonic()
        private_key, self.host_key = key_pairs.generate_key_pair()
        image = replace(IMAGE, ssh_user=USER, python="")
        text = user_data(private_key, self.host_key, LIMIT_SECONDS, image)
        self.vm = VirtualMachine(folder / name, IMAGE_FOLDER, text, has_internet=has_internet)

    def check(self, what: str, is_right: bool, found: object = "") -> None:
        self.checks.append(is_right)
        note = "" if is_right else f": FAILED, found {found!r}"
        print(f"{time.monotonic() - self.start_time:6.0f} s  {self.name}: {what}{note}", flush=True)

    def connect(self, host_key: str) -> SSHConnector:
        key = str(self.vm.key_path)
        host = Host(host="127.0.0.1", port=self.vm.port, user=USER, key=key, host_key=host_key, folder=REMOTE_FOLDER)
        return SSHConnector(host, f"machine {self.name}", 20.0)

    def run(self, *argv: str) -> str:
        return self.connector.run(argv, timeout=120).out.decode().strip()

    def wait_until_ready(self) -> None:
        """Boot the machine and wait for it, as the supervisor does. Raises `BootFailed`."""
        self.vm.start()
        self.connector = self.connect(self.host_key)
        provider: Any = SimpleNamespace(
            get_stop_reason=lambda: "QEMU ended" if self.vm.is_off() else "",
            has_own_host_key=lambda machine: False,
            record_host_key=lambda machine, key: setattr(self, "host_key", key),
        )
        fleet: Any = SimpleNamespace(
            connectors={"0": self.connector},
            setup_progress=SimpleNamespace(set_step=lambda *_: None),
            shortage_reason="",
        )
        boot.wait_until_ready(provider, fleet, "0", lambda: {"0": MACHINE})

    # --- what is tested ----------------------------------------------------------------------------------------------

    def test_good_boot(self) -> None:
        """A machine that has all it needs: boot, reboot, and power-off at its limit."""
        boot_key = self.host_key
        self.wait_until_ready()
        self.check("boots, is reachable, and has a host key of its own", self.host_key != boot_key)
        self.connector = self.connect(self.host_key)
        self.check("accepts the login with its new host key", self.run("id", "-un") == USER)
        try:
            self.connect(boot_key).run(["true"])
            self.check("no longer shows the boot host key", False, "the login with the boot key")
        except SSHRefused:
            self.check("no longer shows the boot host key", True)
        source = self.run("sh", "-c", "findmnt -n -o SOURCE --target ~/.imgnet")
        self.check("has ~/.imgnet on the fast disks", "lv_ephemeral" in source, source)
        owner = self.run("sh", "-c", "stat -c %U ~/.imgnet && touch ~/.imgnet/shared/file && ~/.imgnet/python -c ''")
        self.check("lets the user write there and in the shared folder", owner == USER, owner)
        self._check_limit_before_sshd()
        left = self._limit_left()
        self.check("has the time limit of the request", 0 < left <= LIMIT_SECONDS, left)
        self._test_reboot()
        self._test_poweroff()

    def _check_limit_before_sshd(self) -> None:
        order = ("imgnet-limit.timer", "ssh.service")
        starts = [self.run("systemctl", "show", unit, "-P", "ActiveEnterTimestampMonotonic") for unit in order]
        self.check("arms its power-off before sshd starts", 0 < int(starts[0]) < int(starts[1]), starts)

    def _limit_left(self) -> float:
        """Return the seconds until the power-off, as systemd counts them."""
        script = "systemctl list-timers --output=json 'imgnet-limit*' && date +%s.%N"
        timers, _, now = self.run("sh", "-c", script).rpartition("\n")
        match = re.search(r'"next":(\d+)', timers)
        return int(match[1]) / 1e6 - float(now) if match else -1.0

    def _test_reboot(self) -> None:
        """Shorten the limit, reboot, and see that the machine does not get the first limit again."""
        self.run("sudo", "-n", "imgnet-limit", "2000")
        before = time.monotonic()
        left = self._limit_left()
        self.check("sets its limit anew with imgnet-limit", 1900 < left <= 2000, left)
        self.connector.run(["sudo", "-n", "systemd-run", "--on-active=2", "systemctl", "reboot"], timeout=60)
        self.connector.close()
        self.check("reboots", self.vm.is_off(300))
        self.vm.start()
        deadline = time.monotonic() + BOOT_SECONDS
        self.connector = self.connect(self.host_key)
        while True:
            try:
                left = self._limit_left()
                break
            except (Unreachable, SSHRefused):
                if time.monotonic() > deadline:
                    raise
                time.sleep(2)
        expected = 2000 - (time.monotonic() - before)
        self.check("has only what is left of its limit after a reboot", abs(left - expected) < 120, (left, expected))
        self.check("keeps its host key over a reboot", True)

    def _test_poweroff(self) -> None:
        self.run("sudo", "-n", "imgnet-limit", "20")
        self.check("is on before its limit", not self.vm.is_off(5))
        self.check("powers off at its limit", self.vm.is_off(240))

    def test_boot_without_internet(self) -> None:
        """A machine without internet: the reason reaches the program."""
        reason = f"no way to the internet: {EFS_UTILS_URL} cannot be fetched"
        try:
            self.wait_until_ready()
            self.check("fails to boot", False, "a machine that is ready")
        except BootFailed as error:
            self.check("reports why its boot failed", str(error) == f"boot failed: {reason}", str(error))
        shown = self.run("sh", "-c", "cat ~/.imgnet/failed")
        self.check("lets a command of the user read the reason", shown == reason, shown)
        self.check("prints the reason on its console", f"imgnet: boot failed: {reason}" in self.vm.console)


def require(programs: dict[str, str]) -> None:
    if missing := [package for program, package in programs.items() if not shutil.which(program)]:
        sys.exit(f"boot-test: packages are missing: sudo apt-get install --no-install-recommends {' '.join(missing)}")


def main() -> int:
    """Build the image if there is none, run all machines, and return the exit code."""
    require(PROGRAMS)
    if not (IMAGE_FOLDER / "disk.img").exists():
        require(BUILD_PROGRAMS)
        print("building the disk image of the virtual machines, once; it takes minutes", flush=True)
        subprocess.run(["sh", Path(__file__).with_name("build_image.sh"), IMAGE_FOLDER], check=True)
    boot.BOOT_TIMEOUT_SECONDS = BOOT_SECONDS
    checks: list[bool] = []
    with tempfile.TemporaryDirectory(prefix="imgnet-boot-") as folder:
        good = BootTest(Path(folder), "machine", checks, has_internet=True)
        cut_off = BootTest(Path(folder), "machine-without-internet", checks, has_internet=False)
        tests = {good: good.test_good_boot, cut_off: cut_off.test_boot_without_internet}
        threads = [threading.Thread(target=run_test, args=(test, function)) for test, function in tests.items()]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            for test in tests:
                test.vm.kill()
    print(f"{sum(checks)} passed, {len(checks) - sum(checks)} failed")
    return 0 if all(checks) else 1


def run_test(test: BootTest, function: Callable[[], None]) -> None:
    """Run the checks of one machine, and switch it off. An error is a failed check, with the end of the console."""
    try:
        function()
    except Exception as error:
        test.check("goes through all checks", False, f"{type(error).__name__}: {error}")
        print("\n".join(test.vm.console.splitlines()[-40:]))
    finally:
        test.vm.kill()


if __name__ == "__main__":
    sys.exit(main())
