"""RentedJobController: one round of the supervisor's work on rented machines, with a fake fleet and a fake cloud."""

import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from support.local_connector import LocalConnector
from support.log_lines import log_lines

from cluster.backends.rented import final_network
from cluster.backends.rented.controller import RentedJobController
from cluster.backends.rented.traffic import read_traffic
from cluster.errors import SetupFailed
from cluster.machines import trained_files
from cluster.state import supervisor_records
from cluster.state.heartbeats import MachineStatus
from infra.costs import Traffic
from train.tools.filesystem import to_json_bytes
from train.tools.records import encode

Fixture = Any


class FakeFleet:
    """Machines without a running agent; their shared folder is a local one."""

    def __init__(self, shared: Any) -> None:
        self.connectors = {name: LocalConnector() for name in ("0", "1")}
        self.provisioner = SimpleNamespace(job_folder=lambda name: str(shared))
        self.calls: list[str] = []
        self.mirror = SimpleNamespace(last_status={})
        self.received_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.calls.append(name)  # any other method returns None: no agent is alive

    def pull_last_files(self, patience_seconds: float) -> bool:
        return True

    def dead_machines(self) -> list[str]:
        return []


@pytest.fixture
def supervised(hand_made: Fixture) -> Any:
    """A job on two rented machines and its controller, whose `.events` has terminated IDs."""
    run = hand_made(machines=2, cloud={}, backend="aws")
    events: list[Any] = []
    provider = SimpleNamespace(
        max_dollars=None,
        run_folder=run.run_folder,
        terminate=lambda ids, reason: events.append((ids, reason)),
        is_overdue=False,
        is_price_limit_reached=False,
        list_machines=lambda: {},
        first_names=("0", "1"),
        rents_spares_late=False,
    )
    fake_class: Any = lambda *_: provider  # noqa: E731
    controller: Any = RentedJobController(run.spec, run.run_folder, fake_class)
    controller.fleet = FakeFleet(run.run_folder.path / "remote")
    controller.last_poll_time = time.monotonic()
    controller.events = events
    public_ips = {"0": "", "1": "198.51.100.7"}
    controller.live_machines = {
        name: SimpleNamespace(name=name, id=f"i-{name}", public_ip=public_ip) for name, public_ip in public_ips.items()
    }
    return run, controller


def test_poll_of_a_finished_job_waits_for_an_open_rental_only(supervised: Fixture) -> None:
    """Nobody asks for lost machines of a finished job any more, so nobody collects the finished rental."""
    run, controller = supervised
    controller.rental_futures["1"] = rental = Future[Any]()
    assert controller.poll() is True and controller.get_stop_reason() == ""
    run.write_shared("result.json", "{}")
    assert controller.get_stop_reason() == "the job is over"  # which also interrupts the renting thread
    assert controller.poll() is True  # that thread may be in a request to the cloud
    rental.set_result(None)
    assert controller.poll() is False and controller.rental_futures


def test_poll_downloads_the_final_network_through_the_jump_host(supervised: Fixture) -> None:
    run, controller = supervised
    remote = run.run_folder.path / "remote"
    (remote / "network").mkdir(parents=True)
    (remote / "network" / "classes.json").write_text("{}\n")
    run.write_shared("result.json", "{}")
    assert controller.poll() is False
    assert (run.run_folder.path / "network" / "classes.json").read_text() == "{}\n"
    assert controller.events == [(["i-0"], "the job has ended")]
    activity = supervisor_records.read_activity(run.run_folder.path)
    assert activity and "downloading what was trained: 0 of 0 MB" in activity.doing


def test_poll_goes_on_when_the_final_network_cannot_be_downloaded(supervised: Fixture) -> None:
    run, controller = supervised
    run.write_shared("result.json", "{}")
    del controller.fleet.connectors["1"]
    with log_lines("cluster.backends") as lines:
        assert controller.poll() is False
    assert controller.events == [(["i-0"], "the job has ended")]
    assert lines == ["what was trained stays in the machines' shared folder: '1'"]


