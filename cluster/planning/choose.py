"""Chooses among the forecast candidates: cheapest, fastest, and the point of diminishing returns."""

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from cluster.errors import BadInput, ClusterError

from .candidates import Row

KNEE = 0.2  # a doubling of the machines that saves less of the time is not worth it


COUNTS = {1: "one", 2: "two", 4: "four", 8: "eight", 16: "sixteen", 32: "thirty-two", 64: "sixty-four"}


def knee(found: Sequence[Row]) -> str:
    """Return one sentence about where more machines of a type stop being worth it, "" where that cannot be told."""
    mine = sorted((one for one in found if one.to_target), key=lambda one: one.machines)
    gain = 0.0
    for one, more in pairwise(mine):
        before, after = one.to_target or 0.0, more.to_target or 0.0
        gain = 1 - after / before
        if 1 - (after / before) ** (1 / math.log2(more.machines / one.machines)) < KNEE:
            count = more.machines - one.machines
            word = f"a second {COUNTS[count]}" if count == one.machines and count in COUNTS else f"{count} more"
            buy = f"buy{'s' * (count == 1)} {100 * gain:.0f} %" if gain > 0 else f"take{'s' * (count == 1)} longer"
            return f"{one.machines} machine{'s' * (one.machines > 1)}: {word} {buy}"
    if len(mine) < 2:
        return ""
    return f"no knee up to {mine[-1].machines} machines: the last {mine[-1].machines - mine[-2].machines} buy " + (
        f"{100 * gain:.0f} %"
    )


def limit(text: str) -> tuple[str, float]:
    """Return what `--within` asks for: ("minutes", 30.0) of 30min, or ("dollars", 40.0) of 40$. Raises `BadInput`."""
    found = re.fullmatch(r"(\$?)(\d+(?:\.\d+)?)(min|h|\$)?", text.strip())
    if not found or bool(found[1]) == bool(found[3]) or float(found[2]) <= 0:
        raise BadInput(f"--within {text}: say a time or a price, such as 30min, 2h or 40$")
    value, unit = float(found[2]), found[1] or found[3]
    return ("dollars", value) if unit == "$" else ("minutes", value * (60 if unit == "h" else 1))


def choose(found: Sequence[Row], how: str, most: tuple[str, float] | None = None) -> Row:
    """Return the row that is "cheapest", "fastest", or "within" (`limit`) minutes the cheapest, dollars the fastest.

    Prices are on demand; what nobody can rent any more is not chosen. Raises `ClusterError` when there is none.
    """
    left = [one for one in found if one.forecast and not one.kind.gone]
    if how == "within" and most:
        left = [one for one in left if _cost(one, most[0]) <= most[1]]
        if not left:
            raise ClusterError(f"no row is within {most[1]:g} {most[0]}; {_best(found, most[0])}")
        how = "cheapest" if most[0] == "minutes" else "fastest"
    if not left:
        raise ClusterError("nothing can be chosen: no row has a forecast on machines that can be rented")
    if how == "cheapest":
        priced = [one for one in left if one.kind.on_demand is not None]
        if not priced:
            raise ClusterError("no row has a known price; take --fastest, or a type with one: imgnet-cluster offers")
        return min(priced, key=lambda one: (_cost(one, "dollars"), one.minutes))
    return min(left, key=lambda one: (one.minutes or math.inf, _cost(one, "dollars")))


def _cost(one: Row, what: str) -> float:
    """Minutes or dollars of the whole run, infinite where they are not known."""
    found = one.minutes if what == "minutes" else one.dollars(one.minutes)
    return math.inf if found is None else found


def _best(found: Sequence[Row], what: str) -> str:
    least = min((one for one in found if not one.kind.gone), key=lambda one: _cost(one, what), default=None)
    if least is None or not math.isfinite(_cost(least, what)):
        return "none is known"
    return f"the least is {_cost(least, what):.3g}, on {least.machines} x {least.kind.name}"


def launch_words(row: Row, recipe: str, options: Mapping[str, Any]) -> str:
    """Return the command that launches a row; `options` are those of plan that launch has too."""
    words = ["imgnet-cluster", "launch", "--machines", str(row.machines), "--type", row.kind.name]
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        for one in value if isinstance(value, tuple) else [value]:
            words += [option] if one is True else [option, str(one)] if one is not None and one is not False else []
    return shlex.join([*words, recipe])
