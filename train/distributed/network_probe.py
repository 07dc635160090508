"""Try the machines' links before a job depends on them: `python -m train.distributed.network_probe`, one process per machine.

Each process gets RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and LOCAL_RANK. Rank 0 prints one JSON object: the speed of
each pair, of a sum over all, and what carries it. Whatever goes wrong is one line and exit code 1, within --timeout.
1 Gbit/s is 1e9 bits a second.
"""

import argparse
import contextlib
import datetime
import json
import os
import re
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # read as torch loads: whoever ends first would make the others warn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from train.tools.filesystem import one_line

from .network import efa_here, transport, wrong_transport


class Fault(Exception):
    """What stands in the way, in one line."""


class Deadline:
    """Ends this process, with a line that says what it was doing, when it is not over in time."""

    def __init__(self, seconds: float, rank: int) -> None:
        self.seconds, self.rank, self.doing = seconds, rank, "starting"
        self.end = time.monotonic() + seconds
        self.timer = threading.Timer(seconds, self._late)
        self.timer.daemon = True
        self.timer.start()

    @property
    def left(self) -> datetime.timedelta:
        """The time that is left, a tenth of a second at least."""
        return datetime.timedelta(seconds=max(0.1, self.end - time.monotonic()))

    def _late(self) -> None:
        print(f"rank {self.rank}: {self.doing}: not over after {self.seconds:g} s", file=sys.stderr, flush=True)
        os._exit(1)


def main(argv: Sequence[str] | None = None) -> int:
    """Try the links; rank 0 prints what was found."""
    parser = argparse.ArgumentParser(
        prog="python -m train.distributed.network_probe", description="How fast the machines talk."
    )
    parser.add_argument("--bytes", type=int, default=8 << 20, help="size of each message (default: 8 MiB)")
    parser.add_argument("--rounds", type=int, default=3, help="messages each way and sums that are timed")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for everything")
    args = parser.parse_args(argv)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    deadline = Deadline(args.timeout, rank)
    try:
        device = fitting_device(int(os.environ.get("LOCAL_RANK", 0)))
        backend, log = prepare(device)
        store = gather(deadline, rank, world)
        join(deadline, rank, world, store, backend, device)
        found = measure(deadline, device, args.bytes, args.rounds)
        found |= {"torch": torch.__version__, "backend": backend, "transport": transport(backend, log)}
        found["warning"] = wrong_transport(found["transport"], efa_here())
        if rank == 0:
            print(json.dumps(found), flush=True)
        part(deadline, rank, world, store)
    except (Fault, RuntimeError, OSError) as error:
        text = re.sub(r"^\[/\S+\] | Exception raised from .*", "", one_line(error))  # where in C++
        print(f"rank {rank}: {deadline.doing}: {text[:400]}", file=sys.stderr, flush=True)
        os._exit(1)  # an end in order would wait for the others
    os._exit(0)


# --- the card -----------------------------------------------------------------------------------------------------


def fitting_device(local_rank: int) -> torch.device:
    """Return the device of this process. Raises `Fault` when this torch cannot use a GPU that is there."""
    gpus = Path("/proc/driver/nvidia/gpus")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if not torch.cuda.is_available():
        if gpus.is_dir() and any(gpus.iterdir()) and not hidden:
            raise Fault(unusable(torch.version.cuda))
        return torch.device("cpu")
    for index in range(torch.cuda.device_count()):
        name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
        said = misfit(name, capability, torch.cuda.get_arch_list())
        if said:
            raise Fault(said)
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def unusable(cuda: str | None) -> str:
    """Return why torch sees no GPU where one is: it has no CUDA (None), or one that the driver is too old for."""
    if cuda is None:
        return f"torch {torch.__version__} is built without CUDA; install one that is built for this machine's GPU"
    return (
        f"torch {torch.__version__} (CUDA {cuda}) sees no GPU; its driver is too old or broken: update it (nvidia-smi)"
    )


def misfit(name: str, capability: tuple[int, int], built: Sequence[str]) -> str | None:
    """Return one line when this torch has no code for a card; `built` is `torch.cuda.get_arch_list()`.

    Code for sm_80 runs on sm_86 too, not on sm_90; what is built as compute_80 (PTX) runs on all later ones.
    """
    for one in built:
        parts = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", one)
        if parts:
            kind, major, minor, only = parts[1], int(parts[2]), int(parts[3]), parts[4]
            later = (major, minor) <= capability
            if later and not only and (kind == "compute" or major == capability[0]):
                return None
            if (major, minor) == capability:
                return None
    mine = f"sm_{capability[0]}{capability[1]}"
    old = "an older" if built and all(_number(one) > _number(mine) for one in built) else "another"
    return (
        f"{name} is {mine}, and torch {torch.__version__} is built for {', '.join(built) or 'no GPU'}; "
        f"install {old} torch that has {mine}, or take other GPUs"
    )


def _number(arch: str) -> int:
    return int("".join(re.findall(r"\d", arch)) or 0)


# --- joining ------------------------------------------------------------------------------------------------------