def test_poll_goes_on_when_the_download_of_the_network_does_not_end(
    supervised: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, controller = supervised
    run.write_shared("result.json", "{}")
    never = threading.Event()
    monkeypatch.setattr(final_network, "DOWNLOAD_TIMEOUT_SECONDS", 0.1)
    monkeypatch.setattr(trained_files, "download_network", lambda *_: never.wait(60))
    with log_lines("cluster.backends") as lines:
        assert controller.poll() is False
    never.set()
    assert lines == ["what was trained stays in the machines' shared folder: not complete after 0 s"]


def test_poll_after_a_stop_connects_to_machines_that_are_still_there(supervised: Fixture) -> None:
    """The machines must save a checkpoint, also when no supervisor ran while the job was stopped."""
    run, controller = supervised
    run.write_shared("stop", "{}")
    controller.fleet = None
    controller.provider.first_machine_time = None
    with pytest.raises(SetupFailed, match="stopped by the user"):
        controller.poll()  # there are no machines
    controller.provider.list_machines = lambda: controller.live_machines
    controller.provider.finish_open_requests = lambda: pytest.fail("it looked for machines")
    with pytest.raises(pytest.fail.Exception, match="it looked for machines"):
        controller.poll()


def test_poll_stops_an_overdue_job(supervised: Fixture) -> None:
    """A machine whose kernel hangs does not power itself off."""
    _, controller = supervised
    controller.fleet.agents_alive = lambda: True
    controller.fleet.pool = SimpleNamespace(submit=lambda function: Future())
    assert controller.poll() is True and controller.get_stop_reason() == ""
    controller.provider.is_overdue = True
    assert controller.poll() is True
    assert controller.get_stop_reason() == "its time limit passed, and not all of its machines have ended"


def test_poll_does_not_move_machines_that_reached_their_limit(supervised: Fixture) -> None:
    """Also if a machine had left before and was not replaced."""
    run, controller = supervised
    run.write_status("left", machine="0", ended=True, launch="")
    run.write_status("stopped", machine="1", ended=True, launch="")
    controller.fleet.agents_alive = lambda: False
    assert controller.poll() is False and controller.fleet is not None


# --- traffic ---------------------------------------------------------------------------------------------------------


def note_traffic(controller: Any, machine: str, boot: str, written_bytes: int) -> None:
    """Let a status of a machine come home, with the bytes that the machine has written to the shared folder."""
    moved = Traffic(shared_written_bytes=written_bytes)
    status = MachineStatus(id=f"{machine}.a", address=machine, boot_id=boot, traffic=moved)
    controller.fleet.mirror.last_status[f"status/{machine}.json"] = to_json_bytes(encode(status)), 0.0


def test_poll_counts_the_traffic_of_machines_and_of_this_computer(supervised: Fixture) -> None:
    run, controller = supervised
    controller.fleet.agents_alive = lambda: True
    note_traffic(controller, "0", "first", 7)
    controller.fleet.received_bytes = 100
    assert controller.poll() is True
    assert read_traffic(run.run_folder.path).until(time.time()) == Traffic(shared_written_bytes=7, home_bytes=100)
    note_traffic(controller, "0", "second", 5)
    assert controller.poll() is True
    assert read_traffic(run.run_folder.path).until(time.time()).shared_written_bytes == 7, "not at every round"
    controller.fleet.received_bytes = 150
    controller.fleet.agents_alive = lambda: False
    run.write_status("stopped", machine="1", ended=True, launch="")
    assert controller.poll() is False
    assert read_traffic(run.run_folder.path).until(time.time()) == Traffic(shared_written_bytes=12, home_bytes=150)


def test_poll_counts_the_last_traffic_before_the_job_moves(supervised: Fixture) -> None:
    run, controller = supervised
    controller.traffic_log.last_count_time = time.monotonic()
    note_traffic(controller, "0", "first", 7)
    controller.fleet.received_bytes = 100
    controller._move_to_new_machines()
    assert read_traffic(run.run_folder.path).until(time.time()) == Traffic(shared_written_bytes=7, home_bytes=100)
    controller.fleet = FakeFleet(run.run_folder.path / "remote")
    controller.fleet.received_bytes = 20
    controller.traffic_log.count(controller.fleet, is_last=True)
    assert read_traffic(run.run_folder.path).until(time.time()).home_bytes == 120


def test_list_of_machines_from_before_a_move_brings_no_old_machine_back(supervised: Fixture) -> None:
    """Otherwise the new machine of that name would be looked for at the old one, and the job would fail."""
    run, controller = supervised
    controller.provider.ensure_reachable = lambda machines: machines
    controller._update_hosts = lambda: None
    controller.poll_future = Future()
    controller.poll_future.set_result(dict(controller.live_machines))
    controller._move_to_new_machines()
    controller.fleet = FakeFleet(run.run_folder.path / "remote")
    controller.live_machines = {"0": SimpleNamespace(name="0", id="i-new", public_ip="")}
    controller._poll_cloud(controller.last_poll_time)
    assert [machine.id for machine in controller.live_machines.values()] == ["i-new"]


@pytest.mark.parametrize("is_reached", [True, False])
def test_poll_stops_the_job_at_its_price_limit(supervised: Fixture, is_reached: bool) -> None:
    _, controller = supervised
    controller.fleet.agents_alive = lambda: True
    controller.provider.max_dollars = 40.0
    controller.provider.is_price_limit_reached = is_reached
    # What traffic costs beyond what was expected uses up the dollars at once: the job is overdue too.
    controller.provider.is_overdue = is_reached
    assert controller.poll() is True
    reason = "the limit of 40 dollars (--max-price-total) was reached"
    assert controller.get_stop_reason() == (reason if is_reached else "")
