"""The machines of a running job over the real sshd of the testbed: files home, each byte once; who is alive and who is
dead; who is replaced, and how often. A shell script stands for Python on the machines.
"""

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.ssh_machines import Testbed, command_line

from benchmarks.launch_stub import StubDelays
from cluster.connectors.hosts_file import read_hosts
from cluster.connectors.ssh import Unreachable
from cluster.machines import fleet as module
from cluster.machines.fleet import Fleet

QUICK = StubDelays(environment=0, probe=0, network=0, start=0, beat=0.2)


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Testbed]:
    with Testbed(tmp_path_factory.mktemp("testbed") / "bed", 2) as one:
        yield one


class Running:
    """A job at work on all machines of the testbed, without a supervisor: the test is that."""

    def __init__(self, hand_made: Callable[..., Any], bed: Testbed, path: Path) -> None:
        self.bed, self.hand_made = bed, hand_made
        self.stub = replace(QUICK, count=len(bed.machines)).write_script(path / "python")
        self.hosts = read_hosts(bed.write_hosts_toml(path / "hosts.toml", python=str(self.stub))).to_json()
        self.uid = f"job-1-{time.monotonic_ns()}"
        self.fleets: list[Fleet] = []
        self.fleet = self.watch("job-1")
        self.fleet.set_up_machines()
        self.shared = bed.shared / self.uid

    def watch(self, name: str, **board: Any) -> Fleet:
        """Look after the job from a run folder; `board` is what is known of it there."""
        values = {"machines": len(self.bed.machines), "backend": "ssh", "hosts": self.hosts, "uid": self.uid}
        made = self.hand_made(name, **values)
        made.folders.launch_path.write_text("first")
        if board:
            (made.folders.path / "machines.json").write_text(json.dumps({"launch": "first", "machines": {}, **board}))
        self.fleets.append(Fleet(made.spec, made.folders, reconnect_seconds=2))
        return self.fleets[-1]

    def agents(self, machine: str) -> list[int]:
        """The agents of a machine, at work or about to find that another is; for a moment also their children."""
        found = self.bed.machines[int(machine)].processes("cluster.agent", self.uid)
        return [pid for pid in found if command_line(pid).startswith(f"/bin/sh {self.stub} ")]

    def calls(self, machine: str) -> int:
        """How often an agent was started on a machine."""
        return self.stub.with_name("python.log").read_text().count(f"cluster.agent {machine}\n")

    def said(self, machine: str) -> dict[str, Any]:
        """What a machine said last, as it is known at home."""
        path = self.fleet.folders.status_path(machine)
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return found

    def bring_until(self, condition: Callable[[], Any], seconds: float = 30, fleet: Fleet | None = None) -> None:
        """Bring files home until this is true."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "not in time"
            (fleet or self.fleet).pull_files()
            time.sleep(0.02)

    def close(self) -> None:
        for one in self.bed.machines:
            one.thaw()
            one.plug()
        (self.shared / "stop").touch()
        for fleet in self.fleets:
            fleet.terminate()
            fleet.close()
        for one in self.bed.machines:
            if one.left():
                one.power_off()
                one.boot()


@pytest.fixture
def running(hand_made: Callable[..., Any], bed: Testbed, tmp_path: Path, place: Any) -> Iterator[Running]:
    for one in bed.machines:
        shutil.rmtree(one.home / ".imgnet", ignore_errors=True)
    one = Running(hand_made, bed, tmp_path)
    try:
        one.bring_until(lambda: all(one.said(name).get("state") == "training" for name in ("0", "1")))
        yield one
    finally:
        one.close()


def until(condition: Callable[[], Any], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.02)


# --- home ----------------------------------------------------------------------------------------------------------


def test_each_byte_comes_home_once_over_cut_connections(running: Running) -> None:
    there, home = running.shared / "logs" / "long.log", running.fleet.folders.path / "logs" / "long.log"
    over = threading.Event()

    def write() -> None:
        with there.open("w") as file:
            for number in range(4000):
                file.write(f"line {number}\n")
                if number % 100 == 0:
                    file.flush()
                    over.wait(0.02)
        over.set()

    def cut() -> None:
        while not over.wait(0.15):
            for one in running.bed.machines:
                one.cut()

    threads = [threading.Thread(target=one) for one in (write, cut)]
    for one in threads:
        one.start()
    running.bring_until(lambda: over.is_set() and home.exists() and home.stat().st_size == there.stat().st_size)
    for one in threads:
        one.join()
    assert home.read_bytes() == there.read_bytes()


def test_another_run_of_the_supervisor_goes_on_where_the_files_at_home_end(running: Running) -> None:
    there, home = running.shared / "logs" / "a.log", running.fleet.folders.path / "logs" / "a.log"
    there.write_text("one\n")
    running.fleet.pull_files()
    there.write_text("one\ntwo\n")
    again = Fleet(running.fleet.spec, running.fleet.folders, reconnect_seconds=2)
    running.fleets.append(again)
    again.pull_files()
    assert home.read_text() == "one\ntwo\n"


def test_what_a_full_disk_took_a_part_of_is_brought_from_there_on(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = running.fleet.folders.path / "logs" / "a.log"
    running.fleet.pull_files()
    (running.shared / "logs" / "a.log").write_text("one\ntwo\n")

    def half(path: Path, data: bytes) -> int:
        home.write_bytes(data[:3])
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(module, "_append_bytes", half)
        with pytest.raises(OSError, match="No space"):
            running.fleet.pull_files()
    running.fleet.pull_files()
    assert home.read_text() == "one\ntwo\n"


def test_the_other_machine_is_asked_when_one_is_unplugged_or_frozen(running: Running) -> None:
    home = running.fleet.folders.path / "logs" / "a.log"
    first, second = running.bed.machines
    first.unplug()
    (running.shared / "logs" / "a.log").write_text("one\n")
    running.fleet.pull_files()
    assert home.read_text() == "one\n" and running.fleet.last_responder == "1"
    first.plug()
    second.freeze()
    (running.shared / "logs" / "a.log").write_text("one\ntwo\n")
    running.bring_until(lambda: home.read_text() == "one\ntwo\n")
    asked: list[str] = []
    running.fleet._query_any(asked.append)
    assert asked == ["0"], "who answered last is asked first: the frozen one delays nobody"


def test_a_line_is_home_with_the_next_look(running: Running) -> None:
    for number in range(5):
        with (running.shared / "logs" / "a.log").open("a") as file:
            file.write(f"{number}\n")
        running.fleet.pull_files()
        assert (running.fleet.folders.path / "logs" / "a.log").read_text().endswith(f"{number}\n")


def test_a_status_that_is_torn_does_not_replace_a_whole_one(running: Running) -> None:
    os.kill(running.said("1")["pid"], signal.SIGKILL)
    path = running.shared / "status" / "1.json"
    running.bring_until(lambda: running.said("1") == json.loads(path.read_text()))
    whole = running.said("1")
    path.write_text(json.dumps(whole)[:-9])
    running.fleet.pull_files()
    assert running.said("1") == whole


def test_a_request_to_stop_goes_to_the_machines_and_the_end_comes_home(running: Running) -> None:
    (running.fleet.folders.shared / "stop").write_text("{}")
    running.fleet.push_stop_request()
    running.bring_until(lambda: all(running.said(name).get("ended") for name in ("0", "1")))
    until(lambda: not running.fleet.agents_alive())
    assert running.fleet.dead_machines() == ["0", "1"]


# --- who is alive --------------------------------------------------------------------------------------------------


def test_one_that_cannot_be_reached_is_not_dead(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STATUS_STALE_SECONDS", 0.5)
    monkeypatch.setattr(module, "LIVENESS_QUERY_SECONDS", 0.1)
    fleet, machine = running.fleet, running.bed.machines[1]
    machine.unplug()
    asked: list[Any] = []

    def has_agent(name: str) -> bool:
        try:
            return Fleet._has_agent(fleet, name)
        except Unreachable as error:
            asked.append(error)
            raise

    monkeypatch.setattr(fleet, "_has_agent", has_agent)
    os.kill(running.said("1")["pid"], signal.SIGKILL)  # it is dead, but who knows
    while len(asked) < 2:
        fleet.pull_files()
        assert fleet.agents_alive() and fleet.dead_machines() == []
    machine.plug()
    until(lambda: fleet.dead_machines() == ["1"])
    assert fleet.agents_alive(), "the other one is at work"


def test_nobody_is_dead_when_nobody_can_be_reached(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STATUS_STALE_SECONDS", 0.2)
    monkeypatch.setattr(module, "LIVENESS_QUERY_SECONDS", 0.1)
    for one in running.bed.machines:
        one.unplug()
    with pytest.raises(Unreachable):
        running.fleet.pull_files()
    for _ in range(20):
        assert running.fleet.agents_alive() and running.fleet.dead_machines() == []
        time.sleep(0.02)


def test_an_agent_that_was_killed_is_dead_and_replaced_once(running: Running) -> None:
    fleet, before = running.fleet, running.said("1")["pid"]
    fleet.kill_machine("1", None)
    until(lambda: fleet.dead_machines() == ["1"])
    for _ in range(3):
        fleet.restart_agent("1")
        assert fleet.dead_machines() == [], "one that is being started is not dead"
    running.bring_until(lambda: running.said("1")["pid"] != before and running.said("1")["state"] == "training")
    until(lambda: fleet.dead_machines() == [] and not fleet.restarting)
    assert running.calls("1") == 2 and running.calls("0") == 1
    until(lambda: running.agents("1") == [running.said("1")["pid"]])


def test_two_supervisors_replace_one_machine_once(running: Running) -> None:
    first, second = running.fleet, running.watch("job-2", adopted=True)
    second.set_up_machines()
    assert (running.calls("0"), running.calls("1")) == (1, 1), "who takes over starts nobody who is at work"
    assert second.setup_progress.data["ready"] and second.setup_progress.failure_reasons == {}
    before = running.said("1")["pid"]
    first.kill_machine("1", None)
    until(lambda: first.dead_machines() == ["1"] and second.dead_machines() == ["1"])
    first.restart_agent("1")
    second.restart_agent("1")
    running.bring_until(lambda: running.said("1")["pid"] != before and running.said("1")["state"] == "training")
    until(lambda: first.dead_machines() == [] == second.dead_machines() and not (first.restarting or second.restarting))
    until(lambda: running.agents("1") == [running.said("1")["pid"]])
    assert running.calls("0") == 1


def test_a_machine_that_was_lost_with_notice_is_told(running: Running) -> None:
    running.fleet.kill_machine("1", 30)
    notice = running.bed.machines[1].home / ".imgnet" / "jobs" / running.uid / "notice"
    assert json.loads(notice.read_text())["seconds"] == 30


def test_terminate_names_the_machine_that_does_not_answer(running: Running) -> None:
    running.bed.machines[1].unplug()
    assert running.fleet.terminate() == ["1"]
    until(lambda: not running.agents("0"))
    assert running.said("1")["pid"] in running.agents("1")


def test_files_are_brought_when_no_machine_has_been_set_up_by_us(hand_made: Callable[..., Any]) -> None:
    made = hand_made("job-1", hosts={"shared": "/nowhere", "machines": [{"host": "127.1.0.9", "port": 1}]}, uid="x")
    fleet = Fleet(made.spec, made.folders, reconnect_seconds=0.1)
    fleet.setup_progress.rows["0"] = SimpleNamespace().__dict__
    with pytest.raises(Unreachable, match=r"machine 0 \(127.1.0.9\)"):
        fleet.pull_files()
    fleet.close()


@pytest.mark.parametrize("said, over", [
    ({"state": "stopped", "ended": True, "launch": "now"}, True),
    ({"state": "stopped", "ended": True, "launch": "before"}, False),
    ({"state": "stopped", "launch": "now"}, False),
    ({"state": "failed", "ended": True, "launch": "now", "reason": "stopped"}, False),
])  # fmt: skip
def test_a_job_of_which_a_machine_stopped_at_its_limit_waits_for_none_that_is_silent(said: Any, over: bool) -> None:
    long_ago = time.monotonic() - 60
    some = SimpleNamespace(
        folders=SimpleNamespace(launch_id="now"), last_status={"status/0.json": (json.dumps(said).encode(), long_ago)}
    )
    assert Fleet._has_stopped_by_itself(some) is over  # type: ignore[arg-type]
    some.last_status["status/0.json"] = (json.dumps(said).encode(), time.monotonic())
    assert Fleet._has_stopped_by_itself(some) is False  # type: ignore[arg-type]
