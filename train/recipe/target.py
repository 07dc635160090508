"""The target accuracy of a run: when it was reached, and whether training stops there. Pure; imports no torch.

The run's clock begins with the loading of the images and goes on through lost machines and pauses, as DAWNBench counts:
loading and preparing images belong to the time, the start of the machines does not (dawn-bench-entries, issue 21).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from train.tools.filesystem import create_once, read_json, to_json_bytes, write_atomic

from .schema import Recipe

METRIC_TITLES = {"top1": "top-1", "top5": "top-5"}
CLOCK_FILE = "clock.json"
EpochRow = Mapping[str, Any]


@dataclass(frozen=True)
class Target:
    """An accuracy to reach: `metric` ("top1" or "top5") of at least `goal` percent, of a validation's first view.

    With `stops_training` the run ends after the validation that reaches it; otherwise it is only reported.
    """

    metric: str
    goal: float
    stops_training: bool = True

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the target that a text such as "top5=93" asks for. Raises `ValueError` for any other text."""
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
        """Return the target of `--target` ("": not given), else the recipe's own, else None.

        The recipe's own target is only reported and stops nothing. Raises `ValueError` as `parse` does.
        """
        if requested:
            return cls.parse(requested)
        return None if recipe.target is None else cls("top5", recipe.target, stops_training=False)

    def __str__(self) -> str:
        return f"{self.metric}={format_percent(self.goal)}"

    def first_epoch_reaching(self, epochs: Sequence[EpochRow]) -> EpochRow | None:
        """Return the row of the first epoch whose validation reached the target, None while there is none."""
        return next((row for row in epochs if row[self.metric] is not None and row[self.metric] >= self.goal), None)

    def apply_to_recipe(self, recipe: Recipe) -> Recipe:
        """Return the recipe with this target for its phases that validate near it. They look at top-5 only."""
        return replace(recipe, target=self.goal) if self.metric == "top5" else recipe


def target_outcome(target: Target | None, epochs: Sequence[EpochRow]) -> dict[str, Any] | None:
    """Return the outcome of a target over the epochs that were run as plain data, None without a target.

    `reached` says whether and `epoch` when. `seconds` and `minutes` last from the start of loading the images to the
    end of the validation that reached it; `at` is that moment as a Unix time. `best`, `best_epoch` and `best_view`
    describe the best validation. `seconds_all` (from the launch) and `dollars` are None here: only the launching side
    knows them.
    """
    if target is None:
        return None
    validated = [row for row in epochs if row[target.metric] is not None]
    best: EpochRow = max(validated, key=lambda row: row[target.metric], default={})
    reaching = target.first_epoch_reaching(epochs) or {}
    seconds = reaching.get("clock")
    return {
        "metric": target.metric,
        "goal": target.goal,
        "stops": target.stops_training,
        "reached": bool(reaching),
        "epoch": reaching.get("epoch"),
        "at": reaching.get("at"),
        "seconds": seconds,
        "minutes": None if seconds is None else seconds / 60,
        "seconds_all": None,
        "dollars": None,
        "best": best.get(target.metric),
        "best_epoch": best.get("epoch"),
        "best_view": best.get("view"),
    }


def format_percent(value: float) -> str:
    """Return a number with all its digits but without a trailing ".0": 93, 76.1."""
    return repr(value).removesuffix(".0")


def describe_outcome(outcome: Mapping[str, Any]) -> str:
    """Return the outcome of a target (`target_outcome`) in one line."""
    goal = f"{METRIC_TITLES[outcome['metric']]} of {format_percent(outcome['goal'])} %"
    if not outcome["reached"]:
        if outcome["best"] is None:
            return f"{goal} not reached; nothing was validated"
        where = f" in epoch {outcome['best_epoch']} ({outcome['best_view']})" if outcome.get("best_epoch") else ""
        return f"{goal} not reached; the best was {outcome['best']:.2f} %{where}"
    parts = [f"{goal} reached in epoch {outcome['epoch']}"]
    if outcome["minutes"] is not None:
        parts.append(f"{outcome['minutes']:.2f} minutes after the start of loading")
    if outcome.get("seconds_all") is not None:
        parts.append(f"{outcome['seconds_all'] / 60:.2f} after the launch")
    if outcome.get("dollars") is not None:
        parts.append(f"${outcome['dollars']:.2f}")
    return ", ".join(parts)


def start_clock(out: Path, loading_started: float, is_new_run: bool) -> float:
    """Return when the clock of a run began, as a Unix time, and store it in the run's output folder.

    A new run begins its clock at `loading_started`, when this process began to load the images. A later attempt takes
    the stored time; where none is stored, because no attempt came so far, it stores its own. Raises `OSError`.
    """
    path = out / CLOCK_FILE
    content = to_json_bytes({"begun": loading_started})
    if is_new_run:
        write_atomic(path, content)
    else:
        create_once(path, content)
    stored = read_json(path)
    return float(stored["begun"]) if isinstance(stored, dict) and "begun" in stored else loading_started
