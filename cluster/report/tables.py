"""The tables of the report as plain text: the template makes HTML of them."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cluster.plots.job_facts import JobFacts
from cluster.state.timeline import describe_members, known_first_steps
from train.metrics.text import PART_TITLES, format_duration, format_lr_range
from train.recipe.schedule import PhaseRow

NUMBER_PATTERN = re.compile(r"[-+$]?[\d.,:]+( %)?")
MAX_SHORT_CELL = 28  # characters; longer cells of a table may break into lines
SHOWN_CLASSES = 12  # in the tables of classes
Cell = str | int | float | None


@dataclass(frozen=True)
class Table:
    """Columns and rows of text. In a column of numbers, the cells are right-aligned."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    is_numeric: Sequence[bool]  # of each column
    caption: str = ""

    def cell_class(self, column: int, text: str) -> str:
        """Return the CSS class of a cell: short texts stay on one line, long texts may break."""
        if self.is_numeric[column]:
            return "number"
        return "short" if len(text) < MAX_SHORT_CELL else "long"


def make_table(columns: Sequence[str], rows: Iterable[Sequence[Cell]], caption: str = "") -> Table:
    """Return a table of these cells."""
    texts = [[display_text(cell) for cell in row] for row in rows]
    is_numeric = [all(_is_number(row[index]) for row in texts) for index in range(len(columns))]
    return Table(columns, texts, is_numeric, caption)


def _is_number(text: str) -> bool:
    return not text or NUMBER_PATTERN.fullmatch(text) is not None


def display_text(value: object) -> str:
    """Return a value as text for people, without the characters that HTML does not allow."""
    if value is None:
        return ""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return "".join(character for character in text if character.isprintable() or character in "\n\t ")


def attempts_table(facts: JobFacts) -> Table | None:
    """Return the attempts without the columns that are empty; None before the first attempt."""
    rows = [
        (
            row.attempt if row.machines else "end",
            format_duration(row.seconds),
            row.reason,
            describe_members(row.machines),
            first_step,
            _format_number(row.pause, 1),
            row.steps_lost,
        )
        for row, first_step in zip(facts.timeline, known_first_steps(facts.timeline), strict=True)
    ]
    columns = ("attempt", "at", "reason", "machines", "from step", "pause, s", "steps lost")
    filled = [index for index in range(len(columns)) if any(row[index] not in ("", None) for row in rows)]
    filled_rows = [[row[index] for index in filled] for row in rows]
    return make_table([columns[index] for index in filled], filled_rows, "Attempts") if rows else None


def time_breakdown_table(facts: JobFacts) -> Table | None:
    """Return the time between the first step and the last by part; of an old run, its rougher division."""
    title = "Where the time went"
    where = facts.status.where
    if not where:
        seconds_by_state = facts.result.seconds if facts.result else {}
        old_rows = [(name, f"{value:.1f}") for name, value in seconds_by_state.items()]
        return make_table(("part", "seconds"), old_rows, title) if old_rows else None
    pauses = where.pauses
    wall = where.wall + pauses
    parts = [(PART_TITLES[part], row.seconds) for part, row in where.parts.items()]
    if pauses:
        parts.append(("losses, redone steps", pauses))
    parts.append(("first step to last", wall))
    rows = [(name, f"{seconds:.1f}", f"{100 * seconds / wall:.1f} %" if wall else "") for name, seconds in parts]
    return make_table(("part", "seconds", "share"), rows, title)


def cost_table(facts: JobFacts) -> Table | None:
    """Return the dollars of each rented machine; None without rented machines."""
    cost = facts.cost
    rows = [
        (
            machine.name,
            machine.type,
            machine.market,
            machine.zone,
            f"{machine.seconds / 60:.1f}",
            "unknown" if machine.dollars is None else f"{machine.total_dollars:.4f}",
            machine.why if machine.ended else "still running",
        )
        for machine in cost.machines
    ]
    columns = ("machine", "type", "market", "zone", "minutes", "dollars", "ended")
    unknown_note = f"; without {', '.join(cost.unknown)}, whose price is unknown" if cost.unknown else ""
    caption = f"Dollars by machine: {cost.total:.4f} in total{unknown_note}"
    return make_table(columns, rows, caption) if rows else None


def phases_table(facts: JobFacts) -> Table:
    """Return the phases of the schedule."""
    columns = (
        *(
            "epochs",
            "image size",
            "batch",
            "global batch",
            "learning rate",
            "per 256",
            "shape",
            "steps",
            "read from",
            "crop",
        ),
        "validation",
    )
    rows = [
        (
            f"{row.start} to {row.end}",
            f"{row.size}{' in rectangles' if row.rect_train else ''}",
            row.batch,
            row.global_batch,
            format_lr_range(row.lr, row.peak),
            format_lr_range(row.lr_per_256),
            row.shape,
            row.steps,
            f"copy of {row.copy}" if row.copy else "full size",
            f"{row.min_scale} or more",
            ("rectangles" if row.rect_val else "square") + _validation_note(row),
        )
        for row in facts.schedule
    ]
    return make_table(columns, rows)


def _validation_note(schedule_row: PhaseRow) -> str:
    """Return when a phase validates, where that is not after each epoch."""
    return "" if schedule_row.validate == "each" else f", {schedule_row.validate}"


def epochs_table(facts: JobFacts) -> Table | None:
    """Return the epochs; None before the first has ended."""
    columns = (
        *("epoch", "image size", "global batch", "last rate", "loss", "val loss", "top-1, %", "top-5, %", "seconds"),
        "images/s",
    )
    rows = [
        (
            epoch.epoch,
            epoch.size,
            epoch.global_batch,
            epoch.lr,
            _format_number(epoch.train_loss, 3),
            _format_number(epoch.val_loss, 3),
            _format_number(epoch.top1, 2),
            _format_number(epoch.top5, 2),
            _format_number(epoch.seconds, 1),
            _format_number(epoch.images_per_second, 0),
        )
        for epoch in (point.result for point in facts.epochs)
    ]
    return make_table(columns, rows) if rows else None


def _format_number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def worst_classes_table(facts: JobFacts) -> Table | None:
    """Return the classes of the lowest accuracy in the last validation; None when it was not counted by class."""
    if not facts.confusion:
        return None
    rows = [(entry.name, entry.images, f"{entry.top1:.1f}") for entry in facts.confusion.worst_classes(SHOWN_CLASSES)]
    return make_table(("class", "images", "top-1, %"), rows, "Classes of the lowest accuracy")


def errors_table(facts: JobFacts) -> Table | None:
    """Return the most frequent errors of the last validation; None when there was none, or it was not counted."""
    pairs = facts.confusion.most_confused(SHOWN_CLASSES) if facts.confusion else []
    rows = [(pair.true, pair.predicted, pair.images, f"{pair.share:.1f}") for pair in pairs]
    columns = ("class", "taken for", "images", "% of the class")
    return make_table(columns, rows, "Most confused classes") if rows else None
