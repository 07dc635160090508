"""The console and the table layout that all terminal output uses."""

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from cluster.errors import EXIT_JOB_FAILED, EXIT_JOB_STOPPED, EXIT_OK

if TYPE_CHECKING:
    from rich.console import Console


STATE_EXIT_CODES = {"done": EXIT_OK, "failed": EXIT_JOB_FAILED, "stopped": EXIT_JOB_STOPPED}


STATE_COLOURS = {"done": "green", "failed": "red", "stopped": "yellow", "running": "cyan", "waiting": "blue"}


def console(to_stderr: bool = False) -> "Console":
    """Return rich's console for stdout or stderr. Off a terminal: no colour and no cutting of lines; NO_COLOR holds."""
    from rich.console import Console

    stream = sys.stderr if to_stderr else sys.stdout
    return Console(
        stderr=to_stderr, highlight=False, markup=False, soft_wrap=True, width=None if stream.isatty() else 200
    )


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str = "") -> None:
    """Print rows under their column names, numbers to the right."""
    from rich import box
    from rich.table import Table

    shown = [[format_cell(value) for value in row] for row in rows]
    grid = Table(
        box=box.SIMPLE_HEAD, title=title or None, title_justify="left", pad_edge=False, show_edge=False, padding=(0, 0)
    )
    for place, name in enumerate(columns):
        right = all(row[place][:1] in "-0123456789" for row in shown)
        grid.add_column(name, justify="right" if right else "left", no_wrap=True)
    for row in shown:
        grid.add_row(*row, style=STATE_COLOURS.get(row[2]) if len(columns) > 2 and columns[2] == "state" else None)
    console().print(grid, width=200)  # a narrow terminal breaks the lines; cut cells would be lost


def format_cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
