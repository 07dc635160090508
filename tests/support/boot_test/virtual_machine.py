"""A virtual machine in QEMU that boots with cloud-init from user data, as an EC2 instance with two fast disks does.

Without KVM: QEMU translates the instructions, so a boot takes minutes. The machine reaches nothing but its internet.py.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from infra.aws.stack import key_pairs

INTERNET = Path(__file__).with_name("internet.py")
USER = "debian"
MEMORY_MB = 1024
# What the installer of amazon-efs-utils leaves, as far as the set-up uses it.
INSTALLER = """#!/bin/sh
[ "$1" = --install ] || exit 1
cat >/sbin/mount.efs <<'MOUNT'
#!/bin/sh
exec mount -t tmpfs -o mode=1777 efs "$2"
MOUNT
chmod 755 /sbin/mount.efs
"""


class VirtualMachine:
    """One machine. `folder` gets its disks, its user's key and console.log; `image` is what build_image.sh made."""

    def __init__(self, folder: Path, image: Path, user_data: str, *, has_internet: bool) -> None:
        self.folder = folder
        self.image = image
        self.console_path = folder / "console.log"
        self.key_path = folder / "id_ed25519"
        self.process: subprocess.Popen[bytes] | None = None
        seed = folder / "seed"
        seed.mkdir(parents=True)
        private_key, public_key = key_pairs.generate_key_pair()
        self.key_path.touch(mode=0o600)
        self.key_path.write_text(private_key)
        metadata = {"instance-id": "i-0123456789", "local-hostname": "machine", "public-keys": [public_key]}
        (seed / "meta-data").write_text(json.dumps(metadata))
        (seed / "user-data").write_text(user_data)
        seed_path = folder / "seed.iso"
        subprocess.run(["genisoimage", "-quiet", "-V", "CIDATA", "-J", "-r", "-o", seed_path, seed], check=True)
        subprocess.run(["cp", "--sparse=always", image / "disk.img", folder / "disk.img"], check=True)
        for number in (0, 1):
            with (folder / f"nvme{number}.img").open("wb") as disk:
                disk.truncate(256 << 20)
        for name in ("cert.pem", "key.pem"):
            shutil.copy(image / name, folder / name)
        if has_internet:
            (folder / "installer").write_text(INSTALLER)
        with socket.socket() as free_port:
            free_port.bind(("127.0.0.1", 0))
            self.port: int = free_port.getsockname()[1]

    def start(self) -> None:
        """Switch the machine on. QEMU ends when the machine powers off, and also when it reboots."""
        internet = f"guestfwd=tcp:10.0.2.100:443-cmd:{sys.executable} -I {INTERNET} {self.folder}"
        disks = [("disk.img", "virtio", "raw"), ("seed.iso", "virtio", "raw")]
        root = self.image / "qemu/usr"
        libraries = f"{root}/lib/x86_64-linux-gnu"
        argv = [f"{root}/lib64/ld-linux-x86-64.so.2", "--library-path", f"{libraries}:{libraries}/pulseaudio"]
        argv += [f"{root}/bin/qemu-system-x86_64", "-L", f"{root}/share/qemu", "-L", f"{root}/share/seabios"]
        argv += ["-accel", "tcg", "-cpu", "qemu64", "-m", str(MEMORY_MB), "-smp", "1"]
        argv += ["-nodefaults", "-display", "none", "-no-reboot"]
        argv += ["-chardev", f"file,id=console,path={self.console_path},append=on", "-serial", "chardev:console"]
        argv += ["-kernel", f"{self.image}/vmlinuz", "-initrd", f"{self.image}/initrd"]
        argv += ["-append", "root=/dev/vda rw console=ttyS0 net.ifnames=0 mitigations=off no_timer_check panic=-1"]
        for name, interface, disk_format in disks:
            argv += ["-drive", f"file={self.folder}/{name},if={interface},format={disk_format},cache=unsafe"]
        for number in (0, 1):
            file = f"{self.folder}/nvme{number}.img"
            argv += ["-drive", f"file={file},if=none,id=nvme{number},format=raw,cache=unsafe"]
            argv += ["-device", f"nvme,drive=nvme{number},serial=FAST{number}"]
        argv += ["-netdev", f"user,id=net,restrict=on,hostfwd=tcp:127.0.0.1:{self.port}-:22,{internet}"]
        argv += ["-device", "virtio-net-pci,netdev=net"]
        self.process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, env={"PATH": os.defpath, "QEMU_MODULE_DIR": f"{libraries}/qemu"}
        )

    def is_off(self, timeout_seconds: float = 0.0) -> bool:
        assert self.process
        try:
            self.process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()

    @property
    def console(self) -> str:
        return self.console_path.read_text(errors="replace") if self.console_path.exists() else ""
