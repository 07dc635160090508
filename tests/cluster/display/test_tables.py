"""Tables in terminals of several widths: columns are left out and texts are wrapped, but no number is ever cut."""

import io
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console

from cluster.backends.rentals import OfferRow, RentedJob
from cluster.display import cloud, forecast, plan, status, tables
from cluster.jobs.billing import CostReport
from cluster.state.states import JobState, MachineState, SetupStep
from cluster.state.status import JobStatus, MachineRow
from cluster.state.timeline import AttemptRow
from infra.costs import JobCost, MachineCost
from train.forecast import TermComparison
from train.recipe import IMAGENET, Model, Phase, Recipe
from train.recipe.schedule import Schedule

WIDTHS = (60, 80, 120, 200)
LONG_REASON = "machine 13 was lost: no heartbeat for 5.2 s; its host 203.0.113.113 does not answer on port 22 either"
JOB = JobStatus(
    job="job-128", recipe="resnet50_18min", backend="aws", machines=16, procs=8, created=0.0, state=JobState.RUNNING,
    run="/runs/job-128", seconds=123_456.0, images_per_second=401_234.5, top1=76.123, top5=93.456, step=1_234_567,
    epoch=128,
)  # fmt: skip
MACHINES = {
    str(index): MachineRow(
        host=f"203.0.113.{100 + index}",
        state=MachineState.TRAINING,
        reason="",
        status=None,
        notes=("no GPU: training on the processor", "the driver is older than this torch expects") if index else (),
        seconds=dict.fromkeys(SetupStep, 148.7 + index),
    )
    for index in range(3)
}
ATTEMPTS = [
    AttemptRow(
        attempt=number, at=1e9 + number, machines=tuple(map(str, range(16))), first_step=1_234_567, pause=12.34,
        steps_lost=123, reason=LONG_REASON,
    )
    for number in (1, 12)
]  # fmt: skip
RECIPE = Recipe(
    name="large",
    data=IMAGENET,
    model=Model(name="resnet50"),
    gpus=128,
    phases=[
        Phase(epochs=(0, 16), size=128, batch=256, lr=(0.1234, 3.84)),
        Phase(epochs=(16, 28), size=224, batch=128, lr=(3.84, 0.0336)),
    ],
)
MACHINE_COST = MachineCost(
    id="i-0123456789abcdef0", name="15", type="p4de.24xlarge", market="on-demand", zone="us-east-1a", launched=0.0,
    ended=1.0, price=40.9657, seconds=123_456.0, dollars=1234.5678, disk_dollars=0.1, address_dollars=0.1,
    why="Server.SpotInstanceTermination: Spot instance termination, after a notice of two minutes",
)  # fmt: skip
COST_REPORT = CostReport(
    job="job-128", backend="EC2", is_billed=True, per_epoch=1.0, to_target=None, wasted=0.0, wasted_seconds=0.0,
    cost=JobCost(machines=(MACHINE_COST, replace(MACHINE_COST, name="0", ended=None, why=""))),
)  # fmt: skip
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
    "set-up": lambda: status.show_setup_steps(MACHINES),
    "attempts": lambda: status.show_timeline(ATTEMPTS),
    "schedule": lambda: plan.show_schedule(Schedule(RECIPE, 1_281_167, 128).table()),
    "forecast": lambda: forecast.show_forecast_vs_actual(
        [TermComparison(term="all-reduce", forecast=123_456.7, actual=54_321.0, error=1.27)]
    ),
    "cost": lambda: cloud.show_cost(COST_REPORT),
    "offers": lambda: cloud.show_offers([OFFER, replace(OFFER, type="c7i.2xlarge", gpus=0, gpu="CPU")]),
    "rented": lambda: cloud.show_rented_machines([RENTED], ["eu-west-1"]),
}


@pytest.mark.parametrize("width", WIDTHS)
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
    tables.print_table(("dollars", "minutes", "steps"), [(1234567.25, 123, 10**12)])
    assert "1.235e+06     123 1000000000000" in printed.getvalue()


def test_print_table_ends_no_line_with_a_space(capsys: pytest.CaptureFixture[str]) -> None:
    tables.print_table(("job", "state"), [("job-10", JobState.DONE), ("job-1", "")])
    assert capsys.readouterr().out.splitlines() == ["job    state", "────────────", "job-10 done", "job-1"]
