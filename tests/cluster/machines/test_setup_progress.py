"""Set-up progress: what is recorded, when it is written, and changes from many threads."""

import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.waiting import wait_for

from cluster.errors import SetupFailed
from cluster.machines import setup_progress as module
from cluster.machines.setup_progress import SetupProgress, fold_by_machine, timed_step
from cluster.state.states import SetupStep
from cluster.state.supervisor_records import MachineSetup, SetupRecord
from train.tools.filesystem import write_atomic
from train.tools.records import decode


@pytest.fixture
def progress(tmp_path: Path) -> SetupProgress:
    progress = SetupProgress(tmp_path / "machines.json")
    progress.start_launch("first", {"0": "gpu1", "1": "gpu2"})
    return progress


def test_fold_by_machine_says_each_line_once() -> None:
    hosts = {str(number): f"gpu{number}" for number in range(20)}
    lines = [("0", "full"), ("1", "no GPU"), ("2", "full"), ("1", "old")]
    assert fold_by_machine(lines, hosts) == ["machines 0, 2: full", "machine 1 (gpu1): no GPU", "machine 1 (gpu1): old"]
    assert fold_by_machine([(name, "x") for name in hosts], hosts) == ["machines 0, 1, 2, 3, 4, 5, 6, 7 and 12 more: x"]


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The contents that are written from now on."""
    contents: list[bytes] = []
    real_write = write_atomic

    def record_write(path: Path, content: bytes, durable: bool = True) -> None:
        contents.append(content)
        real_write(path, content, durable)

    monkeypatch.setattr(module, "write_atomic", record_write)
    return contents


def written_data(progress: SetupProgress) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(progress.path.read_text())
    return data


def test_restart_begins_the_seconds_of_a_machine_anew(progress: SetupProgress) -> None:
    progress.set_step("1", SetupStep.CODE, 361.0)
    before = time.time()
    progress.restart("1")
    progress.set_step("1", SetupStep.CODE, 10.0)
    row = progress.rows["1"]
    assert row.seconds == {SetupStep.CODE: 10.0} and before <= row.restarted <= time.time()


def test_start_launch_resets_rows(progress: SetupProgress) -> None:
    progress.update("0", lambda row: replace(row, reason="no way", python="/usr/bin/python3"))
    progress.mark_ready()
    progress.start_launch("second", {"0": "gpu3"})
    data = written_data(progress)
    assert data["launch"] == "second" and data["is_ready"] is False and progress.failure_reasons == {}
    assert decode(MachineSetup, data["machines"]["0"]) == MachineSetup(host="gpu3")


def test_setup_progress_reads_file_of_another_process(progress: SetupProgress) -> None:
    progress.update("1", lambda row: replace(row, code="/code/abc"))
    progress.mark_ready()
    assert SetupProgress(progress.path).record.is_ready and SetupProgress(progress.path).rows["1"].code == "/code/abc"


@pytest.mark.parametrize("text", ["", "[]", "{", '{"machines": {"0": {"step": "flying"}}}'])
def test_setup_progress_ignores_damaged_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "machines.json"
    path.write_text(text)
    assert SetupProgress(path).record == SetupRecord()


def test_timed_step_repeated_adds_seconds(progress: SetupProgress) -> None:
    for _ in range(2):
        with timed_step(progress, "0", SetupStep.CODE):
            assert progress.rows["0"].step == "code"
    seconds = progress.rows["0"].seconds[SetupStep.CODE]
    progress.set_step("0", SetupStep.CODE, 1.5)
    assert progress.rows["0"].seconds[SetupStep.CODE] == pytest.approx(seconds + 1.5)


def test_timed_step_failed_records_no_seconds(progress: SetupProgress) -> None:
    with pytest.raises(OSError), timed_step(progress, "0", SetupStep.CODE):
        raise OSError
    assert progress.rows["0"].step == "code" and progress.rows["0"].seconds == {}


def test_update_writes_reason_at_once(progress: SetupProgress) -> None:
    progress.set_failure_reason("1", "its key has changed")
    assert written_data(progress)["machines"]["1"]["reason"] == "its key has changed"
    assert progress.failure_reasons == {"1": "its key has changed"}


def test_set_step_is_written_after_delay(progress: SetupProgress) -> None:
    progress.set_step("0", SetupStep.ENVIRONMENT)
    wait_for(lambda: written_data(progress)["machines"]["0"]["step"] == "environment")
    progress.set_step("0", SetupStep.CHECKS)
    wait_for(lambda: written_data(progress)["machines"]["0"]["step"] == "checks")


def test_set_step_many_changes_are_written_once(
    progress: SetupProgress, writes: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WRITE_DELAY_SECONDS", 60.0)
    timers = set()
    for number in range(500):
        progress.set_step("0", SetupStep.CODE, number)
        timers.add(progress.pending_write)
    progress.mark_ready()
    assert len(timers) == 1 and len(writes) == 1 and progress.pending_write is None
    assert written_data(progress)["machines"]["0"]["seconds"]["code"] == sum(range(500))


def test_setup_progress_concurrent_changes_are_all_kept(tmp_path: Path) -> None:
    progress = SetupProgress(tmp_path / "machines.json")
    names = [str(number) for number in range(16)]
    progress.start_launch("first", dict.fromkeys(names, "gpu"))

    def set_up(name: str) -> None:
        for _ in range(30):
            progress.set_step(name, SetupStep.CHECKS, 1.0)
            progress.update(name, lambda row: replace(row, notes=(*row.notes, str(len(row.notes)))))
        progress.set_failure_reason(name, f"reason {name}")

    threads = [threading.Thread(target=set_up, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert written_data(progress)["launch"] == "first"
    progress.mark_ready()
    assert decode(SetupRecord, written_data(progress)).machines == progress.rows and progress.failure_reasons == {
        name: f"reason {name}" for name in names
    }
    assert all(row.seconds[SetupStep.CHECKS] == 30 and row.notes[29] == "29" for row in progress.rows.values())


def test_start_launch_keeps_which_machines_the_job_has_reached(progress: SetupProgress) -> None:
    progress.update("1", lambda row: replace(row, was_reached=True, reason="no GPU"))
    progress.start_launch("second", {"0": "gpu1", "1": "gpu2"})
    assert progress.rows == {"0": MachineSetup(host="gpu1"), "1": MachineSetup(host="gpu2", was_reached=True)}
    progress.update_record(lambda record: replace(record, is_adopted=True))
    progress.start_launch("third", {"0": "gpu1"})
    assert progress.rows["0"].was_reached, "by the computer that launched the job"


def test_abandoned_set_up_goes_on_to_no_other_step(progress: SetupProgress) -> None:
    progress.is_abandoned = True
    with pytest.raises(SetupFailed, match="given up"), timed_step(progress, "1", SetupStep.CODE):
        raise AssertionError("not reached")
    progress.start_launch("second", {"1": "gpu2"})
    progress.set_step("1", SetupStep.CODE)
