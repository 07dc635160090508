"""What a booting machine is asked, and when the wait for it ends."""

import shlex
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from support.toy_cloud import make_machine

from cluster.backends.aws.renting import boot
from cluster.backends.aws.renting.boot import BootFailed, wait_until_ready
from cluster.connectors.ssh import HostKeyRefused, SSHRefused, Unreachable
from cluster.errors import ClusterError, SetupFailed
from infra.aws.instances.instances import Instance

Files = Callable[[float], dict[str, str]]
MACHINE = make_machine("toy-1", "0")
READY = {"ready": "ready\n"}
BOOT_FAILED = {**READY, "failed": "no way\x1b to the internet\n"}
SHORTAGE = "only 1 of the 2 machines that the job needs can be used"


class Machine:
    """A connector to a machine that answers as `files` says, by the second of its boot. Nothing takes real time."""

    def __init__(self, files: Files, machine: Instance, folder: Path) -> None:
        self.files = files
        self.folder = folder
        self.machine = machine
        self.seconds = 0.0
        self.recorded_key = ""

    def run_repeatable(self, script: str, **variables: str) -> bytes:
        """Run the script that waits for the end of the boot with the present files. It waits for one second."""
        for name in ("ready", "failed"):
            (self.folder / name).unlink(missing_ok=True)
        for name, text in self.files(self.seconds).items():
            (self.folder / name).write_text(text)
        assert variables["d"] == '"$HOME"/.imgnet' and script.count("sleep 0.2; ") == 1
        command = "'echo ssh-ed25519 NEW'" if variables["k"] == "'sudo -n imgnet-hostkey'" else variables["k"]
        quick = f"d={shlex.quote(str(self.folder))} k={command}\n{script.replace('sleep 0.2; ', '')}"
        output = subprocess.run(["sh", "-c", quick], capture_output=True, check=True).stdout
        self.seconds += 0 if output else 1
        return output

    def wait(self, shortage_reason: str = "", polls: int | None = None) -> None:
        """Wait until the machine is ready. The cloud has it at the first `polls` questions; None: always."""
        answers = iter([{"0": self.machine}] * (100_000 if polls is None else polls))
        provider: Any = SimpleNamespace(
            get_stop_reason=lambda: "",
            has_own_host_key=lambda machine: False,
            record_host_key=lambda machine, key: setattr(self, "recorded_key", key),
        )
        fleet: Any = SimpleNamespace(
            connectors={"0": self},
            setup_progress=SimpleNamespace(set_step=lambda *_: None),
            shortage_reason=shortage_reason,
        )
        wait_until_ready(provider, fleet, "0", lambda: next(answers, {}))


@pytest.fixture
def machine_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Machine]:
    """Return a maker of machines whose clock is that of the waiter."""

    def make(files: Files, **details: Any) -> Machine:
        machine = Machine(files, replace(MACHINE, **details), tmp_path)

        def sleep(seconds: float) -> None:
            machine.seconds += seconds

        monkeypatch.setattr(boot, "time", SimpleNamespace(monotonic=lambda: machine.seconds, sleep=sleep))
        return machine

    return make


def raise_(error: Exception) -> dict[str, str]:
    raise error


NO_ANSWER = Unreachable("no answer")
NO_COMMANDS = ClusterError("machine 0: ~/.imgnet/commands cannot be used: mkdir: Permission denied")


@pytest.mark.parametrize(("files", "seconds"), [
    pytest.param(lambda now: raise_(NO_ANSWER) if now < 300 else READY if now > 400 else {}, 401, id="slow"),
    # A disk is mounted over the folder while a command runs in it; a reboot comes between.
    pytest.param(lambda now: raise_(NO_ANSWER if 50 < now < 60 else NO_COMMANDS) if now < 100 else READY, 100,
                 id="short trouble with commands"),
])  # fmt: skip
def test_ready_machine_gets_a_host_key_of_its_own(machine_with: Any, files: Files, seconds: float) -> None:
    machine = machine_with(files)
    machine.wait()
    assert machine.recorded_key == "ssh-ed25519 NEW" and machine.seconds == seconds


def test_boot_of_a_whole_computer_may_take_half_an_hour(machine_with: Any) -> None:
    machine = machine_with(lambda now: READY if now > 1200 else {}, boots_slowly=True)
    machine.wait()
    assert machine.seconds == 1201


@pytest.mark.parametrize(("files", "options", "error", "message", "seconds"), [
    (lambda now: BOOT_FAILED if now > 30 else {}, {}, BootFailed, "boot failed: no way to the internet", 31),
    # Not until the end of the boot's time, 15 minutes, which all machines of the job would be paid for.
    (lambda now: raise_(NO_COMMANDS if now > 20 else NO_ANSWER), {}, BootFailed, ".*denied, for 60 s", 81),
    (lambda now: {}, {}, BootFailed, "it has not finished booting, after 900 s", 902),
    (lambda now: raise_(NO_ANSWER), {}, BootFailed, "no answer, after 900 s", 901),
    # Another machine would not help.
    (lambda now: {}, {"shortage_reason": SHORTAGE}, SetupFailed, SHORTAGE, 1),
    (lambda now: {}, {"polls": 2}, SetupFailed, "EC2 terminated instance toy-1 during boot", 1),
    (lambda now: raise_(SSHRefused("wants a password")), {}, SSHRefused, "wants a password", 0),
    # It has the new key, and the answer was lost, here or to a supervisor that was killed.
    (lambda now: raise_(HostKeyRefused("another")), {}, BootFailed, "its new host key is not known: another", 0),
])  # fmt: skip
def test_boot_that_fails_ends_the_wait(
    machine_with: Any, files: Files, options: dict[str, Any], error: type[Exception], message: str, seconds: float
) -> None:
    machine = machine_with(files)
    with pytest.raises(error, match=f"^{message}$") as failure:
        machine.wait(**options)
    assert failure.type is error and machine.seconds == seconds and machine.recorded_key == ""


def test_machine_behind_a_jump_host_is_not_asked_before_the_new_host_key_is_in_use(machine_with: Any) -> None:
    asked: list[float] = []

    def files(now: float) -> dict[str, str]:
        asked.append(now)
        return READY

    machine = machine_with(files)
    provider: Any = SimpleNamespace(
        get_stop_reason=lambda: "",
        has_own_host_key=lambda asked: asked.name == "1" or machine.seconds >= 10,
        hosts=lambda _: {"1": "new key" if machine.seconds >= 10 else "old key"},
    )
    fleet: Any = SimpleNamespace(
        connectors={"1": machine},
        hosts=MagicMock(__getitem__=lambda *_: "new key" if machine.seconds >= 20 else "old key"),
        setup_progress=SimpleNamespace(set_step=lambda *_: None),
        shortage_reason="",
    )
    machines = {"0": MACHINE, "1": replace(MACHINE, id="toy-2", name="1", public_ip="")}
    wait_until_ready(provider, fleet, "1", lambda: machines)
    assert asked[0] == 20
