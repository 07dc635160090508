"""Processes: how other programs describe them, and one that leaves its terminal."""

import os
import pty
import subprocess
import sys

import pytest

from train.tools.process import command_line

QUESTIONS = """
import subprocess
from train.tools.process import leave_terminal

leave_terminal()
for source in ("/dev/tty", "/dev/stdin"):
    print(subprocess.run(["sh", "-c", f"read answer <{source}"], timeout=20).returncode != 0, flush=True)
"""


def test_command_line_is_whole_in_any_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "C")
    argv = ["sh", "-c", "read -r line", "runs of \xe9t\xe9"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE) as process:
        assert command_line(process.pid) == " ".join(argv)
        assert process.stdin
        process.stdin.close()
    assert command_line(process.pid) == ""


def test_program_of_a_process_that_left_its_terminal_cannot_ask() -> None:
    """In tmux nobody would see the question, and the process would wait for ever."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", QUESTIONS])
    text = b""
    try:
        while chunk := os.read(terminal, 4096):
            text += chunk
    except OSError:  # its end, on Linux
        pass
    os.close(terminal)
    assert os.waitpid(pid, 0)[1] == 0 and text.count(b"True") == 2, text.decode()
