"""Jobs on a real Slurm cluster on this computer, by the installed command."""

import json
import re
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
from support import exact_jobs
from support.sandbox import ENDLESS, Sandbox
from support.slurm import SlurmCluster

from cluster.jobs.job import Job
from cluster.state import attempts, status
from train.tools import checkpoint_io

EPOCHS = 120  # enough for a node to be replaced meanwhile
OPTIONS = ("--machines", "3", "--procs", "1", *exact_jobs.OPTIONS)
SLURM_OPTIONS = ("--slurm", "--gpus-per-node", "0")


class SlurmSandbox:
    """A sandbox on a login node, and the cluster."""

    def __init__(self, sandbox: Sandbox, cluster: SlurmCluster) -> None:
        self.sandbox = sandbox
        self.cluster = cluster

    def launch(self, epochs: int, *options: str) -> Job:
        """Launch a job of three machines on the cluster without following it."""
        result = self.sandbox.cli("launch", "-d", *SLURM_OPTIONS, *OPTIONS, *options, self.write_recipe(epochs))
        assert result.code == 0, result
        return self.sandbox.job(int(re.findall(r"job-(\d+) launched", result.out)[0]))

    def write_recipe(self, epochs: int) -> str:
        return str(exact_jobs.write_recipe(self.sandbox.path / f"several_{epochs}.py", self.sandbox.data, 3, epochs))

    def slurm_jobs(self, *options: str) -> list[str]:
        """Return the ids of the jobs in Slurm's queue."""
        return self.cluster.run("squeue", "--noheader", "--format=%i", *options).stdout.split()

    def node_of(self, machine: str) -> str:
        """Return the node of a machine's newest step."""
        lines = self.cluster.run("squeue", "--noheader", "--steps", "--format=%j|%N").stdout.splitlines()
        return next(line.partition("|")[2].strip() for line in lines if line.startswith(f"machine-{machine}|"))

    def wait_for(self, job: Job, condition: Callable[[], Any], seconds: float = 180.0) -> None:
        """Wait for a condition. Raises `AssertionError` when it is not true in time."""

        def describe() -> str:
            rows = status.machine_statuses(job.run)
            states = {name: row.state for name, row in rows.items()}
            history = [f"{row.number} {row.machine_names} {row.reason}" for row in job.run_folder.attempts.all()]
            logs = [f"--- {path}\n{path.read_text()[-2000:]}" for path in sorted((job.path / "slurm").glob("*"))]
            log = job.run_folder.supervisor_log_path.read_text() if job.run_folder.supervisor_log_path.exists() else ""
            return "\n".join([json.dumps(states), *history, str(job.result), *logs, log, self.cluster.describe()])

        self.sandbox.wait_for(condition, seconds, describe=describe, poll_seconds=0.2)

    def wait_for_steps(self, job: Job, steps: int, after_attempt: int = 0) -> None:
        """Wait until all three machines have trained `steps` steps in an attempt after `after_attempt`."""

        def train() -> bool:
            assert job.result is None, job.result
            return exact_jobs.have_trained(job, steps, "0", "1", "2", after_attempt=after_attempt)

        self.wait_for(job, train)

    def assert_all_is_over(self, job: Job) -> None:
        """Wait until nothing of a job is left: neither in Slurm's queue, nor on the nodes, nor on this computer."""
        self.wait_for(job, lambda: not self.slurm_jobs() and not self.cluster.job_pids())
        self.wait_for(job, lambda: not self.sandbox.job_pids())


@pytest.fixture
def cluster(slurm: Callable[..., SlurmCluster]) -> SlurmCluster:
    """A cluster of four nodes. It is made before the sandbox, so that its daemons are not processes of the sandbox."""
    return slurm(4)


