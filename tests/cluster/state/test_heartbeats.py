"""Tests of status files: ages by the reader's own clock, and files that are damaged, missing or of another launch."""

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.state.heartbeats import MachineLoad, MachineStatus, PeerStatuses
from train.tools.records import encode


class Folder:
    """A shared folder with hand-made status files."""

    def __init__(self, shared: Path) -> None:
        self.shared = shared
        (shared / "status").mkdir()

    def write_status(self, machine_id: str, time: int = 0, launch: str = "now", **more: Any) -> None:
        status = MachineStatus(id=machine_id, launch=launch, time=time, use=MachineLoad(cpu=1.0), **more)
        text = json.dumps(encode(status))
        self.write_text(machine_id.partition(".")[0], text)

    def write_text(self, name: str, text: str) -> None:
        (self.shared / f"status/{name}.json").write_text(text)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


@pytest.fixture
def peers(folder: Folder) -> PeerStatuses:
    return PeerStatuses(folder.shared, ["0", "1", "2"], "now")


def test_ages_use_readers_clock(folder: Folder, peers: PeerStatuses) -> None:
    folder.write_status("0.a", 1_000_000)
    folder.write_status("1.b", -7)
    peers.refresh(100.0)
    peers.refresh(103.0)
    assert peers.ages(103.0) == {"0.a": 3.0, "1.b": 3.0}
    folder.write_status("1.b", -8)
    peers.refresh(104.0)
    assert peers.ages(104.5) == {"0.a": 4.5, "1.b": 0.5}


@pytest.mark.parametrize(
    "text", ["", '{"id": "1.', "[]", "{}", "\x00" * 40, '{"launch": "now", "id": "1.b", "phase": "sleeping"}']
)
def test_refresh_damaged_file_keeps_last_status(folder: Folder, peers: PeerStatuses, text: str) -> None:
    folder.write_status("1.b", last_step=5)
    peers.refresh(0.0)
    folder.write_text("1", text)
    peers.refresh(2.0)
    assert peers.statuses["1.b"].last_step == 5 and peers.ages(2.0) == {"1.b": 2.0}
    folder.write_status("1.b", 1, last_step=6)
    peers.refresh(3.0)
    assert peers.statuses["1.b"].last_step == 6 and peers.ages(3.0) == {"1.b": 0.0}


def test_refresh_other_launch_or_unknown_machine_is_ignored(folder: Folder, peers: PeerStatuses) -> None:
    folder.write_status("0.a", launch="an earlier one")
    folder.write_status("3.d")
    peers.refresh(0.0)
    assert peers.statuses == {} and peers.ages(0.0) == {}
    folder.write_status("0.new")
    peers.refresh(1.0)
    assert set(peers.statuses) == {"0.new"}


def test_discount_pause_shortens_ages(folder: Folder, peers: PeerStatuses) -> None:
    folder.write_status("1.b")
    peers.refresh(0.0)
    peers.discount_pause(60.0)
    assert peers.ages(61.0) == {"1.b": 1.0}
