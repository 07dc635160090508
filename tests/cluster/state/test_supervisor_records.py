"""The activity of a rented job's supervisor: `status` shows it until the machines are set up."""

from typing import Any

import pytest

from cluster.state import status, supervisor_records
from train.tools.records import DamagedRecord

Fixture = Any


def test_status_shows_the_last_activity_of_a_rented_job(hand_made: Fixture) -> None:
    run = hand_made(backend="aws", cloud={"places": []})
    assert supervisor_records.read_activity(run.run_folder.path) is None
    assert status.job_status(run.job.run, None).state == "booting"
    supervisor_records.write_activity(run.run_folder.path, "renting machines")
    job_status = status.job_status(run.job.run, None)
    assert (job_status.state, job_status.doing) == ("acquiring", "renting machines")
    supervisor_records.write_activity(run.run_folder.path, "")
    assert status.job_status(run.job.run, None).state == "booting"


@pytest.mark.parametrize("text", ['{"doing": 7, "time": 1.0}', '{"doing": "renting"}', "[]"])
def test_read_activity_damaged_file_names_it(hand_made: Fixture, text: str) -> None:
    run = hand_made(backend="aws", cloud={})
    path = run.run_folder.path / supervisor_records.CLOUD_ACTIVITY_FILE
    path.write_text(text)
    with pytest.raises(DamagedRecord, match=str(path)):
        supervisor_records.read_activity(run.run_folder.path)
