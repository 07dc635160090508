"""Files on their way home: each byte once, whoever follows, however often, and whatever kills it."""

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.connectors.local import Connector
from cluster.connectors.log_sync import LogShipper, pull_logs

Fixture = Any


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """The shared folder, with one log."""
    (tmp_path / "there/logs").mkdir(parents=True)
    return tmp_path / "there"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def grow(path: Path, content: bytes) -> None:
    with path.open("ab") as file:
        file.write(content)


def test_events_metrics_and_logs_come_home_and_nothing_else(there: Path, home: Path) -> None:
    wanted = [
        "events/events.out.tfevents.1",
        "metrics/000001.jsonl",
        "logs/000001/rank-0.log",
        "logs/empty",
        "logs/ä b\n",
    ]
    for name in [*wanted, "checkpoints/000001/step-1.pt", "logs/.temp", "result.json"]:
        (there / name).parent.mkdir(parents=True, exist_ok=True)
        (there / name).write_bytes(b"" if name == "logs/empty" else os.urandom(100))
    assert pull_logs(Connector(), str(there), home) == 400
    found = {str(one.relative_to(home)) for one in home.rglob("*") if one.is_file() and one.name[0] != "."}
    assert found == set(wanted)
    assert all((home / name).read_bytes() == (there / name).read_bytes() for name in wanted)
    assert pull_logs(Connector(), str(there), home) == 0


def test_before_anything_was_written_nothing_comes_home(there: Path, home: Path) -> None:
    assert pull_logs(Connector(), str(there / "not there"), home) == 0


@pytest.mark.parametrize("seed", range(5))
def test_a_growing_file_is_brought_byte_by_byte_over_any_number_of_restarts(there: Path, home: Path, seed: int) -> None:
    rng, brought = random.Random(seed), 0
    for _ in range(50):
        grow(there / "logs/a", rng.randbytes(rng.choice([0, 1, 100, 5000])))
        brought += sum(pull_logs(Connector(), str(there), home) for _ in range(rng.randint(0, 2)))
    brought += pull_logs(Connector(), str(there), home)
    assert (home / "logs/a").read_bytes() == (there / "logs/a").read_bytes()
    assert brought == (there / "logs/a").stat().st_size


class Growing(Connector):
    """A machine on which a file grows just when it is read, and gives a little at a time."""

    def read_from(self, path: str, offset: int, limit: int = 7) -> bytes:
        grow(Path(path), b"more ")
        return super().read_from(path, offset, limit)


def test_what_is_written_while_it_is_read_is_neither_lost_nor_brought_twice(there: Path, home: Path) -> None:
    grow(there / "logs/a", b"0123456789" * 10)
    assert pull_logs(Growing(), str(there), home) >= 100
    pull_logs(Connector(), str(there), home)
    assert (home / "logs/a").read_bytes() == (there / "logs/a").read_bytes()


def test_several_followers_of_a_file_that_grows_bring_each_line_once(
    there: Path, home: Path, crowd: Callable[..., list[Any]]
) -> None:
    lines = [b"line %d\n" % number for number in range(10_000)]

    def one(number: int) -> int:
        if number == 0:
            for line in lines:
                grow(there / "logs/a", line)
            (there / "over").touch()
            return 0
        brought = 0
        while not (there / "over").exists():
            brought += pull_logs(Connector(), str(there), home)
        return brought + pull_logs(Connector(), str(there), home)

    assert sum(crowd(4, one)) == len(b"".join(lines))
    assert (home / "logs/a").read_bytes() == b"".join(lines)


SLOW = """
import sys, time
from pathlib import Path
from cluster.connectors.log_sync import pull_logs
from cluster.connectors.local import Connector

class Slow(Connector):
    def read_from(self, path, offset, limit=0):
        time.sleep(0.0005)
        return super().read_from(path, offset, 3000)

pull_logs(Slow(), sys.argv[1], Path(sys.argv[2]))
"""


