"""The activity of a rented job's supervisor: `status` shows it until the machines are set up."""

from typing import Any

from cluster.state import status, supervisor_records

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
