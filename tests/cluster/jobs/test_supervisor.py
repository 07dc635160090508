"""The supervisor alone, beside a hand-made run folder: files come home, and the result when the agent is gone."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.jobs.supervisor import MAX_REPLACEMENT_DELAY_SECONDS, MachineReplacer

Fixture = Any


@pytest.fixture
def supervise(place: Fixture) -> Any:
    """Start a supervisor of a run folder, as another process of this place."""
    started = []

    def start(run: Any) -> "subprocess.Popen[bytes]":
        with (place.path / "supervisor.log").open("ab") as log:
            words = [sys.executable, "-m", "cluster.jobs.supervisor", str(run.folders.run)]
            started.append(subprocess.Popen(words, stdout=log, stderr=log, cwd=place.path, env=place.env))
        return started[-1]

    yield start
    for one in started:
        one.kill()
        one.wait()


LOG = "logs/000001/rank-0.log"


def grow(run: Any, text: str) -> None:
    path = run.folders.shared / LOG
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(text)


def at_home(run: Any) -> str:
    path = run.folders.run / LOG
    return path.read_text() if path.exists() else ""


def test_a_second_supervisor_leaves_the_job_to_the_first_and_the_next_goes_on_where_a_killed_one_was(
    place: Fixture, hand_made: Fixture, supervise: Fixture
) -> None:
    run = hand_made()
    run.says("training")
    with run.agent_at_work():
        grow(run, "one\n")
        first = supervise(run)
        place.wait_for(lambda: at_home(run) == "one\n")
        assert supervise(run).wait(20) == 0 and first.poll() is None
        assert "another supervisor is at work" in (place.path / "supervisor.log").read_text()
        first.kill()
        first.wait()
        grow(run, "two\n")
        third = supervise(run)
        place.wait_for(lambda: at_home(run) == "one\ntwo\n")
        third.send_signal(signal.SIGHUP)
        grow(run, "three\n")
        place.wait_for(lambda: at_home(run) == "one\ntwo\nthree\n")
        assert third.poll() is None and not run.job.ended
        run.says("stopped", reason="stopped by the user", ended=True)
    assert third.wait(20) == 0
    assert run.job.state == "stopped" and at_home(run) == "one\ntwo\nthree\n"
    assert "Traceback" not in (place.path / "supervisor.log").read_text()


def test_a_supervisor_of_a_job_that_has_ended_has_nothing_to_do(hand_made: Fixture, supervise: Fixture) -> None:
    run = hand_made()
    run.says("failed", reason="long ago", ended=True)
    run.job.refresh()
    before = run.folders.result.read_bytes()
    assert supervise(run).wait(20) == 0 and run.folders.result.read_bytes() == before


def test_on_a_full_disk_it_goes_on_while_the_agent_lives_and_then_says_so(
    place: Fixture, hand_made: Fixture, supervise: Fixture, small_disk: Path
) -> None:
    run = hand_made(str(small_disk / "job-1"))
    run.says("training")
    with run.agent_at_work():
        run.shared(LOG, bytes(150_000))
        one = supervise(run)
        log = place.path / "supervisor.log"
        place.wait_for(lambda: "No space left" in log.read_text())
        assert one.poll() is None
    assert one.wait(20) == 1 and "Traceback" not in log.read_text()


# --- lost machines --------------------------------------------------------------------------------------------------


@pytest.fixture
def job(hand_made: Fixture, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A job of three machines an hour after its launch; `job.dead` have no agent, `job.replaced` were started again."""
    run = hand_made(machines=3)
    made = run.job
    made.run_, made.dead, made.replaced = run, [], []
    for name in made.spec.names:
        run.says("training", name)
    monkeypatch.setattr(made.backend, "dead", lambda spec, folders: list(made.dead))
    monkeypatch.setattr(made.backend, "replace", lambda spec, folders, name: made.replaced.append(name))
    return made


def test_a_lost_machine_is_started_again_a_moment_later(job: Any) -> None:
    replacer = MachineReplacer(job)
    assert replacer.replace_due_machines(0.0) == []
    job.dead = ["1"]
    assert replacer.replace_due_machines(10.0) == [] and replacer.replace_due_machines(10.9) == []
    assert replacer.replace_due_machines(11.0) == ["1"] and job.replaced == ["1"]


def test_a_machine_that_keeps_dying_is_started_ever_later_but_at_least_each_minute(job: Any) -> None:
    replacer, now, waits = MachineReplacer(job), 0.0, []
    job.dead = ["1"]
    for _ in range(10):
        begun = now
        while not replacer.replace_due_machines(now):
            now += 0.5
        waits.append(now - begun)
    assert (
        waits == sorted(waits)
        and waits[:5] == [1.0, 2.0, 4.0, 8.0, 16.0]
        and waits[-1] == MAX_REPLACEMENT_DELAY_SECONDS
    )
    job.dead = ["1", "2"]
    begun = now
    while "2" not in replacer.replace_due_machines(now):
        now += 0.5
    assert now - begun == 1.0, "the others pay nothing for it"


@pytest.mark.parametrize(
    "why", ["all are dead", "one machine only", "for good", "it failed", "a stop", "a result", "the end", "booting"]
)
def test_nobody_is_started_again(job: Any, hand_made: Fixture, why: str) -> None:
    run, job.dead = job.run_, ["1"]
    match why:
        case "all are dead":
            job.dead = ["0", "1", "2"]
        case "one machine only":
            job = hand_made("job-2").job
            job.replaced = []
        case "for good":
            job._away("1").touch()
        case "it failed":
            run.says("failed", "1", ended=True)
        case "a stop":
            run.shared("stop", "{}")
        case "a result":
            run.shared("result.json", "{}")
        case "the end":
            run.attempt(1, state="failed", reason="why", launch="")
        case "booting":
            run.folders.launch.write_text("")  # just now, and machine 1 has not spoken yet
            run.folders.status("1").unlink()
    replacer = MachineReplacer(job)
    assert [replacer.replace_due_machines(float(now)) for now in range(0, 200, 5)] == [[]] * 40 and job.replaced == []


def test_a_machine_that_left_is_started_again(job: Any) -> None:
    job.run_.says("left", "1", ended=True, reason="a notice")
    job.dead, replacer = ["1"], MachineReplacer(job)
    assert replacer.replace_due_machines(0.0) == [] and replacer.replace_due_machines(1.0) == ["1"]
