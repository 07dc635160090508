"""What concerns this computer: the command that runs a module of this project, and the GPUs that are visible."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from train.tools.agent_protocol import module_folders_variable
from train.tools.process import project_search_path

GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"  # the GPUs that a process sees: indices or UUIDs (NVIDIA, "CUDA C++ guide")


def module_command(
    module: str, *arguments: str, module_folders: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> list[str]:
    """Return the command that runs a module of this project from any folder, with `environment` added to the caller's.

    `python -P` ignores packages of the same names in the current folder. The user's modules are in `module_folders`.
    """
    variables = {
        "PYTHONPATH": project_search_path(),
        **(module_folders_variable(module_folders) if module_folders else {}),
        **(environment or {}),
    }
    assignments = [f"{name}={value}" for name, value in variables.items()]
    return ["env", *assignments, sys.executable, "-P", "-m", module, *arguments]


def visible_gpus() -> tuple[str, ...]:
    """Return the NVIDIA GPUs that a process on this computer can see, as CUDA_VISIBLE_DEVICES names them.

    Reads that variable or else the driver's files in /proc, because importing torch takes seconds.
    """
    names = os.environ.get(GPUS_VARIABLE)
    if names is not None:
        return tuple(name.strip() for name in names.split(",") if name.strip() not in ("", "-1"))
    return tuple(map(str, range(len(list(Path("/proc/driver/nvidia/gpus").glob("*"))))))
