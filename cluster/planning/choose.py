"""Chooses among forecast candidates: cheapest, fastest, within a budget, and the point of diminishing returns."""

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise

from cluster.errors import BadInput, ClusterError

from .candidates import Candidate

# A doubling of the machines that saves a smaller share of the time is not worth it.
MIN_TIME_SAVED_PER_DOUBLING = 0.2


def diminishing_returns(candidates: Sequence[Candidate]) -> str:
    """Return a sentence about where more machines stop being worth it. The candidates are of one machine type.

    Steps between counts that are not doublings are converted to the time saved per doubling. Returns "" for fewer
    than two candidates with a forecast.
    """
    by_count = sorted((candidate for candidate in candidates if candidate.minutes_to_target), key=_machine_count)
    if len(by_count) < 2:
        return ""
    time_saved = 0.0
    for smaller, larger in pairwise(by_count):
        time_ratio = (larger.minutes_to_target or 0.0) / (smaller.minutes_to_target or 0.0)
        time_saved = 1 - time_ratio
        doublings = math.log2(larger.machines / smaller.machines)
        if 1 - time_ratio ** (1 / doublings) < MIN_TIME_SAVED_PER_DOUBLING:
            return _describe_knee(smaller.machines, larger.machines - smaller.machines, time_saved)
    last_added = by_count[-1].machines - by_count[-2].machines
    return (
        f"worth it up to {by_count[-1].machines} machines at least: "
        f"the last {last_added} save {100 * time_saved:.0f} % of the time"
    )


def _machine_count(candidate: Candidate) -> int:
    return candidate.machines


def _describe_knee(machines: int, added: int, time_saved: float) -> str:
    """Return a sentence such as "4 machines: doubling to 8 saves only 4 % of the time"."""
    is_singular = added in (1, machines)
    addition = f"doubling to {2 * machines}" if added == machines else f"{added} more"
    effect = f"save{'s' * is_singular} only {100 * time_saved:.0f} % of the time"
    if time_saved <= 0:
        effect = f"take{'s' * is_singular} longer"
    return f"{machines} machine{'s' * (machines > 1)}: {addition} {effect}"


def parse_budget(text: str) -> tuple[str, float]:
    """Parse the value of `--within`: "30min" is ("minutes", 30.0), "2h" ("minutes", 120.0), "40$" ("dollars", 40.0).

    Raises `BadInput`.
    """
    match = re.fullmatch(r"(\$?)(\d+(?:\.\d+)?)(min|h|\$)?", text.strip())
    if not match or bool(match[1]) == bool(match[3]) or float(match[2]) <= 0:
        raise BadInput(f"--within {text}: give a time or a price, such as 30min, 2h or 40$")
    value = float(match[2])
    unit = match[1] or match[3]
    if unit == "$":
        return "dollars", value
    return "minutes", value * (60 if unit == "h" else 1)


def choose(candidates: Sequence[Candidate], criterion: str, budget: tuple[str, float] | None = None) -> Candidate:
    """Return the best candidate by a criterion: "cheapest", "fastest" or "within".

    "within" takes a `budget` as `parse_budget` returns it: the cheapest candidate within a time, the fastest within a
    price. Prices are on demand; retired machine types are never chosen. Raises `ClusterError` when there is none.
    """
    eligible = [
        candidate for candidate in candidates if candidate.forecast and not candidate.machine_type.retired_reason
    ]
    if criterion == "within" and budget:
        unit, limit = budget
        eligible = [candidate for candidate in eligible if _amount(candidate, unit) <= limit]
        if not eligible:
            raise ClusterError(f"no row is within {limit:g} {unit}; {_describe_best(candidates, unit)}")
        criterion = "cheapest" if unit == "minutes" else "fastest"
    if not eligible:
        raise ClusterError("nothing to choose from: no row has a forecast on machines that can be rented")
    if criterion == "cheapest":
        priced = [candidate for candidate in eligible if candidate.machine_type.on_demand_price is not None]
        if not priced:
            raise ClusterError(
                "no row has a known price; use --fastest, or a type with a price (to list them: imgnet-cluster offers)"
            )
        return min(priced, key=lambda candidate: (_amount(candidate, "dollars"), candidate.minutes))
    return min(eligible, key=lambda candidate: (candidate.minutes or math.inf, _amount(candidate, "dollars")))


def _amount(candidate: Candidate, unit: str) -> float:
    """Return the whole run's "minutes" or "dollars", infinity if unknown."""
    amount = candidate.minutes if unit == "minutes" else candidate.dollars(candidate.minutes)
    return math.inf if amount is None else amount


def _describe_best(candidates: Sequence[Candidate], unit: str) -> str:
    """Return which rentable candidate needs least, for an error message."""
    rentable = [candidate for candidate in candidates if not candidate.machine_type.retired_reason]
    best = min(rentable, key=lambda candidate: _amount(candidate, unit), default=None)
    if best is None or not math.isfinite(_amount(best, unit)):
        return f"no row has known {unit}"
    return f"the least is {_amount(best, unit):.3g}, on {best.machines} x {best.machine_type.name}"


def launch_command(candidate: Candidate, recipe: str, options: Mapping[str, object]) -> str:
    """Return the shell command that launches a candidate. `options` are those that `plan` and `launch` share."""
    argv = ["imgnet-cluster", "launch", "--machines", str(candidate.machines), "--type", candidate.machine_type.name]
    for name, option_value in options.items():
        option = f"--{name.replace('_', '-')}"
        for value in option_value if isinstance(option_value, tuple) else [option_value]:
            if value is True:
                argv.append(option)
            elif value is not None and value is not False:
                argv += [option, str(value)]
    return shlex.join([*argv, recipe])
