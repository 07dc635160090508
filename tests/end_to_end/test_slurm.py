"""Jobs on a real Slurm cluster on this computer, by the installed command."""

import json
import re
import subprocess

import pytest
from support import exact_jobs
from support.exact_jobs import newest_attempt, wait_for_steps, write_recipe
from support.sandbox import ENDLESS, Sandbox
from support.slurm import SlurmCluster
from support.waiting import wait_for

from cluster.jobs.job import Job
from train.tools.agent_protocol import newest_intact_checkpoint

EPOCHS = 30
PACE = (12, 0.5)  # for `Sandbox.write_recipe`: a job does not end before a node is replaced
OPTIONS = ("--machines", "3", "--procs", "1", *exact_jobs.OPTIONS)
SLURM_OPTIONS = ("--slurm", "--gpus-per-node", "0")


class SlurmUser:
    """A user on a login node of a cluster of four nodes."""

    def __init__(self, sandbox: Sandbox, cluster: SlurmCluster) -> None:
        self.sandbox = sandbox
        self.cluster = cluster

    def launch(self, recipe: str, *options: str) -> Job:
        result = self.sandbox.cli("launch", "-d", *SLURM_OPTIONS, *OPTIONS, *options, recipe)
        assert result.code == 0, result
        return self.sandbox.job(int(re.findall(r"job-(\d+) launched", result.out)[0]))

    def slurm_jobs(self, *options: str) -> list[str]:
        return self.cluster.run("squeue", "--noheader", "--format=%i", *options).split()

    def describe(self, job: Job) -> str:
        """Return what job and cluster say, for the message of a failure."""
        logs = [f"--- {path}\n{path.read_text()[-2000:]}" for path in sorted((job.path / "slurm").glob("*"))]
        return "\n".join([exact_jobs.describe(job), *logs, self.cluster.describe()])

    def assert_end(self, job: Job, state: str, reason: str = "") -> None:
        """Wait until a job has ended, and nothing of it is in Slurm's queue, on the nodes or on this computer."""
        wait_for(lambda: job.has_ended, 150, describe=lambda: self.describe(job))
        assert job.result and job.result.state == state and reason in job.result.reason, job.result
        wait_for(
            lambda: not (self.slurm_jobs() or self.cluster.job_pids() or self.sandbox.job_pids()),
            describe=lambda: self.describe(job),
        )


