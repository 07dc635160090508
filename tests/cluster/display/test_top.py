"""The live table of a job's machines, from invented statuses."""

import io
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from cluster.display import top
from cluster.display.top import COLUMN_DROP_ORDER, StatusAgeTracker, machine_cells, render, show_top
from cluster.state.heartbeats import GpuLoad, MachineLoad, MachineStatus
from cluster.state.states import AgentPhase, JobState, MachineState, SetupStep
from cluster.state.status import JobStatus, MachineRow

LOAD = MachineLoad(
    cpu=34.2, memory_gb=120.4, memory_total_gb=1152.0, net_in_gbit=40.21, net_out_gbit=41.0,
    gpus=(
        GpuLoad(use=98.0, memory_gb=61.2, temperature=64.0, watts=600.0),
        GpuLoad(use=91.0, memory_gb=70.3, temperature=71.0),
    ),
)  # fmt: skip
JOB = JobStatus(
    job="job-3", recipe="tiny", backend="ssh", machines=3, procs=2, created=0.0, state=JobState.RUNNING, run="/r",
    doing="training", step=120, steps=4500, epoch=2, epochs=16, images_per_second=330123.4, top1=63.456, seconds=613.2,
)  # fmt: skip

TOP_COLUMNS = (
    *("machine", "state", "attempt", "step", "loss", "GPU %", "min %", "GPU GB", "°C", "CPU %", "RAM GB"),
    *("in Gbit/s", "out Gbit/s", "last status", "slowest"),
)


def machine(**more: Any) -> MachineRow:
    """A machine with a status as its agent writes it; without `more`, one without a status."""
    values: dict[str, Any] = {
        "state": MachineState.TRAINING, "phase": AgentPhase.RUNNING, "attempt": 2, "step": 120, "steps": 4500,
        "images_per_second": 330123.4, "loss": 3.21, "use": LOAD, "busy": (0.7, 0.7), "time": 1.0, **more,
    }  # fmt: skip
    status = MachineStatus(id="0.a", **values)
    return MachineRow(host="", state=status.state, reason=status.reason, status=status, notes=(), seconds={})


NEW_MACHINE = MachineRow(host="", state=SetupStep.NONE, reason="", status=None, notes=(), seconds={})
UNKNOWN = dict.fromkeys(("attempt", "step", "steps", "images_per_second", "loss", "use", "busy"))


def cells(machines: dict[str, MachineRow], now: float = 0.0, tracker: StatusAgeTracker | None = None) -> list[Any]:
    rows = machine_cells(machines, now, tracker or StatusAgeTracker())
    return [{name: str(cell) for name, cell in row.items()} for row in rows]


@pytest.mark.parametrize("sparse_machine", [
    NEW_MACHINE, machine(state="", **{**UNKNOWN, "use": MachineLoad(gpus=(GpuLoad(), GpuLoad())), "busy": (None,)}),
])  # fmt: skip
def test_machine_cells_are_empty_where_nothing_is_known(sparse_machine: MachineRow) -> None:
    (row,) = cells({"m7": sparse_machine})
    assert row.keys() == {*TOP_COLUMNS} and [name for name, text in row.items() if text] == ["machine"]


@pytest.mark.parametrize(("busy_of_others", "changes", "expected"), [
    ((0.7, 0.7), {"busy": (0.70, 0.80)}, "slowest: GPU 1"),
    ((0.7, 0.7), {"busy": (None, 0.95)}, "slowest: GPU 1"),
    ((0.85,), {"busy": (0.99,)}, "slowest"),
    ((0.7, 0.7), {"busy": (0.70, 0.79)}, ""),  # not clearly above the median
    ((0.7, 0.7), {"busy": (0.95,), "phase": AgentPhase.SPARE}, ""),  # does not train
    ((0.7, 0.7), {"busy": (0.99,), "attempt": 1}, ""),  # of an older attempt
])  # fmt: skip
def test_slowest_is_the_busiest_rank_clearly_above_the_median(
    busy_of_others: tuple[float, ...], changes: dict[str, Any], expected: str
) -> None:
    others = {str(number): machine(busy=busy_of_others) for number in range(3)}
    *before, last = cells({**others, "gpu8": machine(**changes)})
    assert last["slowest"] == expected and not any(row["slowest"] for row in before)


