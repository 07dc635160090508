"""The tmux windows of a running agent, on a real tmux server."""

from pathlib import Path
from typing import Any

import pytest

from cluster.agent.tmux_windows import TmuxWindows
from cluster.connectors import tmux

Fixture = Any


@pytest.mark.parametrize("closed_window", ["train", "gpu"])
def test_closed_window_is_opened_again_and_the_other_stays(
    sandbox: Fixture, tmp_path: Path, closed_window: str
) -> None:
    windows = TmuxWindows("job-1", tmp_path)
    windows._open_missing()
    assert sorted(tmux.window_names("job-1")) == ["agent", "gpu", "train"]
    sandbox.tmux("kill-window", "-t", f"=job-1:{closed_window}")
    for _ in range(2):
        windows._open_missing()
        assert sorted(tmux.window_names("job-1")) == ["agent", "gpu", "train"]


def test_session_of_another_run_folder_gets_no_window(
    sandbox: Fixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(tmux.OWNER_VARIABLE, "/runs/job-1")
    tmux.start_session("job-1", Path("/elsewhere/job-1"), "agent", ["sleep", "1000"])
    TmuxWindows("job-1", tmp_path)._open_missing()
    assert tmux.window_names("job-1") == ["agent"]
