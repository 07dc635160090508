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


def test_attempt_rows_have_machines_pause_and_lost_steps(hand_made: Any) -> None:
    """Attempt 2 trains no step. Attempt 3 starts from an earlier checkpoint than attempt 2 did."""
    run = hand_made(machines=2)
    run.write_attempt(1, "0.a", "1.b", reason="start")
    write_steps(run, 1, (1, 100.0), (10, 109.0), (20, 119.0))
    run.write_attempt(2, "1.b", reason="machine 0 lost", resume_step=16)
    run.write_attempt(3, "1.b", reason="killed", resume_step=8)
    write_steps(run, 3, (9, 122.5), (40, 145.0))
    run.write_attempt(4, "1.b", "0.c", reason="machine 0 joined", resume_step=40)
    write_steps(run, 4, (41, 146.0))
    run.write_status("failed", ended=True)
    run.job.refresh()
    rows = timeline.read_timeline(run.run_folder).rows
    assert rows == run.job.result.timeline
    assert [(row.machines, row.reason, row.first_step, row.last_step, row.pause, row.steps_lost) for row in rows] == [
        (("0", "1"), "start", 0, 20, None, None),
        (("1",), "machine 0 lost", 16, None, None, 4),
        (("1",), "killed", 8, 40, 3.5, 8),
        (("1", "0"), "machine 0 joined", 40, 41, 1.0, 0),
    ]


def test_clocks_that_contradict_and_the_time_between_launches_give_no_pause(hand_made: Any) -> None:
    run = hand_made(machines=2)
    run.write_attempt(1, "0.a", "1.b", reason="start")
    write_steps(run, 1, (1, 10_000.0), (20, 10_019.0))
    run.write_attempt(2, "1.b", reason="machine 0 lost", resume_step=16)
    write_steps(run, 2, (17, 400.0), (30, 413.0))
    for number, first_step in ((3, 24), (4, 30)):
        run.write_attempt(number, "1.b", reason="killed", launch_id="morning", resume_step=first_step)
    write_steps(run, 3, (25, 30_000.0), (30, 30_005.0))
    write_steps(run, 4, (31, 30_008.0))
    run.copy_logs()
    assert [(row.pause, row.steps_lost, row.reason) for row in timeline.read_timeline(run.run_folder).rows] == [
        (None, None, "start"),
        (None, 4, "machine 0 lost; the clock jumped"),
        (None, 6, "killed"),
        (3.0, 0, "killed"),
    ]
    # Steps 25 to 30 were done again; the last known time before them is that of step 17.
    assert timeline.read_timeline(run.run_folder).lost == [(400.0, 413.0), (30_005.0, 30_008.0)]


def test_time_between_a_stop_and_a_resume_that_moves_before_its_first_step_is_no_pause(hand_made: Any) -> None:
    run = hand_made()
    for number, launch_id, first_step, times in (
        (1, "started", 0, ((1, 100.0), (20, 119.0))),
        (2, "resumed", 20, ()),
        (3, "moved", 20, ((21, 36_000.0), (30, 36_009.0))),
        (4, "moved again", 30, ((31, 36_100.0),)),
    ):
        run.write_attempt(number, f"0.{number}", reason="start", launch_id=launch_id, resume_step=first_step)
        write_steps(run, number, *times)
    aws_journal.write_journal(
        run.run_folder.path / "cloud.jsonl",
        *(LaunchStarted(launch_id=launch_id) for launch_id in ("started", "resumed")),
        *(LaunchMoved(launch_id=launch_id) for launch_id in ("moved", "moved again")),
    )
    run.copy_logs()
    rows = timeline.read_timeline(run.run_folder).rows
    assert [row.pause for row in rows] == [None, None, None, 91.0]
    assert [row.reason for row in rows] == ["start", "resume", *[AttemptReason.MOVED] * 2]
    assert timeline.read_timeline(run.run_folder).lost_seconds == 91.0


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


def test_steps_before_the_last_attempt_but_one_are_lost_once_when_its_checkpoint_cannot_be_read(hand_made: Any) -> None:
    run = hand_made()
    for number, first_step, times in (
        (1, 0, ((1, 100.0), (8, 107.0), (16, 115.0), (20, 119.0))),
        (2, 16, ((17, 130.0), (24, 137.0))),
        (3, 8, ((9, 150.0), (12, 153.0))),
        (4, 8, ((9, 170.0),)),
    ):
        run.write_attempt(number, f"0.{number}", reason="killed", resume_step=first_step)
        write_steps(run, number, *times)
    run.copy_logs()
    assert sorted(timeline.read_timeline(run.run_folder).lost) == [
        (107.0, 115.0), (115.0, 130.0), (130.0, 150.0), (150.0, 170.0)
    ]  # fmt: skip


# --- a long history: each file is read once ------------------------------------------------------------------------


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
