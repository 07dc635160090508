"""Training scripts that nobody of this project wrote, unchanged, under `run`: three machines, of which one is lost.

docs/your-own-script.md lists the scripts and what has to be passed to them. `make peers` fetches them.
"""

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.peers import SCRIPTS, peer_python
from support.sandbox import Sandbox
from support.third_party import FILES, FOLDER
from support.waiting import wait_for

from cluster.jobs.job import Job
from cluster.state import attempts

WAIT_SECONDS = 500.0  # libraries of several hundred megabytes are imported in each process of each attempt
IN_CHECKPOINTS = 'cd "$IMGNET_CHECKPOINTS" && exec {python} "$OLDPWD/on_cpu.py" "$OLDPWD/{script}" {arguments}'
TUTORIAL = ("multigpu_torchrun.py", "datautils.py")
SNAPSHOT = re.compile(r"Resuming training from snapshot at Epoch (\d+)")
EPOCH = re.compile(r"^\[GPU0\] Epoch (\d+) ", re.MULTILINE)


def make_project(folder: Path, *names: str) -> Path:
    """Return a project folder with unchanged scripts of others; skip the test when they have not been fetched.

    It is a git repository: outside git a folder "data" and files above 1 MB are not copied to the machines.
    """
    if missing := [name for name in names if not FILES[name].is_in(FOLDER)]:
        pytest.skip(f"{', '.join(missing)} of {FILES[missing[0]].repository} is not here; make peers fetches it")
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    for name in names:
        shutil.copy(FILES[name].path_below(FOLDER), folder / name)
    for name in ("on_cpu.py", "without_operators.py"):
        shutil.copy(SCRIPTS / name, folder / name)
    return folder


def make_inputs(python: Path, kind: str, folder: Path) -> None:
    command = [str(python), str(SCRIPTS / "make_inputs.py"), kind, str(folder)]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS)
    assert completed.returncode == 0, completed.stderr[-4000:]


def run_detached(sandbox: Sandbox, project: Path, command: list[str], *options: str) -> Job:
    """Start a command on three machines of this computer."""
    arguments = ("run", "--local", "--machines", "3", "-d", "--workdir", project, *options, "--", *command)
    result = sandbox.cli(*arguments)
    assert result.code == 0, result
    return sandbox.job()


def log_of(job: Job, attempt: int, rank: int = 0) -> str:
    path = job.path / f"logs/{attempt:06}/rank-{rank}.log"
    return path.read_text(errors="replace") if path.exists() else ""


def history(job: Job) -> list[attempts.Attempt]:
    return job.run_folder.attempts.all()


def all_logs(job: Job) -> str:
    """Return the ends of all logs, for the message of a failure."""
    paths = sorted(job.path.glob("logs/*/rank-*.log"))
    reasons = [f"{attempt.number}: {attempt.machine_names} {attempt.reason}" for attempt in history(job)]
    return "\n".join([*reasons, *(f"--- {path}\n{path.read_text(errors='replace')[-1500:]}" for path in paths)])


def wait_for_log(job: Job, is_there: Callable[[str], object], attempt: int = 1) -> None:
    """Wait until rank 0 has printed something. Raises `AssertionError` when the job ends before."""

    def has_printed() -> object:
        assert not job.has_ended, f"{job.status()}\n{all_logs(job)}"
        return is_there(log_of(job, attempt))

    wait_for(has_printed, WAIT_SECONDS, lambda: all_logs(job), poll_seconds=0.1)


def wait_for_copy(job: Job, pattern: str, version: int = 1) -> None:
    """Wait until a copy of the checkpoint folder with such a file is in the shared folder."""
    versions = f"machine/shared/checkpoints/000001/save-*/{pattern}"
    wait_for_log(
        job,
        lambda log: any(
            int(path.parts[-1 - pattern.count("/") - 1][5:]) >= version for path in job.path.glob(versions)
        ),
    )


def lose_a_machine(sandbox: Sandbox, job: Job, *options: str) -> None:
    result = sandbox.cli("rehearse-loss", job.name, "--machine", "2", *options)
    assert "machine 2 of job-1 was killed" in result.out, result


def assert_done_after_a_loss(sandbox: Sandbox, job: Job) -> int:
    """Wait for the end of a job that has lost machine 2, and of its supervisor. Returns the last attempt."""
    wait_for(lambda: job.has_ended, WAIT_SECONDS, lambda: all_logs(job), poll_seconds=0.1)
    assert job.state == "done", f"{job.status()}\n{all_logs(job)}"
    made = history(job)
    assert len(made[0].members) == 3 and made[1].reason.startswith("machine 2 lost"), all_logs(job)
    # A new agent of machine 2 may be there before the loss is noticed; then one attempt does both.
    is_back = made[1].reason == "machine 2 lost; machine 2 joined"
    assert [*made[1].machine_names] == (["0", "1", "2"] if is_back else ["0", "1"]), all_logs(job)
    wait_for(lambda: not sandbox.pids("-m cluster.jobs.supervisor"), WAIT_SECONDS, poll_seconds=0.1)
    return last_attempt(job)


