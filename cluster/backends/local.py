"""This computer as the one machine of a job: an agent in a tmux session of the job's name."""

import shutil
from pathlib import Path

from train.data.index import DataError, check_layout

from .. import agent, tmux
from ..errors import ClusterError
from ..machine import Machine, python
from ..spec import Folders, Spec

DESCRIPTION = "this computer"
# A checkpoint is weights and momentum in float32; two are kept, a third is being written.
CHECKPOINT_MB = {
    "resnet10_tiny": 3, "resnet10_cifar": 3,
    "resnet18": 94, "resnet34": 175, "resnet50": 205, "resnet101": 357, "resnet152": 482,
}  # fmt: skip
LOGS_MB = 50


def check(spec: Spec, runs: Path) -> None:
    """Raise `ClusterError` when tmux, the data or room on the disk of the run folders are missing."""
    tmux.require()
    if not spec.draw:
        try:
            check_layout(Path(spec.data))
        except DataError as error:
            raise ClusterError(str(error)) from error
    here = next(one for one in [runs, *runs.parents] if one.is_dir())
    free = shutil.disk_usage(here).free / 1e6
    wanted = 3 * CHECKPOINT_MB[spec.recipe.model.name] + LOGS_MB
    if free < wanted:
        raise ClusterError(
            f"{here}: the disk has {free:.0f} MB free; the run wants {wanted} MB for checkpoints and logs"
        )


def taken() -> set[str]:
    """Return the names of all sessions on the socket."""
    return tmux.names()


def launch(spec: Spec, folders: Folders) -> None:
    """Start the session: a supervisor that brings things home, and the agent, which adds its own windows."""
    tmux.start(spec.name, folders.run, "supervisor", python("cluster.supervise", str(folders.run)))
    tmux.add(spec.name, "agent", python("cluster.agent", str(folders.run)))


def machines(spec: Spec) -> list[Machine]:
    """Return this computer."""
    return [Machine()]


def alive(folders: Folders) -> bool:
    """Whether the agent is at work."""
    return agent.alive(folders)


def terminate(spec: Spec, folders: Folders) -> None:
    """End the session; the agent gets SIGHUP with it, and what it started dies with it."""
    tmux.kill(spec.name, folders.run)


def dollars(spec: Spec, seconds: float) -> float:
    """One's own computer bills nothing."""
    return 0.0
