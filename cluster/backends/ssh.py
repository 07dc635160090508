"""Backend `ssh`: your own machines, those of a hosts.toml, over ssh."""

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

DESCRIPTION = "your own machines over ssh"
IS_REMOTE = True


@cache
def _cached_fleet(run_path: Path) -> Fleet:
    run_folder = RunFolder(run_path)
    return Fleet(JobSpec.from_json(json.loads(run_folder.spec_path.read_text())), run_folder)


def get_fleet(run_folder: RunFolder) -> Fleet:
    """Return this process's connections to the job's machines. They are opened once and reused."""
    return _cached_fleet(run_folder.path)


def check(spec: JobSpec, runs_folder: Path) -> None:
    """Check that tmux and ssh are installed here (`ClusterError`) and the hosts suffice (`BadInput`)."""
    tmux.require_tmux()
    if not shutil.which("ssh"):
        raise ClusterError("ssh is missing; install it: sudo apt-get install openssh-client (Debian, Ubuntu)")
    host_count = len((spec.hosts or {}).get("machines", []))
    needed = len(spec.machine_names)
    if host_count < needed:
        raise BadInput(
            f"the hosts file lists {host_count} machines, but the job needs {needed} (--machines plus --spares)"
        )


def reserved_names() -> set[str]:
    """Return the names of all sessions on the tmux socket. The job's supervisor needs a session of its own."""
    return tmux.session_names()


def launch(spec: JobSpec, run_folder: RunFolder) -> None:
    """Start the supervisor in a tmux session that has the job's name. The supervisor does all the rest."""
    if not is_supervised(run_folder):  # `start_session` first ends a leftover session of a supervisor that died
        tmux.start_session(
            spec.name, run_folder.path, "supervisor", module_command("cluster.jobs.supervisor", str(run_folder.path))
        )


def poll(spec: JobSpec, run_folder: RunFolder) -> bool:
    """Set up machines that are not ready yet, push a stop request, and copy new files to the run folder.

    Returns whether an agent is running, or may be. Raises `SetupFailed` with the machines that cannot be used, and
    `OSError` when the local disk is full.
    """
    fleet = get_fleet(run_folder)
    fleet.set_up_machines()
    try:
        fleet.push_stop_request()
        fleet.pull_files()
        if not fleet.agents_alive():
            fleet.pull_files()  # what the last agent wrote just before it ended
            return False
    except Unreachable as error:
        print(f"{spec.name}: {error}", flush=True)
    return True


def agents_alive(spec: JobSpec, run_folder: RunFolder) -> bool:
    """Whether the job has a supervisor: without it, this computer cannot tell whether agents are running."""
    return is_supervised(run_folder)


def is_supervised(run_folder: RunFolder) -> bool:
    """Whether a supervisor of this run folder is running."""
    return locks.is_locked(run_folder.path / locks.SUPERVISOR_LOCK)


def dead_machines(spec: JobSpec, run_folder: RunFolder) -> list[str]:
    """Return the machines that answered that no agent is running there."""
    return get_fleet(run_folder).dead_machines()


def replace(spec: JobSpec, run_folder: RunFolder, name: str) -> None:
    """Set the machine up again and start its agent, in the background."""
    get_fleet(run_folder).restart_agent(name)


def kill_machine(spec: JobSpec, run_folder: RunFolder, name: str, notice_seconds: float | None) -> None:
    """Kill the machine's agent with all processes that it started, or give it notice first."""
    get_fleet(run_folder).kill_machine(name, notice_seconds)


def terminate(spec: JobSpec, run_folder: RunFolder) -> list[str]:
    """End the job's sessions on all machines that answer, and the local supervisor.

    Returns the machines that did not answer.
    """
    fleet = get_fleet(run_folder)
    silent_machines = fleet.terminate()
    fleet.close()
    tmux.kill_session(spec.name, run_folder.path)
    return silent_machines


def cost_dollars(spec: JobSpec, run_folder: RunFolder) -> float:
    """Return 0: your own machines are not billed."""
    return 0.0


def cost_dollars_until(spec: JobSpec, run_folder: RunFolder, moment: float) -> float | None:
    """Return None: the price of your own machines is unknown."""
    return None
