"""Tests of a job's state while it runs, and of its result for each way to end, from hand-made files."""

import json
import os
import time
from dataclasses import replace
from typing import Any

import pytest
from support.recorded_run import PRICE, make_job
from support.train_records import epoch_line, make_epoch, make_result, step_line

from cluster.errors import ClusterError
from cluster.state import result as job_result
from cluster.state import status as job_status
from cluster.state import supervisor_records
from cluster.state.states import JobState, SetupStep
from cluster.state.status import JobResult
from cluster.state.supervisor_records import MachineSetup, SetupRecord
from train.forecast import StartSeconds
from train.metrics.time_table import TimeTable
from train.tools.files import write_atomic
from train.tools.records import decode, encode
from train.tools.text_files import to_json_bytes

NOW = time.time()


def trained(**fields: Any) -> str:
    return json.dumps(encode(replace(make_result(make_epoch(top1=50.0, top5=90.0)), **fields)))


def epoch(images: int, top1: float) -> dict[str, Any]:
    return epoch_line(images, top1=top1, top5=90.0)


def step(images: int) -> dict[str, Any]:
    return step_line(images, loss__train=1.0 / images)


def test_write_result_done_merges_trainer_result(hand_made: Any) -> None:
    run = hand_made(procs=2, git_commit="of the launch")
    run.write_status("done", ended=True, attempt=1, progress="8 of 60 images resized")
    run.write_state_log(("setup", NOW), ("starting", NOW + 1), ("training", NOW + 4), ("done", NOW + 10))
    run.copy_logs()
    epochs = tuple(make_epoch(top1=50.0, top5=90.0, epoch=number) for number in (1, 14, 26))
    run.write_shared("result.json", trained(epochs=epochs))
    run.write_shared("attempts/000001.json", '{"number": 1, "members": ["0"], "resume": "", "reason": "", "time": 0}')
    job = run.job
    # A job that trained to its end is done, whatever ended it.
    job_result.write_result(job.run, job.backend, end_reason="ended by the user", end_state=JobState.STOPPED)
    status, result = job.status(), job.result
    # With --max-steps whole epochs are left out: the epochs' lines, ls and status must agree.
    assert (status.state, status.reason, status.epoch, status.epochs) == ("done", "", 26, 26)
    assert status.progress == "", "nothing is done any more"
    assert (result.top1, result.images_per_second, result.goodput) == (50.0, 7.5, 0.9)
    assert (result.machines, result.procs, result.attempts, result.dollars) == (1, 2, 1, 0)
    assert (result.job, result.backend, result.git_commit) == ("job-1", "local", "of the launch")
    # The trainers measured 4 s of training, the agent saw 6 s: the trainers' figure counts.
    assert result.seconds == {"training": 4.0, "total": 10.0, "setup": 1.0, "starting": 3.0}


