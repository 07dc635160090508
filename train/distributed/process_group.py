"""The processes of a training run: this process's rank and device, collectives over all ranks, and timeouts."""

import contextlib
import datetime
import os
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from train.tools import agent_protocol, host
from train.tools.errors import MachineTrouble, TrainingError

from . import network, peer_filter, regroup, rendezvous
from .gpu import find_gpu_problem
from .guard import StepGuard

FIRST_STEP_TIMEOUT = datetime.timedelta(seconds=300)  # before it, data may be indexed and kernels searched
STEADY_TIMEOUT = datetime.timedelta(seconds=60)  # torch's defaults of 10 and 30 minutes exceed some whole runs
EXIT_TIMEOUT = datetime.timedelta(seconds=5)  # for the other ranks to end too
MAX_LOADER_PROCESSES = 16  # per trainer process
# After an error or a timeout of a collective, torch's watchdog sleeps four times the first value, 15 s by default, and
# ends the process only then: all ranks may write traces of their collectives meanwhile. A watchdog that hangs itself
# ends the process after the last value, 480 s by default. Source: ProcessGroupNCCL.cpp of PyTorch, Watchdog::runLoop
# and HeartbeatMonitor.
NCCL_WATCHDOG_VARIABLES = {
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "120",
}
# Where processes go on in place, no thread of torch ends them: `Handover` asks NCCL for errors. NVLink SHARP is off, as
# NVIDIA's resiliency extension demands, which aborts communicators too.
IN_PLACE_NCCL_VARIABLES = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "NCCL_NVLS_ENABLE": "0",
}


@dataclass(frozen=True)
class ProcessGroup:
    """This process's place in the run: global rank, rank on its machine, world size, and device."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    nccl_log_path: Path | None = None  # file in which NCCL logs the transport it chooses
    guard: StepGuard | None = None  # with NCCL, where processes go on in place

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes files for all."""
        return self.rank == 0

    def log(self, text: str) -> None:
        """Print a line, in rank 0."""
        if self.is_first:
            print(text, flush=True)

    def confirm_sums(self) -> None:
        """Raise `RuntimeError` when a sum until now may be wrong, before the host acts on it. Gloo raises by itself."""
        if self.guard:
            self.guard.confirm()


