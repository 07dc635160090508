"""The controller of rented jobs with a cloud of which it knows nothing but the interface: rounds, losses, limits."""

import contextlib
import json
import logging
import os
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
from support.log_lines import log_lines
from support.toy_cloud import ToyBackend, ToyCloud

from cluster.backends.aws.renting import final_network
from cluster.backends.aws.renting.end_watch import END_SECONDS
from cluster.backends.aws.renting.traffic import read_traffic
from cluster.connectors.ssh import Unreachable
from cluster.errors import ClusterError, SetupFailed
from cluster.machines import trained_files
from cluster.state.heartbeats import MachineStatus
from cluster.state.run_folder import stop_reason
from cluster.state.status import read_setup_record
from cluster.state.supervisor_records import read_activity
from infra.costs import Traffic
from infra.errors import AdoptedElsewhere, CloudError, NoAnswer, NoCredentials
from train.tools.records import DamagedRecord, encode
from train.tools.text_files import to_json_bytes

RISK = "EC2 may interrupt it soon"


def write_shared(backend: ToyBackend, path: str, **content: Any) -> None:
    file = backend.run.folder.shared / path
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(content))


def write_status(backend: ToyBackend, name: str, state: str, **more: Any) -> None:
    write_shared(backend, f"status/{name}.json", id=f"{name}.a", state=state, launch="a launch ID", **more)


def test_kill_machine_and_a_refused_replacement(backend: ToyBackend, poll_cloud: Any) -> None:
    ToyCloud.free_machines = 0
    backend.kill_machine("0", None)
    assert ToyCloud.released == [("toy-1", "lost in a rehearsal")]
    poll_cloud(backend)
    backend.replace("0")
    assert backend.dead_machines() == ["0"]
    assert backend.controller.last_refusal == "the toy cloud has no machine left"
    assert backend.replacement_error() == "machine 0 could not be replaced: the toy cloud has no machine left"
    ToyCloud.free_machines = 1
    backend.replace("0")
    assert backend.dead_machines() == [] and backend.replacement_error() == ""


@pytest.mark.parametrize("end", ["result.json", "stop", ""])
def test_unreachable_machines_are_waited_for_unless_the_job_is_over(
    backend: ToyBackend, poll_cloud: Any, end: str
) -> None:
    def raise_unreachable() -> None:
        raise Unreachable("machine 0 (10.0.0.1): does not answer")

    fleet: Any = backend.controller.fleet
    fleet.pull_files = raise_unreachable
    if end:
        write_shared(backend, end)
    poll_cloud(backend)  # the machines exist: they may answer again
    if end:
        ToyCloud.rented.clear()
        backend.controller.last_poll_time = -1e9
        assert [backend.poll() for _ in range(3)][-1] is False


