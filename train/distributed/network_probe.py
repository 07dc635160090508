"""Measures the links between machines before a job depends on them.

`python -m train.distributed.network_probe`, one process per machine, each with RANK, WORLD_SIZE, MASTER_ADDR,
MASTER_PORT and LOCAL_RANK. Rank 0 prints one JSON object: the speed of each pair of machines, the speed of an
all-reduce, and the transport. Any failure is one line on stderr and exit code 1, within --timeout. Speeds are in Gbit/s
of 1e9 bits.
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

os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # read when torch is imported; else ranks warn when another one exits

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from train.tools.filesystem import one_line_error

from .gpu import find_gpu_problem
from .network import detect_transport, has_efa, transport_warning
from .rendezvous import open_tcp_store


class ProbeError(Exception):
    """Why the probe failed, in one line."""


class Deadline:
    """Ends this process when a time limit is over, with a line that names the current step."""

    def __init__(self, limit_seconds: float, rank: int) -> None:
        self.limit_seconds = limit_seconds
        self.rank = rank
        self.current_step = "starting"
        self.end_time = time.monotonic() + limit_seconds
        self.timer = threading.Timer(limit_seconds, self._expire)
        self.timer.daemon = True
        self.timer.start()

    @property
    def time_left(self) -> datetime.timedelta:
        """Remaining time, at least a tenth of a second."""
        return datetime.timedelta(seconds=max(0.1, self.end_time - time.monotonic()))

    def _expire(self) -> None:
        print(
            f"rank {self.rank}: {self.current_step}: not finished after {self.limit_seconds:g} s",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the links; rank 0 prints the result. Ends the process itself, with exit code 0 or 1."""
    parser = argparse.ArgumentParser(
        prog="python -m train.distributed.network_probe",
        description="Measure the speed of the network between machines, with one process on each.",
    )
    parser.add_argument("--bytes", type=int, default=8 << 20, help="size of each message in bytes (default: 8 MiB)")
    parser.add_argument("--rounds", type=int, default=3, help="number of timed messages per pair, and of all-reduces")
    parser.add_argument("--timeout", type=float, default=60.0, help="time limit of the probe in seconds (default: 60)")
    args = parser.parse_args(argv)
    rank = int(os.environ.get("RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    deadline = Deadline(args.timeout, rank)
    try:
        device = select_device(int(os.environ.get("LOCAL_RANK", 0)))
        backend, nccl_log = choose_backend(device)
        store = connect_all_ranks(deadline, rank, world_size)
        join_probe_group(deadline, rank, world_size, store, backend, device)
        result = measure_links(deadline, device, args.bytes, args.rounds)
        transport = detect_transport(backend, nccl_log)
        result |= {"torch": torch.__version__, "backend": backend, "transport": transport}
        result["warning"] = transport_warning(transport, has_efa())
        if rank == 0:
            print(json.dumps(result), flush=True)
        wait_until_all_done(deadline, rank, world_size, store)
    except (ProbeError, RuntimeError, OSError) as error:
        # torch's messages contain the place in its C++ sources
        text = re.sub(r"^\[/\S+\] | Exception raised from .*", "", one_line_error(error))
        print(f"rank {rank}: {deadline.current_step}: {text[:400]}", file=sys.stderr, flush=True)
        os._exit(1)  # a regular exit would wait for the other ranks
    os._exit(0)


def select_device(local_rank: int) -> torch.device:
    """Return this process's device. Raises `ProbeError` when the machine has a GPU that this torch cannot use."""
    if problem := find_gpu_problem():
        raise ProbeError(problem)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


# --- joining ------------------------------------------------------------------------------------------------------


def choose_backend(device: torch.device) -> tuple[str, Path | None]:
    """Return the backend and the file to which NCCL will log its choices (None for Gloo)."""
    if device.type == "cpu":
        return "gloo", None
    handle, name = tempfile.mkstemp(prefix="imgnet-nccl-")
    os.close(handle)
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": name}
    return "nccl", Path(name)


def connect_all_ranks(deadline: Deadline, rank: int, world_size: int) -> TCPStore:
    """Connect to rank 0's store and wait until all ranks have.

    Raises `ProbeError` that names the missing ranks, one second before the deadline.
    """
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    port = int(os.environ.get("MASTER_PORT", 0))
    deadline.current_step = f"connecting to rank 0 at {address}:{port}"
    wait = max(deadline.time_left - datetime.timedelta(seconds=1), datetime.timedelta(seconds=0.5))
    end_time = time.monotonic() + wait.total_seconds()
    if rank:
        _wait_for_port(address, port, end_time)
    store = open_tcp_store(address, port, rank, world_size, wait)
    store.set(f"came/{rank}", "1")
    deadline.current_step = "waiting for all ranks"
    missing_ranks = [other_rank for other_rank in range(world_size) if other_rank != rank]
    while missing_ranks and time.monotonic() < end_time:
        time.sleep(0.02)
        with contextlib.suppress(RuntimeError):  # rank 0 has given up a moment before this rank does
            missing_ranks = [other_rank for other_rank in missing_ranks if not store.check([f"came/{other_rank}"])]
    if missing_ranks:
        names = ", ".join(map(str, missing_ranks))
        raise ProbeError(f"rank {names} did not connect; is its machine up, and can it reach {address}:{port}?")
    return store


def _wait_for_port(address: str, port: int, end_time: float) -> None:
    """Wait until a port accepts connections. torch would print many warnings if it did the waiting."""
    while True:
        try:
            socket.create_connection((address, port), timeout=max(0.1, end_time - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() > end_time:
                raise ProbeError(
                    f"{one_line_error(error)}; is its machine up, and can this one reach its port {port}?"
                ) from error
        time.sleep(0.05)


def join_probe_group(
    deadline: Deadline, rank: int, world_size: int, store: Store, backend: str, device: torch.device
) -> None:
    """Join the process group of all ranks. Raises `RuntimeError` when two of them cannot connect to each other."""
    deadline.current_step = f"connecting all ranks with {backend}"
    dist.init_process_group(
        backend,
        store=PrefixStore("group", store),
        rank=rank,
        world_size=world_size,
        timeout=deadline.time_left,
        device_id=device if backend == "nccl" else None,  # without it, each pair would create its own communicator
    )


def wait_until_all_done(deadline: Deadline, rank: int, world_size: int, store: Store) -> None:
    """Wait until all ranks have finished: a rank that exits earlier closes connections that others still use."""
    deadline.current_step = "waiting for all ranks to finish"
    store.set(f"done/{rank}", "1")
    with contextlib.suppress(RuntimeError):  # rank 0, which holds the store, has seen all ranks finish and has exited
        while not store.check([f"done/{other_rank}" for other_rank in range(world_size)]):
            time.sleep(0.01)


# --- measuring ----------------------------------------------------------------------------------------------------


def measure_links(deadline: Deadline, device: torch.device, message_bytes: int, rounds: int) -> dict[str, object]:
    """Measure each pair of ranks, one pair after the other, and then an all-reduce of `message_bytes`.

    Returns {"pairs": {"0-1": Gbit/s, ...}, "all_reduce": ...}, with the values of `time_all_reduce`; the pairs' speeds
    are the same on all ranks.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pairs = list(combinations(range(world_size), 2))
    speeds = torch.zeros(len(pairs), dtype=torch.float64, device=device)
    message = torch.zeros(max(1, message_bytes), dtype=torch.uint8, device=device)
    for index, (first_rank, second_rank) in enumerate(pairs):
        deadline.current_step = f"pair {first_rank}-{second_rank}"
        if rank in (first_rank, second_rank):
            seconds = time_exchange(message, first_rank, second_rank, rounds)
            if rank == first_rank:
                speeds[index] = to_gbps(2 * message.numel() * rounds, seconds)
        _barrier(device)
    deadline.current_step = f"all-reduce over {world_size} ranks"
    dist.all_reduce(speeds)
    names = [f"{first_rank}-{second_rank}" for first_rank, second_rank in pairs]
    pair_gbps = dict(zip(names, (round(speed, 3) for speed in speeds.tolist()), strict=True))
    return {"pairs": pair_gbps, "all_reduce": time_all_reduce(device, message_bytes, rounds)}


def time_exchange(message: torch.Tensor, first_rank: int, second_rank: int, rounds: int) -> float:
    """Send a message to the other rank and back `rounds` times, after one untimed round. Returns the seconds."""
    is_first = dist.get_rank() == first_rank
    peer = second_rank if is_first else first_rank
    start = 0.0
    for number in range(rounds + 1):
        if number == 1:
            _synchronize(message.device)
            start = time.perf_counter()
        for send_or_recv in (dist.send, dist.recv) if is_first else (dist.recv, dist.send):
            send_or_recv(message, peer)
    _synchronize(message.device)
    return time.perf_counter() - start


def time_all_reduce(device: torch.device, total_bytes: int, rounds: int) -> dict[str, float]:
    """Return bytes, median seconds and Gbit/s of an all-reduce, after one untimed round.

    The Gbit/s are the algorithm bandwidth: bytes of the message, divided by the time.
    """
    values = torch.zeros(max(1, total_bytes // 4), device=device)
    seconds = []
    for _ in range(rounds + 1):
        _barrier(device)
        start = time.perf_counter()
        dist.all_reduce(values)
        _synchronize(device)
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds[1:])
    byte_count = values.numel() * 4
    return {"bytes": byte_count, "seconds": median, "gbps": round(to_gbps(byte_count, median), 3)}


def to_gbps(byte_count: int, seconds: float) -> float:
    """Return the speed in Gbit/s (1e9 bits)."""
    return byte_count * 8 / 1e9 / max(seconds, 1e-9)


def _barrier(device: torch.device) -> None:
    value = torch.zeros(1, device=device)
    dist.all_reduce(value)
    value.item()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    sys.exit(main())
