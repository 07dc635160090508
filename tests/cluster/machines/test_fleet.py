"""The machines of a running job over the real sshd of the testbed: mirrored files, liveness, restarts of agents.

A shell script stands for Python on the machines.
"""

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.log_lines import log_lines
from support.lying_machine import lie_about, lying
from support.waiting import wait_for

from cluster.backends.ssh import SshBackend
from cluster.connectors.ssh import Unreachable
from cluster.connectors.untrusted import ArrivalFolder
from cluster.machines import fleet as module
from cluster.machines import mirror
from cluster.machines.provision import Provisioner
from cluster.machines.setup_progress import SetupProgress
from cluster.state.run_folder import Run
from cluster.state.status import infer_end_state, machine_rows, read_agent_status
from cluster.state.supervisor_records import SetupRecord

Job = Any  # a `FleetJob` of conftest.py


@pytest.fixture
def job(make_job: Callable[..., Job]) -> Job:
    job = make_job(2)
    job.new_fleet().set_up_machines()
    job.pull_until(lambda: all(job.status(name).get("state") == "training" for name in ("0", "1")))
    return job


@pytest.fixture
def lies(job: Job) -> Iterator[tuple[Path, Path]]:
    """The files whose contents the two machines send as their answer when they are asked for new files."""
    with lying(job.machines[0]) as lie_of_first, lying(job.machines[1]) as lie_of_second:
        yield lie_of_first, lie_of_second


def tell(lies: tuple[Path, Path], lie: bytes) -> None:
    for path in lies:
        path.write_bytes(lie)


