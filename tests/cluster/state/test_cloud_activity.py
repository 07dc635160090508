"""The activity of a rented job's supervisor: `status` shows it until the machines are set up."""

from typing import Any

import pytest

from cluster.state import cloud_activity, status
from train.tools.records import DamagedRecord

Fixture = Any


def test_status_shows_the_last_activity_of_a_rented_job(hand_made: Fixture) -> None:
    run = hand_made(backend="aws", cloud={"places": []})
    assert cloud_activity.read_activity(run.run_folder.path) is None
    assert status.job_status(run.job.run, None).state == "booting"
    cloud_activity.write_activity(run.run_folder.path, "renting machines")
    job_status = status.job_status(run.job.run, None)
    assert (job_status.state, job_status.doing) == ("acquiring", "renting machines")
    cloud_activity.write_activity(run.run_folder.path, "")
    assert status.job_status(run.job.run, None).state == "booting"


@pytest.mark.parametrize("text", ['{"doing": 7, "time": 1.0}', '{"doing": "renting"}', "[]"])
def test_read_activity_damaged_file_names_it(hand_made: Fixture, text: str) -> None:
    run = hand_made(backend="aws", cloud={})
    path = run.run_folder.path / cloud_activity.CLOUD_ACTIVITY_FILE
    path.write_text(text)
    with pytest.raises(DamagedRecord, match=str(path)):
        cloud_activity.read_activity(run.run_folder.path)
