import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from support.packed_sets import content as contents
from support.waiting import wait_for

from cluster.script import checkpoint_folder, snapshot
from cluster.script.checkpoint_folder import LOG_SECONDS, REST_SECONDS, RESTLESS_SECONDS, CheckpointFolder


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    (tmp_path / "shared").mkdir()
    return tmp_path / "shared"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    return tmp_path / "folder"


def save(folder: Path, shared: Path, attempt: int = 1) -> Path:
    return snapshot.publish(folder, shared, attempt, snapshot.scan(folder))


def test_publish_and_restore_bring_files_folders_and_inner_links(folder: Path, shared: Path, tmp_path: Path) -> None:
    (folder / "step-1" / "empty").mkdir(parents=True)
    (folder / "step-1" / "model.pt").write_bytes(b"weights")
    (folder / "latest").symlink_to("step-1")
    version = save(folder, shared)
    assert version == shared / "checkpoints/000001/save-00000001"

    other = tmp_path / "other"
    assert snapshot.restore(version, other) == len(b"weights")
    assert contents(other)["step-1/model.pt"] == b"weights"
    assert (other / "latest").readlink() == Path("step-1") and (other / "step-1/empty").is_dir()
    assert snapshot.scan(other).keys() == snapshot.scan(folder).keys()


def test_folders_keep_their_times_when_they_are_restored(folder: Path, shared: Path, tmp_path: Path) -> None:
    for number, name in enumerate(("epoch_2", "epoch_1")):
        (folder / name).mkdir()
        (folder / name / "model.pt").touch()
        os.utime(folder / name, (1000 + number, 1000 + number))
    version = save(folder, shared)
    snapshot.restore(version, tmp_path / "other")
    (folder / "epoch_1" / "late").touch()
    snapshot.restore(version, folder)
    for restored in (folder, tmp_path / "other"):
        assert [(restored / name).stat().st_mtime for name in ("epoch_2", "epoch_1")] == [1000, 1001]


def test_version_is_not_changed_by_writes_in_place(folder: Path, shared: Path) -> None:
    (folder / "model.pt").write_bytes(b"first")
    first = save(folder, shared)
    for name in ("folder", "restored"):
        snapshot.restore(first, folder.with_name(name))
        with (folder.with_name(name) / "model.pt").open("r+b") as file:
            file.write(b"x")
        assert contents(first) == {"model.pt": b"first"}


def test_publish_of_a_folder_that_changes_leaves_nothing(
    folder: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "model.pt").write_bytes(b"weights")
    copy_bytes = snapshot._copy_bytes

    def copy_while_written(source: int, target: int, name: str) -> None:
        copy_bytes(source, target, name)
        with (folder / "model.pt").open("ab") as file:
            file.write(b"x")

    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "_copy_bytes", copy_while_written)
        for is_restless in (False, True):
            with pytest.raises(snapshot.FolderChanged):
                snapshot.publish(folder, shared, 1, snapshot.scan(folder), is_restless)
    tree = snapshot.scan(folder)
    (folder / "model.pt").unlink()
    with pytest.raises(snapshot.FolderChanged):
        snapshot.publish(folder, shared, 1, tree)
    assert not list((shared / "checkpoints/000001").iterdir())


def test_publish_on_a_full_disk_leaves_the_version_before(
    folder: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "model.pt").write_bytes(b"first")
    first = save(folder, shared)
    (folder / "model.pt").write_bytes(b"second")
    monkeypatch.setattr(os, "copy_file_range", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(OSError, match=r"No space left.*model\.pt"):
        save(folder, shared)
    assert [path.name for path in first.parent.iterdir()] == [first.name]
    assert contents(first) == {"model.pt": b"first"}


def test_copy_without_copy_file_range_is_whole(folder: Path, shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "copy_file_range", Mock(side_effect=OSError(errno.EXDEV, "Invalid cross-device link")))
    monkeypatch.setattr(snapshot, "COPY_BYTES", 3)
    (folder / "model.pt").write_bytes(b"0123456789")
    assert contents(save(folder, shared)) == {"model.pt": b"0123456789"}


def test_scan_leaves_out_sockets_fifos_and_links_that_lead_outside(folder: Path) -> None:
    (folder / "inner" / "deep").mkdir(parents=True)
    (folder / "model.pt").touch()
    os.mkfifo(folder / "fifo")
    for path, target in {
        "absolute": "/etc/passwd", "above": "../secret", "inner/up": "../model.pt", "here": ".",
        "inner/deep/top": "../..", "outside": "here/../secret", "far": "inner/deep/top/../../secret",
        "inner/good": "../inner/deep/top",
    }.items():  # fmt: skip
        (folder / path).symlink_to(target)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "socket"))
        found = snapshot.scan(folder).keys()
    assert found == {"here", "inner", "inner/deep", "inner/deep/top", "inner/good", "inner/up", "model.pt"}


