"""The supervisor of a rented job: who starts one, who ends one, and what `status` says of it."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
from support.toy_cloud import ToyBackend, ToyCloud

from cluster.backends.local import LocalBackend
from cluster.backends.rentals import RentedNow
from cluster.connectors import tmux
from cluster.connectors.hosts_file import Hosts
from cluster.display.cloud import show_cost
from cluster.display.progress import follow
from cluster.display.status import show_jobs
from cluster.errors import EXIT_UNFINISHED, ClusterError
from cluster.jobs import billing
from cluster.jobs.job import Job
from cluster.jobs.supervision import START_MARKER
from cluster.jobs.supervisor import heartbeats, supervise
from cluster.state import supervisor_records
from cluster.state.supervisor_records import SupervisorTrouble
from infra.errors import AdoptedElsewhere, NoCredentials
from train.tools import host

REFUSED = SupervisorTrouble(error="the toy cloud refuses the credentials", lacks_access=True)
NOTHING_IS_RENTED = "nothing is rented, so lost and broken machines are not replaced until"


@pytest.fixture
def job(hand_made: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A job that trains on two machines of the toy cloud. `job.sessions` has an entry for each supervisor started."""
    ToyCloud.reset(free_machines=2)
    run = hand_made(machines=2, backend="toy", cloud={}, hosts=Hosts(None, ()))
    run.run_folder.launch_path.write_text("")
    os.utime(run.run_folder.launch_path, (0, 0))
    for name in ("0", "1"):
        run.write_status("training", name)
    rented_job = run.job
    rented_job.backend = ToyBackend(rented_job.run)
    rented_job.sessions = []
    rented_job.write_status = run.write_status
    monkeypatch.setattr(ToyBackend, "start_session", lambda _: rented_job.sessions.append("supervisor"))
    return rented_job


@pytest.fixture
def without_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ToyCloud, "check_access", Mock(side_effect=NoCredentials("the toy cloud: no credentials")))


# Holds the lock as a supervisor does; its command line ends as that of a supervisor.
LOCK_HOLDER = """
import fcntl, os, sys, time
with open(os.path.join(sys.argv[2], ".supervisor.lock"), "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    lock.write(str(os.getpid()))
    lock.flush()
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def start_holder(job: Any) -> Iterator[Any]:
    """Start a process that holds the supervisor's lock, by default one with the command line of a supervisor."""
    processes = []

    def start(module: str = "cluster.jobs.supervisor") -> "subprocess.Popen[bytes]":
        argv = [sys.executable, "-c", LOCK_HOLDER, module, str(job.path)]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE)
        processes.append(process)
        assert process.stdout and process.stdout.readline() == b"held\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_command_without_credentials_starts_no_supervisor_and_says_so(job: Any, without_credentials: None) -> None:
    assert f"no supervisor is running; {NOTHING_IS_RENTED}" in job.status().warning
    job.refresh()
    assert job.sessions == [] and not (job.path / START_MARKER).exists()
    warning = job.status().warning
    assert "no supervisor is running: the toy cloud: no credentials" in warning
    assert f"; {NOTHING_IS_RENTED}" in warning and "imgnet-cluster status job-1" in warning
    for command in (job.stop, job.wait):
        with pytest.raises(ClusterError, match="job-1: no supervisor is running: the toy cloud: no credentials"):
            command()
    assert not (job.run_folder.shared / "stop").exists()


