"""The live table of a job's machines, from made-up statuses."""

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

USE = {
    "cpu": 34.2,
    "memory_gb": 120.4,
    "memory_total_gb": 1152.0,
    "net_in_gbit": 40.21,
    "net_out_gbit": 41.0,
    "gpus": [
        {"use": 98.0, "memory_gb": 61.2, "temperature": 64.0, "watts": 600.0},
        {"use": 91.0, "memory_gb": 70.3, "temperature": 71.0},
    ],
}
JOB = {
    **{"job": "job-3", "state": "running", "doing": "training", "step": 120, "steps": 4500, "epoch": 2, "epochs": 16},
    **{"images_per_second": 330123.4, "top1": 63.456, "seconds": 613.2},
}


def status(number: int = 0, **more: Any) -> dict[str, Any]:
    """What an agent may say."""
    said = {"id": str(number), "name": f"gpu-{number}", "state": "training", "attempt": 2, "step": 120, "steps": 4500}
    return {**said, "images_per_second": 21000.4, "loss": 3.21, "use": USE, "busy": [0.7, 0.7], "time": 1.0, **more}


def test_a_row_has_the_mean_of_the_gpus_their_least_use_and_the_hottest_and_fullest() -> None:
    (row,) = machine_table_rows({"0": status()}, 0.0)
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
        "last word": "",
        "slowest": "",
    }


@pytest.mark.parametrize(
    "said",
    [
        {},
        {name: None for name in status()},
        {"use": {"gpus": None, "cpu": None}, "busy": None, "loss": float("nan")},
        {"use": {"gpus": [{}, None, {"use": None}]}, "busy": [None], "images_per_second": "fast"},
        {"use": [], "busy": 3},
    ],
)
def test_whatever_is_missing_or_null_leaves_its_cell_empty(said: dict[str, Any]) -> None:
    (row,) = machine_table_rows({"m7": said}, 0.0)
    assert row.cells["machine"] == "m7" and row.cells.keys() == {*TOP_COLUMNS}
    assert not any(text for name, text in row.cells.items() if name != "machine")
    assert job_summary_line(said) == ""


def test_machines_stand_in_the_order_of_their_numbers() -> None:
    found = machine_table_rows({name: {} for name in ("m10", "m9", "head", "10", "2")}, 0.0)
    assert [row.cells["machine"] for row in found] == ["2", "10", "head", "m9", "m10"]


# --- the slowest --------------------------------------------------------------------------------------------------


def slowest(**statuses: dict[str, Any]) -> dict[str, str]:
    return {
        row.cells["machine"]: row.cells["slowest"] for row in machine_table_rows(statuses, 0.0) if row.cells["slowest"]
    }


def test_the_slowest_is_the_rank_that_waits_least_when_it_is_clearly_above_the_median() -> None:
    others = {str(number): status(number) for number in range(3)}
    assert slowest(**others, x=status(8, busy=[0.70, 0.80])) == {"gpu-8": "slowest: GPU 1"}
    assert slowest(a=status(1, busy=[0.8] * 3), x=status(8, busy=[0.9])) == {"gpu-8": "slowest"}  # 0.9 - 0.8 < 0.1
    assert slowest(**others, x=status(8, busy=[None, 0.95])) == {"gpu-8": "slowest: GPU 1"}
    assert slowest(**others, x=status(8, busy=[0.95])) == {"gpu-8": "slowest"}
    assert slowest(**others, x=status(8, busy=[0.70, 0.79])) == {}


def test_one_that_waits_more_than_the_others_is_not_the_slowest_nor_is_a_lone_one() -> None:
    assert slowest(a=status(1, busy=[0.8]), b=status(2, busy=[0.8]), c=status(3, busy=[0.1])) == {}
    assert slowest(a=status(1, busy=[0.99])) == {}


def test_who_is_of_an_older_attempt_or_silent_is_not_compared() -> None:
    others = {str(number): status(number) for number in range(2)}
    assert slowest(**others, x=status(8, busy=[0.99], attempt=1)) == {}
    watch = StatusAgeTracker()
    watch.update(statuses := {**others, "x": status(8, busy=[0.99])}, 0.0)
    assert [row.cells["slowest"] for row in machine_table_rows(statuses, 0.0, watch)] == ["", "", "slowest"]
    watch.update(
        statuses := {name: {**one, "time": 2.0} if name != "x" else one for name, one in statuses.items()}, 9.0
    )
    assert [row.cells["slowest"] for row in machine_table_rows(statuses, 9.0, watch)] == ["", "", ""]


# --- the last word ------------------------------------------------------------------------------------------------


def ages(watch: StatusAgeTracker, said: dict[str, Any], now: float) -> tuple[str, bool]:
    watch.update({"0": said}, now)
    (row,) = machine_table_rows({"0": said}, now, watch)
    return row.cells["last word"], row.is_stale


def test_the_age_counts_from_when_we_saw_the_status_change_whatever_its_own_clock_says() -> None:
    watch = StatusAgeTracker()
    assert ages(watch, status(time=5e9), 100.0) == ("", False)  # it may be a day old
    assert ages(watch, status(time=4e9), 101.0) == ("0 s ago", False)
    assert ages(watch, status(time=4e9), 106.0) == ("5 s ago", False)
    assert ages(watch, status(time=4e9), 113.0) == ("12 s ago", True)
    assert ages(watch, status(time=4e9 + 1), 114.0) == ("0 s ago", False)


