"""A run's settings in short: one flat row, which stands beside those of other runs in TensorBoard and in `ls -o json`.

Only `begin` and `end` import torch.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from train.recipe.schedule import Row, Schedule

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

METRICS = ("val/top1", "val/top5")
Value = int | float | str


def flat(schedule: Schedule, world: int) -> dict[str, Value]:
    """Return the settings of a run of `world` processes; rates are those after the linear rule, batches global.

    `lr` is the highest rate, `warmup_epochs` are those of the first phases, which lead up to it; yes is 1, no is 0.
    """
    recipe, rows = schedule.recipe, schedule.rows
    optim = recipe.optim
    return {
        "recipe": recipe.name,
        "model": recipe.model.name,
        "lr": max(row.peak for row in rows),
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
        "world": world,
    }


def warmup_epochs(rows: tuple[Row, ...]) -> int:
    """Return the number of epochs of the first phases, as long as their rate rises or is held down for a warm-up."""
    end = 0
    for row in rows:
        first, last = row.lr
        if first >= last and row.phase.shape != "constant_warmup":
            break
        end = row.phase.epochs[1]
    return end


def begin(board: "SummaryWriter", settings: Mapping[str, Value]) -> None:
    """Write the settings into a run's own events, as TensorBoard's HParams plugin reads them."""
    experiment, start, _ = _summaries(settings)
    for one in (experiment, start):
        _write(board, one)


def end(board: "SummaryWriter") -> None:
    """Note that the run has done all it should."""
    _write(board, _summaries({})[2])


def _write(board: "SummaryWriter", summary: Any) -> None:
    board._get_file_writer().add_summary(summary)  # type: ignore[no-untyped-call]  # add_hparams makes a run of its own


def _summaries(settings: Mapping[str, Value]) -> Any:
    from torch.utils.tensorboard.summary import hparams

    return hparams(dict(settings), dict.fromkeys(METRICS, 0.0))  # type: ignore[no-untyped-call]