def test_supervisor_without_access_ends_and_keeps_the_reason(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    job.is_supervisor = True
    error = NoCredentials("job-1 runs in account 1, but these credentials are for account 2")
    monkeypatch.setattr(ToyBackend, "poll", Mock(side_effect=error))
    assert supervise(job) == 1 and not job.has_ended
    assert f"for account 2; {NOTHING_IS_RENTED}" in job.status().warning


def test_job_that_another_computer_adopted_is_not_called_running(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    job.is_supervisor = True
    error = "job-1 was adopted by another computer (ann on desk), which supervises it since 14:02"
    monkeypatch.setattr(ToyBackend, "poll", Mock(side_effect=AdoptedElsewhere(error, since=1000.0)))
    assert supervise(job) == 1
    job.is_supervisor = False
    ask_cloud = Mock()
    monkeypatch.setattr(ToyCloud, "check_access", ask_cloud)
    job.refresh()
    assert not ask_cloud.called, "the answer cannot change"
    status = job.status()
    assert (status.state, status.doing, job.sessions) == ("adopted", "", [])
    assert status.warning.startswith(f"{error}; all shown here is from before then") and "type:" not in status.warning
    for command in (job.stop, job.plan_resume):
        with pytest.raises(ClusterError, match=f"^{re.escape(error)}$"):
            command()
    assert follow(job) == EXIT_UNFINISHED
    report = billing.cost_report(job)
    assert report.warning.startswith(error) and report.to_json()["warning"] == report.warning


def test_job_is_ending_until_its_machines_are_known_to_be_gone(
    job: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rented = RentedNow(machines=2, requested=1, power_off_time=time.time() + 3600)
    parts = ("2 machines still run and are billed", "1 machine that was requested may run")
    assert all(part in str(rented) for part in parts)
    monkeypatch.setattr(ToyBackend, "rented_now", lambda _: rented)
    monkeypatch.setattr(ToyCloud, "terminate_job", Mock(side_effect=NoCredentials(REFUSED.error)))
    job.run_folder.journal_path.write_text("rent 0\n")
    with pytest.raises(ClusterError, match=f"^{REFUSED.error}; job-1 is ending: {rented}; .*cluster down job-1$"):
        billing.terminate_job(job)
    for state in ("training", "stopped"):  # the machines obey the request, also while the cloud refuses this computer
        for name in ("0", "1"):
            job.write_status(state, name, ended=state == "stopped")
        supervisor_records.write_trouble(job.path, REFUSED)
        status = job.status()
        assert status.state == "ending" and status.doing.startswith(f"{rented}; ")
        assert REFUSED.error in status.warning and "imgnet-cluster down job-1" in status.warning
        assert "replaced" not in status.warning
    show_jobs({"job-1": status})
    show_cost(billing.cost_report(job))
    assert capsys.readouterr().out.count(f"{rented}; to end them now: imgnet-cluster down job-1") == 2


def test_command_that_finds_the_adoption_writes_it_down(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The computer slept: its supervisor is gone, and lacked access before."""
    supervisor_records.write_trouble(job.path, REFUSED)
    monkeypatch.setattr(ToyCloud, "check_access", Mock(side_effect=AdoptedElsewhere("adopted", since=1000.0)))
    job.refresh()
    assert job.status().state == "adopted" and job.supervision.adoption.adopted_since == 1000.0


def test_supervisor_that_loses_access_or_cannot_replace_goes_on_and_says_so(
    job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.is_supervisor = True
    rounds: list[str] = []

    def poll(_: Any) -> bool:
        rounds.append(job.status().warning)
        if len(rounds) == 5:
            job.run_folder.result_path.write_text("{}")
        return True

    errors = iter(["", "refused", "refused", "", ""])
    monkeypatch.setattr(ToyBackend, "poll", poll)
    monkeypatch.setattr(ToyBackend, "dead_machines", lambda _: [])
    monkeypatch.setattr(ToyBackend, "is_supervised", lambda _: True)
    monkeypatch.setattr(ToyBackend, "access_error", lambda _: next(errors))
    replacement_errors = iter(["", "not replaced", ""])
    monkeypatch.setattr(ToyBackend, "replacement_error", lambda _: next(replacement_errors))
    monkeypatch.setattr("cluster.jobs.supervisor.SUPERVISOR_POLL_SECONDS", 0.0)
    assert supervise(job) == 0
    assert [warning.partition(";")[0] for warning in rounds] == ["", "", "refused", "refused", "not replaced"]


@pytest.mark.parametrize(("module", "has_credentials"), [
    ("cluster.jobs.supervisor", True),
    ("cluster.jobs.supervisor", False),
    ("another.program", True),  # on a shared disk the ID in the lock may be that of a process of another computer
])  # fmt: skip
def test_supervisor_that_is_refused_is_replaced_by_a_command_with_fresh_credentials(
    job: Any, start_holder: Any, request: pytest.FixtureRequest, module: str, has_credentials: bool
) -> None:
    holder = start_holder(module)
    job.refresh()
    assert job.sessions == [] and holder.poll() is None, "its supervisor has access"
    if not has_credentials:
        request.getfixturevalue("without_credentials")
    supervisor_records.write_trouble(job.path, REFUSED)
    assert job.status().warning.startswith(REFUSED.error)
    job.refresh()
    if has_credentials and module == "cluster.jobs.supervisor":
        assert holder.wait(120) == -signal.SIGTERM and job.sessions == ["supervisor"]
        job.refresh()
        assert job.sessions == ["supervisor"] and job.status().warning == ""
    else:
        assert holder.poll() is None and job.sessions == [] and job.status().warning.startswith(REFUSED.error)


@pytest.mark.parametrize("backend", ["toy", "local"])
@pytest.mark.parametrize("silent_seconds", [20.0, 120.0, 600.0])
def test_supervisor_that_is_frozen_is_named_and_after_long_replaced(
    job: Any, start_holder: Any, monkeypatch: pytest.MonkeyPatch, silent_seconds: float, backend: str
) -> None:
    """It holds its lock, so nothing else shows that it does no work."""
    if backend == "local":
        monkeypatch.setattr(tmux, "is_owned_by", lambda *_: True)
        monkeypatch.setattr(tmux, "add_window", lambda name, window, argv: job.sessions.append(window))
        monkeypatch.setattr(LocalBackend, "agents_alive", lambda _: True)
        job.backend = LocalBackend(job.run)
    holder = start_holder()
    holder.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(os, "getpid", lambda: holder.pid)
    supervisor_records.write_heartbeat(job.path)
    now = time.monotonic() + silent_seconds
    monkeypatch.setattr(time, "monotonic", lambda: now)
    warning = job.status().warning
    assert (f"(process {holder.pid}) does not answer since" in warning) == (silent_seconds > 60) == (warning != "")
    job.refresh()
    if silent_seconds < 300:
        assert holder.poll() is None and job.sessions == []
    else:
        assert holder.wait(120) == -signal.SIGKILL and job.sessions == ["supervisor"]


def test_clock_of_home_that_is_set_while_a_supervisor_is_at_work_or_dead(
    job: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host, "steady_clock", host.SteadyClock())
    monkeypatch.setattr("cluster.jobs.supervisor.HEARTBEAT_SECONDS", 0.01)
    monkeypatch.setattr(ToyBackend, "is_supervised", lambda _: True)
    start = host.unix_time()

    def set_wall_clock(hours: float) -> None:
        moment = start + 3600 * hours
        monkeypatch.setattr(time, "time", lambda: moment)

    def wait_for_log(text: str) -> None:
        while text not in caplog.text:
            threading.Event().wait(0.01)

    with heartbeats(job.path):
        set_wall_clock(5)
        wait_for_log("the clock of this computer jumped by +")
        assert host.unix_time() < start + 3600
    assert job.status().warning == "" and Job(job.path).run.clock() < start + 3600
    monkeypatch.setattr(ToyBackend, "job_cost", lambda _: Mock(running=2, requested=0))
    monkeypatch.setattr(ToyCloud, "power_off_time", start + 3600)
    assert "2 machines still run and are billed" in str(ToyBackend(Job(job.path).run).rented_now())
    set_wall_clock(-2)
    monkeypatch.setattr(host, "steady_clock", host.SteadyClock())  # that of another process
    with heartbeats(job.path):
        assert start <= host.unix_time() < start + 3600
        wait_for_log("jumped by -25")
    assert caplog.text.count("jumped by") == 2
