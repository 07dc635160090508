"""An epoch and a stretch of steps as lines of text: the same in a trainer's log and for whoever follows the job.

Imports no torch. A line has 79 characters at most, for a terminal of 80.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from train.recipe.schema import Recipe

TWO_MOMENT_OPTIMIZERS = ("lamb", "adamw")  # optimizers with two, and no momentum of their own
# title, width, the row's field and how it is written; what follows "val loss" is of the validation too
EPOCH_COLUMNS = (
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


def epoch_header() -> str:
    """Return the line above the epochs."""
    return "".join(f"{title:>{width}}" for title, width, _, _ in EPOCH_COLUMNS)


def epoch_line(row: Mapping[str, Any]) -> str:
    """Return an epoch of the result as a line; without a validation its numbers are dashes."""
    cells = ((row[name], width, form) for _, width, name, form in EPOCH_COLUMNS)
    return "".join(f"{'-':>{width}}" if value is None else f"{value:>{width}{form}}" for value, width, form in cells)


def step_line(step: int, total_steps: int, epoch: int, values: Mapping[str, float]) -> str:
    """Return some steps, by their scalars' names in TensorBoard, as a line."""
    return (
        f"step {step}/{total_steps}  epoch {epoch}  loss {values['train/loss']:.3f}  rate {values['sizes/lr']:.4g}  "
        f"{values['times/images_per_second']:.0f} img/s"
    )


def format_duration(seconds: float) -> str:
    """Return a time such as 1:02:03 or 4:05."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


def format_lr_range(endpoints: Sequence[float], peak_lr: float = 0.0) -> str:
    """Return "0.1 to 0.2", or one number when both are the same; with a peak between them where it is higher."""
    several = endpoints if max(endpoints) >= peak_lr else (endpoints[0], peak_lr, endpoints[1])
    return " to ".join(dict.fromkeys(f"{one:.4g}" for one in several))


def write_page(page: str) -> None:
    """Write a page to the file that the command line names, or to stdout."""
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(page)
    else:
        sys.stdout.write(page)


def describe_training(recipe: Recipe) -> str:
    """Return how a recipe trains, beside its rows, in one line."""
    model, optim, comm = recipe.model, recipe.optim, recipe.comm
    decayed = [name for name, kept in (("norms", optim.norm_decay), ("biases", optim.bias_decay)) if not kept]
    words = [
        optim.name,
        *(
            [f"momentum {optim.momentum:g}", *["nesterov"] * optim.nesterov]
            if optim.name not in TWO_MOMENT_OPTIMIZERS
            else []
        ),
        *(
            [f"betas {optim.betas[0]:g} {optim.betas[1]:g}", f"eps {optim.eps:g}"]
            if optim.name in TWO_MOMENT_OPTIMIZERS
            else []
        ),
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


PART_TITLES = {
    "steps": "steps", "waits": "waits for images", "validation": "validation", "switches": "switches",
    "checkpoints": "checkpoints", "other": "sums, logs, the rest",
}  # fmt: skip


def time_breakdown_lines(breakdown: Mapping[str, Any], goodput: float | None = None) -> list[str]:
    """Return the table of where the time went as lines: `train.metrics.time_breakdown.where`, with the job's "pauses" if it has any."""
    pauses = breakdown.get("pauses", 0.0)
    wall = breakdown["wall"] + pauses
    lines = [f"{'where the time went':22}{'seconds':>10}{'share':>9}   most of it"]
    for part, title in PART_TITLES.items():
        one = breakdown["parts"][part]
        worst = f"epoch {one['epoch']}: {one['most']:.2f} s" if one["most"] >= 0.005 else ""
        lines.append(_part_line(title, one["seconds"], wall) + (f"   {worst}" if worst else ""))
    if pauses:
        lines.append(_part_line("pauses of losses", pauses, wall))
    lines.append(f"  {'first step to last':20}{wall:10.2f}" + ("" if goodput is None else f"   goodput {goodput:.1%}"))
    if "slower" in breakdown:
        lines.append(
            _part_line("in slower steps", breakdown["slower"], wall) + "   of it: above the medians of their shapes"
        )
    if breakdown["gap"]:
        gap = breakdown["gap"]
        lines.append(f"  {'widest gap, in steps':20}{gap['steps']:10.2f}   before epoch {gap['epoch']}")
    if breakdown["start"]:
        lines.append(f"  {'start, before it':20}{sum(breakdown['start'].values()):10.2f}")
        lines += [f"    {name:18}{seconds:10.2f}" for name, seconds in breakdown["start"].items()]
    return lines


def _part_line(title: str, seconds: float, wall_seconds: float) -> str:
    return f"  {title:20}{seconds:10.2f}{100 * seconds / wall_seconds if wall_seconds else 0.0:7.1f} %"
