"""Lines of text about a run: its epochs, its steps, its settings, its wall time. Imports no torch.

The trainer's log and the command that follows a job print the same lines. A line of an epoch or of the wall-time table
has at most 79 characters, for a terminal of 80, unless a number is huge.
"""

from collections.abc import Mapping, Sequence

from train.recipe.components import MODELS, Comm
from train.recipe.history import EpochResult
from train.recipe.schema import FIXRES, TRIVIAL, Recipe

from .time_table import TimePart, TimeTable

TWO_MOMENT_OPTIMIZERS = ("lamb", "adamw")  # they use betas and eps, and no momentum
# Title, width, field of `EpochResult`, format. "loss" and "train acc" (top-1) are of the training images, the columns
# from "val loss" to "top-5" of the validation images.
EPOCH_COLUMNS = (
    ("epoch", 5, "epoch", "d"),
    ("size", 5, "size", "d"),
    ("batch", 6, "global_batch", "d"),
    ("last lr", 10, "lr", ".4g"),
    ("loss", 7, "train_loss", ".3f"),
    ("train acc", 10, "train_top1", ".2f"),
    ("val loss", 9, "val_loss", ".3f"),
    ("top-1", 7, "top1", ".2f"),
    ("top-5", 7, "top5", ".2f"),
    ("sec", 6, "seconds", ".1f"),
    ("img/s", 7, "images_per_second", ".0f"),
)


def epoch_header() -> str:
    """Return the heading of the lines that `epoch_line` returns."""
    return "".join(f"{title:>{width}}" for title, width, _, _ in EPOCH_COLUMNS)


def epoch_line(epoch: EpochResult) -> str:
    """Return the result of an epoch as a line. Values of a validation that was not made are dashes."""
    cells = ((_format_cell(getattr(epoch, name), width, form), width) for _, width, name, form in EPOCH_COLUMNS)
    return "".join(f"{cell:>{width}}" for cell, width in cells)


def _format_cell(value: float | None, width: int, form: str) -> str:
    """Return a number as text. One that would touch the column before it loses its decimals, or widens its own."""
    if value is None:
        return "-"
    text = format(value, form)
    return text if len(text) < width else f" {value:.0f}"


def step_line(step: int, total_steps: int, epoch: int, values: Mapping[str, float]) -> str:
    """Return a line about the last steps. `values` are their scalars by their names in TensorBoard."""
    return (
        f"step {step}/{total_steps}  epoch {epoch}  loss {values['loss/train']:.3f}  lr {values['sizes/lr']:.4g}  "
        f"{values['times/images_per_second']:.0f} img/s"
    )


def format_duration(seconds: float) -> str:
    """Return a duration as h:mm:ss or m:ss, such as 1:02:03 or 4:05."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


def three_digits(value: float | None) -> str:
    """Return a number with at least three significant digits, never as 1.2e+03; "" for None."""
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def hours_text(hours: float) -> str:
    """Return hours with their unit: "1 hour", "1.5 hours"."""
    number = three_digits(hours)
    return f"{number} hour" if number == "1" else f"{number} hours"


def format_lr_range(endpoints: Sequence[float], peak_lr: float = 0.0) -> str:
    """Return learning rates as "0.1 to 0.2", "0.1 to 0.4 to 0.0" with a higher peak; one number for equal ones."""
    lrs = endpoints if max(endpoints) >= peak_lr else (endpoints[0], peak_lr, endpoints[1])
    return " to ".join(dict.fromkeys(f"{lr:.4g}" for lr in lrs))


def describe_training(recipe: Recipe) -> str:
    """Return the settings of a recipe beside its phases, in one line. Only what differs from the ordinary is named."""
    model, optim, val_fraction = recipe.model, recipe.optim, recipe.data.val_fraction
    has_two_moments, is_lars = optim.name in TWO_MOMENT_OPTIMIZERS, optim.name == "lars"
    not_decayed = [name for name, decays in (("norms", optim.norm_decay), ("biases", optim.bias_decay)) if not decays]
    exceptions = f" (not on {' and '.join(not_decayed)})" if not_decayed else ""
    # Whether an external network has norms that can start at zero, only the trainer finds out.
    zero_gamma = "zero gamma" if model.name in MODELS else "zero gamma where a block's last norm is known"
    parts = [
        (True, optim.name),
        (has_two_moments, f"betas {optim.betas[0]:g} {optim.betas[1]:g}, eps {optim.eps:g}"),
        (not has_two_moments, f"momentum {optim.momentum:g}"),
        (not has_two_moments and optim.nesterov, "nesterov"),
        (is_lars, f"trust {optim.trust:g}"),
        (is_lars and optim.lars_form != "paper", f"form {optim.lars_form}"),
        (True, f"weight decay {optim.weight_decay:g}{exceptions}"),
        (True, optim.loss),
        (optim.label_smoothing, f"label smoothing {optim.label_smoothing:g}"),
        (optim.ema, f"averaged weights (decay {optim.ema or 0.0:g})"),
        (optim.clip, f"gradients clipped at {optim.clip or 0.0:g}"),
        (optim.mixup, f"mixup {optim.mixup:g}"),
        (optim.cutmix, f"CutMix {optim.cutmix:g}"),
        (recipe.transform, f"transform {recipe.transform}"),
        (optim.scaling != "linear", f"{optim.scaling} scaling"),
        (model.zero_gamma, zero_gamma),
        (model.weights, f"weights {model.weights}"),
        (model.blurpool, "BlurPool"),
        (model.compile, "compiled"),
        (recipe.precision != "auto", recipe.precision),
        (val_fraction, f"{val_fraction:.4g} of each class held out for validation"),
        (recipe.patience, f"ends after {recipe.patience} validations without a higher top-1"),
        (recipe.comm.hook != Comm().hook, f"comm hook {recipe.comm.hook}"),
    ]
    for title, epoch_ranges in (
        ("frozen", [phase.epochs for phase in recipe.phases if phase.frozen is True]),
        ("frozen as in FixRes", [phase.epochs for phase in recipe.phases if phase.frozen == FIXRES]),
        ("rectangles", [phase.epochs for phase in recipe.phases if phase.rect_train]),
        ("TrivialAugment", [phase.epochs for phase in recipe.phases if phase.augment == TRIVIAL]),
        ("not augmented", [phase.epochs for phase in recipe.phases if not phase.augment]),
    ):
        spans = ", ".join(f"{start}-{end}" for start, end in _join_adjacent(epoch_ranges))
        parts.append((bool(epoch_ranges), f"{title} in epochs {spans}"))
    return ", ".join(text for is_named, text in parts if is_named)


def _join_adjacent(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge each range that starts where the one before it ends. `ranges` are (start, end), ascending."""
    joined: list[tuple[int, int]] = []
    for start, end in ranges:
        if joined and joined[-1][1] == start:
            start, _ = joined.pop()
        joined.append((start, end))
    return joined