def last_attempt(job: Job) -> int:
    """Return the number of the last attempt that had machines: the end of a job is an attempt without."""
    return max(attempt.number for attempt in history(job) if attempt.members)


def epochs_in(log: str) -> list[int]:
    return [int(number) for number in EPOCH.findall(log)]


def assert_continued_from_the_snapshot(job: Job, epochs: int) -> None:
    """Assert that each attempt after the first continues at the epoch of its snapshot, and that all were trained."""
    first_log, *later_logs = [log_of(job, attempt) for attempt in range(1, last_attempt(job) + 1)]
    trained = set(epochs_in(first_log))
    for log in filter(epochs_in, later_logs):  # a machine may return before the script has begun
        found = SNAPSHOT.search(log)
        assert found and epochs_in(log)[0] == int(found.group(1)) >= 1, all_logs(job)
        trained |= set(epochs_in(log))
    assert any(map(epochs_in, later_logs)) and trained == set(range(epochs)), all_logs(job)


def test_ddp_tutorial_continues_from_its_snapshot_when_a_machine_is_lost_and_returns(sandbox: Sandbox) -> None:
    project = make_project(sandbox.path / "project", *TUTORIAL)
    arguments = IN_CHECKPOINTS.format(python="python", script=TUTORIAL[0], arguments="200 1 --batch_size 4")
    job = run_detached(sandbox, project, ["sh", "-c", arguments])
    wait_for_copy(job, "snapshot.pt", version=2)  # the second is of a later epoch than the first one
    lose_a_machine(sandbox, job)
    assert_done_after_a_loss(sandbox, job)
    assert_continued_from_the_snapshot(job, epochs=200)


def test_imagenet_example_continues_from_its_checkpoint(sandbox: Sandbox) -> None:
    python = peer_python("torch", "torchvision")
    project = make_project(sandbox.path / "project", "main.py")
    make_inputs(python, "images", sandbox.path / "drawn")
    options = "-a mobilenet_v3_small -j 0 -b 4 --epochs 30 --dist-url env:// --dist-backend gloo --no-accel"
    command = IN_CHECKPOINTS.format(
        python=python, script="main.py", arguments=f'"$IMGNET_DATA" {options} --resume checkpoint.pth.tar'
    )
    job = run_detached(sandbox, project, ["sh", "-c", command], "--data", str(sandbox.path / "drawn"))
    wait_for_copy(job, "checkpoint.pth.tar")
    lose_a_machine(sandbox, job, "--for-good")
    last_log = log_of(job, assert_done_after_a_loss(sandbox, job))
    assert re.search(r"loaded checkpoint 'checkpoint.pth.tar' \(epoch [1-9]\d*\)", last_log), all_logs(job)
    assert "Epoch: [0]" not in last_log and "Epoch: [29]" in last_log


def test_accelerate_example_continues_from_its_checkpoint(sandbox: Sandbox) -> None:
    python = peer_python("accelerate", "transformers", "datasets", "evaluate")
    project = make_project(sandbox.path / "project", "complete_nlp_example.py")
    make_inputs(python, "nlp", project)
    command = (
        'last=$(ls -td "$IMGNET_CHECKPOINTS"/epoch_* | head -1); '
        f"exec {python} on_cpu.py complete_nlp_example.py --cpu --checkpointing_steps epoch "
        '--output_dir "$IMGNET_CHECKPOINTS" ${last:+--resume_from_checkpoint "$last"}'
    )
    job = run_detached(sandbox, project, ["sh", "-c", command], "--env", "HF_HUB_OFFLINE=1")
    wait_for_copy(job, "epoch_0/random_states_0.pkl")
    lose_a_machine(sandbox, job, "--for-good")
    last_log = log_of(job, assert_done_after_a_loss(sandbox, job))
    assert "Resumed from checkpoint: " in last_log and "epoch 0:" not in last_log, all_logs(job)
    assert "epoch 2: {'accuracy'" in last_log


def test_lightning_example_ends_with_fewer_machines(sandbox: Sandbox) -> None:
    """The script calls `Trainer.fit` without a checkpoint, so it begins again."""
    python = peer_python("lightning")
    project = make_project(sandbox.path / "project", "transformer.py")
    make_inputs(python, "text", project)
    command = (
        "export PL_TRAINER_NUM_NODES=$GROUP_WORLD_SIZE PL_TRAINER_DEVICES=$LOCAL_WORLD_SIZE; "
        f"exec {python} on_cpu.py transformer.py"
    )
    job = run_detached(sandbox, project, ["sh", "-c", command], "--env", "PL_TRAINER_ACCELERATOR=cpu")
    wait_for_log(job, lambda log: "Epoch 1" in log)
    lose_a_machine(sandbox, job, "--for-good")
    last_log = log_of(job, assert_done_after_a_loss(sandbox, job))
    assert "MEMBER: 1/2" in last_log and "test_loss" in last_log, all_logs(job)