@pytest.mark.parametrize("name", ["save-old", "save-00000001-old", f"{snapshot.UNFINISHED_PREFIX}killed"])
def test_unfinished_copy_and_a_copy_that_somebody_made_are_no_versions(folder: Path, shared: Path, name: str) -> None:
    (folder / "model.pt").touch()
    first = save(folder, shared)
    (shared / "checkpoints/000001" / name).mkdir()
    (shared / "checkpoints/000001.bak").mkdir()
    assert snapshot.versions(shared, 1) == [first] and snapshot.newest_version(shared) == first
    linked = snapshot.link_newest(shared, 2)
    assert linked and linked.name.startswith("resume-00000001-")
    assert save(folder, shared).name == "save-00000002" and (shared / "checkpoints/000001" / name).is_dir()


def test_restore_removes_what_the_version_lacks_and_keeps_equal_files(folder: Path, shared: Path) -> None:
    (folder / "model.pt").write_bytes(b"weights")
    version = save(folder, shared)
    inode = (folder / "model.pt").stat().st_ino
    (folder / "late").mkdir()
    (folder / "late" / "half.pt").write_bytes(b"ha")
    os.mkfifo(folder / "fifo")
    (folder / "link").symlink_to("/etc")
    assert snapshot.restore(version, folder) == 0
    assert snapshot.scan(folder).keys() == {"model.pt"} and (folder / "model.pt").stat().st_ino == inode
    assert not (folder / "fifo").exists() and not (folder / "link").is_symlink()
    snapshot.restore(None, folder)
    assert not list(folder.iterdir())


def test_link_newest_takes_what_the_attempt_saved_before_what_it_resumed_from(folder: Path, shared: Path) -> None:
    assert snapshot.link_newest(shared, 1) is None
    (folder / "model.pt").write_bytes(b"first")
    first = save(folder, shared, attempt=1)
    second = snapshot.link_newest(shared, 2)
    assert second and second.parent.name == "000002" and contents(second) == {"model.pt": b"first"}
    assert (second / "model.pt").stat().st_ino == (first / "model.pt").stat().st_ino
    (folder / "model.pt").write_bytes(b"of a machine that was cut off")
    save(folder, shared, attempt=1)
    third = snapshot.link_newest(shared, 3)  # attempt 2 has saved nothing
    assert third and contents(third) == contents(second) == {"model.pt": b"first"}
    (folder / "model.pt").write_bytes(b"newer")
    saved = save(folder, shared, attempt=3)
    assert saved.name == "save-00000002"
    inode = (saved / "model.pt").stat().st_ino
    assert inode != (folder / "model.pt").stat().st_ino
    (folder / "more.pt").write_bytes(b"more")
    saved = save(folder, shared, attempt=3)
    assert (saved / "model.pt").stat().st_ino == inode, "an unchanged file is a link"
    assert [path.name for path in saved.parent.glob("save-*")] == [saved.name], "only the newest is kept"
    fourth = snapshot.link_newest(shared, 4)
    assert fourth and contents(fourth) == {"model.pt": b"newer", "more.pt": b"more"}
    assert snapshot.newest_version(shared) == fourth


def test_publish_refuses_a_link_in_place_of_the_folder(folder: Path, shared: Path, tmp_path: Path) -> None:
    (folder / "model.pt").write_bytes(b"first")
    (tmp_path / "elsewhere").mkdir()
    (shared / "checkpoints").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic link"):
        save(folder, shared)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_link_of_a_script_in_place_of_its_folder_is_replaced_and_what_it_leads_to_stays(
    folder: Path, shared: Path, tmp_path: Path
) -> None:
    (folder / "model.pt").write_bytes(b"first")
    version = save(folder, shared)
    photos, link = tmp_path / "elsewhere/photos", tmp_path / "link"
    photos.parent.mkdir()
    photos.touch()
    link.symlink_to(photos.parent)
    with pytest.raises(OSError, match="a link in its place, which is not followed"):
        snapshot.scan(link)
    for wanted in (None, version):
        snapshot.restore(wanted, link)
    assert contents(link) == {"model.pt": b"first"} and not link.is_symlink() and photos.exists()


