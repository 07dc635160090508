"""Training scripts that nobody of this project wrote, unchanged, under `run`: three machines, of which one is lost.

docs/your-own-script.md lists the scripts and what has to be passed to them. `make peers` fetches them.
"""

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support import exact_jobs
from support.peers import SCRIPTS, peer_python
from support.sandbox import Sandbox
from support.third_party import FILES, FOLDER
from support.waiting import wait_for

from cluster.jobs.job import Job

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


def log_of(job: Job, attempt: int) -> str:
    path = job.path / f"logs/{attempt:06}/rank-0.log"
    return path.read_text(errors="replace") if path.exists() else ""


def describe(job: Job) -> str:
    """Return the attempts and the ends of all logs, for the message of a failure."""
    paths = sorted(job.path.glob("logs/*/rank-*.log"))
    logs = [f"--- {path}\n{path.read_text(errors='replace')[-1500:]}" for path in paths]
    return "\n".join([exact_jobs.describe(job), *logs])


def has_copy(job: Job, pattern: str, version: int = 1) -> bool:
    """Whether the shared folder has this version of the checkpoint folder, or a later one, with such a file."""
    folders = (job.run_folder.shared / "checkpoints/000001").glob("save-*")
    return any(int(folder.name[5:]) >= version and list(folder.glob(pattern)) for folder in folders)


def train_through_a_loss(
    sandbox: Sandbox, project: Path, command: str, *options: str, when: Callable[[Job], bool], for_good: bool = True
) -> Job:
    """Run a shell command on three machines of this computer, of which machine 2 is lost `when` a condition is true.

    Returns the job when it is done and its supervisor has ended.
    """
    arguments = ("run", "--local", "--machines", "3", "-d", "--workdir", project, *options, "--", "sh", "-c", command)
    launched = sandbox.cli(*arguments)
    assert launched.code == 0, launched
    job = sandbox.job()

    def may_be_lost() -> bool:
        assert not job.has_ended, describe(job)
        return when(job)

    wait_for(may_be_lost, WAIT_SECONDS, lambda: describe(job), poll_seconds=0.1)
    killed = sandbox.cli("rehearse-loss", job.name, "--machine", "2", *(("--for-good",) if for_good else ()))
    assert "machine 2 of job-1 was killed" in killed.out, killed
    wait_for(lambda: job.has_ended, WAIT_SECONDS, lambda: describe(job), poll_seconds=0.1)
    assert job.state == "done", describe(job)
    first, second, *_ = job.run_folder.attempts.all()
    assert len(first.members) == 3 and second.reason.startswith("machine 2 lost"), describe(job)
    # A new agent of machine 2 may be there before the loss is noticed; then one attempt does both.
    is_back = second.reason == "machine 2 lost; machine 2 joined"
    assert [*second.machine_names] == (["0", "1", "2"] if is_back else ["0", "1"]), describe(job)
    wait_for(lambda: not sandbox.pids("-m cluster.jobs.supervisor"), WAIT_SECONDS, poll_seconds=0.1)
    return job


def last_log(job: Job) -> str:
    return log_of(job, job.run_folder.attempts.last_training_number())


def epochs_in(log: str) -> list[int]:
    return [int(number) for number in EPOCH.findall(log)]


def test_ddp_tutorial_continues_from_its_snapshot_when_a_machine_is_lost_and_returns(sandbox: Sandbox) -> None:
    project = make_project(sandbox.path / "project", *TUTORIAL)
    command = IN_CHECKPOINTS.format(python="python", script=TUTORIAL[0], arguments="200 1 --batch_size 4")
    # The second copy is of a later epoch than the first one.
    job = train_through_a_loss(
        sandbox, project, command, when=lambda job: has_copy(job, "snapshot.pt", version=2), for_good=False
    )
    last_attempt = job.run_folder.attempts.last_training_number()
    first_log, *later_logs = [log_of(job, attempt) for attempt in range(1, last_attempt + 1)]
    trained = set(epochs_in(first_log))
    for log in filter(epochs_in, later_logs):  # a machine may return before the script has begun
        found = SNAPSHOT.search(log)
        assert found and epochs_in(log)[0] == int(found.group(1)) >= 1, describe(job)
        trained |= set(epochs_in(log))
    assert any(map(epochs_in, later_logs)) and trained == set(range(200)), describe(job)


def test_imagenet_example_continues_from_its_checkpoint(sandbox: Sandbox) -> None:
    python = peer_python("torch", "torchvision")
    project = make_project(sandbox.path / "project", "main.py")
    make_inputs(python, "images", sandbox.path / "drawn")
    options = "-a mobilenet_v3_small -j 0 -b 4 --epochs 30 --dist-url env:// --dist-backend gloo --no-accel"
    command = IN_CHECKPOINTS.format(
        python=python, script="main.py", arguments=f'"$IMGNET_DATA" {options} --resume checkpoint.pth.tar'
    )
    data = ("--data", str(sandbox.path / "drawn"))
    job = train_through_a_loss(sandbox, project, command, *data, when=lambda job: has_copy(job, "checkpoint.pth.tar"))
    log = last_log(job)
    assert re.search(r"loaded checkpoint 'checkpoint.pth.tar' \(epoch [1-9]\d*\)", log), describe(job)
    assert "Epoch: [0]" not in log and "Epoch: [29]" in log


