"""Training on rented machines by the installed command, with AWS_ENDPOINT_URL and nothing else.

Machines are interrupted and killed; time, money and credentials run out; nobody looks after the job. Each test ends
with nothing that costs.
"""

import bisect
import json
import math
import re
import time
from pathlib import Path

import pytest
from support.aws_user import TYPE, Renter
from support.command_server import STOP_VARIABLE
from support.exact_jobs import newest_attempt
from support.known import known
from support.sandbox import ENDLESS
from support.simcloud.process_keeper import process_ids
from support.simcloud.reservations import CLOSING_SECONDS, END_REASON
from support.ssh_machines import command_line
from support.waiting import PATIENCE

from cluster.backends.aws.renting.traffic import read_traffic
from cluster.jobs.billing import rental_limit
from cluster.jobs.job import Job
from cluster.state.status import JobResult, machine_statuses
from infra.aws.journal_events import InstancesReleased


def wait_for_end(renter: Renter, job: Job, state: str, seconds: float = 120.0) -> JobResult:
    """Wait until the job has ended in this state. Returns its result."""
    renter.wait_for(lambda: job.has_ended, seconds)
    assert job.state == state, f"{job.status()}\n{renter.describe()}"
    assert job.result is not None
    return job.result


def machine_phase(job: Job, machine: str) -> str:
    """Return the phase of a machine's agent, "" before its first status."""
    status = machine_statuses(job.run).get(machine)
    return status.phase if status else ""


def test_interrupted_and_lost_machines_are_replaced_and_the_cost_is_right(renter: Renter) -> None:
    # --exact takes one thread: otherwise three machines on the same processors wait for each other's threads.
    job = renter.launch("--standby", "--save-seconds", "1", "--exact", machines=3, epochs=20, pace=(16, 3.0))
    renter.wait_for_steps(job)
    first_ids = renter.live_instance_ids()
    elsewhere = {"IMGNET_RUNS": str(renter.path / "empty")}
    (row,) = renter.run_json("ls", "--cloud", env=elsewhere)
    assert (row["uid"], row["job"], row["machines"], row["state"]) == (job.spec.uid, "job-1", 3, "3 running")
    assert renter.run_json("ls", env=elsewhere) == []

    interrupted_id = renter.instance_id("1")
    renter.cloud.interrupt(interrupted_id, notice=60)
    renter.wait_for_replacement("1", interrupted_id)
    renter.wait_for_steps(job, newest_attempt(job).number)
    renter.wait_for_members(job, "0", "1", "2")

    # A machine that will be lost and one that will not move data, which costs too.
    lost_id = renter.instance_id("2")
    for instance_id in (lost_id, renter.instance_id("0")):
        renter.cloud.post("transfer", id=instance_id, efs_read=10**10, efs_written=2 * 10**9)
    renter.wait_for(lambda: read_traffic(job.path).until(math.inf).shared_read_bytes >= 20 * 10**9)
    assert "machine 2 of job-1 was killed" in renter.run("rehearse-loss", job.name, "--machine", "2")
    attempt_before = newest_attempt(job).number
    renter.wait_for_replacement("2", lost_id)
    renter.wait_for_steps(job, attempt_before)
    renter.wait_for_members(job, "0", "1", "2")
    terminated = [instance for instance in renter.cloud.instances() if instance["state"] == "terminated"]
    assert {instance["id"] for instance in terminated} == {interrupted_id, lost_id}
    # The supervisor terminates the interrupted instance, too, as soon as its agent has left.
    assert {instance["reason"] for instance in terminated} == {"Client.UserInitiatedShutdown"}

    renter.sandbox.train_fast()
    result = wait_for_end(renter, job, "done", 300)
    assert len(result.epochs) == 20 and result.attempts >= 4
    assert len(renter.all_instance_ids()) == 5 and set(first_ids) < set(renter.all_instance_ids())
    table = renter.run("status", job.name)
    trained_attempts = [row.attempt for row in result.timeline if row.machines]
    assert all(re.search(rf"^ *{number} ", table, re.MULTILINE) for number in trained_attempts), table
    names = {path.name for path in job.path.rglob("*") if path.is_file()}
    assert {"result.json", "rank-0.log", "val-000001.json"} <= names and list(job.path.rglob("*tfevents*"))
    renter.assert_nothing_left()
    renter.assert_costs_match_the_bill(job)
    assert renter.run_json("cost", job.name)["traffic_dollars"] >= 20 * 0.03 + 4 * 0.06
    evaluation = renter.run_json("eval", job.name, "--crops", "center", "--workers", "0")  # its machines are gone
    assert evaluation["rows"][0]["top1"] == result.epochs[-1].top1
    renter.run("record", job.name, "-o", "mine")
    assert TYPE in json.loads((renter.path / "mine.json").read_text())["hardware"]
    page = Path(renter.run("report", job.name).strip()).read_text()
    pairs = page.count('<div class="pair">')  # of classes that are confused most, with an image of each
    assert page.count("data:image/jpeg") == 6 + 2 * pairs and TYPE in page and "machine 2 lost" in page


