"""Run a training script that was written for CUDA on the CPU, and change nothing in its text.

on_cpu.py SCRIPT ARGUMENTS...

Calls that name a CUDA device or NCCL get the CPU and Gloo instead: `torch.cuda.set_device`, `.to(0)`,
`torch.load(map_location="cuda:0")`, `init_process_group("nccl")` and `DistributedDataParallel(device_ids=[0])`.
A torchvision without its operators, as PyPI has it beside a torch for CPUs, can be imported.
A group of Gloo is never destroyed: a thread of Gloo may want Python's lock, and both wait for ever, or
the process is aborted when Python ends (pytorch issue 190489).
"""

import importlib.util
import os
import runpy
import sys
from pathlib import Path

import torch
import torch.distributed
import torch.nn.parallel


def is_index(*to):
    """Return whether `.to(...)` names a CUDA device by its number."""
    return bool(to) and isinstance(to[0], int) and not isinstance(to[0], bool)


class ParallelOnCpu(torch.nn.parallel.DistributedDataParallel):
    def __init__(self, module, device_ids=None, **options):
        super().__init__(module, **options)


if not torch.cuda.is_available():
    tensor_to, module_to, load = torch.Tensor.to, torch.nn.Module.to, torch.load
    init_process_group = torch.distributed.init_process_group

    torch.cuda.set_device = lambda device: None
    torch.Tensor.to = lambda self, *to, **options: self if is_index(*to) else tensor_to(self, *to, **options)
    torch.nn.Module.to = lambda self, *to, **options: self if is_index(*to) else module_to(self, *to, **options)
    torch.load = lambda path, **options: load(path, **{**options, "map_location": "cpu"})
    torch.distributed.init_process_group = lambda backend=None, **options: init_process_group("gloo", **options)
    torch.distributed.destroy_process_group = lambda group=None: None
    torch.nn.parallel.DistributedDataParallel = ParallelOnCpu
    if importlib.util.find_spec("torchvision"):
        import without_operators  # noqa: F401

sys.argv = sys.argv[1:]
sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    if end.code:
        raise
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
