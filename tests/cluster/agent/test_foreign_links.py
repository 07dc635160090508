"""Symbolic links that another user has placed in the shared folder: a machine never writes through them."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.agent.status_writer import StatusWriter
from cluster.connectors.log_sync import LogShipper
from cluster.machines import probe
from cluster.state import attempts
from cluster.state.heartbeats import MachineStatus
from cluster.state.states import MachineState
from train.tools import process, process_log
from train.tools.checkpoint_io import CheckpointWriter
from train.tools.files import create_once, locked, write_atomic
from train.weights import run_files

STATUS = MachineStatus(id="0.a", state=MachineState.TRAINING)


def write_statuses(shared: Path) -> None:
    writer = StatusWriter(shared, "0", "now", 0.0)
    try:
        writer.write(STATUS)
        writer.write(replace(STATUS, state=MachineState.FAILED, reason="$(touch evil)"))
    finally:
        writer.close()


def propose(shared: Path) -> None:
    for _ in range(2):
        newest = attempts.newest_attempt(shared)
        attempts.propose(shared, newest, attempts.Attempt(launch_id="now", members=("0.a",)))


def ship_logs(shared: Path) -> None:
    work = shared.with_name("work")
    (work / "logs/000001").mkdir(parents=True)
    (work / "logs/000001/bashrc").write_text("evil")
    LogShipper(work, shared).ship_new_bytes()


def log_to(path: Path) -> None:
    process.start_process(["echo", "evil"], path).wait()


def lock(path: Path) -> None:
    with locked(path):
        pass


def publish(shared: Path) -> None:
    nothing: Any = None
    run_files.publish_network(shared, nothing, None, nothing, nothing, None)


# A function that writes below the shared folder, the path of the link, and its target in the folder of the victim.
WRITERS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "status": (write_statuses, "status/0.json", "bashrc"),
    "folder of statuses": (write_statuses, "status", "."),
    "log of states": (write_statuses, "logs/agent-0.jsonl", "bashrc"),
    "folder of logs": (write_statuses, "logs", "."),
    "log of a trainer": (ship_logs, "logs/000001/bashrc", "bashrc"),
    "logs of an attempt": (ship_logs, "logs/000001", "."),
    "logs of trainers": (ship_logs, "logs", "."),
    "attempt": (propose, "attempts/000001.json", "bashrc"),
    "attempts": (propose, "attempts", "."),
    "log of the set-up": (lambda shared: log_to(shared / "setup.log"), "setup.log", "bashrc"),
    "log of the supervisor": (
        lambda shared: process_log.append_message(shared / "supervisor.jsonl", "a", "$(touch evil)"),
        "supervisor.jsonl",
        "bashrc",
    ),
    "lock": (lambda shared: lock(shared / "agent.lock"), "agent.lock", "bashrc"),
    "marker": (lambda shared: probe.folder_facts(shared, shared / "probe/t-0"), "probe/t-0", "bashrc"),
    "folder of markers": (lambda shared: probe.folder_facts(shared, shared / "probe/t-0"), "probe", "."),
    "checkpoints": (lambda shared: CheckpointWriter().begin_attempt(shared / "checkpoints/000001"), "checkpoints", "."),
    "network": (publish, "network", "."),
    "replaced file": (lambda shared: write_atomic(shared / "result.json", b"{}"), "result.json", "bashrc"),
    "new file": (lambda shared: create_once(shared / "result.json", b"{}"), "result.json", "bashrc"),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_nothing_is_written_through_a_link(tmp_path: Path, writer: str) -> None:
    write, place, target = WRITERS[writer]
    victim, shared = tmp_path / "victim", tmp_path / "shared"
    (victim / "000001").mkdir(parents=True)
    names = ("bashrc", "0.json", "agent-0.jsonl", "model.safetensors", "000001/step-00000001.pt")
    for name in names:
        (victim / name).write_text("mine")
    (shared / place).parent.mkdir(parents=True)
    (shared / place).symlink_to(victim / target)
    try:
        write(shared)
    except OSError as error:
        assert error.filename
    assert {str(path.relative_to(victim)) for path in victim.rglob("*") if path.is_file()} == {*names}
    assert {(victim / name).read_text() for name in names} == {"mine"}


def test_checkpoints_behind_a_link_are_not_deleted(tmp_path: Path) -> None:
    """The link may lead to a folder of photographs, for example, and folders of older attempts are deleted."""
    photographs, shared = tmp_path / "photographs", tmp_path / "shared"
    (photographs / "000001").mkdir(parents=True)
    shared.mkdir()
    (shared / "checkpoints").symlink_to(photographs)
    for _ in range(4):
        with contextlib.suppress(OSError):
            propose(shared)
    assert [path.name for path in photographs.iterdir()] == ["000001"]
