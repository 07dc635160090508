"""Facts about this machine: memory, network counters, mounts, GPUs, time, processor and software. Imports no torch.

The trainer, the agent and the probe of a new machine read these through here. Sources: proc(5), and
`nvidia-smi --help-query-gpu`. `root` is the folder that stands for / in tests. 1 GB is 1e9 bytes.
"""

import contextlib
import math
import os
import platform
import re
import subprocess
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .files import PROJECT_ROOT

RECORDED_PACKAGES = ("imgnet-cluster", "torch", "numpy", "simplejpeg", "pillow")
GIT_TIMEOUT_SECONDS = 20
KIB = 1024  # bytes; /proc/meminfo says kB and means KiB
LOOPBACK = "lo"
JUMP_SECONDS = 2.0  # by which the wall clock must be set at once to count as a jump
CLOCK_OFFSET_VARIABLE = "IMGNET_CLOCK_OFFSET"  # set by the agent, so that its trainers have the same clock
ROOT_VARIABLE = "IMGNET_HOST_ROOT"  # the folder that stands for / on a machine of the simulated cloud


@dataclass(frozen=True)
class Memory:
    """The memory of a machine in GB: all of it, and what the kernel can still give to processes."""

    total_gb: float
    available_gb: float


def read_memory(root: Path = Path("/")) -> Memory | None:
    """Return the memory of this machine, None where the kernel does not say it."""
    with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
        lines = (root / "proc/meminfo").read_text().splitlines()
        kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines[:5])}
        return Memory(kib["MemTotal"] * KIB / 1e9, kib["MemAvailable"] * KIB / 1e9)
    return None


def read_interface_bytes(root: Path = Path("/")) -> dict[str, tuple[int, int]]:
    """Return the bytes received and sent since boot by every network interface but the loopback."""
    counts = {}
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (root / "proc/net/dev").read_text().splitlines()[2:]:
            name, _, rest = line.partition(":")
            numbers = rest.split()
            if name.strip() != LOOPBACK:
                counts[name.strip()] = int(numbers[0]), int(numbers[8])
    return counts


@dataclass(frozen=True)
class NfsCounters:
    """What the NFS client has exchanged with the server of one mount since it was mounted.

    The bytes are those of files. `metadata_reads` and `metadata_writes` are all other requests about files.
    """

    read_bytes: int
    reads: int
    written_bytes: int
    writes: int
    metadata_reads: int
    metadata_writes: int
    max_read_bytes: int  # of one request
    max_write_bytes: int


# Requests of NFS 4.1 by their names in mountstats: about files, but without their bytes.
NFS_METADATA_READS = ("OPEN", "OPEN_NOATTR", "CLOSE", "ACCESS", "GETATTR", "LOOKUP", "READLINK", "READDIR")
NFS_METADATA_WRITES = ("SETATTR", "CREATE", "REMOVE", "RENAME", "LINK", "SYMLINK")
NFS_DEFAULT_REQUEST_BYTES = 1 << 20


def read_nfs_counters(folder: Path, root: Path = Path("/")) -> NfsCounters | None:
    """Return the counters of the NFS mount that holds a folder, None when no such mount does.

    Of /proc/self/mountstats (fs/nfs/super.c, net/sunrpc/stats.c; version 1.1): the fifth and sixth number of "bytes:"
    are read from and written to the server, the first of each operation, as "READ: 5 5 0 ...", counts its requests.
    """
    with contextlib.suppress(OSError, ValueError, LookupError):
        lines = _mount_lines((root / "proc/self/mountstats").read_text(), folder)
        options = dict(option.partition("=")[::2] for option in lines.get("opts", "").split(","))
        numbers = lines["bytes"].split()

        def count(*operations: str) -> int:
            return sum(int(lines[operation].split()[0]) for operation in operations if operation in lines)

        return NfsCounters(
            read_bytes=int(numbers[4]),
            reads=count("READ"),
            written_bytes=int(numbers[5]),
            writes=count("WRITE"),
            metadata_reads=count(*NFS_METADATA_READS),
            metadata_writes=count(*NFS_METADATA_WRITES),
            max_read_bytes=int(options.get("rsize", NFS_DEFAULT_REQUEST_BYTES)),
            max_write_bytes=int(options.get("wsize", NFS_DEFAULT_REQUEST_BYTES)),
        )
    return None


def _mount_lines(mountstats: str, folder: Path) -> dict[str, str]:
    """Return the lines about the NFS mount that holds a folder, by their names; {} when no such mount does."""
    mount_lines, mount_point = list[str](), ""
    for section in f"\n{mountstats}".split("\ndevice ")[1:]:
        head, *lines = section.splitlines()
        point, _, file_system = head.partition(" mounted on ")[2].partition(" with fstype ")
        # Of two mounts at the same point the later one hides the earlier.
        if file_system.startswith("nfs") and folder.is_relative_to(point) and len(point) >= len(mount_point):
            mount_lines, mount_point = lines, point
    return {name.strip(): text.strip() for name, _, text in (line.partition(":") for line in mount_lines)}


