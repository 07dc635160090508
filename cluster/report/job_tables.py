"""The tables that only the report shows, as plain text: the template makes HTML of them."""

from collections.abc import Sequence

from cluster.state.states import work_title
from train.metrics.text import EPOCH_COLUMNS, PART_TITLES

from .facts import JobFacts
from .tables import Cell, Table, differing_settings, format_known, make_table


def headline_values(facts: JobFacts) -> dict[str, str]:
    """Return the headline numbers of a job by name; "" for what is not known yet."""
    status, result, forecast, cost = facts.status, facts.result, facts.forecast, facts.cost
    validated = [epoch for epoch in facts.epochs if epoch.top1 is not None]
    accuracies = validated[-1] if validated else result
    speed = (result and result.images_per_second) or status.images_per_second
    goodput = 100 * result.goodput if result and result.goodput is not None else None
    done = "" if status.step == status.steps else f"{status.step or 0:,} / "
    return {
        "top-1": format_known(accuracies.top1 if accuracies else None, "{:.2f} %"),
        "top-5": format_known(accuracies.top5 if accuracies else None, "{:.2f} %"),
        "minutes": _format_minutes(status.seconds / 60),
        "cost": f"${cost.dollars:,.2f}" + (" or more" if cost.unknown else ""),
        "machines": str(status.machines),
        "processes": str(status.machines * status.procs),
        "images/s": format_known(speed, "{:,.0f}"),
        "goodput": format_known(goodput, "{:.1f} %"),
        "steps": f"{done}{status.steps:,}" if status.steps else "",
        "epochs run": str(len(facts.epochs)),
        "attempts": str(status.attempt),
        "machines lost": str(len(facts.losses)),
        "minutes to target": _format_minutes(result.target.minutes if result and result.target else None),
        "minutes forecast": _format_minutes(forecast.minutes if forecast else None),
    }


def _format_minutes(value: float | None) -> str:
    """Return minutes with at least three significant digits, so that numbers that are compared are equally exact."""
    return format_known(value, "{:.2f}" if value is not None and value < 9.995 else "{:.1f}")


def comparison_table(all_facts: Sequence[JobFacts]) -> Table:
    """Return a table that has one column for each job: first the settings in which they differ."""
    headlines = [headline_values(facts) for facts in all_facts]
    settings = [facts.settings for facts in all_facts]
    differing = {name: [row.get(name) for row in settings] for name in differing_settings(settings)}
    rows: dict[str, list[Cell]] = {
        work_title(facts.status.work for facts in all_facts): [facts.status.recipe for facts in all_facts],
        "model": [facts.model for facts in all_facts],
        **{name: values for name, values in differing.items() if None not in values},  # None would mislead
        "state": [facts.status.state for facts in all_facts],
        "reason": [facts.status.reason for facts in all_facts],
        **{name: [headline[name] or "-" for headline in headlines] for name in headlines[0]},
    }
    shown_rows = [(name, *values) for name, values in rows.items() if set(values) not in ({""}, {"-"})]
    return make_table(("", *(facts.job for facts in all_facts)), shown_rows)


def time_breakdown_table(facts: JobFacts) -> Table:
    """Return the time between the first step and the last by part; without steps, the seconds of each state."""
    title, where = "Where the time went", facts.status.where
    if not where:
        seconds_by_state = facts.result.seconds if facts.result else {}
        return make_table(
            ("part", "seconds"), [(name, f"{value:.1f}") for name, value in seconds_by_state.items()], title
        )
    wall = where.wall + where.pauses
    parts = {PART_TITLES[part]: row.seconds for part, row in where.parts.items()}
    if where.pauses:
        parts["losses, redone steps"] = where.pauses
    parts["first step to last"] = wall
    rows = [
        (name, f"{seconds:.1f}", f"{100 * seconds / wall:.1f} %" if wall else "") for name, seconds in parts.items()
    ]
    return make_table(("part", "seconds", "share"), rows, title)


def start_note(facts: JobFacts) -> str:
    """Return a sentence on the time before the first step, "" when it is not known."""
    start = facts.status.where.start if facts.status.where else {}
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in start.items())
    return f"before the first step {sum(start.values()):.1f}: {parts}" if start else ""


def epochs_table(facts: JobFacts) -> Table:
    """Return a table with a row for each epoch that has ended."""
    columns = [title for title, *_ in EPOCH_COLUMNS]
    formats = [(field, f"{{:{form}}}") for _, _, field, form in EPOCH_COLUMNS]
    rows = [[format_known(getattr(epoch, field), form) for field, form in formats] for epoch in facts.epochs]
    return make_table(columns, rows)
