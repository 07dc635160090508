"""The settings of a run as one flat row, shown beside those of other runs in TensorBoard and in `ls -o json`.

Only `write_settings` and `write_session_end` import torch.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from train.recipe.schedule import Schedule, ScheduledPhase

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

HParamValue = int | float | str


def flat_settings(schedule: Schedule, world_size: int) -> dict[str, HParamValue]:
    """Return the settings of a run of `world_size` processes. Yes is 1, no is 0.

    `lr` is the highest rate after the scaling rule, `warmup_epochs` the epochs that lead up to it; batches are global.
    """
    recipe, phases = schedule.recipe, schedule.scheduled_phases
    optim = recipe.optim
    return {
        "recipe": recipe.name,
        "model": recipe.model.name,
        "lr": max(phase.peak_lr for phase in phases),
        "warmup_epochs": warmup_epochs(phases),
        "epochs": recipe.epochs,
        "batch_first": phases[0].global_batch,
        "batch_largest": max(phase.global_batch for phase in phases),
        "size_largest": max(phase.size for phase in phases),
        "optimizer": optim.name,
        "loss": optim.loss,
        "momentum": optim.momentum,
        "weight_decay": optim.weight_decay,
        "nesterov": int(optim.nesterov),
        "label_smoothing": optim.label_smoothing,
        "seed": recipe.seed,
        "world": world_size,
    }


def warmup_epochs(phases: tuple[ScheduledPhase, ...]) -> int:
    """Return the epochs of the first phases whose learning rate rises, or is held down by "constant_warmup"."""
    end = 0
    for phase in phases:
        first, last = phase.scaled_lr_endpoints
        if first >= last and phase.phase.shape != "constant_warmup":
            break
        end = phase.epochs[1]
    return end


def write_settings(writer: "SummaryWriter", settings: Mapping[str, HParamValue]) -> None:
    """Write the settings into a run's own event file, as TensorBoard's HParams plugin reads them.

    The plugin's description of an experiment is not written. Without a description, the plugin compares the runs that
    it shows, and lists the settings that differ first. `SummaryWriter.add_hparams` would create a run of its own.
    """
    from torch.utils.tensorboard.summary import hparams

    _, own_settings, _ = hparams(dict(settings), {})  # type: ignore[no-untyped-call]
    writer._get_file_writer().add_summary(own_settings)  # type: ignore[no-untyped-call]


def write_session_end(writer: "SummaryWriter") -> None:
    """Write into the event file that the run is complete."""
    from torch.utils.tensorboard.summary import hparams

    *_, session_end = hparams({}, {})  # type: ignore[no-untyped-call]
    writer._get_file_writer().add_summary(session_end)  # type: ignore[no-untyped-call]
