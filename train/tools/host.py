"""What the kernel and nvidia-smi say about this machine: its memory, its network counters, its GPUs. Imports no torch.

The trainer, the agent and the probe of a new machine read these through here. Sources: proc(5), and
`nvidia-smi --help-query-gpu`. `root` is the folder that stands for / in tests. 1 GB is 1e9 bytes.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

KIB = 1024  # bytes; /proc/meminfo says kB and means KiB
LOOPBACK = "lo"


@dataclass(frozen=True)
class Memory:
    """The memory of a machine in GB: all of it, and what the kernel can still give to processes."""

    total_gb: float
    available_gb: float


def read_memory(root: Path = Path("/")) -> Memory | None:
    """Return the memory of this machine, None where the kernel does not say it."""
    with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
        lines = (root / "proc/meminfo").read_text().splitlines()
        kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines[:5])}
        return Memory(kib["MemTotal"] * KIB / 1e9, kib["MemAvailable"] * KIB / 1e9)
    return None


def read_interface_bytes(root: Path = Path("/")) -> dict[str, tuple[int, int]]:
    """Return the bytes received and sent since boot by every network interface but the loopback."""
    counts = {}
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (root / "proc/net/dev").read_text().splitlines()[2:]:
            name, _, rest = line.partition(":")
            numbers = rest.split()
            if name.strip() != LOOPBACK:
                counts[name.strip()] = int(numbers[0]), int(numbers[8])
    return counts


def gpu_query_command(fields: Sequence[str], *options: str, program: str = "nvidia-smi") -> list[str]:
    """Return the command with which nvidia-smi prints one line per GPU with these values."""
    return [program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", *options]


def gpu_query_cells(line: str) -> list[str]:
    """Return the values in a line that nvidia-smi printed. A value that a GPU does not have is "[N/A]"."""
    return [cell.strip() for cell in line.split(",")]