def test_job_survives_loss_of_all_machines_stop_and_extend(renter: Renter) -> None:
    renter.cloud.post("set", quota_vcpu={"L-34B43A08": 2 * 8})  # for these two machines and no more
    job = renter.launch("--save-seconds", "1", epochs=ENDLESS)
    renter.wait_for_steps(job)

    # All machines are lost: new ones continue from the last checkpoint, when the quota no longer counts the lost ones.
    lost_ids = renter.live_instance_ids()
    step = renter.training_step(job)
    for instance_id in lost_ids:
        renter.cloud.post("kill", id=instance_id, reason="Server.SpotInstanceTermination")
    renter.wait_for_steps(job, 2)
    assert len(renter.live_instance_ids()) == 2 and not set(renter.live_instance_ids()) & set(lost_ids)
    first_step = newest_attempt(job).first_step
    assert first_step > 0 and first_step >= step - 40, "checkpoints are a second apart"

    # Stop and resume: new machines continue at the step of the stop.
    renter.run("stop", job.name)
    assert job.state == "stopped"
    renter.assert_nothing_left()
    stopped_step = known(job.status().step)
    ended_ids = renter.all_instance_ids()
    renter.run("resume", "-d", "-y", job.name)
    renter.wait_for_steps(job, newest_attempt(job).number + 1)
    assert newest_attempt(job).first_step == stopped_step
    assert not set(renter.live_instance_ids()) & set(ended_ids) and len(renter.live_instance_ids()) == 2

    # A later limit: the machines outlive the first one.
    live_ids = renter.live_instance_ids()
    step = renter.training_step(job)
    assert "may take 4 hours" in renter.run("extend", "-y", job.name, "--max-hours", "4")
    renter.cloud.post("advance", seconds=9000)  # past the first limit of 2 hours and a quarter
    renter.wait_for(lambda: renter.training_step(job) > step + 20)
    assert renter.live_instance_ids() == live_ids and not job.has_ended
    renter.run("down", "-y", job.name)
    assert job.state == "stopped" and len(renter.all_instance_ids()) == 6
    renter.assert_nothing_left()


def test_machine_at_risk_trains_on_beside_a_late_spare_until_it_is_interrupted(renter: Renter) -> None:
    job = renter.launch("--spares", "1", "--on-demand-spares", "--late-spares", epochs=ENDLESS)
    renter.wait_for_steps(job)
    assert sorted(renter.live_instances_by_machine()) == ["0", "1"], "no machine is at risk"

    # EC2 recommends to move: a spare is rented on demand, and the machine trains on.
    at_risk_id = renter.instance_id("1")
    renter.cloud.post("rebalance", id=at_risk_id)
    renter.wait_for(lambda: "2" in renter.live_instances_by_machine())
    renter.wait_for(lambda: machine_phase(job, "2") == "spare")
    assert "at risk            machine 1: EC2 may interrupt it soon" in renter.run("status", job.name)
    log = job.run_folder.supervisor_log_path.read_text().splitlines()
    (line,) = [line for line in log if "EC2 may interrupt it soon" in line]
    assert "machine 1" in line and "it goes on training" in line
    assert newest_attempt(job).number == 1 and machine_phase(job, "1") == "running"
    machines = {machine["id"]: machine for machine in renter.run_json("cost", job.name)["machines"]}
    assert len(machines) == 3 and machines[renter.instance_id("2")]["market"] == "on-demand"
    assert machines[at_risk_id]["market"] == "spot" and len({machine["zone"] for machine in machines.values()}) == 1
    assert len(renter.placement_group_ids()) == 1

    # The interruption comes: now it leaves, and the spare takes over.
    renter.cloud.interrupt(at_risk_id, notice=60)
    renter.wait_for_members(job, "0", "2")
    renter.wait_for_steps(job, 2)
    renter.wait_for_replacement("1", at_risk_id)
    assert job.status().risk == ""
    renter.run("down", "-y", job.name)
    assert job.state == "stopped"
    renter.assert_nothing_left()
    renter.assert_costs_match_the_bill(job)


def lose_gpu(renter: Renter, machine: str) -> str:
    """Let a GPU of a machine fall off the bus; its agent still answers. Returns the instance."""
    instance_id = renter.instance_id(machine)
    renter.cloud.post("break_gpu", id=instance_id, how="lost")
    return instance_id


