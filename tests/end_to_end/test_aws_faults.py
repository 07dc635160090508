"""Machines rented by the installed command while things go wrong before any training: nobody pays for what is lost."""

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.aws_user import NEVER, TYPE, Renter, renter
from support.simcloud.fixture import IMAGE, simcloud

__all__ = ["renter", "simcloud"]  # fixtures

NO_KEYS = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
ZONES = [f"us-east-1{letter}" for letter in "abcdef"]


def never_ready(renter: Renter, seconds: float = NEVER) -> None:
    """Let machines boot, and nobody log in."""
    renter.cloud.post("machines", ssh_late=seconds)


def no_capacity(renter: Renter) -> None:
    """Let every zone be full."""
    renter.cloud.post("capacity", **{f"{zone}/{TYPE}": 0 for zone in ZONES})


def booting(renter: Renter, job: Any, machines: int = 2) -> bool:
    """Whether all machines were rented and are waited for."""
    return len(renter.alive()) == machines and bool(renter.granted(job)) and job.status()["state"] == "setup"


# --- Ctrl-C and kill -------------------------------------------------------------------------------------------------


def test_ctrl_c_while_machines_are_looked_for_leaves_the_job_and_stop_and_down_end_it(renter: Renter) -> None:
    no_capacity(renter)
    for number, command in enumerate(("stop", "down"), 1):
        words = [word for word in renter.words() if word != "-d"]
        launch = renter.place.start(*words)
        job = renter.place.job(number)
        renter.wait(partial(renter.lines, job, "refused"))
        os.killpg(launch.pid, signal.SIGINT)
        assert launch.wait(20) == 130
        said = renter.place.said(number - 1)
        assert f"detached; job-{number} keeps running" in said and "Traceback" not in said, said
        assert job.status()["state"] == "acquiring" and renter.supervisor()
        began = time.monotonic()
        renter.ok(command, job.name)
        assert time.monotonic() - began < 30
        assert job.state == "stopped", job.status()
        renter.wait(lambda: not renter.place.pids("-m cluster.jobs.supervisor"), 20)
        renter.nothing_left()
    assert renter.ever() == []


def test_ctrl_c_before_anything_was_asked_for_makes_nothing(renter: Renter) -> None:
    renter.cloud.post("fault", action="DescribeVpcs", delay=3.0)
    launch = renter.place.start(*renter.words())
    renter.wait(lambda: ["ec2", "DescribeVpcs"] in renter.cloud.post("calls")["calls"])
    os.killpg(launch.pid, signal.SIGINT)
    assert launch.wait(20) == 130
    assert renter.place.said().splitlines()[-1] == "error: interrupted" and "Traceback" not in renter.place.said()
    assert not list((renter.path / "runs").glob("job-*")) and not renter.place.at_work()
    assert not [name for _, name in renter.cloud.post("calls")["calls"] if name.startswith(("Create", "Run"))]


def test_a_supervisor_killed_while_acquiring_and_while_machines_boot_is_brought_back_by_ls(renter: Renter) -> None:
    never_ready(renter, 500.0)
    no_capacity(renter)
    job = renter.launch()
    renter.wait(lambda: renter.lines(job, "refused"))
    renter.kill_supervisor()
    renter.ok("ls")
    assert renter.supervisor()
    renter.cloud.post("capacity", **{f"{zone}/{TYPE}": 2 for zone in ZONES[1:2]})
    renter.wait(lambda: booting(renter, job), 90)
    first = renter.alive()
    renter.kill_supervisor()
    os.utime(job.run / ".supervised", (0, 0))  # else it is not started again within 20 s
    assert job.name in renter.ok("ls")
    assert renter.supervisor()
    renter.cloud.post("advance", seconds=600)
    renter.wait(lambda: len(json.loads((job.run / "hosts.json").read_text())["machines"]) == 2)
    renter.wait(lambda: job.status()["doing"].startswith("setting up") and "boot" not in job.status()["doing"])
    assert renter.alive() == first == renter.ever() and renter.granted(job) == [first]
    renter.ok("down", job.name)
    renter.nothing_left()


# --- the run folder, two at once -------------------------------------------------------------------------------------


