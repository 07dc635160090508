"""Tests of the progress bar: a line for every 10 percent, and a bar on a terminal."""

import contextlib
import os
import pty
import subprocess
import sys

import pytest

from cluster.display.progress_bar import ProgressBar


def test_progress_bar_without_terminal_prints_a_line_per_ten_percent(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar("drawing [x]", lambda count: f"{count} MB") as progress:
        for done in range(301):
            progress(done, 300)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"drawing [x]: {30 * step} MB of 300 MB ({10 * step} %)" for step in range(11)]


def test_progress_bar_on_terminal_is_one_line_and_keeps_other_output() -> None:
    program = """
import sys
from cluster.display.progress_bar import ProgressBar
with ProgressBar("drawing [x]") as progress:
    for done in range(301):
        progress(done, 300)
        if done == 150:
            print("a note", file=sys.stderr)
            print("a result")
"""
    parent, child = pty.openpty()
    shown = b""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=child, env={**os.environ, "TERM": "xterm"}
    ) as process:
        os.close(child)
        with contextlib.suppress(OSError):  # Linux reports in this way that the program has closed the terminal
            while chunk := os.read(parent, 1 << 16):
                shown += chunk
        os.close(parent)
        assert process.stdout and process.stdout.read() == b"a result\n" and process.wait() == 0
    text = shown.decode()
    assert "drawing [x]" in text and "a note" in text and "300 of 300 (100 %)" in text
    assert text.count("\n") == 2  # after the note, and after the bar
