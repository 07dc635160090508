"""What a person sees of numbers and tables."""

from typing import Any

import pytest

from cluster.display import status, tables
from train.metrics import text

Fixture = Any


@pytest.mark.parametrize(
    "seconds, shown",
    [
        (0, "0:00"),
        (59.4, "0:59"),
        (59.6, "1:00"),
        (61, "1:01"),
        (3599, "59:59"),
        (3599.9, "1:00:00"),
        (86400, "24:00:00"),
    ],
)
def test_a_time_is_minutes_and_seconds_and_hours_when_there_are_any(seconds: float, shown: str) -> None:
    assert text.format_duration(seconds) == shown


@pytest.mark.parametrize(
    "pair, shown", [((1.0, 2.0), "1 to 2"), ((0.1, 0.1), "0.1"), ((3.84, 0.0336), "3.84 to 0.0336"), ((0.0, 0.0), "0")]
)
def test_a_rate_is_one_number_or_its_two_ends(pair: tuple[float, float], shown: str) -> None:
    assert text.format_lr_range(pair) == text.format_lr_range(pair, max(pair)) == shown


def test_the_peak_of_a_cycle_stands_between_its_ends() -> None:
    assert text.format_lr_range((0.002, 2e-7), 0.05) == "0.002 to 0.05 to 2e-07"


def test_a_table_has_a_line_for_each_row_and_numbers_to_the_right(capsys: pytest.CaptureFixture[str]) -> None:
    tables.print_table(
        ("job", "recipe", "state", "top1"), [("job-1", "a", "done", 98.76543), ("job-22", "[b]", "failed", None)]
    )
    out = capsys.readouterr().out
    lines = [line.rstrip() for line in out.splitlines() if line.strip()]
    assert lines[0].split() == ["job", "recipe", "state", "top1"]
    assert [line.split() for line in lines[2:]] == [["job-1", "a", "done", "98.77"], ["job-22", "[b]", "failed"]]
    assert "\x1b" not in out


def test_a_wide_table_is_not_cut_off_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    tables.print_table(("name", "value"), [("n" * 60, "v" * 60)])
    out = capsys.readouterr().out
    assert "n" * 60 in out and "v" * 60 in out and "…" not in out


def test_no_rows_are_a_head_only(capsys: pytest.CaptureFixture[str]) -> None:
    tables.print_table(("job", "state"), [])
    assert "job" in capsys.readouterr().out


def test_a_plan_shows_what_a_paper_would(finished: Fixture) -> None:
    ran = finished.cli("plan", finished.recipe(3), "--procs", "2")
    assert ran.code == 0 and ran.err == ""
    for word in (
        "global batch",
        "rate/256",
        "steps",
        "note: rates are stated for 1 GPU",
        "12 steps over 60 images",
    ):
        assert word in ran.out
    assert "0-3" in ran.out and "full" in ran.out and "square" in ran.out


def test_long_runs_and_great_speeds_are_shown_whole(capsys: Any) -> None:
    said = {"created": 0.0, "seconds": 12_600.0, "images_per_second": 401_234.5, "top1": 76.1234, "lr": 0.000123456}
    status.show_status(said, {}, [])
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert (shown["seconds"], shown["images_per_second"]) == ("3:30:00", "401234")
    assert (shown["top1"], shown["lr"]) == ("76.12", "0.0001235")