def test_machine_that_loses_its_gpu_is_exchanged_and_the_one_too_many_ends_the_job(renter: Renter) -> None:
    renter.cloud.post("set", gpus=1)
    job = renter.launch("--save-seconds", "1", "--max-exchanges", "1", epochs=ENDLESS)
    renter.wait_for_steps(job)
    lost_id = lose_gpu(renter, "1")
    renter.wait_for(lambda: lost_id not in renter.live_instance_ids())
    renter.wait_for_steps(job, 3)
    renter.wait_for_members(job, "0", "1")
    (release,) = renter.journal_events(job, InstancesReleased)
    assert release.ids == (lost_id,) and release.is_exchange and newest_attempt(job).first_step > 0
    assert release.reason.startswith("0 of 1 GPUs answer (nvidia-smi: Unable to determine the device handle")
    assert any("machine 1: 0 of 1 GPUs answer" in row.reason for row in job.timeline())

    lose_gpu(renter, "1")
    renter.wait_for(lambda: job.has_ended, 120)
    assert job.result is not None and job.state == "stopped", job.status()
    assert job.result.reason.startswith("machine 1: 0 of 1 GPUs answer")
    assert job.result.reason.endswith("machines exchanged before: 1 of 1 (--max-exchanges)")
    assert len(renter.all_instance_ids()) == 3, renter.describe()
    saved = list(renter.cloud.folder.glob(f"efs/*/{job.spec.uid}/checkpoints/*/*.pt"))
    assert saved, "the machine that still works has saved"
    renter.assert_nothing_left()
    cost, bill = renter.run_json("cost", job.name), renter.cloud.bill()
    assert cost["dollars"] == pytest.approx(bill["total"], rel=0.01), (cost, bill)


def first_launch(renter: Renter, job: Job) -> float:
    return float(renter.run_json("cost", job.name)["machines"][0]["launched"])


def test_job_saves_and_stops_at_its_limit_of_hours_or_dollars(renter: Renter) -> None:
    """The limits are lowered while the jobs train, so that a busy computer cannot reach them before."""
    hours_job, dollars_job, traffic_job = jobs = [
        renter.launch("--max-price-total", "1.0", machines=1, epochs=ENDLESS) for _ in range(3)
    ]
    for job in jobs:
        renter.wait_for_steps(job)
    seconds = 30 * PATIENCE  # from now on, for each of the limits
    hours = (time.time() - first_launch(renter, hours_job) + seconds) / 3600
    renter.run("extend", hours_job.name, "--max-hours", f"{hours:.4f}")
    # 15 s more: a limit below a minute's price, the least that EC2 bills, would be refused. A cent would last minutes.
    hours = (time.time() - first_launch(renter, dollars_job) + seconds + 15) / 3600
    hundredths = range(1, 10_000)  # of a cent
    index = bisect.bisect_left(
        hundredths, hours, key=lambda number: known(rental_limit(dollars_job, dollars=number / 10_000)).hours
    )
    renter.run("extend", dollars_job.name, "--max-price-total", f"{hundredths[index] / 10_000:.4f}")
    for instance in renter.cloud.instances():
        assert instance["tags"]["imgnet:ssh-from"].endswith("/32"), "else another launch closes ssh to it"
        if instance["tags"]["imgnet:job"] == traffic_job.spec.uid:
            renter.cloud.post("transfer", id=instance["id"], efs_written=20 * 10**9)  # $1.20
    for job, unit in ((hours_job, "hour"), (dollars_job, "$"), (traffic_job, "$")):
        result = wait_for_end(renter, job, "stopped", 300)
        assert unit in result.reason and known(job.status().step) > 0, result.reason
        assert list(renter.cloud.folder.glob(f"efs/*/{job.spec.uid}/checkpoints/*"))
    assert len(renter.all_instance_ids()) == 3
    renter.assert_nothing_left()


@pytest.mark.parametrize(("machines", "internet"), [(1, "public"), (2, "nat")])
def test_machines_that_hang_past_their_power_off_are_terminated(renter: Renter, machines: int, internet: str) -> None:
    """The one machine, or the one through which all others are reached."""
    renter.cloud.post("set", tells_time=True, nat_seconds=1.0)
    job = renter.launch("--internet", internet, machines=machines, epochs=ENDLESS)
    renter.wait_for_steps(job)
    renter.cloud.post("freeze", id=renter.instance_id("0"))
    renter.cloud.post("advance", seconds=2.3 * 3600)  # past the limit and the power-off, of which nothing is left
    result = wait_for_end(renter, job, "stopped")
    assert "its time limit passed" in result.reason, result.reason
    hung = renter.cloud.instances()[0]
    assert hung["reason"] == "Client.UserInitiatedShutdown", hung
    renter.assert_nothing_left()
    report = renter.run_json("cost", job.name)
    rest = report["dollars"] - sum(row["dollars"] for row in report["traffic"])
    bill = renter.cloud.bill()
    assert report["running"] == 0 and rest == pytest.approx(bill["total"] - bill["efs"], rel=0.01), (report, bill)