def test_machines_that_hang_past_their_power_off_are_not_waited_for(
    backend: ToyBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing on them works, not even their own power-off. Only a termination ends the bill."""
    fleet: Any = backend.controller.fleet
    fleet.pull_files = Mock(side_effect=Unreachable("machine 0 (10.0.0.1): does not answer"))
    assert backend.poll() and backend.poll()
    monkeypatch.setattr(ToyCloud, "is_overdue", True)
    assert not backend.poll() and len(ToyCloud.rented) == 2


@pytest.mark.parametrize("is_stopped", [False, True])
def test_supervisor_that_slept_past_the_limit_ends_nothing_that_another_computer_has_adopted(
    backend: ToyBackend, monkeypatch: pytest.MonkeyPatch, is_stopped: bool
) -> None:
    """The limit that it knows may have been extended since."""
    fleet: Any = backend.controller.fleet
    fleet.pull_files = Mock(side_effect=Unreachable("machine 0 (10.0.0.1): does not answer"))
    if is_stopped:
        write_shared(backend, "stop")
    ask = Mock(side_effect=NoAnswer("AWS cannot be reached"))
    monkeypatch.setattr(ToyCloud, "is_overdue", True)
    monkeypatch.setattr(ToyCloud, "require_ownership", ask)
    if not is_stopped:
        assert backend.poll() and not backend.controller.get_stop_reason()
    ask.side_effect = AdoptedElsewhere("job-1 was adopted by another computer", 0.0)
    with pytest.raises(AdoptedElsewhere):
        backend.poll() or backend.terminate()
    assert len(ToyCloud.rented) == 2 and bool(backend.controller.get_stop_reason()) is is_stopped
    del backend.controller  # a command of the user has none
    backend.terminate()
    assert not ToyCloud.rented


@pytest.mark.parametrize("answer", ["none", "refused", "overdue", "in time"])
def test_job_that_is_over_is_given_up_when_its_machines_do_not_obey(
    backend: ToyBackend, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    """Machines that still answer save or copy their last files, until they are overdue."""
    fleet: Any = backend.controller.fleet
    errors = {"none": Unreachable("machine 0: does not answer"), "refused": ClusterError("machine 0: refuses the key")}
    if error := errors.get(answer):
        fleet.pull_files = Mock(side_effect=error)
    monkeypatch.setattr(ToyCloud, "is_overdue", answer == "overdue")
    watch = backend.controller.end_watch
    if answer != "overdue":  # which is a stop request too
        watch.last_good_time = -1e9
        with contextlib.suppress(ClusterError):
            assert backend.poll(), "nothing has ended it yet"
    write_shared(backend, "stop")
    for _ in range(2):
        with contextlib.suppress(ClusterError):
            assert backend.poll(), "its machines may yet obey"
        watch.last_good_time -= 0.6 * END_SECONDS
    assert backend.poll() == (answer == "in time")


def test_finished_job_waits_for_an_open_rental_only(backend: ToyBackend) -> None:
    """Nobody asks for lost machines of a finished job any more, so nobody collects the finished rental."""
    controller: Any = backend.controller
    controller.fleet.is_training = False
    controller.rental_futures["1"] = rental = Future[Any]()
    assert backend.poll() and controller.get_stop_reason() == ""
    write_shared(backend, "result.json")
    assert controller.get_stop_reason() == "the job is over"  # which also interrupts the renting thread
    assert backend.poll()  # that thread may be in a request to the cloud
    rental.set_result(None)
    assert not backend.poll() and controller.rental_futures


@pytest.fixture
def finished(backend: ToyBackend) -> ToyBackend:
    """A job that has its result. Machine 0 has no public address."""
    fleet: Any = backend.controller.fleet
    fleet.is_training = False
    backend.controller.live_machines["0"] = replace(ToyCloud.rented["toy-1"], public_ip="")
    backend.controller.poll_future = None
    write_shared(backend, "result.json")
    return backend


def test_final_network_is_downloaded_through_the_jump_host(finished: ToyBackend) -> None:
    folder = finished.run.folder.path
    (folder / "remote/network").mkdir(parents=True)
    (folder / "remote/network/classes.json").write_text("{}\n")
    assert not finished.poll() and (folder / "network/classes.json").read_text() == "{}\n"
    assert ToyCloud.released == [("toy-1", "the job has ended")]
    activity = read_activity(folder)
    assert activity and "downloading what was trained: 0 of 0 MB" in activity.doing


@pytest.mark.parametrize("reason", ["'1'", "not complete after 0 s"])
def test_final_network_that_cannot_be_had_keeps_no_machine(
    finished: ToyBackend, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    """A machine does not answer, or sends bit by bit; all are billed meanwhile."""
    never = threading.Event()
    if reason == "'1'":
        fleet: Any = finished.controller.fleet
        del fleet.connectors["1"]
    else:
        monkeypatch.setattr(final_network, "DOWNLOAD_TIMEOUT_SECONDS", 0.1)
        monkeypatch.setattr(trained_files, "download_network", lambda *_: never.wait(60))
    with log_lines("cluster.backends") as lines:
        assert not finished.poll()
    never.set()
    assert ToyCloud.released == [("toy-1", "the job has ended")]
    assert lines == [f"what was trained stays in the machines' shared folder: {reason}"]


@pytest.mark.parametrize("name", ["machines.json", "hosts.json"])
def test_fifo_in_place_of_a_file_of_the_set_up_does_not_hang(backend: ToyBackend, name: str) -> None:
    path = backend.run.folder.path / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises(DamagedRecord, match=f"{name}: is not a regular file"):
        if name == "hosts.json":
            backend.open_fleet()
        else:
            read_setup_record(backend.run.folder)


@pytest.mark.parametrize(("is_price_limit_reached", "is_overdue", "reason"), [
    (False, False, ""),
    (False, True, "its time limit passed, and not all of its machines have ended"),  # a kernel that hangs
    # What traffic costs beyond what was expected uses up the dollars at once: the job is overdue too.
    (True, True, "the limit of $40.00 (--max-price-total) was reached"),
])  # fmt: skip
def test_job_is_stopped_at_its_limits(
    backend: ToyBackend, monkeypatch: pytest.MonkeyPatch, is_price_limit_reached: bool, is_overdue: bool, reason: str
) -> None:
    monkeypatch.setattr(ToyCloud, "max_dollars", 40.0)
    monkeypatch.setattr(ToyCloud, "is_price_limit_reached", is_price_limit_reached)
    monkeypatch.setattr(ToyCloud, "is_overdue", is_overdue)
    assert backend.poll() and backend.controller.get_stop_reason() == reason


def test_price_limit_is_watched_while_machines_are_set_up(backend: ToyBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine may take hours to answer its set-up, and all of them are billed."""
    fleet: Any = backend.controller.fleet

    def set_up_machines() -> None:
        for _ in range(3):
            fleet.while_waiting()
            if reason := stop_reason(fleet.folder.shared):
                raise SetupFailed(reason)

    fleet.set_up_machines = set_up_machines
    monkeypatch.setattr(ToyCloud, "max_dollars", 5.0)
    checks = iter([False, True])  # the first by `poll` itself
    monkeypatch.setattr(ToyCloud, "is_price_limit_reached", property(lambda self: next(checks)))
    with pytest.raises(SetupFailed, match=r"^the limit of \$5.00 \(--max-price-total\) was reached"):
        backend.poll()


@pytest.mark.parametrize("error", [NoCredentials("no credentials"), NoAnswer("not permitted", "AccessDenied")])
def test_calls_that_the_cloud_denies_are_an_access_error_until_it_permits_them(
    make_backend: Any, poll_cloud: Any, monkeypatch: pytest.MonkeyPatch, error: CloudError
) -> None:
    def deny(*_: Any) -> Any:
        raise error

    backend = make_backend()
    assert backend.access_error() == "" and backend.poll()
    with monkeypatch.context() as context:
        context.setattr(ToyCloud, "list_machines", deny)
        poll_cloud(backend)
        assert backend.access_error().startswith(str(error))
        assert ("; the machines power off" in backend.access_error()) == isinstance(error, NoCredentials)
    poll_cloud(backend)
    assert backend.access_error() == ""
    backend.controller.fleet = None  # as in a supervisor that was just started
    monkeypatch.setattr(ToyCloud, "list_machines", deny)
    with pytest.raises(NoCredentials if isinstance(error, NoCredentials) else ClusterError, match=str(error)):
        backend.poll()


@pytest.mark.parametrize("is_silent", ["all", "1"])
def test_access_is_restored_when_a_machine_does_not_answer(
    backend: ToyBackend, monkeypatch: pytest.MonkeyPatch, is_silent: str
) -> None:
    """Once a minute: the other machines may answer over connections that are still open."""
    fleet: Any = backend.controller.fleet
    monkeypatch.setattr(ToyCloud, "restore_access", restore := Mock(return_value="the address is another now"))
    assert backend.poll() and not restore.called
    if is_silent == "all":
        fleet.pull_files = Mock(side_effect=Unreachable("machine 0 (10.0.0.1): does not answer"))
    else:
        fleet.unreachable_since[is_silent] = 1.0
    with log_lines("cluster.backends", logging.INFO) as lines:
        assert backend.poll() and backend.poll()
    assert restore.call_count == 1 and "the address is another now" in lines


def test_late_spares_are_rented_for_machines_at_risk_and_no_machine_is_given_back(
    make_backend: Any, poll_cloud: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ToyCloud, "first_names", ("0", "1"))
    monkeypatch.setattr(ToyCloud, "rents_spares_late", True)
    monkeypatch.setattr(ToyCloud, "rent_all", lambda self: {name: self._rent(name) for name in self.first_names})
    backend = make_backend(free_machines=4, spares=2)
    assert backend.poll()
    assert sorted(backend.controller.live_machines) == ["0", "1"] and backend.dead_machines() == []
    with pytest.raises(SetupFailed, match=r"^not rented yet$"):
        backend.controller._wait_until_ready("2")
    write_status(backend, "1", "training", phase="running", risk_reason=RISK)
    for _ in range(3):
        poll_cloud(backend)
    assert caplog.text.count(f"machine 1: {RISK}; it goes on training") == 1
    assert backend.dead_machines() == ["2"], "one spare for one machine at risk"
    backend.replace("2")
    poll_cloud(backend)
    assert sorted(backend.controller.live_machines) == ["0", "1", "2"] and backend.controller.fleet.restarted == ["2"]
    write_status(backend, "1", "training", phase="running")
    poll_cloud(backend)
    assert ToyCloud.released == [] and backend.dead_machines() == []
    ToyCloud.rented.pop(backend.controller.live_machines["2"].id)
    backend.controller.rented_at.clear()  # else it counts as just rented, and the cloud's list as older
    poll_cloud(backend)
    assert backend.dead_machines() == ["2"], "once due, a spare is replaced like any other machine"


def test_traffic_is_counted_at_the_end_and_over_a_move(backend: ToyBackend) -> None:
    controller: Any = backend.controller

    def note_traffic(boot: str, written_bytes: int, home_bytes: int) -> None:
        """Let a machine's status come home, with the bytes that the machine has written to the shared folder."""
        moved = Traffic(shared_written_bytes=written_bytes)
        status = MachineStatus(id="0.a", address="10.0.0.1", boot_id=boot, traffic=moved)
        controller.fleet.mirror.last_status["status/0.json"] = to_json_bytes(encode(status)), 0.0
        controller.fleet.received_bytes = home_bytes

    def counted() -> Traffic:
        return read_traffic(backend.run.folder.path).until(time.time())

    note_traffic("first", 7, 100)
    assert backend.poll() and counted() == Traffic(), "not at every round"
    controller._move_to_new_machines()
    assert counted() == Traffic(shared_written_bytes=7, home_bytes=100)
    ToyCloud.free_machines = 2
    assert backend.poll()
    note_traffic("second", 5, 50)
    controller.fleet.is_training = False
    write_status(backend, "1", "stopped", ended=True)
    assert not backend.poll() and counted() == Traffic(shared_written_bytes=12, home_bytes=150)
