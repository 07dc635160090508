"""The backend of this computer: its shares of the GPUs, and which window of the tmux session a command shows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.connectors import tmux
from cluster.state.run_folder import RunFolder


@pytest.mark.parametrize(("gpus", "shares"), [
    (("0", "1", "GPU-5", "7"), ["CUDA_VISIBLE_DEVICES=0,1", "CUDA_VISIBLE_DEVICES=GPU-5,7"]),
    ((), ["CUDA_VISIBLE_DEVICES="] * 2),
    (None, [""] * 2),
])  # fmt: skip
def test_each_machine_sees_its_share_of_the_gpus(
    sandbox: Any,
    hand_made: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    gpus: tuple[str, ...] | None,
    shares: list[str],
) -> None:
    """LOCAL_RANK begins at 0 on each machine, and is the index of the GPU that a trainer takes."""
    run = hand_made(machines=2, procs=2, gpus_of_computer=gpus)
    run.run_folder.launch_path.write_text("started")
    started: list[list[str]] = []
    monkeypatch.setattr(tmux, "is_owned_by", lambda *_: True)
    monkeypatch.setattr(tmux, "add_window", lambda _, window, argv, **__: started.append(argv))
    for machine in ("0", "1"):
        run.job.backend.replace(machine)
    variables = [" ".join(word for word in argv if word.startswith("CUDA_VISIBLE_DEVICES=")) for argv in started]
    assert variables == shares


@pytest.mark.parametrize(("windows", "target"), [
    ([], ""),
    (["agent-0"], ":agent-0"),
    (["agent-1", "train-1"], ""),
    (["agent-0", "train-0", "train-1"], ":train-0"),
])  # fmt: skip
def test_attach_shows_a_window_of_the_machine_that_exists(
    sandbox: Any, hand_made: Callable[..., Any], tmp_path: Path, windows: list[str], target: str
) -> None:
    """A machine has a trainer's window once it trains, and none for a moment before its agent starts.

    The command that started the session may have come to the run folder through a link.
    """
    run = hand_made(machines=2)
    (tmp_path / "link").symlink_to(run.run_folder.path.parent)
    linked = RunFolder(tmp_path / "link" / run.run_folder.path.name)
    tmux.start_session(linked.tmux_session, linked.path, "supervisor", ["sleep", "600"])
    for window in windows:
        tmux.add_window(run.run_folder.tmux_session, window, ["sleep", "600"])
    assert run.job.backend.attach_command("0")[-1] == f"={run.run_folder.tmux_session}{target}"
    tmux.kill_session(run.run_folder.tmux_session, run.run_folder.path)
