"""Processes as other programs describe them."""

import subprocess

import pytest

from train.tools.process import command_line


def test_command_line_is_whole_in_any_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "C")
    argv = ["sh", "-c", "read -r line", "runs of \xe9t\xe9"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE) as process:
        assert command_line(process.pid) == " ".join(argv)
        assert process.stdin
        process.stdin.close()
    assert command_line(process.pid) == ""
