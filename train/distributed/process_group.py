"""The processes of a run: who am I, sums over all of us, one mean of the batch-norm statistics."""

import datetime
import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from train.tools import provenance
from train.tools.errors import TrainingError

from . import network

FIRST_STEP_TIMEOUT = datetime.timedelta(seconds=300)  # data may have to be indexed, kernels searched
STEADY_TIMEOUT = datetime.timedelta(seconds=60)  # torch's own 10 and 30 minutes are longer than many a run


@dataclass(frozen=True)
class ProcessGroup:
    """This process among all: global rank, rank on its machine, how many in all, and its device."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    nccl_log_path: Path | None = None  # where NCCL says what it chooses

    @property
    def is_first(self) -> bool:
        """Whether this process writes for all."""
        return self.rank == 0


def join_process_group() -> ProcessGroup:
    """Join the group that RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe; alone without them.

    NCCL between GPUs, Gloo between CPUs. Raises RuntimeError when there are more processes here than GPUs, if any.
    """
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            raise RuntimeError(
                f"process {local_rank} has no GPU: this machine has {torch.cuda.device_count()}; fewer --procs"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    if world > 1:
        log = network.enable_nccl_log() if device.type == "cuda" and rank == 0 else None
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=FIRST_STEP_TIMEOUT)
    return ProcessGroup(rank, local_rank, world, local_world, device, log if world > 1 else None)


def print_transport(group: ProcessGroup) -> None:
    """Print what carries the messages, and loudly when that is the wrong thing. After the first collective."""
    if group.is_first and group.world_size > 1:
        found = network.detect_transport("nccl" if group.device.type == "cuda" else "gloo", group.nccl_log_path)
        wrong = network.transport_warning(found, network.has_efa())
        print(f"{group.world_size} processes, by {found}" + (f"\nWARNING: {wrong}" if wrong else ""), flush=True)


def tighten_timeouts(group: ProcessGroup, step_seconds: float) -> None:
    """After the first step, which took so long: a collective of a minute, or of 30 such steps, has lost somebody.

    It holds for all groups that this process is in, those of comm.py too.
    """
    if group.world_size > 1:
        for one in list(dist.distributed_c10d._world.pg_map):
            dist.distributed_c10d._set_pg_timeout(
                max(STEADY_TIMEOUT, datetime.timedelta(seconds=30 * step_seconds)), one
            )


def check_same_on_all_ranks(group: ProcessGroup, name: str, number: int) -> None:
    """Raise `Expected` when a number below 2**53 differs between the processes: they would train on different data."""
    ends = torch.tensor([number, -number], dtype=torch.float64, device=group.device)
    if group.world_size > 1:
        dist.all_reduce(ends, dist.ReduceOp.MAX)
    high, low = int(ends[0].item()), int(-ends[1].item())
    if high != low:
        raise TrainingError(f"{name} differ between the machines (this one has {number}, others from {low} to {high})")


def compute_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the GPU has it (compute capability 8.0), float16 with a scaler on older ones, float32 on a CPU."""
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16


def loader_process_count(group: ProcessGroup, requested: int | None) -> int:
    """Return the number of loader processes: as asked, else this machine's processors shared out, 16 at most."""
    if requested is not None:
        return requested
    return max(1, min(16, (os.cpu_count() or 1) // group.local_world_size - (group.device.type == "cpu")))


def device_name(device: torch.device) -> str:
    """Return what the GPU, or on a CPU the processor, calls itself; "" where it does not say it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else provenance.cpu_model()


def peak_memory_gb(device: torch.device) -> float:
    """The most memory so far in GB (1e9 bytes): of the GPU, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def sum_over_processes(group: ProcessGroup, values: torch.Tensor) -> torch.Tensor:
    """Sum a tensor over all processes, in place, and return it."""
    if group.world_size > 1:
        dist.all_reduce(values)
    return values


def barrier(group: ProcessGroup) -> None:
    """Wait for all."""
    sum_over_processes(group, torch.zeros(1, device=group.device)).item()


def exit_process(group: ProcessGroup) -> None:
    """End this process when it has peers, with code 0 and nothing taken apart: Gloo's threads are still at work. Of
    short runs that just ended every fourth aborted, and after `destroy_process_group` one in ten waited for ever, this
    thread for Gloo's and that one for Python's lock.
    """
    if group.world_size > 1:
        for one in (sys.stdout, sys.stderr):
            one.flush()
        os._exit(0)
