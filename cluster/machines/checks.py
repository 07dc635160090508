"""What a machine's answers to `cluster.machines.probe` mean: what stands in a job's way, in one line each. Pure functions.

A finding is {"level": "error" or "warning", "what": what is wrong, where, and what to do}.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

DOCKER_SHM_BYTES = 64 << 20  # what Docker gives
MAX_CLOCK_SKEW_SECONDS = 30.0
# nfs(5); without them a machine may look for a minute at what was.
NFS_OPTIONS = "lookupcache=positive,acregmin=1,acregmax=1,acdirmin=1,acdirmax=1"
Finding = dict[str, str]


def pairs_without_common_folder(answers: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return the pairs of machines that do not see each other's file, from the answers to --expect by machine."""

    def sees(one: str, other: str) -> bool:
        return bool(answers[one].get("shared", {}).get("seen", {}).get(other))

    return [(a, b) for a, b in combinations(answers, 2) if not (sees(a, b) and sees(b, a))]


def clock_skew(sent_at: float, received_at: float, machine_time: float) -> tuple[float, float]:
    """Return how far a machine's clock is ahead of ours, and how unsure that is, in seconds."""
    return machine_time - (sent_at + received_at) / 2, (received_at - sent_at) / 2


def check_clock(offset: float, uncertainty: float) -> list[Finding]:
    """Return what is to say about a machine's clock: only what is wrong for sure, by half a minute."""
    if abs(offset) - uncertainty <= MAX_CLOCK_SKEW_SECONDS:
        return []
    word = "ahead of" if offset > 0 else "behind"
    what = f"its clock is {abs(offset):.0f} s {word} ours; set it: sudo timedatectl set-ntp true"
    return [{"level": "warning", "what": what}]


def find_problems(facts: Mapping[str, Any], required_gpus: int, required_free_gb: float) -> list[Finding]:
    """Return what stands in the way of a job that wants so many GPUs and so much free space in the work folder."""
    found = [
        *_check_machine(facts),
        *_check_gpus(facts, required_gpus),
        *_check_work_folder(facts, required_free_gb),
        *_check_shared_folder(facts["shared"]),
    ]
    return [{"level": level, "what": what} for level, what in found]


def _check_machine(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if not facts["tmux"]:
        yield "error", "tmux is missing; install it: sudo apt-get install tmux"
    if facts["shm_bytes"] <= DOCKER_SHM_BYTES:
        has = f"/dev/shm has {facts['shm_bytes'] / 1e6:.0f} MB and loader workers hand images over in it"
        yield "warning", f"{has}; sudo mount -o remount,size=8g /dev/shm, or docker run --ipc=host"


def _check_gpus(facts: Mapping[str, Any], required_gpus: int) -> Iterator[tuple[str, str]]:
    count, said = len(facts["gpus"]), facts["nvidia"]
    words = f" (nvidia-smi: {said})" if said else ""
    if count >= required_gpus:
        return
    if count:
        yield (
            "error",
            f"{count} of {required_gpus} GPUs visible{words}; sudo dmesg | grep -i xid, reboot, or ask for {count}",
        )
    elif said == "missing":
        yield "error", "no GPU: nvidia-smi is missing; install the NVIDIA driver, or docker run --gpus all"
    elif said == "hangs":
        yield "error", "no GPU: nvidia-smi does not answer; reboot this machine"
    else:
        yield "error", f"no GPU{words}; install the NVIDIA driver that fits the kernel, or reboot this machine"


def _check_work_folder(facts: Mapping[str, Any], required_free_gb: float) -> Iterator[tuple[str, str]]:
    path, free = facts["work"]["path"], facts["free_gb"]["work"]
    if not facts["work"]["writable"]:
        yield "error", f"{path}: cannot be written; chown it to the user who logs in, or name another"
    if free < required_free_gb:
        yield "error", f"{path}: {free:g} GB free, {required_free_gb:g} GB are needed; free some, or name another"


def _check_shared_folder(shared: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if "error" in shared:
        yield "error", shared["error"]
        return
    path, point = shared["path"], shared["point"]
    if not shared["link"]:
        yield "error", f"{path}: no hard links on {shared['type']}; attempts need them: take NFS, EFS or another disk"
    if shared["type"].startswith("nfs") and not is_mount_fresh(shared["options"]):
        version = re.search(r"\bvers=[\d.]+", shared["options"])
        options = ",".join(filter(None, [version and version[0], "hard,timeo=600,retrans=2", NFS_OPTIONS]))
        how = f"sudo umount {point} && sudo mount -t nfs -o {options} {shared['source']} {point}"
        yield "warning", f"{path}: NFS shows new files up to a minute late; mount it so: {how}"


def is_mount_fresh(mount_options: str) -> bool:
    """Whether an NFS mount shows within a second what another machine wrote: by its options in /proc/self/mountinfo."""
    known = dict(one.partition("=")[::2] for one in mount_options.split(","))
    known = {**dict.fromkeys(("acregmax", "acdirmax"), known.get("actimeo", "60")), **known}
    short = all(float(known[name]) <= 1 for name in ("acregmax", "acdirmax"))
    return "noac" in known or (known.get("lookupcache") in ("pos", "positive", "none") and short)
