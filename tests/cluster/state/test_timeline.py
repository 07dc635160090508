"""Tests of the timeline of a job: one row per attempt, with its members, reason and cost, also of a long history."""

import random
from typing import Any

import pytest
from support import aws_journal
from support.train_records import epoch_line, step_line

from cluster.jobs.job import Job
from cluster.state import timeline
from cluster.state.result import LEFT_OUT, MAX_RESULT_BYTES, write_result
from cluster.state.states import AttemptReason
from infra.aws.journal_events import LaunchMoved, LaunchStarted
from train.metrics import step_search
from train.metrics.time_table import TimePart
from train.recipe import Command
from train.tools import files, records, text_files
from train.tools.agent_protocol import metrics_file

ATTEMPTS = 30


def write_steps(run: Any, attempt: int, *pairs: tuple[int, float]) -> None:
    """Write the metrics of an attempt from (step, time) pairs."""
    run.write_metrics(attempt, *(step_line(step, time, attempt=attempt) for step, time in pairs))


MOVED = str(AttemptReason.MOVED)


@pytest.mark.parametrize(("attempts", "rows", "lost"), [
    pytest.param([
        ("0.a 1.b", "start", "", 0, [(1, 100.0), (10, 109.0), (20, 119.0)]),
        ("1.b", "machine 0 lost", "", 16, []),
        ("1.b", "killed", "", 8, [(9, 122.5), (40, 145.0)]),
        ("1.b 0.c", "machine 0 joined", "", 40, [(41, 146.0)]),
    ], [
        (("0", "1"), "start", 0, 20, None, None),
        (("1",), "machine 0 lost", 16, None, None, 4),
        (("1",), "killed", 8, 40, 3.5, 8),
        (("1", "0"), "machine 0 joined", 40, 41, 1.0, 0),
    ], [(100.0, 122.5), (145.0, 146.0)], id="no step, then an earlier checkpoint"),
    # Steps 25 to 30 were done again; the last known time before them is that of step 17.
    pytest.param([
        ("0.a", "start", "", 0, [(1, 10_000.0), (20, 10_019.0)]),
        ("1.b", "machine 0 lost", "", 16, [(17, 400.0), (30, 413.0)]),
        ("1.b", "killed", "morning", 24, [(25, 30_000.0), (30, 30_005.0)]),
        ("1.b", "killed", "morning", 30, [(31, 30_008.0)]),
    ], [
        (("0",), "start", 0, 20, None, None),
        (("1",), "machine 0 lost; the clock jumped", 16, 30, None, 4),
        (("1",), "killed", 24, 30, None, 6),
        (("1",), "killed", 30, 31, 3.0, 0),
    ], [(400.0, 413.0), (30_005.0, 30_008.0)], id="clocks that contradict, a night between two launches"),
    pytest.param([
        ("0.a", "start", "started", 0, [(1, 100.0), (20, 119.0)]),
        ("0.b", "start", "resumed", 20, []),
        ("0.c", "start", "moved", 20, [(21, 36_000.0), (30, 36_009.0)]),
        ("0.d", "start", "moved again", 30, [(31, 36_100.0)]),
    ], [
        (("0",), "start", 0, 20, None, None),
        (("0",), "resume", 20, None, None, 0),
        (("0",), MOVED, 20, 30, None, 0),
        (("0",), MOVED, 30, 31, 91.0, 0),
    ], [(36_009.0, 36_100.0)], id="a resume that moves before its first step"),
    pytest.param([
        ("0.a", "killed", "", 0, [(1, 100.0), (8, 107.0), (16, 115.0), (20, 119.0)]),
        ("0.b", "killed", "", 16, [(17, 130.0), (24, 137.0)]),
        ("0.c", "killed", "", 8, [(9, 150.0), (12, 153.0)]),
        ("0.d", "killed", "", 8, [(9, 170.0)]),
    ], [
        (("0",), "killed", 0, 20, None, None),
        (("0",), "killed", 16, 24, 11.0, 4),
        (("0",), "killed", 8, 12, 13.0, 16),
        (("0",), "killed", 8, 9, 17.0, 4),
    ], [(107.0, 115.0), (115.0, 130.0), (130.0, 150.0), (150.0, 170.0)], id="steps of the last attempt but one"),
])  # fmt: skip
def test_attempt_rows_have_machines_pause_and_lost_steps(
    attempts: list[tuple[str, str, str, int, list[tuple[int, float]]]], rows: Any, lost: Any, hand_made: Any
) -> None:
    """Attempts are given as members, reason, launch, first step and (step, time) pairs."""
    run = hand_made(machines=2)
    for number, (members, reason, launch_id, first_step, steps) in enumerate(attempts, 1):
        run.write_attempt(number, *members.split(), reason=reason, launch_id=launch_id, resume_step=first_step)
        write_steps(run, number, *steps)
    if attempts[-1][2] == "moved again":
        launches = [LaunchStarted(launch_id="started"), LaunchStarted(launch_id="resumed")]
        moves = [LaunchMoved(launch_id="moved"), LaunchMoved(launch_id="moved again")]
        aws_journal.write_journal(run.run_folder.path / "cloud.jsonl", *launches, *moves)
    run.write_status("failed", ended=True)
    run.job.refresh()
    found = timeline.read_timeline(run.run_folder)
    assert found.rows == run.job.result.timeline and sorted(found.lost) == lost
    assert [
        (row.machines, row.reason, row.first_step, row.last_step, row.pause, row.steps_lost) for row in found.rows
    ] == rows


