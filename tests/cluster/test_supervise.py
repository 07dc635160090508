"""The supervisor alone, beside a hand-made run folder: files come home, and the result when the agent is gone."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

Fixture = Any


@pytest.fixture
def supervise(place: Fixture) -> Any:
    """Start a supervisor of a run folder, as another process of this place."""
    started = []

    def start(run: Any) -> "subprocess.Popen[bytes]":
        with (place.path / "supervisor.log").open("ab") as log:
            words = [sys.executable, "-m", "cluster.supervise", str(run.folders.run)]
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


def test_two_supervisors_and_a_third_bring_each_line_home_and_one_result(
    place: Fixture, hand_made: Fixture, supervise: Fixture
) -> None:
    run = hand_made()
    run.says("training")
    with run.agent_at_work():
        grow(run, "one\n")
        killed, hung_up = supervise(run), supervise(run)
        place.wait_for(lambda: at_home(run) == "one\n")
        killed.kill()
        hung_up.send_signal(signal.SIGHUP)
        third = supervise(run)
        grow(run, "two\n")
        place.wait_for(lambda: at_home(run) == "one\ntwo\n")
        assert hung_up.poll() is None and third.poll() is None and not run.job.ended
        grow(run, "three\n")
        run.says("stopped", reason="stopped by the user", ended=True)
    assert hung_up.wait(20) == third.wait(20) == 0
    assert run.job.state == "stopped" and at_home(run) == "one\ntwo\nthree\n"
    assert (place.path / "supervisor.log").read_text() == ""


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
