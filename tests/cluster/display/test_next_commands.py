"""The commands that are printed when a job has ended: they help in its state and work in this shell."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.display import next_commands
from cluster.state.states import JobState
from cluster.state.status import infer_end_state

Fixture = Any
LAUNCH = "imgnet-cluster launch --local 'my recipe.py'"


def printed(run: Any, capsys: pytest.CaptureFixture[str]) -> str:
    """End the job of a run folder as its files say, and return the commands that are printed."""
    run.job.refresh()
    assert run.job.result
    next_commands.print_commands_after(run.job, run.job.result)
    return capsys.readouterr().out


@pytest.fixture
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell finds the program."""
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")


def test_failure_before_the_first_save_is_launched_again(
    hand_made: Fixture, capsys: pytest.CaptureFixture[str], on_path: None
) -> None:
    run = hand_made(command=LAUNCH)
    run.write_status("failed", reason="own.py has no loss", ended=True)
    shown = printed(run, capsys)
    assert f"  fix it, then: {LAUNCH}\n" in shown and "resume" not in shown
    assert "curves" not in shown and "report" not in shown, "there is no step that they could show"


@pytest.mark.parametrize("fault", ["own", "input"])
def test_failure_after_a_save_is_resumed_unless_the_input_is_wrong(
    hand_made: Fixture, capsys: pytest.CaptureFixture[str], on_path: None, fault: str
) -> None:
    run = hand_made(command=LAUNCH)
    run.write_checkpoint(1, 40)
    run.write_attempt(1, "0.a", reason="start")
    run.write_attempt(2, reason="the loss is not a number", end_state="failed", fault=fault)
    run.write_status("failed", reason="the loss is not a number", ended=True, step=50)
    shown = printed(run, capsys)
    assert ("  continue    imgnet-cluster resume job-1\n" in shown) == (fault == "own")
    assert (f"  fix it, then: {LAUNCH}\n" in shown) == (fault == "input")
    assert "  curves      imgnet-cluster tensorboard job-1\n" in shown
    assert json.loads(run.run_folder.result_path.read_text())["is_input_wrong"] == (fault == "input")


def test_stopped_job_is_resumed(hand_made: Fixture, capsys: pytest.CaptureFixture[str], on_path: None) -> None:
    run = hand_made()
    run.write_status("stopped", reason="stopped by the user", ended=True)
    assert infer_end_state(run.job.run) == (JobState.STOPPED, "stopped by the user")
    assert "  start again imgnet-cluster resume job-1  (nothing was saved yet)\n" in printed(run, capsys)
    run.write_checkpoint(1, 8)
    assert "  continue    imgnet-cluster resume job-1\n" in printed(run, capsys)


def test_job_launched_from_python_names_its_recipe(
    hand_made: Fixture, capsys: pytest.CaptureFixture[str], on_path: None
) -> None:
    run = hand_made(recipe_file="own.py")
    run.write_status("failed", reason="no such data", ended=True)
    assert "  fix it, then: imgnet-cluster launch own.py\n" in printed(run, capsys)


def test_shell_without_the_program_is_told_how_to_find_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make demo` calls the program by its path."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    monkeypatch.setattr("shutil.which", lambda name: None)
    next_commands.print_activation()
    assert capsys.readouterr().out == "", "there is nothing to activate"
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").touch()
    next_commands.print_activation()
    assert f". {tmp_path}/.venv/bin/activate" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    next_commands.print_activation()
    assert "  first       . .venv/bin/activate " in capsys.readouterr().out


def test_keys_that_leave_a_session_are_right_in_a_tmux_of_ones_own(
    hand_made: Fixture, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = hand_made().job
    for variable, keys in (("", "Ctrl-b d"), ("/tmp/tmux-0/default,1,0", "Ctrl-b Ctrl-b d")):
        monkeypatch.setenv("TMUX", variable)
        next_commands.print_next_commands(job)
        assert f"(detach with {keys}, the job continues)" in capsys.readouterr().out
