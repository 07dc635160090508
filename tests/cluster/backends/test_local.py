"""The backend of this computer: which window of the tmux session a command shows."""

from collections.abc import Callable
from typing import Any

import pytest

from cluster.connectors import tmux

Fixture = Any


@pytest.mark.parametrize(
    ("windows", "target"),
    [
        ([], "=job-1"),
        (["agent-0"], "=job-1:agent-0"),
        (["agent-1", "train-1"], "=job-1"),
        (["agent-0", "train-0", "train-1"], "=job-1:train-0"),
    ],
)
def test_attach_shows_a_window_of_the_machine_that_exists(
    sandbox: Fixture, hand_made: Callable[..., Any], windows: list[str], target: str
) -> None:
    """A machine has a trainer's window once it trains, and none for a moment before its agent starts."""
    run = hand_made(machines=2)
    tmux.start_session("job-1", run.run_folder.path, "supervisor", ["sleep", "600"])
    for window in windows:
        tmux.add_window("job-1", window, ["sleep", "600"])
    assert run.job.backend.attach_command("0")[-1] == target
    tmux.kill_session("job-1", run.run_folder.path)
