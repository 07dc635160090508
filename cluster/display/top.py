"""Live view of a job's machines: one row each, refreshed every second. Decides nothing.

The age of a status is measured with this computer's clock only, because the machines' clocks may be wrong.
"""

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import fmean

from rich.console import Group
from rich.live import Live
from rich.text import Text

from cluster.report.tables import format_cell, format_known
from cluster.state.heartbeats import MachineLoad, find_slowest_rank
from cluster.state.states import JobState, MachineState
from cluster.state.status import JobStatus, MachineRow
from train.metrics.text import format_duration
from train.tools.agent_protocol import TrainingNumbers

from .status import format_of_total, progress_parts
from .tables import STATE_COLORS, STATE_EXIT_CODES, build_table, console

Machines = Mapping[str, MachineRow]  # by name

COLUMNS_OF_SOME_JOBS = ("slowest", "GPU %", "min %", "GPU GB", "°C")  # left out where no machine has an entry
# The order in which a narrow terminal loses columns. The column "machine" always stays.
COLUMN_DROP_ORDER = (
    *("RAM GB", "CPU %", "°C", "attempt", "GPU GB", "min %", "out Gbit/s", "in Gbit/s", "loss", "step"),
    *("GPU %", "slowest", "last status", "state"),
)
UNCUT_WIDTH_CHARACTERS = 1000  # of output that does not go to a terminal, so that nothing is cut
TOP_REFRESH_SECONDS = 1.0
STALE_STATUS_SECONDS = 5.0  # an agent writes its status about once a second


@dataclass
class StatusAgeTracker:
    """Remembers when each machine's status changed while this process watched, by this computer's clock."""

    last_rows: dict[str, tuple[MachineRow, float]] = field(default_factory=dict)  # with the moment of its first reading
    seen_changing: set[str] = field(default_factory=set)

    def update(self, machines: Machines, now: float) -> None:
        """Compare the statuses with the last ones."""
        for name, row in machines.items():
            if name in self.last_rows and self.last_rows[name][0] != row:
                self.seen_changing.add(name)
                del self.last_rows[name]
            self.last_rows.setdefault(name, (row, now))

    def status_age(self, name: str, now: float) -> float | None:
        """Return a status's age in seconds since it was first read; None until it has changed or is stale."""
        age = now - self.last_rows[name][1] if name in self.last_rows else 0.0
        return age if name in self.seen_changing or age > STALE_STATUS_SECONDS else None


def machine_cells(machines: Machines, now: float, tracker: StatusAgeTracker) -> list[dict[str, str | Text]]:
    """Return a row of cells for each machine at `now`, "" for what is not known. A status that is too old is red."""
    ages = {name: tracker.status_age(name, now) for name in machines}
    fresh_names = [name for name, age in ages.items() if (age or 0.0) <= STALE_STATUS_SECONDS]
    slowest = find_slowest_rank({name: status for name in fresh_names if (status := machines[name].status)})
    rows = []
    for name in machines:
        cells: dict[str, str | Text] = {"machine": name, "state": machines[name].state, **_load_cells(machines[name])}
        age = ages[name]
        lower_bound = "" if name in tracker.seen_changing else "> "
        age_text = "" if age is None else f"{lower_bound}{age:.0f} s ago"
        cells["last status"] = Text(age_text, "" if name in fresh_names else "red")
        cells["slowest"] = Text("", "yellow")
        if slowest is not None and slowest.machine == name:
            gpu = f": GPU {slowest.local_rank}" if slowest.ranks_here > 1 else ""
            cells["slowest"] = Text(f"slowest{gpu}", "yellow")
        rows.append(cells)
    return rows


