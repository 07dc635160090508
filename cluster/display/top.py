"""Live view of a job's machines: one row each, refreshed every second. Decides nothing.

Training is synchronous: all ranks have the same step time, and all except the slowest wait for it. So the slowest rank
is the one that waits least. The age of a status is measured with this computer's clock only, because the machines'
clocks may be wrong.
"""

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from train.metrics.text import format_duration

from .tables import STATE_COLORS, STATE_EXIT_CODES, console, format_cell

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table

Statuses = Mapping[str, Mapping[str, Any]]  # by machine ID
ReadStatuses = Callable[[], tuple[dict[str, Any], dict[str, dict[str, Any]]]]

TOP_COLUMNS = (
    *("machine", "state", "attempt", "step", "img/s", "loss", "GPU %", "min %", "GPU GB", "°C", "CPU %", "RAM GB"),
    *("in Gbit/s", "out Gbit/s", "last status", "slowest"),
)
LEFT_ALIGNED_COLUMNS = ("machine", "state", "slowest")
# The order in which a narrow terminal loses columns. The column "machine" always stays.
COLUMN_DROP_ORDER = (
    *("RAM GB", "CPU %", "°C", "attempt", "GPU GB", "min %", "out Gbit/s", "in Gbit/s", "loss", "img/s", "step"),
    *("GPU %", "slowest", "last status", "state"),
)
UNCUT_WIDTH_CHARACTERS = 1000  # of output that does not go to a terminal, so that nothing is cut
TOP_REFRESH_SECONDS = 1.0
STALE_STATUS_SECONDS = 5.0  # an agent writes its status about once a second
SLOWEST_BUSY_MARGIN = 0.10  # share of the time by which the slowest rank must be busier than the median


@dataclass(frozen=True)
class MachineRow:
    """One row of the table, with what its colors depend on."""

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

    last_statuses: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    changed_at: dict[str, float] = field(default_factory=dict)  # monotonic seconds; first seen, for an unchanged status
    seen_changing: set[str] = field(default_factory=set)

    def update(self, statuses: Statuses, now: float) -> None:
        """Compare the statuses with the last ones. Machines that are no longer listed are forgotten."""
        for name in [name for name in self.last_statuses if name not in statuses]:
            del self.last_statuses[name], self.changed_at[name]
            self.seen_changing.discard(name)
        for name, status in statuses.items():
            if name in self.last_statuses and self.last_statuses[name] != status:
                self.seen_changing.add(name)
            if self.last_statuses.get(name) != status:
                self.last_statuses[name] = status
                self.changed_at[name] = now

    def status_age(self, name: str, now: float) -> float | None:
        """Return the age of a machine's status in seconds; a lower bound if no change was seen by this process.

        None at first: a status that was just read for the first time may be a day old.
        """
        age = now - self.changed_at[name] if name in self.changed_at else 0.0
        return age if name in self.seen_changing or age > STALE_STATUS_SECONDS else None


def machine_table_rows(statuses: Statuses, now: float, tracker: StatusAgeTracker | None = None) -> list[MachineRow]:
    """Return a row for each machine, sorted by name. `now` is a time of the clock of `StatusAgeTracker.update`."""
    tracker = tracker or StatusAgeTracker()
    ages = {name: tracker.status_age(name, now) for name in statuses}
    fresh_statuses = {name: status for name, status in statuses.items() if (ages[name] or 0.0) <= STALE_STATUS_SECONDS}
    slowest = _find_slowest(fresh_statuses)
    rows = []
    for name in sorted(statuses, key=_natural_sort_key):
        status = statuses[name]
        age = ages[name]
        cells = _cells(name, status)
        if age is not None:
            lower_bound = "" if name in tracker.seen_changing else "> "
            cells["last status"] = f"{lower_bound}{age:.0f} s ago"
        if slowest is not None and slowest[0] == name:
            has_several_ranks = len(_as_list(status.get("busy"))) > 1
            cells["slowest"] = f"slowest: GPU {slowest[1]}" if has_several_ranks else "slowest"
        reason = " ".join(str(status.get("reason") or "").split())
        rows.append(MachineRow(cells, cells["state"], age, reason))
    return rows