def age_cell(tracker: StatusAgeTracker, row: MachineRow, now: float) -> tuple[str, bool]:
    """Update the tracker with a status of machine 0; its cell "last status", and whether it is red."""
    tracker.update({"0": row}, now)
    (row_cells,) = machine_cells({"0": row}, now, tracker)
    cell = row_cells["last status"]
    return str(cell), isinstance(cell, Text) and cell.style == "red"


def test_status_age_is_by_our_clock_and_a_lower_bound_while_the_status_has_not_changed() -> None:
    tracker = StatusAgeTracker()
    assert age_cell(tracker, machine(time=5e9), 100.0) == ("", False)  # the status may be a day old
    assert age_cell(tracker, machine(time=5e9), 105.0) == ("", False)
    assert age_cell(tracker, machine(time=5e9), 112.0) == ("> 12 s ago", True)
    assert age_cell(tracker, machine(time=4e9), 113.0) == ("0 s ago", False)
    assert age_cell(tracker, machine(time=4e9), 118.0) == ("5 s ago", False)
    assert age_cell(tracker, machine(time=4e9), 125.0) == ("12 s ago", True)


def test_stale_machine_is_not_the_slowest() -> None:
    tracker = StatusAgeTracker()
    statuses = {"0": machine(), "1": machine(), "x": machine(busy=(0.99,))}
    tracker.update(statuses, 0.0)
    assert [row["slowest"] for row in cells(statuses, 0.0, tracker)] == ["", "", "slowest"]
    statuses = {**statuses, "0": machine(time=2.0), "1": machine(time=2.0)}
    tracker.update(statuses, 9.0)
    assert [row["slowest"] for row in cells(statuses, 9.0, tracker)] == ["", "", ""]


@pytest.mark.parametrize("width", range(10, 200, 10))
def test_columns_fit_the_width_and_are_dropped_by_importance(width: int) -> None:
    assert {*COLUMN_DROP_ORDER} == {*TOP_COLUMNS} - {"machine"}
    machines = {"0": machine(), "1": machine(busy=(0.7, 0.95))}
    console = Console(width=width, file=io.StringIO())
    with console.capture() as capture:
        console.print(render(JOB, machines, 0.0, StatusAgeTracker(), width))
    lines = [line.rstrip() for line in capture.get().splitlines()]
    assert max(map(len, lines)) <= width
    heading = next(line for line in lines if line.startswith("machine"))
    columns = [name for name in TOP_COLUMNS if re.search(rf"(^| ){name}( |$)", heading)]
    assert {*TOP_COLUMNS} - {*columns} == {*COLUMN_DROP_ORDER[: len(TOP_COLUMNS) - len(columns)]}


def test_show_top_off_a_terminal_prints_one_uncut_table(capsys: pytest.CaptureFixture[str]) -> None:
    reason = "the trainer of rank 3 " + "died " * 60 + "at last"
    show_top(lambda: (JOB, {"gpu-0": machine(), "gpu-1": machine(state="failed", reason=reason)}))
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "job-3 running  step 120/4500  epoch 2/16  330123 img/s  top-1 63.46 %  after 10:13"
    assert lines[2].split() == " ".join(TOP_COLUMNS[:-1]).split()
    assert lines[4].split() == [
        *("gpu-0", "training", "2", "120/4500", "3.210", "94", "91", "70.3", "71", "34", "120/1152"),
        *("40.21", "41.00"),
    ]
    assert lines[6] == f"gpu-1: {reason}" and "\x1b" not in "".join(lines) and len(lines) == 7


@pytest.mark.parametrize("is_interrupted", [True, False], ids=["Ctrl-C", "the job has ended"])
def test_show_top_on_a_terminal_refreshes_until_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_interrupted: bool
) -> None:
    monkeypatch.setattr(top, "console", lambda: Console(force_terminal=True, width=150, height=40))
    monkeypatch.setattr(top, "TOP_REFRESH_SECONDS", 0.0)
    steps = iter((101, 102, 103))

    def read() -> tuple[JobStatus, dict[str, MachineRow]]:
        step = next(steps)
        if is_interrupted and step == 103:
            raise KeyboardInterrupt
        state = JobState.DONE if step == 102 and not is_interrupted else JobState.RUNNING
        return replace(JOB, step=step, state=state), {"0": machine(step=step)}

    show_top(read)
    out = capsys.readouterr().out
    assert "step 101/4500" in out and "step 102/4500" in out and "step 103/4500" not in out
    assert out.rstrip().endswith("\x1b[?25h")  # the cursor is back