def describe_image_usage(errors: Sequence[str]) -> str:
    """Return a line on whether each image was used once in each epoch. `errors` come from the log of used images."""
    return "; ".join(errors) or "every image was used exactly once in every epoch"


PART_TITLES = {
    TimePart.STEPS: "steps",
    TimePart.WAITS: "waits for images",
    TimePart.VALIDATION: "validation",
    TimePart.SWITCHES: "new image sizes",
    TimePart.CHECKPOINTS: "checkpoints",
    TimePart.OTHER: "metrics, logs, rest",
}

# Titles for the steps of the start whose names (`SetupStep`) are not clear.
START_TITLES = {
    "connecting": "ssh connection",
    "code": "copying the code",
    "environment": "Python packages",
    "checks": "machine checks",
    "agent": "start of agent",
    "setup": "preparing images",
    "fetching": "fetching images",
    "standby": "standby processes",
    "waiting": "waiting for others",
    "starting": "start of trainers",
    "indexing": "opening images",
    "joining": "trainers connect",
    "warming": "first step",
}


def time_table_lines(table: TimeTable, goodput: float | None = None) -> list[str]:
    """Return the table "where the time went" as lines."""
    wall = table.wall + table.pauses
    lines = [f"{'where the time went':22}{'seconds':>10}{'share':>9}   most of it"]
    for part, title in PART_TITLES.items():
        part_time = table.parts[part]
        worst = f"   epoch {part_time.epoch}: {part_time.most:.2f} s" if part_time.most >= 0.005 else ""
        lines.append(_part_line(title, part_time.seconds, wall) + worst)
    if table.pauses:
        lines.append(_part_line("losses, redone steps", table.pauses, wall))
    shown_goodput = "" if goodput is None else f"   goodput {100 * goodput:.1f} %"
    lines.append(f"  {'first step to last':20}{wall:10.2f}{shown_goodput}")
    if table.slower is not None:
        lines.append(_part_line("in slow steps", table.slower, wall) + "   beyond the usual seconds of a step")
    if table.gap:
        lines.append(f"  {'longest gap':20}{'':22}{table.gap.steps:.2f} steps, before epoch {table.gap.epoch}")
    if table.start:
        lines.append(f"  {'start, before it':20}{sum(table.start.values()):10.2f}")
        lines += [f"    {START_TITLES.get(name, name):18}{seconds:10.2f}" for name, seconds in table.start.items()]
    return lines


def _part_line(title: str, seconds: float, wall_seconds: float) -> str:
    return f"  {title:20}{seconds:10.2f}{100 * seconds / wall_seconds if wall_seconds else 0.0:7.1f} %"
