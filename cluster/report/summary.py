"""The numbers at the top of a report: tiles for one job, a table of comparison for several."""

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.plots.job_facts import JobFacts
from cluster.state.states import work_title

from .tables import Cell, Table, make_table

MAX_NARROW_TILE = len("100.00 %")  # characters; a longer number takes a tile of double width


@dataclass(frozen=True)
class Tile:
    """A headline number and its name."""

    name: str
    value: str

    @property
    def is_wide(self) -> bool:
        """Whether the number takes a tile of double width."""
        return len(self.value) > MAX_NARROW_TILE


def headline_values(facts: JobFacts) -> dict[str, str]:
    """Return the headline numbers of a job by name; "-" for what is not known yet."""
    status = facts.status
    result = facts.result
    forecast = facts.forecast
    target = result.target if result else None
    validated = [epoch.result for epoch in facts.epochs if epoch.result.top1 is not None]
    if validated:
        top1, top5 = validated[-1].top1, validated[-1].top5
    else:
        top1, top5 = (result.top1, result.top5) if result else (None, None)
    speed = (result and result.images_per_second) or status.images_per_second
    goodput = 100 * result.goodput if result and result.goodput is not None else None
    cost = facts.cost
    return {
        "top-1": _format_percent(top1),
        "top-5": _format_percent(top5),
        "minutes": _format_minutes(status.seconds / 60),
        "cost": f"${cost.total:,.2f}" + (" or more" if cost.unknown else ""),
        "machines": str(facts.machines),
        "processes": str(facts.processes),
        "images/s": "-" if speed is None else f"{speed:,.0f}",
        "goodput": _format_percent(goodput, 1),
        "steps": _format_steps(status.step or 0, status.steps),
        "epochs run": str(len(facts.epochs)),
        "attempts": str(status.attempt),
        "machines lost": str(len(facts.losses)),
        "minutes to target": _format_minutes(target.minutes if target else None),
        "minutes forecast": _format_minutes(forecast.minutes if forecast else None),
    }


def _format_steps(done: int, total: int | None) -> str:
    if not total:
        return "-"
    return f"{total:,}" if done == total else f"{done:,} / {total:,}"


def _format_minutes(value: float | None) -> str:
    """Return minutes with at least three significant digits, so that numbers that are compared are equally exact."""
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}"


def _format_percent(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f} %"


def tiles(facts: JobFacts) -> list[Tile]:
    """Return the headline numbers of one job as tiles. Unknown numbers are left out, except the accuracies."""
    return [
        Tile(name, value)
        for name, value in headline_values(facts).items()
        if value != "-" or (name.startswith("top") and facts.schedule)
    ]


def comparison_table(all_facts: Sequence[JobFacts]) -> Table:
    """Return a table that has one column for each job: first the settings in which they differ."""
    rows: list[tuple[Cell, ...]] = [
        (work_title(facts.status.work for facts in all_facts), *(facts.status.recipe for facts in all_facts)),
        ("model", *(facts.model for facts in all_facts)),
        *((name, *values) for name, values in _differing_settings(all_facts)),
        ("state", *(facts.status.state for facts in all_facts)),
    ]
    reasons = [facts.status.reason for facts in all_facts]
    if any(reasons):
        rows.append(("reason", *reasons))
    headlines = [headline_values(facts) for facts in all_facts]
    for name in headlines[0]:
        values = [headline[name] for headline in headlines]
        if set(values) != {"-"}:
            rows.append((name, *values))
    return make_table(("", *(facts.job for facts in all_facts)), rows)


def _differing_settings(all_facts: Sequence[JobFacts]) -> list[tuple[str, list[Cell]]]:
    """Return the settings in which the jobs differ, without those that would mislead for one of the jobs (None)."""
    names = dict.fromkeys(name for facts in all_facts for name in facts.settings)
    rows = [(name, [facts.settings.get(name) for facts in all_facts]) for name in names]
    return [
        (name, values) for name, values in rows if None not in values and any(value != values[0] for value in values)
    ]
