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

from train.metrics.text import span

from .tables import COLOURS, EXIT, _cell, console

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table

Statuses = Mapping[str, Mapping[str, Any]]
Read = Callable[[], tuple[dict[str, Any], dict[str, dict[str, Any]]]]

COLUMNS = (
    *("machine", "state", "attempt", "step", "img/s", "loss", "GPU %", "min %", "GPU GB", "°C", "CPU %", "RAM GB"),
    *("in Gbit/s", "out Gbit/s", "last word", "slowest"),
)
LEFT = ("machine", "state", "slowest")
# What a narrow terminal does without, in this order; the machine itself stays.
DROPPED = (
    *("RAM GB", "CPU %", "°C", "attempt", "GPU GB", "min %", "out Gbit/s", "in Gbit/s", "loss", "img/s", "step"),
    *("GPU %", "slowest", "last word", "state"),
)
WHOLE = 1000  # characters: off a terminal nothing is cut
EVERY = 1.0  # seconds
LATE = 5.0  # seconds without a word that are worth a colour: an agent speaks about once a second
AHEAD = 0.10  # of the time: so much busier than the median is the slowest rank


@dataclass(frozen=True)
class Row:
    """One machine: its cells by column, and what they are coloured by. `age` is None while it cannot be known."""

    cells: Mapping[str, str]
    state: str = ""
    age: float | None = None
    reason: str = ""

    @property
    def late(self) -> bool:
        """Whether the machine has been silent for too long."""
        return self.age is not None and self.age > LATE


@dataclass
class Watch:
    """When this process saw each machine's status change, by its own clock (seconds)."""

    content: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    seen: dict[str, float] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)

    def see(self, statuses: Statuses, now: float) -> None:
        """Note which statuses are others than the last time; a machine that is not there any more is forgotten."""
        for name in [name for name in self.content if name not in statuses]:
            del self.content[name], self.seen[name]
            self.changed.discard(name)
        for name, status in statuses.items():
            if name in self.content and self.content[name] != status:
                self.changed.add(name)
            if self.content.get(name) != status:
                self.content[name], self.seen[name] = status, now

    def age(self, name: str, now: float) -> float | None:
        """Return the seconds since a machine's last word, at least; None at first: a status may be a day old."""
        silent = now - self.seen[name] if name in self.seen else 0.0
        return silent if name in self.changed or silent > LATE else None


def rows(statuses: Statuses, now: float, watch: Watch | None = None) -> list[Row]:
    """Return a row for each machine, in the order of their names. `now` is of the clock that `watch` was told."""
    watch = watch or Watch()
    ages = {name: watch.age(name, now) for name in statuses}
    heard = {name: one for name, one in statuses.items() if (ages[name] or 0.0) <= LATE}
    slowest = _slowest(heard)
    found = []
    for name in sorted(statuses, key=_natural):
        status, age = statuses[name], ages[name]
        cells = _cells(name, status)
        cells["last word"] = "" if age is None else f"{'' if name in watch.changed else '> '}{age:.0f} s ago"
        if slowest is not None and slowest[0] == name:
            several = len(_list(status.get("busy"))) > 1
            cells["slowest"] = f"slowest: GPU {slowest[1]}" if several else "slowest"
        found.append(Row(cells, cells["state"], age, " ".join(str(status.get("reason") or "").split())))
    return found


def _cells(name: str, status: Mapping[str, Any]) -> dict[str, str]:
    """What a status says, by column; "" for what it does not say."""
    use = status.get("use")
    use = use if isinstance(use, Mapping) else {}
    gpus = [gpu for gpu in _list(use.get("gpus")) if isinstance(gpu, Mapping)]
    shares, memory, heat = (_numbers(gpu.get(key) for gpu in gpus) for key in ("use", "memory_gb", "temperature"))
    return {
        **dict.fromkeys(COLUMNS, ""),
        "machine": str(status.get("name") or name),
        "state": str(status.get("state") or ""),
        "attempt": _cell(status.get("attempt")),
        "step": _of(status, "step"),
        "img/s": _form(status.get("images_per_second"), ".0f"),
        "loss": _form(status.get("loss"), ".3f"),
        "GPU %": _form(fmean(shares) if shares else None, ".0f"),
        "min %": _form(min(shares, default=None), ".0f"),
        "GPU GB": _form(max(memory, default=None), ".1f"),  # the fullest is the one that runs out
        "°C": _form(max(heat, default=None), ".0f"),
        "CPU %": _form(use.get("cpu"), ".0f"),
        "RAM GB": "/".join(filter(None, (_form(use.get(key), ".0f") for key in ("memory_gb", "memory_total_gb")))),
        "in Gbit/s": _form(use.get("net_in_gbit"), ".2f"),
        "out Gbit/s": _form(use.get("net_out_gbit"), ".2f"),
    }


