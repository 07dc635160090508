"""The main path, by the installed command, from a recipe to a result on this computer."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

KEYS = {
    "recipe", "state", "top1", "top5", "epochs", "seconds", "images_per_second", "goodput", "machines", "procs",
    "attempts", "dollars", "versions", "git_commit", "seed", "schedule",
}  # fmt: skip


def files(folder: Path) -> dict[str, bytes]:
    return {str(one.relative_to(folder)): one.read_bytes() for one in folder.rglob("*") if one.is_file()}


def test_one_command_trains_to_a_result_and_ends_with_0(finished: Any) -> None:
    assert finished.code == 0, finished.said()
    assert "job-1 done" in finished.said() and "tensorboard job-1" in finished.said()
    result = json.loads((finished.path / "runs/job-1/result.json").read_text())
    assert result.keys() >= KEYS
    assert (result["state"], result["attempts"], result["machines"], result["procs"]) == ("done", 1, 1, 2)
    assert len(result["epochs"]) == 3 and all(one["val_images"] == 20 for one in result["epochs"])
    assert result["epochs"][-1]["top1"] == result["top1"] and 0 <= result["top1"] <= result["top5"] <= 100
    assert result["dollars"] == 0 and 0 < result["goodput"] <= 1 and result["images_per_second"] > 0
    seconds = result["seconds"]
    assert 0 < seconds["training"] + seconds["validation"] < seconds["total"] < 120
    assert result["versions"]["torch"].startswith("2.")


def test_the_run_folder_has_all_that_a_job_leaves(finished: Any) -> None:
    run = finished.path / "runs/job-1"
    assert json.loads((run / "job.json").read_text())["name"] == "job-1"
    assert {"rank-0.log", "rank-1.log"} == {one.name for one in (run / "logs/000001").iterdir()}
    assert any(run.glob("events/events.out.tfevents.*")) and (run / "metrics/000001.jsonl").stat().st_size
    assert (run / "logs/val-000001.json").exists()
    assert not [one for one in run.rglob("*.tmp")] and "Traceback" not in finished.said()


def test_what_came_home_is_equal_to_what_the_machine_wrote(finished: Any) -> None:
    run = finished.path / "runs/job-1"
    for folder in ("events", "logs", "metrics"):
        assert files(run / folder) == files(run / "machine/shared" / folder) != {}, folder


def test_the_windows_train_agent_and_gpu_were_there_while_it_ran(finished: Any) -> None:
    assert {"train", "agent", "gpu", "supervisor"} <= finished.windows


def test_nothing_runs_after_it(finished: Any) -> None:
    # A report is written meanwhile.
    assert finished.after == [] or finished.wait_for(lambda: not finished.at_work(), 30)
    assert "job-1" not in finished.tmux("list-sessions")


def test_every_epoch_is_one_line_on_stdout(finished: Any) -> None:
    rows = [line.split() for line in finished.said().splitlines() if line.strip()[:1].isdigit()]
    table = [row for row in rows if len(row) == 11]
    assert [row[:3] for row in table] == [["1", "32", "16"], ["2", "32", "16"], ["3", "32", "16"]]


def test_two_launches_at_the_same_moment_get_two_numbers(place: Any) -> None:
    recipe = place.recipe(1)
    both = [place.start("launch", "--local", "--workers", "0", recipe) for _ in range(2)]
    assert [one.wait(120) for one in both] == [0, 0], place.said(0) + place.said(1)
    assert sorted(one.name for one in (place.path / "runs").iterdir()) == ["job-1", "job-2"]
    assert [one["state"] for one in json.loads(place.cli("ls", "-o", "json").out)] == ["done", "done"]


def test_ctrl_c_on_a_launch_only_detaches_and_the_job_goes_on_to_its_end(place: Any) -> None:
    launched = place.start("launch", "--local", place.recipe(30))
    job = place.job()
    place.wait_for(lambda: job.folders.spec.exists())
    place.wait_for_step(job, 4)
    launched.send_signal(signal.SIGINT)
    assert launched.wait(10) == 130
    assert "detached; job-1 keeps running" in place.said() and "Traceback" not in place.said()
    place.wait_for(lambda: job.ended)  # by its supervisor: nobody else looks
    assert job.state == "done" and len(job.lines("epoch")) == 30


def test_killing_the_launch_and_the_supervisor_does_not_end_the_job(place: Any) -> None:
    launched = place.start("launch", "--local", place.recipe(30))
    job = place.job()
    place.wait_for(lambda: job.folders.spec.exists())
    place.wait_for_step(job, 4)
    launched.kill()
    (supervisor,) = place.programs("-m cluster.jobs.supervisor")
    signal.pidfd_send_signal(os.pidfd_open(supervisor), signal.SIGKILL)
    assert place.cli("status", "--exit-code").code == 101
    place.wait_for(lambda: not place.trainers())
    assert json.loads(place.cli("ls", "-o", "json").out)[0]["state"] == "done"
    assert place.cli("status", "--exit-code").code == 0
    assert files(job.run / "events") == files(job.folders.shared / "events")


def test_a_killed_agent_takes_its_trainers_along_and_the_job_can_be_resumed_to_its_end(place: Any) -> None:
    job = place.launch(30, "--procs", "2", "--save-seconds", "0")
    place.wait_for_step(job, 16)
    killed = place.agent()
    os.kill(killed, signal.SIGKILL)
    place.wait_for(lambda: not place.pids("-m train "), 2)
    shown = place.cli("status", "--exit-code")
    assert shown.code == 100 and "agent was killed" in shown.out and "imgnet-cluster resume job-1" in shown.out
    assert json.loads(place.cli("ls", "-o", "json").out)[0]["state"] == "failed"
    saved = sorted((job.folders.shared / "checkpoints/000001").glob("step-*.pt"))
    assert saved
    resumed = place.cli("resume", "job-1")
    assert resumed.code == 0 and "job-1 done" in resumed.out, resumed
    assert job.result["attempts"] == 2 and len(job.result["epochs"]) == 30
    said = place.cli("logs", "job-1").out
    (begun,) = [line for line in said.splitlines() if line.startswith("resumed from ")]
    assert f"checkpoints/000002/resume-{saved[-1].stem.removeprefix('step-')}-" in begun
    assert place.cli("resume", "job-1").code == 1


def kill_rank_1(place: Any) -> None:
    environment = {pid: Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in place.trainers()}
    (victim,) = [pid for pid, words in environment.items() if b"RANK=1" in words]
    os.kill(victim, signal.SIGKILL)


def wait_for_attempt(place: Any, job: Any, number: int) -> None:
    """Wait until an attempt trains."""
    place.wait_for(lambda: job.status()["attempt"] == number and job.status()["doing"] in ("training", "validating"))


def test_a_dead_trainer_is_replaced_and_the_third_ends_the_job_with_the_rank_and_the_signal(place: Any) -> None:
    launched = place.start("launch", "--local", "--procs", "2", "--workers", "0", place.recipe(4000))
    job = place.job()
    place.wait_for(lambda: job.folders.spec.exists())
    for number in (1, 2, 3):
        wait_for_attempt(place, job, number)
        assert (job.status()["reason"] != "") == (number > 1)
        kill_rank_1(place)
    assert launched.wait(30) == 100
    reason = job.status()["reason"]
    assert "rank 1" in reason and "SIGKILL" in reason and "3 times" in reason
    assert [row["attempt"] for row in job.result["timeline"]] == [1, 2, 3, 4]
    place.wait_for(lambda: not place.at_work(), 30)
    assert "Traceback" not in place.said()


def test_a_dead_loader_worker_costs_an_attempt_with_a_reason(place: Any) -> None:
    job = place.launch(4000, "--workers", "1")
    place.wait_for_step(job, 4)
    os.kill(place.workers()[0], signal.SIGKILL)
    wait_for_attempt(place, job, 2)
    assert "worker" in job.status()["reason"].lower()
    assert place.cli("stop", "job-1").code == 0
    place.wait_for(lambda: not place.at_work(), 30)


def test_a_dead_tmux_server_leaves_no_trainer_and_a_state_that_is_told(place: Any) -> None:
    job = place.launch(4000, "--procs", "2")
    place.wait_for_step(job, 4)
    os.kill(place.parent(place.agent()), signal.SIGKILL)
    place.wait_for(lambda: not place.pids("-m train "), 40)
    shown = json.loads(place.cli("ls", "-o", "json").out)[0]
    assert shown["state"] in ("stopped", "failed") and shown["reason"]
    assert place.cli("attach", "job-1").code == 1
    place.wait_for(lambda: not place.at_work(), 30)


def test_stop_saves_and_resume_goes_on_from_that_step(place: Any) -> None:
    job = place.launch(60, "--save-seconds", "1000")
    place.wait_for_step(job, 12)
    stopped = place.cli("stop", "job-1")
    assert stopped.code == 0 and "stopped" in stopped.out
    assert not place.at_work() or place.wait_for(lambda: not place.at_work(), 30)
    assert job.state == "stopped" and job.status()["reason"] == "stopped by the user"
    saved = sorted((job.folders.shared / "checkpoints/000001").glob("step-*.pt"))[-1]
    step = int(saved.stem.split("-")[1])
    again = place.cli("stop", "job-1")
    assert again.code == 1 and again.err.count("\n") == 1 and again.err.startswith("error: ")
    assert place.cli("status", "--exit-code").code == 103
    both = [place.start("resume", "job-1") for _ in range(2)]
    codes = sorted(one.wait(120) for one in both)
    assert codes == [0, 1], place.said(0) + place.said(1)
    assert f"at step {step}" in place.cli("logs", "job-1").out
    assert job.result["attempts"] == 2 and job.state == "done" and len(job.result["epochs"]) == 60
    images = [row["images"] for row in job.lines("train")]
    assert images == sorted(set(images)), "a step is drawn twice"


def test_a_running_job_cannot_be_resumed_and_follows_a_limit_in_hours(place: Any) -> None:
    launched = place.start("launch", "--local", "--max-hours", "0.0015", place.recipe(4000))
    job = place.job()
    place.wait_for(lambda: job.folders.spec.exists() and job.status()["state"] == "running")
    again = place.cli("resume", "job-1")
    assert again.code == 1 and again.err.startswith("error: job-1 is running") and again.err.count("\n") == 1
    assert launched.wait(60) == 103
    assert "--max-hours" in job.result["reason"] and job.state == "stopped"


def test_a_job_that_is_stopped_while_it_sets_up_can_be_resumed(place: Any) -> None:
    job = place.launch(4000, "--data", "sample")
    place.wait_for(lambda: job.status()["state"] == "setup" and job.status()["progress"])
    shown = place.cli("logs", "job-1")
    assert shown.code == 0 and "drawing" in shown.out, "before the first attempt the log is the set-up's"
    start = time.monotonic()
    assert place.cli("stop", "job-1").code == 0
    assert time.monotonic() - start < 10 and job.state == "stopped"
    place.wait_for(lambda: not place.at_work(), 30)
    assert place.cli("resume", "-d", "job-1").code == 0
    place.wait_for(lambda: job.status()["state"] == "setup")
    assert place.cli("stop", "job-1").code == 0


def test_environment_of_the_launch_reaches_the_trainers_and_that_of_an_earlier_job_does_not(place: Any) -> None:
    first = place.cli("launch", "--local", "-d", place.recipe(4000), env={"OF_THE_FIRST": "1", "BOTH": "one"})
    second = place.cli("launch", "--local", "-d", place.recipe(4000), env={"OF_THE_SECOND": "2", "BOTH": "two"})
    assert first.code == second.code == 0
    both = place.wait_for(lambda: len(found := place.trainers()) == 2 and found)
    seen = []
    for pid in both:
        words = Path(f"/proc/{pid}/environ").read_text().split("\0")
        seen.append(sorted(one for one in words if one.startswith(("OF_THE", "BOTH"))))
    assert sorted(seen) == [["BOTH=one", "OF_THE_FIRST=1"], ["BOTH=two", "OF_THE_SECOND=2"]]
    for name in ("job-1", "job-2"):
        assert place.cli("stop", name).code == 0


def test_jobs_of_two_folders_never_share_a_name_and_leave_each_other_alone(place: Any) -> None:
    job = place.launch(4000)
    other = place.path / "elsewhere"
    other.mkdir()
    ran = place.cli("launch", "--local", "-d", place.recipe(4000), cwd=other)
    assert ran.code == 0 and "job-2 launched" in ran.out
    assert place.cli("stop", "job-1", cwd=other).code == 102 and job.alive
    assert place.cli("stop", "job-1").code == 0
    assert [one["state"] for one in json.loads(place.cli("ls", "-o", "json", cwd=other).out)] == ["running"]
    third = place.path / "third"
    third.mkdir()
    ran = place.cli("launch", "--local", "-d", place.recipe(4000), cwd=third)
    assert ran.code == 0 and "job-1 launched" in ran.out  # the name is free now; ours must not take it back
    again = place.cli("resume", "job-1")
    assert again.code == 1 and again.err.startswith("error: ") and str(third) in again.err, again
    assert [one["state"] for one in json.loads(place.cli("ls", "-o", "json", cwd=third).out)] == ["running"]
    assert place.cli("stop", "job-1", cwd=third).code == 0
    assert place.cli("stop", "job-2", cwd=other).code == 0
    assert place.cli("resume", "-d", "job-1").code == 0 and place.cli("stop", "job-1").code == 0


def test_a_launch_that_was_killed_before_its_session_began_shows_as_failed_and_can_be_resumed(place: Any) -> None:
    from cluster.jobs import submit

    spec = submit.plan(submit.load_recipes(place.recipe(2))[0], data=place.data).spec
    job = submit.create_job(spec)
    long_ago = time.time() - 60
    text = json.loads(job.run_folder.spec_path.read_text())
    job.run_folder.spec_path.write_text(json.dumps({**text, "created": long_ago}))
    assert json.loads(place.cli("ls", "-o", "json").out)[0]["state"] == "failed"
    resumed = place.cli("resume", "job-1")
    assert resumed.code == 0 and json.loads(place.cli("ls", "-o", "json").out)[0]["state"] == "done"


@pytest.mark.parametrize("rate", [1e9])
def test_a_diverged_job_is_failed_with_the_step_and_the_reason(place: Any, rate: float) -> None:
    path = place.recipe(50, "wild", lr=rate)
    ran = place.cli("launch", "--local", path)
    assert ran.code == 100 and "the loss is" in ran.out and "at step" in ran.out, ran
    assert place.cli("status", "--exit-code", "job-1").code == 100
    place.wait_for(lambda: not place.at_work(), 30)
