"""The tmux windows of a running agent, on a real tmux server."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from cluster.agent.tmux_windows import TmuxWindows
from cluster.connectors import tmux


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, *more: None if name == "nvidia-smi" else which(name, *more))


def test_ctrl_c_in_a_window_changes_nothing(sandbox: Any, tmp_path: Path) -> None:
    """People press it to leave the session."""
    windows = TmuxWindows("job-1", tmp_path)
    windows.follow_log(tmp_path / "rank-0.log")
    windows.close()
    sandbox.wait_for(lambda: len(tmux.window_names("job-1")) == 3)
    argv = tmux.followed_argv(["sleep", "1000"], tmp_path / "sleep.log")
    tmux.add_window("job-1", "program", argv)
    (tmp_path / "rank-0.log").write_text("the first line\n")
    (tmp_path / "agent.out").write_text("of the agent\n")
    names = ("train", "processes", "agent", "program")

    def screen(window: str) -> str:
        return str(sandbox.tmux("capture-pane", "-p", "-t", f"=job-1:{window}"))

    sandbox.wait_for(lambda: "the first line" in screen("train"))
    for name in names:
        for key in ("C-c", "C-\\", "C-z"):
            sandbox.tmux("send-keys", "-t", f"=job-1:{name}", key)
    with (tmp_path / "rank-0.log").open("a") as log:
        log.write("the second line\n")
    sandbox.wait_for(lambda: "the second line" in screen("train"))
    assert set(tmux.window_names("job-1")) == set(names)
    for pid in sandbox.pids("sleep 1000"):  # the program does not end with its window
        os.kill(pid, signal.SIGKILL)
