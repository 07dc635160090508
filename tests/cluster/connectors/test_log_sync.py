"""Copying of growing files: each byte once, with several readers, restarts and full disks."""

import os
import random
import shutil
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.packed_sets import content as copied_files
from support.small_disk import enlarge

from cluster.connectors import log_sync, untrusted
from cluster.connectors.log_sync import LogShipper, pull_logs


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    (tmp_path / "shared/logs").mkdir(parents=True)
    return tmp_path / "shared"


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    (tmp_path / "run_folder").mkdir()
    return tmp_path / "run_folder"


@pytest.fixture
def work_folder(tmp_path: Path) -> Path:
    (tmp_path / "work/logs/000001").mkdir(parents=True)
    return tmp_path / "work"


def append(path: Path, content: bytes) -> None:
    with path.open("ab") as file:
        file.write(content)


def test_pull_logs_copies_files_of_synced_folders_only(shared: Path, run_folder: Path, tmp_path: Path) -> None:
    pull_logs(shared / "not there", run_folder)
    synced_names = ["events/events.out.tfevents.1", "metrics/000001.jsonl", "logs/000001/rank-0.log", "logs/empty"]
    other_names = ["checkpoints/000001/step-1.pt", "logs/.temp", "logs/ä b\n", "logs/-n", "result.json"]
    for name in [*synced_names, *other_names]:
        (shared / name).parent.mkdir(parents=True, exist_ok=True)
        (shared / name).write_bytes(b"" if name == "logs/empty" else os.urandom(100))
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim/rank-0.log").write_bytes(b"mine")  # another user of the shared folder may have placed the links
    (shared / "logs/link.log").symlink_to(tmp_path / "victim/rank-0.log")
    (shared / "ids").symlink_to(tmp_path / "victim")
    for _ in range(2):
        pull_logs(shared, run_folder)
        assert copied_files(run_folder) == {name: (shared / name).read_bytes() for name in synced_names}


def test_pull_logs_goes_on_beside_a_file_that_was_a_folder_before(shared: Path, run_folder: Path) -> None:
    (shared / "logs/a").mkdir(parents=True)
    append(shared / "logs/a/rank-0.log", b"1")
    append(shared / "logs/b", b"1")
    pull_logs(shared, run_folder)
    shutil.rmtree(shared / "logs")
    (shared / "logs/b").mkdir(parents=True)
    append(shared / "logs/a", b"12")
    append(shared / "logs/b/rank-0.log", b"12")
    append(shared / "logs/c", b"12")
    pull_logs(shared, run_folder)
    assert (run_folder / "logs/c").read_bytes() == b"12"
    assert (run_folder / "logs/a/rank-0.log").read_bytes() == (run_folder / "logs/b").read_bytes() == b"1"


def test_pull_logs_concurrent_processes_copy_each_line_once(
    shared: Path, run_folder: Path, run_in_processes: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [b"line %d\n" % number for number in range(10_000)]

    def slow_view(data: bytes) -> memoryview:
        time.sleep(0.002)  # between the look at the file's size and the write
        return memoryview(data)

    monkeypatch.setattr(untrusted, "memoryview", slow_view, raising=False)

    def write_or_pull(number: int) -> None:
        if number == 0:
            for line in lines:
                append(shared / "logs/a", line)
            return (shared / "over").touch()
        while not (shared / "over").exists():
            pull_logs(shared, run_folder)
        pull_logs(shared, run_folder)

    run_in_processes(4, write_or_pull)
    assert (run_folder / "logs/a").read_bytes() == b"".join(lines)


@pytest.mark.parametrize("by_shipper", [False, True])
def test_copy_to_a_full_disk_raises_then_continues(
    shared: Path, work_folder: Path, small_disk: Path, by_shipper: bool
) -> None:
    content, path = os.urandom(1_000_000), "logs/000001/rank-0.log"
    (shared / path).parent.mkdir()
    append(work_folder / path, content)
    append(shared / path, content)
    shipper = LogShipper(work_folder, small_disk)
    copy = shipper.ship_new_bytes if by_shipper else lambda: pull_logs(shared, small_disk)
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            copy()
        assert content.startswith((small_disk / path).read_bytes())
    enlarge(small_disk, 8)
    copy()
    assert (small_disk / path).read_bytes() == content


def test_pull_logs_keeps_some_of_the_disk_free(shared: Path, run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = untrusted.FREE_DISK_BYTES + 10
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=10**13, free=free))
    append(shared / "logs/a", b"few bytes")
    pull_logs(shared, run_folder)
    append(shared / "logs/a", 11 * b"x")
    with pytest.raises(OSError, match="No space left"):
        pull_logs(shared, run_folder)
    assert (run_folder / "logs/a").read_bytes() == b"few bytes"


def test_log_shipper_goes_on_beside_a_file_that_it_cannot_ship(work_folder: Path, shared: Path) -> None:
    """A script has put a file where a folder was."""
    (work_folder / "events").mkdir()
    append(work_folder / "events/run", b"1")
    (shared / "events/run").mkdir(parents=True)
    append(work_folder / "logs/000001/rank-0.log", b"2")
    with pytest.raises(OSError, match="events/run"):
        LogShipper(work_folder, shared).ship_new_bytes()
    assert (shared / "logs/000001/rank-0.log").read_bytes() == b"2"


def test_log_shipper_replaced_by_another_ships_each_byte_of_synced_folders_once(
    work_folder: Path, shared: Path
) -> None:
    rng, shipper = random.Random(0), LogShipper(work_folder, shared)
    synced_names = ("logs/000001/rank-0.log", "metrics/000001.jsonl", "events/e.1", "ids/000001-rank-0.jsonl")
    for _ in range(60):
        for name in (*synced_names, "progress.json", "000001/ask", "logs/.temp"):
            (work_folder / name).parent.mkdir(parents=True, exist_ok=True)
            append(work_folder / name, rng.randbytes(rng.choice([0, 1, 100, 5000])))
        shipper = rng.choice([shipper, LogShipper(work_folder, shared)])  # that of a new agent knows no offsets
        shipper.ship_new_bytes()
        assert copied_files(shared) == {name: (work_folder / name).read_bytes() for name in synced_names}
    assert not (shared / "logs/.temp").exists()


def test_copy_holds_a_part_in_memory_and_ends_at_the_largest_size(
    work_folder: Path, shared: Path, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, path = os.urandom(1 << 22), "logs/000001/rank-0.log"
    append(work_folder / path, content)
    monkeypatch.setattr(log_sync, "PART_BYTES", 1 << 16)
    monkeypatch.setattr(log_sync, "MAX_FILE_BYTES", 1 << 21)
    tracemalloc.start()
    LogShipper(work_folder, shared).ship_new_bytes()
    pull_logs(shared, run_folder)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1 << 20
    assert (shared / path).read_bytes() == content and (run_folder / path).read_bytes() == content[: 1 << 21]