def test_accelerate_example_continues_from_its_checkpoint(sandbox: Sandbox) -> None:
    python = peer_python("accelerate", "transformers", "datasets", "evaluate")
    project = make_project(sandbox.path / "project", "complete_nlp_example.py")
    make_inputs(python, "nlp", project)
    command = (
        'last=$(ls -td "$IMGNET_CHECKPOINTS"/epoch_* | head -1); '
        f"exec {python} on_cpu.py complete_nlp_example.py --cpu --checkpointing_steps epoch "
        '--output_dir "$IMGNET_CHECKPOINTS" ${last:+--resume_from_checkpoint "$last"}'
    )
    offline = ("--env", "HF_HUB_OFFLINE=1")
    job = train_through_a_loss(
        sandbox, project, command, *offline, when=lambda job: has_copy(job, "epoch_0/random_states_0.pkl")
    )
    log = last_log(job)
    assert "Resumed from checkpoint: " in log and "epoch 0:" not in log, describe(job)
    assert "epoch 2: {'accuracy'" in log


def test_timm_continues_from_its_checkpoint(sandbox: Sandbox) -> None:
    python = peer_python("timm", "torchvision")
    project = make_project(sandbox.path / "project", "train.py")
    make_inputs(python, "images", sandbox.path / "drawn")
    options = "--model test_resnet --num-classes 2 --epochs 20 -b 4 -j 0 --device cpu --no-prefetcher --val-split val"
    command = (
        'last=$(ls "$IMGNET_CHECKPOINTS"/run/last.pth.tar); '
        f'exec {python} on_cpu.py train.py --data-dir "$IMGNET_DATA" {options} --checkpoint-hist 1 '
        '--output "$IMGNET_CHECKPOINTS" --experiment run ${last:+--resume "$last"}'
    )
    data = ("--data", str(sandbox.path / "drawn"))
    job = train_through_a_loss(sandbox, project, command, *data, when=lambda job: has_copy(job, "run/last.pth.tar"))
    log = last_log(job)
    assert re.search(r"Loaded checkpoint '.*/run/last.pth.tar' \(epoch \d+\)", log), describe(job)
    assert "Train: 0 " not in log and "Train: 19 " in log and "total 2, device cpu" in log


def test_trl_script_continues_from_the_checkpoint_of_its_trainer(sandbox: Sandbox) -> None:
    """The script comes with TRL, and its trainer is one of Hugging Face's `Trainer`s."""
    python = peer_python("trl", "transformers", "datasets")
    project = make_project(sandbox.path / "project")
    shutil.copy(next(python.parents[1].glob("lib/*/site-packages/trl/scripts/sft.py")), project)
    make_inputs(python, "chat", project)
    command = (
        'last=$(ls -td "$IMGNET_CHECKPOINTS"/checkpoint-* | head -1); '
        f"exec {python} on_cpu.py sft.py --model_name_or_path gpt2 --dataset_name texts --report_to none --use_cpu "
        "--bf16 false --num_train_epochs 40 --save_steps 200 --save_total_limit 2 "
        '--output_dir "$IMGNET_CHECKPOINTS" ${last:+--resume_from_checkpoint "$last"}'
    )
    offline = ("--env", "HF_HUB_OFFLINE=1")
    job = train_through_a_loss(
        sandbox, project, command, *offline, when=lambda job: has_copy(job, "checkpoint-*/trainer_state.json")
    )
    epochs = [float(epoch) for epoch in re.findall(r"'epoch': '([\d.]+)'", last_log(job))]
    assert epochs[0] > 6 and epochs[-1] == 40, describe(job)  # 200 steps are 6.7 epochs of two machines


def test_lightning_example_ends_with_fewer_machines(sandbox: Sandbox) -> None:
    """The script calls `Trainer.fit` without a checkpoint, so it begins again."""
    python = peer_python("lightning")
    project = make_project(sandbox.path / "project", "transformer.py")
    make_inputs(python, "text", project)
    command = (
        "export PL_TRAINER_NUM_NODES=$GROUP_WORLD_SIZE PL_TRAINER_DEVICES=$LOCAL_WORLD_SIZE; "
        f"exec {python} on_cpu.py transformer.py"
    )
    on_cpu = ("--env", "PL_TRAINER_ACCELERATOR=cpu")
    job = train_through_a_loss(sandbox, project, command, *on_cpu, when=lambda job: "Epoch 1" in log_of(job, 1))
    log = last_log(job)
    assert "MEMBER: 1/2" in log and "test_loss" in log, describe(job)
