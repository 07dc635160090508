"""The progress of machines that are being set up: what is kept, when it is written, and that many may write at once."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.machines import setup_progress as module
from cluster.machines.setup_progress import SetupProgress, timed_step


@pytest.fixture
def board(tmp_path: Path) -> SetupProgress:
    one = SetupProgress(tmp_path / "machines.json")
    one.start_launch("first", {"0": "gpu1", "1": "gpu2"})
    return one


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What is written from now on."""
    found: list[bytes] = []
    real = module.write_atomic

    def replace(path: Path, content: bytes, durable: bool = True) -> None:
        found.append(content)
        real(path, content, durable)

    monkeypatch.setattr(module, "write_atomic", replace)
    return found


def kept(board: SetupProgress) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(board.path.read_text())
    return found


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.01)


def test_it_begins_anew_with_each_launch(board: SetupProgress) -> None:
    board.update("0", reason="no way", python="/usr/bin/python3")
    board.mark_ready()
    board.start_launch("second", {"0": "gpu3"})
    said = kept(board)
    assert said["launch"] == "second" and said["ready"] is False and board.failure_reasons == {}
    assert said["machines"]["0"] == {"host": "gpu3", "step": "", "reason": "", "notes": [], "seconds": {}}


def test_another_process_reads_what_was_written(board: SetupProgress) -> None:
    board.update("1", code="/code/abc")
    board.mark_ready()
    assert SetupProgress(board.path).data["ready"] and SetupProgress(board.path).rows["1"]["code"] == "/code/abc"


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_a_damaged_file_is_as_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "machines.json"
    path.write_text(text)
    assert SetupProgress(path).data == {"launch": "", "machines": {}}


def test_a_step_that_went_well_has_its_seconds_and_again_adds_to_them(board: SetupProgress) -> None:
    for _ in range(2):
        with timed_step(board, "0", "code"):
            assert board.rows["0"]["step"] == "code"
    seconds = board.rows["0"]["seconds"]["code"]
    board.set_step("0", "code", 1.5)
    assert board.rows["0"]["seconds"]["code"] == pytest.approx(seconds + 1.5)


def test_a_step_that_failed_has_none(board: SetupProgress) -> None:
    with pytest.raises(OSError), timed_step(board, "0", "code"):
        raise OSError
    assert board.rows["0"]["step"] == "code" and board.rows["0"]["seconds"] == {}


def test_a_reason_is_written_at_once(board: SetupProgress) -> None:
    board.update("1", reason="its key has changed")
    assert kept(board)["machines"]["1"]["reason"] == "its key has changed"
    assert board.failure_reasons == {"1": "its key has changed"}


def test_the_rest_is_written_in_a_moment(board: SetupProgress) -> None:
    board.set_step("0", "environment")
    until(lambda: kept(board)["machines"]["0"]["step"] == "environment")
    board.set_step("0", "checks")
    until(lambda: kept(board)["machines"]["0"]["step"] == "checks")


def test_many_changes_are_few_writes(
    board: SetupProgress, writes: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WRITE_DELAY_SECONDS", 60.0)
    waiting = set()
    for number in range(500):
        board.set_step("0", "code", number)
        waiting.add(board.pending_write)
    board.mark_ready()
    assert len(waiting) == 1 and len(writes) == 1 and board.pending_write is None
    assert kept(board)["machines"]["0"]["seconds"]["code"] == sum(range(500))


def test_machines_write_at_the_same_time(tmp_path: Path) -> None:
    board = SetupProgress(tmp_path / "machines.json")
    names = [str(number) for number in range(16)]
    board.start_launch("first", dict.fromkeys(names, "gpu"))

    def set_up(name: str) -> None:
        for number in range(30):
            board.set_step(name, "checks", 1.0)
            board.update(name, **{f"value{number}": number})
        board.update(name, reason=f"reason {name}")

    threads = [threading.Thread(target=set_up, args=(name,)) for name in names]
    for one in threads:
        one.start()
    while any(one.is_alive() for one in threads):
        assert kept(board)["launch"] == "first"
    board.mark_ready()
    assert kept(board)["machines"] == board.rows and board.failure_reasons == {name: f"reason {name}" for name in names}
    assert all(row["seconds"]["checks"] == 30 and row["value29"] == 29 for row in board.rows.values())
