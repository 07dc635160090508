"""What reaches the terminal: no control character of a machine, and the color of the command line all the same."""

import io
import os
import re
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.cli.inspect import LogPrinter
from cluster.display import tables, terminal

Fixture = Any
HOSTILE = "a\x1b]0;title\x07b\x1b[2Jc\x1b]52;c;cm0=\x1b\\d\re\x1b[8mf\x9b31mg\u202eh\x9d0;t\x9ci\x08j\x7fk\ud800l\x1bcm"
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def test_clean_removes_sequences_and_keeps_newlines_and_tabs() -> None:
    assert terminal.clean(HOSTILE) == "abcdefghijklm"
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
        tables.print_table(["name"], [[HOSTILE]])
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


def test_output_after_the_reader_has_gone_is_discarded() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    stream = terminal.TerminalStream(os.fdopen(writer, "w", buffering=1))
    for _ in range(3):
        assert stream.write("a line\n") == 7
    stream.flush()
    stream.stream.close()