@pytest.mark.parametrize("supervised", [False, True])
def test_a_lost_run_folder_is_no_lost_job(renter: Renter, supervised: bool) -> None:
    never_ready(renter)
    job = renter.launch()
    renter.wait(lambda: booting(renter, job))
    uid = job.spec.uid
    if not supervised:
        renter.kill_supervisor()
    shutil.rmtree(job.run.rename(renter.path / "lost"))  # in one go, for its supervisor writes there
    (row,) = renter.json("ls", "--cloud")
    assert (row["uid"], row["machines"], row["type"]) == (uid, 2, TYPE) and row["expires"] > row["since"]
    assert f"{uid}: 2 machines" in renter.ok("gc") and len(renter.alive()) == 2
    assert renter.ok("down", uid) == f"{uid} is gone\n"
    if supervised:  # it has nothing any more by which it could know that it should rent others
        renter.wait(lambda: not renter.place.pids("-m cluster.jobs.supervisor"))
    assert len(renter.ever()) == 2, renter.tell()
    renter.nothing_left()
    assert renter.json("ls", "--cloud") == []


def test_a_job_that_was_ended_from_elsewhere_rents_no_machines_again(renter: Renter) -> None:
    never_ready(renter)
    job = renter.launch()
    renter.wait(lambda: booting(renter, job))
    elsewhere = renter.path / "elsewhere"
    elsewhere.mkdir()
    renter.ok("down", job.spec.uid, cwd=elsewhere)
    renter.wait(lambda: not renter.place.pids("-m cluster.jobs.supervisor"))
    assert len(renter.ever()) == 2 and job.state == "stopped", renter.tell()
    renter.nothing_left()


def test_two_who_end_a_job_at_once_both_see_it_gone(renter: Renter) -> None:
    never_ready(renter)
    renter.cloud.post("set", stop_seconds=3.0)
    job = renter.launch()
    renter.wait(lambda: booting(renter, job))
    elsewhere = renter.path / "elsewhere"
    elsewhere.mkdir()
    with ThreadPoolExecutor() as pool:
        here = [pool.submit(renter.cli, "down", job.name) for _ in range(2)]
        there = pool.submit(renter.cli, "down", job.spec.uid, cwd=elsewhere)
        said = [one.result() for one in [*here, there]]
    assert [one.code for one in said] == [0, 0, 0], said
    assert job.state == "stopped" and len(renter.ever()) == 2
    assert renter.cli("down", job.name).code == 0
    renter.nothing_left()


@pytest.fixture
def other(renter: Renter, tmp_path: Path, images: Path) -> Iterator[Renter]:
    """Somebody else on another computer, of the same account."""
    from conftest import Place

    place = Place(tmp_path / "other", images)
    yield Renter(place, renter.cloud)
    assert not place.close()


def test_two_launches_at_once_from_nothing_make_one_stack_and_two_jobs(renter: Renter, other: Renter) -> None:
    never_ready(renter)
    both = (renter, other)
    with ThreadPoolExecutor() as pool:
        jobs = [one.result() for one in [pool.submit(who.launch) for who in both]]
    for who, job in zip(both, jobs, strict=True):
        who.wait(partial(who.granted, job), 90)
    rows = renter.json("ls", "--cloud")
    assert {row["uid"] for row in rows} == {job.spec.uid for job in jobs} and [row["machines"] for row in rows] == [
        2,
        2,
    ]
    ours = [one for one in renter.cloud.post("leftovers") if one.get("tags", {}).get("imgnet:stack") == "imgnet"]
    kinds = [one["kind"] for one in ours]
    wanted = {"vpc": 1, "internet-gateway": 1, "security-group": 1, "file-system": 1, "key-pair": 2}
    assert {kind: kinds.count(kind) for kind in wanted} == wanted
    renter.ok("down", "job-1")
    assert len(renter.alive()) == 2 and len(renter.granted(jobs[1])) == 1
    assert f"{jobs[1].spec.uid}: 2 machines" in renter.ok("gc", "--yes") and len(renter.alive()) == 2
    other.ok("down", "job-1")
    assert len(renter.ever()) == 4
    renter.nothing_left()


