"""A job's machines, live: one row for each, once a second. Nothing is decided here.

Training is synchronous: all ranks have the same step time, and all but the slowest wait for it. So the slowest is the
one that waits least. How long ago a machine spoke is told by our own clock alone; theirs may be wrong.
"""

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from train.metrics.text import format_duration

from .tables import STATE_COLOURS, STATE_EXIT_CODES, console, format_cell

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table

Statuses = Mapping[str, Mapping[str, Any]]
ReadStatuses = Callable[[], tuple[dict[str, Any], dict[str, dict[str, Any]]]]

TOP_COLUMNS = (
    *("machine", "state", "attempt", "step", "img/s", "loss", "GPU %", "min %", "GPU GB", "°C", "CPU %", "RAM GB"),
    *("in Gbit/s", "out Gbit/s", "last word", "slowest"),
)
LEFT_ALIGNED_COLUMNS = ("machine", "state", "slowest")
# What a narrow terminal does without, in this order; the machine itself stays.
COLUMN_DROP_ORDER = (
    *("RAM GB", "CPU %", "°C", "attempt", "GPU GB", "min %", "out Gbit/s", "in Gbit/s", "loss", "img/s", "step"),
    *("GPU %", "slowest", "last word", "state"),
)
UNCUT_WIDTH_CHARACTERS = 1000  # characters: off a terminal nothing is cut
TOP_REFRESH_SECONDS = 1.0  # seconds
STALE_STATUS_SECONDS = 5.0  # seconds without a word that are worth a colour: an agent speaks about once a second
SLOWEST_BUSY_MARGIN = 0.10  # of the time: so much busier than the median is the slowest rank


@dataclass(frozen=True)
class MachineRow:
    """One machine: its cells by column, and what they are coloured by. `age` is None while it cannot be known."""

    cells: Mapping[str, str]
    state: str = ""
    status_age_seconds: float | None = None
    reason: str = ""

    @property
    def is_stale(self) -> bool:
        """Whether the machine has been silent for too long."""
        return self.status_age_seconds is not None and self.status_age_seconds > STALE_STATUS_SECONDS


@dataclass
class StatusAgeTracker:
    """When this process saw each machine's status change, by its own clock (seconds)."""

    last_statuses: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    changed_at: dict[str, float] = field(default_factory=dict)
    seen_changing: set[str] = field(default_factory=set)

    def update(self, statuses: Statuses, now: float) -> None:
        """Note which statuses are others than the last time; a machine that is not there any more is forgotten."""
        for name in [name for name in self.last_statuses if name not in statuses]:
            del self.last_statuses[name], self.changed_at[name]
            self.seen_changing.discard(name)
        for name, status in statuses.items():
            if name in self.last_statuses and self.last_statuses[name] != status:
                self.seen_changing.add(name)
            if self.last_statuses.get(name) != status:
                self.last_statuses[name], self.changed_at[name] = status, now

    def status_age(self, name: str, now: float) -> float | None:
        """Return the seconds since a machine's last word, at least; None at first: a status may be a day old."""
        silent = now - self.changed_at[name] if name in self.changed_at else 0.0
        return silent if name in self.seen_changing or silent > STALE_STATUS_SECONDS else None


def machine_table_rows(statuses: Statuses, now: float, tracker: StatusAgeTracker | None = None) -> list[MachineRow]:
    """Return a row for each machine, in the order of their names. `now` is of the clock that `watch` was told."""
    tracker = tracker or StatusAgeTracker()
    ages = {name: tracker.status_age(name, now) for name in statuses}
    heard = {name: one for name, one in statuses.items() if (ages[name] or 0.0) <= STALE_STATUS_SECONDS}
    slowest = _find_slowest(heard)
    found = []
    for name in sorted(statuses, key=_natural_sort_key):
        status, age = statuses[name], ages[name]
        cells = _cells(name, status)
        cells["last word"] = "" if age is None else f"{'' if name in tracker.seen_changing else '> '}{age:.0f} s ago"
        if slowest is not None and slowest[0] == name:
            several = len(_as_list(status.get("busy"))) > 1
            cells["slowest"] = f"slowest: GPU {slowest[1]}" if several else "slowest"
        found.append(MachineRow(cells, cells["state"], age, " ".join(str(status.get("reason") or "").split())))
    return found


def _cells(name: str, status: Mapping[str, Any]) -> dict[str, str]:
    """What a status says, by column; "" for what it does not say."""
    use = status.get("use")
    use = use if isinstance(use, Mapping) else {}
    gpus = [gpu for gpu in _as_list(use.get("gpus")) if isinstance(gpu, Mapping)]
    shares, memory, heat = (_numbers(gpu.get(key) for gpu in gpus) for key in ("use", "memory_gb", "temperature"))
    return {
        **dict.fromkeys(TOP_COLUMNS, ""),
        "machine": str(status.get("name") or name),
        "state": str(status.get("state") or ""),
        "attempt": format_cell(status.get("attempt")),
        "step": _format_of_total(status, "step"),
        "img/s": _format_number(status.get("images_per_second"), ".0f"),
        "loss": _format_number(status.get("loss"), ".3f"),
        "GPU %": _format_number(fmean(shares) if shares else None, ".0f"),
        "min %": _format_number(min(shares, default=None), ".0f"),
        "GPU GB": _format_number(max(memory, default=None), ".1f"),  # the fullest is the one that runs out
        "°C": _format_number(max(heat, default=None), ".0f"),
        "CPU %": _format_number(use.get("cpu"), ".0f"),
        "RAM GB": "/".join(
            filter(None, (_format_number(use.get(key), ".0f") for key in ("memory_gb", "memory_total_gb")))
        ),
        "in Gbit/s": _format_number(use.get("net_in_gbit"), ".2f"),
        "out Gbit/s": _format_number(use.get("net_out_gbit"), ".2f"),
    }


