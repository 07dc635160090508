"""Tables in terminals of several widths: columns are left out and texts are wrapped, but no number is ever cut."""

import io
from collections.abc import Callable
from dataclasses import replace

import pictured_jobs
import pytest
from rich.console import Console

from cluster.backends.rentals import OfferRow, RentedJob
from cluster.display import cloud, plan, status, tables
from infra.costs import JobCost
from train.forecast import TermComparison
from train.recipe.recipe_files import read_recipes
from train.recipe.schedule import Schedule

REASON = "machine 13 was lost: no heartbeat for 5.2 s; its host 203.0.113.113 does not answer on port 22 either"
JOB = replace(pictured_jobs.RUNNING, job="job-128", machines=16, step=1_234_567, epoch=128, seconds=123_456.0)
NOTES = ("no GPU: training on the processor", "the driver is older than this torch expects")
MACHINES = {f"1{name}": replace(row, notes=NOTES) for name, row in pictured_jobs.machine_rows().items()}
ATTEMPTS = [
    replace(row, attempt=12, machines=tuple(map(str, range(16))), first_step=1_234_567, steps_lost=123, reason=REASON)
    for row in pictured_jobs.ATTEMPTS
]
MACHINE_COST = replace(
    pictured_jobs.machine_cost(2), seconds=123_456.0, dollars=1234.5678,
    why="Server.SpotInstanceTermination: Spot instance termination, after a notice of two minutes",
)  # fmt: skip
COST = replace(pictured_jobs.cost_report(), cost=JobCost(machines=(MACHINE_COST, pictured_jobs.machine_cost(0))))
SCHEDULE = Schedule(read_recipes("recipes/resnet50_18min.py")[0], 1_281_167, 128)
OFFER = OfferRow(
    type="g6e.24xlarge", zone="ap-northeast-1a", gpus=8, gpu="A100-SXM4-80GB", gpu_gb=80, efa=4, gbit=400.0,
    spot=12.3456, on_demand=40.9657, on_demand_shipped=True, machines=16, minutes=18.0, dollars=163.15,
)  # fmt: skip
RENTED = RentedJob(
    job="job-128", uid="job-128-12345678", machines=16, state="15 running, 1 shutting-down", type="p4de.24xlarge",
    market="on-demand", zone="us-east-1a", since="2026-11-23 12:34", expires="2026-11-23 22:34",
    owner="a-role-with-a-long-name user",
)  # fmt: skip
PRINTERS: dict[str, Callable[[], object]] = {
    "jobs": lambda: status.show_jobs({"job-128": JOB, "job-7": None}),
    "machines": lambda: status.show_machines(MACHINES),
    "attempts": lambda: status.show_timeline(ATTEMPTS),
    "schedule": lambda: plan.show_schedule(SCHEDULE.table()),
    "forecast": lambda: plan.show_forecast_vs_actual(
        [TermComparison(term="all-reduce", forecast=123_456.7, actual=54_321.0, error=1.27)]
    ),
    "cost": lambda: cloud.show_cost(COST),
    "offers": lambda: cloud.show_offers([OFFER, replace(OFFER, type="c7i.2xlarge", gpus=0, gpu="CPU")]),
    "rented": lambda: cloud.show_rented_machines([RENTED], "eu-west-1"),
}


@pytest.mark.parametrize("width", (60, 80, 120, 200))
@pytest.mark.parametrize("table", PRINTERS)
def test_table_fits_the_terminal_and_cuts_no_number(table: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = io.StringIO()
    monkeypatch.setattr(tables, "console", lambda: Console(file=printed, width=width, highlight=False, markup=False))
    cells_by_column: dict[str, list[str]] = {}
    measure = tables.TableColumn.measure

    def note_cells(name: str, cells: list[str], can_wrap: bool) -> tables.TableColumn:
        cells_by_column[name] = cells
        return measure(name, cells, can_wrap)

    monkeypatch.setattr(tables.TableColumn, "measure", note_cells)
    PRINTERS[table]()
    text, _, names = printed.getvalue().partition("not shown in ")
    assert max(map(len, text.splitlines())) <= width and "…" not in text
    left_out = " ".join(names.partition("columns:")[2].split()).split(", ")
    for name, cells in cells_by_column.items():
        for word in " ".join(cells).split():
            is_number = word[:1] in "$-0123456789"
            assert name in left_out or not is_number or word in text, f"{name}: {word}"


def test_print_table_in_a_terminal_too_narrow_for_numbers_wraps_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = io.StringIO()
    monkeypatch.setattr(tables, "console", lambda: Console(file=printed, width=20, highlight=False, markup=False))
    tables.print_table([{"dollars": 1234567890.25, "minutes": 123, "steps": 10**12}])
    assert "1234567890     123 1000000000000" in printed.getvalue()
