"""Tables as plain text, which the report shows as HTML and the terminal as it is. Imports no large package."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from cluster.state.states import work_title
from cluster.state.timeline import AttemptRow, describe_members
from infra.costs import JobCost
from train.forecast import TermComparison
from train.metrics.text import EPOCH_COLUMNS, PART_TITLES, START_TITLES, format_duration, format_lr_range
from train.recipe.schedule import PhaseRow

if TYPE_CHECKING:
    from train.metrics.confusion import Confusion

    from .facts import JobFacts

NUMBER_PATTERN = re.compile(r"[-+$]?[\d.,:]+( %| s)?")
SHOWN_CLASSES = 10  # in the tables of classes
MAX_SHORT_CELL = 28  # characters; longer cells of a table may break into lines
Cell = str | int | float | None


@dataclass(frozen=True)
class Table:
    """Rows of a table: texts by the name of their column. All rows have the same columns."""

    rows: Sequence[Mapping[str, str]]
    caption: str = ""

    @cached_property
    def is_numeric(self) -> Mapping[str, bool]:
        """Whether a column has numbers only, for each column."""
        return {
            name: all(not row[name] or NUMBER_PATTERN.fullmatch(row[name]) for row in self.rows)
            for name in self.rows[0]
        }

    def cell_class(self, column: str, text: str) -> str:
        """Return the CSS class of a cell: numbers are right-aligned, short texts stay on one line, long ones break."""
        if self.is_numeric[column]:
            return "number"
        return "short" if len(text) < MAX_SHORT_CELL else "long"


def make_table(rows: Iterable[Mapping[str, Cell]], caption: str = "") -> Table:
    """Return a table of these cells. One without rows is left out of the page."""
    return Table([{name: format_cell(cell) for name, cell in row.items()} for row in rows], caption)


def format_cell(value: object) -> str:
    """Return a value as text: "" for None, a float with four significant digits, one of 1,000 or more without decimals.

    Characters that HTML does not allow are left out.
    """
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"
    return "".join(character for character in str(value) if character.isprintable() or character in "\n\t ")


def format_error(row: TermComparison) -> str:
    """Return a forecast's error in percent; "" where it is unknown, and below a second, where it means nothing."""
    return "" if row.error is None or row.actual < 1 else f"{100 * row.error:+.0f} %"


def format_known(value: float | None, template: str) -> str:
    """Return a number as text by a template such as "{:.2f} %", "" for None."""
    return "" if value is None else template.format(value)


def differing_settings(settings: Sequence[Mapping[str, Cell]]) -> list[str]:
    """Return the names of the settings that differ between jobs, without the name of the recipe or of the command."""
    names = dict.fromkeys(name for row in settings for name in row if name not in ("recipe", "command"))
    return [name for name in names if len({row.get(name) for row in settings}) > 1]


def attempts_table(rows: Sequence[AttemptRow], format_moment: Callable[[float], str] = format_duration) -> Table:
    """Return a row for each attempt, with the time and the steps that it cost. Empty columns are left out."""
    cells: list[dict[str, Cell]] = [
        {
            "attempt": row.attempt if row.machines else "end",
            "at": format_moment(row.at),
            "machines": describe_members(row.machines),
            "from step": row.first_step and max(0, row.first_step),  # a script's first step may be 0
            "pause": format_known(row.pause, "{:.1f} s in place" if row.in_place else "{:.1f} s"),
            "steps lost": row.steps_lost,
            "reason": row.reason,
        }
        for row in rows
    ]
    filled = {name for row in cells for name, cell in row.items() if cell not in ("", None)}
    return make_table([{name: cell for name, cell in row.items() if name in filled} for row in cells], "Attempts")


def cost_table(cost: JobCost) -> Table:
    """Return the dollars of each rented machine."""
    rows = [
        {
            "machine": machine.name,
            "id": machine.id,
            "type": machine.type,
            "market": machine.market,
            "zone": machine.zone,
            "hours": f"{machine.seconds / 3600:.3f}",
            "price/h": format_known(machine.price, "${:,.4f}") or "unknown price",
            "dollars": "unknown price" if machine.dollars is None else f"${machine.total_dollars:,.4f}",
            "ended": machine.why if machine.ended else "still running",
        }
        for machine in cost.machines
    ]
    unknown_note = f"; without {', '.join(cost.unknown)}, whose price is unknown" if cost.unknown else ""
    others = cost.dollars - sum(machine.total_dollars for machine in cost.machines)
    others_note = f", {others:.4f} of them for traffic and what belongs to no machine" if others >= 0.00005 else ""
    return make_table(rows, f"Dollars by machine: {cost.dollars:.4f} in total{others_note}{unknown_note}")