def _cells(name: str, status: Mapping[str, Any]) -> dict[str, str]:
    """Return the cells that depend on the status alone, by column; "" for what the status does not contain."""
    usage = status.get("use")
    usage = usage if isinstance(usage, Mapping) else {}
    gpus = [gpu for gpu in _as_list(usage.get("gpus")) if isinstance(gpu, Mapping)]
    utilizations = _numbers(gpu.get("use") for gpu in gpus)
    memory_gb = _numbers(gpu.get("memory_gb") for gpu in gpus)
    temperatures = _numbers(gpu.get("temperature") for gpu in gpus)
    ram = [_format_number(usage.get(key), ".0f") for key in ("memory_gb", "memory_total_gb")]
    return {
        **dict.fromkeys(TOP_COLUMNS, ""),
        "machine": str(status.get("name") or name),
        "state": str(status.get("state") or ""),
        "attempt": format_cell(status.get("attempt")),
        "step": _format_of_total(status, "step"),
        "img/s": _format_number(status.get("images_per_second"), ".0f"),
        "loss": _format_number(status.get("loss"), ".3f"),
        "GPU %": _format_number(fmean(utilizations) if utilizations else None, ".0f"),
        "min %": _format_number(min(utilizations, default=None), ".0f"),
        "GPU GB": _format_number(max(memory_gb, default=None), ".1f"),  # the fullest GPU runs out of memory first
        "°C": _format_number(max(temperatures, default=None), ".0f"),
        "CPU %": _format_number(usage.get("cpu"), ".0f"),
        "RAM GB": "/".join(filter(None, ram)),
        "in Gbit/s": _format_number(usage.get("net_in_gbit"), ".2f"),
        "out Gbit/s": _format_number(usage.get("net_out_gbit"), ".2f"),
    }


def _find_slowest(statuses: Statuses) -> tuple[str, int] | None:
    """Return the machine and local rank of the slowest rank, None if none is clearly busier than the median.

    Ranks of an older attempt are left out: they no longer wait for the others.
    """
    attempts = {name: status.get("attempt") for name, status in statuses.items()}
    newest_attempt = max(_numbers(attempts.values()), default=None)
    busy_shares = [
        (share, name, rank)
        for name, status in statuses.items()
        if newest_attempt is None or attempts[name] == newest_attempt
        for rank, share in enumerate(_as_list(status.get("busy")))
        if _is_number(share)
    ]
    if not busy_shares:
        return None
    max_share, name, rank = max(busy_shares, key=lambda entry: entry[0])
    margin = max_share - median(share for share, _, _ in busy_shares)
    return (name, rank) if margin >= SLOWEST_BUSY_MARGIN - 1e-9 else None


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _numbers(values: Iterable[Any]) -> list[float]:
    """Return the values that are numbers."""
    return [value for value in values if _is_number(value)]


def _is_number(value: Any) -> bool:
    """Whether a value is an int or a float, but neither a bool nor NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def _format_number(value: Any, format_spec: str) -> str:
    return format(value, format_spec) if _is_number(value) else ""


def _format_of_total(status: Mapping[str, Any], name: str) -> str:
    """Return a count with its total, such as "120/4500", or the one of both that is known."""
    return "/".join(format_cell(status.get(key)) for key in (name, f"{name}s") if status.get(key) is not None)


def _natural_sort_key(name: str) -> list[tuple[int, str]]:
    """Return a sort key by which machine-10 comes after machine-9."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]


