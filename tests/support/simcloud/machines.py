"""The machines behind the simulated EC2: each running instance has an sshd, a metadata service, and a time limit.

    <folder>/<instance id>/home      a machine's home           <folder>/efs/<file system id>    what its machines share

One thread boots, ends and watches all of them, by the clock of the simulation.
"""

import getpass
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from support.simcloud import gpus
from support.simcloud.computer import SimulatedMachine
from support.simcloud.imds import MetadataService
from support.simcloud.internet import has_internet
from support.simcloud.services import KEY_SECONDS
from support.simcloud.traffic import Moved
from support.ssh_machines import command_line

from train.tools.process import free_port

POLL_SECONDS = 0.05
ROOT = Path(__file__).resolve().parents[3]
INTERNET_POLL_SECONDS = 0.1
NO_INTERNET = "no way to the internet: simulated"
SETUP_FAILURE = "the file system was not mounted: simulated"
IAM_ROLE = "imgnet-machine"  # the simulated AWS checks no rights
CREDENTIALS = {
    **{"Code": "Success", "Type": "AWS-HMAC", "LastUpdated": "2026-01-01T00:00:00Z"},
    **dict.fromkeys(("AccessKeyId", "SecretAccessKey", "Token"), "machine"),
    "Expiration": "2099-01-01T00:00:00Z",
}


def new_login() -> tuple[str, int]:
    """Return the user and a free port of this computer, with which a cloud's machines can be logged in to."""
    return getpass.getuser(), free_port()


