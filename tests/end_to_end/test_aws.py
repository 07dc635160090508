"""Training on rented machines by the installed command, with AWS_ENDPOINT_URL and nothing else.

Machines are taken away, lost, stopped, out of time, out of money, out of sight; each test ends with nothing that costs.
"""

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.aws_user import TYPE, Renter, renter
from support.simcloud.fixture import simcloud
from support.simcloud.process_keeper import everything
from support.ssh_machines import command_line

from cluster.state import attempts

__all__ = ["renter", "simcloud"]  # fixtures

LONG = 4000  # epochs: more than any test waits for


def trains(renter: Renter, job: Any, attempt: int = 1, steps: int = 4) -> int:
    """Wait until this attempt or a later one has made so many steps. Returns the step."""

    def made() -> bool:
        newest = attempts.newest_attempt(job.folders.shared)
        assert not job.ended, f"{job.status()}\n{renter.tell()}"
        at_work = newest is not None and newest.number >= attempt and bool(newest.members)
        return at_work and renter.step(job) >= newest.first_step + steps  # type: ignore[union-attr]

    renter.wait(made, 120)
    return renter.step(job)


def first_step(job: Any) -> int:
    """Where the last attempt began."""
    newest = attempts.newest_attempt(job.folders.shared)
    return int(newest.first_step) if newest else 0


def ended(renter: Renter, job: Any, state: str, seconds: float = 120.0) -> dict[str, Any]:
    """Wait for the end, and see which it is."""
    renter.wait(lambda: job.ended, seconds)
    assert job.state == state, f"{job.status()}\n{renter.tell()}"
    assert job.result is not None
    return dict(job.result)


def same_bill(renter: Renter, job: Any) -> None:
    """The command and the cloud say the same dollars."""
    said, bill = renter.json("cost", job.name), renter.cloud.bill()
    ids = {one["id"] for one in said["machines"]}
    assert ids == set(renter.ever()) == set(bill["instances"]) and said["running"] == 0 and said["unknown"] == []
    assert said["dollars"] == pytest.approx(bill["total"], rel=0.01), (said, bill)


def test_a_machine_taken_away_and_one_lost_are_replaced_and_the_job_is_done_and_paid_for(renter: Renter) -> None:
    job = renter.launch("--save-seconds", "1", machines=3, epochs=170)
    trains(renter, job)
    first = renter.alive()
    elsewhere = {"IMGNET_RUNS": str(renter.path / "empty")}
    (row,) = renter.json("ls", "--cloud", env=elsewhere)
    assert (row["uid"], row["job"], row["machines"], row["state"]) == (job.spec.uid, "job-1", 3, "3 running")
    assert renter.json("ls", env=elsewhere) == []

    taken = renter.of("1")
    renter.cloud.interrupt(taken, notice=60)
    renter.wait(lambda: present(renter).get("1", taken) != taken, 90)
    trains(renter, job, attempts.newest_attempt(job.folders.shared).number)  # type: ignore[union-attr]
    renter.wait(lambda: members(job) == {"0", "1", "2"}, 90)

    lost = renter.of("2")
    assert "machine 2 of job-1 is lost" in renter.ok("lose", job.name, "--machine", "2")
    before = attempts.newest_attempt(job.folders.shared).number  # type: ignore[union-attr]
    renter.wait(lambda: present(renter).get("2", lost) != lost, 90)
    trains(renter, job, before)
    renter.wait(lambda: members(job) == {"0", "1", "2"}, 90)
    assert {one["id"] for one in renter.cloud.instances() if one["state"] == "terminated"} == {taken, lost}
    reasons = {one["reason"] for one in renter.cloud.instances() if one["state"] == "terminated"}
    assert reasons == {"Client.UserInitiatedShutdown"}  # the one with notice, too: given back when its agent had left

    result = ended(renter, job, "done", 180)
    assert len(result["epochs"]) == 170 and result["attempts"] >= 4
    assert len(renter.ever()) == 5 and set(first) < set(renter.ever())
    shown = renter.ok("status", job.name)
    numbers = [row["attempt"] for row in result["timeline"] if row["machines"]]
    assert all(re.search(rf"^ *{number} ", shown, re.MULTILINE) for number in numbers), shown
    home = {path.name for path in job.run.rglob("*") if path.is_file()}
    assert {"result.json", "rank-0.log", "val-000001.json"} <= home and list(job.run.rglob("*tfevents*"))
    renter.nothing_left()
    same_bill(renter, job)
    told = renter.json("eval", job.name, "--crops", "center", "--workers", "0")  # its machines are gone
    assert told["rows"][0]["top1"] == result["epochs"][-1]["top1"]
    renter.ok("record", job.name, "-o", "mine")
    assert TYPE in json.loads((renter.path / "mine.json").read_text())["hardware"]
    renter.ok("record", "--check", "mine.tsv")
    page = Path(renter.ok("report", job.name).strip()).read_text()
    assert page.count("data:image/jpeg") == 6 and TYPE in page and "machine 2 lost" in page


def present(renter: Renter) -> dict[str, str]:
    """The ids of the machines that are alive, by name; each is asked for once, for it may go at any moment."""
    found = {}
    for name in ("0", "1", "2"):
        with contextlib.suppress(ValueError):
            found[name] = renter.of(name)
    return found


def members(job: Any) -> set[str]:
    """Who is in the newest attempt."""
    newest = attempts.newest_attempt(job.folders.shared)
    return set(newest.machine_names) if newest and newest.members else set()


