"""The console and the table layout that all terminal output uses."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from cluster.errors import EXIT_JOB_FAILED, EXIT_JOB_STOPPED, EXIT_OK
from cluster.state.states import JobState

from .terminal import clean, styled_stream

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

STATE_EXIT_CODES = {JobState.DONE: EXIT_OK, JobState.FAILED: EXIT_JOB_FAILED, JobState.STOPPED: EXIT_JOB_STOPPED}
STATE_COLORS: dict[str, str] = {  # of the states of jobs, and of the states of machines with the same names
    JobState.DONE: "green",
    JobState.FAILED: "red",
    JobState.STOPPED: "yellow",
    JobState.RUNNING: "cyan",
    JobState.WAITING: "blue",
}
PLAIN_WIDTH_CHARACTERS = 200  # of output that does not go to a terminal


def console(to_stderr: bool = False) -> "Console":
    """Return a rich console for stdout or stderr.

    Output to a file or a pipe has no color and no cut lines. NO_COLOR is respected.
    """
    from rich.console import Console
    from rich.segment import Segment

    class CleanConsole(Console):
        """A console that removes control characters from text before it is styled."""

        def render(self, renderable: "RenderableType", options: "ConsoleOptions | None" = None) -> "Iterable[Segment]":
            """Yield the segments of what is printed."""
            for segment in super().render(renderable, options):
                yield segment if segment.control else Segment(clean(segment.text), segment.style)

    stream = styled_stream(to_stderr)
    width = None if stream.isatty() else PLAIN_WIDTH_CHARACTERS
    return CleanConsole(file=stream, highlight=False, markup=False, soft_wrap=True, width=width)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str = "") -> None:
    """Print rows under their column names, with numbers aligned to the right.

    If the third column is "state", each row has the color of its state.
    """
    from rich import box
    from rich.table import Table

    cell_rows = [[format_cell(value) for value in row] for row in rows]
    table = Table(
        box=box.SIMPLE_HEAD, title=title or None, title_justify="left", pad_edge=False, show_edge=False, padding=(0, 0)
    )
    for index, name in enumerate(columns):
        is_numeric = all(cells[index][:1] in "-0123456789" for cells in cell_rows)
        table.add_column(name, justify="right" if is_numeric else "left", no_wrap=True)
    has_state = len(columns) > 2 and columns[2] == "state"
    for cells in cell_rows:
        table.add_row(*cells, style=STATE_COLORS.get(cells[2]) if has_state else None)
    out = console()
    out.width = PLAIN_WIDTH_CHARACTERS  # of any terminal: a narrower one wraps lines, while rich would cut the cells
    out.print(table)


def format_cell(value: object) -> str:
    """Return a value as text: "" for None, four significant digits for a float."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
