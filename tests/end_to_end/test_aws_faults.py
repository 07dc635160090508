"""Rentals by the installed command that go wrong before any training: nobody pays for what is lost."""

import json
import os
import re
import shutil
import signal
from functools import partial

import pytest
from support.aws_user import NEVER_SECONDS, TYPE, Renter
from support.sandbox import ENDLESS

from cluster.jobs.job import Job
from infra.aws.journal_events import LaunchRequest, RequestRefused

ZONES = [f"us-east-1{letter}" for letter in "abcdef"]


def launch_until_booting(renter: Renter) -> Job:
    """Launch a job whose machines boot for ever: nobody can log in. Wait until they boot."""
    renter.cloud.post("set", ssh_delay_seconds=NEVER_SECONDS)
    job = renter.launch()
    renter.wait_for(lambda: renter.granted_ids(job) and job.status().state == "setup")
    assert len(renter.live_instance_ids()) == 2
    return job


def test_ctrl_c_while_acquiring_detaches_and_stop_or_down_ends_the_job(renter: Renter) -> None:
    renter.create_stack()
    renter.cloud.post("limit_capacity", type=TYPE, zones=ZONES, places=0)
    for number, command in enumerate(("stop", "down"), 1):
        arguments = [argument for argument in renter.launch_arguments() if argument != "-d"]
        launch = renter.sandbox.start(*arguments)
        job = renter.sandbox.job(number)
        renter.wait_for(partial(renter.journal_events, job, RequestRefused))
        os.killpg(launch.pid, signal.SIGINT)
        assert launch.wait(120) == 130
        output = renter.sandbox.output(number - 1)
        assert f"detached; job-{number} keeps running and rents machines, which are billed" in output, output
        assert "Traceback" not in output, output
        assert job.status().state == "acquiring" and renter.wait_for_supervisor()
        renter.run(command, job.name)
        assert job.state == "stopped", job.status()
        stop_time = json.loads((job.run_folder.shared / "stop").read_text())["time"]
        late_requests = [request for request in renter.journal_events(job, LaunchRequest) if request.time > stop_time]
        assert len(late_requests) <= 1, "the supervisor was not interrupted between two requests"
        renter.wait_for(lambda: not renter.supervisor_pids())
        renter.assert_nothing_left()
    assert renter.all_instance_ids() == []


def test_what_is_billed_is_told_after_ctrl_c_and_while_aws_refuses_the_credentials(renter: Renter) -> None:
    renter.create_stack()
    arguments = [argument for argument in renter.launch_arguments(epochs=ENDLESS) if argument != "-d"]
    launch = renter.sandbox.start(*arguments)
    job = renter.sandbox.job(1)
    renter.wait_for(lambda: renter.granted_ids(job))
    renter.wait_for(lambda: renter.training_step(job) > 0)
    os.killpg(launch.pid, signal.SIGINT)
    assert launch.wait(120) == 130
    billed = r"job-1 keeps running and is billed, \$\d\.\d\d an hour.*, until \S+.* imgnet-cluster down job-1"
    assert re.search(billed, renter.sandbox.output()), renter.sandbox.output()

    for action in ("DescribeInstances", "GetCallerIdentity"):
        renter.cloud.post("fault", action=action, code="ExpiredToken", message="too old", times=100_000)
    still_billed = r"2 machines still run and are billed; they power off at \d"
    down = renter.cli("down", "-y", job.name)
    assert down.code == 1 and re.search(f"job-1 is ending: {still_billed}", down.err), down
    for command in ("ls", "status", "cost"):
        text = renter.run(command, *(() if command == "ls" else (job.name,)))
        assert re.search(still_billed, text) and "imgnet-cluster down job-1" in text and "stopped" not in text, text
        assert command == "cost" or "ending" in text
    assert len(renter.live_instance_ids()) == 2
    renter.cloud.post("no_faults")
    assert renter.run("down", "-y", job.name) == "job-1 is gone\n" and job.state == "stopped"
    renter.assert_nothing_left()


