"""Live view of a job's machines: one row each, refreshed every second. Decides nothing.

The age of a status is measured with this computer's clock only, because the machines' clocks may be wrong.
"""

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Literal

from cluster.state.heartbeats import MachineLoad, find_slowest_rank
from cluster.state.states import JobState, MachineState
from cluster.state.status import JobStatus, MachineRow
from train.metrics.text import format_duration
from train.tools.trainer_reports import TrainingNumbers

from .tables import STATE_COLORS, STATE_EXIT_CODES, TableColumn, choose_columns, console, format_cell

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table

Machines = Mapping[str, MachineRow]  # by name
ReadStatuses = Callable[[], tuple[JobStatus, Machines]]

TOP_COLUMNS = (
    *("machine", "state", "attempt", "step", "img/s", "loss", "GPU %", "min %", "GPU GB", "°C", "CPU %", "RAM GB"),
    *("in Gbit/s", "out Gbit/s", "last status", "slowest"),
)
LEFT_ALIGNED_COLUMNS = ("machine", "state", "slowest")
COLUMNS_OF_SOME_JOBS = ("slowest", "GPU %", "min %", "GPU GB", "°C")  # left out where no machine has an entry
# The order in which a narrow terminal loses columns. The column "machine" always stays.
COLUMN_DROP_ORDER = (
    *("RAM GB", "CPU %", "°C", "attempt", "GPU GB", "min %", "out Gbit/s", "in Gbit/s", "loss", "img/s", "step"),
    *("GPU %", "slowest", "last status", "state"),
)
COLUMN_GAP = 2  # spaces between two columns
UNCUT_WIDTH_CHARACTERS = 1000  # of output that does not go to a terminal, so that nothing is cut
TOP_REFRESH_SECONDS = 1.0
STALE_STATUS_SECONDS = 5.0  # an agent writes its status about once a second


@dataclass(frozen=True)
class TableRow:
    """One row of the table, with the facts on which its colors depend."""

    cells: Mapping[str, str]  # by column
    state: str = ""
    status_age_seconds: float | None = None  # None: not known yet
    reason: str = ""

    @property
    def is_stale(self) -> bool:
        """Whether the machine has not written a status for too long."""
        return self.status_age_seconds is not None and self.status_age_seconds > STALE_STATUS_SECONDS


@dataclass
class StatusAgeTracker:
    """Remembers when each machine's status changed while this process watched, by this computer's clock."""

    last_rows: dict[str, MachineRow] = field(default_factory=dict)
    changed_at: dict[str, float] = field(default_factory=dict)  # monotonic seconds; first seen, for an unchanged status
    seen_changing: set[str] = field(default_factory=set)

    def update(self, machines: Machines, now: float) -> None:
        """Compare the statuses with the last ones. Machines that are no longer listed are forgotten."""
        for name in [name for name in self.last_rows if name not in machines]:
            del self.last_rows[name], self.changed_at[name]
            self.seen_changing.discard(name)
        for name, row in machines.items():
            if name in self.last_rows and self.last_rows[name] != row:
                self.seen_changing.add(name)
            if self.last_rows.get(name) != row:
                self.last_rows[name] = row
                self.changed_at[name] = now

    def status_age(self, name: str, now: float) -> float | None:
        """Return the age of a machine's status in seconds, counted from when this process first read it.

        None until the status has changed or is stale: one that was read just now may be a day old.
        """
        age = now - self.changed_at[name] if name in self.changed_at else 0.0
        return age if name in self.seen_changing or age > STALE_STATUS_SECONDS else None


def machine_table_rows(machines: Machines, now: float, tracker: StatusAgeTracker | None = None) -> list[TableRow]:
    """Return a row for each machine, sorted by name. `now` is a time of the clock of `StatusAgeTracker.update`."""
    tracker = tracker or StatusAgeTracker()
    ages = {name: tracker.status_age(name, now) for name in machines}
    fresh_names = [name for name, age in ages.items() if (age or 0.0) <= STALE_STATUS_SECONDS]
    slowest = find_slowest_rank({name: status for name in fresh_names if (status := machines[name].status)})
    rows = []
    for name in sorted(machines, key=_natural_sort_key):
        machine = machines[name]
        age = ages[name]
        cells = _cells(name, machine)
        if age is not None:
            lower_bound = "" if name in tracker.seen_changing else "> "
            cells["last status"] = f"{lower_bound}{age:.0f} s ago"
        if slowest is not None and slowest.machine == name:
            cells["slowest"] = f"slowest: GPU {slowest.local_rank}" if slowest.ranks_here > 1 else "slowest"
        reason = " ".join(machine.reason.split())
        rows.append(TableRow(cells, machine.state, age, reason))
    return rows


def _cells(name: str, machine: MachineRow) -> dict[str, str]:
    """Return the cells that depend on the machine alone, by column; "" for what is not known."""
    status = machine.status
    numbers: TrainingNumbers = status or TrainingNumbers()
    load = (status and status.use) or MachineLoad()
    utilizations = _numbers(gpu.use for gpu in load.gpus)
    memory_gb = _numbers(gpu.memory_gb for gpu in load.gpus)
    temperatures = _numbers(gpu.temperature for gpu in load.gpus)
    ram = [_format_number(number, ".0f") for number in (load.memory_gb, load.memory_total_gb)]
    return {
        **dict.fromkeys(TOP_COLUMNS, ""),
        "machine": name,
        "state": machine.state,
        "attempt": format_cell(status and status.attempt),
        "step": _format_of_total(numbers.step, numbers.steps),
        "img/s": _format_number(numbers.images_per_second, ".0f"),
        "loss": _format_number(numbers.loss, ".3f"),
        "GPU %": _format_number(fmean(utilizations) if utilizations else None, ".0f"),
        "min %": _format_number(min(utilizations, default=None), ".0f"),
        "GPU GB": _format_number(max(memory_gb, default=None), ".1f"),  # the fullest GPU runs out of memory first
        "°C": _format_number(max(temperatures, default=None), ".0f"),
        "CPU %": _format_number(load.cpu, ".0f"),
        "RAM GB": "/".join(filter(None, ram)),
        "in Gbit/s": _format_number(load.net_in_gbit, ".2f"),
        "out Gbit/s": _format_number(load.net_out_gbit, ".2f"),
    }