def _load_cells(machine: MachineRow) -> dict[str, str]:
    status = machine.status
    numbers: TrainingNumbers = status or TrainingNumbers()
    load = (status and status.use) or MachineLoad()
    utilizations = [gpu.use for gpu in load.gpus if gpu.use is not None]
    memory_gb = [gpu.memory_gb for gpu in load.gpus if gpu.memory_gb is not None]
    temperatures = [gpu.temperature for gpu in load.gpus if gpu.temperature is not None]
    ram = [format_known(number, "{:.0f}") for number in (load.memory_gb, load.memory_total_gb)]
    return {
        "attempt": format_cell(status and status.attempt),
        "step": format_of_total(numbers.step, numbers.steps),
        "loss": format_known(numbers.loss, "{:.3f}"),
        "GPU %": format_known(fmean(utilizations) if utilizations else None, "{:.0f}"),
        "min %": format_known(min(utilizations, default=None), "{:.0f}"),
        "GPU GB": format_known(max(memory_gb, default=None), "{:.1f}"),  # the fullest GPU runs out of memory first
        "°C": format_known(max(temperatures, default=None), "{:.0f}"),
        "CPU %": format_known(load.cpu, "{:.0f}"),
        "RAM GB": "/".join(filter(None, ram)),
        "in Gbit/s": format_known(load.net_in_gbit, "{:.2f}"),
        "out Gbit/s": format_known(load.net_out_gbit, "{:.2f}"),
    }


def job_summary_line(status: JobStatus, width: int = UNCUT_WIDTH_CHARACTERS) -> str:
    """Return the job in one line: state, step, epoch, speed, top-1 and time, as far as known and as `width` allows."""
    parts = [
        status.doing if status.doing not in (MachineState.TRAINING, status.state) else "",
        *progress_parts(status),
        f"top-1 {status.top1:.2f} %" if status.top1 is not None else "",
        f"after {format_duration(status.seconds)}",
    ]
    line = f"{status.job} {status.state}"
    for part in filter(None, parts):
        if len(line) + 2 + len(part) <= width:
            line += f"  {part}"
    return line


def render(status: JobStatus, machines: Machines, now: float, tracker: StatusAgeTracker, width: int) -> Group:
    """Return the job's line, the table, and a line for each machine that gives a reason for its state."""
    rows = machine_cells(machines, now, tracker)
    empty = [name for name in COLUMNS_OF_SOME_JOBS if not any(row[name] for row in rows)]
    shown_rows = [{name: cell for name, cell in row.items() if name not in empty} for row in rows]
    table, left_out = build_table(shown_rows, COLUMN_DROP_ORDER, width, can_wrap=False)
    note = f"not shown in {width} columns: {', '.join(left_out)}; all: imgnet-cluster top | cat"
    summary = Text(job_summary_line(status, width), STATE_COLORS.get(status.state, ""))
    reasons = [Text(f"{name}: {' '.join(row.reason.split())}") for name, row in machines.items() if row.reason]
    for line in (summary, *reasons):
        line.no_wrap, line.overflow = True, "ellipsis"
    return Group(summary, "", table, *reasons, *([Text(note, "dim", overflow="fold")] if left_out else []))


def show_top(read_statuses: Callable[[], tuple[JobStatus, Machines]]) -> None:
    """Show what `read_statuses` returns every second, until the job ends or Ctrl-C; off a terminal once."""
    out = console()
    tracker = StatusAgeTracker()

    def picture() -> tuple[JobStatus, Group]:
        status, machines = read_statuses()
        now = time.monotonic()
        tracker.update(machines, now)
        return status, render(status, machines, now, tracker, out.width)

    if not out.is_terminal:
        out.width = UNCUT_WIDTH_CHARACTERS
        return out.print(picture()[1], soft_wrap=False)
    with contextlib.suppress(KeyboardInterrupt), Live(console=out, auto_refresh=False) as live:
        while True:
            status, group = picture()
            live.update(group, refresh=True)
            if status.state in (*STATE_EXIT_CODES, JobState.ADOPTED):
                return
            time.sleep(TOP_REFRESH_SECONDS)
