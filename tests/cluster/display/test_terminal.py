"""What reaches the terminal: no control character of a machine, and a progress bar."""

import io
import os
import re
import sys
from pathlib import Path

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from cluster.cli.inspect import PIECE_BYTES, LogPrinter
from cluster.display import tables, terminal

HOSTILE = "a\x1b]0;title\x07b\x1b[2Jc\x1b]52;c;cm0=\x1b\\d\re\x1b[8mf\x9b31mg\u202eh\x9d0;t\x9ci\x08j\x7fk\ud800l\x1bcm"
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def test_clean_removes_sequences_and_keeps_newlines_and_tabs() -> None:
    assert terminal.clean("a\tb\nc °é 漢字 🙂") == "a\tb\nc °é 漢字 🙂"
    assert terminal.clean("\x1b]0;no end\nnext") == "0;no end\nnext"


@given(st.text())
def test_clean_text_has_no_control_characters(text: str) -> None:
    assert not CONTROLS.search(terminal.clean(text))


def test_all_output_within_clean_output_is_clean(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.clean_output():
        print(HOSTILE)
        click.echo(HOSTILE)
        click.echo(HOSTILE, err=True)
        print(HOSTILE, file=sys.stderr)
        tables.print_table([{"name": HOSTILE}])
    captured = capsys.readouterr()
    assert captured.out.count("abcdefghijklm") == 2 and captured.err.count("abcdefghijklm") == 2
    assert not CONTROLS.search(captured.out + captured.err)


def test_log_shows_an_unfinished_line_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.BytesIO()
    stream = io.TextIOWrapper(screen, encoding="utf-8")
    monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdout", stream)
    (tmp_path / "rank-0.log").write_text("reading: 10 %")
    LogPrinter(tmp_path / "rank-0.log").print_new_lines(is_complete=False)
    assert screen.getvalue() == b"reading: 10 %"


def test_log_of_lines_is_read_in_pieces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line without an end, which a machine may send, does not fill the memory."""
    (tmp_path / "agent-0.jsonl").write_bytes(b"x" * (2 * PIECE_BYTES + 1))
    printer = LogPrinter(tmp_path / "agent-0.jsonl")
    for is_complete, count in ((False, 2 * PIECE_BYTES), (True, 1)):
        printer.print_new_lines(is_complete)
        assert capsys.readouterr().out == "x" * count


def test_output_after_the_reader_has_gone_is_discarded() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    stream = terminal.TerminalStream(os.fdopen(writer, "w", buffering=1))
    for _ in range(3):
        assert stream.write("a line\n") == 7
    stream.flush()
    stream.stream.close()


def test_progress_bar_without_terminal_prints_a_line_per_ten_percent(capsys: pytest.CaptureFixture[str]) -> None:
    with tables.ProgressBar("drawing [x]", lambda count: f"{count} MB") as progress:
        for done in range(301):
            progress(done, 300)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"drawing [x]: {30 * step} MB of 300 MB ({10 * step} %)" for step in range(11)]


def test_progress_bar_on_terminal_is_one_line_and_keeps_other_output(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(tables, "console", lambda **_: Console(stderr=True, force_terminal=True))
    with tables.ProgressBar("drawing [x]") as progress:
        for done in range(301):
            progress(done, 300)
            if done == 150:
                print("a note", file=sys.stderr)
                print("a result")
    captured = capsys.readouterr()
    assert captured.out == "a result\n"
    assert "drawing [x]" in captured.err and "a note" in captured.err and "300 of 300 (100 %)" in captured.err
    assert captured.err.count("\n") == 2  # after the note, and after the bar