def test_ctrl_c_before_the_first_request_creates_nothing(renter: Renter) -> None:
    renter.cloud.post("fault", action="DescribeVpcs", delay=3.0)
    launch = renter.sandbox.start(*renter.launch_arguments())
    renter.wait_for(lambda: "DescribeVpcs" in renter.calls())
    os.killpg(launch.pid, signal.SIGINT)
    assert launch.wait(120) == 130
    output = renter.sandbox.output()
    assert output.splitlines()[-1] == "error: interrupted" and "Traceback" not in output
    assert not list((renter.path / "runs").glob("job-*")) and not renter.sandbox.job_pids()
    assert not [action for action in renter.calls() if action.startswith(("Create", "Run"))]


@pytest.mark.parametrize("has_supervisor", [False, True])
def test_job_without_its_run_folder_can_be_found_and_ended(renter: Renter, has_supervisor: bool) -> None:
    job = launch_until_booting(renter)
    uid = job.spec.uid
    if not has_supervisor:
        renter.kill_supervisor()
    shutil.rmtree(job.path.rename(renter.path / "lost"))  # renamed first, because the supervisor writes into it
    (row,) = renter.run_json("ls", "--cloud")
    assert (row["uid"], row["machines"], row["type"]) == (uid, 2, TYPE) and row["expires"] > row["since"]
    assert f"{uid}: 2 machines" in renter.run("gc") and len(renter.live_instance_ids()) == 2
    assert renter.run("down", "-y", uid) == f"{uid} is gone\n"
    if has_supervisor:  # without the folder it no longer knows that it should rent other machines
        renter.wait_for(lambda: not renter.supervisor_pids())
    assert len(renter.all_instance_ids()) == 2, renter.describe()
    renter.assert_nothing_left()
    assert renter.run_json("ls", "--cloud") == []


def test_supervisor_of_a_job_ended_from_elsewhere_rents_nothing(renter: Renter) -> None:
    job = launch_until_booting(renter)
    elsewhere = renter.path / "elsewhere"
    elsewhere.mkdir()
    renter.run("down", "-y", job.spec.uid, cwd=elsewhere)
    renter.wait_for(lambda: not renter.supervisor_pids())
    assert len(renter.all_instance_ids()) == 2 and job.state == "stopped", renter.describe()
    renter.assert_nothing_left()


SETUP_FAILURE = "boot failed: the file system was not mounted: simulated"


def test_machine_whose_boot_failed_powers_itself_off_without_a_supervisor(renter: Renter) -> None:
    renter.cloud.post("set", failing_machines=[0], ssh_delay_seconds=300.0)
    job = renter.launch(machines=1)
    renter.wait_for(lambda: renter.granted_ids(job) and job.status().state == "setup")
    renter.kill_supervisor()
    (machine_id,) = renter.live_instance_ids()
    renter.cloud.post("advance", seconds=300.0)
    renter.wait_for((renter.cloud.machine_home(machine_id) / ".imgnet/failed").exists)
    renter.cloud.post("advance", seconds=890.0 - 180.0)  # a busy computer may be slow here
    assert renter.live_instance_ids() == [machine_id]
    renter.cloud.post("advance", seconds=200.0)
    renter.wait_for(lambda: not renter.live_instance_ids())
    renter.run("down", "-y", job.name)
    renter.assert_nothing_left()


def test_boots_that_always_fail_end_the_job_with_the_reason(renter: Renter) -> None:
    """Two machines are exchanged, not more; nobody waits until the boot's time is over."""
    renter.cloud.post("set", failing_machines=list(range(100)))
    job = renter.launch(machines=1)
    renter.wait_for(lambda: job.status().state == "failed")
    assert len(renter.all_instance_ids()) == 3, renter.describe()
    result = renter.cli("status", job.name)
    for text in (
        SETUP_FAILURE,
        "[ 9.1] cloud-init: modules:final | imgnet: boot failed",
        "machines exchanged before: 2 of 2 (--max-exchanges)",
    ):
        assert text in result.out + result.err, result
    assert len(list(job.path.glob("console-i-*.log"))) == 3
    renter.wait_for(lambda: not renter.live_instance_ids())
    renter.run("down", "-y", job.name)
    renter.assert_nothing_left()
