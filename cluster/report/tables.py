"""Tables as plain text, which the report shows as HTML and the terminal as it is. Imports no large package."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from cluster.state.timeline import AttemptRow, describe_members
from infra.costs import JobCost
from train.forecast import TermComparison
from train.metrics.text import format_duration, format_lr_range
from train.recipe.schedule import PhaseRow

if TYPE_CHECKING:
    from train.metrics.confusion import Confusion

NUMBER_PATTERN = re.compile(r"[-+$]?[\d.,:]+( %| s)?")
SHOWN_CLASSES = 10  # in the tables of classes
MAX_SHORT_CELL = 28  # characters; longer cells of a table may break into lines
Cell = str | int | float | None


@dataclass(frozen=True)
class Table:
    """Column names and rows of text."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""

    @cached_property
    def is_numeric(self) -> Sequence[bool]:
        """Whether a column has numbers only, for each column."""
        return [
            all(not row[index] or NUMBER_PATTERN.fullmatch(row[index]) for row in self.rows)
            for index in range(len(self.columns))
        ]

    def cell_class(self, column: int, text: str) -> str:
        """Return the CSS class of a cell: numbers are right-aligned, short texts stay on one line, long ones break."""
        if self.is_numeric[column]:
            return "number"
        return "short" if len(text) < MAX_SHORT_CELL else "long"


def make_table(columns: Sequence[str], rows: Iterable[Sequence[Cell]], caption: str = "") -> Table:
    """Return a table of these cells. One without rows is left out of the page."""
    texts = [[display_text(cell) for cell in row] for row in rows]
    return Table(columns, texts, caption)


def display_text(value: object) -> str:
    """Return a value as text for people, without the characters that HTML does not allow."""
    if value is None:
        return ""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return "".join(character for character in text if character.isprintable() or character in "\n\t ")


def format_error(row: TermComparison) -> str:
    """Return the relative error of a forecast in percent.

    It is empty where nothing is known, and for terms below a second, where a relative error is meaningless.
    """
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
    columns = ("attempt", "at", "machines", "from step", "pause", "steps lost", "reason")
    cells = [
        (
            row.attempt if row.machines else "end",
            format_moment(row.at),
            describe_members(row.machines),
            row.first_step,
            format_known(row.pause, "{:.1f} s"),
            row.steps_lost,
            row.reason,
        )
        for row in rows
    ]
    filled = [index for index in range(len(columns)) if any(row[index] not in ("", None) for row in cells)]
    return make_table(
        [columns[index] for index in filled], [[row[index] for index in filled] for row in cells], "Attempts"
    )


def cost_table(cost: JobCost) -> Table:
    """Return the dollars of each rented machine."""
    columns = ("machine", "id", "type", "market", "zone", "hours", "price/h", "dollars", "ended")
    rows = [
        (
            machine.name,
            machine.id,
            machine.type,
            machine.market,
            machine.zone,
            f"{machine.seconds / 3600:.3f}",
            format_known(machine.price, "${:,.4f}") or "unknown price",
            "unknown price" if machine.dollars is None else f"${machine.total_dollars:,.4f}",
            machine.why if machine.ended else "still running",
        )
        for machine in cost.machines
    ]
    unknown_note = f"; without {', '.join(cost.unknown)}, whose price is unknown" if cost.unknown else ""
    others = cost.dollars - sum(machine.total_dollars for machine in cost.machines)
    others_note = f", {others:.4f} of them for traffic and what belongs to no machine" if others >= 0.00005 else ""
    return make_table(columns, rows, f"Dollars by machine: {cost.dollars:.4f} in total{others_note}{unknown_note}")


def schedule_table(rows: Sequence[PhaseRow], missing_copies: Sequence[int] = ()) -> Table:
    """Return a schedule in the columns of a paper's table, a row for each phase.

    A phase whose resized copies are missing reads the full-size images.
    """
    columns = (
        *("epochs", "size", "batch", "global batch", "learning rate", "lr per 256", "steps", "pre-resized to"),
        *("min scale", "val crop"),
    )
    cells = [
        (
            f"{row.start}-{row.end}",
            f"{row.size}{' rect' if row.rect_train else ''}",
            row.batch,
            row.global_batch,
            format_lr_range(row.lr, row.peak) + ("" if row.shape == "linear" else f", {row.shape}"),
            format_lr_range(row.lr_per_256),
            row.steps,
            "no" if row.copy in missing_copies else row.copy or "no",
            row.min_scale,
            ("rectangle" if row.rect_val else "square") + ("" if row.validate == "each" else f", {row.validate}"),
        )
        for row in rows
    ]
    return make_table(columns, cells)


def classes_tables(confusion: "Confusion | None") -> list[Table]:
    """Return the classes of the lowest accuracy and the most frequent errors; none of what was not counted."""
    if not confusion:
        return []
    worst = [(entry.name, entry.images, f"{entry.top1:.1f}") for entry in confusion.worst_classes(SHOWN_CLASSES)]
    errors = [
        (pair.true, pair.predicted, pair.images, f"{pair.share:.1f}") for pair in confusion.most_confused(SHOWN_CLASSES)
    ]
    tables = (
        make_table(("class", "images", "top-1, %"), worst, "Classes of the lowest accuracy"),
        make_table(("class", "taken for", "images", "% of the class"), errors, "Most frequent errors"),
    )
    return [table for table in tables if table.rows]
