"""The supervisor beside a hand-made run folder: it copies files home, replaces machines and writes the result."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.jobs.supervisor import MAX_REPLACEMENT_DELAY_SECONDS, MachineReplacer


@pytest.fixture
def start_supervisor(sandbox: Any) -> Any:
    """Start a supervisor of a run folder as another process of this sandbox."""
    processes = []

    def start(run: Any) -> "subprocess.Popen[bytes]":
        argv = [sys.executable, "-m", "cluster.jobs.supervisor", str(run.run_folder.path)]
        with (sandbox.path / "supervisor.log").open("ab") as log:
            processes.append(subprocess.Popen(argv, stdout=log, stderr=log, cwd=sandbox.path, env=sandbox.env))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


LOG = "logs/000001/rank-0.log"


def text_of(path: Path) -> str:
    """The text of a file, "" when there is none."""
    return path.read_text() if path.exists() else ""


def local_log(run: Any) -> str:
    return text_of(run.run_folder.path / LOG)


def logged_messages(run: Any) -> str:
    """What `imgnet-cluster logs --supervisor` shows."""
    return text_of(run.run_folder.supervisor_log_path)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_second_supervisor_exits_and_the_next_one_goes_on_after_the_death_of_the_first(
    sandbox: Any, hand_made: Any, start_supervisor: Any, end: signal.Signals
) -> None:
    """The keys by which people try to leave its session, such as Ctrl-C, do not end it."""
    run = hand_made()
    run.write_status("training")
    with run.hold_agent_lock():
        run.write_shared(LOG, "one\n")
        first = start_supervisor(run)
        sandbox.wait_for(lambda: local_log(run) == "one\n")
        assert start_supervisor(run).wait(120) == 0 and first.poll() is None
        assert "another supervisor is running" in (sandbox.path / "supervisor.log").read_text()
        for signal_number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP, signal.SIGHUP):
            first.send_signal(signal_number)
        sandbox.wait_for(lambda: "SIGHUP" in logged_messages(run))
        first.send_signal(end)
        assert first.wait(120) in (-end, 128 + end)
        assert ("SIGTERM: the supervisor was ended" in logged_messages(run)) == (end == signal.SIGTERM)
        run.write_shared(LOG, "one\ntwo\n")
        third = start_supervisor(run)
        sandbox.wait_for(lambda: local_log(run) == "one\ntwo\n")
        assert not run.job.has_ended
        run.write_status("stopped", reason="stopped by the user", ended=True)
    assert third.wait(120) == 0
    assert run.job.state == "stopped" and local_log(run) == "one\ntwo\n"
    assert "Traceback" not in (sandbox.path / "supervisor.log").read_text()


def test_supervisor_log_has_its_errors(sandbox: Any, hand_made: Any, start_supervisor: Any) -> None:
    run = hand_made()
    run.write_shared("status/0.json", "[]")
    assert start_supervisor(run).wait(120) == 1
    assert "is damaged" in logged_messages(run)


@pytest.fixture
def job(hand_made: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A job of three machines an hour after its launch.

    The test sets `job.dead`, the machines without an agent; `job.replaced` lists those that were replaced.
    """
    run = hand_made(machines=3)
    running_job = run.job
    running_job.run_ = run
    running_job.dead = []
    running_job.replaced = []
    for name in running_job.spec.machine_names:
        run.write_status("training", name)
    backend = running_job.backend
    monkeypatch.setattr(backend, "dead_machines", lambda: list(running_job.dead))
    monkeypatch.setattr(backend, "replace", lambda name: running_job.replaced.append(name))
    return running_job


@pytest.mark.parametrize("state", ["training", "left"])
def test_replacer_replaces_after_a_second_that_doubles_up_to_a_minute_per_machine(job: Any, state: str) -> None:
    job.run_.write_status(state, "1", ended=state == "left")
    replacer = MachineReplacer(job)
    now = 0.0
    assert replacer.replace_due_machines(now) == []
    delays = []
    job.dead = ["1"]
    for _ in range(10):
        start = now
        while not (replaced := replacer.replace_due_machines(now)):
            now += 0.5
        assert replaced == ["1"]
        delays.append(now - start)
    assert delays == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, *[MAX_REPLACEMENT_DELAY_SECONDS] * 4] and len(job.replaced) == 10
    job.dead = ["1", "2"]
    start = now
    while "2" not in replacer.replace_due_machines(now):
        now += 0.5
    assert now - start == 1.0, "the delay of one machine must not delay another one"


# What makes the replacement of machine 1 pointless.
POINTLESS: dict[str, Callable[[Any], object]] = {
    "all are dead": lambda job: job.dead.extend(["0", "2"]),
    "for good": lambda job: job.run_folder.disabled_marker("1").touch(),
    "it failed": lambda job: job.run_.write_status("failed", "1", ended=True),
    "a stop": lambda job: job.run_.write_shared("stop", "{}"),
    "a result": lambda job: job.run_.write_shared("result.json", "{}"),
    "the end": lambda job: job.run_.write_attempt(1, end_state="failed", reason="why", launch_id=""),
    "it boots": lambda job: (job.run_folder.launch_path.touch(), job.run_folder.status_path("1").unlink()),
}


@pytest.mark.parametrize("reason", [*POINTLESS, "one machine only"])
def test_replacer_replaces_nothing_when_pointless(job: Any, hand_made: Any, reason: str) -> None:
    job.dead = ["1"]
    if reason in POINTLESS:
        POINTLESS[reason](job)
    replacer = MachineReplacer(job if reason in POINTLESS else hand_made("job-2").job)
    assert [replacer.replace_due_machines(float(now)) for now in range(0, 200, 5)] == [[]] * 40 and job.replaced == []
