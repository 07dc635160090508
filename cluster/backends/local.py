"""Backend `local`: this computer acts as the job's machine, or as several of them.

Each machine is an agent in a window of a tmux session that has the job's name.
"""

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
from cluster.state.heartbeats import MachineStatus
from cluster.state.run_folder import RunFolder
from cluster.state.spec import JobSpec
from train.data.index.open import DataError, check_layout
from train.recipe.schema import Recipe
from train.tools import filesystem
from train.tools.filesystem import to_json_bytes
from train.tools.records import read_record

DESCRIPTION = "this computer"
IS_REMOTE = False
# Size of one checkpoint in MB: weights and momentum, both float32.
CHECKPOINT_MB = {
    "resnet10_tiny": 4,
    "resnet10_cifar": 4,
    "resnet18": 94,
    "resnet34": 175,
    "resnet50": 205,
    "resnet101": 357,
    "resnet152": 482,
    "alexnet_bn": 488,
}
# Networks of other packages have no known size; a ViT-B/16 with 86 million parameters serves as the guess.
UNKNOWN_MODEL_CHECKPOINT_MB = 693
CHECKPOINTS_ON_DISK = 3  # two are kept while a third is written
TWO_MOMENT_OPTIMIZERS = ("lamb", "adamw")  # store a second moment beside the first
LOGS_MB = 50


def check(spec: JobSpec, runs_folder: Path) -> None:
    """Check that tmux, the recipe's requirements, the data and enough disk space are there.

    Raises `BadInput` for a missing requirement or `--copies` folder, `ClusterError` for all else.
    """
    tmux.require_tmux()
    for line in requirements.missing_requirements(spec.recipe):
        raise BadInput(line)
    if not spec.generate_data and not spec.data_source:  # data that is fetched was checked when the job was planned
        try:
            check_layout(Path(spec.data))
        except DataError as error:
            raise ClusterError(str(error)) from error
        if spec.copies not in (f"{spec.data}-sz", "") and not Path(spec.copies).is_dir():
            raise BadInput(f"--copies {spec.copies}: there is no such folder")
    folder = next(path for path in [runs_folder, *runs_folder.parents] if path.is_dir())
    free_mb = shutil.disk_usage(folder).free / 1e6
    needed_mb = CHECKPOINTS_ON_DISK * estimate_checkpoint_mb(spec.recipe) + LOGS_MB
    if free_mb < needed_mb:
        raise ClusterError(
            f"{folder}: the disk has {free_mb:.0f} MB free; the run needs {needed_mb} MB for checkpoints and logs"
        )


def estimate_checkpoint_mb(recipe: Recipe) -> int:
    """Return the size of one checkpoint in MB. For networks and optimizers of other packages it is a guess."""
    size_mb = CHECKPOINT_MB.get(recipe.model.name, UNKNOWN_MODEL_CHECKPOINT_MB)
    return size_mb * 3 // 2 if recipe.optim.name in TWO_MOMENT_OPTIMIZERS else size_mb


def reserved_names() -> set[str]:
    """Return the names of all sessions on the tmux socket."""
    return tmux.session_names()


def launch(spec: JobSpec, run_folder: RunFolder) -> None:
    """Start the tmux session with the supervisor and one agent per machine. Agents add further windows themselves."""
    tmux.start_session(spec.name, run_folder.path, "supervisor", _supervisor_argv(run_folder))
    for name in spec.machine_names:
        _start_agent(spec, run_folder, name)


def _supervisor_argv(run_folder: RunFolder) -> list[str]:
    return module_command("cluster.jobs.supervisor", str(run_folder.path))


def _start_agent(spec: JobSpec, run_folder: RunFolder, name: str, elapsed_seconds: float = 0.0) -> None:
    """Start the agent of one machine in its own window; its time limit counts from `elapsed_seconds` ago."""
    arguments = [str(run_folder.shared), str(run_folder.work_folder(name)), name, "--elapsed", f"{elapsed_seconds:.0f}"]
    window = "agent" if len(spec.machine_names) == 1 else f"agent-{name}"
    tmux.add_window(spec.name, window, module_command("cluster.agent", *arguments))


def poll(spec: JobSpec, run_folder: RunFolder) -> bool:
    """Copy new files to the run folder, and restart a supervisor that was killed.

    Returns whether an agent is running. Raises `OSError` when the disk is full.
    """
    is_running = agents_alive(spec, run_folder)  # before the copy: everything that a dead agent wrote is then copied
    log_sync.pull_logs(Connector(), str(run_folder.shared), run_folder.path)
    # Without a supervisor, lost machines of a job with several would never be replaced.
    is_unsupervised = not locks.is_locked(run_folder.path / locks.SUPERVISOR_LOCK)
    if is_running and len(spec.machine_names) > 1 and is_unsupervised and tmux.is_owned_by(spec.name, run_folder.path):
        tmux.add_window(spec.name, "supervisor", _supervisor_argv(run_folder))
    return is_running


def agents_alive(spec: JobSpec, run_folder: RunFolder) -> bool:
    """Whether an agent is running."""
    return any(_has_agent(run_folder, name) for name in spec.machine_names)


def _has_agent(run_folder: RunFolder, name: str) -> bool:
    """Whether the agent of a machine is running: it holds a lock that the kernel releases when it dies."""
    return locks.is_locked(run_folder.work_folder(name) / locks.AGENT_LOCK)


def dead_machines(spec: JobSpec, run_folder: RunFolder) -> list[str]:
    """Return the machines whose agent is not running."""
    return [name for name in spec.machine_names if not _has_agent(run_folder, name)]


def replace(spec: JobSpec, run_folder: RunFolder, name: str) -> None:
    """Start the agent again. It joins as a new machine under the old name."""
    if tmux.is_owned_by(spec.name, run_folder.path):
        _start_agent(spec, run_folder, name, time.time() - run_folder.launch_path.stat().st_mtime)


def kill_machine(spec: JobSpec, run_folder: RunFolder, name: str, notice_seconds: float | None) -> None:
    """Kill the agent with all processes that it started, or give it notice first. Raises `ClusterError` without one."""
    if not _has_agent(run_folder, name):
        raise ClusterError(
            f"machine {name} of {spec.name} has no running agent; see: imgnet-cluster status {spec.name}"
        )
    if notice_seconds is not None:
        notice = {"reason": "a rehearsal took it away", "seconds": notice_seconds}
        filesystem.write_atomic(run_folder.work_folder(name) / "notice", to_json_bytes(notice))
        return
    try:
        status = read_record(run_folder.status_path(name), MachineStatus)
        if status is None or status.pid is None:
            raise ProcessLookupError
        if str(run_folder.work_folder(name)).encode() not in Path(f"/proc/{status.pid}/cmdline").read_bytes():
            raise ProcessLookupError
        os.kill(status.pid, signal.SIGKILL)
    except (OSError, ValueError):  # a new agent is starting: the status file is still its predecessor's
        raise ClusterError(f"machine {name} of {spec.name} is just starting; try again in a moment") from None


def terminate(spec: JobSpec, run_folder: RunFolder) -> list[str]:
    """End the tmux session. Its end sends SIGHUP to the agents, and their child processes end with them."""
    tmux.kill_session(spec.name, run_folder.path)
    return []


def cost_dollars(spec: JobSpec, run_folder: RunFolder) -> float:
    """Return 0: this computer is not billed."""
    return 0.0


def cost_dollars_until(spec: JobSpec, run_folder: RunFolder, moment: float) -> float | None:
    """Return None: the price of this computer is unknown."""
    return None