def test_one_that_never_spoke_while_we_looked_is_silent_for_longer_than_we_know() -> None:
    watch = StatusAgeTracker()
    assert ages(watch, status(), 100.0) == ("", False)
    assert ages(watch, status(), 105.0) == ("", False)
    assert ages(watch, status(), 112.0) == ("> 12 s ago", True)


def test_a_machine_that_went_and_came_back_is_new() -> None:
    watch = StatusAgeTracker()
    watch.update({"0": status()}, 0.0)
    watch.update({"0": status(step=121)}, 1.0)
    watch.update({}, 2.0)
    assert ages(watch, status(step=122), 3.0) == ("", False)


# --- the picture --------------------------------------------------------------------------------------------------


def test_the_job_is_one_line_of_what_is_known() -> None:
    assert job_summary_line(JOB) == "job-3 running  step 120/4500  epoch 2/16  330123 img/s  top-1 63.46 %  after 10:13"
    early = {"job": "job-3", "state": "setup", "doing": "drawing", "step": None, "top1": None, "seconds": 0.0}
    assert job_summary_line(early) == "job-3 setup  drawing  after 0:00"


def test_a_narrow_terminal_loses_columns_by_their_importance_and_keeps_the_machine() -> None:
    found = machine_table_rows({"0": status(), "1": status(1, busy=[0.7, 0.95])}, 0.0)
    assert {*COLUMN_DROP_ORDER} == {*TOP_COLUMNS} - {"machine"} and len(COLUMN_DROP_ORDER) == len(TOP_COLUMNS) - 1
    whole = Console(width=300).measure(display_top._build_table(found, 300)).maximum
    assert (
        fitting_columns(found, whole) == [*TOP_COLUMNS]
        and len(fitting_columns(found, whole - 1)) == len(TOP_COLUMNS) - 1
    )
    assert fitting_columns(found, 1) == ["machine"]
    for width in range(200, 0, -1):
        kept = fitting_columns(found, width)
        lost = {*TOP_COLUMNS} - {*kept}
        assert lost == {*COLUMN_DROP_ORDER[: len(lost)]} and kept == [name for name in TOP_COLUMNS if name in kept]
        assert Console(width=300).measure(display_top._build_table(found, width)).maximum <= max(width, len("machine"))


def test_the_column_of_the_slowest_is_there_when_there_is_one() -> None:
    assert "slowest" not in fitting_columns(machine_table_rows({"0": status()}, 0.0), 1000)


def test_off_a_terminal_it_is_one_plain_table_and_whole(capsys: pytest.CaptureFixture[str]) -> None:
    reason = "the trainer of rank 3 " + "died " * 60 + "at last"
    show_top(lambda: (JOB, {"0": status(), "1": status(1, state="failed", reason=reason)}))
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == job_summary_line(JOB)
    assert lines[2].split() == " ".join(TOP_COLUMNS[:-1]).split()
    assert lines[4].split()[:4] == ["gpu-0", "training", "2", "120/4500"]
    assert lines[6] == f"gpu-1: {reason}" and "\x1b" not in "".join(lines) and len(lines) == 7


SCRIPT = """
import os, sys
from cluster.display.top import show_top
sys.path.insert(0, {tests!r})
from test_top import JOB, status
count = 0
def read():
    global count
    count += 1
    return {{**JOB, "step": 100 + count, "state": "done" if count == {last} else "running"}}, {{
        str(n): status(n, step=count, name=f"machine-{{n}}-of-a-long-name") for n in range(3)}}
show_top(read, once={once})
"""


def shown(width: int, until: str = "", press: bytes = b"", once: bool = False, last: int = -1) -> tuple[int, str]:
    """The exit code and output of `top` on a terminal; keys are pressed when it has shown the text."""
    script = SCRIPT.format(tests=str(Path(__file__).parent), once=once, last=last)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    env = {name: text for name, text in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-c", f"import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n{script}"],
        stdin=theirs, stdout=theirs, stderr=theirs, env={**env, "TERM": "xterm"}, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    out, deadline = b"", time.monotonic() + 60
    try:
        while time.monotonic() < deadline:
            if select.select([ours], [], [], 0.1)[0]:
                try:
                    out += os.read(ours, 1 << 16)
                except OSError:  # it has closed its end
                    break
            if press and until in out.decode(errors="replace"):
                os.write(ours, press)
                press = b""
        return process.wait(10), out.decode()
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def plain(text: str) -> list[str]:
    return [line.rstrip() for line in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).replace("\r", "").splitlines()]


def test_on_a_terminal_it_is_drawn_anew_and_ctrl_c_ends_it_quietly() -> None:
    code, out = shown(150, until="step 102/4500", press=b"\x03")
    assert code == 0 and "Traceback" not in out and "step 101/4500" in out
    assert "0 s ago" in out and out.rstrip().endswith("\x1b[?25h")  # the cursor is back


def test_it_ends_with_the_job() -> None:
    code, out = shown(150, last=2)
    assert code == 0 and "step 102/4500" in out and "step 103/4500" not in out


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    code, out = shown(width, once=True)
    lines = plain(out)
    assert code == 0 and max(map(len, lines)) <= width
    assert [line.split()[0] for line in lines if line.startswith("machine-")] == [
        f"machine-{number}-of-a-long-name" for number in range(3)
    ]
    assert "training" in out and len(lines) == 7
