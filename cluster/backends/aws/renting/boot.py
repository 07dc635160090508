"""Waits until a rented machine has booted, accepts ssh connections and shows a host key of its own.

The console of a machine whose boot failed is kept in the run folder, and its end is quoted in the reason. Also says
when a machine that has booted is broken.
"""

import contextlib
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from cluster.connectors import untrusted
from cluster.connectors.ssh import HostKeyRefused, SSHRefused, Unreachable
from cluster.connectors.ssh_scripts import quote_path
from cluster.errors import ClusterError, SetupFailed
from cluster.machines.fleet import Fleet
from cluster.state.heartbeats import MachineStatus
from cluster.state.states import SetupStep
from infra.aws.instances.instances import Instance
from infra.errors import CloudError
from train.tools.agent_protocol import Fault
from train.tools.files import write_atomic

from .instance_history import REMOTE_FOLDER, find_jump_host
from .instances import JobInstances

BOOT_TIMEOUT_SECONDS = 900.0
SLOW_BOOT_FACTOR = 2
BOOT_POLL_SECONDS = 1.0  # between two questions at least; a machine that can be asked waits itself before it answers
UNUSABLE_SECONDS = 60.0  # how long a machine may accept the login and nothing else
REASON_BYTES = 2000
QUOTED_LINES = 3  # of the console
QUOTED_CHARACTERS = 160  # of each line
# Waits 3 s at most for the end of the boot, in the folder $d. Prints "failed" and the reason, or "ready" and what the
# command $k prints. Needs no file of its own, so the reason also comes from a machine that can write nothing.
OUTCOME_SCRIPT = f"""
n=0
until [ -s "$d/ready" ] || [ -s "$d/failed" ] || [ "$n" -ge 15 ]; do sleep 0.2; n=$((n + 1)); done
if [ -s "$d/failed" ]; then echo failed; head -c {REASON_BYTES} "$d/failed"
elif [ -s "$d/ready" ]; then echo ready; $k; fi
"""
REPLACE_KEY_COMMAND = "'sudo -n imgnet-hostkey'"  # prints the new public host key, the same one each time
TERMINAL_SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class BootFailed(SetupFailed):
    """A machine did not boot as it should. Another one may."""


def wait_until_ready(
    provider: JobInstances, fleet: Fleet, name: str, list_machines: Callable[[], Mapping[str, Instance]]
) -> None:
    """Wait until a machine has booted, then let it replace its host key.

    The key that the machine boots with is no secret: its boot script contains it. `list_machines` returns the job's
    live machines by name. Called for several machines at once, each in a thread. Raises `BootFailed` when the boot
    failed, took too long, or left a machine that accepts the login and nothing else, and when the answer with the new
    host key was lost, here or to an earlier supervisor: nothing else tells that key. Raises `SetupFailed` when the
    machine is gone, or the job is to stop or cannot get enough machines any more.
    """
    start = last_usable = time.monotonic()
    machine = list_machines().get(name)
    if machine is None:
        raise SetupFailed("EC2 terminated the instance before it booted")
    timeout_seconds = BOOT_TIMEOUT_SECONDS * (SLOW_BOOT_FACTOR if machine.boots_slowly else 1)
    fleet.setup_progress.set_step(name, SetupStep.BOOTING)
    while True:
        now = time.monotonic()
        try:
            pending_reason, new_host_key = _ask(provider, fleet, machine, list_machines())
            last_usable = now
        except HostKeyRefused as error:  # the answer with the new key was lost, here or to a supervisor that was killed
            if provider.has_own_host_key(machine):
                raise
            raise BootFailed(f"its new host key is not known: {error}") from error
        except (SetupFailed, SSHRefused):
            raise
        except ClusterError as error:
            pending_reason = str(error)
            last_usable = now if isinstance(error, Unreachable) else last_usable
        if not pending_reason:
            break
        current = list_machines().get(name)
        if current is None or current.id != machine.id:
            raise SetupFailed(f"EC2 terminated instance {machine.id} during boot")
        if now - last_usable > UNUSABLE_SECONDS:
            raise BootFailed(f"{pending_reason}, for {UNUSABLE_SECONDS:.0f} s")
        if now - start > timeout_seconds:
            raise BootFailed(f"{pending_reason}, after {timeout_seconds:.0f} s")
        if stop_reason := provider.get_stop_reason() or fleet.shortage_reason:
            raise SetupFailed(stop_reason)
        time.sleep(max(0.0, now + BOOT_POLL_SECONDS - time.monotonic()))
    fleet.setup_progress.set_step(name, SetupStep.BOOTING, time.monotonic() - start)
    if new_host_key:
        provider.record_host_key(machine, new_host_key)


def _ask(provider: JobInstances, fleet: Fleet, machine: Instance, machines: Mapping[str, Instance]) -> tuple[str, str]:
    """Return what a booting machine still waits for, "" when it is ready, and its new host key if it has made one.

    Raises `BootFailed`, `ClusterError`.
    """
    jump_host = find_jump_host(machines)
    if jump_host and not machine.public_ip:
        # It replaces its host key as it boots. A connection that still expects the former key would be refused.
        is_replaced = provider.has_own_host_key(jump_host)
        if not is_replaced or fleet.hosts[machine.name] != provider.hosts(machines).get(machine.name):
            return f"machine {jump_host.name}, the jump host, has not booted", ""
    command = ":" if provider.has_own_host_key(machine) else REPLACE_KEY_COMMAND
    answer = fleet.connectors[machine.name].run_repeatable(OUTCOME_SCRIPT, d=quote_path(REMOTE_FOLDER), k=command)
    outcome, _, text = answer.partition(b"\n")
    if outcome == b"failed":
        raise BootFailed(f"boot failed: {untrusted.one_line(text)}")
    return "" if outcome == b"ready" else "it has not finished booting", untrusted.one_line(text)


def describe_console(provider: JobInstances, machine: Instance, folder: Path) -> str:
    """Return the last lines of a machine's console, to be added to a reason; "" if the cloud does not tell.

    The whole text is written to the run folder, because nobody can ask for it once the machine is terminated.
    """
    text = ""
    with contextlib.suppress(CloudError):
        text = provider.read_console(machine)
    lines = [untrusted.one_line(TERMINAL_SEQUENCE.sub("", line)) for line in text.splitlines()]
    lines = [line for line in lines if line]
    if not lines:
        return ""
    path = folder / f"console-{machine.id}.log"
    with contextlib.suppress(OSError):
        write_atomic(path, "".join(f"{line}\n" for line in lines).encode(), durable=False)
    quoted = " | ".join(untrusted.one_line(line, QUOTED_CHARACTERS) for line in lines[-QUOTED_LINES:])
    return f"; its console ends with: {quoted}; all of it: {path}"


def broken_reason(status: MachineStatus | None) -> str:
    """Return why an agent with this final status ended, if its machine is broken, else ""."""
    if status is None or status.fault != Fault.MACHINE:
        return ""
    return untrusted.one_line(status.reason) or "it is broken"
