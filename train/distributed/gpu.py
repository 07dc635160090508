"""Whether this torch can use the GPUs of this machine, and what to do when their memory is full."""

import contextlib
import os
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from train.tools.errors import MachineTrouble, TrainingError, first_line

FOREIGN_MEMORY_SHARE = 0.1  # of a GPU's memory, from which on other processes are named as the cause that it is full


@contextlib.contextmanager
def full_memory_explained(device: torch.device, activity: str) -> Iterator[None]:
    """Turn torch's error about a GPU whose memory is full into one line that says what to change.

    `activity` is the subject of that line: what needs so much memory. Raises `MachineTrouble` when other processes use
    a part of the memory, else `TrainingError`: the next attempt would need as much.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        foreign_bytes = total_bytes - free_bytes - torch.cuda.memory_reserved(device)
        text = f"{activity} needs more memory than GPU {device.index} has free: {total_bytes / 1e9:.1f} GB"
        if foreign_bytes > FOREIGN_MEMORY_SHARE * total_bytes:
            raise MachineTrouble(
                f"{text}, of which other processes use {foreign_bytes / 1e9:.1f} GB; end them (nvidia-smi lists them)"
            ) from error
        raise TrainingError(
            f"{text}; lower batch (images per GPU) of that phase in the recipe. The global batch stays the same if you "
            "halve batch, double gpus and pass --keep-batch; batch norm then sees half as many images at once"
        ) from error


def bind_to_numa_node(device: torch.device, root: Path = Path("/")) -> None:
    """Let this process, and those that it starts, run on the processors beside its GPU only.

    A machine with two sockets has half of its GPUs at each, and what crosses between them is slower. Nothing changes
    where the kernel does not know the GPU's node, or where this process may use none of the node's processors.
    """
    properties = torch.cuda.get_device_properties(device)
    domain, bus, slot = (getattr(properties, f"pci_{name}_id", 0) for name in ("domain", "bus", "device"))
    with contextlib.suppress(OSError, ValueError):
        node = int((root / f"sys/bus/pci/devices/{domain:04x}:{bus:02x}:{slot:02x}.0/numa_node").read_text())
        if node < 0:  # a machine with one node
            return
        ranges = (root / f"sys/devices/system/node/node{node}/cpulist").read_text().strip().split(",")
        bounds = [(int(first), int(last or first)) for first, _, last in (text.partition("-") for text in ranges)]
        cpus = {cpu for first, last in bounds for cpu in range(first, last + 1)} & os.sched_getaffinity(0)
        if cpus:
            os.sched_setaffinity(0, cpus)


def find_gpu_problem(driver_folder: Path = Path("/proc/driver/nvidia/gpus")) -> str:
    """Return why this torch cannot use a GPU of this machine; "" when it can, or when there is none or it is hidden."""
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if not torch.cuda.is_available():
        if is_hidden or not any(driver_folder.glob("*")):
            return ""
        if torch.version.cuda is None:
            return f"torch {torch.__version__} is built without CUDA; install one that is built for this machine's GPU"
        return (
            f"torch {torch.__version__} (CUDA {torch.version.cuda}) sees no GPU; its driver is too old or broken: "
            "update it (nvidia-smi)"
        )
    for index in range(torch.cuda.device_count()):
        name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
        if problem := explain_unsupported_gpu(name, capability, torch.cuda.get_arch_list()):
            return problem
    return ""


def find_problem_after_abort(device: torch.device, seconds: float) -> str:
    """Return why a GPU cannot go on after its collectives were aborted, "" when it can. It has so many seconds."""
    if device.type == "cpu":
        return ""
    problems: list[str] = []

    def compute() -> None:
        try:
            torch.cuda.synchronize(device)
            works = torch.ones(1, device=device).add_(1).item() == 2
            problems.append("" if works else "the GPU computes nothing after the abort")
        except RuntimeError as error:
            problems.append(first_line(error))

    thread = threading.Thread(target=compute, daemon=True)
    thread.start()
    thread.join(seconds)
    return problems[0] if problems else f"the GPU has not ended its work {seconds:g} s after the abort"


def explain_unsupported_gpu(name: str, capability: tuple[int, int], compiled_archs: Sequence[str]) -> str | None:
    """Return one line when this torch has no code for a GPU, else None.

    `compiled_archs` is `torch.cuda.get_arch_list()`. Code for sm_80 also runs on sm_86, but not on sm_90; code for
    compute_80 (PTX) runs on all later GPUs; code for sm_90a on sm_90 only.
    """
    for arch in compiled_archs:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", arch)
        if match:
            kind, compiled, suffix = match[1], (int(match[2]), int(match[3])), match[4]
            runs_on_later = not suffix and (kind == "compute" or compiled[0] == capability[0])
            if compiled == capability or (compiled <= capability and runs_on_later):
                return None
    needed_arch = f"sm_{capability[0]}{capability[1]}"
    gpu_is_older = compiled_archs and all(_arch_number(arch) > _arch_number(needed_arch) for arch in compiled_archs)
    return (
        f"{name} is {needed_arch}, and torch {torch.__version__} is built for {', '.join(compiled_archs) or 'no GPU'}; "
        f"install {'an older' if gpu_is_older else 'another'} torch that has {needed_arch}, or use other GPUs"
    )


def _arch_number(arch: str) -> int:
    return int("".join(re.findall(r"\d", arch)) or 0)
