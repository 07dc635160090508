"""What all terminal output uses: the console, tables, and a progress bar."""

import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from cluster.errors import EXIT_JOB_FAILED, EXIT_JOB_STOPPED, EXIT_OK
from cluster.state.states import JobState, MachineState

from .terminal import clean, styled_stream

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.progress import Progress
    from rich.table import Table

Row = Mapping[str, object]  # the cells of a table by the names of their columns
DAMAGED = "damaged"  # shown as the state of a job whose files cannot be read
STATE_EXIT_CODES = {JobState.DONE: EXIT_OK, JobState.FAILED: EXIT_JOB_FAILED, JobState.STOPPED: EXIT_JOB_STOPPED}
STATE_COLORS: dict[str, str] = {  # of jobs and machines; states of preparation have the color of the text
    JobState.DONE: "green",
    JobState.RUNNING: "cyan",
    MachineState.TRAINING: "cyan",
    MachineState.VALIDATING: "cyan",
    JobState.RECOVERING: "yellow",
    JobState.ENDING: "yellow",
    JobState.STOPPED: "yellow",
    MachineState.STOPPING: "yellow",
    MachineState.LEFT: "yellow",
    JobState.WAITING: "blue",
    JobState.ADOPTED: "blue",
    MachineState.LOST: "magenta",
    JobState.FAILED: "red",
    DAMAGED: "red",
}
PLAIN_WIDTH_CHARACTERS = 200  # of output that does not go to a terminal
WRAPPED_TEXT_CHARACTERS = 16  # the least width of a column whose texts are wrapped


def console(to_stderr: bool = False) -> "Console":
    """Return a rich console. Off a terminal its output has no color and no cut lines. NO_COLOR is respected."""
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


def print_table(rows: Iterable[Row], optional: Sequence[str] = ()) -> None:
    """Print rows under the names of their columns, with numbers aligned to the right. No number is ever cut.

    A row may lack columns. If the table is wider than the terminal, long texts are wrapped within their column, and
    columns of `optional` are left out in that order. On a terminal, the cells of the column "state" are colored.
    """
    out = console()
    width = out.width if out.width < PLAIN_WIDTH_CHARACTERS else None
    table, left_out = build_table(rows, optional, width)
    # A terminal that is narrower than the table wraps the lines, while rich would cut the cells.
    out.width = max(out.width, table_width(column.width or 0 for column in table.columns))
    with out.capture() as capture:
        out.print(table)
    out.file.write("\n".join(line.rstrip(" ") for line in capture.get().split("\n")))
    if left_out:
        out.print(f"not shown in {out.width} columns: {', '.join(left_out)}", style="dim", soft_wrap=False)


