"""What a script gets from `imgnet-cluster run` beside its processes: secrets, progress, checkpoints, events."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.sandbox import Sandbox
from support.ssh_machines import Testbed, testbed
from support.waiting import wait_for

from cluster.jobs.job import Job
from cluster.script import snapshot

__all__ = ["testbed"]  # fixture

SECRET = "hunter2-9c1f"
SCRIPT = """\
import hashlib, os, signal, sys, time
from pathlib import Path

rank = int(os.environ["RANK"])
saved = Path(os.environ["IMGNET_CHECKPOINTS"], "run", "step")
digest = hashlib.sha256(os.environ["TOKEN"].encode()).hexdigest()
step = int(saved.read_text()) if saved.exists() else 0
print(f"rank {rank} begins at step {step} with {digest}", flush=True)
Path(os.environ["IMGNET_EVENTS"], f"events.out.tfevents.{rank}").write_bytes(b"")
while not Path(sys.argv[1], "end").exists():
    time.sleep(1 if rank == 0 else 0.05)
    step += 1
    if rank == 0:
        saved.parent.mkdir(exist_ok=True)
        saved.write_text(str(step))
        print(f"[{step}/1000] loss 0.5", flush=True)
"""


class Runner:
    """A user with a project, whose script counts steps and saves each second without care."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.project = sandbox.path / "mine"
        self.orders = sandbox.path / "orders"
        self.keys = sandbox.path / "keys.env"
        self.orders.mkdir()
        self.project.mkdir()
        (self.project / "train.py").write_text(SCRIPT)
        self.keys.write_text(f"TOKEN='{SECRET}'\n")
        sandbox.env["IMGNET_RUNS"] = str(sandbox.path / "runs")
        self.state = Path(sandbox.env["HOME"], ".local", "state")

    def run(self, *options: str) -> Job:
        words = ("--env-file", str(self.keys), "--", "python", "train.py", str(self.orders))
        result = self.sandbox.cli("run", "-d", *options, *words, cwd=self.project)
        assert result.code == 0, result
        return self.sandbox.job(1)

    def wait_for_log(self, job: Job, attempt: int, text: str, rank: int = 0) -> str:
        def read() -> str:
            job.refresh()
            path = job.log_path(rank, attempt)
            log = path.read_text() if path.exists() else ""
            return log if text in log else ""

        return str(wait_for(read, 120, describe=lambda: f"{job.status()}\n{job.timeline()}"))

    def end(self, job: Job, seconds: float) -> None:
        """Let the script end, and wait until the job is done and its report is written."""
        (self.orders / "end").touch()
        assert job.wait(seconds) == "done", job.status()
        wait_for(lambda: not job.backend.is_supervised(), seconds)

    def files_with_the_secret(self, *folders: Path) -> list[Path]:
        paths = [path for folder in folders for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
        return [path for path in paths if SECRET.encode() in path.read_bytes()]

    def command_lines_with_the_secret(self) -> list[bytes]:
        lines = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                lines.append(path.read_bytes())
            except OSError:
                continue
        return [line for line in lines if SECRET.encode() in line]


@pytest.fixture
def runner(sandbox: Sandbox) -> Runner:
    return Runner(sandbox)


def step_of(log: str) -> int:
    return int(log.partition("begins at step ")[2].split()[0])


def test_script_continues_from_its_snapshot_with_its_secret_on_the_machines_that_are_left(runner: Runner) -> None:
    job = runner.run("--local", "--machines", "2", "--procs", "1", "--progress", r"\[(?P<step>\d+)/(?P<steps>\d+)\]")
    runner.wait_for_log(job, 1, "[2/1000]")
    wait_for(lambda: job.status().step or 0, 30)
    assert job.status().steps == 1000
    assert not runner.command_lines_with_the_secret()
    wait_for(lambda: snapshot.newest_version(job.run_folder.shared), 60)
    assert runner.sandbox.cli("rehearse-loss", "--machine", "0", "--for-good").code == 0  # that of rank 0
    log = runner.wait_for_log(job, 2, "begins")
    assert step_of(log) > 0 and "begins" in runner.wait_for_log(job, 1, "begins", rank=1)
    assert log.split("with ")[1].split()[0] in runner.wait_for_log(job, 1, "begins")
    runner.end(job, 60)
    assert runner.files_with_the_secret(runner.sandbox.path / "runs") == []
    (kept,) = runner.files_with_the_secret(runner.state)
    assert kept.stat().st_mode & 0o777 == 0o600
    assert (job.path / "events/events.out.tfevents.1").exists()


def test_resume_asks_for_a_secret_that_is_not_known_any_more(runner: Runner) -> None:
    job = runner.run("--local", "--procs", "1")
    runner.wait_for_log(job, 1, "[1/1000]")
    assert runner.sandbox.cli("stop").code == 0
    for path in runner.state.rglob("*.json"):
        path.unlink()
    refused = runner.sandbox.cli("resume", "-d")
    assert refused.code == 1 and "resume job-1 --env TOKEN" in " ".join(refused.err.split()), refused
    wrong = runner.sandbox.cli("resume", "-d", "--env", "OTHER=1")
    assert wrong.code == 2 and "OTHER: is no secret variable of job-1, which has TOKEN" in " ".join(wrong.err.split())
    runner.sandbox.env["TOKEN"] = SECRET
    assert runner.sandbox.cli("resume", "-d", "--env", "TOKEN").code == 0
    runner.wait_for_log(job, 2, "begins at step")
    runner.end(job, 60)


def test_bad_pattern_and_missing_secret_are_one_line_at_launch(runner: Runner) -> None:
    for options, problem in (
        (("--progress", r"(\w+\s*)+=(?P<step>\d+)"), "takes too long on long lines"),
        (("--env", "NOWHERE"), "your environment has no such variable"),
    ):
        result = runner.sandbox.cli("run", "--local", "-d", *options, "--", "python", "train.py", cwd=runner.project)
        assert result.code == 2 and problem in " ".join(result.err.split()), result
    assert not list((runner.sandbox.path / "runs").glob("job-*"))


def test_secret_reaches_machines_over_ssh_and_stays_in_no_file_there(
    runner: Runner, testbed: Callable[..., Testbed]
) -> None:
    bed = testbed(2)
    hosts = str(bed.write_hosts_toml(runner.sandbox.path / "hosts.toml"))
    job = runner.run("--ssh", hosts, "-y", "--procs", "1")
    logs = [runner.wait_for_log(job, 1, "begins", rank) for rank in (0, 1)]
    assert logs[0].split("with ")[1].split()[0] == logs[1].split("with ")[1].split()[0]
    assert not runner.command_lines_with_the_secret()
    runner.end(job, 120)
    kept = [path for path in runner.files_with_the_secret(runner.sandbox.path) if path != runner.keys]
    assert [path.parent.name for path in kept] == ["secrets"], os.fspath(runner.sandbox.path)


FAKE_DOCKER = """\
#!/bin/sh
echo "$*" >>"$DOCKER_LOG"
case "$1" in
info) echo '{"runc":{}}' ;;
image) exit 1 ;;
pull) test "$3" = img:1 || { echo "Error: pull access denied for $3" >&2; exit 1; } ;;
run)
    while [ "$1" != img:1 ]; do
        case "$1" in --workdir) cd "$2" ;; esac
        shift
    done
    shift
    exec "$@"
    ;;
esac
"""


def test_container_gets_variables_and_secrets_and_is_removed(runner: Runner) -> None:
    programs = runner.sandbox.path / "programs"
    programs.mkdir()
    (programs / "docker").write_text(FAKE_DOCKER)
    (programs / "docker").chmod(0o755)
    log = runner.sandbox.path / "docker.log"
    runner.sandbox.env |= {"PATH": f"{programs}:{runner.sandbox.env['PATH']}", "DOCKER_LOG": str(log)}
    refused = runner.sandbox.cli(
        "run", "--local", "--image", "nope:1", "--", "python", "train.py", cwd=runner.project, timeout=120
    )
    assert refused.code == 100 and "the image nope:1 cannot be pulled: docker pull: Error: pull access denied" in (
        " ".join(refused.out.split())
    ), refused
    words = ("--env-file", str(runner.keys), "--image", "img:1", "--procs", "1")
    result = runner.sandbox.cli(
        "run", "--local", "-d", *words, "--", "python", "train.py", str(runner.orders), cwd=runner.project
    )
    assert result.code == 0, result
    job = runner.sandbox.job(2)
    runner.wait_for_log(job, 1, "[1/1000]")
    runner.end(job, 60)
    lines = log.read_text().splitlines()
    (run,) = [line for line in lines if line.startswith("run ")]
    assert "--env TOKEN" in run and SECRET not in log.read_text() and "--env IMGNET_CHECKPOINTS" in run
    label = run.partition("--label ")[2].split()[0]
    assert f"ps --all --quiet --filter label={label}" in lines[lines.index(run) :]


def test_named_requirements_are_installed_on_this_computer(runner: Runner) -> None:
    (runner.project / "own.txt").write_text("--no-index\nimgnet-nowhere\n")
    words = ("--requirements", "own.txt", "--", "python", "train.py", str(runner.orders))
    result = runner.sandbox.cli("run", "--local", *words, cwd=runner.project, timeout=240)
    assert result.code == 100 and "imgnet-nowhere" in " ".join(result.out.split()), result