def test_pull_files_continues_after_partial_write(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = job.fleet.folders.path / "logs" / "a.log"
    job.fleet.pull_files()
    (job.shared / "logs" / "a.log").write_text("one\ntwo\n")

    append = ArrivalFolder.append

    def write_part(folder: ArrivalFolder, path: str, offset: int, data: bytes) -> int:
        if path != "logs/a.log":  # the agents write, too
            return append(folder, path, offset, data)
        copy.write_bytes(data[:3])
        raise OSError(28, "No space left on device", path)

    with monkeypatch.context() as patch:
        patch.setattr(ArrivalFolder, "append", write_part)
        with pytest.raises(OSError, match="No space"):
            job.fleet.pull_files()
    job.fleet.pull_files()
    assert copy.read_text() == "one\ntwo\n"


def test_pull_files_returns_while_there_is_a_backlog_and_continues(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "QUESTION_BYTES", 1000)
    monkeypatch.setattr(mirror, "PULL_SECONDS", 0.0)
    content, copy = os.urandom(20_000), job.fleet.folders.path / "logs" / "gathered.log"
    (job.shared / "logs" / "gathered.log").write_bytes(content)
    assert not job.fleet.pull_last_files(), "more is on the machines"
    job.pull_until(lambda: copy.exists() and copy.read_bytes() == content)


def test_pull_files_asks_next_machine_if_one_is_silent(job: Job) -> None:
    copy = job.fleet.folders.path / "logs" / "a.log"
    first, second = job.machines
    first.unplug()
    (job.shared / "logs" / "a.log").write_text("one\n")
    job.fleet.pull_files()
    assert copy.read_text() == "one\n" and job.fleet.mirror.last_responder == "1"
    first.plug()
    second.freeze()
    (job.shared / "logs" / "a.log").write_text("one\ntwo\n")
    job.pull_until(lambda: copy.read_text() == "one\ntwo\n")
    assert job.fleet.mirror.machine_order() == ["0", "1"], "the frozen machine causes no further delay"


def test_pull_last_files_brings_why_an_agent_ended_before_its_first_status(make_job: Callable[..., Job]) -> None:
    job = make_job(1)
    job.stub.override("cluster.agent-0", "echo Traceback >&2; printf '\\033[2JImportError: libx.so\\n' >&2; exit 1\n")
    fleet = job.new_fleet()
    fleet.set_up_machines()
    wait_for(lambda: not fleet.agents_alive())
    assert fleet.pull_last_files()
    state, reason = infer_end_state(Run(fleet.spec, fleet.folders))
    assert state == "failed" and "ended before it wrote its first status: [2JImportError: libx.so; try again" in reason


def test_pull_files_leaves_out_what_is_no_status(job: Job) -> None:
    """The supervisor reads the statuses before each of its rounds; one that it cannot read would stop it for ever."""
    os.kill(job.status("1")["pid"], signal.SIGKILL)
    path = job.shared / "status" / "1.json"
    job.pull_until(lambda: job.status("1") == json.loads(path.read_text()))
    whole = job.status("1")
    for content in (json.dumps(whole)[:-9], "[1]", '{"id": "1.a", "phase": "none of ours"}'):
        path.write_text(content)
        job.fleet.pull_files()
        assert job.status("1") == whole
    notes = job.fleet.setup_progress.rows["1"].notes
    assert any("has a status/1.json that is no status" in note for note in notes)


@pytest.mark.parametrize("unplugged", ["1", "01"])
def test_dead_machines_excludes_unreachable_machines(job: Job, monkeypatch: pytest.MonkeyPatch, unplugged: str) -> None:
    monkeypatch.setattr(module, "STATUS_STALE_SECONDS", 0.2)
    monkeypatch.setattr(module, "LIVENESS_QUERY_SECONDS", 0.1)
    fleet = job.fleet
    for name in unplugged:
        job.machines[int(name)].unplug()
    os.kill(job.status("1")["pid"], signal.SIGKILL)  # dead, but nobody can know

    def pull_and_ask() -> bool:
        with contextlib.suppress(Unreachable):
            fleet.pull_files()
        assert fleet.agents_alive() and fleet.dead_machines() == []
        return set(unplugged) <= fleet.unreachable_since.keys()

    for _ in range(2):
        fleet.unreachable_since.clear()
        wait_for(pull_and_ask)
    for name in unplugged:
        job.machines[int(name)].plug()
    wait_for(lambda: fleet.dead_machines() == ["1"])
    assert fleet.agents_alive(), "the other agent still runs"


def test_machine_that_trains_on_out_of_reach_has_a_note(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REACH_QUERY_SECONDS", 0.1)

    def notes() -> list[bool]:
        assert job.fleet.agents_alive() and job.fleet.dead_machines() == []
        rows = machine_rows(Run(job.fleet.spec, job.fleet.folders)).values()
        return [any("not reachable from here since " in note for note in row.notes) for row in rows]

    job.machines[1].unplug()
    job.pull_until(lambda: notes() == [False, True])
    job.machines[1].plug()
    job.pull_until(lambda: notes() == [False, False])


def test_supervisor_follows_the_launch_of_another_computer(job: Job) -> None:
    fleet, launch = job.fleet, "ab" * 16
    backend = SshBackend(Run(fleet.spec, fleet.folders))
    vars(backend)["fleet"] = fleet
    assert backend.poll() and backend.leader() == "" and fleet.folders.launch_id == "first"
    (job.shared / "leader").write_text("desk:/runs/job-7\n\033[2J")
    (job.shared / "launch").write_text(launch)
    assert backend.leader() == "desk:/runs/job-7 [2J"
    os.kill(job.status("1")["pid"], signal.SIGKILL)
    (job.shared / "status" / "1.json").write_text(json.dumps(job.status("1") | {"launch": launch}))
    wait_for(lambda: backend.poll() and fleet.folders.launch_id == launch)
    backend.poll()
    assert fleet.setup_progress.record.leader.startswith("desk:/runs/job-7 [2J leads the job since ")
    assert read_agent_status(fleet.folders, "1") and job.stub.calls("cluster.agent") == ["0", "1"], "none is started"


def test_time_since_a_stop_does_not_follow_the_wall_clock(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = job.fleet.folders.shared / "stop"
    stop.write_text("{}")
    os.utime(stop, (time.time() - 3600,) * 2)  # the clock was set forward since
    assert not job.fleet.is_over()
    os.utime(stop, (time.time() + 3600,) * 2)
    monkeypatch.setattr(module, "STOP_GRACE_SECONDS", 0.0)
    assert job.fleet.is_over()


@pytest.mark.parametrize("is_adopted_elsewhere", [False, True])
def test_killed_agent_is_replaced_by_one(job: Job, is_adopted_elsewhere: bool) -> None:
    fleets = [job.fleet]
    if is_adopted_elsewhere:
        fleets.append(job.new_fleet("job-2", is_adopted=True))
        fleets[1].set_up_machines()
        assert job.stub.calls("cluster.agent") == ["0", "1"], "an adopted job's running agents are not started again"
        assert fleets[1].setup_progress.record.is_ready and fleets[1].setup_progress.failure_reasons == {}
    before = job.status("1")["pid"]
    job.fleet.kill_machine("1", None)
    wait_for(lambda: all(fleet.dead_machines() == ["1"] for fleet in fleets))
    for fleet in fleets:
        for _ in range(3):
            fleet.restart_agent("1")
            assert fleet.dead_machines() == [], "a machine that is being restarted is not dead"
    job.pull_until(lambda: job.status("1")["pid"] != before and job.status("1")["state"] == "training")
    wait_for(lambda: not any(fleet.dead_machines() or fleet.restarting for fleet in fleets))
    wait_for(lambda: job.agents("1") == [job.status("1")["pid"]])
    calls = job.stub.calls("cluster.agent")
    assert calls.count("0") == 1 and (is_adopted_elsewhere or calls.count("1") == 2)
    assert [bool(job.fleet.setup_progress.rows[name].restarted) for name in "01"] == [False, True]


def test_adopted_job_leaves_no_record_by_which_it_would_be_launched_anew(
    make_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each record may be the last before the supervisor is killed: the next one goes on from there."""
    job = make_job(1)
    records: list[SetupRecord] = []
    fleet = job.new_fleet(is_adopted=True)
    write = SetupProgress._write

    def note_and_write(progress: SetupProgress) -> None:
        records.append(progress.record)
        write(progress)

    monkeypatch.setattr(SetupProgress, "_write", note_and_write)
    job.machines[0].unplug()
    fleet.set_up_machines()
    assert any(record.machines["0"].reason for record in records), "its machine does not answer"
    assert not any(record.is_adopted == record.is_ready for record in records)


def test_kill_machine_with_notice_writes_notice_file(job: Job) -> None:
    job.fleet.kill_machine("1", 30)
    notice = job.machines[1].home / ".imgnet" / "jobs" / f"{job.uid}-1" / "notice"
    assert json.loads(notice.read_text())["seconds"] == 30


def test_terminate_returns_silent_machines(job: Job) -> None:
    job.machines[1].unplug()
    assert job.fleet.terminate() == ["1"]
    wait_for(lambda: not job.agents("0"))
    assert job.status("1")["pid"] in job.agents("1")


def contents(folder: Path) -> dict[Path, bytes]:
    """The files in a folder, without locks and the record of the set-up."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in (".home.lock", "machines.json")]
    return {path: path.read_bytes() for path in files}


def test_pull_files_drops_answers_with_foreign_paths(job: Job, lies: tuple[Path, Path], tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    fleet, before = job.fleet, contents(job.fleet.folders.path)
    with log_lines("cluster.machines.fleet") as lines:
        for path in (f"logs/{'../' * 20}{victim}/bashrc", f"{victim}/absolute.json", "status/7.json", "logs/a\0b"):
            tell(lies, lie_about(path))
            fleet.pull_files()
            assert fleet.agents_alive() and contents(fleet.folders.path) == before and not list(victim.iterdir()), path
    messages = [line for line in lines if "its answer was dropped" in line]
    assert sorted(message.partition(" (")[0] for message in messages) == ["machine 0", "machine 1"], "once for each"
    assert all("\n" not in message and "names the file" in message for message in messages)
    assert fleet.explain_end() == "", "statuses came before the lies"
    fleet.mirror.last_status.clear()
    assert fleet.explain_end() == "; ".join(messages)
    for name in ("0", "1"):
        assert any("its answer was dropped" in note for note in fleet.setup_progress.rows[name].notes)


def test_pull_files_goes_on_beside_a_lie_that_needs_the_place_of_a_file(job: Job, lies: tuple[Path, Path]) -> None:
    logs = job.fleet.folders.path / "logs"
    logs.joinpath("a").write_text("one\n")
    tell(lies, b"MARK\nlogs/a/x\n1" + lie_about("logs/b", b"1"))
    job.fleet.pull_files()
    assert (logs / "b").read_text() == "1" and (logs / "a").read_text() == "one\n"
    assert any("logs/a/x" in line for line in job.fleet.bad_answers.values())


def test_endless_drip_holds_up_neither_other_machines_nor_a_stop(
    job: Job, lies: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "MAX_ANSWER_SECONDS", 1.0)
    fleet = job.fleet
    copy = fleet.folders.path / "logs" / "a.log"
    lies[0].write_bytes(b"drip")
    lies[1].write_bytes(lie_about("logs/a.log", b"one\n"))
    fleet.mirror.last_responder = "0"
    pull = threading.Thread(target=fleet.pull_files, daemon=True)
    pull.start()
    pull.join(120)
    assert not pull.is_alive() and copy.read_text() == "one\n" and fleet.mirror.last_responder == "1"
    lies[1].write_bytes(b"drip")
    for _ in range(3):
        fleet.pull_files()
    (fleet.folders.shared / "stop").write_text("{}")
    while not (job.shared / "stop").exists():
        fleet.push_stop_request()
    wait_for(lambda: not fleet.agents_alive())
    assert not fleet.pull_last_files(), "the answers are not complete"
    fleet.last_pull_start = time.monotonic() - module.STOPPED_PATIENCE_SECONDS
    assert fleet.pull_last_files(), "the user of a stopped job does not wait for all of it"


def test_machine_joins_if_it_fits_also_when_the_supervisor_was_killed(make_job: Callable[..., Job]) -> None:
    job = make_job(3, machines=2, spares=1, joining=("2",), gpus=3)
    fleet = job.new_fleet()
    fleet.set_up_machines()
    job.pull_until(lambda: job.status("1"))
    assert fleet.mirror.machine_order() == ["0", "1"] and not job.agents("2") and fleet.dead_machines() == []
    folders, spec, edited = fleet.folders, Run.read(fleet.folders.path).spec, fleet.folders.user_project / "x.py"

    def join(fleet: module.Fleet = fleet, launch: str = "first", **facts: Any) -> str:
        """Let the third machine join, with changed facts; return why it cannot."""

        def find(*arguments: Any) -> Any:
            machine = Provisioner.prepare(fleet.provisioner, *arguments)
            (job.shared / "launch").write_text(launch)
            return machine and replace(machine, facts=replace(machine.facts, **facts))

        fleet.provisioner.prepare = find  # type: ignore[assignment, method-assign]
        folders.join_marker("2").touch()
        fleet.join_machines()
        wait_for(lambda: not folders.join_marker("2").exists() and fleet.agents_alive() and not fleet.restarting)
        return fleet.setup_progress.rows["2"].reason

    assert join(gpus=("H100",)) == "has GPUs, and the other machines train on CPUs"
    assert f"does not see {job.shared}, as the others do" in join(launch="another")
    edited.parent.mkdir()
    edited.touch()
    assert "imgnet-cluster has changed here since the start of the job" in join()
    edited.unlink()
    fleet.setup_progress.update("0", gpus=("H100",))
    assert "no GPU: nvidia-smi is missing" in join()
    fleet.setup_progress.update("0", gpus=())
    assert Run.read(folders.path).spec == spec and not job.agents("2")

    assert join() == ""
    joined = Run.read(folders.path).spec
    assert (joined.machines, joined.joining) == (3, ()) and len(fleet.mirror.machine_order()) == 3
    assert json.loads((job.shared / "job.json").read_text())["machines"] == 3
    job.pull_until(lambda: job.status("2").get("state") == "training")
    job.fleets.append(module.Fleet(joined, folders))  # of a supervisor that finds the request of the one before
    assert join(job.fleets[1]) == "" and Run.read(folders.path).spec == joined
    wait_for(lambda: job.agents("2") == [job.status("2")["pid"]])
    folders.request_stop()
    assert join() == "stopped by the user"
