"""Rented machines that break while they train: their GPU falls off the bus, or its driver hangs.

The supervisor exchanges them, and only so many. Their agents still answer.
"""

import json

import pytest
from support.aws_user import Renter, renter
from support.sandbox import ENDLESS
from support.simcloud.fixture import simcloud

from cluster.jobs.job import Job
from cluster.state import attempts
from infra.aws.journal_events import InstancesReleased

__all__ = ["renter", "simcloud"]  # fixtures


def wait_until_both_train(renter: Renter, job: Job, after: int = 0) -> attempts.Attempt:
    """Wait until an attempt after this number trains on two machines, and return it."""

    def training_attempt() -> attempts.Attempt | None:
        assert not job.has_ended, f"{job.status()}\n{renter.describe()}"
        newest = attempts.newest_attempt(job.run_folder.shared)
        is_new = newest is not None and newest.number > after and len(newest.members) == 2
        has_steps = is_new and newest is not None and renter.training_step(job) >= newest.first_step + 4
        return newest if has_steps else None

    found: attempts.Attempt = renter.wait_for(training_attempt, 150)
    return found


def break_gpu(renter: Renter, machine: str, how: str) -> str:
    """Break a GPU of a machine, and return its instance."""
    instance_id = renter.instance_id(machine)
    renter.cloud.post("break_gpu", id=instance_id, how=how)
    return instance_id


def test_machine_that_loses_its_gpu_is_exchanged_and_the_one_too_many_ends_the_job(renter: Renter) -> None:
    renter.cloud.post("machines", gpus=1)
    job = renter.launch("--save-seconds", "1", "--max-exchanges", "1", epochs=ENDLESS)
    attempt = wait_until_both_train(renter, job)
    lost_id = break_gpu(renter, "1", "lost")
    renter.wait_for(lambda: lost_id not in renter.live_instance_ids())
    attempt = wait_until_both_train(renter, job, attempt.number + 1)
    (release,) = renter.journal_events(job, InstancesReleased)
    assert release.ids == (lost_id,) and release.is_exchange and attempt.first_step > 0
    assert release.reason.startswith("0 of 1 GPUs answer (nvidia-smi: Unable to determine the device handle")
    assert any("machine 1: 0 of 1 GPUs answer" in row.reason for row in job.timeline())

    break_gpu(renter, "1", "lost")
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


def test_machine_whose_driver_hangs_is_exchanged(renter: Renter) -> None:
    renter.cloud.post("machines", gpus=1)
    job = renter.launch("--save-seconds", "1", "--stall-seconds", "5", epochs=ENDLESS)
    attempt = wait_until_both_train(renter, job)
    hung_id = break_gpu(renter, "0", "hangs")
    renter.wait_for(lambda: hung_id not in renter.live_instance_ids(), 180)
    (release,) = renter.journal_events(job, InstancesReleased)
    assert release.ids == (hung_id,) and release.is_exchange
    assert release.reason.startswith("0 of 1 GPUs answer (nvidia-smi: no answer in 60 s)")
    wait_until_both_train(renter, job, attempt.number + 1)
    renter.run("down", "-y", job.name)
    renter.assert_nothing_left()


def test_only_machine_of_a_job_is_exchanged_and_goes_on_from_its_checkpoint(renter: Renter) -> None:
    renter.cloud.post("machines", gpus=1)
    job = renter.launch("--save-seconds", "1", "--max-exchanges", "1", machines=1, epochs=ENDLESS)
    renter.wait_for(lambda: renter.training_step(job) > 20, 120)
    first_id = break_gpu(renter, "0", "lost")
    renter.wait_for(lambda: renter.live_instance_ids() not in ([], [first_id]))
    renter.wait_for(lambda: renter.training_step(job) > 20, 120)
    newest = attempts.newest_attempt(job.run_folder.shared)
    assert newest is not None and newest.first_step > 0
    break_gpu(renter, "0", "lost")
    renter.wait_for(lambda: job.has_ended, 120)
    assert job.result is not None and job.state == "failed", job.status()
    assert "GPUs answer" in job.result.reason and "machines exchanged before: 1 of 1" in job.result.reason
    renter.assert_nothing_left()


def test_without_a_supervisor_nothing_is_rented_and_status_says_so(renter: Renter) -> None:
    renter.cloud.post("machines", gpus=1)
    job = renter.launch("--save-seconds", "1", epochs=ENDLESS)
    wait_until_both_train(renter, job)
    renter.kill_supervisor()
    broken_id = break_gpu(renter, "1", "lost")
    status_path = next(renter.cloud.folder.glob(f"efs/*/{job.spec.uid}/status/1.json"))
    renter.wait_for(lambda: json.loads(status_path.read_text()).get("fault") == "machine")
    without_keys = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}

    def read_warning() -> str:
        """Return the warning, "" while a supervisor that was just started may still come up."""
        return str(renter.run_json("status", job.name, env=without_keys)["warning"])

    warning = renter.wait_for(read_warning)
    assert "nothing is rented, so lost and broken machines are not replaced until you type" in warning, warning
    assert broken_id in renter.live_instance_ids() and len(renter.all_instance_ids()) == 2
    renter.run("status", job.name)
    renter.wait_for(lambda: broken_id not in renter.live_instance_ids())
    renter.run("down", "-y", job.name)
    renter.assert_nothing_left()