def join_process_group(is_cancelled: Callable[[], bool] = lambda: False) -> ProcessGroup:
    """Join the process group that RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and IMGNET_TOKEN describe.

    Without these variables the run has one process. The backend is NCCL with GPUs, else Gloo. A GPU that torch cannot
    use is said aloud where the run has one machine. It raises `TrainingError` where the agent says that the GPU must be
    used (`NEEDS_GPU_VARIABLE`), and `MachineTrouble` where the run has more machines. Raises `RuntimeError` for fewer
    GPUs than processes, and torch's `DistNetworkError` when `is_cancelled` is true before rank 0 listens.
    """
    rank = int(os.environ.get("RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    device = torch.device("cpu")
    if problem := find_gpu_problem():
        refusal = f'{problem}; to train on the CPUs, set CUDA_VISIBLE_DEVICES="" on all machines'
        if world_size > local_world_size:  # the other machines may well use theirs
            raise MachineTrouble(refusal)
        if agent_protocol.NEEDS_GPU_VARIABLE in os.environ:
            raise TrainingError(refusal)
        if local_rank == 0:
            print(f"WARNING: THE RUN TRAINS ON THE CPU: {problem}", flush=True)
    elif torch.cuda.is_available():
        gpu_count = torch.cuda.device_count()
        if local_rank >= gpu_count:
            raise RuntimeError(
                f"process {local_rank} has no GPU: this machine has {gpu_count}; use --procs {gpu_count} or fewer"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    nccl_log_path: Path | None = None
    guard: StepGuard | None = None
    if world_size > 1:
        if device.type == "cuda":
            if regroup.goes_on_in_place(device):
                os.environ |= IN_PLACE_NCCL_VARIABLES
                guard = StepGuard(world_size, device, os.environ.get(agent_protocol.TOKEN_VARIABLE, ""))
                regroup.before_abort(guard.poison)
            for name, value in NCCL_WATCHDOG_VARIABLES.items():  # read when the group is made
                os.environ.setdefault(name, value)
            if rank == 0:
                nccl_log_path = network.enable_nccl_log()
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=rendezvous.open_store(rank, world_size, FIRST_STEP_TIMEOUT, is_cancelled),
            rank=rank,
            world_size=world_size,
            timeout=FIRST_STEP_TIMEOUT,
        )
        peer_filter.guard_ports()
    return ProcessGroup(rank, local_rank, world_size, local_world_size, device, nccl_log_path, guard)


def print_transport(group: ProcessGroup, over_sockets: bool = False) -> bool:
    """Print what carries the collectives, with a warning when it is slow. Call it after the first collective.

    Returns whether GPUs of several machines send over sockets: the same on all ranks, though only the first one knows.
    NCCL logs in the first group of a process only; `over_sockets` is what was returned there.
    """
    if group.is_first and group.world_size > 1:
        backend = "nccl" if group.device.type == "cuda" else "gloo"
        transport = network.detect_transport(backend, group.nccl_log_path)
        print(f"{group.world_size} processes, by {transport}", flush=True)
        if warning := network.transport_warning(transport, network.has_efa()):
            print(f"WARNING: {warning}", flush=True)
        over_sockets |= transport == "sockets" and group.world_size > group.local_world_size
    return bool(read_sum(group, torch.tensor([float(over_sockets)])).item())


def tighten_timeouts(group: ProcessGroup, step_seconds: float) -> None:
    """Shorten the timeout of collectives after the first step, which took `step_seconds`.

    From then on, a collective that takes more than a minute, or than 30 such steps, has lost a process. The timeout
    holds for all groups of this process, also for those of comm_hooks.py. All their ports are known now, and guarded.
    """
    if group.world_size > 1:
        peer_filter.guard_ports()
        timeout = max(STEADY_TIMEOUT, datetime.timedelta(seconds=30 * step_seconds))
        for torch_group in list(dist.distributed_c10d._world.pg_map):
            torch_group.set_timeout(timeout)


def check_same_on_all_ranks(group: ProcessGroup, name: str, number: int) -> None:
    """Raise `TrainingError` when a number differs between the ranks, which would then train on different data.

    The number must be below 2**53, so that float64 holds it exactly. `name` is a plural: "the numbers of images".
    """
    bounds = torch.tensor([number, -number], dtype=torch.float64, device=group.device)
    if group.world_size > 1:
        regroup.start_sum(bounds, dist.ReduceOp.MAX).wait()
        group.confirm_sums()
    highest, lowest = int(bounds[0].item()), int(-bounds[1].item())
    if highest != lowest:
        raise TrainingError(
            f"{name} differ between the machines (this one has {number}, others from {lowest} to {highest})"
        )


def compute_dtype(device: torch.device, precision: str = "auto") -> torch.dtype:
    """Return the type to compute in for the precision of a recipe: float32 on a CPU in any case.

    "auto" is bfloat16 on GPUs that have it (compute capability 8.0), float16 with a loss scale on older ones. Raises
    `TrainingError` for "bf16" on an older GPU, which would only emulate it.
    """
    if device.type != "cuda":
        return torch.float32
    has_bfloat16 = torch.cuda.get_device_capability(device) >= (8, 0)
    if precision == "bf16" and not has_bfloat16:
        name = torch.cuda.get_device_name(device)
        raise TrainingError(f"precision: {name} has no bfloat16; set precision to fp16 or auto (--precision auto)")
    automatic = torch.bfloat16 if has_bfloat16 else torch.float16
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}.get(precision, automatic)


def loader_process_count(group: ProcessGroup, requested: int | None) -> int:
    """Return the number of loader processes: as requested, else an equal share of the processors, at most 16."""
    if requested is not None:
        return requested
    processors = host.usable_cpu_count() // group.local_world_size
    if group.device.type == "cpu":
        processors -= 1  # one is left to the trainer itself
    return max(1, min(MAX_LOADER_PROCESSES, processors))


def device_name(device: torch.device) -> str:
    """Return the model name of the GPU or of the processor; "" when it is not known."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else host.cpu_model()


def peak_memory_gb(device: torch.device) -> float:
    """Return the peak memory so far in GB (1e9 bytes): of the GPU, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def sum_over_processes(group: ProcessGroup, values: torch.Tensor) -> torch.Tensor:
    """Sum a tensor over all ranks, in place, and return it. The host may read it after `confirm_sums`."""
    if group.world_size > 1:
        regroup.start_sum(values).wait()
    return values


def read_sum(group: ProcessGroup, values: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor over all ranks, on the CPU."""
    sums = sum_over_processes(group, values.to(group.device))
    group.confirm_sums()
    return sums.cpu()


def barrier(group: ProcessGroup) -> None:
    """Wait until all ranks have called this function."""
    read_sum(group, torch.zeros(1))


def leave_together(group: ProcessGroup) -> None:
    """Wait until all ranks have called this function, and on GPUs until no rank still sends. Call it before the exit.

    NCCL's kernel may be done here while a thread of this process still sends to others, and the exit would close its
    connections. So on GPUs the ranks meet once more, over the store.
    """
    barrier(group)
    if group.device.type == "cuda" and group.world_size > 1:
        meet_over_store(dist.distributed_c10d._get_default_store(), group)


def meet_over_store(store: Store, group: ProcessGroup) -> None:
    """Wait at most `EXIT_TIMEOUT` until all ranks have called this. Rank 0 holds the store, so it returns last."""
    others = [rank for rank in range(group.world_size) if rank]
    with contextlib.suppress(RuntimeError):  # a rank is gone: the others need not wait for it
        if group.is_first:
            store.wait([f"leaving/{rank}" for rank in others], EXIT_TIMEOUT)
            store.set("all-leave", "1")
            store.wait([f"left/{rank}" for rank in others], EXIT_TIMEOUT)
        else:
            store.set(f"leaving/{group.rank}", "1")
            store.wait(["all-leave"], EXIT_TIMEOUT)
            store.set(f"left/{group.rank}", "1")


def exit_process(group: ProcessGroup) -> None:
    """Exit at once with code 0 when there are or were several ranks, without any cleanup; else return.

    Gloo's threads are still running. With a regular exit, one short run in four aborted; after
    `destroy_process_group`, one in ten hung: this thread waited for Gloo's, and Gloo's for Python's lock.
    """
    if group.world_size > 1 or regroup.has_left_groups():
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(0)