@pytest.fixture
def place(cluster: SlurmCluster, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> SlurmSandbox:
    """A sandbox on a login node of the cluster."""
    for name in ("SLURM_CONF", "PATH"):
        sandbox.env[name] = cluster.env[name]
        monkeypatch.setenv(name, cluster.env[name])
    return SlurmSandbox(sandbox, cluster)


def test_job_survives_a_node_without_power_and_ends_as_an_undisturbed_one(place: SlurmSandbox) -> None:
    job = place.launch(EPOCHS, "--log-ids", "--lost-seconds", "2")
    place.wait_for_steps(job, 5)
    (slurm_job,) = place.slurm_jobs()
    lost_node = place.cluster.job_fields(slurm_job)["BatchHost"]  # the job goes on without its batch script
    next(node for node in place.cluster.nodes if node.name == lost_node).power_off()
    place.wait_for_steps(job, 5, after_attempt=2)  # the second attempt is that of the two others
    assert len(place.slurm_jobs()) == 2  # the replacement has a job of its own
    place.wait_for(job, lambda: job.has_ended, 150)
    result = job.result
    assert result and result.state == "done" and result.ids_wrong == [], result
    place.assert_all_is_over(job)
    assert not place.slurm_jobs(f"--jobs={slurm_job}")

    undisturbed = place.sandbox.cli("launch", "--local", *OPTIONS, place.write_recipe(EPOCHS), timeout=240)
    assert undisturbed.code == 0, undisturbed
    expected = place.sandbox.job(2).result
    assert expected and result.steps == expected.steps
    assert len(result.epochs) == len(expected.epochs) == EPOCHS
    for name in ("steps", "train_images", "val_images"):
        assert [getattr(row, name) for row in result.epochs] == [getattr(row, name) for row in expected.epochs]
    assert (result.top1, result.top5) == (expected.top1, expected.top5)


def test_rehearse_loss_stop_resume_attach_and_shell(place: SlurmSandbox) -> None:
    job = place.launch(ENDLESS, "--lost-seconds", "2")
    place.wait_for_steps(job, 5)
    shell = place.sandbox.cli("ssh", "job-1", "--machine", "2", "--", "printenv", "SLURMD_NODENAME")
    assert shell.code == 0 and shell.out.strip() == place.node_of("2"), shell
    attach = ["timeout", "60", "script", "-qfec", f"{place.sandbox.command} attach job-1 --machine 0", "/dev/null"]
    with subprocess.Popen(attach, stdout=subprocess.PIPE, env=place.sandbox.env, cwd=place.sandbox.path) as terminal:
        assert terminal.stdout and any(b"epoch" in line for line in terminal.stdout)  # the trainers' log
        terminal.terminate()
    for notice in ([], ["--notice", "20"]):
        before = attempts.newest_attempt(job.run_folder.shared)
        assert place.sandbox.cli("rehearse-loss", "job-1", "--machine", "1", *notice).code == 0
        place.wait_for_steps(job, 3, after_attempt=before.number + 1 if before else 0)
        assert len(place.slurm_jobs()) == 1  # the node was still ours

    stopped = place.sandbox.cli("stop", "job-1")
    assert stopped.code == 0 and job.result and job.result.state == "stopped", stopped
    place.assert_all_is_over(job)
    step = max((row.step for row in job.steps()), default=0)
    resumed = place.sandbox.cli("resume", "-d", "job-1")
    assert resumed.code == 0, resumed
    place.wait_for_steps(job, 3)
    newest = attempts.newest_attempt(job.run_folder.shared)
    assert newest and newest.first_step >= step > 0
    assert place.sandbox.cli("stop", "job-1").code == 0
    place.assert_all_is_over(job)


def test_time_limit_of_slurm_stops_the_job_with_a_checkpoint(place: SlurmSandbox) -> None:
    job = place.launch(ENDLESS, "--time", "3", "--save-seconds", "1000")
    place.wait_for_steps(job, 3)
    place.wait_for(job, lambda: job.has_ended, 150)
    result = job.result
    assert result and (result.state, result.reason) == ("stopped", "Slurm's time limit is near")
    assert checkpoint_io.newest_checkpoint(job.run_folder.shared / "checkpoints" / "000001")
    place.assert_all_is_over(job)


def test_job_that_waits_for_nodes_shows_why_and_scancel_ends_it(place: SlurmSandbox) -> None:
    cluster = place.cluster
    blocker = cluster.sbatch("sleep 600", "--nodes=4", "--exclusive")
    cluster.wait_for(lambda: cluster.job_state(blocker) == "RUNNING")
    job = place.launch(ENDLESS)
    shown = json.loads(place.sandbox.cli("status", "job-1", "-o", "json").out)
    assert shown["state"] == "waiting" and "waiting for Slurm" in shown["doing"]
    attach = place.sandbox.cli("attach", "job-1")
    assert attach.code == 1 and "waiting for Slurm" in attach.err and attach.err.count("\n") == 1
    stopped = place.sandbox.cli("stop", "job-1", timeout=120)
    assert stopped.code == 0 and job.result and job.result.state == "stopped", stopped
    assert place.slurm_jobs() == [blocker]
    place.wait_for(job, lambda: not place.sandbox.job_pids())

    assert place.sandbox.cli("resume", "-d", "job-1").code == 0
    cluster.run("scancel", blocker)
    place.wait_for_steps(job, 3)
    (slurm_job,) = place.slurm_jobs()
    cluster.run("scancel", slurm_job)
    place.wait_for(job, lambda: job.has_ended)
    result = job.result
    assert result and result.state in ("stopped", "failed"), result
    assert result.reason == f"Slurm ended its job {slurm_job}: cancelled"
    place.assert_all_is_over(job)


def test_wrong_options_are_one_line_and_nothing_is_submitted(place: SlurmSandbox) -> None:
    for options, message in [
        (("--partition", "nothing"), "the cluster has the partitions main, requeued, urgent"),
        (("--machines", "9"), "the partition main has 4 nodes, but the job needs 9"),
        (("--gpus-per-node", "2"), "have no GPUs; for nodes without: --gpus-per-node 0"),
        (("--time", "soon"), "sbatch: "),
        (("--sbatch=--constraint=none-such",), "sbatch: "),
    ]:
        result = place.sandbox.cli("launch", *SLURM_OPTIONS, *OPTIONS, *options, place.write_recipe(2))
        assert result.code != 0 and message in result.err and result.err.count("\n") == 1, (options, result)
    assert not place.slurm_jobs() and not place.sandbox.job_pids()
