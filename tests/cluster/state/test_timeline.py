"""Tests of the timeline of a job: one row per attempt, with its members, reason and cost."""

from typing import Any

from support.train_records import step_line

from cluster.state import timeline

Fixture = Any


def write_steps(run: Any, attempt: int, *pairs: tuple[int, float], tail: str = "") -> None:
    """Write the metrics of an attempt from (step, time) pairs."""
    rows = [step_line(step, time, attempt=attempt) for step, time in pairs]
    run.write_metrics(attempt, *rows, tail=tail)


def timeline_rows(run: Any) -> list[timeline.AttemptRow]:
    """End the job and return its timeline, which must be part of the result."""
    run.write_status("failed", ended=True)
    run.job.refresh()
    rows = timeline.attempt_rows(run.run_folder)
    assert rows == run.job.result.timeline
    return rows


def test_attempt_rows_have_machines_pause_and_lost_steps(hand_made: Fixture) -> None:
    run = hand_made(machines=2)
    run.write_attempt(1, "0.a", "1.b", reason="start")
    write_steps(run, 1, (1, 100.0), (10, 109.0), (20, 119.0))
    run.write_attempt(2, "1.b", reason="machine 0 lost", resume="checkpoints/000002/resume-00000016-abcd.pt")
    write_steps(run, 2, (17, 122.5), (40, 145.0))
    run.write_attempt(3, "1.b", "0.c", reason="machine 0 joined", resume="checkpoints/000003/resume-00000040-ef01.pt")
    write_steps(run, 3, (41, 146.0))
    rows = [
        (row.machines, row.reason, row.first_step, row.last_step, row.pause, row.steps_lost)
        for row in timeline_rows(run)
    ]
    assert rows == [
        (("0", "1"), "start", 0, 20, None, None),
        (("1",), "machine 0 lost", 16, 40, 3.5, 4),
        (("1", "0"), "machine 0 joined", 40, 41, 1.0, 0),
    ]


def test_attempts_without_steps_have_no_pause_and_their_lost_steps_add_up(hand_made: Fixture) -> None:
    """Attempt 3 goes back further than attempt 2, which made no step; attempt 4 repeats attempt 3's start."""
    run = hand_made()
    run.write_attempt(1, "0.a", reason="start")
    write_steps(run, 1, (1, 100.0), (20, 119.0))
    for number, first_step in ((2, 16), (3, 8), (4, 8)):
        resume = f"checkpoints/{number:06d}/resume-{first_step:08d}-abcd.pt"
        run.write_attempt(number, f"0.{number}", reason="killed", resume=resume)
    write_steps(run, 4, (9, 130.0), (20, 141.0))
    rows = timeline_rows(run)
    assert [row.steps_lost for row in rows] == [None, 4, 8, 0], "20 - 8 in all"
    assert [row.pause for row in rows] == [None, None, None, 11.0]


def test_clocks_of_two_machines_that_contradict_give_no_pause_and_a_line(hand_made: Fixture) -> None:
    run = hand_made(machines=2)
    run.write_attempt(1, "0.a", "1.b", reason="start")
    write_steps(run, 1, (1, 10_000.0), (20, 10_019.0))
    run.write_attempt(2, "1.b", reason="machine 0 lost", resume="checkpoints/000002/resume-00000016-abcd.pt")
    write_steps(run, 2, (17, 400.0), (30, 413.0))
    _, second = timeline_rows(run)
    assert (second.pause, second.steps_lost, second.reason) == (None, 4, "machine 0 lost; the clock jumped")
    assert timeline.lost_seconds(run.run_folder) == 0.0


def test_lost_intervals_exclude_time_between_launches(hand_made: Fixture) -> None:
    run = hand_made()
    run.write_attempt(1, "0.a", reason="start", launch_id="evening")
    write_steps(run, 1, (1, 100.0), (20, 119.0))
    for number, first_step in ((2, 16), (3, 16), (4, 30)):
        resume = f"checkpoints/{number:06d}/resume-{first_step:08d}-abcd.pt"
        run.write_attempt(number, "0.b", reason="killed", launch_id="morning", resume=resume)
    write_steps(run, 3, (17, 30_000.0), (30, 30_013.0))
    write_steps(run, 4, (31, 30_016.0))
    assert [row.pause for row in timeline_rows(run)] == [None, None, None, 3.0]
    # Steps 17 to 20 were done again; the first known time before them is that of step 1.
    assert timeline.lost_intervals(run.run_folder) == [(100.0, 119.0), (30_013.0, 30_016.0)]