def test_a_follower_killed_in_the_middle_is_gone_on_from(there: Path, home: Path, place: Fixture) -> None:
    grow(there / "logs/a", os.urandom(30_000_000))
    target = home / "logs/a"
    for part in (1, 2, 3):
        one = subprocess.Popen([sys.executable, "-c", SLOW, str(there), str(home)])
        place.wait_for(lambda part=part: target.exists() and target.stat().st_size > part * 100_000)
        one.kill()
        assert one.wait() == -9
        assert target.stat().st_size < 30_000_000
    pull_logs(Connector(), str(there), home)
    assert target.read_bytes() == (there / "logs/a").read_bytes()


def test_a_full_disk_at_home_stops_it_and_room_lets_it_go_on(there: Path, small_disk: Path) -> None:
    content = os.urandom(1_000_000)
    grow(there / "logs/a", content)
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            pull_logs(Connector(), str(there), small_disk)
        assert content.startswith((small_disk / "logs/a").read_bytes())
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    pull_logs(Connector(), str(there), small_disk)
    assert (small_disk / "logs/a").read_bytes() == content


# --- from a machine's own disk to the shared folder -----------------------------------------------------------------


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A machine's work folder, with one log."""
    (tmp_path / "work/logs/000001").mkdir(parents=True)
    return tmp_path / "work"


def test_a_courier_brings_what_trainers_write_and_nothing_else(work: Path, there: Path) -> None:
    grow(work / "logs/000001/rank-0.log", b"one\n")
    for name in ("metrics/000001.jsonl", "events/e.1", "ids/000001-rank-0.jsonl", "progress.json", "000001/ask"):
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        grow(work / name, b"12345")
    courier = LogShipper(work, there)
    assert courier.ship_new_bytes() == 4 + 15 and courier.ship_new_bytes() == 0
    found = {str(one.relative_to(there)) for one in there.rglob("*") if one.is_file()}
    assert found == {"logs/000001/rank-0.log", "metrics/000001.jsonl", "events/e.1", "ids/000001-rank-0.jsonl"}
    grow(work / "logs/000001/rank-0.log", b"two\n")
    assert courier.ship_new_bytes() == 4 and (there / "logs/000001/rank-0.log").read_bytes() == b"one\ntwo\n"


@pytest.mark.parametrize("seed", range(3))
def test_each_byte_is_brought_once_whoever_is_the_courier(work: Path, there: Path, seed: int) -> None:
    rng, courier = random.Random(seed), LogShipper(work, there)
    for _ in range(60):
        grow(work / "logs/000001/rank-0.log", rng.randbytes(rng.choice([0, 1, 100, 5000])))
        courier = rng.choice([courier, courier, LogShipper(work, there)])  # a new agent knows of nothing
        courier.ship_new_bytes()
    assert (there / "logs/000001/rank-0.log").read_bytes() == (work / "logs/000001/rank-0.log").read_bytes()


def test_two_machines_bring_their_own_files_into_one_folder(tmp_path: Path, there: Path) -> None:
    for rank in (0, 1):
        (tmp_path / f"{rank}/logs/000001").mkdir(parents=True)
        grow(tmp_path / f"{rank}/logs/000001/rank-{rank}.log", b"x" * (rank + 1))
    couriers = [LogShipper(tmp_path / str(rank), there) for rank in (0, 1)]
    assert [one.ship_new_bytes() for one in couriers] == [1, 2] and [one.ship_new_bytes() for one in couriers] == [0, 0]
    assert [(there / f"logs/000001/rank-{rank}.log").stat().st_size for rank in (0, 1)] == [1, 2]


def test_a_write_that_a_full_disk_cut_is_gone_on_from(work: Path, small_disk: Path) -> None:
    content = os.urandom(1_000_000)
    grow(work / "logs/000001/rank-0.log", content)
    target, courier = small_disk / "logs/000001/rank-0.log", LogShipper(work, small_disk)
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            courier.ship_new_bytes()
        assert 0 < target.stat().st_size < 1_000_000 and content.startswith(target.read_bytes())
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    courier.ship_new_bytes()
    assert target.read_bytes() == content
