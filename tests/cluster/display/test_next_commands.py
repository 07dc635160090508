"""The commands that are printed when a job has ended: they help in its state and work in this shell."""

import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.display import progress

LAUNCH = "imgnet-cluster launch --local 'my recipe.py'"


@pytest.mark.parametrize(("state", "fault", "steps", "has_saved", "expected", "unexpected"), [
    ("failed", "own", None, False, f"  fix it, then: {LAUNCH}\n", "curves"),  # there is no step to show
    ("failed", "own", 50, True, "  continue    imgnet-cluster resume job-1\n", "fix it"),
    ("failed", "input", 50, True, f"  fix it, then: {LAUNCH}\n", "resume"),
    ("stopped", "", None, False, "  start again imgnet-cluster resume job-1  (nothing was saved yet)\n", "fix it"),
    ("stopped", "", 8, True, "  continue    imgnet-cluster resume job-1\n", "fix it"),
])  # fmt: skip
def test_commands_after_the_end_fit_the_state(
    hand_made: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    state: str,
    fault: str,
    steps: int | None,
    has_saved: bool,
    expected: str,
    unexpected: str,
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    run = hand_made(command=LAUNCH)
    run.write_attempt(1, "0.a", reason="start")
    if has_saved:
        run.write_checkpoint(1, 8)
    if fault:
        run.write_attempt(2, reason="the loss is not a number", end_state=state, fault=fault)
    run.write_status(state, reason="the loss is not a number", ended=True, step=steps)
    run.job.refresh()
    assert run.job.result and run.job.result.is_input_wrong == (fault == "input")
    progress.print_commands_after(run.job, run.job.result)
    shown = capsys.readouterr().out
    assert expected in shown and unexpected not in shown
    assert ("  curves      imgnet-cluster tensorboard job-1\n" in shown) == bool(steps)


def test_shell_without_the_program_is_told_how_to_find_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make demo` calls the program by its path."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    monkeypatch.setattr("shutil.which", lambda name: None)
    progress.print_activation()
    assert capsys.readouterr().out == "", "there is nothing to activate"
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").touch()
    progress.print_activation()
    assert f". {tmp_path}/.venv/bin/activate" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    progress.print_activation()
    assert "  first       . .venv/bin/activate " in capsys.readouterr().out


def test_keys_that_leave_a_session_are_right_in_a_tmux_of_ones_own(
    hand_made: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = hand_made().job
    for variable, keys in (("", "Ctrl-b d"), ("/tmp/tmux-0/default,1,0", "Ctrl-b Ctrl-b d")):
        monkeypatch.setenv("TMUX", variable)
        progress.print_next_commands(job)
        assert f"(detach with {keys}, the job continues)" in capsys.readouterr().out