@pytest.fixture
def user(slurm: SlurmCluster, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> SlurmUser:
    """A user in the sandbox. The cluster is made first, so that its daemons are not processes of the sandbox."""
    for name in ("SLURM_CONF", "PATH"):
        sandbox.env[name] = slurm.env[name]
        monkeypatch.setenv(name, slurm.env[name])
    return SlurmUser(sandbox, slurm)


def test_job_survives_a_node_without_power_and_uses_each_image_once(user: SlurmUser) -> None:
    recipe = write_recipe(user.sandbox, 3, EPOCHS, PACE)
    job = user.launch(recipe, "--log-ids", "--lost-seconds", "2")
    wait_for_steps(job, 5, "0", "1", "2")
    (slurm_job,) = user.slurm_jobs()
    hosts = [row.host for row in job.machine_details().values()]
    # The node of the batch script: the job goes on without the script.
    lost_node = user.cluster.run("squeue", "--noheader", "--format=%B", f"--jobs={slurm_job}").strip()
    next(node for node in user.cluster.nodes if node.name == lost_node).power_off()
    wait_for_steps(job, 5, "0", "1", "2", after_attempt=2)  # the second attempt is that of the two others
    assert job.run_folder.attempts.all()[1].live_step, "the others go on in place"
    assert len(user.slurm_jobs()) == 2  # the replacement has a job of its own
    new_host = ({node.name for node in user.cluster.nodes} - {*hosts}).pop()
    assert [row.host for row in job.machine_details().values()] == [
        new_host if host == lost_node else host for host in hosts
    ], "status shows the nodes"
    user.sandbox.train_fast()
    user.assert_end(job, "done")
    assert not user.slurm_jobs(f"--jobs={slurm_job}")
    assert job.result and job.result.ids_wrong == [] and len(job.result.epochs) == EPOCHS, job.result


def test_rehearse_loss_stop_resume_attach_and_shell(user: SlurmUser) -> None:
    sandbox = user.sandbox
    job = user.launch(write_recipe(sandbox, 3, ENDLESS), "--lost-seconds", "2")
    wait_for_steps(job, 5, "0", "1", "2")
    shell = sandbox.cli("ssh", "job-1", "--machine", "2", "--", "printenv", "SLURMD_NODENAME")
    assert shell.code == 0, shell
    steps = user.cluster.run("squeue", "--noheader", "--steps", "--format=%j|%N").splitlines()
    assert f"machine-2|{shell.out.strip()}" in [step.strip() for step in steps]
    attach = ["timeout", "60", "script", "-qfec", f"{sandbox.command} attach job-1 --machine 0", "/dev/null"]
    with subprocess.Popen(attach, stdout=subprocess.PIPE, env=sandbox.env, cwd=sandbox.path) as terminal:
        assert terminal.stdout and any(b"epoch" in line for line in terminal.stdout)  # the trainers' log
        terminal.terminate()
    for notice in ([], ["--notice", "20"]):
        number = newest_attempt(job).number
        assert sandbox.cli("rehearse-loss", "job-1", "--machine", "1", *notice).code == 0
        wait_for_steps(job, 3, "0", "1", "2", after_attempt=number + 1)
        assert job.run_folder.attempts.all()[number].live_step, "the others go on in place"
        assert len(user.slurm_jobs()) == 1  # the node was still ours

    stopped = sandbox.cli("stop", "job-1")
    assert stopped.code == 0, stopped
    user.assert_end(job, "stopped")
    step = max((row.step for row in job.run_folder.steps()), default=0)
    resumed = sandbox.cli("resume", "-d", "job-1")
    assert resumed.code == 0, resumed
    wait_for_steps(job, 3, "0", "1", "2")
    assert newest_attempt(job).first_step >= step > 0
    assert sandbox.cli("stop", "job-1").code == 0
    user.assert_end(job, "stopped")


def test_time_limit_of_slurm_stops_the_job_with_a_checkpoint(user: SlurmUser) -> None:
    recipe = write_recipe(user.sandbox, 3, ENDLESS)
    job = user.launch(recipe, "--no-standby", "--time", "3", "--save-seconds", "1000")
    wait_for_steps(job, 3, "0", "1", "2")
    user.assert_end(job, "stopped", "Slurm's time limit is near")
    assert newest_intact_checkpoint(job.run_folder.shared / "checkpoints" / "000001")


def test_job_that_waits_for_nodes_shows_why_and_scancel_ends_it(user: SlurmUser) -> None:
    cluster, sandbox = user.cluster, user.sandbox
    for options in (("--time", "soon"), ("--sbatch=--constraint=none-such",)):
        for dry_run in ("--dry-run", "--no-standby"):
            refused = sandbox.cli("launch", *SLURM_OPTIONS, *OPTIONS, *options, dry_run, write_recipe(sandbox, 3, 2))
            assert refused.code == 2 and "sbatch: " in refused.err and refused.err.count("\n") == 1, refused
    refused = sandbox.cli("launch", *SLURM_OPTIONS, *OPTIONS, "--sbatch=--mem=9999T", write_recipe(sandbox, 3, 2))
    assert refused.code == 1 and "sbatch: " in refused.err, refused  # nodes that are down may be refused like this
    assert not user.slurm_jobs() and not sandbox.job_pids() and not list((sandbox.path / "runs").glob("job-*"))

    blocker = cluster.run("sbatch", "--parsable", "--nodes=4", "--exclusive", "--wrap=sleep 600").strip()
    cluster.wait_for(lambda: user.slurm_jobs("--states=RUNNING") == [blocker])
    job = user.launch(write_recipe(sandbox, 3, ENDLESS), "--no-standby")
    shown = json.loads(sandbox.cli("status", "-o", "json").out)
    assert shown["state"] == "waiting" and "waiting for Slurm" in shown["doing"]
    attach = sandbox.cli("attach", job.name)
    assert attach.code == 1 and "waiting for Slurm" in attach.err and attach.err.count("\n") == 1
    stopped = sandbox.cli("stop", job.name, timeout=120)
    assert stopped.code == 0 and job.result and job.result.state == "stopped", stopped
    assert user.slurm_jobs() == [blocker]
    wait_for(lambda: not sandbox.job_pids())

    assert sandbox.cli("resume", "-d", job.name).code == 0
    cluster.run("scancel", blocker)
    wait_for_steps(job, 3, "0", "1", "2")
    (slurm_job,) = user.slurm_jobs()
    cluster.run("scancel", slurm_job)
    wait_for(lambda: job.has_ended, describe=lambda: user.describe(job))
    assert job.result and job.result.state in ("stopped", "failed"), job.result
    user.assert_end(job, job.result.state, f"Slurm ended its job {slurm_job}: cancelled")
