"""Scripts of a user, run by `imgnet-cluster run` on this computer, over ssh and on rented machines.

A script knows nothing of this program but its environment variables. It saves its step, and ends when a file tells it
to. What it gets beside its processes: its project, secrets, a container; its progress, checkpoints and events are read.
"""

import contextlib
import hashlib
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from support.aws_user import TYPE, Renter
from support.sandbox import CommandResult, Sandbox
from support.ssh_machines import Testbed
from support.waiting import wait_for

from cluster.jobs.job import Job
from cluster.script.snapshot import newest_version

SCRIPT = """\
import hashlib, os, signal, sys, time
from pathlib import Path
import helper

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
saved = Path(os.environ["IMGNET_CHECKPOINTS"], "step")
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
step = int(saved.read_text()) if saved.exists() else 0
names = ["LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"]
values = [f"{name}={os.environ.get(name)}" for name in names]
digest = hashlib.sha256(os.environ.get("TOKEN", "").encode()).hexdigest()
print(f"rank {rank} of {world} begins at step {step} with {digest};", *values, flush=True)
Path(os.environ["IMGNET_EVENTS"], f"events.out.tfevents.{rank}").write_bytes(b"")
while not Path(sys.argv[1], "end").exists():
    time.sleep(0.02)
    step += 1
    if rank == 0:
        Path(f"{saved}.new").write_text(str(step))
        os.replace(f"{saved}.new", saved)
        print(f"[{step}/100000] loss 0.5", flush=True)
    if Path(sys.argv[1], f"fail-{rank}").exists():
        raise ValueError(f"{helper.COMPLAINT} in rank {rank}")
    if asked:
        sys.exit(0)
print(f"rank {rank} is done at step {step}")
"""
SECRET = "hunter2-9c1f"
DIGEST = hashlib.sha256(SECRET.encode()).hexdigest()


