"""Copying of growing files: each byte once, with several readers, restarts and full disks."""

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.connectors import untrusted
from cluster.connectors.local import Connector
from cluster.connectors.log_sync import LogShipper, pull_logs

Fixture = Any


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """The shared folder, with a folder for logs."""
    (tmp_path / "shared/logs").mkdir(parents=True)
    return tmp_path / "shared"


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    (tmp_path / "run_folder").mkdir()
    return tmp_path / "run_folder"


def append(path: Path, content: bytes) -> None:
    with path.open("ab") as file:
        file.write(content)


def test_pull_logs_copies_synced_folders_only(shared: Path, run_folder: Path) -> None:
    assert pull_logs(Connector(), str(shared / "not there"), run_folder) == 0
    synced_names = ["events/events.out.tfevents.1", "metrics/000001.jsonl", "logs/000001/rank-0.log", "logs/empty"]
    other_names = ["checkpoints/000001/step-1.pt", "logs/.temp", "logs/ä b\n", "logs/-n", "result.json"]
    for name in [*synced_names, *other_names]:
        (shared / name).parent.mkdir(parents=True, exist_ok=True)
        (shared / name).write_bytes(b"" if name == "logs/empty" else os.urandom(100))
    assert pull_logs(Connector(), str(shared), run_folder) == 300
    copied = {str(p.relative_to(run_folder)) for p in run_folder.rglob("*") if p.is_file() and p.name[0] != "."}
    assert copied == set(synced_names)
    assert all((run_folder / name).read_bytes() == (shared / name).read_bytes() for name in synced_names)
    assert pull_logs(Connector(), str(shared), run_folder) == 0


@pytest.mark.parametrize("seed", range(2))
def test_pull_logs_repeated_calls_copy_each_byte_once(shared: Path, run_folder: Path, seed: int) -> None:
    rng, pulled_bytes = random.Random(seed), 0
    for _ in range(50):
        append(shared / "logs/a", rng.randbytes(rng.choice([0, 1, 100, 5000])))
        pulled_bytes += sum(pull_logs(Connector(), str(shared), run_folder) for _ in range(rng.randint(0, 2)))
    pulled_bytes += pull_logs(Connector(), str(shared), run_folder)
    assert (run_folder / "logs/a").read_bytes() == (shared / "logs/a").read_bytes()
    assert pulled_bytes == (shared / "logs/a").stat().st_size


def test_pull_logs_goes_on_beside_a_file_that_was_a_folder_before(shared: Path, run_folder: Path) -> None:
    (shared / "logs/a").mkdir(parents=True)
    append(shared / "logs/a/rank-0.log", b"1")
    append(shared / "logs/b", b"1")
    pull_logs(Connector(), str(shared), run_folder)
    shutil.rmtree(shared / "logs")
    (shared / "logs/b").mkdir(parents=True)
    append(shared / "logs/a", b"12")
    append(shared / "logs/b/rank-0.log", b"12")
    append(shared / "logs/c", b"12")
    pull_logs(Connector(), str(shared), run_folder)
    assert (run_folder / "logs/c").read_bytes() == b"12"
    assert (run_folder / "logs/a/rank-0.log").read_bytes() == (run_folder / "logs/b").read_bytes() == b"1"


def test_pull_logs_concurrent_processes_copy_each_line_once(
    shared: Path, run_folder: Path, run_in_processes: Callable[..., list[Any]]
) -> None:
    lines = [b"line %d\n" % number for number in range(10_000)]

    def write_or_pull(number: int) -> int:
        if number == 0:
            for line in lines:
                append(shared / "logs/a", line)
            (shared / "over").touch()
            return 0
        pulled_bytes = 0
        while not (shared / "over").exists():
            pulled_bytes += pull_logs(Connector(), str(shared), run_folder)
        return pulled_bytes + pull_logs(Connector(), str(shared), run_folder)

    assert sum(run_in_processes(4, write_or_pull)) == len(b"".join(lines))
    assert (run_folder / "logs/a").read_bytes() == b"".join(lines)


SLOW_PULL = """
import sys, time
from pathlib import Path
from cluster.connectors.log_sync import pull_logs
from cluster.connectors.local import Connector

class SlowConnector(Connector):
    def read_from(self, path, offset, limit=0):
        time.sleep(0.0005)
        return super().read_from(path, offset, 3000)

pull_logs(SlowConnector(), sys.argv[1], Path(sys.argv[2]))
"""


def test_pull_logs_continues_after_sigkill(shared: Path, run_folder: Path, sandbox: Fixture) -> None:
    append(shared / "logs/a", os.urandom(30_000_000))
    target = run_folder / "logs/a"
    for part in (1, 2, 3):
        process = subprocess.Popen([sys.executable, "-c", SLOW_PULL, str(shared), str(run_folder)])
        sandbox.wait_for(lambda part=part: target.exists() and target.stat().st_size > part * 100_000)
        process.kill()
        assert process.wait() == -9
        assert target.stat().st_size < 30_000_000
    pull_logs(Connector(), str(shared), run_folder)
    assert target.read_bytes() == (shared / "logs/a").read_bytes()


