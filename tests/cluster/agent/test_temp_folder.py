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


def test_only_own_folders_with_a_free_lock_of_a_regular_file_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "data"
    target.mkdir()
    (target / temp_folder.LOCK_FILE).touch()
    (tmp_path / ".imgnet-agent-link").symlink_to(target)
    for name in ("linked", "fifo", "notes", "held", "dead"):
        (tmp_path / f".imgnet-agent-{name}").mkdir()
    (tmp_path / ".imgnet-agent-linked" / temp_folder.LOCK_FILE).symlink_to(target / temp_folder.LOCK_FILE)
    os.mkfifo(tmp_path / ".imgnet-agent-fifo" / temp_folder.LOCK_FILE)
    leftover = tmp_path / ".imgnet-agent-dead"
    (leftover / temp_folder.LOCK_FILE).touch()
    (leftover / "torch_socket").write_text("x")
    folders = {*tmp_path.iterdir()}
    with (tmp_path / ".imgnet-agent-held" / temp_folder.LOCK_FILE).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with monkeypatch.context() as patch:
            patch.setattr(os, "getuid", lambda: os.geteuid() + 1)
            remove_abandoned_folders(tmp_path)
        assert {*tmp_path.iterdir()} == folders, "another user's"
        remove_abandoned_folders(tmp_path)
    assert {*tmp_path.iterdir()} == folders - {leftover} and (target / temp_folder.LOCK_FILE).exists()
