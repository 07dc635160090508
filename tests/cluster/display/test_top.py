"""The live table of a job's machines, from invented statuses."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cluster.display import top as display_top
from cluster.display.top import (
    COLUMN_DROP_ORDER,
    TOP_COLUMNS,
    StatusAgeTracker,
    fitting_columns,
    job_summary_line,
    machine_table_rows,
    show_top,
)
from cluster.state.heartbeats import GpuLoad, MachineLoad, MachineStatus
from cluster.state.states import AgentPhase, JobState, MachineState, SetupStep
from cluster.state.status import JobStatus, MachineRow

LOAD = MachineLoad(
    cpu=34.2,
    memory_gb=120.4,
    memory_total_gb=1152.0,
    net_in_gbit=40.21,
    net_out_gbit=41.0,
    gpus=(
        GpuLoad(use=98.0, memory_gb=61.2, temperature=64.0, watts=600.0),
        GpuLoad(use=91.0, memory_gb=70.3, temperature=71.0),
    ),
)
EARLY_JOB = JobStatus(
    job="job-3",
    recipe="tiny",
    backend="ssh",
    machines=3,
    procs=2,
    created=0.0,
    state=JobState.SETUP,
    doing="drawing",
    run="/r",
)
JOB = replace(
    EARLY_JOB, state=JobState.RUNNING, doing="training", step=120, steps=4500, epoch=2, epochs=16,
    images_per_second=330123.4, top1=63.456, seconds=613.2,
)  # fmt: skip


def machine(**more: Any) -> MachineRow:
    """A machine with a status as its agent writes it; without `more`, one without a status."""
    values: dict[str, Any] = {
        "state": MachineState.TRAINING,
        "phase": AgentPhase.RUNNING,
        "attempt": 2,
        "step": 120,
        "steps": 4500,
        "images_per_second": 21000.4,
    }
    values |= {"loss": 3.21, "use": LOAD, "busy": (0.7, 0.7), "time": 1.0, **more}
    status = MachineStatus(id="0.a", **values)
    return MachineRow(host="", state=status.state, reason=status.reason, status=status, notes=(), seconds={})


NEW_MACHINE = MachineRow(host="", state=SetupStep.NONE, reason="", status=None, notes=(), seconds={})
UNKNOWN = dict.fromkeys(("attempt", "step", "steps", "images_per_second", "loss", "use", "busy"))


def test_machine_row_aggregates_its_gpus() -> None:
    (row,) = machine_table_rows({"gpu-0": machine()}, 0.0)
    assert row.cells == {
        "machine": "gpu-0",
        "state": "training",
        "attempt": "2",
        "step": "120/4500",
        "img/s": "21000",
        "loss": "3.210",
        "GPU %": "94",
        "min %": "91",
        "GPU GB": "70.3",
        "°C": "71",
        "CPU %": "34",
        "RAM GB": "120/1152",
        "in Gbit/s": "40.21",
        "out Gbit/s": "41.00",
        "last status": "",
        "slowest": "",
    }


@pytest.mark.parametrize(
    "sparse_machine",
    [
        NEW_MACHINE,
        machine(state="", **UNKNOWN),
        machine(state="", **{**UNKNOWN, "use": MachineLoad()}),
        machine(state="", **{**UNKNOWN, "use": MachineLoad(gpus=(GpuLoad(), GpuLoad())), "busy": (None,)}),
    ],
)
def test_machine_row_missing_values_leave_empty_cells(sparse_machine: MachineRow) -> None:
    (row,) = machine_table_rows({"m7": sparse_machine}, 0.0)
    assert row.cells["machine"] == "m7" and row.cells.keys() == {*TOP_COLUMNS}
    assert not any(text for name, text in row.cells.items() if name != "machine")


def test_machine_rows_are_in_natural_order() -> None:
    rows = machine_table_rows({name: NEW_MACHINE for name in ("m10", "m9", "head", "10", "2")}, 0.0)
    assert [row.cells["machine"] for row in rows] == ["2", "10", "head", "m9", "m10"]


# --- the slowest --------------------------------------------------------------------------------------------------


def slowest(**machines: MachineRow) -> dict[str, str]:
    """The cells of the column "slowest" that are not empty, by machine."""
    return {
        row.cells["machine"]: row.cells["slowest"] for row in machine_table_rows(machines, 0.0) if row.cells["slowest"]
    }


def test_slowest_is_the_busiest_rank_clearly_above_the_median() -> None:
    others = {str(number): machine() for number in range(3)}
    assert slowest(
        **others,
        gpu8=machine(
            busy=(
                0.70,
                0.80,
            )
        ),
    ) == {"gpu8": "slowest: GPU 1"}
    assert slowest(a=machine(busy=(0.8,) * 3), gpu8=machine(busy=(0.9,))) == {"gpu8": "slowest"}  # 0.9 - 0.8 < 0.1
    assert slowest(
        **others,
        gpu8=machine(
            busy=(
                None,
                0.95,
            )
        ),
    ) == {"gpu8": "slowest: GPU 1"}
    assert slowest(**others, gpu8=machine(busy=(0.95,))) == {"gpu8": "slowest"}
    assert slowest(**others, gpu8=machine(busy=(0.95,), phase=AgentPhase.SPARE)) == {}, "it does not train"
    assert (
        slowest(
            **others,
            gpu8=machine(
                busy=(
                    0.70,
                    0.79,
                )
            ),
        )
        == {}
    )


def test_slowest_is_neither_an_idle_nor_a_single_machine() -> None:
    assert slowest(a=machine(busy=(0.8,)), b=machine(busy=(0.8,)), c=machine(busy=(0.1,))) == {}
    assert slowest(a=machine(busy=(0.99,))) == {}
    assert slowest(a=machine(busy=(0.99,)), b=machine(busy=(0.85,))) == {"a": "slowest"}


def test_slowest_ignores_older_attempts_and_stale_machines() -> None:
    others = {str(number): machine() for number in range(2)}
    assert slowest(**others, gpu8=machine(busy=(0.99,), attempt=1)) == {}
    tracker = StatusAgeTracker()
    tracker.update(statuses := {**others, "x": machine(busy=(0.99,))}, 0.0)
    assert [row.cells["slowest"] for row in machine_table_rows(statuses, 0.0, tracker)] == ["", "", "slowest"]
    tracker.update(statuses := {name: machine(time=2.0) if name != "x" else row for name, row in statuses.items()}, 9.0)
    assert [row.cells["slowest"] for row in machine_table_rows(statuses, 9.0, tracker)] == ["", "", ""]


# --- the age of a status --------------------------------------------------------------------------------------------


def age_cell(tracker: StatusAgeTracker, row: MachineRow, now: float) -> tuple[str, bool]:
    """Update the tracker with a status of machine 0; its cell "last status", and whether it is stale."""
    tracker.update({"0": row}, now)
    (table_row,) = machine_table_rows({"0": row}, now, tracker)
    return table_row.cells["last status"], table_row.is_stale


def test_status_age_ignores_the_machines_clock() -> None:
    tracker = StatusAgeTracker()
    assert age_cell(tracker, machine(time=5e9), 100.0) == ("", False)  # the status may be a day old
    assert age_cell(tracker, machine(time=4e9), 101.0) == ("0 s ago", False)
    assert age_cell(tracker, machine(time=4e9), 106.0) == ("5 s ago", False)
    assert age_cell(tracker, machine(time=4e9), 113.0) == ("12 s ago", True)
    assert age_cell(tracker, machine(time=4e9 + 1), 114.0) == ("0 s ago", False)


def test_status_age_of_an_unchanged_status_is_a_lower_bound() -> None:
    tracker = StatusAgeTracker()
    assert age_cell(tracker, machine(), 100.0) == ("", False)
    assert age_cell(tracker, machine(), 105.0) == ("", False)
    assert age_cell(tracker, machine(), 112.0) == ("> 12 s ago", True)


def test_status_age_of_a_machine_that_came_back_starts_anew() -> None:
    tracker = StatusAgeTracker()
    tracker.update({"0": machine()}, 0.0)
    tracker.update({"0": machine(step=121)}, 1.0)
    tracker.update({}, 2.0)
    assert age_cell(tracker, machine(step=122), 3.0) == ("", False)


# --- output --------------------------------------------------------------------------------------------------


def test_job_summary_line_has_the_known_values() -> None:
    assert job_summary_line(JOB) == "job-3 running  step 120/4500  epoch 2/16  330123 img/s  top-1 63.46 %  after 10:13"
    assert job_summary_line(EARLY_JOB) == "job-3 setup  drawing  after 0:00"


def test_fitting_columns_drops_by_importance_and_keeps_machine() -> None:
    rows = machine_table_rows(
        {
            "0": machine(),
            "1": machine(
                busy=(
                    0.7,
                    0.95,
                )
            ),
        },
        0.0,
    )
    assert {*COLUMN_DROP_ORDER} == {*TOP_COLUMNS} - {"machine"} and len(COLUMN_DROP_ORDER) == len(TOP_COLUMNS) - 1
    full_width = Console(width=300).measure(display_top._build_table(rows, TOP_COLUMNS)).maximum
    assert (
        fitting_columns(rows, full_width) == [*TOP_COLUMNS]
        and len(fitting_columns(rows, full_width - 1)) == len(TOP_COLUMNS) - 1
    )
    assert fitting_columns(rows, 1) == ["machine"]
    for width in range(200, 0, -1):
        columns = fitting_columns(rows, width)
        dropped = {*TOP_COLUMNS} - {*columns}
        assert dropped == {*COLUMN_DROP_ORDER[: len(dropped)]}
        assert columns == [name for name in TOP_COLUMNS if name in columns]
        assert Console(width=300).measure(display_top._build_table(rows, columns)).maximum <= max(width, len("machine"))


def test_fitting_columns_on_processors_have_no_gpus() -> None:
    columns = fitting_columns(machine_table_rows({"0": machine(use=MachineLoad(cpu=34.2))}, 0.0), 1000)
    assert "CPU %" in columns and not {"GPU %", "min %", "GPU GB", "°C"} & {*columns}


def test_fitting_columns_without_a_slowest_machine() -> None:
    assert "slowest" not in fitting_columns(machine_table_rows({"0": machine()}, 0.0), 1000)


def test_show_top_off_a_terminal_prints_one_uncut_table(capsys: pytest.CaptureFixture[str]) -> None:
    reason = "the trainer of rank 3 " + "died " * 60 + "at last"
    show_top(lambda: (JOB, {"gpu-0": machine(), "gpu-1": machine(state="failed", reason=reason)}))
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == job_summary_line(JOB)
    assert lines[2].split() == " ".join(TOP_COLUMNS[:-1]).split()
    assert lines[4].split()[:4] == ["gpu-0", "training", "2", "120/4500"]
    assert lines[6] == f"gpu-1: {reason}" and "\x1b" not in "".join(lines) and len(lines) == 7


SCRIPT = """
import os, sys
from cluster.display.top import show_top
sys.path.insert(0, {tests!r})
from dataclasses import replace
from test_top import JOB, machine
count = 0
def read():
    global count
    count += 1
    return replace(JOB, step=100 + count, state="done" if count == {last} else "running"), {{
        f"machine-{{n}}-of-a-long-name": machine(step=count) for n in range(3)}}
