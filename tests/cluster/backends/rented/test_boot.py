"""BootWaiter: what a booting machine is asked, and when the wait for it ends."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.backends.rented import boot
from cluster.backends.rented.boot import BootFailed, BootWaiter
from cluster.connectors.ssh import SSHRefused, Unreachable
from cluster.errors import ClusterError, SetupFailed
from infra.rented_machine import RentedMachine

MACHINE = RentedMachine(id="toy-1", name="0", private_ip="10.0.0.1", public_ip="127.0.0.1")


class Machine:
    """A connector to a machine that answers as `files` says, by the second of its boot. Nothing takes real time."""

    def __init__(self, files: Callable[[float], dict[str, str]]) -> None:
        self.files = files
        self.seconds = 0.0
        self.commands: list[list[str]] = []
        self.has_own_host_key = False

    def read_from(self, path: str, offset: int, limit: int) -> bytes:
        """Return a file of the boot."""
        return self.files(self.seconds).get(path, "").encode()[offset : offset + limit]

    def run(self, argv: list[str], **_: Any) -> Any:
        """Run imgnet-hostkey."""
        self.commands.append(argv)
        return SimpleNamespace(out=b"ssh-ed25519 NEW\n")

    def wait(self, **changes: Any) -> Any:
        """Wait until the machine is ready, and return the fake provider."""
        provider: Any = SimpleNamespace(
            cloud_name="the toy cloud",
            get_stop_reason=lambda: "",
            has_own_host_key=lambda machine: False,
            record_host_key=lambda machine, key: setattr(provider, "recorded", key),
        )
        fleet: Any = SimpleNamespace(
            connectors={"0": self},
            setup_progress=SimpleNamespace(set_step=lambda *_: None),
            shortage_reason=changes.get("shortage_reason", ""),
        )
        BootWaiter(provider).wait_until_ready(fleet, "0", changes.get("list_machines", lambda: {"0": MACHINE}))
        return provider


@pytest.fixture
def machine_with(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[float], dict[str, str]]], Machine]:
    """Return a maker of machines whose clock is that of the waiter."""

    def make(files: Callable[[float], dict[str, str]]) -> Machine:
        machine = Machine(files)

        def sleep(seconds: float) -> None:
            machine.seconds += seconds

        monkeypatch.setattr(boot, "time", SimpleNamespace(monotonic=lambda: machine.seconds, sleep=sleep))
        return machine

    return make


def raise_(error: Exception) -> dict[str, str]:
    raise error


NO_COMMANDS = ClusterError("machine 0: ~/.imgnet/commands cannot be used: mkdir: Permission denied")


def test_ready_machine_gets_a_host_key_of_its_own(machine_with: Any) -> None:
    machine = machine_with(
        lambda now: (
            raise_(Unreachable("no answer")) if now < 300 else {"~/.imgnet/ready": "ready\n"} if now > 400 else {}
        )
    )
    assert machine.wait().recorded == "ssh-ed25519 NEW" and machine.commands == [["sudo", "-n", "imgnet-hostkey"]]
    assert 400 < machine.seconds < 402


def test_reason_of_a_failed_boot_ends_the_wait_within_seconds(machine_with: Any) -> None:
    machine = machine_with(lambda now: {"~/.imgnet/failed": "no way\x1b to the internet\n"} if now > 30 else {})
    with pytest.raises(BootFailed, match=r"^boot failed: no way to the internet$"):
        machine.wait()
    assert machine.seconds < 33 and machine.commands == []


def test_machine_that_accepts_the_login_and_no_command_is_given_up_after_a_minute(machine_with: Any) -> None:
    """It was waited for until the end of the boot's time: 15 minutes, which all machines of the job were paid for."""
    machine = machine_with(lambda now: raise_(NO_COMMANDS if now > 20 else Unreachable("no answer")))
    with pytest.raises(BootFailed, match=r"Permission denied, for 60 s$"):
        machine.wait()
    assert 80 <= machine.seconds < 84


def test_short_trouble_with_commands_is_waited_out(machine_with: Any) -> None:
    """A disk is mounted over the folder while a command runs in it; a reboot comes between."""
    machine = machine_with(
        lambda now: (
            raise_(Unreachable("gone") if 50 < now < 60 else NO_COMMANDS) if now < 100 else {"~/.imgnet/ready": "y"}
        )
    )
    assert machine.wait().recorded and machine.seconds == 100


@pytest.mark.parametrize(
    ("files", "message", "seconds"),
    [
        (lambda now: {}, "it has not finished booting, after 900 s", 900),
        (lambda now: raise_(Unreachable("no answer")), "no answer, after 900 s", 900),
    ],
)
def test_boot_takes_too_long(machine_with: Any, files: Any, message: str, seconds: float) -> None:
    machine = machine_with(files)
    with pytest.raises(BootFailed, match=f"^{message}$"):
        machine.wait()
    assert seconds <= machine.seconds <= seconds + 2


def test_wait_ends_with_what_the_job_or_the_cloud_decides(machine_with: Any) -> None:
    with pytest.raises(SetupFailed, match="only 1 of the 2 machines") as failure:
        machine_with(lambda now: {}).wait(shortage_reason="only 1 of the 2 machines that the job needs can be used")
    assert not isinstance(failure.value, BootFailed), "another machine would not help"
    machines = [{"0": MACHINE}, {"0": MACHINE}]
    with pytest.raises(SetupFailed, match="terminated instance toy-1 during boot"):
        machine_with(lambda now: {}).wait(list_machines=lambda: machines.pop() if machines else {})
    with pytest.raises(SSHRefused):
        machine_with(lambda now: raise_(SSHRefused("another host key"))).wait()
