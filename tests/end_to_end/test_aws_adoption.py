"""A rented job moves to another computer with the same credentials. One computer supervises it, and only one."""

import json
from typing import Any

import pytest
from support.aws_user import Renter
from support.exact_jobs import newest_attempt
from support.known import known
from support.sandbox import ENDLESS

from cluster.jobs.job import Job
from infra.aws.journal_events import RequestGranted
from infra.aws.stack.policies import user_policy

# Without end. ENDLESS itself paces the trainers by a module of the project, which adoption does not bring along.
EPOCHS = ENDLESS - 1
# What a machine that is not trusted may write into the description of its job.
LIES: dict[str, Any] = {"machines": 64, "procs": 1, "max_hours": 2000.0, "cloud": {"max_dollars": 1e6}}


class OtherComputer:
    """A computer with the same credentials, and nothing else of the one that launched the job."""

    def __init__(self, user: Renter, name: str) -> None:
        self.user = user
        self.folder = user.path / name
        (self.folder / "home").mkdir(parents=True)
        self.env = {"HOME": str(self.folder / "home")}

    def cli(self, *arguments: str) -> Any:
        return self.user.cli(*arguments, cwd=self.folder, env=self.env)

    def run(self, *arguments: str) -> str:
        return self.user.run(*arguments, cwd=self.folder, env=self.env)

    @property
    def job(self) -> Job:
        """The only job of this computer."""
        return Job(self.folder / "runs/job-1")


def test_adopted_job_is_supervised_there_and_no_longer_here(renter: Renter) -> None:
    renter.create_stack()
    renter.cloud.post("set", policy=user_policy())
    limits = ("--max-price-total", "7", "--max-exchanges", "1")
    job = renter.launch("--save-seconds", "1", *limits, "--tag", "CostCenter=ml research", epochs=EPOCHS)
    renter.wait_for_steps(job)
    other = OtherComputer(renter, "elsewhere")

    # The description in the shared folder lies about everything that costs money.
    (path,) = renter.cloud.folder.glob(f"efs/*/{job.spec.uid}/job.json")
    honest = path.read_text()
    path.write_text(json.dumps({**json.loads(honest), **LIES}))
    output = other.run("adopt", job.spec.uid)
    path.write_text(honest)
    adopted = other.job
    assert f"{adopted.name} is {job.spec.uid}" in output
    spec = adopted.spec
    assert (spec.machines, spec.recovery.spares, spec.recovery.max_exchanges) == (2, 0, 1)
    assert spec.max_hours == job.spec.max_hours and known(spec.cloud)["max_dollars"] == 7

    # The first computer ends its supervisor and says why, also to the next command.
    renter.wait_for(lambda: len(renter.sandbox.program_pids("-m cluster.jobs.supervisor")) == 1)
    for _ in range(2):
        assert "was adopted by another computer" in renter.run("status", job.name)
        assert renter.run_json("ls")[0]["state"] == "adopted"
    renter.wait_for_steps(adopted, steps=known(job.status().step) + 4)

    # A machine is lost: the new computer rents one other machine, and the old one none.
    lost_id = renter.instance_id("1")
    attempt = newest_attempt(adopted).number
    renter.cloud.post("kill", id=lost_id, reason="Server.SpotInstanceTermination")
    renter.wait_for_replacement("1", lost_id)
    renter.wait_for_steps(adopted, attempt + 1, 1)
    refused = renter.cli("rehearse-loss", job.name, "--machine", "0")
    assert refused.code == 1 and "was adopted by another computer" in refused.err and refused.err.count("\n") == 1
    assert {instance["tags"].get("CostCenter") for instance in renter.cloud.instances()} == {"ml research"}
    assert len(renter.all_instance_ids()) == 3 and len(renter.journal_events(job, RequestGranted)) == 1

    other.run("stop", adopted.name)
    assert adopted.state == "stopped" and known(adopted.status().step) > 0
    report = json.loads(other.run("cost", adopted.name, "-o", "json"))
    bill = renter.cloud.bill()
    assert {machine["id"] for machine in report["machines"]} == set(bill["instances"])
    assert report["dollars"] - report["traffic_dollars"] == pytest.approx(bill["total"] - bill["efs"], rel=0.02)
    renter.cloud.post("set", policy=None)
    renter.assert_nothing_left()


def test_computer_that_slept_rents_nothing_for_a_job_that_was_adopted(renter: Renter) -> None:
    job = renter.launch("--save-seconds", "1", epochs=EPOCHS)
    renter.wait_for_steps(job)
    renter.kill_supervisor()
    (uid, other) = job.spec.uid, OtherComputer(renter, "elsewhere")

    # A machine is lost meanwhile, and EC2 forgets it.
    lost_id = renter.instance_id("1")
    renter.cloud.post("kill", id=lost_id)
    renter.cloud.post("advance", seconds=4000)
    renter.cloud.post("set", has_instance_connect=False, tells_time=True)
    refused = other.cli("adopt", uid)
    assert refused.code == 1 and f"imgnet-cluster down {uid} --region us-east-1" in refused.err, refused
    assert "EC2 Instance Connect" in refused.err and not other.job.path.exists()
    renter.cloud.post("set", has_instance_connect=True)
    assert other.cli("adopt", "job-9-00000000").code == 102

    other.run("adopt", uid)
    adopted = other.job
    renter.wait_for_replacement("1", lost_id)
    renter.wait_for_members(adopted, "0", "1")
    attempt = newest_attempt(adopted).number
    renter.wait_for_steps(adopted, attempt)
    cost = json.loads(other.run("cost", adopted.name, "-o", "json"))
    assert cost["earlier_dollars"] > 0.4 * renter.cloud.bill()["total"], "until the adoption, for more than an hour"
    again = other.cli("adopt", uid)
    assert again.code == 1 and f"is here already, as {adopted.name}" in again.err, again
    for instance_id in renter.live_instance_ids():  # both computers may take it for a reason to rent
        renter.cloud.post("kill", id=instance_id, reason="Server.SpotInstanceTermination")
    renter.run("ls")
    renter.wait_for(lambda: "was adopted by another computer" in renter.run("status", job.name))
    renter.wait_for_steps(adopted, attempt + 1, 1)
    assert len(renter.all_instance_ids()) == 5 and not job.has_ended
    renter.run("down", "-y", job.name)  # the one thing that the first computer may still do
    renter.wait_for(lambda: adopted.has_ended)
    renter.assert_nothing_left()
