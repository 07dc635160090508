"""The folder for temporary files of an agent's trainers, and which abandoned ones an agent removes."""

import fcntl
import os
from pathlib import Path

import pytest

from cluster.agent import temp_folder
from cluster.agent.temp_folder import TempFolder, remove_abandoned_folders


def test_folder_is_hidden_private_and_removed_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(temp_folder, "DEFAULT_PARENT", str(tmp_path / "missing"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing too"))
    folder = TempFolder(tmp_path)
    assert folder.path.parent == tmp_path and folder.path.name.startswith(".imgnet-agent-")
    assert folder.path.stat().st_mode & 0o777 == 0o700
    remove_abandoned_folders(tmp_path)
    assert folder.path.is_dir(), "its agent lives"
    handle = os.open(folder.path, os.O_RDONLY | os.O_DIRECTORY)
    with pytest.raises(BlockingIOError):  # so systemd-tmpfiles asks whether it may remove what is old
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    os.close(handle)
    folder.remove()
    assert list(tmp_path.iterdir()) == []


def test_only_own_folders_without_a_lock_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("data", ".imgnet-agent-dead", ".imgnet-agent-held"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "torch_socket").write_text("x")
    (tmp_path / ".imgnet-agent-link").symlink_to(tmp_path / "data")
    (tmp_path / ".imgnet-agent-file").touch()
    folders = {*tmp_path.iterdir()}
    handle = os.open(tmp_path / ".imgnet-agent-held", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: os.geteuid() + 1)
        remove_abandoned_folders(tmp_path)
    assert {*tmp_path.iterdir()} == folders, "another user's"
    remove_abandoned_folders(tmp_path)
    os.close(handle)
    assert {*tmp_path.iterdir()} == folders - {tmp_path / ".imgnet-agent-dead"}
    assert (tmp_path / "data/torch_socket").exists()
