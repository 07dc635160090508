"""An epoch and a stretch of steps as lines of text: the same in a trainer's log and for whoever follows the job.

Imports no torch. A line has 79 characters at most, for a terminal of 80.
"""

from collections.abc import Mapping
from typing import Any

# title, width, the row's field and how it is written; what follows "val loss" is of the validation too
COLUMNS = (
    ("epoch", 5, "epoch", "d"),
    ("size", 5, "size", "d"),
    ("batch", 6, "global_batch", "d"),
    ("last rate", 10, "lr", ".4g"),
    ("loss", 7, "train_loss", ".3f"),
    ("top-1", 7, "train_top1", ".2f"),
    ("val loss", 9, "val_loss", ".3f"),
    ("top-1", 7, "top1", ".2f"),
    ("top-5", 7, "top5", ".2f"),
    ("sec", 7, "seconds", ".1f"),
    ("img/s", 7, "images_per_second", ".0f"),
)


def epoch_title() -> str:
    """Return the line above the epochs."""
    return "".join(f"{title:>{width}}" for title, width, _, _ in COLUMNS)


def epoch_line(row: Mapping[str, Any]) -> str:
    """Return an epoch of the result as a line."""
    return "".join(f"{row[name]:>{width}{form}}" for _, width, name, form in COLUMNS)


def step_line(step: int, steps: int, epoch: int, values: Mapping[str, float]) -> str:
    """Return some steps, by their scalars' names in TensorBoard, as a line."""
    return (
        f"step {step}/{steps}  epoch {epoch}  loss {values['train/loss']:.3f}  rate {values['sizes/lr']:.4g}  "
        f"{values['times/images_per_second']:.0f} img/s"
    )
