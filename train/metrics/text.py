"""An epoch and a stretch of steps as lines of text: the same in a trainer's log and for whoever follows the job.

Imports no torch. A line has 79 characters at most, for a terminal of 80.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from train.recipe.schema import Recipe

MOMENTS = ("lamb", "adamw")  # optimizers with two, and no momentum of their own
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
    """Return an epoch of the result as a line; without a validation its numbers are dashes."""
    cells = ((row[name], width, form) for _, width, name, form in COLUMNS)
    return "".join(f"{'-':>{width}}" if value is None else f"{value:>{width}{form}}" for value, width, form in cells)


def step_line(step: int, steps: int, epoch: int, values: Mapping[str, float]) -> str:
    """Return some steps, by their scalars' names in TensorBoard, as a line."""
    return (
        f"step {step}/{steps}  epoch {epoch}  loss {values['train/loss']:.3f}  rate {values['sizes/lr']:.4g}  "
        f"{values['times/images_per_second']:.0f} img/s"
    )


def span(seconds: float) -> str:
    """Return a time such as 1:02:03 or 4:05."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


def rates(pair: Sequence[float], peak: float = 0.0) -> str:
    """Return "0.1 to 0.2", or one number when both are the same; with a peak between them where it is higher."""
    several = pair if max(pair) >= peak else (pair[0], peak, pair[1])
    return " to ".join(dict.fromkeys(f"{one:.4g}" for one in several))


def put(page: str) -> None:
    """Write a page to the file that the command line names, or to stdout."""
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(page)
    else:
        sys.stdout.write(page)


def settings(recipe: Recipe) -> str:
    """Return how a recipe trains, beside its rows, in one line."""
    model, optim, comm = recipe.model, recipe.optim, recipe.comm
    decayed = [name for name, kept in (("norms", optim.norm_decay), ("biases", optim.bias_decay)) if not kept]
    words = [
        optim.name,
        *([f"momentum {optim.momentum:g}", *["nesterov"] * optim.nesterov] if optim.name not in MOMENTS else []),
        *([f"betas {optim.betas[0]:g} {optim.betas[1]:g}", f"eps {optim.eps:g}"] if optim.name in MOMENTS else []),
        *[f"trust {optim.trust:g}"] * (optim.name == "lars"),
        f"decay {optim.weight_decay:g}" + (f" (not on {' and '.join(decayed)})" if decayed else ""),
        optim.loss,
        *[f"smoothing {optim.label_smoothing:g}"] * bool(optim.label_smoothing),
        *[f"{optim.scaling} scaling"] * (optim.scaling != "linear"),
        *["zero gamma"] * model.zero_gamma,
        *[f"weights {model.weights}"] * bool(model.weights),
        *["compiled"] * model.compile,
        *[f"comm {comm.hook}"] * (comm.hook != "none"),
    ]
    for what, chosen in (("frozen", "frozen"), ("rectangles", "rect_train"), ("not augmented", "augment")):
        spans: list[tuple[int, int]] = []
        for start, end in (one.epochs for one in recipe.phases if getattr(one, chosen) != (chosen == "augment")):
            if spans and spans[-1][1] == start:
                start = spans.pop()[0]
            spans.append((start, end))
        words += [f"{what} in epochs {', '.join(f'{start}-{end}' for start, end in spans)}"] * bool(spans)
    return ", ".join(words)


PARTS = {
    "steps": "steps", "waits": "waits for images", "validation": "validation", "switches": "switches",
    "checkpoints": "checkpoints", "other": "sums, logs, the rest",
}  # fmt: skip


def where_lines(where: Mapping[str, Any], goodput: float | None = None) -> list[str]:
    """Return the table of where the time went as lines: `train.metrics.time_breakdown.where`, with the job's "pauses" if it has any."""
    pauses = where.get("pauses", 0.0)
    wall = where["wall"] + pauses
    lines = [f"{'where the time went':22}{'seconds':>10}{'share':>9}   most of it"]
    for part, title in PARTS.items():
        one = where["parts"][part]
        worst = f"epoch {one['epoch']}: {one['most']:.2f} s" if one["most"] >= 0.005 else ""
        lines.append(_part(title, one["seconds"], wall) + (f"   {worst}" if worst else ""))
    if pauses:
        lines.append(_part("pauses of losses", pauses, wall))
    lines.append(f"  {'first step to last':20}{wall:10.2f}" + ("" if goodput is None else f"   goodput {goodput:.1%}"))
    if "slower" in where:
        lines.append(_part("in slower steps", where["slower"], wall) + "   of it: above the medians of their shapes")
    if where["gap"]:
        gap = where["gap"]
        lines.append(f"  {'widest gap, in steps':20}{gap['steps']:10.2f}   before epoch {gap['epoch']}")
    if where["start"]:
        lines.append(f"  {'start, before it':20}{sum(where['start'].values()):10.2f}")
        lines += [f"    {name:18}{seconds:10.2f}" for name, seconds in where["start"].items()]
    return lines


def _part(title: str, seconds: float, wall: float) -> str:
    return f"  {title:20}{seconds:10.2f}{100 * seconds / wall if wall else 0.0:7.1f} %"
