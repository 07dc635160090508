"""RentedJobController: one round of the supervisor's work on rented machines, with a fake fleet and a fake cloud."""

import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from support.log_lines import log_lines

from cluster.backends.rented.controller import RentedJobController
from cluster.connectors.local import Connector
from cluster.errors import SetupFailed
from cluster.machines import checkpoint_files
from cluster.state import supervisor_records

Fixture = Any


class FakeFleet:
    """Machines without a running agent; their shared folder is a local one."""

    def __init__(self, shared: Any) -> None:
        self.connectors = {name: Connector() for name in ("0", "1")}
        self.provisioner = SimpleNamespace(job_folder=lambda name: str(shared))
        self.calls: list[str] = []

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
        list_machines=lambda: {},
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


def test_poll_downloads_the_final_checkpoint_through_the_jump_host(supervised: Fixture) -> None:
    run, controller = supervised
    checkpoint = run.run_folder.shared / run.write_checkpoint(1, 8)
    remote = run.run_folder.path / "remote"
    remote.mkdir()
    (run.run_folder.shared / "checkpoints").rename(remote / "checkpoints")
    run.write_shared("result.json", "{}")
    assert controller.poll() is False
    assert checkpoint_files.newest_local_checkpoint(run.run_folder.shared) == checkpoint
    assert controller.events == [(["i-0"], "the job is done")]
    activity = supervisor_records.read_activity(run.run_folder.path)
    assert activity and "downloading the network: 0 of 0 MB" in activity.doing


def test_poll_goes_on_when_the_final_checkpoint_cannot_be_downloaded(supervised: Fixture) -> None:
    run, controller = supervised
    run.write_shared("result.json", "{}")
    del controller.fleet.connectors["1"]
    with log_lines("cluster.backends") as lines:
        assert controller.poll() is False
    assert controller.events == [(["i-0"], "the job is done")]
    assert lines == ["the network stays in the machines' shared folder: '1'"]


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
    controller.last_poll_time = 0.0  # the time limit is checked as often as the cloud is asked
    assert controller.poll() is True
    assert controller.get_stop_reason() == "its time is over, and not all of its machines have ended"


def test_poll_does_not_move_machines_that_reached_their_limit(supervised: Fixture) -> None:
    """Also if a machine had left before and was not replaced."""
    run, controller = supervised
    run.write_status("left", machine="0", ended=True, launch="")
    run.write_status("stopped", machine="1", ended=True, launch="")
    controller.fleet.agents_alive = lambda: False
    assert controller.poll() is False and controller.fleet is not None
