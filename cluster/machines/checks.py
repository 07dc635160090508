"""Judges the facts that `cluster.machines.probe` reports: what prevents or hampers a job, one line each. Pure.

1 GB is 1e9 bytes.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Literal

from train.tools.host import Mount

DOCKER_SHM_BYTES = 64 << 20  # Docker's default size of /dev/shm
MAX_CLOCK_SKEW_SECONDS = 30.0
# nfs(5). Without these options a machine may use outdated directory entries for up to a minute.
NFS_OPTIONS = "lookupcache=positive,acregmin=1,acregmax=1,acdirmin=1,acdirmax=1"


@dataclass(frozen=True, kw_only=True)
class WorkFolder:
    """The machine's own work folder."""

    path: str
    writable: bool
    free_gb: float


@dataclass(frozen=True, kw_only=True)
class SharedFolder(Mount):
    """The folder that all machines mount, and its file system. `error` says why it cannot be used.

    `link` says whether hard links can be made, and only once. `fsync_ms` is of a file of 64 KiB.
    """

    path: str = ""
    error: str = ""
    link: bool = False
    fsync_ms: float | None = None


@dataclass(frozen=True, kw_only=True)
class OtherJob:
    """Another job that is at work on the machine: its uid, and the user of its agent."""

    uid: str
    user: str


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """The facts that the probe reports about a machine.

    `time` is its clock. `gpus` are the names of its GPUs. `nvidia` is what is wrong with them: "", "missing", "hangs",
    or nvidia-smi's message. `tmux` is its version. `data_error` says why the folder of the job's images cannot be used.
    """

    time: float
    cpus: int = 0
    memory_gb: float = 0.0
    shm_bytes: int
    python: str = ""
    tmux: str | None
    gpus: tuple[str, ...]
    nvidia: str
    work: WorkFolder
    shared: SharedFolder
    data_error: str = ""
    other_jobs: tuple[OtherJob, ...] = ()


@dataclass(frozen=True)
class Finding:
    """What is wrong with a machine, where, and what to do. An error prevents the job, a warning hampers it."""

    level: Literal["error", "warning"]
    what: str


error, warning = partial(Finding, "error"), partial(Finding, "warning")


def pairs_without_common_folder(seen: Mapping[str, Mapping[str, bool]]) -> list[tuple[str, str]]:
    """Return the pairs of machines of which one does not see the other's marker, by what each has `seen`."""

    def sees(observer: str, owner: str) -> bool:
        return seen[observer].get(owner, False)

    return [(a, b) for a, b in combinations(seen, 2) if not (sees(a, b) and sees(b, a))]


def clock_skew(sent_at: float, received_at: float, machine_time: float) -> tuple[float, float]:
    """Return by how many seconds a machine's clock, read between question and answer, is ahead, and the uncertainty."""
    return machine_time - (sent_at + received_at) / 2, (received_at - sent_at) / 2


def check_clock(offset: float, uncertainty: float) -> list[Finding]:
    """Return a warning if a machine's clock is certainly wrong by more than `MAX_CLOCK_SKEW_SECONDS`."""
    if abs(offset) - uncertainty <= MAX_CLOCK_SKEW_SECONDS:
        return []
    direction = "ahead of" if offset > 0 else "behind"
    message = (
        f"its clock is {abs(offset):.0f} s {direction} that of this computer; set it: sudo timedatectl set-ntp true"
    )
    return [warning(message)]


def find_problems(facts: MachineFacts, required_gpus: int, required_free_gb: float) -> list[Finding]:
    """Return what is wrong with a machine for a job that needs these GPUs and GB (1e9 bytes) of free work space."""
    return [
        *_check_machine(facts),
        *_check_gpus(facts, required_gpus),
        *_check_work_folder(facts.work, required_free_gb),
        *_check_shared_folder(facts.shared),
    ]


def is_broken(facts: MachineFacts, required_gpus: int) -> bool:
    """Whether GPUs that a machine must have do not answer to their driver, which is there: another machine may do.

    Without a driver that works, nvidia-smi is missing or "couldn't communicate": then the machine's image is at fault.
    """
    has_driver = bool(facts.gpus) or facts.nvidia == "hangs" or "No devices were found" in facts.nvidia
    return has_driver and len(facts.gpus) < required_gpus


