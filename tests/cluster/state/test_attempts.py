"""Tests of attempt files: one proposer wins, the newest intact checkpoint is used, late writers do no harm."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.state import attempts
from cluster.state.states import MachineState
from train.tools import sealed_files
from train.tools.sealed_files import read_with_checksum


def propose(folder: Path, *members: str) -> attempts.Attempt:
    attempt = attempts.Attempt(launch_id="now", members=members or ("0.a",), reason="test")
    return attempts.propose(folder, attempts.newest_attempt(folder), attempt)


@pytest.fixture
def run(hand_made: Any) -> Any:
    run = hand_made()
    propose(run.run_folder.shared)
    return run


@pytest.fixture
def shared(run: Any) -> Path:
    folder: Path = run.run_folder.shared
    return folder


def resume_content(run: Any, attempt: attempts.Attempt) -> bytes:
    """Return what an attempt resumes from: b"1 16" is attempt 1's checkpoint of step 16.

    The checkpoint must be a link in the attempt's own folder, named after its step.
    """
    path = run.run_folder.shared / attempt.resume
    assert path.parent.name == f"{attempt.number:06d}" and path.name.startswith(f"resume-{attempt.first_step:08d}-")
    payload = read_with_checksum(path)
    return payload[: len(payload) // 100]


def test_propose_resumes_from_newest_checkpoint_of_previous_attempt(run: Any, shared: Path) -> None:
    for step in (8, 16, 24):
        run.write_checkpoint(1, step)
    run.write_shared("checkpoints/000001/best-00000004.safetensors", "best")
    second = propose(shared)
    for path in (shared / "checkpoints/000001").iterdir():
        path.unlink()  # trainers of an older attempt may live on for a while, and keep two of their own checkpoints
    assert (second.number, second.first_step, resume_content(run, second)) == (2, 24, b"1 24")
    assert resume_content(run, propose(shared)) == b"1 24", "attempt 2 has saved nothing"
    run.write_checkpoint(3, 32)
    run.write_checkpoint(2, 999)  # by machines that were cut off
    run.write_checkpoint(1, 1000)
    fourth = propose(shared)
    assert (fourth.first_step, resume_content(run, fourth)) == (32, b"3 32")
    assert (shared / "checkpoints/000004/best-00000004.safetensors").read_text() == "best"
    folders = sorted(path.name for path in (shared / "checkpoints").iterdir())
    assert folders == ["000003", "000004"], "those of older attempts are deleted"


@pytest.mark.parametrize("damage", [
    lambda path: path.write_bytes(path.read_bytes()[:-1]),
    lambda path: path.write_bytes(path.read_bytes() + b"x"),
    lambda path: path.write_bytes(path.read_bytes()[:-1] + b"x"),
    lambda path: path.write_bytes(b""),
    lambda path: path.write_bytes(b"not one of ours"),
    lambda path: path.rename(path.with_name("." + path.name)),
    lambda path: (path.unlink(), path.mkdir()),
], ids=["cut", "longer", "changed", "empty", "foreign", "never renamed", "a folder"])  # fmt: skip
def test_propose_damaged_checkpoint_is_skipped(run: Any, shared: Path, damage: Callable[[Path], Any]) -> None:
    whole = run.write_checkpoint(1, 8)
    damage(shared / run.write_checkpoint(1, 16))
    second = propose(shared)
    assert resume_content(run, second) == b"1 8" and (shared / second.resume).samefile(shared / whole)


def test_propose_stale_knowledge_returns_newest_attempt(tmp_path: Path) -> None:
    first = propose(tmp_path, "0.a", "1.b")
    assert (first.number, first.resume, first.first_step, first.machine_names) == (1, "", 0, ("0", "1"))
    second = propose(tmp_path, "1.b")
    outdated = attempts.Attempt(launch_id="now", members=("0.a",))
    assert attempts.propose(tmp_path, first, outdated) == attempts.propose(tmp_path, None, outdated) == second
    assert attempts.AttemptHistory(tmp_path).all() == [first, second]


def test_propose_new_launch_continues_numbers_and_checkpoint(run: Any, shared: Path) -> None:
    run.write_checkpoint(1, 8)
    end = attempts.Attempt(launch_id="now", end_state=MachineState.STOPPED)
    attempts.propose(shared, attempts.newest_attempt(shared), end)
    new = attempts.propose(shared, None, attempts.Attempt(launch_id="next", members=("0.new",)))
    assert (new.number, new.launch_id, resume_content(run, new)) == (3, "next", b"1 8")
    again = attempts.Attempt(launch_id="next", members=("1.new",))
    assert attempts.propose(shared, None, again) == new, "neither knew an attempt: the first one wins"


@pytest.mark.parametrize("cause", ["pruned by the old rank 0", "deleted by a faster proposer"])
def test_propose_checkpoint_vanishes_chooses_again(hand_made: Any, monkeypatch: pytest.MonkeyPatch, cause: str) -> None:
    run, is_intact = hand_made(), sealed_files.is_intact
    shared = run.run_folder.shared
    first = propose(shared)
    for step in (8, 16):
        run.write_checkpoint(1, step)
    faster: list[attempts.Attempt] = []

    def choose_then_delete(path: Path) -> bool:
        monkeypatch.setattr(attempts, "is_intact", is_intact)
        assert is_intact(path)
        if cause.startswith("pruned"):
            path.unlink()
            run.write_checkpoint(1, 24)
        else:
            faster.extend([propose(shared, "1.b"), propose(shared, "2.c")])
        return True

    monkeypatch.setattr(attempts, "is_intact", choose_then_delete)
    published = attempts.propose(shared, first, attempts.Attempt(launch_id="now", members=("0.a",)))
    if faster:
        assert published in faster
    else:
        assert (published.members, resume_content(run, published)) == (("0.a",), b"1 24")


@pytest.mark.parametrize("launches", [1, 2])
def test_propose_passes_over_a_checkpoint_that_cannot_be_read(run: Any, shared: Path, launches: int) -> None:
    """Also after the job has ended and was resumed, when the folder that both were saved in is gone.

    Its checksum is right, but the trainers could not read it. Without an earlier one the job ends.
    """
    for step in (8, 16, 24):
        run.write_checkpoint(1, step)
    if launches == 2:
        end = attempts.Attempt(launch_id="now", end_state=MachineState.STOPPED)
        attempts.propose(shared, attempts.newest_attempt(shared), end)
    unreadable = propose(shared)
    assert resume_content(run, unreadable) == b"1 24"
    following = attempts.Attempt(launch_id="now", members=("0.a",), reason="cannot be read", resume_before=24)
    attempt = attempts.propose(shared, unreadable, following)
    assert resume_content(run, attempt) == b"1 16" and attempt.first_step == 16
    assert attempt.reason == "cannot be read; training goes on from step 16"
    last = propose(shared)
    assert resume_content(run, last) == b"1 16"
    ended = attempts.propose(shared, last, replace(following, resume_before=16))
    assert (ended.members, ended.resume, ended.end_state) == ((), "", MachineState.FAILED)
    assert ended.reason.startswith("cannot be read; no checkpoint can be read, all are damaged (of step 16); ")


def test_propose_with_damaged_checkpoints_only_ends_the_job_until_they_are_deleted(run: Any, shared: Path) -> None:
    for step in (8, 16):
        run.write_checkpoint(1, step, whole=False)
    for number, launch_id in ((2, "now"), (3, "next"), (4, "again")):
        attempt = attempts.Attempt(launch_id=launch_id, members=("0.a",), reason="test")
        ended = attempts.propose(shared, attempts.newest_attempt(shared), attempt)
        assert (ended.number, ended.members, ended.end_state) == (number, (), MachineState.FAILED)
        assert "all are damaged (of step 8, 16)" in ended.reason and "does not start again from step 0" in ended.reason
        assert f"delete {shared}/checkpoints to begin again, then type imgnet-cluster resume" in ended.reason
    shutil.rmtree(shared / "checkpoints")
    anew = attempts.Attempt(launch_id="at last", members=("0.a",), reason="test")
    begun = attempts.propose(shared, attempts.newest_attempt(shared), anew)
    assert (begun.members, begun.resume, begun.end_state) == (("0.a",), "", None)


def test_propose_concurrently_has_one_winner(tmp_path: Path, run_in_processes: Callable[..., list[Any]]) -> None:
    def propose_40_times(number: int) -> list[attempts.Attempt]:
        return [propose(tmp_path, f"{number}.x") for _ in range(40)]

    returned = [attempt for process_attempts in run_in_processes(4, propose_40_times) for attempt in process_attempts]
    files = sorted((tmp_path / "attempts").iterdir())
    members_by_number = {int(path.stem): json.loads(path.read_text())["members"] for path in files}
    assert sorted(members_by_number) == list(range(1, len(members_by_number) + 1))
    assert all(list(attempt.members) == members_by_number[attempt.number] for attempt in returned)
    assert not [path for path in tmp_path.rglob(".*")], "a temporary file was left"
