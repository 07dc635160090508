"""The cost of a job, from hand-made journals: totals, what was spent on losses."""

import json
from typing import Any, cast

import pytest
from support import aws_journal
from support.train_records import epoch_line, step_line

from cluster.backends.aws.renting.traffic import TRAFFIC_FILE, TrafficCount, TrafficRecord
from cluster.display import cloud as display_cloud
from cluster.jobs import billing
from infra.aws.journal_events import InstanceEnded, JournalEvent
from infra.aws.launch_request import Place
from infra.costs import Traffic
from train.tools.records import encode
from train.tools.text_files import to_json_bytes


def write_journal(run: Any, *machines: tuple[str, float, float], price: float | None = 3600.0) -> None:
    """Write a journal of machines (instance ID, launch time, end time) that cost a dollar a second."""
    place = Place(region="us-east-1", zone="us-east-1a", type="p5.48xlarge", market="on-demand", price=price)
    events: list[JournalEvent] = []
    for number, (id, launched, ended) in enumerate(machines, 1):
        events += [
            aws_journal.launch_request(number, place, ["0"]),
            aws_journal.request_granted(number, (id, "0", launched)),
            InstanceEnded(id=id, name="0", ended=ended, reason="Client.UserInitiatedShutdown"),
        ]
    aws_journal.write_journal(run.run_folder.path / "cloud.jsonl", *events)


def write_metrics(run: Any, attempt: int, *steps: tuple[int, float], epoch: float) -> None:
    """Write the metrics of an attempt: (step, time) of each step, and the time of the epoch's end."""
    rows = [step_line(step, time, attempt=attempt) for step, time in steps]
    run.write_metrics(attempt, *rows, epoch_line(steps[-1][0], epoch, attempt=attempt, top5=50.0))
    run.copy_logs()


def test_cost_report_counts_losses_and_no_time_between_launches(hand_made: Any) -> None:
    run = hand_made(backend="aws", cloud={})
    run.write_attempt(1, "0.a", reason="start", launch_id="evening")
    write_metrics(run, 1, (1, 100.0), (20, 500.0), epoch=500.0)
    run.write_attempt(2, "0.b", reason="lost", launch_id="evening", resume_step=16)
    write_metrics(run, 2, (17, 560.0), (30, 900.0), epoch=900.0)
    run.write_attempt(3, "0.c", reason="start", launch_id="morning", resume_step=30)
    write_metrics(run, 3, (31, 90_100.0), (40, 90_500.0), epoch=90_500.0)
    write_journal(run, ("i-1", 0.0, 1000.0), ("i-2", 90_000.0, 91_000.0))
    report = billing.cost_report(run.job)
    assert report.cost.dollars == pytest.approx(2000.0)
    assert (report.wasted, report.wasted_seconds) == (pytest.approx(460.0), 460.0)
    assert report.per_epoch == pytest.approx((900.0 + 500.0) / 3)  # no machine was billed between the launches
    assert [machine.type for machine in report.cost.machines] == ["p5.48xlarge"] * 2 and report.cost.unknown == []
    write_journal(run, ("i-1", 0.0, 1000.0), price=None)
    assert run.job.backend.job_cost().unknown == ["i-1"]


def test_cost_command_refreshes_the_job_and_says_of_a_local_one_that_nothing_is_rented(
    hand_made: Any, sandbox: Any
) -> None:
    """Without the refresh, machines that were terminated while nothing here was watching would be billed for ever."""
    run = hand_made()
    run.write_status("done", ended=True)
    text = sandbox.cli("cost", "job-1")
    assert (text.code, text.err) == (0, "") and run.run_folder.result_path.exists()
    assert text.out == "job-1 runs on this computer: nothing is rented, so it costs nothing\n"
    report = json.loads(sandbox.cli("cost", "job-1", "-o", "json").out)
    assert (report["is_billed"], report["dollars"], report["machines"]) == (False, 0.0, [])


def test_cost_shows_a_row_for_each_kind_of_traffic(hand_made: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run = hand_made(backend="aws", cloud={})
    write_journal(run, ("i-1", 0.0, 1000.0), price=0.36)
    moved = Traffic(shared_written_bytes=2 * 10**9, home_bytes=10**9)
    record = TrafficRecord(counts={"10.0.0.1 a": TrafficCount(first=0.0, last=1000.0, traffic=moved)})
    (run.run_folder.path / TRAFFIC_FILE).write_bytes(to_json_bytes(encode(record)))
    report = billing.cost_report(run.job)
    assert report.cost.dollars == pytest.approx(0.1 + 0.12 + 0.09)
    assert [row["name"] for row in cast("list[dict[str, str]]", report.to_json()["traffic"])] == [
        "shared folder, written",
        "data out to this computer",
    ]
    display_cloud.show_cost(report)
    text = " ".join(capsys.readouterr().out.split())
    assert "shared folder, written 2.000 GB $0.06 $0.1200" in text and "traffic $0.2100" in text