class Runner:
    """A user with a sandbox, a project with a script, and a folder of files that tell the script what to do."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.project = sandbox.path / "mine"
        self.orders = sandbox.path / "orders"
        self.command = ("python", "train.py", str(self.orders))
        self.orders.mkdir()
        self.project.mkdir()
        (self.project / "train.py").write_text(SCRIPT)
        (self.project / "helper.py").write_text('COMPLAINT = "bad learning rate"\n')
        self.keys = sandbox.path / "keys.env"
        self.keys.write_text(f"TOKEN='{SECRET}'\n")
        sandbox.env["IMGNET_RUNS"] = str(sandbox.path / "runs")

    def cli(self, *options: str, timeout: float = 120) -> CommandResult:
        """Run the script by the installed command. Its secret is in a file."""
        return self.sandbox.cli(
            "run", "--env-file", self.keys, *options, "--", *self.command, cwd=self.project, timeout=timeout
        )

    def run(self, *options: str) -> Job:
        """Run the script, without following the job."""
        result = self.cli("-d", *options)
        assert result.code == 0, result
        return self.sandbox.job(int(result.out.split(" launched")[0].rsplit("job-", 1)[1]))

    def log(self, job: Job, attempt: int, rank: int = 0) -> str:
        """Return what a rank has printed in an attempt, as it came home."""
        job.refresh()
        path = job.log_path(rank, attempt)
        return path.read_text() if path.exists() else ""

    def wait_for_log(self, job: Job, attempt: int, text: str, rank: int = 0, seconds: float = 120.0) -> str:
        """Wait until a rank has printed a text in an attempt. Returns all that it has printed."""

        def read() -> str:
            log = self.log(job, attempt, rank)
            return log if text in log else ""

        return str(wait_for(read, seconds, describe=lambda: self.describe(job)))

    def wait_for_members(self, job: Job, *machines: str) -> int:
        """Wait until these machines are the members of an attempt after the first. Returns its number."""

        def are_members() -> int:
            newest = job.run_folder.attempts.newest()
            return newest.number if newest and newest.number > 1 and set(newest.machine_names) == set(machines) else 0

        return int(wait_for(are_members, 180.0, describe=lambda: self.describe(job)))

    def end(self, job: Job) -> None:
        (self.orders / "end").touch()
        assert job.wait(180) == "done", self.describe(job)
        wait_for(lambda: not job.backend.is_supervised())

    def files_with_the_secret(self, folder: Path) -> list[Path]:
        paths = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
        return [path for path in paths if SECRET.encode() in path.read_bytes()]

    def command_lines_with_the_secret(self) -> list[bytes]:
        lines = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                lines.append(path.read_bytes())
        return [line for line in lines if SECRET.encode() in line]

    def describe(self, job: Job) -> str:
        return f"{job.status()}\n{job.timeline()}\n{self.log(job, max(1, job.last_attempt_number))}"


def step_of(log: str) -> int:
    return int(re.findall(r"begins at step (\d+)", log)[0])


@pytest.fixture
def runner(sandbox: Sandbox) -> Runner:
    return Runner(sandbox)


def test_script_gets_the_variables_of_torchrun_and_continues_after_a_loss(runner: Runner) -> None:
    """The machine of rank 0 is lost: the others have a copy of what it has saved."""
    progress = ("--progress", r"\[(?P<step>\d+)/(?P<steps>\d+)\]")
    told = runner.sandbox.path / "told"
    notify = ("--notify", f'echo "$IMGNET_EVENT $IMGNET_EVENT_TEXT" >> {told}')
    job = runner.run("--local", "--machines", "3", "--procs", "2", "--env", "OWN=1", *progress, *notify)
    for rank in range(6):
        runner.wait_for_log(job, 1, "MASTER_PORT", rank)
    line = runner.log(job, 1, 3)
    assert f"rank 3 of 6 begins at step 0 with {DIGEST}; LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=1" in line
    assert "TORCHELASTIC_RESTART_COUNT=0" in line
    wait_for(lambda: job.status().step)
    assert job.status().steps == 100000 and not runner.command_lines_with_the_secret()
    wait_for(lambda: newest_version(job.run_folder.shared))
    assert runner.sandbox.cli("rehearse-loss", "--machine", "0", "--for-good").code == 0
    number = runner.wait_for_members(job, "1", "2")
    log = runner.wait_for_log(job, number, "rank 0 of 4 begins")
    assert step_of(log) > 0 and DIGEST in log
    assert "machine 0 lost" in job.timeline()[-1].reason
    wait_for(lambda: job.timeline()[-1].pause)  # until the attempt has told a step
    runner.end(job)
    wait_for(lambda: "\ndone " in told.read_text())
    lost, *_, done = told.read_text().splitlines()
    assert lost == "machine_lost job-1 (train, local): machine 0 was lost; 2 of 3 machines are left", told.read_text()
    assert done.startswith("done job-1 (train, local): done: "), told.read_text()
    assert job.result and job.result.attempts == number and job.result.timeline[-1].machines == ()
    assert job.result.goodput and 0 < job.result.goodput < 1 and (job.result.timeline[number - 1].pause or 0) > 0
    assert "rank 3 is done" in runner.log(job, number, 3) and (job.path / "events/events.out.tfevents.1").exists()
    assert runner.files_with_the_secret(runner.sandbox.path / "runs") == []
    (kept,) = runner.files_with_the_secret(Path(runner.sandbox.env["HOME"], ".local", "state"))
    assert kept.stat().st_mode & 0o777 == 0o600
    assert runner.sandbox.cli("report").code == 0
    (row,) = [row for row in runner.sandbox.cli("ls").out.splitlines() if row.startswith("job-1")]
    assert "train" in row and "done" in row


def test_failure_of_the_script_ends_the_job_with_its_rank_code_and_last_lines(runner: Runner) -> None:
    (runner.orders / "fail-2").touch()
    result = runner.cli("--local", "--machines", "3", "--retries", "1")
    assert result.code == 100, result
    reason = "machine 2: rank 2 ended with code 1: ValueError: bad learning rate in rank 2 (failed 2 times)"
    assert f"job-1 failed: {reason}" in " ".join(result.out.split()), result.out
    assert "the last lines of rank 2" in result.out and 'File "' in result.out and "logs job-1 --rank 2" in result.out
    assert runner.sandbox.job().last_attempt_number == 2


def test_stop_lets_the_script_save_and_resume_continues(runner: Runner) -> None:
    job = runner.run("--local", "--machines", "2")
    runner.wait_for_log(job, 1, "begins")
    saved = job.run_folder.work_folder() / "checkpoints/step"
    wait_for(saved.exists)
    assert runner.sandbox.cli("stop").code == 0
    assert job.state == "stopped"
    (runner.project / "helper.py").write_text('COMPLAINT = "another"\n')
    for path in Path(runner.sandbox.env["HOME"], ".local", "state").rglob("*.json"):
        path.unlink()
    refused = runner.sandbox.cli("resume", "-d")
    assert refused.code == 1 and "resume job-1 --env TOKEN" in " ".join(refused.err.split()), refused
    resumed = runner.sandbox.cli("resume", "-d", "--env", "TOKEN=another")
    assert resumed.code == 0 and "starts its command again" in " ".join(resumed.out.split()), resumed
    runner.wait_for_log(job, 2, "begins")
    assert step_of(runner.log(job, 2)) > 0 and DIGEST not in runner.log(job, 2)
    assert "another" in (job.run_folder.work_folder("1") / "project/helper.py").read_text()
    runner.end(job)


def test_machines_over_ssh_run_the_script_after_one_lost_its_power(
    runner: Runner, testbed: Callable[..., Testbed]
) -> None:
    bed = testbed(3)
    hosts = str(bed.write_hosts_toml(runner.sandbox.path / "hosts.toml"))
    job = runner.run("--ssh", hosts, "-y", "--procs", "1", "--lost-seconds", "3")
    for rank in range(3):
        assert DIGEST in runner.wait_for_log(job, 1, "begins", rank)
    assert not runner.command_lines_with_the_secret()
    bed.machines[1].power_off()
    number = runner.wait_for_members(job, "0", "2")
    runner.wait_for_log(job, number, "rank 1 of 2 begins", rank=1)
    pulled = runner.sandbox.cli("pull")
    assert pulled.code == 0, pulled
    step = int(Path(pulled.out.rsplit("  ", 1)[0], "step").read_text())
    runner.end(job)
    last = newest_version(job.run_folder.shared)
    assert last and int((last / "step").read_text()) > step > 0
    assert runner.sandbox.cli("pull").out.startswith(f"{last}  ")
    assert "is done at step" in runner.log(job, number, 1)
    assert runner.files_with_the_secret(bed.folder) == [], "the secret is in no file of a machine"


def test_interrupted_machine_is_replaced_and_nothing_is_left(renter: Renter) -> None:
    runner = Runner(renter.sandbox)
    options = ("-y", "--type", TYPE, "--machines", "3", "--procs", "1")
    dry_run = renter.run("run", *options, "--dry-run", "--", "python", "train.py", "x", cwd=runner.project)
    assert "nothing was started" in dry_run and "$" in dry_run
    job = runner.run(*options)
    runner.wait_for_log(job, 1, "begins", rank=2, seconds=240)
    interrupted_id = renter.instance_id("1")
    renter.cloud.interrupt(interrupted_id, notice=60)
    renter.wait_for_replacement("1", interrupted_id)
    number = runner.wait_for_members(job, "0", "1", "2")
    for rank in range(3):  # also that of the replacement
        runner.wait_for_log(job, number, f"rank {rank} of 3 begins", rank, seconds=120)
        assert DIGEST in runner.log(job, number, rank)
    assert step_of(runner.log(job, number)) > 0
    runner.end(job)
    last = newest_version(job.run_folder.shared)
    assert last and int((last / "step").read_text()) > step_of(runner.log(job, number))
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


def test_named_requirements_are_installed_on_this_computer(runner: Runner) -> None:
    (runner.project / "own.txt").write_text("--no-index\nimgnet-nowhere\n")
    result = runner.cli("--local", "--requirements", "own.txt", timeout=240)
    assert result.code == 100 and "imgnet-nowhere" in " ".join(result.out.split()), result
