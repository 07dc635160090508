"""Tests of status files: ages by the reader's own clock, and files that are damaged, missing or of another launch."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from cluster.agent.status_writer import StatusWriter
from cluster.state.heartbeats import MachineLoad, MachineStatus, PeerStatuses
from train.tools.records import encode


class Folder:
    """A shared folder with hand-made status files, and what a reader knows of the machines 0, 1 and 2."""

    def __init__(self, shared: Path) -> None:
        self.status = shared / "status"
        self.status.mkdir()
        self.peers = PeerStatuses(shared, ["0", "1", "2"], "now")

    def write_status(self, machine_id: str, time: int = 0, launch: str = "now", **more: Any) -> None:
        status = MachineStatus(id=machine_id, launch=launch, time=time, use=MachineLoad(cpu=1.0), **more)
        (self.status / f"{machine_id[0]}.json").write_text(json.dumps(encode(status)))


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_ages_use_readers_clock(folder: Folder) -> None:
    peers = folder.peers
    folder.write_status("0.a", 1_000_000)
    folder.write_status("1.b", -7)
    peers.refresh(100.0)
    peers.refresh(103.0)
    assert peers.ages(103.0) == {"0.a": 3.0, "1.b": 3.0}
    folder.write_status("1.b", -8)
    peers.refresh(104.0)
    assert peers.ages(104.5) == {"0.a": 4.5, "1.b": 0.5}
    peers.discount_pause(60.0)
    assert peers.ages(164.5) == {"0.a": 4.5, "1.b": 0.5}


@pytest.mark.parametrize("text", ["", '{"id": "1.', "[]", "{}", '{"launch": "now", "id": "1.b", "phase": "sleeping"}'])
def test_refresh_damaged_file_keeps_last_status(folder: Folder, text: str) -> None:
    peers = folder.peers
    folder.write_status("1.b", last_step=5)
    peers.refresh(0.0)
    (folder.status / "1.json").write_text(text)
    peers.refresh(2.0)
    assert peers.statuses["1.b"].last_step == 5 and peers.ages(2.0) == {"1.b": 2.0}
    folder.write_status("1.b", 1, last_step=6)
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
    writers[1].write(MachineStatus(id="1.a", last_step=3))  # it lives: the file system has lost its lock
    peers.refresh(3.0)
    peers.refresh(4.0)
    assert peers.ages(4.0)["1.a"] == 1.0
    for writer in writers:
        writer.close()


def test_lock_that_was_never_seen_proves_nothing(folder: Folder) -> None:
    for time in (0, 1):  # a file system that does not share locks
        folder.write_status("1.b", time, holds_lock=True)
        folder.peers.refresh(time)
    assert folder.peers.ages(3.0) == {"1.b": 2.0}


def test_refresh_other_launch_or_unknown_machine_is_ignored(folder: Folder) -> None:
    peers = folder.peers
    folder.write_status("0.a", launch="an earlier one")
    folder.write_status("3.d")
    peers.refresh(0.0)
    assert peers.statuses == {} and peers.ages(0.0) == {}
    folder.write_status("0.new")
    peers.refresh(1.0)
    assert set(peers.statuses) == {"0.new"}
