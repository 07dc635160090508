"""The folder for temporary files of an agent's trainers, and which abandoned ones an agent removes."""

import fcntl
import os
from pathlib import Path

import pytest

from cluster.agent import temp_folder
from cluster.agent.temp_folder import TempFolder, remove_abandoned_folders


def abandoned_folder(parent: Path, name: str = "dead") -> Path:
    """Make the files that a killed agent leaves behind."""
    folder = parent / f"{temp_folder.PREFIX}{name}"
    folder.mkdir()
    (folder / temp_folder.LOCK_FILE).touch()
    (folder / "torch_socket").write_text("x")
    return folder


def test_folder_is_hidden_private_and_removed_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(temp_folder, "DEFAULT_PARENT", str(tmp_path / "missing"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing too"))
    folder = TempFolder(tmp_path)
    assert folder.path.parent == tmp_path and folder.path.name.startswith(".imgnet-agent-")
    assert folder.path.stat().st_mode & 0o777 == 0o700
    remove_abandoned_folders(tmp_path)
    assert folder.path.is_dir(), "its agent lives"
    folder.remove()
    assert list(tmp_path.iterdir()) == []


def test_only_own_folders_with_a_free_lock_of_a_regular_file_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "data"
    target.mkdir()
    (target / temp_folder.LOCK_FILE).touch()
    (tmp_path / ".imgnet-agent-link").symlink_to(target)
    linked_lock = tmp_path / ".imgnet-agent-linked"
    linked_lock.mkdir()
    (linked_lock / temp_folder.LOCK_FILE).symlink_to(target / temp_folder.LOCK_FILE)
    fifo = tmp_path / ".imgnet-agent-fifo"
    fifo.mkdir()
    os.mkfifo(fifo / temp_folder.LOCK_FILE)
    users_folder = tmp_path / ".imgnet-agent-notes"
    users_folder.mkdir()
    held = abandoned_folder(tmp_path, "held")
    leftover = abandoned_folder(tmp_path)
    with (held / temp_folder.LOCK_FILE).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with monkeypatch.context() as patch:
            patch.setattr(os, "getuid", lambda: os.geteuid() + 1)
            remove_abandoned_folders(tmp_path)
            assert leftover.exists()
        remove_abandoned_folders(tmp_path)
    assert not leftover.exists()
    kept = (target, linked_lock, fifo, users_folder, held, tmp_path / ".imgnet-agent-link")
    assert all(path.exists() for path in kept)
