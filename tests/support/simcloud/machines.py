"""The machines behind the fake EC2: each running instance has an sshd on its address, an IMDS, and a limit that holds.

    <folder>/<instance id>/home      a machine's home           <folder>/efs/<file system id>    what its machines share

One thread boots, ends and watches all of them, by the clock of the simulation.
"""

import getpass
import json
import math
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from . import process_keeper
from .computer import Computer
from .imds import Metadata

TICK = 0.05
ROOT = Path(__file__).resolve().parents[3]
FAILURE = "the file system was not mounted: simulated"
ROLE = "imgnet-machine"  # whose rights nobody checks here
CREDENTIALS = {
    "Code": "Success", "Type": "AWS-HMAC", "AccessKeyId": "machine", "SecretAccessKey": "machine", "Token": "machine",
    "LastUpdated": "2026-01-01T00:00:00Z", "Expiration": "2099-01-01T00:00:00Z",
}  # fmt: skip


class Machines:
    """Makes a machine of each instance of `sim` that runs and has a key, and ends it with the instance.

    May be set at any time: `ssh_late`, seconds from running to sshd; `ready_late`, from sshd to the marker;
    `fail_boot`, ids, addresses or numbers (in the order in which they came) of machines whose setting up fails.
    """

    def __init__(
        self, sim: Any, folder: Path, python: str = sys.executable, env: Mapping[str, str] | None = None
    ) -> None:
        self.sim, self.folder, self.python, self.env = sim, folder.resolve(), python, dict(env or {})
        self.folder.mkdir(parents=True, exist_ok=True)
        self._defaults()
        self.sockets = Path(tempfile.mkdtemp(prefix="imgs-", dir="/tmp"))  # a socket's path has 107 characters at most
        self.machines: dict[str, Computer] = {}
        self._instances: dict[str, Any] = {}
        self._timers: dict[tuple[str, str], float] = {}  # (instance, what to do): when
        self._lock, self._busy = threading.Lock(), threading.Lock()  # the tables; who boots and ends machines
        self._woken, self._over = threading.Event(), False
        self.port = _free_port()
        self.metadata = Metadata(self.tell, self.obey)
        self._keeper = subprocess.Popen(
            [sys.executable, "-m", "support.simcloud.process_keeper", str(self.folder), str(self.sockets)],
            stdin=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
        )
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()
        sim.login = (getpass.getuser(), self.port)
        sim.listeners.append(self)

    def _defaults(self) -> None:
        self.ssh_late, self.ready_late = 0.0, 0.0
        self.fail_boot: set[Any] = set()
        self.count = 0

    def close(self) -> None:
        """End all machines and whatever belongs to them."""
        self._over = True
        self._woken.set()
        self._thread.join()
        for id in list(self.machines):
            self._end(id)
        self.metadata.close()
        self._keeper.communicate(process_keeper.DONE)
        shutil.rmtree(self.sockets, ignore_errors=True)

    def reset(self) -> None:
        """End all machines, forget them and their file systems, and be as new."""
        with self._busy:
            with self._lock:
                self._timers.clear()
                self._instances.clear()
            for id in list(self.machines):
                self._end(id)
                self.machines.pop(id).remove()
            shutil.rmtree(self.folder / "efs", ignore_errors=True)
            self._defaults()

    def set(self, **words: Any) -> dict[str, Any]:
        """Change settings by their names; return all. Raises `ValueError` for another name."""
        if unknown := words.keys() - {"ssh_late", "ready_late", "fail_boot"}:
            raise ValueError(f"no such setting of machines: {sorted(unknown)}")
        for name, value in words.items():
            setattr(self, name, set(value) if name == "fail_boot" else float(value))
        return {"ssh_late": self.ssh_late, "ready_late": self.ready_late, "fail_boot": sorted(self.fail_boot, key=str)}

    # --- what the cloud says, in whatever thread ---------------------------------------------------------------------

    def on_running(self, instance: Any) -> None:
        """Boot a machine, unless nobody could log in."""
        if not instance.key:
            return
        with self._lock:
            self._instances[instance.id] = instance
            self._timers[instance.id, "boot"] = -math.inf
        self._woken.set()

    def on_dying(self, instance: Any) -> None:
        """Cut the power of a machine."""
        with self._lock:
            self._instances.pop(instance.id, None)
            for key in [key for key in self._timers if key[0] == instance.id]:
                del self._timers[key]
            self._timers[instance.id, "end"] = -math.inf
        self._woken.set()

    def on_notice(self, instance: Any, when: float, action: str) -> None:
        """Let the machine's IMDS say that it will be taken away, or that this may come."""
        machine, time = self.machines.get(instance.id), _stamp(when)
        if machine is None:
            return
        if action == "rebalance":
            machine.say["events/recommendations/rebalance"] = f'{{"noticeTime": "{time}"}}'
        else:
            machine.say["spot/instance-action"] = f'{{"action": "{action}", "time": "{time}"}}'

    # --- what a machine asks -----------------------------------------------------------------------------------------

    def tell(self, id: str) -> dict[str, str] | None:
        """Return what the IMDS says to an instance, None to one that does not run."""
        instance, machine = self._instances.get(id), self.machines.get(id)
        if instance is None or machine is None:
            return None
        always = {
            "instance-id": id,
            "instance-type": instance.type,
            "local-ipv4": instance.private,
            "public-ipv4": instance.public or "",
            "placement/availability-zone": instance.zone,
            "placement/region": instance.zone[:-1],
            "user-data": instance.user_data or "",
            "iam/security-credentials/": ROLE,
            f"iam/security-credentials/{ROLE}": json.dumps(CREDENTIALS),
        }
        return {key: text for key, text in {**always, **machine.say}.items() if text}

    def obey(self, id: str, words: list[str]) -> str:
        """Do what root on a machine asked for; return what its command prints."""
        match words:
            case ["limit", seconds]:
                self.arm(id, float(seconds))
                return ""
            case ["hostkey"]:
                return f"{self.machines[id].change_host_key()}\n"
            case ["poweroff"]:
                self.sim.power_off(id)
                return ""
        raise RuntimeError(f"a simulated machine cannot do this: {words}")

    def arm(self, id: str, seconds: float) -> None:
        """Let an instance end in so many seconds from now, and no earlier by what was armed before."""
        self._set(id, "limit", seconds)

    def _set(self, id: str, what: str, seconds: float) -> None:
        """Do this in so many seconds, unless the instance is dying."""
        with self._lock:
            if id in self._instances:
                self._timers[id, what] = self.sim.now() + seconds
        self._woken.set()

    # --- the thread --------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while not self._over:
            self._woken.wait(TICK if self._timers else None)
            self._woken.clear()
            with self._busy:
                for id, what in self._due():
                    self._do(id, what)

    def _do(self, id: str, what: str) -> None:
        act = {
            "boot": self._boot,
            "open": self._open,
            "ready": self._ready,
            "limit": self.sim.power_off,
            "end": self._end,
        }
        try:
            act[what](id)
        except Exception:  # one machine's trouble is not the others'
            self.sim.errors.append(traceback.format_exc())
            traceback.print_exc()

    def _due(self) -> list[tuple[str, str]]:
        """Take what is to be done now, the oldest first."""
        with self._lock:
            now = self.sim.now()
            due = sorted((key for key, when in self._timers.items() if when <= now), key=lambda key: self._timers[key])
            for key in due:
                del self._timers[key]
            return due

    def _boot(self, id: str) -> None:
        """What happens before there is sshd: bootcmd, which arms the limit."""
        instance = self._instances.get(id)
        if instance is None or id in self.machines:
            return
        number, self.count = self.count, self.count + 1
        sockets = self.sockets / str(number)
        machine = Computer(instance, number, self.port, self.folder / id, sockets, self.metadata.url(id), self.env)
        self.machines[id] = machine
        if machine.data.limit is not None:
            self.arm(id, machine.data.limit)
        self._set(id, "open", self.ssh_late)

    def _open(self, id: str) -> None:
        self.machines[id].start()
        self._set(id, "ready", self.ready_late)

    def _ready(self, id: str) -> None:
        machine = self.machines[id]
        fails = self.fail_boot & {id, machine.address, machine.number}
        machine.get_ready(self.folder / "efs", self.python, FAILURE if fails else "")

    def _end(self, id: str) -> None:
        if id in self.machines:
            self.machines[id].power_off()


def _stamp(when: float) -> str:
    return datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _free_port() -> int:
    """A port below those that the kernel gives to outgoing connections, on which nothing listens now."""
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as one:
            if one.connect_ex(("127.1.0.1", port)):
                return port
