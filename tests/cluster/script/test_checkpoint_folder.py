from collections.abc import Iterator
from pathlib import Path

import pytest
from support.waiting import wait_for

from cluster.script import checkpoint_folder, snapshot
from cluster.script.checkpoint_folder import REST_SECONDS, RESTLESS_SECONDS, CheckpointFolder, FolderPhase


class Bed:
    """A checkpoint folder with a clock that the test sets."""

    def __init__(self, path: Path) -> None:
        self.folder = path / "checkpoints"
        self.shared = path / "shared"
        self.shared.mkdir()
        self.now = 100.0
        self.objects: list[CheckpointFolder] = []

    def start(self, attempt: int = 1, resume: str = "", is_writer: bool = True) -> CheckpointFolder:
        previous = self.objects[-1] if self.objects else None
        begun = CheckpointFolder(self.folder, self.shared, attempt, resume, is_writer, previous, lambda: self.now)
        self.objects.append(begun)
        wait_for(lambda: begun.phase == FolderPhase.FOLLOWING)
        return begun

    def write(self, content: str) -> None:
        (self.folder / "model.pt").write_text(content)

    def copies(self, attempt: int = 1) -> list[str]:
        return [(path / "model.pt").read_text() for path in snapshot.versions(self.shared, attempt)]


@pytest.fixture
def bed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bed]:
    monkeypatch.setattr(checkpoint_folder, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(checkpoint_folder, "RETRY_SECONDS", 0.01)
    bed = Bed(tmp_path)
    yield bed
    for begun in bed.objects:
        begun.finish(was_graceful=False)
        assert begun.wait(60)


def wait_for_scan(begun: CheckpointFolder) -> None:
    tree = snapshot.scan(begun.folder)
    wait_for(lambda: begun._tree == tree)


def test_folder_that_never_rests_is_copied_when_no_file_is_open(bed: Bed) -> None:
    begun = bed.start()
    with (bed.folder / "model.pt").open("w") as file:
        file.write("first")
        file.flush()
        wait_for_scan(begun)
        begun._changed_at = bed.now + RESTLESS_SECONDS  # it changes all the time
        bed.now += RESTLESS_SECONDS
        assert not begun.is_copy_due() and not bed.copies()
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


def fail(*_: object) -> Path:
    raise OSError(28, "No space left on device", "model.pt")


def test_version_that_cannot_be_read_is_a_problem_and_not_an_empty_folder(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "restore", fail)
    begun = CheckpointFolder(bed.folder, bed.shared, 2, "checkpoints/000002/resume-00000001-ab", True)
    assert begun.wait(60) and not begun.is_restored
    assert begun.problem == "the checkpoint folder cannot be restored: model.pt: No space left on device"


def test_folder_at_rest_is_copied_once_and_a_failed_copy_is_tried_again(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = snapshot.publish
    monkeypatch.setattr(snapshot, "publish", fail)
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
