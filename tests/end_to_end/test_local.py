"""Jobs on this computer by the installed command: from a recipe to a result, with kills, stops and resumes between."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import exact_jobs
from support.known import known
from support.packed_sets import content
from support.sandbox import ENDLESS, FinishedSandbox, Sandbox
from support.small_disk import enlarge, fill
from support.webhook_server import WebhookServer, webhook_server

from cluster.jobs.job import Job
from cluster.state.status import machine_statuses
from train.inference.trained_network import open_trained
from train.recipe.history import best_epoch

RESULT_KEYS = {
    "recipe", "state", "top1", "top5", "epochs", "seconds", "images_per_second", "goodput", "machines", "procs",
    "attempts", "dollars", "versions", "git_commit", "seed", "schedule",
}  # fmt: skip
# Paces of jobs that must not end before `train_fast`, by the calls that a process makes: one for each training step.
SLOW = (16, 3.0)
HELD = (12, 1000.0)  # it waits in its 13th step


def list_jobs(sandbox: Sandbox, cwd: Path | None = None) -> list[dict[str, object]]:
    """Return what `ls` says of each job."""
    rows: list[dict[str, object]] = json.loads(sandbox.cli("ls", "-o", "json", cwd=cwd).out)
    return rows


# --- a job that nobody disturbs --------------------------------------------------------------------------------------


def test_launch_trains_to_a_complete_result_and_exits_with_0(finished: FinishedSandbox) -> None:
    output = finished.output()
    assert finished.launch_exit_code == 0, output
    assert "job-1 done" in output and "tensorboard job-1" in output
    network = finished.path / "runs/job-1/network/model.safetensors"
    assert network.is_file() and f"network     {network}  (epoch 3, top-1 " in output
    result = json.loads((finished.path / "runs/job-1/result.json").read_text())
    assert result.keys() >= RESULT_KEYS
    assert (result["state"], result["attempts"], result["machines"], result["procs"]) == ("done", 1, 1, 2)
    assert len(result["epochs"]) == 3 and all(epoch["val_images"] == 20 for epoch in result["epochs"])
    assert result["epochs"][-1]["top1"] == result["top1"] and 0 <= result["top1"] <= result["top5"] <= 100
    assert result["dollars"] == 0 and 0 < result["goodput"] <= 1 and result["images_per_second"] > 0
    seconds = result["seconds"]
    assert 0 < seconds["training"] + seconds["validation"] < seconds["total"]
    assert result["versions"]["torch"].startswith("2.")


def test_run_folder_has_the_files_of_the_shared_folder_and_the_report(finished: FinishedSandbox) -> None:
    run_path = finished.path / "runs/job-1"
    for folder in ("events", "logs", "metrics"):
        assert content(run_path / folder) == content(run_path / "machine/shared" / folder) != {}, folder
    assert json.loads((run_path / "job.json").read_text())["name"] == "job-1"
    assert {"rank-0.log", "rank-1.log"} == {path.name for path in (run_path / "logs/000001").iterdir()}
    assert any(run_path.glob("events/events.out.tfevents.*")) and (run_path / "metrics/000001.jsonl").stat().st_size
    assert (run_path / "logs/val-000001.json").exists() and not list(run_path.rglob("*.tmp"))
    # The command's end and the supervisor's last work, the report, overlap.
    assert finished.pids_at_end == [] or finished.wait_for(lambda: not finished.job_pids())
    assert (run_path / "report.html").stat().st_size


def test_job_had_its_tmux_windows_and_a_line_per_epoch_and_leaves_nothing(finished: FinishedSandbox) -> None:
    assert {"train", "agent", "supervisor"} < finished.tmux_windows  # and "gpu" or "processes"
    rows = [line.split() for line in finished.output().splitlines() if line.strip()[:1].isdigit()]
    epoch_rows = [row for row in rows if len(row) == 11]
    assert [row[:3] for row in epoch_rows] == [["1", "32", "16"], ["2", "32", "16"], ["3", "32", "16"]]
    assert "Traceback" not in finished.output()
    assert finished.pids_at_end == [] or finished.wait_for(lambda: not finished.job_pids())
    assert "job-1" not in finished.tmux("list-sessions")


# --- kills -----------------------------------------------------------------------------------------------------------


def test_job_survives_the_kill_of_launch_and_supervisor(sandbox: Sandbox) -> None:
    launch = sandbox.start("launch", "--local", sandbox.write_recipe(5, pace=HELD))
    job = sandbox.job()
    sandbox.wait_for(job.run_folder.spec_path.exists)
    sandbox.wait_for_step(job, 4)
    launch.kill()
    (supervisor_pid,) = sandbox.program_pids("-m cluster.jobs.supervisor")
    signal.pidfd_send_signal(os.pidfd_open(supervisor_pid), signal.SIGKILL)
    assert sandbox.cli("status", "--exit-code").code == 101
    sandbox.train_fast()
    sandbox.wait_for(lambda: list_jobs(sandbox)[0]["state"] == "done")  # the agent ends after its trainers
    assert sandbox.trainer_pids() == []
    assert sandbox.cli("status", "--exit-code").code == 0
    assert content(job.path / "events") == content(job.run_folder.shared / "events")


def test_killed_agent_ends_its_trainers_and_resume_finishes_the_job(sandbox: Sandbox) -> None:
    job = sandbox.launch(5, "--procs", "2", "--save-seconds", "0", pace=HELD)
    sandbox.wait_for_step(job, 12)
    os.kill(sandbox.agent_pid(), signal.SIGKILL)
    sandbox.wait_for(lambda: not sandbox.pids("-m train "))
    status = sandbox.cli("status", "--exit-code")
    assert status.code == 100 and "agent was killed" in status.out and "imgnet-cluster resume job-1" in status.out
    assert list_jobs(sandbox)[0]["state"] == "failed"
    checkpoints = sorted((job.run_folder.shared / "checkpoints/000001").glob("step-*.pt"))
    assert checkpoints and checkpoints[-1].stem <= "step-00000012"
    sandbox.train_fast()
    resumed = sandbox.cli("resume", "job-1")
    assert resumed.code == 0 and "job-1 done" in resumed.out, resumed
    assert job.result and job.result.attempts == 2 and len(job.result.epochs) == 5
    log = sandbox.cli("logs", "job-1").out
    (resume_line,) = [line for line in log.splitlines() if line.startswith("resumed from ")]
    assert f"checkpoints/000002/resume-{checkpoints[-1].stem.removeprefix('step-')}-" in resume_line
    assert sandbox.cli("resume", "job-1").code == 1


def test_killed_tmux_server_disturbs_neither_the_trainers_nor_the_supervisor(sandbox: Sandbox) -> None:
    job = sandbox.launch(ENDLESS, "--procs", "2")
    sandbox.wait_for_step(job, 4)
    pids = {*sandbox.program_pids("-m cluster."), *sandbox.trainer_pids()}
    assert len(pids) == 4  # the supervisor, the agent and two trainers
    sandbox.tmux("kill-server")
    sandbox.wait_for(lambda: {"agent", "train"} < {*sandbox.tmux("list-windows", "-F", "#W").split()})
    sandbox.wait_for_step(job, (job.status().step or 0) + 4)
    assert {*sandbox.program_pids("-m cluster."), *sandbox.trainer_pids()} == pids
    assert sandbox.cli("stop", "job-1").code == 0
    assert job.result and job.result.state == "stopped" and job.result.attempts == 1
    sandbox.wait_for(lambda: not sandbox.job_pids())


@pytest.fixture
def webhook() -> Iterator[WebhookServer]:
    with webhook_server() as server:
        yield server


def test_loss_return_and_end_of_a_job_are_told_once_and_the_url_is_in_one_file(
    sandbox: Sandbox, webhook: WebhookServer
) -> None:
    (sandbox.path / "home/.config/imgnet-cluster").mkdir(parents=True)
    (sandbox.path / "home/.config/imgnet-cluster/config.toml").write_text(f'notify = "{webhook.url}"\n')
    job = sandbox.launch(ENDLESS, "--machines", "2")
    sandbox.wait_for_step(job, 3)
    assert webhook.events == []
    assert sandbox.cli("rehearse-loss", "--machine", "1").code == 0
    sandbox.wait_for(lambda: webhook.events == ["machine_lost", "machine_back"])
    assert [notification["machines"] for notification in webhook.posted] == [["1"], ["1"]]
    assert sandbox.cli("stop").code == 0
    sandbox.wait_for(lambda: webhook.events[2:] == ["stopped"])
    resume = sandbox.cli("resume", "--dry-run", "--notify", "touch told")
    assert f"--notify: {webhook.label} -> touch ...\n" in resume.out, resume.out + resume.err
    resume = sandbox.cli("resume", "-d", "--notify", f"touch {sandbox.path}/told")
    assert resume.code == 0, resume.err
    sandbox.wait_for(lambda: job.state == "running")
    assert not (sandbox.path / "told").exists()
    assert sandbox.cli("stop").code == 0
    sandbox.wait_for((sandbox.path / "told").exists)
    assert webhook.events == ["machine_lost", "machine_back", "stopped"]
    shown = "".join(sandbox.cli(*words).out for words in (("status",), ("config",), ("launch", "--help")))
    assert webhook.label in shown and "s3cr3t" not in shown
    leaks = [path for path in job.path.rglob("*") if path.is_file() and b"s3cr3t" in path.read_bytes()]
    assert leaks == []


# --- stop and resume -------------------------------------------------------------------------------------------------


def test_resume_continues_at_the_step_that_stop_saved(sandbox: Sandbox) -> None:
    job = sandbox.launch(5, "--save-seconds", "1000", pace=SLOW)
    sandbox.wait_for_step(job, 12)
    refused = sandbox.cli("resume", "job-1")
    assert refused.code == 1 and refused.err.startswith("error: job-1 is running") and refused.err.count("\n") == 1
    stopped = sandbox.cli("stop", "job-1")
    assert stopped.code == 0 and "stopped" in stopped.out
    sandbox.wait_for(lambda: not sandbox.job_pids())
    assert job.state == "stopped" and job.status().reason == "stopped by the user"
    last_checkpoint = sorted((job.run_folder.shared / "checkpoints/000001").glob("step-*.pt"))[-1]
    saved_step = int(last_checkpoint.stem.split("-")[1])
    second_stop = sandbox.cli("stop", "job-1")
    assert second_stop.code == 1 and second_stop.err.count("\n") == 1 and second_stop.err.startswith("error: ")
    assert sandbox.cli("status", "--exit-code").code == 103
    sandbox.train_fast()
    resumes = [sandbox.start("resume", "job-1") for _ in range(2)]
    exit_codes = sorted(resume.wait(120) for resume in resumes)
    assert exit_codes == [0, 1], sandbox.output(0) + sandbox.output(1)
    assert f"at step {saved_step}" in sandbox.cli("logs", "job-1").out
    assert job.result and job.result.attempts == 2 and len(job.result.epochs) == 5
    assert job.state == "done"
    images = [row.images for row in job.run_folder.steps()]
    assert images == sorted(set(images)), "a step is in the metrics twice"


def test_epochs_added_to_a_finished_job_end_with_the_bits_of_a_longer_job(sandbox: Sandbox) -> None:
    for epochs in (2, 4):
        recipe = sandbox.write_recipe(epochs, lr=0.02)
        launch = sandbox.cli("launch", "--local", "--exact", "--log-ids", "--workers", "0", recipe)
        assert launch.code == 0, launch
    longer, whole = sandbox.job(1), sandbox.job(2)
    refused = sandbox.cli("resume", "job-1")
    hint = "job-1 is done; there is nothing to resume. To train it on: imgnet-cluster resume job-1 --epochs +N. Run it "
    assert refused.code == 1 and hint in refused.err, refused
    resumed = sandbox.cli("resume", "job-1", "--epochs", "+2")
    assert resumed.code == 0 and "changed: --epochs: 2 -> 4" in resumed.out and "job-1 done" in resumed.out, resumed
    expected, actual = (exact_jobs.final_parameters(job.run_folder.shared) for job in (whole, longer))
    assert (
        expected.keys() == actual.keys() and [name for name in actual if not actual[name].equal(expected[name])] == []
    )
    result = known(longer.result)
    assert (result.steps, result.attempts, result.ids_wrong, len(result.epochs)) == (32, 2, [], 4)
    assert [row.reason for row in result.timeline] == ["start", "resume"] and result.schedule
    assert [(row.start, row.end, row.lr) for row in result.schedule] == [(0, 2, (0.02, 0.02)), (2, 4, (0.02, 0.02))]
    status = longer.status()
    assert (status.state, status.step, status.epoch, status.epochs) == ("done", 32, 4, 4)
    networks = [
        json.loads((longer.path / name / "classes.json").read_text())["step"] for name in ("network-2", "network")
    ]
    assert networks == [16, 32], "the network of before stays"

    forgets = sandbox.cli("resume", "job-1", "--epochs", "5", "--lr", "20")
    note = "epochs 5 to 5 train as the last phase does, at a constant learning rate of 20 (by --lr)"
    assert forgets.code == 0 and note in " ".join(forgets.out.split()), forgets
    history = known(longer.result).epochs
    best = known(best_epoch(history))
    path = longer.run_folder.network_folder / "model-best.safetensors"
    assert len(history) == 5 and path.exists() == (best.epoch < 5), [epoch.top1 for epoch in history]
    assert best.epoch == 5 or open_trained(path).description.step == 8 * best.epoch, "no longer the last, but not lost"


def test_job_stopped_during_setup_can_be_resumed(sandbox: Sandbox) -> None:
    job = sandbox.launch(ENDLESS, "--data", "sample")
    sandbox.wait_for(lambda: job.status().state == "setup" and job.status().progress)
    logs = sandbox.cli("logs", "job-1")
    assert logs.code == 0 and "drawing" in logs.out, "before the first attempt, logs shows the log of the setup"
    assert sandbox.cli("stop", "job-1").code == 0
    assert job.state == "stopped"
    sandbox.wait_for(lambda: not sandbox.job_pids())
    assert "drawn now" not in sandbox.cli("logs", "job-1").out, "the set-up went on to its end"
    assert sandbox.cli("resume", "-d", "job-1").code == 0
    sandbox.wait_for(lambda: job.status().state == "setup")
    assert sandbox.cli("stop", "job-1").code == 0


# --- several jobs ----------------------------------------------------------------------------------------------------


def test_trainers_get_the_environment_of_their_own_launch_only(sandbox: Sandbox) -> None:
    recipe = sandbox.write_recipe(ENDLESS)
    first = sandbox.cli("launch", "--local", "-d", recipe, env={"OF_THE_FIRST": "1", "BOTH": "one"})
    second = sandbox.cli("launch", "--local", "-d", recipe, env={"OF_THE_SECOND": "2", "BOTH": "two"})
    assert first.code == second.code == 0
    sandbox.wait_for(lambda: len(sandbox.trainer_pids()) == 2)
    environments = []
    for pid in sandbox.trainer_pids():
        variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
        environments.append(sorted(variable for variable in variables if variable.startswith(("OF_THE", "BOTH"))))
    assert sorted(environments) == [["BOTH=one", "OF_THE_FIRST=1"], ["BOTH=two", "OF_THE_SECOND=2"]]
    for name in ("job-1", "job-2"):
        assert sandbox.cli("stop", name).code == 0


@pytest.mark.parametrize("search_path", ["", "."])
def test_modules_of_the_current_folder_are_found_and_never_replace_ours(sandbox: Sandbox, search_path: str) -> None:
    """Two processes: the second way in which Python would put the current folder first (python -m train).

    With PYTHONPATH, a user's cluster.py precedes the installed command itself.
    """
    folder = sandbox.path / "project"
    folder.mkdir()
    for name in ("infra", "recipes", "train", *(() if search_path else ("cluster",))):
        (folder / f"{name}.py").write_text("raise RuntimeError('the wrong one')")
    (folder / "layers.py").write_text("from torch import nn\nPOOL = nn.Sequential(nn.AdaptiveAvgPool2d(1))")
    net = "from torch import nn\n\n\ndef small(classes):\n    from layers import POOL\n\n"
    net += "    return nn.Sequential(POOL, nn.Flatten(), nn.Linear(3, classes))\n"
    (folder / "mynet.py").write_text(net)
    recipe = folder / "tiny.py"
    recipe.write_text(Path(sandbox.write_recipe(1)).read_text().replace("resnet10_tiny", "mynet:small"))
    environment = {"PYTHONPATH": search_path} if search_path else {}
    launched = sandbox.cli("launch", "--local", recipe.name, cwd=folder, env=environment)
    assert launched.code == 0 and "job-1 done" in launched.out, launched
    evaluated = sandbox.cli("eval", "job-1", "--procs", "2", "-o", "json", cwd=folder, env=environment)
    assert evaluated.code == 0, evaluated


def test_jobs_of_two_folders_have_numbers_of_their_own(sandbox: Sandbox) -> None:
    job = sandbox.launch(ENDLESS)
    second_folder = sandbox.path / "elsewhere"
    second_folder.mkdir()
    launched = sandbox.cli("launch", "--local", "-d", sandbox.write_recipe(ENDLESS), cwd=second_folder)
    assert launched.code == 0 and "job-1 launched" in launched.out
    sandbox.wait_for(lambda: sandbox.tmux("list-windows", "-a", "-F", "#W").split().count("train") == 2)
    assert sandbox.cli("stop", "job-1").code == 0 and not job.is_alive
    assert [row["state"] for row in list_jobs(sandbox, second_folder)] == ["running"]
    assert sandbox.cli("resume", "-d", "job-1").code == 0 and sandbox.cli("stop", "job-1").code == 0
    assert sandbox.cli("stop", "job-1", cwd=second_folder).code == 0


def test_top_and_status_name_the_machine_that_the_others_wait_for(sandbox: Sandbox) -> None:
    """The trainer of machine 1 is stopped three quarters of the time."""
    options = ("--machines", "2", "--procs", "1", "--no-standby", "--workers", "0")
    job = sandbox.launch(ENDLESS, *options, pace=(0, 0.05))  # a pause goes on while a trainer is stopped
    sandbox.wait_for_step(job)
    agent_pid = machine_statuses(job.run)["1"].pid
    (slow,) = [pid for pid in sandbox.trainer_pids() if sandbox.parent_pid(pid) == agent_pid]
    slow_down = "while kill -STOP $0; do sleep 0.3; kill -CONT $0; sleep 0.1; done"
    with subprocess.Popen(["sh", "-c", slow_down, str(slow)]) as stopper:
        try:
            sandbox.wait_for(lambda: "slowest            machine 1: waits " in sandbox.cli("status", "job-1").out)
            sandbox.wait_for(lambda: re.search("^ *1 .*slowest", sandbox.cli("top", "job-1").out, re.MULTILINE))
        finally:
            stopper.kill()
            os.kill(slow, signal.SIGCONT)
    assert job.status().attempt == 1
    assert sandbox.cli("stop", "job-1").code == 0


# --- failures --------------------------------------------------------------------------------------------------------


def test_full_runs_folder_is_waited_for(sandbox: Sandbox, small_disk: Path) -> None:
    enlarge(small_disk, 100)
    sandbox.env["IMGNET_RUNS"] = str(small_disk)
    launch = sandbox.start("launch", "--local", "--save-seconds", "0", sandbox.write_recipe(5, pace=SLOW))
    job = Job(small_disk / "job-1")
    sandbox.wait_for(job.run_folder.spec_path.exists)
    sandbox.wait_for_step(job, 4)
    filling = fill(small_disk)
    sandbox.wait_for(lambda: "No space left on device" in sandbox.output())
    filling.unlink()
    sandbox.train_fast()
    assert launch.wait(120) == 0, sandbox.output()
    assert job.state == "done" and len(job.run_folder.epochs()) == 5


def test_diverged_job_fails_with_the_loss_and_the_step(sandbox: Sandbox) -> None:
    launched = sandbox.cli("launch", "--local", sandbox.write_recipe(50, "wild", lr=1e9))
    assert launched.code == 100 and "the loss is" in launched.out and "at step" in launched.out, launched
    assert sandbox.cli("status", "--exit-code", "job-1").code == 100
    sandbox.wait_for(lambda: not sandbox.job_pids())
