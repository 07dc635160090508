"""Jobs of several machines whose end is compared, bit for bit, with that of a job that nobody disturbed."""

from pathlib import Path
from typing import Any

import torch

from cluster.jobs.job import Job
from cluster.state import attempts, status
from train.tools import checkpoint_io

IMAGES = 60
BATCH = 4
OPTIONS = ("--keep-batch", "--exact", "--workers", "0", "--save-seconds", "1")
RECIPE = """\
from train.recipe import Data, Model, Optim, Phase, Recipe

recipe = Recipe(
    name="several",
    data=Data(name="drawn", root={data!r}, train={images}, val=20),
    model=Model(name="resnet10_tiny"),
    optim=Optim(nesterov=True, loss={loss!r}),
    machines=1,
    gpus={gpus},
    phases=[Phase(epochs=(0, {epochs}), size=32, batch={batch}, lr=0.02)],
)
"""


def write_recipe(path: Path, data: Path, gpus: int, epochs: int, loss: str = "cross_entropy") -> Path:
    """Write a recipe for some GPUs and return its path."""
    path.write_text(RECIPE.format(data=str(data), images=IMAGES, batch=BATCH, gpus=gpus, epochs=epochs, loss=loss))
    return path


def final_parameters(shared: Path) -> dict[str, Any]:
    """Return the weights, statistics, momenta and validation losses in the last checkpoint of a shared folder."""
    path = checkpoint_io.newest_checkpoint(sorted((shared / "checkpoints").iterdir())[-1])
    assert path
    checkpoint = checkpoint_io.load_checkpoint(path)
    momenta = {f"momentum {key}": state["momentum_buffer"] for key, state in checkpoint["optimizer"]["state"].items()}
    assert len(momenta) > 20
    losses = {f"loss of epoch {row['epoch']}": torch.tensor(row["val_loss"]) for row in checkpoint["history"]}
    return {**checkpoint["model"], **momenta, **losses}


def have_trained(job: Job, steps: int, *machines: str, after_attempt: int = 0) -> bool:
    """Whether these machines, and no others, have trained `steps` steps in an attempt after `after_attempt`."""
    newest = attempts.newest_attempt(job.run_folder.shared)
    rows = status.machine_statuses(job.run)
    return (
        newest is not None
        and newest.number > after_attempt
        and sorted(newest.machine_names) == sorted(machines)
        and all(machine in rows for machine in machines)
        and all(rows[machine].attempt == newest.number for machine in machines)
        and all(rows[machine].last_step >= newest.first_step + steps for machine in machines)
    )