def _slowest(statuses: Statuses) -> tuple[str, int] | None:
    """The machine with the busiest rank, and which of its ranks; None when none is clearly above the median.

    An older attempt's ranks do not count: they wait for nobody any more.
    """
    attempts = {name: one.get("attempt") for name, one in statuses.items()}
    newest = max(_numbers(attempts.values()), default=None)
    busy = [
        (share, name, rank)
        for name, one in statuses.items()
        if newest is None or attempts[name] == newest
        for rank, share in enumerate(_list(one.get("busy")))
        if _is_number(share)
    ]
    if not busy:
        return None
    most, name, rank = max(busy, key=lambda one: one[0])
    return (name, rank) if most - median(share for share, _, _ in busy) >= AHEAD - 1e-9 else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _numbers(values: Iterable[Any]) -> list[float]:
    """Those of some values that are numbers."""
    return [one for one in values if _is_number(one)]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def _form(value: Any, form: str) -> str:
    return format(value, form) if _is_number(value) else ""


def _of(status: Mapping[str, Any], name: str) -> str:
    """Such as "120/4500", or what of it is known."""
    return "/".join(_cell(status.get(key)) for key in (name, f"{name}s") if status.get(key) is not None)


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort by this, and machine-10 comes after machine-9."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]


def headline(status: Mapping[str, Any]) -> str:
    """Return the job in one line: state, step, epoch, images/s, top-1, time; without what is not known yet."""
    job, state, doing = (str(status.get(key) or "") for key in ("job", "state", "doing"))
    seconds = status.get("seconds")
    parts = (
        ("{}", f"{job} {state}".strip()),
        ("{}", doing if doing not in ("training", state) else ""),
        ("step {}", _of(status, "step")),
        ("epoch {}", _of(status, "epoch")),
        ("{} img/s", _form(status.get("images_per_second"), ".0f")),
        ("top-1 {} %", _form(status.get("top1"), ".2f")),
        ("after {}", span(float(seconds)) if isinstance(seconds, int | float) else ""),
    )
    return "  ".join(form.format(text) for form, text in parts if text)


def fitting(found: Sequence[Row], width: int) -> list[str]:
    """Return the columns that fit into so many characters, the least important ones left out."""
    from rich.cells import cell_len

    wide = {one: max(cell_len(text) for text in (one, *(row.cells[one] for row in found))) for one in COLUMNS}
    kept = [one for one in COLUMNS if one != "slowest" or any(row.cells[one] for row in found)]
    for name in DROPPED:
        if sum(wide[one] + 2 for one in kept) - 2 <= width:
            break
        kept = [one for one in kept if one != name]
    return kept


def _table(found: Sequence[Row], width: int) -> "Table":
    from rich import box
    from rich.table import Table
    from rich.text import Text

    names = fitting(found, width)
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for name in names:
        side: Any = "left" if name in LEFT else "right"
        grid.add_column(Text(name), justify=side, no_wrap=True, overflow="ellipsis")
    for row in found:
        styles = {"last word": "red" if row.late else "", "slowest": "yellow", "state": COLOURS.get(row.state, "")}
        grid.add_row(*(Text(row.cells[name], style=styles.get(name, "")) for name in names))
    return grid


def _picture(status: Mapping[str, Any], found: Sequence[Row], width: int) -> "Group":
    """The job's line, the table, and a line for each machine that has a reason to tell."""
    from rich.console import Group
    from rich.text import Text

    style = COLOURS.get(str(status.get("state")), "")
    lines: list[RenderableType] = [Text(headline(status), style=style, no_wrap=True, overflow="ellipsis"), Text("")]
    told = [
        Text(f"{row.cells['machine']}: {row.reason}", no_wrap=True, overflow="ellipsis") for row in found if row.reason
    ]
    return Group(*lines, _table(found, width), *told)


def top(read: Read, once: bool = False) -> None:
    """Show a job and its machines, read anew each second, until the job ends or Ctrl-C.

    `read` returns the job's status and the machines' by their ids. Off a terminal, or `once`: one plain table.
    """
    from rich.live import Live

    out, watch = console(), Watch()
    if once or not out.is_terminal:
        status, statuses = read()
        watch.see(statuses, now := time.monotonic())
        out.width = out.width if out.is_terminal else WHOLE
        out.print(_picture(status, rows(statuses, now, watch), out.width), soft_wrap=False)
        return
    with contextlib.suppress(KeyboardInterrupt), Live(console=out, auto_refresh=False) as live:
        while True:
            status, statuses = read()
            watch.see(statuses, now := time.monotonic())
            live.update(_picture(status, rows(statuses, now, watch), out.width), refresh=True)
            if status.get("state") in EXIT:
                return
            time.sleep(EVERY)
