"""This computer as the machine of a job, or as several: for each an agent in a tmux session of the job's name."""

import os
import shutil
import signal
import time
from pathlib import Path

from cluster.connectors import log_sync, tmux
from cluster.connectors.local import Connector, module_command
from cluster.errors import BadInput, ClusterError
from cluster.machines import requirements
from cluster.state import locks
from cluster.state.run_folder import RunFolder
from cluster.state.spec import JobSpec
from train.data.index.open import DataError, check_layout
from train.recipe.schema import Recipe
from train.tools import filesystem
from train.tools.filesystem import read_json, to_json_bytes

DESCRIPTION = "this computer"
IS_REMOTE = False
# A checkpoint is weights and momentum in float32; two are kept, a third is being written. Of other people's networks
# nothing is known here: as large as a ViT-B/16, 86 million parameters.
CHECKPOINT_MB = {
    "resnet10_tiny": 4, "resnet10_cifar": 4,
    "resnet18": 94, "resnet34": 175, "resnet50": 205, "resnet101": 357, "resnet152": 482, "alexnet_bn": 488,
}  # fmt: skip
UNKNOWN_MODEL_CHECKPOINT_MB = 693
TWO_MOMENT_OPTIMIZERS = ("lamb", "adamw")  # keep a second one beside the momentum
LOGS_MB = 50


def check(spec: JobSpec, runs_folder: Path) -> None:
    """Raise `ClusterError` when tmux, what the recipe needs, the data or room on the run folders' disk are missing."""
    tmux.require_tmux()
    for line in requirements.missing_requirements(spec.recipe):
        raise BadInput(line)
    if not spec.generate_data and not spec.data_source:  # which the plan has looked at
        try:
            check_layout(Path(spec.data))
        except DataError as error:
            raise ClusterError(str(error)) from error
        if spec.copies not in (f"{spec.data}-sz", "") and not Path(spec.copies).is_dir():
            raise BadInput(f"--copies {spec.copies}: there is no such folder")
    here = next(one for one in [runs_folder, *runs_folder.parents] if one.is_dir())
    free = shutil.disk_usage(here).free / 1e6
    wanted = 3 * estimate_checkpoint_mb(spec.recipe) + LOGS_MB
    if free < wanted:
        raise ClusterError(
            f"{here}: the disk has {free:.0f} MB free; the run wants {wanted} MB for checkpoints and logs"
        )


def estimate_checkpoint_mb(recipe: Recipe) -> int:
    """Return how many MB a checkpoint of the recipe takes; of other people's networks and optimizers a guess."""
    size = CHECKPOINT_MB.get(recipe.model.name, UNKNOWN_MODEL_CHECKPOINT_MB)
    return size * 3 // 2 if recipe.optim.name in TWO_MOMENT_OPTIMIZERS else size


def reserved_names() -> set[str]:
    """Return the names of all sessions on the socket."""
    return tmux.session_names()


def launch(spec: JobSpec, run_folder: RunFolder) -> None:
    """Start the session: a supervisor that brings things home, and the agents, which add their own windows."""
    tmux.start_session(
        spec.name, run_folder.path, "supervisor", module_command("cluster.jobs.supervisor", str(run_folder.path))
    )
    for name in spec.machine_names:
        _start_agent(spec, run_folder, name)


def _start_agent(spec: JobSpec, run_folder: RunFolder, name: str, elapsed_seconds: float = 0.0) -> None:
    words = [str(run_folder.shared), str(run_folder.work_folder(name)), name, "--elapsed", f"{elapsed_seconds:.0f}"]
    window = "agent" if len(spec.machine_names) == 1 else f"agent-{name}"
    tmux.add_window(spec.name, window, module_command("cluster.agent", *words))


def poll(spec: JobSpec, run_folder: RunFolder) -> bool:
    """Bring home what is new. Returns whether an agent is at work. Raises `OSError` when the disk is full."""
    working = agents_alive(spec, run_folder)  # asked first: what a dead agent wrote is complete
    log_sync.pull_logs(Connector(), str(run_folder.shared), run_folder.path)
    alone = working and len(spec.machine_names) > 1 and not locks.is_locked(run_folder.path / locks.SUPERVISOR_LOCK)
    if alone and tmux.is_owned_by(spec.name, run_folder.path):  # somebody killed it, and lost machines would stay lost
        tmux.add_window(spec.name, "supervisor", module_command("cluster.jobs.supervisor", str(run_folder.path)))
    return working


def agents_alive(spec: JobSpec, run_folder: RunFolder) -> bool:
    """Whether an agent is at work."""
    return any(locks.is_locked(run_folder.work_folder(name) / locks.AGENT_LOCK) for name in spec.machine_names)


def dead_machines(spec: JobSpec, run_folder: RunFolder) -> list[str]:
    """Return the machines whose agent has died."""
    return [name for name in spec.machine_names if not locks.is_locked(run_folder.work_folder(name) / locks.AGENT_LOCK)]


def replace(spec: JobSpec, run_folder: RunFolder, name: str) -> None:
    """Start the agent again: it becomes a new machine under the old name."""
    if tmux.is_owned_by(spec.name, run_folder.path):
        _start_agent(spec, run_folder, name, time.time() - run_folder.launch_path.stat().st_mtime)


def kill_machine(spec: JobSpec, run_folder: RunFolder, name: str, notice_seconds: float | None) -> None:
    """Kill the agent, and with it all that it started; or tell it ahead. Raises `ClusterError` when there is none."""
    said = read_json(run_folder.status_path(name)) or {}
    if not locks.is_locked(run_folder.work_folder(name) / locks.AGENT_LOCK):
        raise ClusterError(f"machine {name} of {spec.name} has no agent at work; imgnet-cluster status {spec.name}")
    if notice_seconds is None:
        try:
            pid = int(said["pid"])
            if str(run_folder.work_folder(name)).encode() not in Path(f"/proc/{pid}/cmdline").read_bytes():
                raise ProcessLookupError
            os.kill(pid, signal.SIGKILL)
        except (OSError, KeyError, ValueError):  # another agent is just coming; its word is the old one's yet
            raise ClusterError(f"machine {name} of {spec.name} is just starting; try again in a moment") from None
    else:
        filesystem.write_atomic(
            run_folder.work_folder(name) / "notice",
            to_json_bytes({"reason": "a rehearsal took it away", "seconds": notice_seconds}),
        )


def terminate(spec: JobSpec, run_folder: RunFolder) -> list[str]:
    """End the session; the agent gets SIGHUP with it, and what it started dies with it."""
    tmux.kill_session(spec.name, run_folder.path)
    return []


def cost_dollars(spec: JobSpec, run_folder: RunFolder) -> float:
    """One's own computer bills nothing."""
    return 0.0


def cost_dollars_until(spec: JobSpec, run_folder: RunFolder, moment: float) -> float | None:
    """Nobody has said what one's own machines cost."""
    return None