def _check_machine(facts: MachineFacts) -> Iterator[Finding]:
    if not facts.tmux:
        yield error("tmux is missing; install it: sudo apt-get install tmux")
    if facts.shm_bytes <= DOCKER_SHM_BYTES:
        yield warning(
            f"/dev/shm has only {facts.shm_bytes / 1e6:.0f} MB, and loader workers pass images through it; "
            "enlarge it: sudo mount -o remount,size=8g /dev/shm, or docker run --ipc=host"
        )
    if facts.data_error:
        remedy = "put the images there, or name another folder on the machine: --data DIR"
        yield error(f"{facts.data_error}; {remedy}")
    for user in dict.fromkeys(job.user for job in facts.other_jobs):
        uids = sorted(job.uid for job in facts.other_jobs if job.user == user)
        yield warning(
            f"at work here too, of the user {user}: {', '.join(uids)}; jobs on one machine share processors, GPUs and "
            "memory: wait for the end, stop what is yours, or use other machines"
        )


def describe_age(seconds: float) -> str:
    """Return how long ago something began, such as "3 hours"."""
    unit_seconds, unit = next(
        (size, name) for size, name in ((86_400, "day"), (3600, "hour"), (60, "minute"), (0, "")) if seconds >= 2 * size
    )
    return f"{seconds // unit_seconds:.0f} {unit}s ago" if unit_seconds else "a moment ago"


def _check_gpus(facts: MachineFacts, required_gpus: int) -> Iterator[Finding]:
    gpu_count = len(facts.gpus)
    complaint = facts.nvidia
    quote = f" (nvidia-smi: {complaint})" if complaint else ""
    if gpu_count >= required_gpus:
        return
    if gpu_count:
        yield error(
            f"{gpu_count} of {required_gpus} GPUs visible{quote}; "
            f"look for errors (sudo dmesg | grep -i xid), reboot, or ask for {gpu_count}"
        )
    elif complaint == "missing":
        yield error("no GPU: nvidia-smi is missing; install the NVIDIA driver, or start the container with --gpus all")
    elif complaint == "hangs":
        yield error("no GPU: nvidia-smi does not answer; reboot this machine")
    else:
        yield error(f"no GPU{quote}; install the NVIDIA driver that fits the kernel, or reboot this machine")


def _check_work_folder(work: WorkFolder, required_free_gb: float) -> Iterator[Finding]:
    if not work.writable:
        yield error(
            f"{work.path}: cannot be written; chown it to the user who logs in, or set another `folder` in hosts.toml"
        )
    if work.free_gb < required_free_gb:
        yield error(
            f"{work.path}: {work.free_gb:g} GB free, {required_free_gb:g} GB are needed; free some space, "
            "or set another `folder` in hosts.toml"
        )


def _check_shared_folder(shared: SharedFolder) -> Iterator[Finding]:
    if shared.error:
        yield error(shared.error)
        return
    if not shared.link:
        yield error(
            f"{shared.path}: no hard links on {shared.type}, and attempt files need them; use NFS, EFS or another disk"
        )
    if shared.type.startswith("nfs") and not is_mount_fresh(shared.options):
        version = re.search(r"\bvers=[\d.]+", shared.options)
        options = ",".join(filter(None, [version and version[0], "hard,timeo=600,retrans=2", NFS_OPTIONS]))
        remount = f"sudo umount {shared.point} && sudo mount -t nfs -o {options} {shared.source} {shared.point}"
        yield warning(f"{shared.path}: NFS shows new files up to a minute late; mount it with other options: {remount}")


def is_mount_fresh(mount_options: str) -> bool:
    """Whether an NFS mount with these options (/proc/self/mountinfo) shows other machines' writes within a second."""
    options = dict(option.partition("=")[::2] for option in mount_options.split(","))
    options = {**dict.fromkeys(("acregmax", "acdirmax"), options.get("actimeo", "60")), **options}
    has_short_cache = all(float(options[name]) <= 1 for name in ("acregmax", "acdirmax"))
    return "noac" in options or (options.get("lookupcache") in ("pos", "positive", "none") and has_short_cache)
