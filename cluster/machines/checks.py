"""What a machine's answers to `cluster.machines.probe` mean: what stands in a job's way, in one line each. Pure functions.

A finding is {"level": "error" or "warning", "what": what is wrong, where, and what to do}.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

SHM_BYTES = 64 << 20  # what Docker gives
CLOCK_SECONDS = 30.0
# nfs(5); without them a machine may look for a minute at what was.
NFS_OPTIONS = "lookupcache=positive,acregmin=1,acregmax=1,acdirmin=1,acdirmax=1"
Finding = dict[str, str]


def same_folder(answers: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return the pairs of machines that do not see each other's file, from the answers to --expect by machine."""

    def sees(one: str, other: str) -> bool:
        return bool(answers[one].get("shared", {}).get("seen", {}).get(other))

    return [(a, b) for a, b in combinations(answers, 2) if not (sees(a, b) and sees(b, a))]


def skew(sent: float, received: float, machine_time: float) -> tuple[float, float]:
    """Return how far a machine's clock is ahead of ours, and how unsure that is, in seconds."""
    return machine_time - (sent + received) / 2, (received - sent) / 2


def clock(offset: float, uncertainty: float) -> list[Finding]:
    """Return what is to say about a machine's clock: only what is wrong for sure, by half a minute."""
    if abs(offset) - uncertainty <= CLOCK_SECONDS:
        return []
    word = "ahead of" if offset > 0 else "behind"
    what = f"its clock is {abs(offset):.0f} s {word} ours; set it: sudo timedatectl set-ntp true"
    return [{"level": "warning", "what": what}]


def judge(facts: Mapping[str, Any], procs: int, want_gb: float) -> list[Finding]:
    """Return what stands in the way of a job that wants so many GPUs and so much free space in the work folder."""
    found = [*_machine(facts), *_gpus(facts, procs), *_work(facts, want_gb), *_shared(facts["shared"])]
    return [{"level": level, "what": what} for level, what in found]


def _machine(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if not facts["tmux"]:
        yield "error", "tmux is missing; install it: sudo apt-get install tmux"
    if facts["shm_bytes"] <= SHM_BYTES:
        has = f"/dev/shm has {facts['shm_bytes'] / 1e6:.0f} MB and loader workers hand images over in it"
        yield "warning", f"{has}; sudo mount -o remount,size=8g /dev/shm, or docker run --ipc=host"


def _gpus(facts: Mapping[str, Any], procs: int) -> Iterator[tuple[str, str]]:
    count, said = len(facts["gpus"]), facts["nvidia"]
    words = f" (nvidia-smi: {said})" if said else ""
    if count >= procs:
        return
    if count:
        yield "error", f"{count} of {procs} GPUs visible{words}; sudo dmesg | grep -i xid, reboot, or ask for {count}"
    elif said == "missing":
        yield "error", "no GPU: nvidia-smi is missing; install the NVIDIA driver, or docker run --gpus all"
    elif said == "hangs":
        yield "error", "no GPU: nvidia-smi does not answer; reboot this machine"
    else:
        yield "error", f"no GPU{words}; install the NVIDIA driver that fits the kernel, or reboot this machine"


def _work(facts: Mapping[str, Any], want_gb: float) -> Iterator[tuple[str, str]]:
    path, free = facts["work"]["path"], facts["free_gb"]["work"]
    if not facts["work"]["writable"]:
        yield "error", f"{path}: cannot be written; chown it to the user who logs in, or name another"
    if free < want_gb:
        yield "error", f"{path}: {free:g} GB free, {want_gb:g} GB are needed; free some, or name another"


def _shared(shared: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if "error" in shared:
        yield "error", shared["error"]
        return
    path, point = shared["path"], shared["point"]
    if not shared["link"]:
        yield "error", f"{path}: no hard links on {shared['type']}; attempts need them: take NFS, EFS or another disk"
    if shared["type"].startswith("nfs") and not fresh(shared["options"]):
        version = re.search(r"\bvers=[\d.]+", shared["options"])
        options = ",".join(filter(None, [version and version[0], "hard,timeo=600,retrans=2", NFS_OPTIONS]))
        how = f"sudo umount {point} && sudo mount -t nfs -o {options} {shared['source']} {point}"
        yield "warning", f"{path}: NFS shows new files up to a minute late; mount it so: {how}"


def fresh(options: str) -> bool:
    """Whether an NFS mount shows within a second what another machine wrote: by its options in /proc/self/mountinfo."""
    known = dict(one.partition("=")[::2] for one in options.split(","))
    known = {**dict.fromkeys(("acregmax", "acdirmax"), known.get("actimeo", "60")), **known}
    short = all(float(known[name]) <= 1 for name in ("acregmax", "acdirmax"))
    return "noac" in known or (known.get("lookupcache") in ("pos", "positive", "none") and short)
