"""Tests of StatusWriter: urgent changes at once, all else with the heartbeat, and a log of state changes."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.small_disk import fill

from cluster.agent.status_writer import (
    StatusWriter,
    continue_clock,
    elapsed_by_statuses,
    first_status,
    read_previous_status,
)
from cluster.state.heartbeats import MachineLoad, MachineStatus
from cluster.state.states import AgentPhase, MachineState
from train.tools import host
from train.tools.records import decode

STATUS = MachineStatus(id="1.b", phase=AgentPhase.RUNNING, state=MachineState.TRAINING, attempt=2, last_step=8)
LOAD = MachineLoad(cpu=7)


@pytest.fixture
def make_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., StatusWriter]:
    """Make a writer of machine 1 with this heartbeat in seconds, which does not measure the machine."""
    monkeypatch.setattr("cluster.agent.status_writer.HostSampler.sample", lambda _: LOAD)
    return lambda heartbeat_seconds=3600.0, shared=tmp_path: StatusWriter(shared, "1", "now", heartbeat_seconds)


def read_status(folder: Path) -> Any:
    return json.loads((folder / "status/1.json").read_text())


@pytest.mark.parametrize(("change", "is_urgent"), [
    ({"phase": "failed"}, True), ({"attempt": 3}, True), ({"leave_reason": "a notice"}, True), ({"step": 9}, False),
])  # fmt: skip
def test_urgent_change_is_written_at_once_and_a_number_with_the_next_heartbeat(
    tmp_path: Path, make_writer: Callable[..., StatusWriter], change: dict[str, Any], is_urgent: bool
) -> None:
    writer = make_writer()
    writer.write(replace(STATUS, top1=21.0))
    assert first_status(read_previous_status(tmp_path, "1"), id="1.c", host="node4").top1 == 21.0, "a resume shows it"
    writer.write(STATUS)
    written = decode(MachineStatus, read_status(tmp_path))
    assert (written.launch, written.use, written.state, written.last_step) == ("now", LOAD, STATUS.state, 8)
    changed = replace(STATUS, **change)
    writer.write(changed)
    assert (read_status(tmp_path).items() >= change.items()) == is_urgent
    writer.heartbeat_seconds = 0.0
    writer.write(changed)
    assert read_status(tmp_path).items() >= change.items()


def test_write_full_disk_rewrites_status_in_place(full_disk: Path, make_writer: Callable[..., StatusWriter]) -> None:
    (full_disk / "filling").unlink()
    writer = make_writer(0.0, full_disk)
    writer.write(replace(STATUS, step=8))
    fill(full_disk)
    writer.write(replace(STATUS, step=9))
    assert read_status(full_disk)["step"] == 9


@pytest.mark.parametrize(("machine", "changes", "expected"), [
    ("1", {}, 150.0),
    ("1", {"boot_id": "an earlier one"}, 100.0),  # nobody knows how long the machine was off
    ("0", {}, 100.0),  # whose clock may differ
    ("1", {"launch": "an earlier one"}, 0.0),
])  # fmt: skip
def test_time_of_a_launch_goes_on_from_the_last_status_of_a_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: str, changes: dict[str, Any], expected: float
) -> None:
    monkeypatch.setattr(host, "boot_id", lambda: "this one")
    monkeypatch.setattr(host, "unix_time", lambda: 1050.0)
    status = {"id": f"{machine}.a", "launch": "now", "time": 1000.0, "boot_id": "this one", "elapsed_seconds": 100.0}
    (tmp_path / "status").mkdir()
    (tmp_path / f"status/{machine}.json").write_text(json.dumps({**status, **changes}))
    assert elapsed_by_statuses(tmp_path, "1", ("0", "1"), "now") == expected


@pytest.mark.parametrize(("boot_id", "since_boot", "expected"), [("first", 60.0, 1010.0), ("second", 2.0, 1000.0)])
def test_clock_of_the_next_agent_goes_on_although_the_wall_clock_was_set_back(
    tmp_path: Path,
    make_writer: Callable[..., StatusWriter],
    monkeypatch: pytest.MonkeyPatch,
    boot_id: str,
    since_boot: float,
    expected: float,
) -> None:
    """After a boot nobody knows how long the machine was off; but no time comes before an earlier one."""

    def set_clocks(wall: float, boot: str, seconds: float, *begin: float) -> None:
        monkeypatch.setattr(time, "time", lambda: wall)
        monkeypatch.setattr(host, "seconds_since_boot", lambda: seconds)
        monkeypatch.setattr(host, "boot_id", lambda: boot)
        monkeypatch.setattr(host, "steady_clock", host.SteadyClock(*begin))

    set_clocks(1000.0, "first", 50.0, 950.0)
    writer = make_writer(heartbeat_seconds=0.0)
    for _ in range(2):
        writer.write(STATUS)
    set_clocks(-6200.0, boot_id, since_boot)  # two hours back
    continue_clock(read_previous_status(tmp_path, "1"))
    make_writer().write(replace(STATUS, state=MachineState.FAILED, reason="why"))
    status = read_status(tmp_path)
    assert status["time"] == expected and status["clock_jump"] < -7000
    assert [json.loads(line) for line in (tmp_path / "logs/agent-1.jsonl").read_text().splitlines()] == [
        {"time": 1000.0, "attempt": 2, "state": "training", "step": 8},
        {"time": 1000.0, "attempt": 2, "state": "lost"},  # it was killed
        {"time": expected, "attempt": 2, "state": "failed", "reason": "why", "step": 8},
    ]
