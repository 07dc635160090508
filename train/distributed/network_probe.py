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

from train.tools.filesystem import one_line_error

from .network import detect_transport, has_efa, transport_warning


class ProbeError(Exception):
    """What stands in the way, in one line."""


class Deadline:
    """Ends this process, with a line that says what it was doing, when it is not over in time."""

    def __init__(self, limit_seconds: float, rank: int) -> None:
        self.limit_seconds, self.rank, self.current_step = limit_seconds, rank, "starting"
        self.end_time = time.monotonic() + limit_seconds
        self.timer = threading.Timer(limit_seconds, self._expire)
        self.timer.daemon = True
        self.timer.start()

    @property
    def time_left(self) -> datetime.timedelta:
        """The time that is left, a tenth of a second at least."""
        return datetime.timedelta(seconds=max(0.1, self.end_time - time.monotonic()))

    def _expire(self) -> None:
        print(
            f"rank {self.rank}: {self.current_step}: not over after {self.limit_seconds:g} s",
            file=sys.stderr,
            flush=True,
        )
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
        device = select_device(int(os.environ.get("LOCAL_RANK", 0)))
        backend, log = choose_backend(device)
        store = connect_all_ranks(deadline, rank, world)
        join_probe_group(deadline, rank, world, store, backend, device)
        found = measure_links(deadline, device, args.bytes, args.rounds)
        found |= {"torch": torch.__version__, "backend": backend, "transport": detect_transport(backend, log)}
        found["warning"] = transport_warning(found["transport"], has_efa())
        if rank == 0:
            print(json.dumps(found), flush=True)
        wait_until_all_done(deadline, rank, world, store)
    except (ProbeError, RuntimeError, OSError) as error:
        text = re.sub(r"^\[/\S+\] | Exception raised from .*", "", one_line_error(error))  # where in C++
        print(f"rank {rank}: {deadline.current_step}: {text[:400]}", file=sys.stderr, flush=True)
        os._exit(1)  # an end in order would wait for the others
    os._exit(0)


# --- the card -----------------------------------------------------------------------------------------------------


def select_device(local_rank: int) -> torch.device:
    """Return the device of this process. Raises `Fault` when this torch cannot use a GPU that is there."""
    gpus = Path("/proc/driver/nvidia/gpus")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if not torch.cuda.is_available():
        if gpus.is_dir() and any(gpus.iterdir()) and not hidden:
            raise ProbeError(explain_invisible_gpu(torch.version.cuda))
        return torch.device("cpu")
    for index in range(torch.cuda.device_count()):
        name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
        said = explain_unsupported_gpu(name, capability, torch.cuda.get_arch_list())
        if said:
            raise ProbeError(said)
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def explain_invisible_gpu(cuda: str | None) -> str:
    """Return why torch sees no GPU where one is: it has no CUDA (None), or one that the driver is too old for."""
    if cuda is None:
        return f"torch {torch.__version__} is built without CUDA; install one that is built for this machine's GPU"
    return (
        f"torch {torch.__version__} (CUDA {cuda}) sees no GPU; its driver is too old or broken: update it (nvidia-smi)"
    )


def explain_unsupported_gpu(name: str, capability: tuple[int, int], compiled_archs: Sequence[str]) -> str | None:
    """Return one line when this torch has no code for a card; `built` is `torch.cuda.get_arch_list()`.

    Code for sm_80 runs on sm_86 too, not on sm_90; what is built as compute_80 (PTX) runs on all later ones.
    """
    for one in compiled_archs:
        parts = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", one)
        if parts:
            kind, major, minor, only = parts[1], int(parts[2]), int(parts[3]), parts[4]
            later = (major, minor) <= capability
            if later and not only and (kind == "compute" or major == capability[0]):
                return None
            if (major, minor) == capability:
                return None
    mine = f"sm_{capability[0]}{capability[1]}"
    old = (
        "an older"
        if compiled_archs and all(_arch_number(one) > _arch_number(mine) for one in compiled_archs)
        else "another"
    )
    return (
        f"{name} is {mine}, and torch {torch.__version__} is built for {', '.join(compiled_archs) or 'no GPU'}; "
        f"install {old} torch that has {mine}, or take other GPUs"
    )


def _arch_number(arch: str) -> int:
    return int("".join(re.findall(r"\d", arch)) or 0)


# --- joining ------------------------------------------------------------------------------------------------------


def choose_backend(device: torch.device) -> tuple[str, Path | None]:
    """Return the backend, and the file that NCCL is made to tell its choices to."""
    if device.type == "cpu":
        return "gloo", None
    handle, name = tempfile.mkstemp(prefix="imgnet-nccl-")
    os.close(handle)
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": name}
    return "nccl", Path(name)


