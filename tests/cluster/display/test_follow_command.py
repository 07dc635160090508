"""Tests of what the terminal shows of a command of the user: its output, its steps, its attempts, its end."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.display import progress
from cluster.errors import BadInput
from cluster.jobs import checkpoints
from cluster.records import collect_run_data
from train.recipe import Command


@pytest.fixture
def run(hand_made: Any) -> Any:
    made = hand_made(workload=Command(argv=["python", "train.py", "--lr", "0.1"]), machines=2)
    made.write_shared("launch", "second")
    made.write_attempt(1, "0.a", "1.b", reason="start", launch_id="first")
    made.write_attempt(2, "0.a", "1.b", reason="start", launch_id="second")
    return made


@pytest.fixture
def write_log(run: Any) -> Callable[[int, str], Path]:
    """Append to the log of rank 0 in an attempt."""

    def write(attempt: int, text: str) -> Path:
        path: Path = run.run_folder.path / f"logs/{attempt:06d}/rank-0.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", newline="") as file:
            file.write(text)
        return path

    return write


def test_each_line_of_the_present_launch_is_shown_once(run: Any, write_log: Any) -> None:
    write_log(1, "of an earlier launch\n")
    output = progress.CommandOutput(run.job)
    assert output.new_lines() == []
    write_log(2, "one\n\ntwo\nthr")
    assert output.new_lines() == ["one", "", "two"]
    write_log(2, "ee\r10 %\r20 %\n")
    assert output.new_lines() == ["20 %"]
    write_log(2, "without an end")
    run.write_attempt(3, "0.a", reason="machine 1 lost", launch_id="second")
    write_log(3, "again\nlast")
    assert output.new_lines() == ["without an end", "again"]
    assert output.new_lines(is_complete=True) == ["last"]
    assert output.new_lines(is_complete=True) == []


def test_flood_of_output_is_cut(run: Any, write_log: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "MAX_OUTPUT_BYTES", 8)
    write_log(2, "first\nsecond\nthird\n")
    note, *rest = progress.CommandOutput(run.job).new_lines()
    assert note == "... 11 bytes are left out; all: imgnet-cluster logs job-1" and rest == ["d", "third"]


def test_steps_of_a_command_are_beside_the_bar(run: Any) -> None:
    run.write_status("training", attempt=2, phase="running", step=7, launch="second")
    job_status = run.job.status()
    assert progress.progress_text(job_status, since=0.0, first_step=7) == "step 7"
    run.write_status("training", attempt=2, phase="running", step=7, steps=70, epoch=1, launch="second")
    text = progress.progress_text(run.job.status(), since=0.0, first_step=6)
    assert text.startswith("step 7/70  epoch 1  ") and text.endswith(" left")


def test_commands_for_networks_say_that_a_command_has_none(run: Any) -> None:
    for ask in (checkpoints.trained_weights, collect_run_data):
        with pytest.raises(BadInput, match=r"job-1 runs a command of your own.* is in .*/shared/checkpoints$"):
            ask(run.job)


def test_end_of_a_command_names_its_newest_checkpoint_by_a_command_to_type(run: Any, capsys: Any) -> None:
    run.write_shared("checkpoints/000002/resume-00000005-aa7dcea8/model.pt", "x")
    run.job.fail("broken")
    progress.show_outcome(run.job)
    shown = capsys.readouterr().out
    assert "  checkpoints imgnet-cluster pull job-1 " in shown and "aa7dcea8" not in shown
