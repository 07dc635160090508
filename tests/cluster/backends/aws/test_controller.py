"""A supervisor's step on rented machines, beside a fleet and a cloud of paper."""

import json
import sys
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.backends.aws.controller import AwsController
from cluster.connectors.local import Connector
from cluster.errors import SetupFailed
from cluster.machines import checkpoint_files

Fixture = Any


class Fleet:
    """Machines without any agent at work; their shared folder is on this disk."""

    def __init__(self, shared: Any) -> None:
        self.connectors = {name: Connector() for name in ("0", "1")}
        self.provisioner = SimpleNamespace(job_folder=lambda name: str(shared))
        self.done: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.done.append(name)  # all else answers None: no agent is alive

    def dead_machines(self) -> list[str]:
        return []


@pytest.fixture
def supervised(hand_made: Fixture, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A job of two rented machines, as its supervisor sees it."""
    run = hand_made(machines=2, cloud={}, backend="aws")
    ended: list[tuple[list[str], str]] = []
    rented = SimpleNamespace(
        rental_spec=SimpleNamespace(max_dollars=None), journal=None, run_folder=run.folders, log=ended.append,
        terminate=lambda ids, why: ended.append((ids, why)), is_overdue=False, list_instances=lambda: {},
    )  # fmt: skip
    monkeypatch.setattr(sys.modules[AwsController.__module__], "JobInstances", lambda *_: rented)
    found: Any = AwsController(run.spec, run.folders)
    found.fleet, found.last_poll_time, found.ended = Fleet(run.folders.path / "there"), time.monotonic(), ended
    addresses = {"0": "", "1": "198.51.100.7"}
    found.live_instances = {name: SimpleNamespace(name=name, id=f"i-{name}", public_ip=one) for name, one in addresses.items()}
    return run, found


def test_a_job_that_is_done_while_a_machine_was_rented_for_it_is_over(supervised: Fixture) -> None:
    """Nobody asks for lost machines any more, so nobody takes the answer."""
    run, found = supervised
    found.rental_futures["1"] = answer = Future()
    assert found.poll() is True and found.get_stop_reason() == ""
    run.shared("result.json", "{}")
    assert found.get_stop_reason() == "the job is over"  # which the one who rents hears, too
    assert found.poll() is True  # it may just be asking EC2
    answer.set_result(None)
    assert found.poll() is False and found.rental_futures


def test_the_network_of_a_job_that_is_done_comes_home_through_the_machine_with_an_address(supervised: Fixture) -> None:
    run, found = supervised
    saved = run.folders.shared / run.checkpoint(1, 8)
    there = run.folders.path / "there"
    there.mkdir()
    (run.folders.shared / "checkpoints").rename(there / "checkpoints")
    run.shared("result.json", "{}")
    assert found.poll() is False
    assert checkpoint_files.newest_local_checkpoint(run.folders.shared) == saved and found.ended == [
        (["i-0"], "the job is done")
    ]
    assert "bringing the network home: 0 of 0 MB" in json.loads((run.folders.path / "cloud.json").read_text())["doing"]


def test_a_network_that_does_not_come_keeps_no_machine(supervised: Fixture) -> None:
    run, found = supervised
    run.shared("result.json", "{}")
    del found.fleet.connectors["1"]
    assert found.poll() is False
    assert found.ended == [(["i-0"], "the job is done"), "the network stays on the stack's shared file system: '1'"]


def test_a_stop_lets_machines_that_are_there_save_also_when_nobody_looked_after_them(
    supervised: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, found = supervised
    run.shared("stop", "{}")
    found.fleet, found.job_instances.first_machine_time = None, None
    with pytest.raises(SetupFailed, match="stopped by the user"):
        found.poll()  # there is none
    found.job_instances.list_instances = lambda: found.live_instances
    found.job_instances.find_or_rent = lambda before_renting: pytest.fail("they are gathered")
    with pytest.raises(pytest.fail.Exception, match="they are gathered"):
        found.poll()


def test_machines_that_have_not_ended_when_their_time_is_over_are_ended(supervised: Fixture) -> None:
    """One whose kernel hangs does not cut its power."""
    _, found = supervised
    found.fleet.agents_alive, found.fleet.pool = lambda: True, SimpleNamespace(submit=lambda question: Future())
    assert found.poll() is True and found.get_stop_reason() == ""
    found.job_instances.is_overdue, found.last_poll_time = True, 0.0  # it is looked for as often as the machines
    assert found.poll() is True and found.get_stop_reason() == "its time is over, and not all of its machines have ended"


def test_machines_that_have_reached_their_limit_do_not_move(supervised: Fixture) -> None:
    """Though one of them had left before, and none had come in its place."""
    run, found = supervised
    run.says("left", machine="0", ended=True, launch="")
    run.says("stopped", machine="1", ended=True, launch="")
    found.fleet.agents_alive = lambda: False
    assert found.poll() is False and found.fleet is not None