def test_pull_logs_full_disk_raises_then_continues(shared: Path, small_disk: Path) -> None:
    content = os.urandom(1_000_000)
    append(shared / "logs/a", content)
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            pull_logs(Connector(), str(shared), small_disk)
        assert content.startswith((small_disk / "logs/a").read_bytes())
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    pull_logs(Connector(), str(shared), small_disk)
    assert (small_disk / "logs/a").read_bytes() == content


# --- from a machine's own disk to the shared folder ---------------------------------------------------------------


@pytest.fixture
def work_folder(tmp_path: Path) -> Path:
    """A machine's work folder, with a folder for logs."""
    (tmp_path / "work/logs/000001").mkdir(parents=True)
    return tmp_path / "work"


def test_log_shipper_copies_synced_folders_only(work_folder: Path, shared: Path) -> None:
    append(work_folder / "logs/000001/rank-0.log", b"one\n")
    for name in ("metrics/000001.jsonl", "events/e.1", "ids/000001-rank-0.jsonl", "progress.json", "000001/ask"):
        (work_folder / name).parent.mkdir(parents=True, exist_ok=True)
        append(work_folder / name, b"12345")
    shipper = LogShipper(work_folder, shared)
    assert shipper.ship_new_bytes() == 4 + 15 and shipper.ship_new_bytes() == 0
    copied = {str(path.relative_to(shared)) for path in shared.rglob("*") if path.is_file()}
    assert copied == {"logs/000001/rank-0.log", "metrics/000001.jsonl", "events/e.1", "ids/000001-rank-0.jsonl"}
    append(work_folder / "logs/000001/rank-0.log", b"two\n")
    assert shipper.ship_new_bytes() == 4 and (shared / "logs/000001/rank-0.log").read_bytes() == b"one\ntwo\n"


@pytest.mark.parametrize("seed", range(2))
def test_log_shipper_replaced_by_another_ships_each_byte_once(work_folder: Path, shared: Path, seed: int) -> None:
    rng, shipper = random.Random(seed), LogShipper(work_folder, shared)
    for _ in range(60):
        append(work_folder / "logs/000001/rank-0.log", rng.randbytes(rng.choice([0, 1, 100, 5000])))
        shipper = rng.choice(
            [shipper, shipper, LogShipper(work_folder, shared)]
        )  # as a new agent, which knows no offsets
        shipper.ship_new_bytes()
    assert (shared / "logs/000001/rank-0.log").read_bytes() == (work_folder / "logs/000001/rank-0.log").read_bytes()


def test_log_shipper_full_disk_raises_then_continues(work_folder: Path, small_disk: Path) -> None:
    content = os.urandom(1_000_000)
    append(work_folder / "logs/000001/rank-0.log", content)
    target, shipper = small_disk / "logs/000001/rank-0.log", LogShipper(work_folder, small_disk)
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            shipper.ship_new_bytes()
        assert 0 < target.stat().st_size < 1_000_000 and content.startswith(target.read_bytes())
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    shipper.ship_new_bytes()
    assert target.read_bytes() == content


# --- links that another user of the shared folder has placed -------------------------------------------------------


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A folder of the agent's user, with files whose names the agent writes elsewhere."""
    folder = tmp_path / "victim"
    (folder / "000001").mkdir(parents=True)
    for path in (folder / "rank-0.log", folder / "000001/rank-0.log"):
        path.write_bytes(b"mine")
    return folder


LINKS = {"logs": ".", "logs/000001": ".", "logs/000001/rank-0.log": "rank-0.log"}


@pytest.mark.parametrize("place", LINKS)
def test_log_shipper_writes_through_no_link(work_folder: Path, tmp_path: Path, victim: Path, place: str) -> None:
    append(work_folder / "logs/000001/rank-0.log", b"of the trainer\n")
    shared = tmp_path / "of all"
    link = shared / place
    link.parent.mkdir(parents=True)
    link.symlink_to(victim / LINKS[place])
    shipper = LogShipper(work_folder, shared)
    with pytest.raises(OSError, match="symbolic link or not a regular file; remove it"):
        shipper.ship_new_bytes()
    assert {path.read_bytes() for path in victim.rglob("*.log")} == {b"mine"}
    link.unlink()
    assert shipper.ship_new_bytes() == len(b"of the trainer\n")


@pytest.mark.parametrize("place", ["logs", "logs/000001/rank-0.log"])
def test_pull_logs_copies_nothing_through_links(tmp_path: Path, run_folder: Path, victim: Path, place: str) -> None:
    link = tmp_path / "of all" / place
    link.parent.mkdir(parents=True)
    link.symlink_to(victim / LINKS[place])
    assert pull_logs(Connector(), str(tmp_path / "of all"), run_folder) == 0
    assert not list(run_folder.rglob("*.log"))


def test_pull_logs_keeps_a_part_of_the_disk_free(
    shared: Path, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = untrusted.FREE_DISK_BYTES + 10
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=10**13, free=free))
    append(shared / "logs/a", b"few bytes")
    assert pull_logs(Connector(), str(shared), run_folder) == 9
    append(shared / "logs/a", 11 * b"x")
    with pytest.raises(OSError, match="No space left"):
        pull_logs(Connector(), str(shared), run_folder)
    free += 1
    assert pull_logs(Connector(), str(shared), run_folder) == 11
