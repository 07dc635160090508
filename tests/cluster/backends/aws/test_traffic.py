"""The traffic of a rented job: the last count of each boot of each machine, over replacements and supervisors."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from cluster.backends.aws.renting import traffic
from cluster.backends.aws.renting.traffic import TRAFFIC_FILE, TrafficCount, TrafficLog, read_traffic
from cluster.state.heartbeats import MachineStatus, parse_status
from infra.costs import NO_TRAFFIC, Traffic
from train.tools.records import DamagedRecord, encode
from train.tools.text_files import to_json_bytes

GIB = 1 << 30


def status(machine: str, boot: str, written: int) -> MachineStatus:
    moved = Traffic(shared_written_bytes=written)
    return MachineStatus(id=f"{machine}.a", address=f"10.0.0.{machine}", boot_id=boot, traffic=moved)


def test_counts_of_a_replaced_machine_stay(tmp_path: Path) -> None:
    log = TrafficLog(tmp_path)
    log.update([status("1", "first", 5), status("2", "other", 7)], 0, 100.0)
    log.update([status("1", "first", 9), status("2", "other", 7)], 0, 110.0)
    log.update([status("1", "second", 2), status("2", "other", 8)], 0, 120.0)
    assert read_traffic(tmp_path).until(200.0) == Traffic(shared_written_bytes=9 + 2 + 8)
    log.update([status("1", "second", 1), MachineStatus(id="2.b")], 0, 130.0)
    assert read_traffic(tmp_path).until(200.0).shared_written_bytes == 19, "a count only grows"


def test_next_supervisor_goes_on_and_adds_what_comes_home_to_it(tmp_path: Path) -> None:
    TrafficLog(tmp_path).update([status("1", "a", 4)], 1000, 100.0)
    TrafficLog(tmp_path).update([status("1", "a", 7)], 250, 120.0)
    assert read_traffic(tmp_path).until(120.0) == Traffic(shared_written_bytes=7, home_bytes=1250)


def test_gateways_count_the_internet_where_they_have_more_than_the_machines_until_training(tmp_path: Path) -> None:
    log = TrafficLog(tmp_path)
    machine = MachineStatus(id="1.a", address="10.0.0.1", boot_id="a", traffic=Traffic(internet_bytes=5))
    log.update([machine], 0, 100.0, {"nat-1": 3})
    assert read_traffic(tmp_path).until(100.0).internet_bytes == 5, "the metrics come late"
    log.update([machine], 0, 200.0, {"nat-1": 7, "nat-2": 2})
    assert read_traffic(tmp_path).until(200.0).internet_bytes == 9


def test_traffic_of_an_earlier_moment_is_a_share() -> None:
    count = TrafficCount(first=100.0, last=200.0, traffic=Traffic(shared_read_bytes=GIB))
    shares = {moment: count.until(moment).shared_read_bytes / GIB for moment in (0.0, 100.0, 125.0, 200.0, 1e9)}
    assert shares == {0.0: 0, 100.0: 0, 125.0: 0.25, 200.0: 1, 1e9: 1}
    at_once = replace(count, first=200.0)
    assert at_once.until(199.0) == NO_TRAFFIC and at_once.until(200.0) == count.traffic


def test_machine_that_invents_boots_does_not_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "MAX_COUNTS", 3)
    log = TrafficLog(tmp_path)
    for boot in range(9):
        log.update([status("1", str(boot), 1)], 0, 100.0)
    assert len(read_traffic(tmp_path).counts) == 3


def test_damaged_traffic_is_named_and_negative_one_is_damage(tmp_path: Path) -> None:
    (tmp_path / TRAFFIC_FILE).write_text("{")
    with pytest.raises(DamagedRecord, match=TRAFFIC_FILE):
        read_traffic(tmp_path)
    text = to_json_bytes(encode(status("1", "a", 5)))
    assert parse_status(text) and parse_status(text.replace(b'bytes": 5', b'bytes": -5')) is None


def test_counts_are_written_once_the_disk_has_room_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = TrafficLog(tmp_path)
    with monkeypatch.context() as full_disk, pytest.raises(OSError, match="no space"):
        full_disk.setattr(traffic, "write_atomic", Mock(side_effect=OSError("no space")))
        log.update([status("1", "a", 5)], 0, 100.0)
    log.update([status("1", "a", 5)], 0, 110.0)
    assert read_traffic(tmp_path).until(200.0).shared_written_bytes == 5
    (tmp_path / TRAFFIC_FILE).unlink()
    log.update([status("1", "a", 5)], 0, 120.0)
    assert not (tmp_path / TRAFFIC_FILE).exists(), "nothing new"
