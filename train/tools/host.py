"""What the kernel and nvidia-smi say about this machine: memory, network counters, GPUs, time. Imports no torch.

The trainer, the agent and the probe of a new machine read these through here. Sources: proc(5), and
`nvidia-smi --help-query-gpu`. `root` is the folder that stands for / in tests. 1 GB is 1e9 bytes.
"""

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

KIB = 1024  # bytes; /proc/meminfo says kB and means KiB
LOOPBACK = "lo"
CLOCK_OFFSET_VARIABLE = "IMGNET_CLOCK_OFFSET"  # set by the agent, so that its trainers have the same clock


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


class SteadyClock:
    """A clock that tells Unix time and never jumps: the wall clock as it was once, and the seconds since.

    Whoever sets the wall clock during a run changes no duration. `offset` is the Unix time of the machine's boot.
    """

    def __init__(self, offset: float | None = None) -> None:
        given = os.environ.get(CLOCK_OFFSET_VARIABLE)
        self.offset = offset if offset is not None else float(given) if given else self.wall_offset()

    @staticmethod
    def wall_offset() -> float:
        """Return the Unix time of the machine's boot by the wall clock as it is now."""
        return time.time() - seconds_since_boot()

    def time(self) -> float:
        """Return the Unix time in seconds."""
        return self.offset + seconds_since_boot()

    def jump(self) -> float:
        """Return by how many seconds the wall clock was set forward since this clock was started."""
        return self.wall_offset() - self.offset


def seconds_since_boot() -> float:
    """Return the seconds since the boot of this machine, with those in which it was suspended where it counts them."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def boot_id(root: Path = Path("/")) -> str:
    """Return the random ID of this machine's last boot, "" where the kernel does not say it."""
    with contextlib.suppress(OSError):
        return (root / "proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


steady_clock = SteadyClock()


def unix_time() -> float:
    """Return the Unix time by this process's steady clock."""
    return steady_clock.time()