class SimulatedMachines:
    """Boots a machine for each running instance of `sim` with a key, and ends it with the instance.

    The login of `sim` is one on this computer, see `new_login`. The machines follow the settings of `sim`.
    """

    def __init__(self, sim: Any, folder: Path) -> None:
        self.sim = sim
        self.folder = folder.resolve()
        self.env: dict[str, str] = {}
        self.folder.mkdir(parents=True, exist_ok=True)
        self.sockets = Path(tempfile.mkdtemp(prefix="imgs-", dir="/tmp"))  # a socket's path has 107 characters at most
        self.machines: dict[str, SimulatedMachine] = {}
        self._instances: dict[str, Any] = {}
        self._timers: dict[tuple[str, str], float] = {}  # (instance id, action): time
        self._lock = threading.Lock()  # guards the tables
        self._busy = threading.Lock()  # held while machines are booted or ended
        self._is_over = False
        _, self.port = sim.login
        self.metadata = MetadataService(self.metadata_of, self.run_root_command)
        self._keeper = subprocess.Popen(
            [sys.executable, "-m", "support.simcloud.process_keeper", str(self.folder), str(self.sockets)],
            stdin=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
        )
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()
        sim.machines = self

    def close(self) -> None:
        self._is_over = True
        self.sim.has_event.set()
        self._thread.join()
        for id in list(self.machines):
            self._end(id)
        self.metadata.close()
        self._keeper.communicate()

    def reset(self) -> None:
        with self._busy:
            with self._lock:
                self._timers.clear()
                self._instances.clear()
            for id in list(self.machines):
                self._end(id)
                self.machines.pop(id).remove()
            shutil.rmtree(self.folder / "efs", ignore_errors=True)

    # --- events of the cloud --------------------------------------------------------------------------

    def on_running(self, instance: Any) -> None:
        """Boot a machine. An instance without a key gets none, because nobody could log in."""
        if not instance.key:
            return
        with self._lock:
            self._instances[instance.id] = instance
            self._timers[instance.id, "boot"] = -math.inf

    def on_dying(self, instance: Any) -> None:
        with self._lock:
            self._instances.pop(instance.id, None)
            self._timers = {key: when for key, when in self._timers.items() if key[0] != instance.id}
            self._timers[instance.id, "end"] = -math.inf

    def on_notice(self, instance: Any, when: float, action: str) -> None:
        """Put an interruption notice, or the recommendation to rebalance, into a machine's metadata."""
        time = datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        notice = ("spot/instance-action", {"action": action, "time": time})
        path, content = ("events/recommendations/rebalance", {"noticeTime": time}) if action == "rebalance" else notice
        if machine := self.machines.get(instance.id):
            machine.notices[path] = json.dumps(content)

    def on_login_key(self, instance: Any, user: str, key: str) -> None:
        """Let a key log in to a machine for a minute, if its image has EC2 Instance Connect."""
        machine = self.machines.get(instance.id)
        if machine and self.sim.has_instance_connect and user == self.sim.login[0]:
            machine.admit_keys(key)
            self._set_timer(instance.id, "forget keys", KEY_SECONDS)

    def on_transfer(self, instance: Any, moved: Moved) -> None:
        if machine := self.machines.get(instance.id):
            machine.write_counters(self.folder / "efs", moved)

    # --- requests of machines ----------------------------------------------------------------------------------------

    def metadata_of(self, id: str) -> dict[str, str] | None:
        """Return the metadata of an instance by its full path, None for one that does not run."""
        machine = self.machines.get(id)
        if id not in self._instances or machine is None:
            return None
        texts = {
            "instance-id": id,
            "iam/security-credentials/": IAM_ROLE,
            f"iam/security-credentials/{IAM_ROLE}": json.dumps(CREDENTIALS),
            **machine.notices,
        }
        return {f"/latest/meta-data/{path}": text for path, text in texts.items()}

    def break_gpu(self, id: str, how: str) -> None:
        """Break a GPU of a machine. Raises `KeyError` for an unknown machine or way."""
        machine = self.machines[id]
        is_trainer = re.compile(r" -m train(\.engine\.standby)? ").search
        gpus.break_gpu(machine.folder, [pid for pid in machine.processes() if is_trainer(command_line(pid))], how)

    def freeze(self, id: str) -> None:
        """Let a machine hang as its kernel does: nothing on it runs, and it does not power itself off."""
        with self._lock:
            self._timers.pop((id, "power off"), None)
        self.machines[id].freeze()

    def console_of(self, id: str) -> str:
        failure = self.machines[id].failure if id in self.machines else ""
        return f"[   9.1] cloud-init: modules:final\r\n\x1b[0mimgnet: boot failed: {failure}\r\n" if failure else ""

    def run_root_command(self, id: str, words: list[str]) -> str:
        """Carry out a root command of a machine and return its output. Raises `RuntimeError` for an unknown one."""
        match words:
            case ["imgnet-limit", seconds]:
                self._set_timer(id, "power off", float(seconds))  # in place of the time that was set before
                return ""
            case ["imgnet-hostkey"]:
                return f"{self.machines[id].change_host_key()}\n"
        raise RuntimeError(f"a simulated machine cannot do this: {words}")

    def _set_timer(self, id: str, action: str, seconds: float) -> None:
        """Take an action in this many seconds, unless the instance is ending."""
        with self._lock:
            if id in self._instances:
                self._timers[id, action] = self.sim.now() + seconds
        self.sim.has_event.set()  # the thread may wait for ever

    # --- the thread --------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        functions = {
            "boot": self._boot,
            "start sshd": self._start_sshd,
            "finish setup": self._finish_setup,
            "forget keys": lambda id: self.machines[id].admit_keys(),
            "power off": self.sim.power_off,
            "end": self._end,
        }
        while not self._is_over:
            self.sim.has_event.wait(POLL_SECONDS if self._timers else None)
            self.sim.has_event.clear()
            with self._busy:
                while self.sim.events:
                    name, arguments = self.sim.events.popleft()
                    self._run(getattr(self, name), *arguments)
                for id, action in self._take_due_actions():
                    self._run(functions[action], id)

    def _run(self, function: Any, *arguments: Any) -> None:
        try:
            function(*arguments)
        except Exception:  # the failure of one machine must not end the thread
            self.sim.errors.append(traceback.format_exc())
            traceback.print_exc()

    def _take_due_actions(self) -> list[tuple[str, str]]:
        with self._lock:
            now = self.sim.now()
            due = sorted((key for key, when in self._timers.items() if when <= now), key=lambda key: self._timers[key])
            for key in due:
                del self._timers[key]
            return due

    def _boot(self, id: str) -> None:
        """Do what happens before there is an sshd: bootcmd, which sets the power-off."""
        instance = self._instances.get(id)
        if instance is None or id in self.machines:
            return
        number = len(self.machines)
        sockets = self.sockets / str(number)
        variables = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": self.metadata.url(id), **self.env}
        machine = SimulatedMachine(instance, number, self.port, self.folder / id, sockets, variables)
        if self.sim.gpus:
            gpus.install_gpus(machine.folder, machine.folder / "bin", self.sim.gpus)
        self.machines[id] = machine
        self._set_timer(id, "power off", machine.user_data.limit_seconds)
        machine.write_counters(self.folder / "efs", self.sim.moved.get(id, Moved()))
        self._set_timer(id, "start sshd", self.sim.ssh_delay_seconds)

    def _start_sshd(self, id: str) -> None:
        self.machines[id].start()
        self.machines[id].start_time = self.sim.now()
        self._set_timer(id, "finish setup", 0.0)

    def _finish_setup(self, id: str) -> None:
        machine = self.machines[id]
        failure = SETUP_FAILURE if machine.number in self.sim.failing_machines else ""
        with self.sim.lock:
            is_cut_off = self.sim.needs_internet and not has_internet(self.sim.find(id))
        patience = min(self.sim.internet_wait_seconds, machine.user_data.internet_seconds)
        if is_cut_off and self.sim.now() < machine.start_time + patience:
            self._set_timer(id, "finish setup", INTERNET_POLL_SECONDS)
            return
        if self.sim.boot_download_bytes and not is_cut_off:
            self.sim.transfer(id, internet=self.sim.boot_download_bytes)
        machine.finish_setup(self.folder / "efs", NO_INTERNET if is_cut_off else failure)
        if machine.failure:
            with self._lock:
                end = self._timers.get((id, "power off"), math.inf)
            self._set_timer(id, "power off", min(end - self.sim.now(), machine.user_data.failed_seconds))

    def _end(self, id: str) -> None:
        if id in self.machines:
            self.machines[id].power_off()