def test_keys_expire_all_machines_are_taken_it_is_stopped_and_resumed_and_always_goes_on(renter: Renter) -> None:
    job = renter.launch("--save-seconds", "1", epochs=LONG)
    at = trains(renter, job)
    renter.cloud.post("fault", action="DescribeInstances", code="ExpiredToken", message="too old", times=100000)
    renter.wait(lambda: said(job, "ExpiredToken"))
    asked = renter.cloud.post("calls")["count"]["DescribeInstances"]
    renter.wait(lambda: renter.cloud.post("calls")["count"]["DescribeInstances"] >= asked + 2)
    (line,) = said(job, "ExpiredToken")
    assert "the machines end by their own limit" in line and "aws sts get-caller-identity" in line, line
    assert re.search(r"at 20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ", line), line
    assert renter.step(job) > at and len(attempts.history(job.folders.shared)) == 1
    status = renter.cli("status", job.name, "--exit-code")
    assert status.code == 101 and "Traceback" not in status.out + status.err
    renter.cloud.post("no_faults")

    gang, at = renter.alive(), renter.step(job)
    for one in gang:
        renter.cloud.post("kill", id=one, reason="Server.SpotInstanceTermination")
    trains(renter, job, 2)
    assert len(renter.alive()) == 2 and not set(renter.alive()) & set(gang) and first_step(job) > 0
    assert first_step(job) >= at - 40  # of the last second's save

    renter.ok("stop", job.name)
    assert job.state == "stopped"
    renter.nothing_left()
    stopped_at, old = int(job.status()["step"]), renter.ever()
    renter.ok("resume", "-d", job.name)
    trains(renter, job, attempts.newest_attempt(job.folders.shared).number + 1)  # type: ignore[union-attr]
    assert first_step(job) == stopped_at and not set(renter.alive()) & set(old) and len(renter.alive()) == 2

    alive, at = renter.alive(), renter.step(job)
    assert "may take 4 hours" in renter.ok("extend", job.name, "--max-hours", "4")
    renter.cloud.post("advance", seconds=9000)  # past the first limit of 2 hours and a quarter
    renter.wait(lambda: renter.step(job) > at + 20)
    assert renter.alive() == alive and not job.ended
    renter.ok("down", job.name)
    assert job.state == "stopped" and len(renter.ever()) == 6
    renter.nothing_left()


def said(job: Any, word: str) -> list[str]:
    """The lines of the job's log of AWS that have a word."""
    log = job.run / "cloud.log"
    return [line for line in log.read_text().splitlines() if word in line] if log.exists() else []


def test_time_and_money_run_out_and_the_job_saves_and_ends_by_itself(renter: Renter) -> None:
    renter.ok("up", "--stack")
    hours = renter.launch("--max-hours", "0.028", machines=1, epochs=LONG)
    dollars = renter.launch("--max-price-total", "0.0045", machines=1, epochs=LONG - 1)  # 111 seconds of one machine
    for job in (hours, dollars):
        trains(renter, job)
    for job, word in ((hours, "hours"), (dollars, "dollars")):
        result = ended(renter, job, "stopped", 180)
        assert word in result["reason"] and job.status()["step"] > 0, result["reason"]
        saved = [*renter.cloud.folder.glob(f"efs/*/{job.spec.uid}/checkpoints/*")]
        assert saved
    assert len(renter.ever()) == 2
    renter.nothing_left()


def test_a_stop_saves_and_brings_home_also_when_nobody_looked_after_the_job(renter: Renter) -> None:
    job = renter.launch("--save-seconds", "600", epochs=LONG)
    trains(renter, job, steps=2)
    renter.kill_supervisor()
    renter.ok("stop", job.name)
    result = ended(renter, job, "stopped")
    saved = max(int(path.stem.split("-")[1]) for path in renter.cloud.folder.glob("efs/*/*/checkpoints/*/step-*.pt"))
    said = json.loads((job.folders.status("0")).read_text())
    assert said["state"] == "stopped" and saved == said["step"] > 2 and "user" in result["reason"]
    renter.nothing_left()


def test_without_a_supervisor_the_machines_end_by_themselves_and_the_result_comes_home_later(renter: Renter) -> None:
    job = renter.launch(epochs=25)
    trains(renter, job, steps=2)
    renter.kill_supervisor()

    def finished() -> Any:
        return next(iter(renter.cloud.folder.glob(f"efs/*/{job.spec.uid}/result.json")), None)

    there: Path = renter.wait(finished, 120)
    assert json.loads(there.read_text())["state"] == "done" and not job.ended
    renter.wait(lambda: not agents(renter))  # they have armed the power-off by then
    alive = renter.alive()
    renter.cloud.post("advance", seconds=500)
    assert renter.alive() == alive != []
    renter.cloud.post("advance", seconds=200)
    renter.wait(lambda: renter.alive() == [])
    assert {one["reason"] for one in renter.cloud.instances()} == {"Client.InstanceInitiatedShutdown"}
    assert "nothing to remove" in renter.ok("gc")
    renter.ok("ls")
    reason = ended(renter, job, "stopped")["reason"]  # what is home by now is not the end; nobody rents unasked
    assert "limit" in reason and f"imgnet-cluster resume {job.name}" in reason and len(renter.ever()) == 2
    renter.ok("resume", "-d", job.name)
    renter.wait(lambda: not (job.ended and job.state == "stopped"))
    result = ended(renter, job, "done")
    assert len(result["epochs"]) == 25
    renter.nothing_left()


def agents(renter: Renter) -> list[int]:
    """The agents on the cloud's machines."""
    return [pid for pid in everything(renter.cloud.folder) if "-m cluster.agent" in command_line(pid)]
