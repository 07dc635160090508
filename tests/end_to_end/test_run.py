"""Scripts of a user, run by `imgnet-cluster run` on this computer, over ssh and on rented machines.

The script knows nothing of this program but its environment variables. It saves its step, and ends when a file tells
it to.
"""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.aws_user import TYPE, Renter, renter
from support.sandbox import Sandbox
from support.simcloud.fixture import simcloud
from support.ssh_machines import Testbed, testbed
from support.waiting import wait_for

from cluster.jobs.job import Job
from cluster.script.snapshot import newest_version

__all__ = ["renter", "simcloud", "testbed"]  # fixtures

SCRIPT = """\
import os, signal, sys, time
from pathlib import Path
import helper

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
saved = Path(os.environ["IMGNET_CHECKPOINTS"], "step")
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
step = int(saved.read_text()) if saved.exists() else 0
names = ["LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TOKEN"]
values = [f"{name}={os.environ.get(name)}" for name in names]
print(f"rank {rank} of {world} begins at step {step};", *values, flush=True)
while not Path(sys.argv[1], "end").exists():
    time.sleep(0.02)
    step += 1
    if rank == 0:
        Path(f"{saved}.new").write_text(str(step))
        os.replace(f"{saved}.new", saved)
    if Path(sys.argv[1], f"fail-{rank}").exists():
        raise ValueError(f"{helper.COMPLAINT} in rank {rank}")
    if asked:
        sys.exit(0)
print(f"rank {rank} is done at step {step}")
"""
STUBBORN = """\
import signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["setsid", "sleep", "1000"])
print("deaf", flush=True)
time.sleep(1000)
"""


