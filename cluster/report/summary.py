"""The numbers that come first: tiles for one job, a table for several."""

from collections.abc import Mapping, Sequence
from typing import Any

from .html import Html, table, tag

JobFacts = Mapping[str, Any]


def headline_values(facts: JobFacts) -> dict[str, str]:
    """Return what is known of a job by name; what is not yet known is "-"."""
    status, result, told = facts["status"], facts["result"], facts["forecast"]
    validated = [row for row in facts["epochs"] if row.get("top1") is not None]
    last: Mapping[str, Any] = validated[-1] if validated else result
    speed = result.get("images_per_second") or status.get("images_per_second")
    steps, done = status.get("steps"), status.get("step") or 0
    reached = result.get("target") or {}
    return {
        "top-1": _format_percent(last.get("top1")),
        "top-5": _format_percent(last.get("top5")),
        "minutes": _format_minutes((status.get("seconds") or 0.0) / 60),
        "cost": f"${facts['dollars']['total']:,.2f}" + (" or more" if facts["dollars"]["unknown"] else ""),
        "machines": str(facts["machines"]),
        "processes": str(facts["processes"]),
        "images/s": "-" if speed is None else f"{speed:,.0f}",
        "goodput": _format_percent(100 * result["goodput"] if result.get("goodput") is not None else None, 1),
        "steps": "-" if not steps else f"{steps:,}" if done == steps else f"{done:,} / {steps:,}",
        "epochs run": str(len(facts["epochs"])),
        "attempts": str(status.get("attempt") or 0),
        "machines lost": str(len(facts["losses"])),
        "to target, min": _format_minutes(reached.get("minutes")),
        "forecast, min": _format_minutes(told["minutes"] if told else None),
    }


def _format_minutes(value: float | None) -> str:
    """With three digits, so that what is compared is as exact."""
    return "-" if value is None else f"{value:.2f}" if value < 9.995 else f"{value:.1f}"


def _format_percent(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f} %"


def tiles(facts: JobFacts) -> Html:
    """Return the numbers of one job, large."""
    known = [(name, value) for name, value in headline_values(facts).items() if value != "-" or name.startswith("top")]
    shown = (
        tag("div", tag("b", value), tag("span", name), class_="tile" if len(value) <= len("100.00 %") else "tile two")
        for name, value in known
    )
    return tag("div", *shown, class_="tiles")


def comparison_card(all_facts: Sequence[JobFacts]) -> Html:
    """Return a card of a table with a column for each job: first the settings in which they differ."""
    rows = [
        ("recipe", *(one["status"]["recipe"] for one in all_facts)),
        ("model", *(one["model"] for one in all_facts)),
        *((name, *values) for name, values in _differing_settings(all_facts)),
        ("state", *(one["status"]["state"] for one in all_facts)),
    ]
    why = [one["status"].get("reason") or "" for one in all_facts]
    rows += [("why", *why)] if any(why) else []
    told = [headline_values(one) for one in all_facts]
    rows += [(name, *values) for name in told[0] if set(values := [one[name] for one in told]) != {"-"}]
    return tag("div", table(("", *(one["job"] for one in all_facts)), rows), class_="card")


def _differing_settings(all_facts: Sequence[JobFacts]) -> list[tuple[str, list[Any]]]:
    """The settings of which the jobs have not all the same, but for those that would mislead of one of them."""
    names = dict.fromkeys(name for one in all_facts for name in one["settings"])
    rows = [(name, [one["settings"].get(name) for one in all_facts]) for name in names]
    return [(name, values) for name, values in rows if None not in values and any(one != values[0] for one in values)]
