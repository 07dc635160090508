"""Terminal output: numbers, tables, a plan and a job's status."""

import time
from dataclasses import replace
from typing import Any

import pictured_jobs
from support.train_records import EPOCH_FIELDS, make_epoch

from cluster.display import progress, status
from cluster.jobs import store
from cluster.report.facts import collect_facts
from cluster.report.tables import format_cell
from cluster.state.timeline import AttemptRow
from train.metrics import text
from train.metrics.records import EpochRow
from train.recipe import Command


def test_format_of_durations_and_of_ranges_of_rates() -> None:
    durations = {59.4: "0:59", 59.6: "1:00", 3599.9: "1:00:00", 86400: "24:00:00"}
    assert {seconds: text.format_duration(seconds) for seconds in durations} == durations
    cells = {0.000123456: "0.0001235", 28_000.3: "28000", 28_000: "28000", None: ""}
    assert {value: format_cell(value) for value in cells} == cells
    minutes = {0.01234: "0.0123", 99.4: "99.4", 1222.7: "1223", None: ""}
    assert {value: text.three_digits(value) for value in minutes} == minutes
    ranges = {(0.1, 0.1): "0.1", (0.0, 0.0): "0", (3.84, 0.0336): "3.84 to 0.0336"}
    assert {rates: text.format_lr_range(rates) for rates in ranges} == ranges


def test_numbers_of_an_epoch_of_days_that_diverges_stay_apart() -> None:
    epoch = make_epoch(top5=12.5, seconds=100_800.0, train_loss=1_234_567.0)
    cells = text.epoch_line(epoch).split()
    assert len(cells) == len(text.EPOCH_COLUMNS) and {"100800", "1234567"} <= set(cells)


def test_epoch_that_was_done_again_after_a_loss_has_another_line() -> None:
    def rows(*places: tuple[int, int]) -> list[EpochRow]:
        at = {"time": 0.0, "step": 1, "images": 8}
        return [EpochRow(**{**EPOCH_FIELDS, **at, "attempt": attempt, "epoch": epoch}) for attempt, epoch in places]

    shown: set[tuple[int, int]] = set()
    header, *lines = progress.new_epoch_lines(rows((1, 1), (1, 2)), shown)
    assert header == text.epoch_header() and [line.split()[0] for line in lines] == ["1", "2"]
    assert progress.new_epoch_lines(rows((1, 1), (1, 2)), shown) == []
    lines = progress.new_epoch_lines(rows((1, 1), (2, 2), (2, 3)), shown)
    assert [line.split()[0] for line in lines] == ["2", "3"]


def test_command_is_not_called_a_recipe(hand_made: Any, capsys: Any) -> None:
    own = hand_made("job-1", workload=Command(argv=["python", "train.py"], name="mine")).job.status()
    trained = hand_made("job-2").job.status()
    status.show_status(own, {}, [])
    lines = capsys.readouterr().out.splitlines()
    assert "script             mine" in lines and not [line for line in lines if line.startswith(("recipe", "work"))]
    for jobs, title in (([own], "command"), ([trained], "recipe"), ([own, trained], "recipe/command")):
        status.show_jobs({job.job: job for job in jobs})
        assert capsys.readouterr().out.split()[1] == title


def test_a_note_of_several_machines_is_shown_once_below_them(capsys: Any) -> None:
    machines = {f"{number}": replace(pictured_jobs.machine_row(number), notes=("no GPU",)) for number in range(3)}
    status.show_machines(machines)
    *table, notes, reason = capsys.readouterr().out.splitlines()
    assert len(table) == 5 and notes == "machines 0, 1: no GPU" and reason.startswith("machine 2 (203.0.113.23): no h")


def test_names_that_users_gave_their_jobs_are_shown(hand_made: Any, capsys: Any) -> None:
    hand_made("job-1", given_name="wide.2")
    statuses = {job.name: job.status() for job in [hand_made("job-2").job, *store.all_jobs()[:1]]}
    status.show_jobs(statuses)
    heading, _, unnamed, named = capsys.readouterr().out.splitlines()
    assert heading.split()[:3] == ["job", "name", "recipe"]
    assert unnamed.split()[:2] == ["job-2", "tiny"] and named.split()[:3] == ["job-1", "wide.2", "tiny"]
    status.show_status(statuses["job-1"], {}, [])
    assert capsys.readouterr().out.splitlines()[:2] == ["job                job-1", "name               wide.2"]
    assert collect_facts(store.find("wide.2")).job == "job-1 wide.2"


def test_show_timeline_of_many_attempts_prints_the_last_with_their_day(capsys: Any) -> None:
    attempts = [
        AttemptRow(attempt=number, at=1e9 + 7200 * number, machines=("0",), first_step=number - 32, reason="lost")
        for number in range(1, 50)
    ]
    attempts.append(replace(attempts[-1], attempt=50, pause=1.52, steps_lost=0, in_place=True))
    status.show_timeline(attempts)
    first_line, _, _, *rows = capsys.readouterr().out.splitlines()
    assert first_line == "the last 20 of 50 attempts; all: imgnet-cluster status JOB -o json"
    assert [int(row.split()[0]) for row in rows] == [*range(31, 51)]
    assert [row.split()[6] for row in rows[:3]] == ["0", "0", "1"], "no step -1"
    assert rows[-1].split()[7:] == ["1.5", "s", "in", "place", "0", "lost"]
    assert time.strftime(" %m-%d %H:%M %Z ", time.localtime(1e9 + 7200 * 31)) in rows[0]
