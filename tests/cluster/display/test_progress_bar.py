"""Tests of the progress bar: a line for every 10 percent, and a bar on a terminal."""

import sys

import pytest
from rich.console import Console

from cluster.display import progress_bar
from cluster.display.progress_bar import ProgressBar


def test_progress_bar_without_terminal_prints_a_line_per_ten_percent(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar("drawing [x]", lambda count: f"{count} MB") as progress:
        for done in range(301):
            progress(done, 300)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"drawing [x]: {30 * step} MB of 300 MB ({10 * step} %)" for step in range(11)]


def test_progress_bar_on_terminal_is_one_line_and_keeps_other_output(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(progress_bar, "console", lambda **_: Console(stderr=True, force_terminal=True))
    with ProgressBar("drawing [x]") as progress:
        for done in range(301):
            progress(done, 300)
            if done == 150:
                print("a note", file=sys.stderr)
                print("a result")
    captured = capsys.readouterr()
    assert captured.out == "a result\n"
    assert "drawing [x]" in captured.err and "a note" in captured.err and "300 of 300 (100 %)" in captured.err
    assert captured.err.count("\n") == 2  # after the note, and after the bar