show_top(read, once={once})
"""


def run_top(width: int, until: str = "", press: bytes = b"", once: bool = False, last: int = -1) -> tuple[int, str]:
    """The exit code and output of `show_top` on a terminal. `press` is typed once the output contains `until`."""
    script = SCRIPT.format(tests=str(Path(__file__).parent), once=once, last=last)
    terminal, child_end = pty.openpty()
    fcntl.ioctl(child_end, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    env = {name: text for name, text in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-c", f"import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n{script}"],
        stdin=child_end, stdout=child_end, stderr=child_end, env={**env, "TERM": "xterm"}, start_new_session=True,
    )  # fmt: skip
    os.close(child_end)
    out, deadline = b"", time.monotonic() + 60
    try:
        while time.monotonic() < deadline:
            if select.select([terminal], [], [], 0.1)[0]:
                try:
                    out += os.read(terminal, 1 << 16)
                except OSError:  # the child has closed its end
                    break
            if press and until in out.decode(errors="replace"):
                os.write(terminal, press)
                press = b""
        return process.wait(120), out.decode()
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def plain(text: str) -> list[str]:
    return [line.rstrip() for line in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).replace("\r", "").splitlines()]


def test_show_top_on_a_terminal_refreshes_until_ctrl_c() -> None:
    code, out = run_top(150, until="step 102/4500", press=b"\x03")
    assert code == 0 and "Traceback" not in out and "step 101/4500" in out
    assert "0 s ago" in out and out.rstrip().endswith("\x1b[?25h")  # the cursor is back


def test_show_top_ends_with_the_job() -> None:
    code, out = run_top(150, last=2)
    assert code == 0 and "step 102/4500" in out and "step 103/4500" not in out


@pytest.mark.parametrize("width", [60, 80, 120])
def test_show_top_fits_the_terminal_width(width: int) -> None:
    code, out = run_top(width, once=True)
    lines = plain(out)
    assert code == 0 and max(map(len, lines)) <= width
    assert [line.split()[0] for line in lines if line.startswith("machine-")] == [
        f"machine-{number}-of-a-long-name" for number in range(3)
    ]
    notes = [line for line in lines if line.startswith(f"not shown in {width} columns: ")]
    assert "training" in out and len(notes) == 1 and lines.index(notes[0]) == 7, "the last line is the note"
