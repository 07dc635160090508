"""A run's settings in short: one flat row, which stands beside those of other runs in TensorBoard and in `ls -o json`.

Only `begin` and `end` import torch.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from train.recipe.schedule import Schedule, ScheduledPhase

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

HPARAM_METRICS = ("val/top1", "val/top5")
HParamValue = int | float | str


def flat_settings(schedule: Schedule, world_size: int) -> dict[str, HParamValue]:
    """Return the settings of a run of `world` processes; rates are those after the linear rule, batches global.

    `lr` is the highest rate, `warmup_epochs` are those of the first phases, which lead up to it; yes is 1, no is 0.
    """
    recipe, rows = schedule.recipe, schedule.scheduled_phases
    optim = recipe.optim
    return {
        "recipe": recipe.name,
        "model": recipe.model.name,
        "lr": max(row.peak_lr for row in rows),
        "warmup_epochs": warmup_epochs(rows),
        "epochs": recipe.epochs,
        "batch_first": rows[0].global_batch,
        "batch_largest": max(row.global_batch for row in rows),
        "size_largest": max(row.phase.size for row in rows),
        "optimizer": optim.name,
        "loss": optim.loss,
        "momentum": optim.momentum,
        "weight_decay": optim.weight_decay,
        "nesterov": int(optim.nesterov),
        "label_smoothing": optim.label_smoothing,
        "seed": recipe.seed,
        "world": world_size,
    }


def warmup_epochs(rows: tuple[ScheduledPhase, ...]) -> int:
    """Return the number of epochs of the first phases, as long as their rate rises or is held down for a warm-up."""
    end = 0
    for row in rows:
        first, last = row.scaled_lr_endpoints
        if first >= last and row.phase.shape != "constant_warmup":
            break
        end = row.phase.epochs[1]
    return end


def write_settings(writer: "SummaryWriter", settings: Mapping[str, HParamValue]) -> None:
    """Write the settings into a run's own events, as TensorBoard's HParams plugin reads them."""
    experiment, start, _ = _hparams_summaries(settings)
    for one in (experiment, start):
        _write_summary(writer, one)


def write_session_end(writer: "SummaryWriter") -> None:
    """Note that the run has done all it should."""
    _write_summary(writer, _hparams_summaries({})[2])


def _write_summary(writer: "SummaryWriter", summary: Any) -> None:
    writer._get_file_writer().add_summary(summary)  # type: ignore[no-untyped-call]  # add_hparams makes a run of its own


def _hparams_summaries(settings: Mapping[str, HParamValue]) -> Any:
    from torch.utils.tensorboard.summary import hparams

    return hparams(dict(settings), dict.fromkeys(HPARAM_METRICS, 0.0))  # type: ignore[no-untyped-call]
