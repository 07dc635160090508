"""What an agent says: news at once, all else with the beat, and a line in its log for each change of state."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.agent.status_writer import StatusWriter
from cluster.state.heartbeats import MachineStatus, PeerStatuses

Fixture = Any
WORD = MachineStatus(id="1.b", phase="running", attempt=2, last_step=8)


@pytest.fixture
def speak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., StatusWriter]:
    """Make a voice of machine 1 that has a beat of so many seconds, and measures nothing."""
    monkeypatch.setattr("cluster.agent.status_writer.HostSampler.sample", lambda _: {"cpu": 7})
    made = []

    def make(beat: float = 3600.0) -> StatusWriter:
        made.append(StatusWriter(tmp_path, "1", "now", beat))
        return made[-1]

    return make


def said(folder: Path) -> Any:
    return json.loads((folder / "status/1.json").read_text())


def log(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "logs/agent-1.jsonl").read_text().splitlines()]


def test_write_has_status_numbers_and_machine_load(
    tmp_path: Path, speak: Callable[..., StatusWriter]
) -> None:
    before = time.time()
    speak().write(WORD, "training", images_per_second=5.0)
    found = said(tmp_path)
    assert before <= found["time"] <= time.time()
    assert (found["id"], found["phase"], found["attempt"], found["last_step"], found["launch"]) == (
        "1.b",
        "running",
        2,
        8,
        "now",
    )
    assert (found["state"], found["images_per_second"], found["use"]) == ("training", 5.0, {"cpu": 7})
    peers = PeerStatuses(tmp_path, ["1"], "now")
    peers.refresh(0.0)
    assert peers.statuses["1.b"].state == "training" and peers.statuses["1.b"].last_step == 8


@pytest.mark.parametrize(
    "news",
    [{"phase": "failed"}, {"attempt": 3}, {"leave_reason": "a notice"}, {"fault": "own"}],
    ids=["phase", "attempt", "leave_reason", "fault"],
)
def test_write_urgent_change_is_written_at_once(tmp_path: Path, speak: Callable[..., StatusWriter], news: dict[str, Any]) -> None:
    voice = speak()
    voice.write(WORD, "training")
    changed = MachineStatus(**{**vars(WORD), **news})
    voice.write(changed, "training")
    assert said(tmp_path).items() >= news.items()


def test_write_numbers_wait_for_heartbeat(tmp_path: Path, speak: Callable[..., StatusWriter], place: Fixture) -> None:
    voice = speak()
    voice.write(WORD, "training", step=8)
    voice.write(WORD, "training", step=9)
    assert said(tmp_path)["step"] == 8
    voice.heartbeat_seconds = 0.05
    place.wait_for(lambda: voice.write(WORD, "training", step=10) or said(tmp_path)["step"] == 10, 5)


def test_write_keeps_extra_fields_but_not_reason(
    tmp_path: Path, speak: Callable[..., StatusWriter]
) -> None:
    voice = speak(beat=0.0)
    voice.write(WORD, "failed", reason="why", pid=7)
    voice.write(WORD, "starting")
    assert (said(tmp_path)["pid"], said(tmp_path)["reason"], voice.state, voice.reason) == (7, "", "starting", "")


def test_write_logs_each_state_change_once(tmp_path: Path, speak: Callable[..., StatusWriter]) -> None:
    voice = speak(beat=0.0)
    for state, reason in (("setup", ""), ("training", ""), ("training", ""), ("failed", "why")):
        voice.write(WORD if state != "setup" else MachineStatus(id="1.b"), state, reason)
    lines = log(tmp_path)
    assert [one["state"] for one in lines] == ["setup", "training", "failed"]
    assert [one.get("reason") for one in lines] == [None, None, "why"]
    assert [one.get("step") for one in lines] == [None, 8, 8] and [one["attempt"] for one in lines] == [0, 2, 2]
    assert lines[0]["time"] <= lines[1]["time"] <= lines[2]["time"]


def test_status_writer_logs_killed_predecessor_as_gone(
    tmp_path: Path, speak: Callable[..., StatusWriter]
) -> None:
    voice = speak()
    assert not (tmp_path / "logs/agent-1.jsonl").exists()
    voice.write(WORD, "training")
    last = said(tmp_path)["time"]
    speak()
    assert log(tmp_path)[-1] == {"time": last, "attempt": 2, "state": "gone"}


def test_status_writer_ended_predecessor_is_not_logged(tmp_path: Path, speak: Callable[..., StatusWriter]) -> None:
    speak().write(WORD, "done", ended=True)
    speak()
    assert [one["state"] for one in log(tmp_path)] == ["done"]


def test_write_shorter_status_replaces_longer_one(tmp_path: Path, speak: Callable[..., StatusWriter]) -> None:
    voice = speak(beat=0.0)
    voice.write(WORD, "failed", reason="x" * 2000)
    voice.write(WORD, "starting")
    assert said(tmp_path)["state"] == "starting" and len((tmp_path / "status/1.json").read_text()) < 1000


def test_write_full_disk_rewrites_status_in_place(
    full_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.agent.status_writer.HostSampler.sample", lambda _: {"cpu": 7})
    (full_disk / "filling").unlink()
    voice = StatusWriter(full_disk, "1", "now", 0.0)
    voice.write(WORD, "training", step=8)
    with (full_disk / "filling").open("wb", 0) as file, pytest.raises(OSError):
        while file.write(bytes(4096)):
            pass
    voice.write(WORD, "training", step=9)
    assert said(full_disk)["step"] == 9