def test_rows_and_goodput_of_a_command_follow_from_the_steps_that_it_tells(hand_made: Any) -> None:
    """Where a fresh command began is not known. The third attempt counts its steps anew: only its pause is known."""
    run = hand_made(workload=Command(argv=("python", "train.py")), machines=2)
    run.write_attempt(1, "0.a", "1.b", reason="start")
    write_steps(run, 1, (5, 100.0), (10, 109.0), (20, 119.0))
    run.write_attempt(2, "1.b", reason="machine 0 lost", resume_step=3)  # the third copy of its checkpoint folder
    write_steps(run, 2, (17, 125.0), (40, 148.0))
    run.write_attempt(3, "1.b", "0.c", reason="machine 0 joined", resume_step=4)
    anew = (step_line(1, 151.0, images=2, attempt=3), step_line(9, 159.0, attempt=3), step_line(1, 160.0, 0, attempt=3))
    run.write_metrics(3, *anew)
    run.write_status("failed", ended=True)
    run.job.refresh()
    rows = run.job.timeline()
    assert rows == list(run.job.result.timeline)
    assert [(row.first_step, row.last_step, row.pause, row.steps_lost) for row in rows] == [
        (None, 20, None, None),
        (16, 40, 6.0, 4),
        (None, 1, 3.0, None),
    ]
    assert timeline.read_timeline(run.run_folder, is_command=True).lost == [(109.0, 125.0), (148.0, 151.0)]
    assert run.job.result.goodput == pytest.approx((9 + 23 + 9) / (60.0))


def write_history(run: Any) -> None:
    """Write attempts of some steps each, of which each repeats a part of the one before. One step has one image."""
    rng = random.Random(0)
    step, now = 0, 1000.0
    for number in range(1, ATTEMPTS + 1):
        run.write_attempt(number, f"0.{number}", reason="killed", resume_step=step, time=now)
        last = step + rng.randrange(0, 300)
        rows = [step_line(each, now + each - step, attempt=number) for each in range(step + 1, last, 5)]
        epochs = [epoch_line(n, now + n - step, attempt=number) for n in range(step + 1, last) if n % 64 == 0]
        run.write_metrics(number, *sorted([*rows, *epochs], key=lambda row: row["time"]), tail='{"kind": "tr')
        now += last - step + 10
        step = rng.randrange(step, max(step + 1, last))
    run.copy_logs()


def test_polling_reads_no_file_of_the_history_again(hand_made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `follow`, `top` and the supervisor ask for again and again reads only what is new."""
    run = hand_made()
    write_history(run)
    parts = {part: {"seconds": 1.0, "epoch": 0, "most": 0.0} for part in TimePart}
    run.write_status("training", phase="running", where={"wall": 1.0, "parts": parts})
    opened: list[str] = []
    for module in (files, text_files, records, step_search):
        open_file = files.open_regular

        def note(path: Any, *mode: Any, open_file: Any = open_file) -> Any:
            opened.append(path.name)
            return open_file(path, *mode)

        monkeypatch.setattr(module, "open_regular", note)
    job = Job(run.run_folder.path)

    def poll() -> list[str]:
        opened.clear()
        job.status(), job.timeline(), job.run_folder.epochs(), job.machine_details()
        return [name for name in opened if name[:6].isdigit()]

    assert len(poll()) >= ATTEMPTS
    assert set(poll()) <= {f"{ATTEMPTS + 1:06d}.json"}, "only the next attempt is looked for"
    with metrics_file(run.run_folder.path, ATTEMPTS).open("a") as file:
        file.write("\n")
    assert set(poll()) <= {f"{ATTEMPTS + 1:06d}.json", f"{ATTEMPTS:06d}.jsonl"}


def test_attempts_of_a_machine_that_fill_memory_are_cut_and_the_result_can_be_read(hand_made: Any) -> None:
    run = hand_made()
    for number in range(1, 12):
        run.write_attempt(number, f"0.{number}", reason="x" * 900_000)
    kept = run.job.run_folder.attempts.all()
    assert 1 < len(kept) < 11 and kept[-1].number == 11 and LEFT_OUT in run.job.status().warning
    write_result(run.job.run, run.job.backend, end_reason="stopped")
    assert run.run_folder.result_path.stat().st_size <= MAX_RESULT_BYTES
    assert run.job.result.timeline[-1].attempt == run.job.result.attempts == 11
