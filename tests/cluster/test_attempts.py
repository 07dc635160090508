"""Attempt files: one winner, the newest whole checkpoint, and a fence against those who write late."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster import attempts

Fixture = Any


def propose(folder: Path, *members: str) -> attempts.Attempt:
    return attempts.propose(folder, members or ("0",), "test")


def test_the_first_attempt_begins_at_the_beginning(tmp_path: Path) -> None:
    assert attempts.newest(tmp_path) is None
    first = propose(tmp_path, "0", "1")
    assert (first.number, first.resume, first.members) == (1, "", ("0", "1"))
    assert attempts.newest(tmp_path) == first


def test_the_next_one_resumes_from_the_newest_checkpoint_of_the_one_before(hand_made: Fixture) -> None:
    run = hand_made()
    propose(run.folders.shared)
    for step in (8, 16, 100):
        newest = run.checkpoint(1, step)
    second = propose(run.folders.shared)
    assert (second.number, second.resume) == (2, newest)
    run.checkpoint(2, 104)
    assert propose(run.folders.shared).resume == "checkpoints/000002/step-00000104.pt"


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes() + b"x"),
        lambda path: path.write_bytes(path.read_bytes()[:-1] + b"x"),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"not one of ours"),
        lambda path: path.rename(path.with_name("." + path.name)),
        lambda path: (path.unlink(), path.mkdir()),
    ],
    ids=["cut", "longer", "changed", "empty", "foreign", "never renamed", "a folder"],
)
def test_a_damaged_checkpoint_is_passed_over(hand_made: Fixture, damage: Callable[[Path], Any]) -> None:
    run = hand_made()
    propose(run.folders.shared)
    whole = run.checkpoint(1, 8)
    damage(run.folders.shared / run.checkpoint(1, 16))
    assert propose(run.folders.shared).resume == whole


def test_an_attempt_that_saved_nothing_hands_on_what_it_began_with(hand_made: Fixture) -> None:
    run = hand_made()
    assert propose(run.folders.shared).resume == propose(run.folders.shared).resume == ""
    saved = run.checkpoint(2, 8)
    assert [propose(run.folders.shared).resume for _ in range(3)] == [saved] * 3


def test_what_an_older_attempt_writes_late_is_never_used(hand_made: Fixture) -> None:
    run = hand_made()
    propose(run.folders.shared)
    saved = run.checkpoint(1, 8)
    assert propose(run.folders.shared).resume == saved
    run.checkpoint(1, 999)
    assert propose(run.folders.shared).resume == saved
    own = run.checkpoint(3, 16)
    run.checkpoint(2, 999)
    assert propose(run.folders.shared).resume == own


def test_an_attempt_once_made_is_never_changed(tmp_path: Path) -> None:
    made = [propose(tmp_path, f"machine {number}") for number in range(12)]
    assert [one.number for one in made] == list(range(1, 13))
    files = sorted((tmp_path / "attempts").iterdir())
    assert [json.loads(one.read_text())["members"] for one in files] == [list(one.members) for one in made]
    assert attempts.newest(tmp_path) == made[-1]


def test_of_many_who_propose_at_once_one_wins_and_all_obey(tmp_path: Path, crowd: Callable[..., list[Any]]) -> None:
    def one(number: int) -> list[attempts.Attempt]:
        return [propose(tmp_path, str(number)) for _ in range(40)]

    said = [attempt for many in crowd(4, one) for attempt in many]
    files = sorted((tmp_path / "attempts").iterdir())
    made = {int(path.stem): json.loads(path.read_text())["members"] for path in files}
    assert sorted(made) == list(range(1, len(made) + 1))
    assert all(list(attempt.members) == made[attempt.number] for attempt in said)
    assert not [path for path in tmp_path.rglob(".*")], "a temporary file was left"
