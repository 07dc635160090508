"""The target accuracy of a run: when it was reached, and whether training stops there. Pure; imports no torch.

The run's clock begins with the loading of the images and goes on through lost machines and pauses, as DAWNBench counts:
loading and preparing images belong to the time, the start of the machines does not (dawn-bench-entries, issue 21).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from train.tools.files import create_once, write_atomic
from train.tools.text_files import read_json, to_json_bytes

from .history import EpochResult
from .schema import Recipe

METRIC_TITLES = {"top1": "top-1", "top5": "top-5"}
CLOCK_FILE = "clock.json"
CLOCK_JUMPED = "the clock jumped"  # between two machines, or two boots of one; within a boot, times are steady


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
        """Return the target of `--target`, else the recipe's, which stops nothing, else None. Raises `ValueError`."""
        if requested:
            return cls.parse(requested)
        return None if recipe.target is None else cls("top5", recipe.target, stops_training=False)

    def __str__(self) -> str:
        return f"{self.metric}={format_percent(self.goal)}"

    def accuracy_of(self, epoch: EpochResult) -> float | None:
        """Return the accuracy of an epoch's validation that the target is about, None without a validation."""
        return epoch.top1 if self.metric == "top1" else epoch.top5

    def first_epoch_reaching(self, epochs: Sequence[EpochResult]) -> EpochResult | None:
        """Return the first epoch whose validation reached the target, None while there is none."""
        for epoch in epochs:
            accuracy = self.accuracy_of(epoch)
            if accuracy is not None and accuracy >= self.goal:
                return epoch
        return None

    def apply_to_recipe(self, recipe: Recipe) -> Recipe:
        """Return the recipe with this target for its phases that validate near it. They look at top-5 only."""
        return replace(recipe, target=self.goal) if self.metric == "top5" else recipe


@dataclass(frozen=True, kw_only=True)
class TargetOutcome:
    """The outcome of a target over the epochs that were run.

    `reached` says whether and `epoch` when. `seconds` and `minutes` last from the start of loading the images to the
    end of the validation that reached it; `at` is that moment as a Unix time. `best`, `best_epoch` and `best_view`
    describe the best validation. Only the launching side knows `seconds_all` (from the launch) and `dollars`.
    """

    metric: str
    goal: float
    stops: bool
    reached: bool
    epoch: int | None = None
    at: float | None = None
    seconds: float | None = None
    minutes: float | None = None
    seconds_all: float | None = None
    dollars: float | None = None
    best: float | None = None
    best_epoch: int | None = None
    best_view: str | None = None


def ends_training(requested: str, patience: int | None, history: Sequence[EpochResult], since: int = 0) -> bool:
    """Return whether training ends here: at `--target` ("": none), or because top-1 has stalled (`has_stalled`)."""
    is_reached = bool(requested) and Target.parse(requested).first_epoch_reaching(history) is not None
    return is_reached or has_stalled(patience, history, since)


def has_stalled(patience: int | None, history: Sequence[EpochResult], since: int = 0) -> bool:
    """Return whether the last `patience` validations (None: no limit), all after epoch `since`, raised no top-1."""
    validated = [(epoch.epoch, epoch.top1) for epoch in history if epoch.top1 is not None]
    if patience is None or len(validated) <= patience or validated[-patience][0] <= since:
        return False
    accuracies = [top1 for _, top1 in validated]
    return max(accuracies[-patience:]) <= max(accuracies[:-patience])


def target_outcome(target: Target | None, epochs: Sequence[EpochResult]) -> TargetOutcome | None:
    """Return the outcome of a target over the epochs that were run, None without a target."""
    if target is None:
        return None
    outcome = TargetOutcome(metric=target.metric, goal=target.goal, stops=target.stops_training, reached=False)
    validated = [(accuracy, epoch) for epoch in epochs if (accuracy := target.accuracy_of(epoch)) is not None]
    if validated:
        best, best_epoch = max(validated, key=lambda pair: pair[0])
        outcome = replace(outcome, best=best, best_epoch=best_epoch.epoch, best_view=best_epoch.view)
    reaching = target.first_epoch_reaching(epochs)
    if reaching is None:
        return outcome
    minutes = None if reaching.clock is None else reaching.clock / 60
    return replace(outcome, reached=True, epoch=reaching.epoch, at=reaching.at, seconds=reaching.clock, minutes=minutes)


def format_percent(value: float) -> str:
    """Return a number with all its digits but without a trailing ".0": 93, 76.1."""
    return repr(value).removesuffix(".0")


def describe_outcome(outcome: TargetOutcome) -> str:
    """Return the outcome of a target in one line."""
    goal = f"{METRIC_TITLES[outcome.metric]} of {format_percent(outcome.goal)} %"
    if not outcome.reached:
        if outcome.best is None:
            return f"{goal} not reached; nothing was validated"
        where = f" in epoch {outcome.best_epoch} ({outcome.best_view})" if outcome.best_epoch else ""
        return f"{goal} not reached; the best was {outcome.best:.2f} %{where}"
    parts = [f"{goal} reached in epoch {outcome.epoch}"]
    if outcome.minutes is not None:
        parts.append(f"{outcome.minutes:.2f} minutes after the start of loading")
    if outcome.seconds_all is not None:
        parts.append(f"{outcome.seconds_all / 60:.2f} after the launch")
    if outcome.dollars is not None:
        parts.append(f"${outcome.dollars:.2f}")
    return ", ".join(parts)


def seconds_of_run(now: float, run_start_time: float, history: Sequence[EpochResult]) -> float | None:
    """Return the seconds of a run until the end of an epoch; None when the clock jumped back since an earlier one."""
    seconds = now - run_start_time
    earlier = [epoch.clock for epoch in history if epoch.clock is not None]
    return seconds if seconds >= max(earlier, default=0.0) else None


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
