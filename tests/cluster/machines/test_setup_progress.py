"""Tests of the record of the set-up: one for each launch, also when many threads write it."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from support.known import known

from cluster.errors import SetupFailed
from cluster.machines.setup_progress import SetupProgress, timed_step
from cluster.state.states import SetupStep
from cluster.state.supervisor_records import MachineSetup, SetupRecord
from train.tools.records import read_record


@pytest.fixture
def progress(tmp_path: Path) -> SetupProgress:
    progress = SetupProgress(tmp_path / "machines.json")
    progress.start_launch("first", {"0": "gpu1", "1": "gpu2"})
    return progress


def test_setup_progress_concurrent_changes_are_all_kept(tmp_path: Path) -> None:
    progress = SetupProgress(tmp_path / "machines.json")
    names = [str(number) for number in range(16)]
    progress.start_launch("first", dict.fromkeys(names, "gpu"))

    def set_up(name: str) -> None:
        for _ in range(30):
            progress.set_step(name, SetupStep.CHECKS, 1.0)
            progress.update(name, lambda row: replace(row, notes=(*row.notes, str(len(row.notes)))))
        progress.set_failure_reason(name, f"reason {name}")

    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(set_up, names))
    assert known(read_record(progress.path, SetupRecord)).machines == progress.rows
    notes = tuple(str(number) for number in range(30))
    assert {name: (row.seconds, row.notes, row.reason) for name, row in progress.rows.items()} == {
        name: ({SetupStep.CHECKS: 30}, notes, f"reason {name}") for name in names
    }


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
