"""A rented job whose credentials expire at any moment: what the commands print is true, and the machines power off."""

from collections.abc import Callable

import pytest
from support.aws_user import NEVER_SECONDS, Renter
from support.command_server import STOP_VARIABLE
from support.sandbox import ENDLESS

from cluster.jobs.job import Job
from infra.aws.journal_events import LaunchRequest

EXPIRED = {"code": "ExpiredToken", "message": "too old", "status": 403, "times": 10**9}
ALL_SECONDS = 4 * 3600.0  # longer than the time limit of a launch, and the grace period
CHECKED_COMMANDS = ("ls", "status", "cost")


def expire(renter: Renter) -> None:
    renter.cloud.post("fault", **EXPIRED)


def wait_for_call(renter: Renter, action: str, count: int = 1) -> None:
    renter.wait_for(lambda: renter.calls().count(action) >= count)


def launch_without_stack(renter: Renter) -> Job:
    """Launch a job where there is no stack; the launch may fail."""
    renter.cli(*renter.launch_arguments(epochs=ENDLESS))
    return renter.sandbox.job()


def before_the_plan(renter: Renter) -> Job:
    renter.run("up", "--stack")
    expire(renter)
    return launch_without_stack(renter)


def while_the_stack_is_created(renter: Renter) -> Job:
    renter.cloud.post("fault", action="CreateSubnet", **EXPIRED)
    job = launch_without_stack(renter)
    wait_for_call(renter, "CreateSubnet")
    expire(renter)
    return job


def between_request_and_answer(renter: Renter) -> Job:
    """The answer to the request is lost, and the credentials expire before it is sent again."""
    renter.cloud.post("fault", action="RunInstances", after=True, drop=True)
    renter.cloud.post("fault", action="RunInstances", **EXPIRED)
    job = renter.launch(epochs=ENDLESS)
    wait_for_call(renter, "RunInstances", 2)
    expire(renter)
    assert len(renter.live_instance_ids()) == 2 and renter.journal_events(job, LaunchRequest)
    return job


def after_the_answer(renter: Renter) -> Job:
    renter.cloud.post("set", boot_seconds=5.0)
    job = renter.launch(epochs=ENDLESS)
    wait_for_call(renter, "RunInstances")
    expire(renter)
    return job


def while_machines_boot(renter: Renter) -> Job:
    renter.cloud.post("set", ssh_delay_seconds=NEVER_SECONDS)
    job = renter.launch(epochs=ENDLESS)
    renter.wait_for(lambda: renter.granted_ids(job))
    expire(renter)
    return job


def while_it_trains(renter: Renter) -> Job:
    job = renter.launch("--save-seconds", "1", epochs=ENDLESS)
    renter.wait_for_steps(job)
    expire(renter)
    return job


def while_a_lost_machine_is_replaced(renter: Renter) -> Job:
    job = renter.launch("--save-seconds", "1", epochs=ENDLESS)
    renter.wait_for_steps(job)
    count = renter.calls().count("RunInstances")
    renter.cloud.post("fault", action="RunInstances", **EXPIRED)
    renter.cloud.post("kill", id=renter.instance_id("1"), reason="Server.SpotInstanceTermination")
    wait_for_call(renter, "RunInstances", count + 1)
    expire(renter)
    return job


def during_stop(renter: Renter) -> Job:
    return end_with(renter, "stop")


def during_down(renter: Renter) -> Job:
    return end_with(renter, "down")


def end_with(renter: Renter, command: str) -> Job:
    job = renter.launch("--save-seconds", "1", epochs=ENDLESS)
    renter.wait_for_steps(job)
    renter.cloud.post("fault", action="TerminateInstances", **EXPIRED)
    short_wait = {STOP_VARIABLE: "5"}  # for the supervisor, which may not terminate the machines either
    result = renter.cli(command, *(("-y",) if command == "down" else ()), job.name, env=short_wait)
    assert result.code != 0 and "Traceback" not in result.err, result
    expire(renter)
    return job


MOMENTS = (
    before_the_plan,
    while_the_stack_is_created,
    between_request_and_answer,
    after_the_answer,
    while_machines_boot,
    while_it_trains,
    while_a_lost_machine_is_replaced,
    during_stop,
    during_down,
)


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: moment.__name__)
def test_after_expired_credentials_commands_tell_the_truth_and_machines_power_off(
    moment: Callable[[Renter], Job], renter: Renter
) -> None:
    job = moment(renter)
    live_ids = renter.live_instance_ids()
    for command in CHECKED_COMMANDS:
        result = renter.cli(command, *((job.name,) if command != "ls" else ()))
        assert "Traceback" not in result.out + result.err, result
    rows = [row for row in renter.run_json("ls") if row["job"] == job.name]
    if live_ids:
        assert [row["state"] for row in rows] not in ([], ["done"], ["failed"], ["stopped"]), (rows, renter.describe())
        cost = renter.run_json("cost", job.name)
        assert cost["running"] <= len(live_ids) <= cost["running"] + cost["requested"], cost
    down = renter.cli("down", "-y", job.name)
    assert "Traceback" not in down.out + down.err and (down.code != 0 or not renter.live_instance_ids()), down

    for instance_id in renter.live_instance_ids():  # the boot sets the power-off
        renter.wait_for((renter.cloud.folder / instance_id / "root" / "proc").exists)
    renter.cloud.post("advance", seconds=ALL_SECONDS)
    renter.wait_for(lambda: not renter.live_instance_ids())

    renter.cloud.post("no_faults")
    renter.cli("down", "-y", job.name)
    renter.cli("gc", "--yes", "--unknown")
    renter.assert_nothing_left()
