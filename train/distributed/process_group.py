"""The processes of a training run: this process's rank and device, collectives over all ranks, and timeouts."""

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

from . import network, rendezvous

FIRST_STEP_TIMEOUT = datetime.timedelta(seconds=300)  # before it, data may be indexed and kernels searched
STEADY_TIMEOUT = datetime.timedelta(seconds=60)  # torch's defaults of 10 and 30 minutes exceed some whole runs
MAX_LOADER_PROCESSES = 16  # per trainer process


@dataclass(frozen=True)
class ProcessGroup:
    """This process's place in the run: global rank, rank on its machine, world size, and device."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    nccl_log_path: Path | None = None  # file in which NCCL logs the transport it chooses

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes files for all."""
        return self.rank == 0


def join_process_group() -> ProcessGroup:
    """Join the process group that RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and IMGNET_TOKEN describe.

    Without these variables the run has one process. The backend is NCCL with GPUs, else Gloo. Raises `RuntimeError`
    when this machine has GPUs, but fewer than processes.
    """
    rank = int(os.environ.get("RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        gpu_count = torch.cuda.device_count()
        if local_rank >= gpu_count:
            raise RuntimeError(
                f"process {local_rank} has no GPU: this machine has {gpu_count}; use --procs {gpu_count} or fewer"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    nccl_log_path = None
    if world_size > 1:
        if device.type == "cuda" and rank == 0:
            nccl_log_path = network.enable_nccl_log()
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=rendezvous.open_store(rank, world_size, FIRST_STEP_TIMEOUT),
            rank=rank,
            world_size=world_size,
            timeout=FIRST_STEP_TIMEOUT,
        )
    return ProcessGroup(rank, local_rank, world_size, local_world_size, device, nccl_log_path)


def print_transport(group: ProcessGroup) -> None:
    """Print what carries the collectives, with a warning when it is slow. Call it after the first collective."""
    if group.is_first and group.world_size > 1:
        backend = "nccl" if group.device.type == "cuda" else "gloo"
        transport = network.detect_transport(backend, group.nccl_log_path)
        warning = network.transport_warning(transport, network.has_efa())
        print(
            f"{group.world_size} processes, by {transport}" + (f"\nWARNING: {warning}" if warning else ""), flush=True
        )


def tighten_timeouts(group: ProcessGroup, step_seconds: float) -> None:
    """Shorten the timeout of collectives after the first step, which took `step_seconds`.

    From then on, a collective that takes more than a minute, or than 30 such steps, has lost a process. The timeout
    holds for all groups of this process, also for those of comm_hooks.py.
    """
    if group.world_size > 1:
        timeout = max(STEADY_TIMEOUT, datetime.timedelta(seconds=30 * step_seconds))
        for torch_group in list(dist.distributed_c10d._world.pg_map):
            torch_group.set_timeout(timeout)


def check_same_on_all_ranks(group: ProcessGroup, name: str, number: int) -> None:
    """Raise `TrainingError` when a number differs between the ranks, which would then train on different data.

    The number must be below 2**53, so that float64 holds it exactly. `name` is a plural: "the numbers of images".
    """
    bounds = torch.tensor([number, -number], dtype=torch.float64, device=group.device)
    if group.world_size > 1:
        dist.all_reduce(bounds, dist.ReduceOp.MAX)
    highest, lowest = int(bounds[0].item()), int(-bounds[1].item())
    if highest != lowest:
        raise TrainingError(
            f"{name} differ between the machines (this one has {number}, others from {lowest} to {highest})"
        )


def compute_dtype(device: torch.device) -> torch.dtype:
    """Return the precision to compute in.

    bfloat16 on GPUs that have it (compute capability 8.0), float16 with a loss scale on older ones, float32 on a CPU.
    """
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16


def loader_process_count(group: ProcessGroup, requested: int | None) -> int:
    """Return the number of loader processes: as requested, else an equal share of the processors, at most 16."""
    if requested is not None:
        return requested
    processors = (os.cpu_count() or 1) // group.local_world_size
    if group.device.type == "cpu":
        processors -= 1  # one is left to the trainer itself
    return max(1, min(MAX_LOADER_PROCESSES, processors))


def device_name(device: torch.device) -> str:
    """Return the model name of the GPU or of the processor; "" when it is not known."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else provenance.cpu_model()


def peak_memory_gb(device: torch.device) -> float:
    """Return the peak memory so far in GB (1e9 bytes): of the GPU, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def sum_over_processes(group: ProcessGroup, values: torch.Tensor) -> torch.Tensor:
    """Sum a tensor over all ranks, in place, and return it."""
    if group.world_size > 1:
        dist.all_reduce(values)
    return values


def barrier(group: ProcessGroup) -> None:
    """Wait until all ranks have called it."""
    sum_over_processes(group, torch.zeros(1, device=group.device)).item()


def exit_process(group: ProcessGroup) -> None:
    """Exit at once with code 0 when there are several ranks, without any cleanup; else return.

    Gloo's threads are still running. With a regular exit, one short run in four aborted; after
    `destroy_process_group`, one in ten hung: this thread waited for Gloo's, and Gloo's for Python's lock.
    """
    if group.world_size > 1:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(0)
