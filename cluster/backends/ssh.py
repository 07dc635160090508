"""Machines of one's own, over ssh: those of a hosts.toml."""

import json
import shutil
from functools import cache
from pathlib import Path

from cluster.connectors import tmux
from cluster.connectors.local import python
from cluster.connectors.ssh import Unreachable
from cluster.errors import BadInput, ClusterError
from cluster.machines.fleet import Fleet
from cluster.state import locks
from cluster.state.run_folder import Folders
from cluster.state.spec import Spec

DESCRIPTION = "the machines that a file names, over ssh"
REMOTE = True


@cache
def _fleet(run: Path) -> Fleet:
    return Fleet(Spec.from_json(json.loads(Folders(run).spec.read_text())), Folders(run))


def fleet(folders: Folders) -> Fleet:
    """Return the connections of this process to the job's machines."""
    return _fleet(folders.run)


def check(spec: Spec, runs: Path) -> None:
    """Raise `ClusterError` when tmux or ssh are missing here, or there are too few machines."""
    tmux.require()
    if not shutil.which("ssh"):
        raise ClusterError("ssh is missing; install it: sudo apt-get install openssh-client (Debian, Ubuntu)")
    there = len((spec.hosts or {}).get("machines", []))
    if there < len(spec.names):
        raise BadInput(f"the hosts file names {there} machines; {len(spec.names)} are wanted (--machines, --spares)")


def taken() -> set[str]:
    """Return the names of all sessions on the socket: the supervisor's will be one of them."""
    return tmux.names()


def launch(spec: Spec, folders: Folders) -> None:
    """Start the supervisor in a session of the job's name; it does all the rest."""
    if not supervised(folders):  # its session may still be there for a moment, and is ended first
        tmux.start(spec.name, folders.run, "supervisor", python("cluster.jobs.supervisor", str(folders.run)))


def step(spec: Spec, folders: Folders) -> bool:
    """Set up what is not yet, bring files home, push requests. Returns whether an agent is or may be at work.

    Raises `SetupFailed` with the machines that cannot be used, `OSError` when the disk here is full.
    """
    here = fleet(folders)
    here.launch()
    try:
        here.push()
        here.bring()
        if not here.alive():
            here.bring()  # what the last of them wrote at its end
            return False
    except Unreachable as error:
        print(f"{spec.name}: {error}", flush=True)
    return True


def alive(spec: Spec, folders: Folders) -> bool:
    """Whether the job is looked after: only its supervisor can say more."""
    return supervised(folders)


def supervised(folders: Folders) -> bool:
    """Whether a supervisor is at work on the run folder."""
    return locks.held(folders.run / locks.SUPERVISOR)


def dead(spec: Spec, folders: Folders) -> list[str]:
    """Return the machines that have said that no agent is at work there."""
    return fleet(folders).dead()


def replace(spec: Spec, folders: Folders, name: str) -> None:
    """Set the machine up again, in the background, and start its agent."""
    fleet(folders).replace(name)


def lose(spec: Spec, folders: Folders, name: str, notice: float | None) -> None:
    """Kill the machine's agent and all that it started, or tell it ahead."""
    fleet(folders).lose(name, notice)


def terminate(spec: Spec, folders: Folders) -> list[str]:
    """End the job's sessions on all machines that answer, and the supervisor's here."""
    here = fleet(folders)
    silent = here.terminate()
    here.close()
    tmux.kill(spec.name, folders.run)
    return silent


def dollars(spec: Spec, folders: Folders) -> float:
    """One's own machines bill nothing."""
    return 0.0


def dollars_until(spec: Spec, folders: Folders, moment: float) -> float | None:
    """Nobody has said what one's own machines cost."""
    return None
