"""Jobs of several machines whose end is compared, bit for bit, with that of a job that nobody disturbed."""

from pathlib import Path
from typing import Any

import torch
from support.sandbox import Sandbox
from support.waiting import wait_for

from cluster.jobs.job import Job
from cluster.state import attempts, status
from train.tools import checkpoint_io
from train.tools.agent_protocol import newest_intact_checkpoint

IMAGES = 60
BATCH = 4
OPTIONS = ("--keep-batch", "--exact", "--workers", "0", "--save-seconds", "1")


def write_recipe(sandbox: Sandbox, gpus: int, epochs: int, pace: tuple[int, float] | None = None) -> str:
    """Write a recipe for some GPUs and return its path. For `pace` see `Sandbox.write_recipe`."""
    return sandbox.write_recipe(epochs, "several", 0.02, pace, gpus, BATCH)


def final_parameters(shared: Path) -> dict[str, Any]:
    """Return the weights, statistics, momenta and validation losses in the last checkpoint of a shared folder."""
    path = newest_intact_checkpoint(sorted((shared / "checkpoints").iterdir())[-1])
    assert path
    checkpoint = checkpoint_io.load_checkpoint(path)
    momenta = {f"momentum {key}": state["momentum_buffer"] for key, state in checkpoint["optimizer"]["state"].items()}
    assert len(momenta) > 20
    losses = {f"loss of epoch {row['epoch']}": torch.tensor(row["val_loss"]) for row in checkpoint["history"]}
    return {**checkpoint["model"], **momenta, **losses}


def newest_attempt(job: Job) -> attempts.Attempt:
    """Return the newest attempt of a job; an empty `Attempt` when there is none yet."""
    return attempts.newest_attempt(job.run_folder.shared) or attempts.Attempt()


def describe(job: Job) -> str:
    """Return the attempts, the machines' states and the supervisor's log, for the message of a failure."""
    history = [
        f"{attempt.number} {attempt.machine_names} {attempt.reason} from {attempt.first_step}"
        for attempt in job.run_folder.attempts.all()
    ]
    states = {name: row.state for name, row in status.machine_statuses(job.run).items()}
    log = job.run_folder.supervisor_log_path
    return "\n".join([*history, str(states), str(job.status()), log.read_text() if log.exists() else ""])


def wait_for_steps(job: Job, steps: int, *machines: str, after_attempt: int = 0) -> None:
    """Wait until these machines, and no others, have trained `steps` steps in an attempt after `after_attempt`.

    Without `machines`: those of the newest attempt. Raises `AssertionError` when the job ends before.
    """

    def have_trained() -> bool:
        assert not job.has_ended, describe(job)
        newest = newest_attempt(job)
        members = set(newest.machine_names)
        if newest.number <= after_attempt or not members or (machines and members != set(machines)):
            return False
        rows = {name: row for name, row in status.machine_statuses(job.run).items() if row.attempt == newest.number}
        return all(name in rows and rows[name].last_step >= newest.first_step + steps for name in members)

    wait_for(have_trained, 180.0, describe=lambda: describe(job), poll_seconds=0.1)