def prepare(device: torch.device) -> tuple[str, Path | None]:
    """Return the backend, and the file that NCCL is made to tell its choices to."""
    if device.type == "cpu":
        return "gloo", None
    handle, name = tempfile.mkstemp(prefix="imgnet-nccl-")
    os.close(handle)
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": name}
    return "nccl", Path(name)


def gather(deadline: Deadline, rank: int, world: int) -> TCPStore:
    """Wait until all processes have said that they are there. Raises `Fault` that names who is not, a second early."""
    address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", 0))
    deadline.doing = f"looking for rank 0 at {address}:{port}"
    wait = max(deadline.left - datetime.timedelta(seconds=1), datetime.timedelta(seconds=0.5))
    end = time.monotonic() + wait.total_seconds()
    if rank:
        _reach(address, port, end)
    store = TCPStore(address, port, world, is_master=rank == 0, timeout=wait, wait_for_workers=False)
    store.set(f"came/{rank}", "1")
    deadline.doing = "waiting for all"
    missing = [one for one in range(world) if one != rank]
    while missing and time.monotonic() < end:
        time.sleep(0.02)
        with contextlib.suppress(RuntimeError):  # rank 0 is gone, as we are soon
            missing = [one for one in missing if not store.check([f"came/{one}"])]
    if missing:
        names = ", ".join(map(str, missing))
        raise Fault(f"rank {names} did not come; is it up, and may it reach {address}:{port}?")
    return store


def _reach(address: str, port: int, end: float) -> None:
    """Wait until somebody listens there; torch would fill the screen while it waits."""
    while True:
        try:
            socket.create_connection((address, port), timeout=max(0.1, end - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                raise Fault(f"{one_line(error)}; is its machine up, and may this one reach its port {port}?") from error
        time.sleep(0.05)


def join(deadline: Deadline, rank: int, world: int, store: Store, backend: str, device: torch.device) -> None:
    """Join the group of all, where each is linked to each. Raises RuntimeError when that cannot be."""
    deadline.doing = f"linking all by {backend}"
    dist.init_process_group(
        backend,
        store=PrefixStore("group", store),
        rank=rank,
        world_size=world,
        timeout=deadline.left,
        device_id=device if backend == "nccl" else None,  # else each pair would start an NCCL of its own
    )


def part(deadline: Deadline, rank: int, world: int, store: Store) -> None:
    """Wait until all are through: whoever ends first takes its links away."""
    deadline.doing = "parting"
    store.set(f"done/{rank}", "1")
    with contextlib.suppress(RuntimeError):  # rank 0, which holds the store, has seen all and is gone
        while not store.check([f"done/{one}" for one in range(world)]):
            time.sleep(0.01)


# --- how fast -----------------------------------------------------------------------------------------------------


def measure(deadline: Deadline, device: torch.device, size: int, rounds: int) -> dict[str, Any]:
    """Return Gbit/s of each pair, one after the other, and the median time of a sum of `size` bytes over all."""
    world, pairs = dist.get_world_size(), list(combinations(range(dist.get_world_size()), 2))
    speeds = torch.zeros(len(pairs), dtype=torch.float64, device=device)
    message = torch.zeros(max(1, size), dtype=torch.uint8, device=device)
    for number, (one, other) in enumerate(pairs):
        deadline.doing = f"pair {one}-{other}"
        if dist.get_rank() in (one, other):
            seconds = exchange(message, one, other, rounds)
            speeds[number] = gbps(2 * message.numel() * rounds, seconds) * (dist.get_rank() == one)
        _barrier(device)
    deadline.doing = f"the sum over {world}"
    dist.all_reduce(speeds)
    names = [f"{one}-{other}" for one, other in pairs]
    found = dict(zip(names, (round(one, 3) for one in speeds.tolist()), strict=True))
    return {"pairs": found, "all_reduce": time_sum(device, size, rounds)}


def exchange(message: torch.Tensor, one: int, other: int, rounds: int) -> float:
    """Send a message there and back so many times, after once to warm up; return the seconds."""
    first, peer = dist.get_rank() == one, other if dist.get_rank() == one else one
    start = 0.0
    for number in range(rounds + 1):
        if number == 1:
            _finish(message.device)
            start = time.perf_counter()
        for act in (dist.send, dist.recv) if first else (dist.recv, dist.send):
            act(message, peer)
    _finish(message.device)
    return time.perf_counter() - start


def time_sum(device: torch.device, size: int, rounds: int) -> dict[str, float]:
    """Return bytes, seconds and Gbit/s (algorithm bandwidth: bytes through seconds) of one all-reduce."""
    values, seconds = torch.zeros(max(1, size // 4), device=device), []
    for _ in range(rounds + 1):
        _barrier(device)
        start = time.perf_counter()
        dist.all_reduce(values)
        _finish(device)
        seconds.append(time.perf_counter() - start)
    took, count = statistics.median(seconds[1:]), values.numel() * 4
    return {"bytes": count, "seconds": took, "gbps": round(gbps(count, took), 3)}


def gbps(count: int, seconds: float) -> float:
    """Return Gbit/s."""
    return count * 8 / 1e9 / max(seconds, 1e-9)


def _barrier(device: torch.device) -> None:
    one = torch.zeros(1, device=device)
    dist.all_reduce(one)
    one.item()


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    sys.exit(main())
