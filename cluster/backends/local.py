"""This computer as the machine of a job, or as several: for each an agent in a tmux session of the job's name."""

import os
import shutil
import signal
import time
from pathlib import Path

from cluster.connectors import log_sync, tmux
from cluster.connectors.local import Machine, python
from cluster.errors import BadInput, ClusterError
from cluster.machines import requirements
from cluster.state import locks
from cluster.state.run_folder import Folders
from cluster.state.spec import Spec
from train.data.index.open import DataError, check_layout
from train.recipe.schema import Recipe
from train.tools import filesystem
from train.tools.filesystem import as_json, read_json

DESCRIPTION = "this computer"
REMOTE = False
# A checkpoint is weights and momentum in float32; two are kept, a third is being written. Of other people's networks
# nothing is known here: as large as a ViT-B/16, 86 million parameters.
CHECKPOINT_MB = {
    "resnet10_tiny": 4, "resnet10_cifar": 4,
    "resnet18": 94, "resnet34": 175, "resnet50": 205, "resnet101": 357, "resnet152": 482, "alexnet_bn": 488,
}  # fmt: skip
OTHERS_MB = 693
TWO_MOMENTS = ("lamb", "adamw")  # keep a second one beside the momentum
LOGS_MB = 50


def check(spec: Spec, runs: Path) -> None:
    """Raise `ClusterError` when tmux, what the recipe needs, the data or room on the run folders' disk are missing."""
    tmux.require()
    for line in requirements.missing(spec.recipe):
        raise BadInput(line)
    if not spec.draw and not spec.source:  # which the plan has looked at
        try:
            check_layout(Path(spec.data))
        except DataError as error:
            raise ClusterError(str(error)) from error
        if spec.copies not in (f"{spec.data}-sz", "") and not Path(spec.copies).is_dir():
            raise BadInput(f"--copies {spec.copies}: there is no such folder")
    here = next(one for one in [runs, *runs.parents] if one.is_dir())
    free = shutil.disk_usage(here).free / 1e6
    wanted = 3 * checkpoint_mb(spec.recipe) + LOGS_MB
    if free < wanted:
        raise ClusterError(
            f"{here}: the disk has {free:.0f} MB free; the run wants {wanted} MB for checkpoints and logs"
        )


def checkpoint_mb(recipe: Recipe) -> int:
    """Return how many MB a checkpoint of the recipe takes; of other people's networks and optimizers a guess."""
    size = CHECKPOINT_MB.get(recipe.model.name, OTHERS_MB)
    return size * 3 // 2 if recipe.optim.name in TWO_MOMENTS else size


def taken() -> set[str]:
    """Return the names of all sessions on the socket."""
    return tmux.names()


def launch(spec: Spec, folders: Folders) -> None:
    """Start the session: a supervisor that brings things home, and the agents, which add their own windows."""
    tmux.start(spec.name, folders.run, "supervisor", python("cluster.jobs.supervisor", str(folders.run)))
    for name in spec.names:
        _start(spec, folders, name)


def _start(spec: Spec, folders: Folders, name: str, elapsed: float = 0.0) -> None:
    words = [str(folders.shared), str(folders.work(name)), name, "--elapsed", f"{elapsed:.0f}"]
    window = "agent" if len(spec.names) == 1 else f"agent-{name}"
    tmux.add(spec.name, window, python("cluster.agent", *words))


def step(spec: Spec, folders: Folders) -> bool:
    """Bring home what is new. Returns whether an agent is at work. Raises `OSError` when the disk is full."""
    working = alive(spec, folders)  # asked first: what a dead agent wrote is complete
    log_sync.bring_home(Machine(), str(folders.shared), folders.run)
    alone = working and len(spec.names) > 1 and not locks.held(folders.run / locks.SUPERVISOR)
    if alone and tmux.mine(spec.name, folders.run):  # somebody killed it, and lost machines would stay lost
        tmux.add(spec.name, "supervisor", python("cluster.jobs.supervisor", str(folders.run)))
    return working


def alive(spec: Spec, folders: Folders) -> bool:
    """Whether an agent is at work."""
    return any(locks.held(folders.work(name) / locks.AGENT) for name in spec.names)


def dead(spec: Spec, folders: Folders) -> list[str]:
    """Return the machines whose agent has died."""
    return [name for name in spec.names if not locks.held(folders.work(name) / locks.AGENT)]


def replace(spec: Spec, folders: Folders, name: str) -> None:
    """Start the agent again: it becomes a new machine under the old name."""
    if tmux.mine(spec.name, folders.run):
        _start(spec, folders, name, time.time() - folders.launch.stat().st_mtime)


def lose(spec: Spec, folders: Folders, name: str, notice: float | None) -> None:
    """Kill the agent, and with it all that it started; or tell it ahead. Raises `ClusterError` when there is none."""
    said = read_json(folders.status(name)) or {}
    if not locks.held(folders.work(name) / locks.AGENT):
        raise ClusterError(f"machine {name} of {spec.name} has no agent at work; imgnet-cluster status {spec.name}")
    if notice is None:
        try:
            pid = int(said["pid"])
            if str(folders.work(name)).encode() not in Path(f"/proc/{pid}/cmdline").read_bytes():
                raise ProcessLookupError
            os.kill(pid, signal.SIGKILL)
        except (OSError, KeyError, ValueError):  # another agent is just coming; its word is the old one's yet
            raise ClusterError(f"machine {name} of {spec.name} is just starting; try again in a moment") from None
    else:
        filesystem.replace(
            folders.work(name) / "notice", as_json({"reason": "a rehearsal took it away", "seconds": notice})
        )


def terminate(spec: Spec, folders: Folders) -> list[str]:
    """End the session; the agent gets SIGHUP with it, and what it started dies with it."""
    tmux.kill(spec.name, folders.run)
    return []


def dollars(spec: Spec, folders: Folders) -> float:
    """One's own computer bills nothing."""
    return 0.0


def dollars_until(spec: Spec, folders: Folders, moment: float) -> float | None:
    """Nobody has said what one's own machines cost."""
    return None
