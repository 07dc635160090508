"""The GPUs of this machine as nvidia-smi shows them: their load, and whether they still answer. No caller waits for it.

A GPU may fall off the bus, and its driver may hang; nothing but a restart of the machine, or another machine, helps
then (NVIDIA, "Xid Errors": 79, GPU has fallen off the bus). Processes that use the GPU fail or hang in either case, as
they do for many other reasons.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable

from cluster.state.heartbeats import GpuLoad
from train.tools import host, process

ANSWER_SECONDS = 60.0  # nvidia-smi takes long on machines with many GPUs, and a wrong answer costs a machine
QUERY_FIELDS = ("index", "uuid")
KERNEL_LOG_SECONDS = 1.0  # for dmesg, which asks no driver
# "[ 1234.5] NVRM: Xid (PCI:0000:3b:00): 79, pid=12, name=python, GPU has fallen off the bus." (NVIDIA, "Xid Errors").
# The kernel's seconds since the boot are those of CLOCK_MONOTONIC.
XID_PATTERN = re.compile(r"^\[ *(\d+\.\d+)\] NVRM: (Xid \(.+)$", re.MULTILINE)
MAX_COMPLAINT_CHARACTERS = 200
KILL_SECONDS = 0.5  # for a killed nvidia-smi to end; one that hangs in the driver is left behind
LOAD_FIELDS = {  # nvidia-smi's name of a value: name here, factor from nvidia-smi's unit to the unit here
    "utilization.gpu": ("use", 1.0),
    "memory.used": ("memory_gb", 2**20 / 1e9),
    "temperature.gpu": ("temperature", 1.0),
    "power.draw": ("watts", 1.0),
}
QUERY_SECONDS = 5  # between two measurements by nvidia-smi
STALE_SECONDS = 20.0  # older values are not shown


class NvidiaSmi:
    """nvidia-smi in the background, one run at a time, which prints a line of values for each GPU."""

    def __init__(self) -> None:
        self.is_installed = shutil.which("nvidia-smi") is not None
        self.process: subprocess.Popen[bytes] | None = None
        self.unread = b""  # the beginning of a line

    def start(self, fields: Iterable[str], *options: str) -> None:
        """Start it anew, if it is installed."""
        self.stop()
        if self.is_installed:
            with contextlib.suppress(OSError):
                self.process = subprocess.Popen(
                    host.gpu_query_command(fields, *options),
                    bufsize=0,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=process.die_with_parent,
                )
                assert self.process.stdout
                os.set_blocking(self.process.stdout.fileno(), False)

    def read_lines(self) -> tuple[list[str], bool]:
        """Return the lines that it has printed since the last call, and whether it had ended before."""
        if self.process is None or self.process.stdout is None:
            return [], True
        has_ended = self.process.poll() is not None
        *lines, self.unread = (self.unread + (self.process.stdout.read() or b"")).split(b"\n")
        if has_ended and self.unread:  # no more will come, not even the end of the line
            lines, self.unread = [*lines, self.unread], b""
        return [line.decode(errors="replace") for line in lines], has_ended

    def stop(self) -> None:
        """Kill it. One that hangs in the driver is left behind after a moment."""
        if self.process and self.process.stdout:
            if self.process.poll() is None:
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(self.process.pid, signal.SIGKILL)
                    self.process.wait(KILL_SECONDS)
            self.process.stdout.close()
        self.process, self.unread = None, b""


class GpuSampler:
    """Reads what nvidia-smi prints every few seconds. Starts it again when it has ended; one that hangs may go on."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.nvidia_smi = NvidiaSmi()
        self.start_time = float("-inf")
        self.loads: dict[int, tuple[float, GpuLoad]] = {}  # by GPU index, with the time when it was read

    def read(self) -> tuple[GpuLoad, ...]:
        """Return each GPU's newest load, by GPU index; none while nvidia-smi is missing or does not answer."""
        now = self.clock()
        lines, has_ended = self.nvidia_smi.read_lines()
        self.loads |= {index: (now, load) for index, load in filter(None, map(_parse_load, lines))}
        if has_ended and now - self.start_time >= QUERY_SECONDS:
            self.start_time = now
            self.nvidia_smi.start(["index", *LOAD_FIELDS], "-l", str(QUERY_SECONDS))
        return tuple(load for _, (read_at, load) in sorted(self.loads.items()) if now - read_at < STALE_SECONDS)

    def close(self) -> None:
        """End nvidia-smi, and start none again."""
        self.nvidia_smi.stop()
        self.start_time = float("inf")


