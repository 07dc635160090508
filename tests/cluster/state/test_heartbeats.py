"""What the agents of a job say to each other: heartbeats by the reader's own clock, from files that may be torn."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from cluster.state.heartbeats import MachineStatus, PeerStatuses


class Folder:
    """A shared folder of hand-made statuses."""

    def __init__(self, shared: Path) -> None:
        self.shared = shared
        (shared / "status").mkdir()

    def says(self, one: str, count: int = 0, launch: str = "now", **more: Any) -> None:
        word = asdict(MachineStatus(id=one, **more))
        self.text(one.partition(".")[0], json.dumps({**word, "launch": launch, "time": count, "use": {"cpu": 1}}))

    def text(self, name: str, text: str) -> None:
        (self.shared / f"status/{name}.json").write_text(text)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


@pytest.fixture
def peers(folder: Folder) -> PeerStatuses:
    return PeerStatuses(folder.shared, ["0", "1", "2"], "now")


def test_a_word_is_what_the_others_must_know_and_nothing_else(folder: Folder, peers: PeerStatuses) -> None:
    folder.says("1.b", phase="running", attempt=3, last_step=17, leave_reason="a notice", fault="own", address="10.0.0.7", port=9)
    peers.refresh(5.0)
    (word,) = peers.statuses.values()
    assert word == MachineStatus(id="1.b", phase="running", attempt=3, last_step=17, leave_reason="a notice", fault="own",
                        address="10.0.0.7", port=9)  # fmt: skip
    assert word.machine_name == "1" and peers.ages(5.0) == {"1.b": 0.0}


def test_an_age_is_the_time_since_the_reader_saw_a_change_whatever_the_writers_clock_says(
    folder: Folder, peers: PeerStatuses
) -> None:
    folder.says("0.a", 1_000_000)
    folder.says("1.b", -7)
    peers.refresh(100.0)
    peers.refresh(103.0)
    assert peers.ages(103.0) == {"0.a": 3.0, "1.b": 3.0}
    folder.says("1.b", -8)
    peers.refresh(104.0)
    assert peers.ages(104.5) == {"0.a": 4.5, "1.b": 0.5}


@pytest.mark.parametrize("text", ["", "{", '{"id": "1.', "[]", "7", "null", "{}", '{"launch": "now"}', "\x00" * 40])
def test_a_torn_or_strange_file_leaves_what_was_known_and_is_no_heartbeat(
    folder: Folder, peers: PeerStatuses, text: str
) -> None:
    folder.says("1.b", last_step=5)
    peers.refresh(0.0)
    folder.text("1", text)
    peers.refresh(2.0)
    assert peers.statuses["1.b"].last_step == 5 and peers.ages(2.0) == {"1.b": 2.0}
    folder.says("1.b", 1, last_step=6)
    peers.refresh(3.0)
    assert peers.statuses["1.b"].last_step == 6 and peers.ages(3.0) == {"1.b": 0.0}


def test_a_file_that_is_gone_for_a_moment_leaves_what_was_known(folder: Folder, peers: PeerStatuses) -> None:
    folder.says("1.b")
    peers.refresh(0.0)
    (folder.shared / "status/1.json").unlink()
    peers.refresh(1.0)
    assert set(peers.statuses) == {"1.b"} and peers.ages(1.0) == {"1.b": 1.0}


def test_a_byte_that_is_no_text_is_passed_over(folder: Folder, peers: PeerStatuses) -> None:
    (folder.shared / "status/0.json").write_bytes(b"\xff\xfe{}")
    folder.says("1.b")
    peers.refresh(0.0)
    assert set(peers.statuses) == {"1.b"}


def test_words_of_another_launch_and_of_strangers_are_not_heard(folder: Folder, peers: PeerStatuses) -> None:
    folder.says("0.a", launch="an earlier one")
    folder.says("3.d")
    peers.refresh(0.0)
    assert peers.statuses == {} and peers.ages(0.0) == {}
    folder.says("0.new")
    peers.refresh(1.0)
    assert set(peers.statuses) == {"0.new"}


def test_a_new_start_under_an_old_name_takes_the_place_of_the_old_one(folder: Folder, peers: PeerStatuses) -> None:
    folder.says("1.b", phase="running", attempt=3)
    folder.says("0.a")
    peers.refresh(0.0)
    folder.says("1.new", phase="warming")
    peers.refresh(2.0)
    assert set(peers.statuses) == {"0.a", "1.new"} and peers.ages(2.0) == {"0.a": 2.0, "1.new": 0.0}


def test_the_silence_of_others_while_we_were_frozen_does_not_count(folder: Folder, peers: PeerStatuses) -> None:
    folder.says("1.b")
    peers.refresh(0.0)
    peers.discount_pause(60.0)
    assert peers.ages(61.0) == {"1.b": 1.0}


def test_a_word_of_a_later_version_is_understood(folder: Folder, peers: PeerStatuses) -> None:
    folder.text("1", json.dumps({"id": "1.b", "launch": "now", "phase": "spare", "mood": "good"}))
    peers.refresh(0.0)
    assert peers.statuses["1.b"] == MachineStatus(id="1.b", phase="spare")