def _numbers(values: Iterable[float | None]) -> list[float]:
    """Return the values that are known."""
    return [value for value in values if value is not None]


def _format_number(value: float | None, format_spec: str) -> str:
    return "" if value is None else format(value, format_spec)


def _format_of_total(count: int | None, total: int | None) -> str:
    """Return a count with its total, such as "120/4500", or the one of both that is known."""
    return "/".join(str(number) for number in (count, total) if number is not None)


def _natural_sort_key(name: str) -> list[tuple[int, str]]:
    """Return a sort key by which machine-10 comes after machine-9."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]


def job_summary_line(status: JobStatus, width: int = UNCUT_WIDTH_CHARACTERS) -> str:
    """Return the job in one line: state, step, epoch, images per second, top-1 and time, as far as they are known.

    What does not fit into `width` characters is left out.
    """
    parts = (
        ("{}", f"{status.job} {status.state}"),
        ("{}", status.doing if status.doing not in (MachineState.TRAINING, status.state) else ""),
        ("step {}", _format_of_total(status.step, status.steps)),
        ("epoch {}", _format_of_total(status.epoch, status.epochs)),
        ("{} img/s", _format_number(status.images_per_second, ".0f")),
        ("top-1 {} %", _format_number(status.top1, ".2f")),
        ("after {}", format_duration(status.seconds)),
    )
    line, *others = (template.format(text) for template, text in parts if text)
    for part in others:
        if len(line) + 2 + len(part) <= width:
            line += f"  {part}"
    return line


def fitting_columns(machine_rows: Sequence[TableRow], width: int) -> list[str]:
    """Return the columns that fit into `width` characters, dropping them by `COLUMN_DROP_ORDER`.

    A column of `COLUMNS_OF_SOME_JOBS` is dropped first, if no machine has an entry in it.
    """
    names = [
        name for name in TOP_COLUMNS if name not in COLUMNS_OF_SOME_JOBS or any(row.cells[name] for row in machine_rows)
    ]
    columns = [TableColumn.measure(name, [row.cells[name] for row in machine_rows], can_wrap=False) for name in names]
    return [names[index] for index in choose_columns(columns, COLUMN_DROP_ORDER, width, COLUMN_GAP)]


def _build_table(machine_rows: Sequence[TableRow], columns: Sequence[str]) -> "Table":
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, COLUMN_GAP - 1, 0, 0))
    for column in columns:
        justify: Literal["left", "right"] = "left" if column in LEFT_ALIGNED_COLUMNS else "right"
        table.add_column(Text(column), justify=justify, no_wrap=True, overflow="ellipsis")
    for row in machine_rows:
        styles = {
            "last status": "red" if row.is_stale else "",
            "slowest": "yellow",
            "state": STATE_COLORS.get(row.state, ""),
        }
        table.add_row(*(Text(row.cells[column], style=styles.get(column, "")) for column in columns))
    return table


def _render(status: JobStatus, machine_rows: Sequence[TableRow], width: int) -> "Group":
    """Return the job's line, the table, and a line for each machine that gives a reason for its state."""
    from rich.console import Group
    from rich.text import Text

    style = STATE_COLORS.get(status.state, "")
    header: list[RenderableType] = [
        Text(job_summary_line(status, width), style=style, no_wrap=True, overflow="ellipsis"),
        Text(""),
    ]
    reasons = [
        Text(f"{row.cells['machine']}: {row.reason}", no_wrap=True, overflow="ellipsis")
        for row in machine_rows
        if row.reason
    ]
    columns = fitting_columns(machine_rows, width)
    left_out = [name for name in fitting_columns(machine_rows, UNCUT_WIDTH_CHARACTERS) if name not in columns]
    note = f"not shown in {width} columns: {', '.join(left_out)}; all: imgnet-cluster top --once | cat"
    notes = [Text(note, style="dim", overflow="fold")] if left_out else []
    return Group(*header, _build_table(machine_rows, columns), *reasons, *notes)


def show_top(read_statuses: ReadStatuses, once: bool = False) -> None:
    """Show a job and its machines, refreshed every second, until the job ends or the user presses Ctrl-C.

    `read_statuses` returns the job's status and its machines by their names. With `once`, or when the output
    does not go to a terminal, one plain table is printed.
    """
    from rich.live import Live

    out = console()
    tracker = StatusAgeTracker()

    def render() -> tuple[JobStatus, "Group"]:
        status, machines = read_statuses()
        now = time.monotonic()
        tracker.update(machines, now)
        return status, _render(status, machine_table_rows(machines, now, tracker), out.width)

    if once or not out.is_terminal:
        if not out.is_terminal:
            out.width = UNCUT_WIDTH_CHARACTERS
        out.print(render()[1], soft_wrap=False)
        return
    with contextlib.suppress(KeyboardInterrupt), Live(console=out, auto_refresh=False) as live:
        while True:
            status, picture = render()
            live.update(picture, refresh=True)
            if status.state in (*STATE_EXIT_CODES, JobState.ADOPTED):
                return
            time.sleep(TOP_REFRESH_SECONDS)