def schedule_table(rows: Sequence[PhaseRow], missing_copies: Sequence[int] = ()) -> Table:
    """Return a row for each phase, as in papers. A phase whose copies are missing reads the full-size images."""
    return make_table(
        {
            "epochs": f"{row.start}-{row.end}",
            "size": f"{row.size}{' rect' if row.rect_train else ''}",
            "batch": row.batch,
            "global batch": row.global_batch,
            "learning rate": format_lr_range(row.lr, row.peak) + ("" if row.shape == "linear" else f", {row.shape}"),
            "lr per 256": format_lr_range(row.lr_per_256),
            "steps": row.steps,
            "pre-resized to": "no" if row.copy in missing_copies else row.copy or "no",
            "min scale": row.min_scale,
            "val crop": ("rectangle" if row.rect_val else "square")
            + ("" if row.validate == "each" else f", {row.validate}"),
        }
        for row in rows
    )


def classes_tables(confusion: "Confusion | None") -> list[Table]:
    """Return the classes of the lowest accuracy and the most frequent errors; none of what was not counted."""
    if not confusion:
        return []
    worst: list[dict[str, Cell]] = [
        {"class": entry.name, "images": entry.images, "top-1, %": f"{entry.top1:.1f}"}
        for entry in confusion.worst_classes(SHOWN_CLASSES)
    ]
    errors: list[dict[str, Cell]] = [
        {"class": pair.true, "taken for": pair.predicted, "images": pair.images, "% of the class": f"{pair.share:.1f}"}
        for pair in confusion.most_confused(SHOWN_CLASSES)
    ]
    tables = make_table(worst, "Classes of the lowest accuracy"), make_table(errors, "Most frequent errors")
    return [table for table in tables if table.rows]


# --- tables that only the report shows --------------------------------------------------------------------------------


def headline_values(facts: "JobFacts") -> dict[str, str]:
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


def comparison_table(all_facts: Sequence["JobFacts"]) -> Table:
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
    names = [facts.job for facts in all_facts]
    return make_table(
        {"": name, **dict(zip(names, values, strict=True))}
        for name, values in rows.items()
        if set(values) not in ({""}, {"-"})
    )


def time_breakdown_table(facts: "JobFacts") -> Table:
    """Return the time between the first step and the last by part; without steps, the seconds of each state."""
    title, where = "Where the time went", facts.status.where
    if not where:
        seconds_by_state = facts.result.seconds if facts.result else {}
        return make_table(
            ({"part": name, "seconds": f"{value:.1f}"} for name, value in seconds_by_state.items()), title
        )
    wall = where.wall + where.pauses
    parts = {PART_TITLES[part]: row.seconds for part, row in where.parts.items()}
    if where.pauses:
        parts["losses, redone steps"] = where.pauses
    parts["first step to last"] = wall
    shares = {name: f"{100 * seconds / wall:.1f} %" if wall else "" for name, seconds in parts.items()}
    rows = [{"part": name, "seconds": f"{parts[name]:.1f}", "share": share} for name, share in shares.items()]
    return make_table(rows, title)


def start_note(facts: "JobFacts") -> str:
    """Return a sentence on the time before the first step, "" when it is not known."""
    start = facts.status.where.start if facts.status.where else {}
    parts = ", ".join(f"{START_TITLES.get(name, name)} {seconds:.1f}" for name, seconds in start.items())
    return f"before the first step, in seconds: {sum(start.values()):.1f} ({parts})" if start else ""


def epochs_table(facts: "JobFacts") -> Table:
    """Return a table with a row for each epoch that has ended."""
    return make_table(
        {title: format_known(getattr(epoch, field), f"{{:{form}}}") for title, _, field, form in EPOCH_COLUMNS}
        for epoch in facts.epochs
    )


def provenance_table(facts: "JobFacts") -> Table:
    """Return what is needed to reproduce the numbers."""
    return make_table({"what": name, "value": value} for name, value in facts.provenance.items())