def _parse_load(line: str) -> tuple[int, GpuLoad] | None:
    """Return GPU index and load in a line of nvidia-smi, None for others. What the GPU lacks ("[N/A]") is None."""
    index, *cells = host.gpu_query_cells(line)
    values = {}
    for (name, factor), cell in zip(LOAD_FIELDS.values(), cells, strict=False):
        with contextlib.suppress(ValueError):
            values[name] = round(float(cell) * factor, 2)
    return (int(index), GpuLoad(**values)) if index.isdecimal() and values else None


class GpuCheck:
    """Counts the GPUs that answer, and compares them with those that there must be.

    These are at least `expected`, and as many as answered the first check. Without nvidia-smi nothing is known.
    """

    def __init__(self, expected: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.expected = expected
        self.clock = clock
        self.nvidia_smi = NvidiaSmi()
        self.lines: list[str] = []  # of the check that is under way
        self.start_time = 0.0
        self.is_under_way = False

    @property
    def is_needed(self) -> bool:
        """Whether this machine has GPUs, or may have some, so that they may have caused a failure."""
        return self.nvidia_smi.is_installed and (self.expected > 0 or self.is_under_way)

    def start(self) -> None:
        """Start a check. One that is under way is given up: its answer may be older than the failure."""
        self.lines, self.start_time = [], self.clock()
        self.is_under_way = self.nvidia_smi.is_installed
        self.nvidia_smi.start(QUERY_FIELDS)

    def poll(self) -> str | None:
        """Return what is wrong with the GPUs, "" when nothing is known to be wrong; None while the check is under way.

        The problem of a finished check is returned once.
        """
        if not self.is_under_way:
            return ""
        lines, has_ended = self.nvidia_smi.read_lines()
        self.lines += lines
        if not has_ended and self.clock() - self.start_time < ANSWER_SECONDS:
            return None
        messages = [line.strip() for line in self.lines if not _is_gpu_line(line)]
        count = len(self.lines) - len(messages) if has_ended else 0
        complaint = " ".join(messages) if has_ended else f"no answer in {ANSWER_SECONDS:.0f} s"
        self.close()
        expected = self.expected
        self.expected = max(expected, count)
        if count >= expected:
            return ""
        quote = f" (nvidia-smi: {complaint[:MAX_COMPLAINT_CHARACTERS]})" if complaint else ""
        return f"{count} of {expected} GPUs answer{quote}"

    def newest_xid(self, since: float) -> str:
        """Return what NVIDIA's driver has told the kernel's log last about a fault of a GPU; "" when it told nothing.

        `since` is in seconds of `time.monotonic`. Where only root may read the log, nothing is known.
        """
        log = ""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            argv = ["dmesg", "--facility", "kern", "--color=never"]
            log = subprocess.run(argv, capture_output=True, timeout=KERNEL_LOG_SECONDS).stdout.decode(errors="replace")
        xids = [match[2] for match in XID_PATTERN.finditer(log) if float(match[1]) >= since]
        return f"kernel: {xids[-1][:MAX_COMPLAINT_CHARACTERS]}" if xids else ""

    def close(self) -> None:
        """Give up a check that is under way."""
        self.nvidia_smi.stop()
        self.is_under_way = False


def _is_gpu_line(line: str) -> bool:
    """Whether a line of nvidia-smi describes a GPU, and is no message."""
    cells = host.gpu_query_cells(line)
    return len(cells) == len(QUERY_FIELDS) and cells[0].isdecimal() and cells[1].startswith("GPU-")
