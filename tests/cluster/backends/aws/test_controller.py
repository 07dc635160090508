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
        self.remotes = {name: Connector() for name in ("0", "1")}
        self.machines = SimpleNamespace(job_folder=lambda name: str(shared))
        self.done: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.done.append(name)  # all else answers None: no agent is alive

    def dead(self) -> list[str]:
        return []


@pytest.fixture
def supervised(hand_made: Fixture, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A job of two rented machines, as its supervisor sees it."""
    run = hand_made(machines=2, cloud={}, backend="aws")
    ended: list[tuple[list[str], str]] = []
    rented = SimpleNamespace(
        wish=SimpleNamespace(max_dollars=None), journal=None, folders=run.folders, say=ended.append,
        release=lambda ids, why: ended.append((ids, why)), late=False, look=lambda: {},
    )  # fmt: skip
    monkeypatch.setattr(sys.modules[AwsController.__module__], "Rented", lambda *_: rented)
    found: Any = AwsController(run.spec, run.folders)
    found.fleet, found.looked, found.ended = Fleet(run.folders.run / "there"), time.monotonic(), ended
    addresses = {"0": "", "1": "198.51.100.7"}
    found.present = {name: SimpleNamespace(name=name, id=f"i-{name}", public=one) for name, one in addresses.items()}
    return run, found


def test_a_job_that_is_done_while_a_machine_was_rented_for_it_is_over(supervised: Fixture) -> None:
    """Nobody asks for lost machines any more, so nobody takes the answer."""
    run, found = supervised
    found.renting["1"] = answer = Future()
    assert found.step() is True and found.stopping() == ""
    run.shared("result.json", "{}")
    assert found.stopping() == "the job is over"  # which the one who rents hears, too
    assert found.step() is True  # it may just be asking EC2
    answer.set_result(None)
    assert found.step() is False and found.renting


def test_the_network_of_a_job_that_is_done_comes_home_through_the_machine_with_an_address(supervised: Fixture) -> None:
    run, found = supervised
    saved = run.folders.shared / run.checkpoint(1, 8)
    there = run.folders.run / "there"
    there.mkdir()
    (run.folders.shared / "checkpoints").rename(there / "checkpoints")
    run.shared("result.json", "{}")
    assert found.step() is False
    assert checkpoint_files.newest_local_checkpoint(run.folders.shared) == saved and found.ended == [
        (["i-0"], "the job is done")
    ]
    assert "bringing the network home: 0 of 0 MB" in json.loads((run.folders.run / "cloud.json").read_text())["doing"]


def test_a_network_that_does_not_come_keeps_no_machine(supervised: Fixture) -> None:
    run, found = supervised
    run.shared("result.json", "{}")
    del found.fleet.remotes["1"]
    assert found.step() is False
    assert found.ended == [(["i-0"], "the job is done"), "the network stays on the stack's shared file system: '1'"]


def test_a_stop_lets_machines_that_are_there_save_also_when_nobody_looked_after_them(
    supervised: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, found = supervised
    run.shared("stop", "{}")
    found.fleet, found.rented.since = None, None
    with pytest.raises(SetupFailed, match="stopped by the user"):
        found.step()  # there is none
    found.rented.look = lambda: found.present
    found.rented.gather = lambda anew: pytest.fail("they are gathered")
    with pytest.raises(pytest.fail.Exception, match="they are gathered"):
        found.step()


def test_machines_that_have_not_ended_when_their_time_is_over_are_ended(supervised: Fixture) -> None:
    """One whose kernel hangs does not cut its power."""
    _, found = supervised
    found.fleet.alive, found.fleet.pool = lambda: True, SimpleNamespace(submit=lambda question: Future())
    assert found.step() is True and found.stopping() == ""
    found.rented.late, found.looked = True, 0.0  # it is looked for as often as the machines
    assert found.step() is True and found.stopping() == "its time is over, and not all of its machines have ended"


def test_machines_that_have_reached_their_limit_do_not_move(supervised: Fixture) -> None:
    """Though one of them had left before, and none had come in its place."""
    run, found = supervised
    run.says("left", machine="0", ended=True, launch="")
    run.says("stopped", machine="1", ended=True, launch="")
    found.fleet.alive = lambda: False
    assert found.step() is False and found.fleet is not None