def test_what_is_somebody_elses_is_left_alone_however_much_it_looks_like_ours(renter: Renter) -> None:
    never_ready(renter)
    job = renter.launch()
    renter.wait(lambda: booting(renter, job))
    ec2, ssm = renter.cloud.client("ec2"), renter.cloud.client("ssm")
    before = {one["id"] for one in renter.cloud._everything()}
    tags = [{"Key": "Name", "Value": "imgnet job-1"}, {"Key": "imgnet:job", "Value": job.spec.uid}]
    ec2.run_instances(
        ImageId=ssm.get_parameter(Name=IMAGE)["Parameter"]["Value"], InstanceType="c5.large", MinCount=1, MaxCount=1,
        TagSpecifications=[{"ResourceType": kind, "Tags": tags} for kind in ("instance", "volume")],
    )  # fmt: skip
    ec2.create_placement_group(GroupName=f"imgnet-{job.spec.uid}-9", Strategy="cluster")
    ec2.create_volume(AvailabilityZone=ZONES[0], Size=1, TagSpecifications=[{"ResourceType": "volume", "Tags": tags}])
    address = {"Domain": "vpc", "TagSpecifications": [{"ResourceType": "elastic-ip", "Tags": tags}]}
    ec2.allocate_address(**address)

    def settled() -> bool:
        mine = [one for one in renter.cloud._everything() if one["id"] not in before]
        renter.cloud.foreign += [one for one in mine if one not in renter.cloud.foreign]
        return all(one.get("state") != "pending" for one in mine)

    renter.cloud.wait(lambda: all(one.get("state") != "pending" for one in renter.cloud._everything()))
    assert settled()
    (row,) = renter.json("ls", "--cloud")
    assert row["machines"] == 2
    renter.ok("down", "job-1")
    renter.ok("down", "--all", "-y")
    assert renter.ok("gc", "--yes", "--unknown") == "nothing to remove in us-east-1\n"
    assert renter.cli("down", "--stack", "--delete-data", "-y").code == 0
    renter.cloud.check()


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "options", "env", "words"),
    [
        ("no credentials", (), NO_KEYS, ("no credentials", "aws configure")),
        ("no region", (), {"AWS_REGION": ""}, ("no region", "--region")),
        ("wrong region", ("--region", "us-east-9"), {}, ("us-east-9", "--region us-east-")),
        ("type that is gone", ("--type", "p3.16xlarge"), {}, ("p3.16xlarge",)),
        ("type that never was", ("--type", "x9.huge"), {}, ("x9.huge", "--type")),
        ("zone that is not there", ("--zone", "us-east-1z"), {}, ("us-east-1z",)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_bad_input_is_one_line_at_once_and_makes_nothing(
    renter: Renter, what: str, options: tuple[str, ...], env: dict[str, str], words: tuple[str, ...]
) -> None:
    began = time.monotonic()
    ran = renter.cli(*renter.words(*options), env=env)
    assert time.monotonic() - began < 15
    assert ran.code in (1, 2) and ran.err.count("\n") == 1 and ran.err.startswith("error: "), ran
    assert all(word in ran.err for word in words), ran.err
    assert "Traceback" not in ran.err and ran.out == ""
    assert not list((renter.path / "runs").glob("job-*"))
    made = [
        name for _, name in renter.cloud.post("calls")["calls"] if name.startswith(("Create", "Run", "Put", "Import"))
    ]
    assert not made


def test_keys_that_aws_does_not_accept_are_one_line_and_nothing_is_made(renter: Renter) -> None:
    renter.cloud.post("fault", service="ec2", code="AuthFailure", message="not able to validate", times=1000)
    ran = renter.cli(*renter.words())
    assert ran.code == 1 and ran.err.count("\n") == 1 and "AuthFailure" in ran.err, ran
    assert "aws sts get-caller-identity" in ran.err and not list((renter.path / "runs").glob("job-*"))


def test_without_a_quota_the_launch_ends_soon_and_says_what_to_ask_for(renter: Renter) -> None:
    renter.ok("up", "--stack")
    renter.cloud.post("set", quota_vcpu={"L-34B43A08": 8.0})
    checked = renter.cli("check", "--type", TYPE, "--machines", "2", renter.place.recipe(3))
    assert checked.code == 1 and "request-service-quota-increase" in checked.out and "L-34B43A08" in checked.out, (
        checked
    )
    began = time.monotonic()
    words = [word for word in renter.words() if word != "-d"]
    ran = renter.cli(*words)
    assert ran.code == 100 and time.monotonic() - began < 30, ran
    reason = renter.place.job().status()["reason"]
    assert "MaxSpotInstanceCountExceeded" in reason and "\n" not in reason, reason
    assert renter.ever() == []
    renter.nothing_left()
