"""The accuracy that a run is for: when it was reached, and whether training stops there. Pure; imports no torch.

The clock begins with the loading of the images and goes on through losses of machines and pauses, as DAWNBench counts:
loading and preparing belong to the time, the start of the machines does not (dawn-bench-entries, issue 21).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from train.tools.filesystem import create_once, read_json, to_json_bytes
from train.tools.filesystem import write_atomic as write

from .schema import Recipe

METRIC_TITLES = {"top1": "top-1", "top5": "top-5"}
CLOCK_FILE = "clock.json"
EpochRow = Mapping[str, Any]


@dataclass(frozen=True)
class Target:
    """`metric` ("top1", "top5") of a validation's first view: at least `goal` percent; `stops`: training ends there."""

    metric: str
    goal: float
    stops_training: bool = True

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return what a text such as "top5=93" asks for. Raises `ValueError` where it asks for nothing."""
        metric, _, number = text.partition("=")
        try:
            goal = float(number)
        except ValueError:
            goal = -1.0
        if metric not in METRIC_TITLES or not 0 < goal <= 100:
            raise ValueError(f"{text!r} is no target; they look like top5=93 or top1=76.1, in percent")
        return cls(metric, goal)

    @classmethod
    def from_options(cls, requested: str, recipe: Recipe) -> "Target | None":
        """Return the target asked for ("": none), else the recipe's own, which is only told of; None without either."""
        if requested:
            return cls.parse(requested)
        return None if recipe.target is None else cls("top5", recipe.target, stops_training=False)

    def __str__(self) -> str:
        return f"{self.metric}={format_percent(self.goal)}"

    def first_epoch_reaching(self, epochs: Sequence[EpochRow]) -> EpochRow | None:
        """Return the first epoch whose validation reached it, None while there is none."""
        return next((row for row in epochs if row[self.metric] is not None and row[self.metric] >= self.goal), None)

    def apply_to_recipe(self, recipe: Recipe) -> Recipe:
        """Return the recipe with this target for its phases that validate near it; they look at top-5 alone."""
        return replace(recipe, target=self.goal) if self.metric == "top5" else recipe


def target_outcome(target: Target | None, epochs: Sequence[EpochRow]) -> dict[str, Any] | None:
    """Return what became of a target over the epochs that were run, None without one.

    `seconds` and `minutes` are from the start of loading the images to the end of the validation that reached it, `at`
    that moment; `seconds_all`, from the launch, and `dollars` are known to who launched. `best` is the best of all,
    with its epoch and view.
    """
    if target is None:
        return None
    known = [row for row in epochs if row[target.metric] is not None]
    best: EpochRow = max(known, key=lambda row: row[target.metric], default={})
    row = target.first_epoch_reaching(epochs) or {}
    seconds = row.get("clock")
    return {
        "metric": target.metric, "goal": target.goal, "stops": target.stops_training, "reached": bool(row),
        "epoch": row.get("epoch"), "at": row.get("at"), "seconds": seconds,
        "minutes": None if seconds is None else seconds / 60, "seconds_all": None, "dollars": None,
        "best": best.get(target.metric), "best_epoch": best.get("epoch"), "best_view": best.get("view"),
    }  # fmt: skip


def format_percent(value: float) -> str:
    """Return a number with all its digits, without those that say nothing: 93, 76.1."""
    return repr(value).removesuffix(".0")


def describe_outcome(result: EpochRow) -> str:
    """Return an `outcome` in one line."""
    what = f"{METRIC_TITLES[result['metric']]} of {format_percent(result['goal'])} %"
    if not result["reached"]:
        if result["best"] is None:
            return f"{what} not reached; nothing was validated"
        where = f" in epoch {result['best_epoch']} ({result['best_view']})" if result.get("best_epoch") else ""
        return f"{what} not reached; the best was {result['best']:.2f} %{where}"
    parts = [f"{what} reached in epoch {result['epoch']}"]
    if result["minutes"] is not None:
        parts.append(f"{result['minutes']:.2f} minutes after the start of loading")
    if result.get("seconds_all") is not None:
        parts.append(f"{result['seconds_all'] / 60:.2f} after the launch")
    if result.get("dollars") is not None:
        parts.append(f"${result['dollars']:.2f}")
    return ", ".join(parts)


def start_clock(out: Path, loading_started: float, is_new_run: bool) -> float:
    """Return when a run's clock began: now that its images are opened at `loading` (seconds of the wall clock), or in
    an earlier attempt, whose word stands in the folder. `anew`: there was none before.
    """
    path, mine = out / CLOCK_FILE, to_json_bytes({"begun": loading_started})
    if is_new_run:
        write(path, mine)
    else:
        create_once(path, mine)
    said = read_json(path)
    return float(said["begun"]) if isinstance(said, dict) and "begun" in said else loading_started