class Runner:
    """A user with a sandbox, a project with a script, and a folder of files that tell the script what to do."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.project = sandbox.path / "mine"
        self.orders = sandbox.path / "orders"
        self.orders.mkdir()
        self.project.mkdir()
        (self.project / "train.py").write_text(SCRIPT)
        (self.project / "stubborn.py").write_text(STUBBORN)
        (self.project / "helper.py").write_text('COMPLAINT = "bad learning rate"\n')
        sandbox.env["IMGNET_RUNS"] = str(sandbox.path / "runs")

    def run(self, *options: str, command: tuple[str, ...] = ()) -> Job:
        """Run the script, without following the job."""
        words = command or ("python", "train.py", str(self.orders))
        result = self.sandbox.cli("run", "-d", *options, "--", *words, cwd=self.project)
        assert result.code == 0, result
        return self.sandbox.job(int(result.out.split(" launched")[0].rsplit("job-", 1)[1]))

    def log(self, job: Job, attempt: int, rank: int = 0) -> str:
        """Return what a rank has printed in an attempt, as it came home."""
        job.refresh()
        path = job.log_path(rank, attempt)
        return path.read_text() if path.exists() else ""

    def wait_for_start(self, job: Job, attempt: int, text: str, rank: int = 0, seconds: float = 90.0) -> None:
        """Wait until a rank has printed a text in an attempt."""
        wait_for(lambda: text in self.log(job, attempt, rank), seconds, describe=lambda: self.describe(job))

    def wait_for_members(self, job: Job, *machines: str) -> int:
        """Wait until these machines are the members of the newest attempt. Returns its number."""

        def are_members() -> int:
            newest = job.run_folder.attempts.newest()
            return newest.number if newest and set(newest.machine_names) == set(machines) else 0

        return int(wait_for(are_members, 90.0, describe=lambda: self.describe(job)))

    def describe(self, job: Job) -> str:
        return f"{job.status()}\n{job.timeline()}\n{self.log(job, max(1, job.last_attempt_number))}"

    def step(self, text: str) -> int:
        """Return the step at which a log says that its rank begins."""
        return int(text.partition("begins at step ")[2].partition(";")[0])


@pytest.fixture
def runner(sandbox: Sandbox) -> Iterator[Runner]:
    """A user. The supervisor of an ended job still writes the report, which takes long on a busy computer."""
    yield Runner(sandbox)
    if (sandbox.path / "runs/job-1/result.json").exists():
        wait_for(lambda: not sandbox.pids("-m cluster.jobs.supervisor"), 60)


def test_script_gets_the_variables_of_torchrun_and_continues_after_a_loss(runner: Runner) -> None:
    job = runner.run("--local", "--machines", "3", "--procs", "2", "--env", "OWN=1")
    for rank in range(6):
        runner.wait_for_start(job, 1, "MASTER_PORT", rank)
    line = runner.log(job, 1, 3)
    assert "rank 3 of 6 begins at step 0; LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=1" in line
    assert "TORCHELASTIC_RESTART_COUNT=0" in line
    wait_for(lambda: newest_version(job.run_folder.shared), 60)
    assert runner.sandbox.cli("rehearse-loss", "--machine", "2", "--for-good").code == 0
    number = runner.wait_for_members(job, "0", "1")
    runner.wait_for_start(job, number, "rank 0 of 4 begins")
    assert runner.step(runner.log(job, number)) > 0
    assert "machine 2 lost" in job.timeline()[-1].reason
    (runner.orders / "end").touch()
    assert job.wait(60) == "done", runner.describe(job)
    assert job.result and job.result.attempts == number and job.result.timeline[-1].machines == ()
    assert "rank 3 is done" in runner.log(job, number, 3)
    assert runner.sandbox.cli("report").code == 0
    (row,) = [row for row in runner.sandbox.cli("ls").out.splitlines() if row.startswith("job-1")]
    assert "train" in row and "done" in row


def test_failure_of_the_script_ends_the_job_with_its_rank_code_and_last_lines(runner: Runner) -> None:
    (runner.orders / "fail-2").touch()
    words = ("--local", "--machines", "3", "--retries", "1", "--", "python", "train.py", str(runner.orders))
    result = runner.sandbox.cli("run", *words, cwd=runner.project)
    assert result.code == 100, result
    reason = "machine 2: rank 2 ended with code 1: ValueError: bad learning rate in rank 2 (failed 2 times)"
    assert f"job-1 failed: {reason}" in " ".join(result.out.split()), result.out
    assert "the last lines of rank 2" in result.out and 'File "' in result.out and "logs job-1 --rank 2" in result.out
    assert runner.sandbox.job().last_attempt_number == 2


def test_stop_lets_the_script_save_and_resume_continues(runner: Runner) -> None:
    job = runner.run("--local", "--machines", "2")
    runner.wait_for_start(job, 1, "begins")
    saved = job.run_folder.work_folder() / "checkpoints/step"
    wait_for(saved.exists)
    assert runner.sandbox.cli("stop").code == 0
    assert job.state == "stopped"
    (runner.project / "helper.py").write_text('COMPLAINT = "another"\n')
    resumed = runner.sandbox.cli("resume", "-d")
    assert resumed.code == 0 and "starts its command again" in " ".join(resumed.out.split()), resumed
    runner.wait_for_start(job, 2, "begins")
    assert runner.step(runner.log(job, 2)) > 0
    assert "another" in (job.run_folder.work_folder("1") / "project/helper.py").read_text()
    (runner.orders / "end").touch()
    assert job.wait(60) == "done", runner.describe(job)


def test_script_that_ignores_the_signal_is_killed_with_all_it_started(runner: Runner) -> None:
    job = runner.run("--local", command=("python", "stubborn.py"))
    runner.wait_for_start(job, 1, "deaf")
    sleeper = runner.sandbox.pids("sleep 1000")
    assert sleeper
    assert runner.sandbox.cli("stop", timeout=120).code == 0
    assert job.status().reason == "stopped by the user; killed 25 s after SIGTERM, which it ignored"
    assert job.state == "stopped" and not set(sleeper) & set(runner.sandbox.pids("sleep 1000"))


def test_rank_that_is_killed_counts_as_a_failure_of_the_script(runner: Runner) -> None:
    job = runner.run("--local", "--machines", "2")
    runner.wait_for_start(job, 1, "begins", rank=1)
    wait_for(lambda: len(runner.sandbox.pids("train.py")) >= 2, 20)
    pids = [
        pid for pid in runner.sandbox.pids("train.py") if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes()
    ]
    os.kill(pids[0], signal.SIGKILL)
    assert job.wait(60) == "failed"
    assert "rank 1 was killed by SIGKILL" in job.status().reason


def test_machines_over_ssh_run_the_script_after_one_lost_its_power(
    runner: Runner, testbed: Callable[..., Testbed]
) -> None:
    bed = testbed(3)
    hosts = str(bed.write_hosts_toml(runner.sandbox.path / "hosts.toml"))
    job = runner.run("--ssh", hosts, "-y", "--procs", "1", "--lost-seconds", "3")
    runner.wait_for_start(job, 1, "begins", rank=2, seconds=180)
    bed.machines[1].power_off()
    number = runner.wait_for_members(job, "0", "2")
    runner.wait_for_start(job, number, "rank 1 of 2 begins", rank=1)
    pulled = runner.sandbox.cli("pull")
    assert pulled.code == 0, pulled
    step = int(Path(pulled.out.rsplit("  ", 1)[0], "step").read_text())
    (runner.orders / "end").touch()
    assert job.wait(120) == "done", runner.describe(job)
    last = newest_version(job.run_folder.shared)
    assert last and int((last / "step").read_text()) > step > 0
    assert runner.sandbox.cli("pull").out.startswith(f"{last}  ")
    assert "is done at step" in runner.log(job, number, 1)


def test_interrupted_machine_is_replaced_and_nothing_is_left(renter: Renter) -> None:
    runner = Runner(renter.sandbox)
    options = ("-y", "--type", TYPE, "--machines", "3", "--procs", "1", "--env", "TOKEN")
    renter.sandbox.env["TOKEN"] = "hunter2"
    dry_run = renter.run("run", *options, "--dry-run", "--", "python", "train.py", "x", cwd=runner.project)
    assert "nothing was started" in dry_run and "$" in dry_run
    job = runner.run(*options)
    runner.wait_for_start(job, 1, "begins", rank=2, seconds=240)
    interrupted_id = renter.instance_id("1")
    renter.cloud.interrupt(interrupted_id, notice=60)
    renter.wait_for(lambda: renter.live_instances_by_machine().get("1", interrupted_id) != interrupted_id, 120)
    number = int(
        renter.wait_for(
            lambda: (
                (newest := job.run_folder.attempts.newest())
                and newest.number > 1
                and set(newest.machine_names) == {"0", "1", "2"}
                and newest.number
            ),
            180,
        )
    )
    for rank in range(3):  # also that of the replacement
        runner.wait_for_start(job, number, f"rank {rank} of 3 begins", rank, seconds=120)
        assert "hunter2" in runner.log(job, number, rank)
    assert runner.step(runner.log(job, number)) > 0
    (runner.orders / "end").touch()
    assert job.wait(180) == "done", renter.describe()
    last = newest_version(job.run_folder.shared)
    assert last and int((last / "step").read_text()) > runner.step(runner.log(job, number))
    assert renter.run("pull").startswith(f"{last}  ")
    report = renter.run_json("cost", job.name)
    bill = renter.cloud.bill()
    assert {machine["id"] for machine in report["machines"]} == set(renter.all_instance_ids()) == set(bill["instances"])
    assert (
        len(bill["instances"]) == 4
        and report["running"] == 0
        and report["dollars"] == pytest.approx(bill["total"], rel=0.02, abs=0.02)
    )
    renter.assert_nothing_left()