NETWORK_FILE_SYSTEMS = frozenset(
    ["nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "glusterfs", "beegfs", "gpfs", "wekafs", "afs", "9p"]
)


@dataclass(frozen=True, kw_only=True)
class Mount:
    """A mounted file system: its type, options, source and mount point. `network`: it is on another machine."""

    type: str = ""
    options: str = ""
    network: bool = False
    source: str = ""
    point: str = ""


def mount_of(path: Path, mountinfo: str = "") -> Mount:
    """Return the mount that holds a path, from the text of /proc/self/mountinfo (its format: proc(5))."""
    mount = Mount()
    for line in (mountinfo or Path("/proc/self/mountinfo").read_text()).splitlines():
        left, _, right = line.partition(" - ")
        mount_fields = left.split()
        point = Path(re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), mount_fields[4]))
        # Of two mounts at the same point the later one hides the earlier.
        if path.is_relative_to(point) and len(str(point)) >= len(mount.point):
            fs_type, source, options = right.split(" ")[:3]
            mount = Mount(
                type=fs_type,
                options=f"{mount_fields[5]},{options}",
                network=fs_type.removeprefix("fuse.") in NETWORK_FILE_SYSTEMS or ":" in source,
                source=source,
                point=str(point),
            )
    return mount


def gpu_query_command(fields: Iterable[str], *options: str) -> list[str]:
    """Return the command with which nvidia-smi prints one line per GPU with these values."""
    return ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", *options]


def gpu_query_cells(line: str) -> list[str]:
    """Return the values in a line that nvidia-smi printed. A value that a GPU does not have is "[N/A]"."""
    return [cell.strip() for cell in line.split(",")]


class SteadyClock:
    """A clock that tells Unix time and never jumps: the wall clock as it was once, and the seconds since.

    Setting the wall clock during a run changes no duration. `offset` is the Unix time of the machine's boot.
    """

    def __init__(self, offset: float | None = None) -> None:
        given = os.environ.get(CLOCK_OFFSET_VARIABLE)
        self.offset = offset if offset is not None else float(given) if given else self.wall_offset()
        self.last_jump = 0.0  # the one that was reported last

    @staticmethod
    def wall_offset() -> float:
        """Return the Unix time of the machine's boot by the wall clock as it is now."""
        return time.time() - seconds_since_boot()

    def time(self) -> float:
        """Return the Unix time in seconds."""
        return self.offset + seconds_since_boot()

    def go_on_from(self, last_boot_id: str, last_offset: float, last_jump: float, last_time: float) -> None:
        """Go on from the last values of an earlier process's clock; after a boot from the wall clock, never back."""
        if last_boot_id and last_boot_id == boot_id():
            self.offset, self.last_jump = last_offset, last_jump
        else:
            self.offset = max(self.offset, last_time - seconds_since_boot())

    def set_time(self, unix_time: float) -> None:
        """Set this clock to a time that is known to be right."""
        self.offset = unix_time - seconds_since_boot()

    def jump(self) -> float:
        """Return by how many seconds the wall clock was set forward since this clock was started."""
        return self.wall_offset() - self.offset

    def new_jump(self) -> float:
        """Return by how many seconds the wall clock was set forward since the last jump; 0 when it was not set."""
        new_jump = self.jump() - self.last_jump
        if abs(new_jump) <= JUMP_SECONDS:
            return 0.0
        self.last_jump += new_jump
        return new_jump


def seconds_since_boot() -> float:
    """Return the seconds since the boot of this machine, including suspended time where the kernel counts it."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def boot_id() -> str:
    """Return the random ID of this machine's last boot, "" where the kernel does not say it."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


steady_clock = SteadyClock()


def unix_time() -> float:
    """Return the Unix time by this process's steady clock."""
    return steady_clock.time()


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that results depend on, "not installed" for a missing one."""
    versions = {"python": platform.python_version()}
    for package in RECORDED_PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def usable_cpu_count(root: Path = Path("/")) -> int:
    """Return the number of processors that this process may use; a container or Slurm may give it few of many.

    It is bounded by the process's affinity, and by the quotas of its control groups (`docker run --cpus 2`).
    """
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([count, *(math.ceil(quota) for quota in _cpu_quotas(root))]))


def _cpu_quotas(root: Path) -> Iterator[float]:
    """Yield how many processors each limited control group of this process may use (versions 1 and 2)."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        folder = top / group.strip("/")  # a container may see only its own group, at the top
        for place in (folder, *folder.parents):
            if not place.is_relative_to(top):
                break
            with contextlib.suppress(OSError, ValueError):
                if controllers:
                    quota, period = (int((place / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
                else:
                    quota, period = map(int, (place / "cpu.max").read_text().split())
                if quota > 0:
                    yield quota / period


def threads_per_process(processes: int) -> int:
    """Return the CPU threads of each of the trainers on this machine: OMP_NUM_THREADS, by default an equal share."""
    text = os.environ.get("OMP_NUM_THREADS", "")
    return int(text) if text.isdecimal() and int(text) else max(1, usable_cpu_count() // processes)


def cpu_model() -> str:
    """Return the model name of this machine's processors, "" where /proc/cpuinfo does not say it."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return ""


def git_commit(folder: Path = PROJECT_ROOT) -> str | None:
    """Return the commit of a working tree, with "+changes" when files differ from it or are new; None outside git."""
    if not (folder / ".git").exists():  # installed, perhaps within a repository of the user
        return None

    def git(*arguments: str) -> str:
        argv = ["git", "-C", str(folder), *arguments]
        completed = subprocess.run(argv, capture_output=True, timeout=GIT_TIMEOUT_SECONDS)
        return os.fsdecode(completed.stdout).strip() if completed.returncode == 0 else ""

    try:
        commit = git("rev-parse", "HEAD")
        return commit + ("+changes" if git("status", "--porcelain", "-unormal") else "") if commit else None
    except (OSError, subprocess.TimeoutExpired):
        return None
