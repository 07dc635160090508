"""Machines of one's own, over ssh: those of a hosts.toml."""

import json
import shutil
from functools import cache
from pathlib import Path

from cluster.connectors import tmux
from cluster.connectors.local import module_command
from cluster.connectors.ssh import Unreachable
from cluster.errors import BadInput, ClusterError
from cluster.machines.fleet import Fleet
from cluster.state import locks
from cluster.state.run_folder import RunFolder
from cluster.state.spec import JobSpec

DESCRIPTION = "the machines that a file names, over ssh"
IS_REMOTE = True


@cache
def _cached_fleet(run_path: Path) -> Fleet:
    return Fleet(JobSpec.from_json(json.loads(RunFolder(run_path).spec_path.read_text())), RunFolder(run_path))


def get_fleet(run_folder: RunFolder) -> Fleet:
    """Return the connections of this process to the job's machines."""
    return _cached_fleet(run_folder.path)


def check(spec: JobSpec, runs_folder: Path) -> None:
    """Raise `ClusterError` when tmux or ssh are missing here, or there are too few machines."""
    tmux.require_tmux()
    if not shutil.which("ssh"):
        raise ClusterError("ssh is missing; install it: sudo apt-get install openssh-client (Debian, Ubuntu)")
    there = len((spec.hosts or {}).get("machines", []))
    if there < len(spec.machine_names):
        raise BadInput(
            f"the hosts file names {there} machines; {len(spec.machine_names)} are wanted (--machines, --spares)"
        )


def reserved_names() -> set[str]:
    """Return the names of all sessions on the socket: the supervisor's will be one of them."""
    return tmux.session_names()


def launch(spec: JobSpec, run_folder: RunFolder) -> None:
    """Start the supervisor in a session of the job's name; it does all the rest."""
    if not is_supervised(run_folder):  # its session may still be there for a moment, and is ended first
        tmux.start_session(
            spec.name, run_folder.path, "supervisor", module_command("cluster.jobs.supervisor", str(run_folder.path))
        )


def poll(spec: JobSpec, run_folder: RunFolder) -> bool:
    """Set up what is not yet, bring files home, push requests. Returns whether an agent is or may be at work.

    Raises `SetupFailed` with the machines that cannot be used, `OSError` when the disk here is full.
    """
    here = get_fleet(run_folder)
    here.set_up_machines()
    try:
        here.push_stop_request()
        here.pull_files()
        if not here.agents_alive():
            here.pull_files()  # what the last of them wrote at its end
            return False
    except Unreachable as error:
        print(f"{spec.name}: {error}", flush=True)
    return True


def agents_alive(spec: JobSpec, run_folder: RunFolder) -> bool:
    """Whether the job is looked after: only its supervisor can say more."""
    return is_supervised(run_folder)


def is_supervised(run_folder: RunFolder) -> bool:
    """Whether a supervisor is at work on the run folder."""
    return locks.is_locked(run_folder.path / locks.SUPERVISOR_LOCK)


def dead_machines(spec: JobSpec, run_folder: RunFolder) -> list[str]:
    """Return the machines that have said that no agent is at work there."""
    return get_fleet(run_folder).dead_machines()


def replace(spec: JobSpec, run_folder: RunFolder, name: str) -> None:
    """Set the machine up again, in the background, and start its agent."""
    get_fleet(run_folder).restart_agent(name)


def kill_machine(spec: JobSpec, run_folder: RunFolder, name: str, notice_seconds: float | None) -> None:
    """Kill the machine's agent and all that it started, or tell it ahead."""
    get_fleet(run_folder).kill_machine(name, notice_seconds)


def terminate(spec: JobSpec, run_folder: RunFolder) -> list[str]:
    """End the job's sessions on all machines that answer, and the supervisor's here."""
    here = get_fleet(run_folder)
    silent = here.terminate()
    here.close()
    tmux.kill_session(spec.name, run_folder.path)
    return silent


def cost_dollars(spec: JobSpec, run_folder: RunFolder) -> float:
    """One's own machines bill nothing."""
    return 0.0


def cost_dollars_until(spec: JobSpec, run_folder: RunFolder, moment: float) -> float | None:
    """Nobody has said what one's own machines cost."""
    return None