def test_stop_terminates_a_machine_that_hangs(renter: Renter) -> None:
    job = renter.launch(machines=1, epochs=ENDLESS)
    renter.wait_for_steps(job)
    renter.cloud.post("freeze", id=renter.instance_id("0"))
    renter.run("stop", job.name, env={STOP_VARIABLE: "5"})
    assert job.state == "stopped", job.status()
    renter.assert_nothing_left()


def test_job_in_a_capacity_block_ends_before_ec2_ends_its_machines(renter: Renter) -> None:
    renter.create_stack()
    seconds = 120 * PATIENCE  # until EC2 ends the machines; at three quarters of it the job ends by itself
    end = time.time() + CLOSING_SECONDS + seconds
    block = renter.cloud.post("reserve", type=TYPE, zone="us-east-1a", count=2, is_block=True, end=end)
    refused = renter.cli(*renter.launch_arguments("--reservation", block, machines=3))
    assert refused.code == 1 and "2 of its 2 machines are free, and the job needs 3; pass --machines 2" in refused.err
    job = renter.launch("--reservation", block, epochs=ENDLESS)
    renter.wait_for_steps(job, steps=1)
    result = wait_for_end(renter, job, "stopped", 240)
    assert "the end of its reserved machines on EC2" in result.reason and known(job.status().step) > 0, result.reason
    assert END_REASON not in {instance["reason"] for instance in renter.cloud.instances()}, "the job ended them"
    (market,) = {(row["market"], row["zone"], row["dollars"]) for row in renter.run_json("cost", job.name)["machines"]}
    assert market == ("capacity-block", "us-east-1a", 0.0)
    renter.assert_costs_match_the_bill(job)
    renter.assert_nothing_left()


def test_stop_saves_and_fetches_the_files_without_a_supervisor(renter: Renter) -> None:
    job = renter.launch("--save-seconds", "600", epochs=ENDLESS)
    renter.wait_for_steps(job, steps=2)
    renter.kill_supervisor()
    renter.run("stop", job.name)
    result = wait_for_end(renter, job, "stopped")
    saved_step = max(
        int(path.stem.split("-")[1]) for path in renter.cloud.folder.glob("efs/*/*/checkpoints/*/step-*.pt")
    )
    agent_status = json.loads(job.run_folder.status_path("0").read_text())
    assert agent_status["state"] == "stopped" and saved_step == agent_status["step"] > 2
    assert "user" in result.reason
    renter.assert_nothing_left()


def test_machines_without_a_supervisor_power_off_and_resume_fetches_the_result(renter: Renter) -> None:
    job = renter.launch(epochs=3, pace=(4, 2.0))
    renter.wait_for_steps(job, steps=2)
    renter.kill_supervisor()
    renter.sandbox.train_fast()
    result_path: Path = renter.wait_for(
        lambda: next(renter.cloud.folder.glob(f"efs/*/{job.spec.uid}/result.json"), None), 120
    )
    assert len(json.loads(result_path.read_text())["epochs"]) == 3 and not job.has_ended
    # At their end the agents have set the power-off.
    renter.wait_for(
        lambda: not any("-m cluster.agent" in command_line(pid) for pid in process_ids(renter.cloud.folder))
    )
    live_ids = renter.live_instance_ids()
    renter.cloud.post("advance", seconds=500)
    assert renter.live_instance_ids() == live_ids != []
    renter.cloud.post("advance", seconds=200)
    renter.wait_for(lambda: renter.live_instance_ids() == [])
    assert {instance["reason"] for instance in renter.cloud.instances()} == {"Client.InstanceInitiatedShutdown"}
    assert "nothing to remove" in renter.run("gc")
    renter.run("ls")
    # The files at home do not show the end, and a supervisor rents no machines that nobody asked for.
    reason = wait_for_end(renter, job, "stopped").reason
    assert "limit" in reason and f"imgnet-cluster resume {job.name}" in reason and len(renter.all_instance_ids()) == 2
    renter.run("resume", "-d", "-y", job.name)
    renter.wait_for(lambda: not (job.has_ended and job.state == "stopped"))
    result = wait_for_end(renter, job, "done")
    assert len(result.epochs) == 3
    renter.run("resume", "-d", "-y", job.name, "--epochs", "+1")
    renter.wait_for(lambda: not job.has_ended)
    assert len(wait_for_end(renter, job, "done").epochs) == 4
    renter.assert_nothing_left()