def job_summary_line(status: Mapping[str, Any]) -> str:
    """Return the job in one line: state, step, epoch, images per second, top-1 and time, as far as they are known."""
    job, state, activity = (str(status.get(key) or "") for key in ("job", "state", "doing"))
    seconds = status.get("seconds")
    parts = (
        ("{}", f"{job} {state}".strip()),
        ("{}", activity if activity not in ("training", state) else ""),
        ("step {}", _format_of_total(status, "step")),
        ("epoch {}", _format_of_total(status, "epoch")),
        ("{} img/s", _format_number(status.get("images_per_second"), ".0f")),
        ("top-1 {} %", _format_number(status.get("top1"), ".2f")),
        ("after {}", format_duration(float(seconds)) if isinstance(seconds, int | float) else ""),
    )
    return "  ".join(template.format(text) for template, text in parts if text)


def fitting_columns(machine_rows: Sequence[MachineRow], width: int) -> list[str]:
    """Return the columns that fit into `width` characters, dropping them by `COLUMN_DROP_ORDER`.

    "slowest" is dropped first of all if no machine has an entry there.
    """
    from rich.cells import cell_len

    widths = {
        column: max(cell_len(text) for text in (column, *(row.cells[column] for row in machine_rows)))
        for column in TOP_COLUMNS
    }
    columns = [
        column for column in TOP_COLUMNS if column != "slowest" or any(row.cells[column] for row in machine_rows)
    ]
    for dropped in COLUMN_DROP_ORDER:
        if sum(widths[column] + 2 for column in columns) - 2 <= width:
            break
        columns = [column for column in columns if column != dropped]
    return columns


def _build_table(machine_rows: Sequence[MachineRow], width: int) -> "Table":
    from rich import box
    from rich.table import Table
    from rich.text import Text

    columns = fitting_columns(machine_rows, width)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        justify: Any = "left" if column in LEFT_ALIGNED_COLUMNS else "right"
        table.add_column(Text(column), justify=justify, no_wrap=True, overflow="ellipsis")
    for row in machine_rows:
        styles = {
            "last status": "red" if row.is_stale else "",
            "slowest": "yellow",
            "state": STATE_COLORS.get(row.state, ""),
        }
        table.add_row(*(Text(row.cells[column], style=styles.get(column, "")) for column in columns))
    return table


def _render(status: Mapping[str, Any], machine_rows: Sequence[MachineRow], width: int) -> "Group":
    """Return the job's line, the table, and a line for each machine that gives a reason for its state."""
    from rich.console import Group
    from rich.text import Text

    style = STATE_COLORS.get(str(status.get("state")), "")
    header: list[RenderableType] = [
        Text(job_summary_line(status), style=style, no_wrap=True, overflow="ellipsis"),
        Text(""),
    ]
    reasons = [
        Text(f"{row.cells['machine']}: {row.reason}", no_wrap=True, overflow="ellipsis")
        for row in machine_rows
        if row.reason
    ]
    return Group(*header, _build_table(machine_rows, width), *reasons)


def show_top(read_statuses: ReadStatuses, once: bool = False) -> None:
    """Show a job and its machines, refreshed every second, until the job ends or the user presses Ctrl-C.

    `read_statuses` returns the job's status and the machines' statuses by their IDs. With `once`, or when the output
    does not go to a terminal, one plain table is printed.
    """
    from rich.live import Live

    out = console()
    tracker = StatusAgeTracker()

    def render() -> tuple[Mapping[str, Any], "Group"]:
        status, statuses = read_statuses()
        now = time.monotonic()
        tracker.update(statuses, now)
        return status, _render(status, machine_table_rows(statuses, now, tracker), out.width)

    if once or not out.is_terminal:
        if not out.is_terminal:
            out.width = UNCUT_WIDTH_CHARACTERS
        out.print(render()[1], soft_wrap=False)
        return
    with contextlib.suppress(KeyboardInterrupt), Live(console=out, auto_refresh=False) as live:
        while True:
            status, picture = render()
            live.update(picture, refresh=True)
            if status.get("state") in STATE_EXIT_CODES:
                return
            time.sleep(TOP_REFRESH_SECONDS)