def test_agent_without_status_fails_the_job_after_some_time(hand_made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    young, old, resumed = hand_made("job-1", created=time.time()), hand_made("job-2"), hand_made("job-3")
    young.job.refresh()
    assert not young.job.has_ended and young.job.state == "booting"
    resumed.write_status("stopped", reason="of an earlier launch", ended=True, time=time.time() - 1800, top1=21.0)
    resumed.run_folder.launch_path.write_text("the next one")
    assert (resumed.job.status().top1, resumed.job.status().reason) == (21.0, ""), "the accuracy stays"
    resumed.job.refresh()
    assert not resumed.job.has_ended, "its agent may still start"
    os.utime(resumed.run_folder.launch_path, (time.time() - 600,) * 2)
    error = "OSError: [Errno 30] Read-only file system: '/tmp/x'"
    output = old.run_folder.work_folder() / "agent.out"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(f"Traceback (most recent call last):\n  ...\n{error}\n")
    for run, reason in ((old, f"{error}; try"), (resumed, "it was killed, its disk was full, or")):
        run.job.refresh()
        assert run.job.state == "failed" and f"before it wrote its first status: {reason}" in run.job.result.reason
    job = young.job
    monkeypatch.setattr(job.backend, "poll", lambda: bool(young.write_status("starting")))
    job.refresh()
    assert not job.has_ended, "its agent started after the machine had answered that none was alive"
    job.refresh()
    assert job.state == "failed", "it has a status but does not live: it was killed"


@pytest.mark.parametrize("agent_state, job_state", [
    ("setup", "setup"), ("indexing", "running"), ("training", "running"), ("done", "running"),
])  # fmt: skip
def test_refresh_writes_the_result_once_and_not_while_an_agent_lives(
    hand_made: Any, agent_state: str, job_state: str
) -> None:
    run = hand_made(machines=3)
    for name in "012":
        run.write_status(agent_state, name, step=8, steps=16, host=f"node{name}")
    assert [row.host for row in run.job.machine_details().values()] == ["node0", "node1", "node2"]
    with run.hold_agent_lock("2"):
        run.job.refresh()
        assert not run.job.has_ended and run.job.is_alive and run.job.backend.dead_machines() == ["0", "1"]
        status = run.job.status()
        assert (status.state, status.doing, status.step, status.steps) == (job_state, agent_state, 8, 16)
        with pytest.raises(ClusterError, match="job-1: not finished after 0 s"):
            run.job.wait(0)
    run.job.refresh()
    before = run.run_folder.result_path.read_bytes()
    run.write_status("failed", ended=True)
    run.job.refresh()
    assert run.run_folder.result_path.read_bytes() == before and not run.job.is_alive


WHERE = {
    "wall": 50.0, "gap": {"steps": 0.5, "epoch": 2}, "start": {"indexing": 3.0, "warming": 1.0},
    "parts": {part: {"seconds": 10.0, "epoch": 2, "most": 6.0}
              for part in ("steps", "waits", "validation", "switches", "checkpoints", "other")},
}  # fmt: skip
TIME_TABLE = decode(TimeTable, WHERE)


def test_epochs_and_scalars_of_attempts_that_repeat_steps_and_do_not_validate(hand_made: Any, sandbox: Any) -> None:
    run = hand_made()
    run.write_status("failed", ended=True)
    without = {**epoch(60, 0.0), "top1": None, "top5": None}
    run.write_metrics(1, step(8), epoch(16, 10.0), step(24), epoch(32, 20.0), tail='{"kind": "tra')
    run.write_metrics(2, step(24), epoch(32, 21.0), step(40), without)
    run.job.refresh()
    assert (run.job.result.top1, run.job.result.top5, len(run.job.result.epochs)) == (21.0, 90.0, 3)
    assert run.job.scalars("accuracy/val_top1") == [(16, 10.0), (32, 21.0)]
    assert run.job.scalars("loss/train") == [(8, 1 / 8), (24, 1 / 24), (40, 1 / 40)]
    assert run.job.scalars("val/nothing") == []
    other = hand_made("job-2")
    other.write_status("failed", ended=True)
    other.write_metrics(1, without)
    other.job.refresh()
    assert other.job.result.top1 is None
    for arguments in (("ls",), ("status", "job-2")):
        assert sandbox.cli(*arguments).code == 0


def test_add_job_times_shows_pauses_in_status_and_result(hand_made: Any, sandbox: Any) -> None:
    run = hand_made()
    assert run.job.status().where is None
    run.write_attempt(1, "0.a", reason="start")
    run.write_metrics(1, {**step(8), "step": 1, "time": 100.0}, {**step(16), "step": 9, "time": 108.0})
    run.write_attempt(2, "0.a", reason="crash", resume_step=9)
    run.write_metrics(2, {**step(24), "step": 10, "time": 120.5})
    run.write_status("training", step=8, where=WHERE)
    with run.hold_agent_lock():
        run.job.refresh()
        assert encode(run.job.status().where) == {**WHERE, "slower": None, "pauses": 12.5}
        output = sandbox.cli("status").out
    assert "where the time went" in output and "losses, redone steps" in output and "epoch 2: 6.00 s" in output
    assert "62.50" in output and "{" not in output
    run.write_shared("result.json", trained(where=replace(TIME_TABLE, slower=2.0)))
    run.job.refresh()
    assert run.job.result.where == replace(TIME_TABLE, slower=2.0, pauses=12.5)
    assert "goodput 90.0 %" in sandbox.cli("status").out


def test_job_status_uses_best_informed_machine(hand_made: Any) -> None:
    run = hand_made(machines=3)
    run.write_attempt(1, "0.a", "1.b", reason="start", launch_id="")
    run.write_status("waiting", "2", phase="spare", attempt=1)
    run.write_status("training", "1", phase="running", attempt=1, step=8)
    run.write_status("failed", "0", phase="failed", attempt=0, reason="an old failure")
    with run.hold_agent_lock("2"):
        run.job.refresh()
        status = run.job.status()
        assert (status.state, status.doing, status.step, status.machines) == ("running", "training", 8, 3)
        run.write_attempt(2, "1.b", "2.c", reason="machine 0 lost", launch_id="")
        run.write_status("starting", "1", phase="running", attempt=2)
        status = run.job.status()
        assert (status.state, status.attempt, status.reason) == ("recovering", 2, "machine 0 lost")


def test_resumed_job_that_starts_is_not_recovering(hand_made: Any) -> None:
    run = hand_made()
    run.write_attempt(1, "0.a", reason="start", launch_id="an earlier one")
    run.write_attempt(2, end_state="failed", reason="killed", launch_id="an earlier one")
    run.write_attempt(3, "0.b", reason="start", launch_id="")
    run.write_status("starting", "0", phase="running", attempt=3)
    with run.hold_agent_lock():
        run.job.refresh()
        status = run.job.status()
        assert (status.state, status.doing, status.reason) == ("running", "starting", "")
        assert [row.reason for row in run.job.timeline()] == ["start", "killed", "resume"]


AGREED = {"end_state": "failed", "reason": "machine 1: the loss is nan", "launch_id": ""}


@pytest.mark.parametrize("ends, files, state, reason", [
    ((("left", "a notice"), ("left", "another")), {}, "stopped", "a notice"),
    ((("left", "a notice"), None), {}, "failed", "was killed"),
    ((("failed", "no such folder"), ("left", "a notice")), {}, "failed", "no such folder"),
    ((("failed", "no such folder"), ("stopped", "by the user")), {}, "stopped", "by the user"),
    ((None, None), {}, "failed", "was killed"),
    ((None, None), {"result.json": trained()}, "done", ""),
    ((None, None), {"stop": "{}"}, "stopped", "stopped by the user; the agents were ended before they could save"),
    ((("left", "a notice"), None), {"attempts/000002.json": json.dumps(AGREED)}, "failed", "machine 1: the loss"),
    ((None, None), {"attempts/000002.json": json.dumps(AGREED | {"launch_id": "old"})}, "failed", "was killed"),
])  # fmt: skip
def test_end_is_agreed_or_inferred_from_the_final_statuses(
    hand_made: Any, ends: Any, files: dict[str, str], state: str, reason: str
) -> None:
    run = hand_made(machines=2)
    run.write_attempt(1, "0.a", "1.b", reason="start", launch_id="")
    for name, end in enumerate(ends):
        if end:
            run.write_status(end[0], str(name), reason=end[1], ended=True)
        else:
            run.write_status("training", str(name))
    for path, content in files.items():
        run.write_shared(path, content)
    run.write_metrics(1, epoch(60, 25.0), epoch(120, 30.0))
    run.job.refresh()
    result = run.job.result
    assert run.job.state == state and reason in result.reason and result.attempts == 1
    assert ("imgnet-cluster resume job-1" in result.reason) == (reason == "was killed")
    assert result.top1 == (50.0 if state == "done" else 30.0), "of the trainers, or of the last epoch"


def test_seconds_by_state_count_overlapping_machines_once_and_no_time_between_launches(hand_made: Any) -> None:
    run = hand_made(machines=3)
    run.write_state_log(
        *(("setup", NOW), ("training", NOW + 2), ("lost", NOW + 10), ("setup", NOW + 12), ("training", NOW + 14)),
        *(("done", NOW + 20), ("setup", NOW + 1000), ("starting", NOW + 1001)),  # the agent was killed
        *(("setup", NOW + 2000), ("starting", NOW + 2001), ("failed", NOW + 2011)),
    )
    run.write_state_log(("setup", NOW + 1), ("training", NOW + 3), ("failed", NOW + 11), ("starting", NOW + 13),
                ("training", NOW + 14), ("validating", NOW + 18), ("done", NOW + 20), machine="1")  # fmt: skip
    run.write_state_log(("setup", NOW), ("waiting", NOW + 1), ("done", NOW + 21), machine="2")
    for name in "012":
        run.write_status("done", name, ended=True)
    run.write_shared("result.json", trained(seconds={}))
    run.job.refresh()
    seconds = {part: round(value, 3) for part, value in run.job.result.seconds.items()}
    assert seconds == {
        "total": 33.0, "setup": 3.0, "waiting": 2.0, "training": 15.0, "failed": 2.0, "starting": 11.0
    }  # fmt: skip


def test_add_job_times_start_fits_into_total_seconds(hand_made: Any) -> None:
    run = hand_made()
    run.write_state_log(("setup", 0.0), ("starting", 2.0), ("warming", 5.0), ("training", 9.0), ("done", 20.0))
    run.copy_logs()
    assert job_status.machine_rows(run.job.run)["0"].seconds == {"setup": 2.0, "starting": 3.0, "warming": 4.0}
    table = replace(TIME_TABLE, wall=12.0, start={"starting": 1.0})
    running = job_status.add_job_times(run.job.run, table)
    assert running.start == {"setup": 2.0, "starting": 3.0, "warming": 4.0}
    ended = job_status.add_job_times(run.job.run, table, total_seconds=20.0)
    assert ended.start == {"setup": 2.0, "starting": 3.0, "warming": 3.0}
    for attempt, time_of_step in ((1, 10.0), (2, 400.0)):  # no agent lived for most of the time between them
        run.write_attempt(attempt, f"0.{attempt}", resume_step=attempt - 1)
        run.write_metrics(attempt, {**step(8 * attempt), "step": attempt, "time": time_of_step})
    run.copy_logs()
    recovered = job_status.add_job_times(run.job.run, table, total_seconds=20.0)
    assert (recovered.pauses, recovered.start) == (390.0, running.start)


def test_machine_that_is_not_set_up_any_more_is_at_no_step(hand_made: Any) -> None:
    run = hand_made(machines=2)
    rows = {"0": MachineSetup(step=SetupStep.CONNECTING, reason="away"), "1": MachineSetup(step=SetupStep.ENVIRONMENT)}
    write_atomic(run.run_folder.path / "machines.json", to_json_bytes(encode(SetupRecord(machines=rows))))

    def states() -> list[str]:
        return [row.state for row in job_status.machine_rows(run.job.run).values()]

    assert states() == ["failed", "environment"]
    run.run_folder.result_path.write_text("{}")
    assert states() == ["failed", "stopped"]


def test_replacement_has_none_of_the_seconds_of_the_lost_machine(hand_made: Any) -> None:
    run = hand_made(machines=2)
    lost = (("setup", 0.0), ("warming", 361.0), ("training", 403.0), ("lost", 500.0))
    run.write_state_log(("setup", 0.0), ("warming", 300.0), ("training", 403.0))
    run.write_state_log(*lost, machine="1")
    setup = SetupRecord(machines={"0": MachineSetup(), "1": MachineSetup(restarted=510, seconds={SetupStep.CODE: 10})})
    write_atomic(run.run_folder.path / "machines.json", to_json_bytes(encode(setup)))
    run.copy_logs()
    assert job_status.machine_rows(run.job.run)["1"].seconds == {"code": 10.0}, "it is not training yet"
    run.write_state_log(*lost, ("setup", 530.0), ("warming", 532.0), ("training", 536.0), machine="1")
    run.copy_logs()
    rows = job_status.machine_rows(run.job.run)
    assert rows["1"].seconds == {"code": 10.0, "setup": 2.0, "standby": 4.0}
    assert [row.notes for row in rows.values()] == [(), ("lost during its set-up, and started again",)]
    start = {"setup": 300.0, "standby": 103.0}
    assert job_status.add_job_times(run.job.run, TIME_TABLE).start == start, "that of the first attempt"
    resumed = SetupRecord(machines=dict.fromkeys("01", setup.machines["1"]))
    write_atomic(run.run_folder.path / "machines.json", to_json_bytes(encode(resumed)))
    start = rows["1"].seconds
    assert job_status.add_job_times(run.job.run, TIME_TABLE).start == start, "a resume has started all of them again"


def test_start_seconds_are_those_of_the_slowest_machine() -> None:
    setup = {
        "0": {"booting": 20.0, "environment": 10.0, "warming": 4.0},
        "1": {"booting": 30.0, "setup": 8.0, "environment": 12.0, "starting": 1.0, "indexing": 2.0, "warming": 5.0},
        "2": {},
    }
    result = JobResult(state=JobState.DONE, reason="", epochs=(), attempts=1, setup=setup)
    assert result.start_seconds() == StartSeconds(setup=42.0, trainers=6.0)
    assert JobResult(state=JobState.DONE, reason="", epochs=(), attempts=1).start_seconds() == StartSeconds()


def test_status_shows_the_last_activity_of_a_rented_job(hand_made: Any) -> None:
    run = hand_made(backend="aws", cloud={"places": []})
    for doing, expected in ((None, "booting"), ("renting machines", "acquiring"), ("", "booting")):
        if doing is not None:
            supervisor_records.write_activity(run.run_folder.path, doing)
        status = job_status.job_status(run.job.run, None)
        assert (status.state, status.doing) == (expected, doing or "")


@pytest.mark.parametrize("backend", ["local", "aws"])
def test_result_has_seconds_and_dollars_to_target(hand_made: Any, backend: str) -> None:
    job = make_job(hand_made, backend)
    target, row = job.result.target, job.result.epochs[-1]
    assert (target.metric, target.goal, target.reached, target.epoch, target.best) == ("top5", 93.0, True, 4, 94.0)
    assert target.seconds == row.clock and target.minutes == row.clock / 60
    assert target.seconds_all == pytest.approx(row.clock + 100)
    dollars = (row.clock + 90 + 260 + row.clock - 175) * PRICE / 3600
    assert target.dollars == (None if backend == "local" else pytest.approx(dollars, abs=2 * PRICE / 3600))
    contradicting = replace(job.run, spec=replace(job.spec, created=target.at - 1.0))
    outcome = job_result.target_outcome(contradicting, job.backend, job.result.epochs)
    assert outcome == replace(target, seconds_all=None), "the clock contradicts the time since the launch"


def test_failed_job_has_the_best_of_a_target_that_it_missed(hand_made: Any) -> None:
    job = make_job(hand_made, done=False, target="top5=99")
    assert job.state == "failed" and (job.result.target.reached, job.result.target.best) == (False, 94.0)