def build_table(
    rows: Iterable[Row], optional: Sequence[str], width: int | None, can_wrap: bool = True
) -> "tuple[Table, list[str]]":
    """Return a table of at most `width`, if possible, and the optional columns left out. `Text` keeps its style."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from cluster.report.tables import format_cell  # late, because it needs the state of jobs, and --help does not

    rows = list(rows)
    columns = [
        TableColumn.measure(name, [format_cell(row.get(name)) for row in rows], can_wrap)
        for name in max(rows, key=len, default={})
    ]
    shown = columns
    for name in optional:
        if width is None or table_width(column.min_width for column in shown) <= width:
            break
        shown = [column for column in shown if column.name != name]
    widths = [column.width for column in shown] if width is None else fit_widths(shown, width)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 0))
    for column, column_width in zip(shown, widths, strict=True):
        justify: Literal["left", "right"] = "right" if column.is_numeric else "left"
        table.add_column(Text(column.name), justify=justify, overflow="fold", width=column_width)

    def styled(value: object, column: str) -> Text:
        text = format_cell(value)
        return value if isinstance(value, Text) else Text(text, STATE_COLORS.get(text, "") if column == "state" else "")

    for row in rows:
        table.add_row(*(styled(row.get(column.name), column.name) for column in shown))
    return table, [column.name for column in columns if column not in shown]


@dataclass(frozen=True)
class TableColumn:
    """A column of a table: its width in characters, and the least to which its texts can be wrapped."""

    name: str
    is_numeric: bool
    width: int
    min_width: int

    @classmethod
    def measure(cls, name: str, cells: Sequence[str], can_wrap: bool = True) -> "TableColumn":
        """Return the column. Texts over `WRAPPED_TEXT_CHARACTERS`, and headings of several words, can be wrapped."""
        from rich.cells import cell_len

        heading_width = max(map(cell_len, name.split()), default=0)  # of the longest word
        width = max(map(cell_len, (name, *cells)))
        is_numeric = all(cell[:1] in "$+-0123456789" for cell in cells)
        if not can_wrap:
            return cls(name, is_numeric, width, width)
        min_width = max(heading_width, *map(cell_len, ("", *cells)))
        if not is_numeric or any(" " in cell for cell in cells):  # texts, or lists of numbers
            min_width = min(min_width, max(WRAPPED_TEXT_CHARACTERS, heading_width))
        return cls(name, is_numeric, width, min_width)


def table_width(widths: Iterable[int]) -> int:
    """Return the width of a table with columns of these widths, and a space between two columns."""
    return sum(width + 1 for width in widths) - 1


def fit_widths(columns: Sequence[TableColumn], width: int) -> list[int]:
    """Return column widths for a table of at most this width, if possible. The widest columns are narrowed first."""
    widths = [column.width for column in columns]
    while table_width(widths) > width:
        wrappable = [index for index, column in enumerate(columns) if widths[index] > column.min_width]
        if not wrappable:
            break
        widths[max(wrappable, key=widths.__getitem__)] -= 1
    return widths


def print_state(before: str, state: str, after: str = "") -> None:
    """Print a line that contains a state. On a terminal the state is colored."""
    from rich.text import Text

    console().print(Text.assemble(before, (state, STATE_COLORS.get(state, "")), after))


def print_wrapped(line: str, indent: int = 0, to_stderr: bool = False) -> None:
    """Print a line. On a narrower terminal it is wrapped between words, and the lines after the first are indented."""
    stream = sys.stderr if to_stderr else sys.stdout
    if not stream.isatty():
        return print(line, file=stream)
    width = shutil.get_terminal_size().columns
    indentation = " " * indent
    lines = textwrap.wrap(line, width, subsequent_indent=indentation, break_long_words=False, break_on_hyphens=False)
    print("\n".join(lines), file=stream)


class ProgressBar:
    """A progress bar on stderr, called with (done, total). Without a terminal it prints a line for every 10 percent.

    `format_count` turns a number into text, for example into megabytes.
    """

    def __init__(self, title: str, format_count: Callable[[int], str] = str) -> None:
        self.title = title
        self.format_count = format_count
        self.last_shown_step = -1
        self.bar: Progress | None = None  # on a terminal

    def __enter__(self) -> "ProgressBar":
        if sys.stderr.isatty():
            from rich.progress import BarColumn, Progress, TextColumn

            description, counts = (
                TextColumn(f"{{task.{name}}}", markup=False) for name in ("description", "fields[counts]")
            )
            columns = (description, BarColumn(), counts)
            # Without a thread of its own (`auto_refresh`): the commands fork worker processes meanwhile.
            self.bar = Progress(*columns, console=console(to_stderr=True), auto_refresh=False, redirect_stdout=False)
            self.bar.start()
        return self

    def __call__(self, done: int, total: int) -> None:
        """Show the progress, unless the shown text stays the same."""
        percent = 100 * done // max(total, 1)
        step = percent if self.bar else percent // 10
        if step == self.last_shown_step:
            return
        self.last_shown_step = step
        counts = f"{self.format_count(done)} of {self.format_count(total)} ({percent} %)"
        if self.bar is None:
            print(f"{self.title}: {counts}", file=sys.stderr, flush=True)
            return
        if not self.bar.tasks:
            self.bar.add_task(self.title, total=total, counts=counts)
        self.bar.update(self.bar.task_ids[0], completed=done, total=total, counts=counts, refresh=True)

    def __exit__(self, *_: object) -> None:
        if self.bar:
            self.bar.stop()