class Bed:
    """A checkpoint folder with a clock that the test sets."""

    def __init__(self, folder: Path, shared: Path) -> None:
        self.folder, self.shared = folder, shared
        self.now = 100.0
        self.objects: list[CheckpointFolder] = []

    def start(self, attempt: int = 1, resume: str = "", is_writer: bool = True) -> CheckpointFolder:
        previous = self.objects[-1] if self.objects else None
        begun = CheckpointFolder(self.folder, self.shared, attempt, resume, is_writer, previous, lambda: self.now)
        self.objects.append(begun)
        wait_for(lambda: begun.is_restored)
        return begun

    def write(self, content: str) -> None:
        (self.folder / "model.pt").write_text(content)

    def copies(self, attempt: int = 1) -> list[str]:
        return [(path / "model.pt").read_text() for path in snapshot.versions(self.shared, attempt)]


@pytest.fixture
def bed(tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bed]:
    monkeypatch.setattr(checkpoint_folder, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(checkpoint_folder, "RETRY_SECONDS", 0.01)
    bed = Bed(tmp_path / "checkpoints", shared)
    yield bed
    for begun in bed.objects:
        begun.finish(was_graceful=False)
        assert begun.wait(60)


def wait_for_scan(begun: CheckpointFolder) -> None:
    tree = snapshot.scan(begun.folder)
    wait_for(lambda: begun._tree == tree)


@pytest.mark.parametrize(("name", "seconds"), [("model.pt", 0.0), ("train.log", LOG_SECONDS)])
def test_folder_that_never_rests_is_copied_when_no_file_but_a_log_is_open(bed: Bed, name: str, seconds: float) -> None:
    begun = bed.start()
    bed.write("first")
    with (bed.folder / name).open("a"):
        wait_for_scan(begun)
        begun._changed_at = bed.now + RESTLESS_SECONDS + seconds  # it changes all the time
        bed.now += RESTLESS_SECONDS
        assert not begun.is_copy_due() and not bed.copies(), "the open file may be a checkpoint"
        if seconds:
            bed.now += seconds
            wait_for(lambda: bed.copies() == ["first"])
    wait_for(lambda: bed.copies() == ["first"])


@pytest.mark.parametrize(
    ("is_writer", "was_graceful", "copies"), [(True, True, ["new"]), (True, False, []), (False, True, [])]
)
def test_finish_copies_what_is_new_after_a_graceful_end(
    bed: Bed, is_writer: bool, was_graceful: bool, copies: list[str]
) -> None:
    begun = bed.start(is_writer=is_writer)
    bed.write("new")
    begun.finish(was_graceful)
    assert begun.wait(60) and bed.copies() == copies


def test_next_attempt_begins_with_the_version_and_not_with_the_rest_of_the_folder(bed: Bed) -> None:
    begun = bed.start()
    bed.write("first")
    begun.finish(was_graceful=True)
    begun.wait(60)
    version = snapshot.link_newest(bed.shared, 2)
    assert version
    bed.write("written by a process that was left over")
    bed.start(2, resume=str(version.relative_to(bed.shared)))
    assert (bed.folder / "model.pt").read_text() == "first"
    assert bed.copies(2) == ["first"]


FAILURE = Mock(side_effect=OSError(28, "No space left on device", "model.pt"))


def test_version_that_cannot_be_read_is_a_problem_no_empty_folder(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "restore", FAILURE)
    begun = CheckpointFolder(bed.folder, bed.shared, 2, "checkpoints/000002/resume-00000001-ab", True)
    assert begun.wait(60) and not begun.is_restored
    assert begun.problem == "the checkpoint folder cannot be restored: model.pt: No space left on device"


def test_folder_at_rest_is_copied_once_and_a_failed_copy_again(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    publish = snapshot.publish
    monkeypatch.setattr(snapshot, "publish", FAILURE)
    begun = bed.start()
    bed.write("first")
    wait_for_scan(begun)
    assert not begun.is_copy_due(), "it is not at rest yet"
    bed.now += REST_SECONDS
    wait_for(lambda: begun.problem)
    assert begun.problem == "the checkpoint folder cannot be copied: model.pt: No space left on device"
    monkeypatch.setattr(snapshot, "publish", publish)
    wait_for(lambda: begun.copied == 1)
    assert begun.problem == "" and bed.copies() == ["first"] and not begun.is_copy_due()
