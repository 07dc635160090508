"""Chooses among the forecast candidates: cheapest, fastest, and the point of diminishing returns."""

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from cluster.errors import BadInput, ClusterError

from .candidates import Candidate

MIN_TIME_SAVED_PER_DOUBLING = 0.2  # a doubling of the machines that saves less of the time is not worth it


COUNT_WORDS = {1: "one", 2: "two", 4: "four", 8: "eight", 16: "sixteen", 32: "thirty-two", 64: "sixty-four"}


def diminishing_returns(candidates: Sequence[Candidate]) -> str:
    """Return one sentence about where more machines of a type stop being worth it, "" where that cannot be told."""
    mine = sorted((one for one in candidates if one.minutes_to_target), key=lambda one: one.machines)
    gain = 0.0
    for one, more in pairwise(mine):
        before, after = one.minutes_to_target or 0.0, more.minutes_to_target or 0.0
        gain = 1 - after / before
        if 1 - (after / before) ** (1 / math.log2(more.machines / one.machines)) < MIN_TIME_SAVED_PER_DOUBLING:
            count = more.machines - one.machines
            word = (
                f"a second {COUNT_WORDS[count]}" if count == one.machines and count in COUNT_WORDS else f"{count} more"
            )
            buy = f"buy{'s' * (count == 1)} {100 * gain:.0f} %" if gain > 0 else f"take{'s' * (count == 1)} longer"
            return f"{one.machines} machine{'s' * (one.machines > 1)}: {word} {buy}"
    if len(mine) < 2:
        return ""
    return f"no knee up to {mine[-1].machines} machines: the last {mine[-1].machines - mine[-2].machines} buy " + (
        f"{100 * gain:.0f} %"
    )


def parse_budget(text: str) -> tuple[str, float]:
    """Return what `--within` asks for: ("minutes", 30.0) of 30min, or ("dollars", 40.0) of 40$. Raises `BadInput`."""
    found = re.fullmatch(r"(\$?)(\d+(?:\.\d+)?)(min|h|\$)?", text.strip())
    if not found or bool(found[1]) == bool(found[3]) or float(found[2]) <= 0:
        raise BadInput(f"--within {text}: say a time or a price, such as 30min, 2h or 40$")
    value, unit = float(found[2]), found[1] or found[3]
    return ("dollars", value) if unit == "$" else ("minutes", value * (60 if unit == "h" else 1))


def choose(candidates: Sequence[Candidate], criterion: str, budget: tuple[str, float] | None = None) -> Candidate:
    """Return the row that is "cheapest", "fastest", or "within" (`limit`) minutes the cheapest, dollars the fastest.

    Prices are on demand; what nobody can rent any more is not chosen. Raises `ClusterError` when there is none.
    """
    left = [one for one in candidates if one.forecast and not one.machine_type.retired_reason]
    if criterion == "within" and budget:
        left = [one for one in left if _amount(one, budget[0]) <= budget[1]]
        if not left:
            raise ClusterError(f"no row is within {budget[1]:g} {budget[0]}; {_describe_best(candidates, budget[0])}")
        criterion = "cheapest" if budget[0] == "minutes" else "fastest"
    if not left:
        raise ClusterError("nothing can be chosen: no row has a forecast on machines that can be rented")
    if criterion == "cheapest":
        priced = [one for one in left if one.machine_type.on_demand_price is not None]
        if not priced:
            raise ClusterError("no row has a known price; take --fastest, or a type with one: imgnet-cluster offers")
        return min(priced, key=lambda one: (_amount(one, "dollars"), one.minutes))
    return min(left, key=lambda one: (one.minutes or math.inf, _amount(one, "dollars")))


def _amount(candidate: Candidate, unit: str) -> float:
    """Minutes or dollars of the whole run, infinite where they are not known."""
    found = candidate.minutes if unit == "minutes" else candidate.dollars(candidate.minutes)
    return math.inf if found is None else found


def _describe_best(candidates: Sequence[Candidate], unit: str) -> str:
    least = min(
        (one for one in candidates if not one.machine_type.retired_reason),
        key=lambda one: _amount(one, unit),
        default=None,
    )
    if least is None or not math.isfinite(_amount(least, unit)):
        return "none is known"
    return f"the least is {_amount(least, unit):.3g}, on {least.machines} x {least.machine_type.name}"


def launch_command(candidate: Candidate, recipe: str, options: Mapping[str, Any]) -> str:
    """Return the command that launches a row; `options` are those of plan that launch has too."""
    words = ["imgnet-cluster", "launch", "--machines", str(candidate.machines), "--type", candidate.machine_type.name]
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        for one in value if isinstance(value, tuple) else [value]:
            words += [option] if one is True else [option, str(one)] if one is not None and one is not False else []
    return shlex.join([*words, recipe])
