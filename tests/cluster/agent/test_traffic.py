"""TrafficMeter: what a machine moves, by the counters of a made-up kernel."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
from support.simcloud.traffic import Moved, write_proc

from cluster.agent import traffic
from cluster.agent.traffic import METADATA_BYTES, MIN_DATA_BYTES, TrafficMeter, bound_metered_bytes
from cluster.state.heartbeats import MachineStatus
from infra.costs import Traffic
from train.tools import host

ADDRESS = "10.0.0.7"
MOUNT = Path("/mnt/efs")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(host.ROOT_VARIABLE, str(tmp_path))
    write_proc(tmp_path, MOUNT, Moved())
    return tmp_path


def metered(size: int) -> int:
    """What EFS meters of one request about file data (re:Post): 1 KiB steps from 32 KiB on."""
    return max(32 * host.KIB, -(-size // host.KIB) * host.KIB)


def test_bound_is_never_below_what_is_metered_and_exact_for_large_files() -> None:
    numbers = random.Random(7)
    for _ in range(300):
        sizes = [int(numbers.choice([1, 500, 40_000, 1 << 20]) * numbers.random()) for _ in range(numbers.randrange(9))]
        bound = bound_metered_bytes(sum(sizes), len(sizes), 1 << 20)
        assert sum(map(metered, sizes)) <= bound <= sum(sizes) + len(sizes) * MIN_DATA_BYTES
    full_requests = [1 << 20] * 200
    assert bound_metered_bytes(sum(full_requests), 200, 1 << 20) == sum(map(metered, full_requests))
    assert bound_metered_bytes(200, 100, 1 << 20) == pytest.approx(100 * metered(2), rel=1e-3), "heartbeats"


def test_meter_counts_the_shared_folder_and_its_metadata(root: Path) -> None:
    meter = TrafficMeter(MOUNT / "job-1", ADDRESS, None)
    assert meter.read() == Traffic()
    write_proc(root, MOUNT, Moved(efs_read=3 << 20, efs_written=5 << 20))
    assert meter.read() == Traffic(shared_read_bytes=3 << 20, shared_written_bytes=5 << 20)
    with (root / "proc/self/mountstats").open("a") as file:
        file.write("\t      LOOKUP: 10 10 0 0 0 0 0 0 0\n\t      RENAME: 2 2 0 0 0 0 0 0 0\n")
    moved = meter.read()
    assert moved.shared_read_bytes == (3 << 20) + 10 * METADATA_BYTES
    assert moved.shared_written_bytes == (5 << 20) + 2 * METADATA_BYTES
    assert TrafficMeter(root, ADDRESS, None).read() == Traffic(), "a folder that is no NFS mount"


def test_meter_measures_the_folder_of_the_job_once_in_a_while(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "job-1").mkdir()
    write_proc(root, root, Moved())
    files = [root / "job-1" / name for name in ("a", "b")]
    files[0].write_bytes(bytes(1000))
    meter = TrafficMeter(root / "job-1", ADDRESS, None)
    assert meter.read().stored_bytes == 1000
    files[1].write_bytes(bytes(500))
    assert meter.read().stored_bytes == 1000, "each look is metered"
    monkeypatch.setattr(traffic, "MEASURE_SECONDS", 0.0)
    assert meter.read().stored_bytes == 1500
    files[0].unlink()
    both = meter.read() + replace(meter.read(), stored_bytes=700)
    assert both.stored_bytes == 1500, "the most that there was, in one folder that all machines see"


def test_internet_counts_until_training_and_without_the_shared_folder(root: Path) -> None:
    meter = TrafficMeter(MOUNT, ADDRESS, None)
    write_proc(root, MOUNT, Moved(internet=700, efs_read=1 << 20, efs_written=2 << 20))
    assert meter.read().internet_bytes == 0
    meter.count_internet()
    assert meter.read().internet_bytes == 700
    write_proc(root, MOUNT, Moved(internet=10**12))  # what the trainers send each other
    meter.count_internet()
    assert meter.read().internet_bytes == 700
    meter.count_object_reads(12)
    meter.count_object_reads(99)
    assert meter.read().object_reads == 12


def test_restarted_agent_continues_the_count_of_its_machine_only(root: Path) -> None:
    write_proc(root, MOUNT, Moved(internet=5000, efs_read=1 << 20))
    earlier = Traffic(internet_bytes=700, object_reads=3, shared_read_bytes=9)
    previous = MachineStatus(id="0.a", address=ADDRESS, boot_id=host.boot_id(), traffic=earlier)
    restarted = TrafficMeter(MOUNT, ADDRESS, previous)
    restarted.count_internet()
    assert restarted.read() == replace(earlier, shared_read_bytes=1 << 20)
    for stranger in (replace(previous, address="10.0.0.8"), replace(previous, boot_id="other"), None):
        meter = TrafficMeter(MOUNT, ADDRESS, stranger)
        meter.count_internet()
        assert meter.read().internet_bytes == 5000
