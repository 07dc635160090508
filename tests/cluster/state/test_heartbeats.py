"""Tests of status files: ages by the reader's own clock, and files that are damaged, missing or of another launch."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.agent.status_writer import StatusWriter
from cluster.state.heartbeats import MachineLoad, MachineStatus, PeerStatuses
from train.tools.records import encode


@pytest.fixture
def peers(tmp_path: Path) -> PeerStatuses:
    (tmp_path / "status").mkdir()
    return PeerStatuses(tmp_path, ["0", "1", "2"], "now")


@pytest.fixture
def write_status(peers: PeerStatuses) -> Callable[..., None]:
    def write(machine_id: str, time: int = 0, launch: str = "now", **more: Any) -> None:
        status = MachineStatus(id=machine_id, launch=launch, time=time, use=MachineLoad(cpu=1.0), **more)
        (peers.status_folder / f"{machine_id[0]}.json").write_text(json.dumps(encode(status)))

    return write


def test_ages_use_readers_clock_and_count_this_launch_only(peers: PeerStatuses, write_status: Any) -> None:
    write_status("0.old", launch="an earlier one")
    write_status("3.d")  # no machine of the job
    peers.refresh(99.0)
    assert peers.statuses == {} and peers.ages(99.0) == {}
    write_status("0.a", 1_000_000)
    write_status("1.b", -7)
    peers.refresh(100.0)
    peers.refresh(103.0)
    assert peers.ages(103.0) == {"0.a": 3.0, "1.b": 3.0}
    write_status("1.b", -8)
    peers.refresh(104.0)
    assert peers.ages(104.5) == {"0.a": 4.5, "1.b": 0.5}
    peers.discount_pause(60.0)
    assert peers.ages(164.5) == {"0.a": 4.5, "1.b": 0.5}


@pytest.mark.parametrize("text", ["", '{"id": "1.', "[]", "{}", '{"launch": "now", "id": "1.b", "phase": "sleeping"}'])
def test_refresh_damaged_file_keeps_last_status(peers: PeerStatuses, write_status: Any, text: str) -> None:
    write_status("1.b", last_step=5)
    peers.refresh(0.0)
    (peers.status_folder / "1.json").write_text(text)
    peers.refresh(2.0)
    assert peers.statuses["1.b"].last_step == 5 and peers.ages(2.0) == {"1.b": 2.0}
    write_status("1.b", 1, last_step=6)
    peers.refresh(3.0)
    assert peers.statuses["1.b"].last_step == 6 and peers.ages(3.0) == {"1.b": 0.0}


def test_free_lock_of_a_dead_agent_counts_at_once(tmp_path: Path) -> None:
    peers = PeerStatuses(tmp_path, ["0", "1"], "now")
    writers = [StatusWriter(tmp_path, name, "now", 0.0) for name in ("0", "1")]
    for step in (0, 1):
        for writer in writers:
            writer.write(MachineStatus(id=f"{writer.status_file[7]}.a", last_step=step))
        peers.refresh(0.0, tests_all_locks=False)
    writers[1].write(MachineStatus(id="1.a", last_step=2))
    writers[1].lock.close()  # as the kernel does when a process dies
    peers.refresh(1.0, tests_all_locks=False)
    assert peers.ages(2.0) == {"0.a": 2.0, "1.a": 1.0}
    peers.refresh(1.0)
    assert peers.ages(2.0) == {"0.a": 2.0, "1.a": math.inf} and peers.statuses["1.a"].last_step == 2
    writers[1].write(MachineStatus(id="1.a", last_step=3))  # it lives: the server had lost its lock, it has a new one
    peers.refresh(3.0)
    peers.refresh(4.0)
    assert peers.ages(4.0)["1.a"] == 1.0
    writers[1].lock.close()
    peers.refresh(5.0)
    assert peers.ages(5.0)["1.a"] == math.inf
    for writer in writers:
        writer.close()


def test_lock_that_was_never_seen_proves_nothing(peers: PeerStatuses, write_status: Any) -> None:
    for time in (0, 1):  # a file system that does not share locks
        write_status("1.b", time, holds_lock=True)
        peers.refresh(time)
    assert peers.ages(3.0) == {"1.b": 2.0}