def connect_all_ranks(deadline: Deadline, rank: int, world_size: int) -> TCPStore:
    """Wait until all processes have said that they are there. Raises `Fault` that names who is not, a second early."""
    address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", 0))
    deadline.current_step = f"looking for rank 0 at {address}:{port}"
    wait = max(deadline.time_left - datetime.timedelta(seconds=1), datetime.timedelta(seconds=0.5))
    end = time.monotonic() + wait.total_seconds()
    if rank:
        _wait_for_port(address, port, end)
    store = TCPStore(address, port, world_size, is_master=rank == 0, timeout=wait, wait_for_workers=False)
    store.set(f"came/{rank}", "1")
    deadline.current_step = "waiting for all"
    missing = [one for one in range(world_size) if one != rank]
    while missing and time.monotonic() < end:
        time.sleep(0.02)
        with contextlib.suppress(RuntimeError):  # rank 0 is gone, as we are soon
            missing = [one for one in missing if not store.check([f"came/{one}"])]
    if missing:
        names = ", ".join(map(str, missing))
        raise ProbeError(f"rank {names} did not come; is it up, and may it reach {address}:{port}?")
    return store


def _wait_for_port(address: str, port: int, end_time: float) -> None:
    """Wait until somebody listens there; torch would fill the screen while it waits."""
    while True:
        try:
            socket.create_connection((address, port), timeout=max(0.1, end_time - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() > end_time:
                raise ProbeError(
                    f"{one_line_error(error)}; is its machine up, and may this one reach its port {port}?"
                ) from error
        time.sleep(0.05)


def join_probe_group(
    deadline: Deadline, rank: int, world_size: int, store: Store, backend: str, device: torch.device
) -> None:
    """Join the group of all, where each is linked to each. Raises RuntimeError when that cannot be."""
    deadline.current_step = f"linking all by {backend}"
    dist.init_process_group(
        backend,
        store=PrefixStore("group", store),
        rank=rank,
        world_size=world_size,
        timeout=deadline.time_left,
        device_id=device if backend == "nccl" else None,  # else each pair would start an NCCL of its own
    )


def wait_until_all_done(deadline: Deadline, rank: int, world_size: int, store: Store) -> None:
    """Wait until all are through: whoever ends first takes its links away."""
    deadline.current_step = "parting"
    store.set(f"done/{rank}", "1")
    with contextlib.suppress(RuntimeError):  # rank 0, which holds the store, has seen all and is gone
        while not store.check([f"done/{one}" for one in range(world_size)]):
            time.sleep(0.01)


# --- how fast -----------------------------------------------------------------------------------------------------


def measure_links(deadline: Deadline, device: torch.device, message_bytes: int, rounds: int) -> dict[str, Any]:
    """Return Gbit/s of each pair, one after the other, and the median time of a sum of `size` bytes over all."""
    world, pairs = dist.get_world_size(), list(combinations(range(dist.get_world_size()), 2))
    speeds = torch.zeros(len(pairs), dtype=torch.float64, device=device)
    message = torch.zeros(max(1, message_bytes), dtype=torch.uint8, device=device)
    for number, (one, other) in enumerate(pairs):
        deadline.current_step = f"pair {one}-{other}"
        if dist.get_rank() in (one, other):
            seconds = time_exchange(message, one, other, rounds)
            speeds[number] = to_gbps(2 * message.numel() * rounds, seconds) * (dist.get_rank() == one)
        _barrier(device)
    deadline.current_step = f"the sum over {world}"
    dist.all_reduce(speeds)
    names = [f"{one}-{other}" for one, other in pairs]
    found = dict(zip(names, (round(one, 3) for one in speeds.tolist()), strict=True))
    return {"pairs": found, "all_reduce": time_all_reduce(device, message_bytes, rounds)}


def time_exchange(message: torch.Tensor, first_rank: int, second_rank: int, rounds: int) -> float:
    """Send a message there and back so many times, after once to warm up; return the seconds."""
    first, peer = dist.get_rank() == first_rank, second_rank if dist.get_rank() == first_rank else first_rank
    start = 0.0
    for number in range(rounds + 1):
        if number == 1:
            _synchronize(message.device)
            start = time.perf_counter()
        for act in (dist.send, dist.recv) if first else (dist.recv, dist.send):
            act(message, peer)
    _synchronize(message.device)
    return time.perf_counter() - start


def time_all_reduce(device: torch.device, total_bytes: int, rounds: int) -> dict[str, float]:
    """Return bytes, seconds and Gbit/s (algorithm bandwidth: bytes through seconds) of one all-reduce."""
    values, seconds = torch.zeros(max(1, total_bytes // 4), device=device), []
    for _ in range(rounds + 1):
        _barrier(device)
        start = time.perf_counter()
        dist.all_reduce(values)
        _synchronize(device)
        seconds.append(time.perf_counter() - start)
    took, count = statistics.median(seconds[1:]), values.numel() * 4
    return {"bytes": count, "seconds": took, "gbps": round(to_gbps(count, took), 3)}


def to_gbps(byte_count: int, seconds: float) -> float:
    """Return Gbit/s."""
    return byte_count * 8 / 1e9 / max(seconds, 1e-9)


def _barrier(device: torch.device) -> None:
    one = torch.zeros(1, device=device)
    dist.all_reduce(one)
    one.item()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    sys.exit(main())