def _find_slowest(statuses: Statuses) -> tuple[str, int] | None:
    """The machine with the busiest rank, and which of its ranks; None when none is clearly above the median.

    An older attempt's ranks do not count: they wait for nobody any more.
    """
    attempts = {name: one.get("attempt") for name, one in statuses.items()}
    newest = max(_numbers(attempts.values()), default=None)
    busy = [
        (share, name, rank)
        for name, one in statuses.items()
        if newest is None or attempts[name] == newest
        for rank, share in enumerate(_as_list(one.get("busy")))
        if _is_number(share)
    ]
    if not busy:
        return None
    most, name, rank = max(busy, key=lambda one: one[0])
    return (name, rank) if most - median(share for share, _, _ in busy) >= SLOWEST_BUSY_MARGIN - 1e-9 else None


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _numbers(values: Iterable[Any]) -> list[float]:
    """Those of some values that are numbers."""
    return [one for one in values if _is_number(one)]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def _format_number(value: Any, format_spec: str) -> str:
    return format(value, format_spec) if _is_number(value) else ""


def _format_of_total(status: Mapping[str, Any], name: str) -> str:
    """Such as "120/4500", or what of it is known."""
    return "/".join(format_cell(status.get(key)) for key in (name, f"{name}s") if status.get(key) is not None)


def _natural_sort_key(name: str) -> list[tuple[int, str]]:
    """Sort by this, and machine-10 comes after machine-9."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]


def job_summary_line(status: Mapping[str, Any]) -> str:
    """Return the job in one line: state, step, epoch, images/s, top-1, time; without what is not known yet."""
    job, state, doing = (str(status.get(key) or "") for key in ("job", "state", "doing"))
    seconds = status.get("seconds")
    parts = (
        ("{}", f"{job} {state}".strip()),
        ("{}", doing if doing not in ("training", state) else ""),
        ("step {}", _format_of_total(status, "step")),
        ("epoch {}", _format_of_total(status, "epoch")),
        ("{} img/s", _format_number(status.get("images_per_second"), ".0f")),
        ("top-1 {} %", _format_number(status.get("top1"), ".2f")),
        ("after {}", format_duration(float(seconds)) if isinstance(seconds, int | float) else ""),
    )
    return "  ".join(form.format(text) for form, text in parts if text)


def fitting_columns(machine_rows: Sequence[MachineRow], width: int) -> list[str]:
    """Return the columns that fit into so many characters, the least important ones left out."""
    from rich.cells import cell_len

    wide = {
        one: max(cell_len(text) for text in (one, *(row.cells[one] for row in machine_rows))) for one in TOP_COLUMNS
    }
    kept = [one for one in TOP_COLUMNS if one != "slowest" or any(row.cells[one] for row in machine_rows)]
    for name in COLUMN_DROP_ORDER:
        if sum(wide[one] + 2 for one in kept) - 2 <= width:
            break
        kept = [one for one in kept if one != name]
    return kept


def _build_table(machine_rows: Sequence[MachineRow], width: int) -> "Table":
    from rich import box
    from rich.table import Table
    from rich.text import Text

    names = fitting_columns(machine_rows, width)
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for name in names:
        side: Any = "left" if name in LEFT_ALIGNED_COLUMNS else "right"
        grid.add_column(Text(name), justify=side, no_wrap=True, overflow="ellipsis")
    for row in machine_rows:
        styles = {
            "last word": "red" if row.is_stale else "",
            "slowest": "yellow",
            "state": STATE_COLOURS.get(row.state, ""),
        }
        grid.add_row(*(Text(row.cells[name], style=styles.get(name, "")) for name in names))
    return grid


def _render(status: Mapping[str, Any], machine_rows: Sequence[MachineRow], width: int) -> "Group":
    """The job's line, the table, and a line for each machine that has a reason to tell."""
    from rich.console import Group
    from rich.text import Text

    style = STATE_COLOURS.get(str(status.get("state")), "")
    lines: list[RenderableType] = [
        Text(job_summary_line(status), style=style, no_wrap=True, overflow="ellipsis"),
        Text(""),
    ]
    told = [
        Text(f"{row.cells['machine']}: {row.reason}", no_wrap=True, overflow="ellipsis")
        for row in machine_rows
        if row.reason
    ]
    return Group(*lines, _build_table(machine_rows, width), *told)


def show_top(read_statuses: ReadStatuses, once: bool = False) -> None:
    """Show a job and its machines, read anew each second, until the job ends or Ctrl-C.

    `read` returns the job's status and the machines' by their ids. Off a terminal, or `once`: one plain table.
    """
    from rich.live import Live

    out, watch = console(), StatusAgeTracker()
    if once or not out.is_terminal:
        status, statuses = read_statuses()
        watch.update(statuses, now := time.monotonic())
        out.width = out.width if out.is_terminal else UNCUT_WIDTH_CHARACTERS
        out.print(_render(status, machine_table_rows(statuses, now, watch), out.width), soft_wrap=False)
        return
    with contextlib.suppress(KeyboardInterrupt), Live(console=out, auto_refresh=False) as live:
        while True:
            status, statuses = read_statuses()
            watch.update(statuses, now := time.monotonic())
            live.update(_render(status, machine_table_rows(statuses, now, watch), out.width), refresh=True)
            if status.get("state") in STATE_EXIT_CODES:
                return
            time.sleep(TOP_REFRESH_SECONDS)
