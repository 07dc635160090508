"""This machine: its memory, network counters and processors, with made-up /proc folders; its clock."""

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from train.tools import host
from train.tools.host import SteadyClock


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_git_commit_says_whether_files_are_missing_in_it(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=me", "-c", "user.email=me@localhost"]
        subprocess.run(["git", *identity, "-C", str(tmp_path), *arguments], check=True, capture_output=True)

    assert host.git_commit(tmp_path) is None
    git("init")
    write(tmp_path, "recipe.py", "1")
    git("add", "recipe.py")
    git("commit", "--message", "one")
    commit = host.git_commit(tmp_path)
    assert commit and len(commit) == 40
    write(tmp_path, "nets.py", "1")
    assert host.git_commit(tmp_path) == f"{commit}+changes", "a new file"
    write(tmp_path, ".git/info/exclude", "nets.py")
    assert host.git_commit(tmp_path) == commit, "an ignored file"
    write(tmp_path, "recipe.py", "2")
    assert host.git_commit(tmp_path) == f"{commit}+changes", "a changed file"


MEMORY = "MemTotal: 2000000 kB\nMemFree: 10 kB\nMemAvailable: 500000 kB\nBuffers: 1 kB\n"


@pytest.mark.parametrize(("text", "memory"), [
    (MEMORY, host.Memory(total_gb=2.048, available_gb=0.512)),
    (None, None), ("", None), ("MemTotal: many kB\n", None), ("MemTotal: 2000000 kB\nMemFree: 10 kB\n", None),
])  # fmt: skip
def test_read_memory_counts_kib_and_is_none_where_it_is_unknown(
    text: str | None, memory: host.Memory | None, tmp_path: Path
) -> None:
    if text is not None:
        write(tmp_path, "proc/meminfo", text)
    assert host.read_memory(tmp_path) == memory


# As Linux 6.1 prints it for a mount of EFS's helper, shortened where nothing is read.
MOUNTSTATS = """\
device proc mounted on /proc with fstype proc
device 127.0.0.1:/ mounted on /mnt/efs with fstype nfs4 statvers=1.1
\topts:\trw,vers=4.1,rsize=1048576,wsize=524288,namlen=255,acregmin=3,hard,noresvport,proto=tcp,port=20049
\tevents:\t10 20 0 0 5 3 17 0 0 2 0 0 0 0 0 0 0 2 0 0 0 0 0 0 0 0 0
\tbytes:\t7000 9000 0 0 5000 8000 2 3
\tper-op statistics
\t        NULL: 1 1 0 44 24 0 0 0 0
\t        READ: 5 5 0 1100 5600 1 9 11 0
\t       WRITE: 8 9 0 9900 1100 1 22 25 0
\t      COMMIT: 3 3 0 600 400 0 5 6 0
\t        OPEN: 20 20 0 6000 7000 0 30 33 2
\t     GETATTR: 30 30 0 6000 7200 0 30 33 0
\t      RENAME: 4 4 0 1200 600 0 8 9 0
\t    SEQUENCE: 99 99 0 1200 600 0 8 9 0
device 127.0.0.1:/data mounted on /mnt/efs/data with fstype nfs4 statvers=1.1
\tbytes:\t0 0 0 0 1 2 0 0
"""


def test_read_nfs_counters_of_the_mount_that_holds_a_folder(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/mountstats", MOUNTSTATS)
    counters = host.read_nfs_counters(Path("/mnt/efs/jobs/job-1"), tmp_path)
    assert counters == host.NfsCounters(
        read_bytes=5000, reads=5, written_bytes=8000, writes=8, metadata_reads=50, metadata_writes=4,
        max_read_bytes=1 << 20, max_write_bytes=1 << 19,
    )  # fmt: skip
    inner = host.read_nfs_counters(Path("/mnt/efs/data/x"), tmp_path)
    assert inner and (inner.read_bytes, inner.written_bytes, inner.reads) == (1, 2, 0)
    assert inner.max_read_bytes == host.NFS_DEFAULT_REQUEST_BYTES, "the mount does not say it"
    for folder in ("/mnt", "/proc/self", "/mnt/efs-other"):
        assert host.read_nfs_counters(Path(folder), tmp_path) is None


@pytest.mark.parametrize("groups, quotas, count", [
    pytest.param("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "150000 100000"}, 2, id="parent"),
    pytest.param("0::/elsewhere\n", {"cpu.max": "50000 100000"}, 1, id="namespace"),
    pytest.param("4:memory:/x\n3:cpu,cpuacct:/x\n0::/\n",
                 {"cpu/x/cpu.cfs_quota_us": "300000", "cpu/x/cpu.cfs_period_us": "100000"}, 3, id="version 1"),
    pytest.param("3:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8, id="unlimited"),
    pytest.param("0::/\n", {"cpu.max": "damaged"}, 8, id="damaged"),
    pytest.param("", {}, 8, id="none"),
])  # fmt: skip
def test_usable_cpus_are_bounded_by_the_quota_of_a_container(
    groups: str, quotas: dict[str, str], count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    write(tmp_path, "proc/self/cgroup", groups)
    for name, text in quotas.items():
        write(tmp_path, f"sys/fs/cgroup/{name}", text)
    assert host.usable_cpu_count(tmp_path) == count


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The wall clock and the seconds since boot, both to be set by hand."""
    values = {"wall": 1000.0, "boot": 50.0}
    monkeypatch.setattr(time, "time", lambda: values["wall"])
    monkeypatch.setattr(host, "seconds_since_boot", lambda: values["boot"])
    monkeypatch.delenv(host.CLOCK_OFFSET_VARIABLE, raising=False)
    return values


@pytest.mark.parametrize("jump", [-7200.0, 7200.0])
def test_steady_clock_ignores_jumps_of_the_wall_clock(clocks: Any, jump: float) -> None:
    clock = SteadyClock()
    assert (clock.time(), clock.jump()) == (1000.0, 0.0)
    clocks["wall"] += 5 + jump
    clocks["boot"] += 5
    assert (clock.time(), clock.jump()) == (1005.0, jump)


def test_steady_clock_of_a_trainer_is_that_of_its_agent(clocks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    agent_clock = SteadyClock()
    clocks["wall"] -= 7200
    monkeypatch.setenv(host.CLOCK_OFFSET_VARIABLE, repr(agent_clock.offset))
    assert SteadyClock().time() == agent_clock.time() == 1000.0
