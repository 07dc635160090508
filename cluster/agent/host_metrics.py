"""Measures the load of this machine: processors, memory, network, GPUs; and whether GPUs still answer. Never blocks.

Network traffic that bypasses the kernel is counted by the driver below /sys/class/infiniband: EFA in bytes
(hw_counters), InfiniBand in words of four bytes (PortCounters of its specification). GPUs are as nvidia-smi shows them.
One may fall off the bus, and its driver may hang; only a restart of the machine, or another machine, helps then
(NVIDIA, "Xid Errors": 79). Processes that use the GPU fail or hang in either case, as they do for many other reasons.
"""

import contextlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from cluster.state.heartbeats import GpuLoad, MachineLoad
from train.tools import host, process

# Of a port: the files that count what it received and sent, and the bytes of one count.
EFA_COUNTERS = ("hw_counters/rx_bytes", "hw_counters/tx_bytes", 1)
INFINIBAND_COUNTERS = ("counters/port_rcv_data", "counters/port_xmit_data", 4)
ANSWER_SECONDS = 60.0  # nvidia-smi takes long on machines with many GPUs, and a wrong answer costs a machine
QUERY_SECONDS = 10.0  # from the start of a run of nvidia-smi to that of the next
STALE_SECONDS = 30.0  # older loads are not shown
KILL_SECONDS = 0.5  # for a killed nvidia-smi to end; one that hangs in the driver is left behind
LOAD_FIELDS = {  # nvidia-smi's name of a value: name here, factor from nvidia-smi's unit to the unit here
    "utilization.gpu": ("use", 1.0),
    "memory.used": ("memory_gb", 2**20 / 1e9),
    "temperature.gpu": ("temperature", 1.0),
    "power.draw": ("watts", 1.0),
}
KERNEL_LOG_SECONDS = 1.0  # for dmesg, which asks no driver
# "[ 1234.5] NVRM: Xid (PCI:0000:3b:00): 79, pid=12, name=python, GPU has fallen off the bus." (NVIDIA, "Xid Errors").
# The kernel's seconds since the boot are those of CLOCK_MONOTONIC.
XID_PATTERN = re.compile(r"^\[ *(\d+\.\d+)\] NVRM: (Xid \(.+)$", re.MULTILINE)
MAX_COMPLAINT_CHARACTERS = 200


class HostSampler:
    """Measures the load of this machine between two calls of `sample`. The caller closes `gpus` at the end."""

    def __init__(self, root: Path = Path("/"), clock: Callable[[], float] = time.monotonic) -> None:
        self.root = root
        self.clock = clock
        self.gpus = Gpus(clock)
        self.last_cpu_ticks = self._read_cpu_ticks()
        self.last_network_bytes = self._read_network_bytes()
        self.last_network_time = clock()

    def sample(self) -> MachineLoad:
        """Return the load. A value that cannot be measured is None."""
        memory = host.read_memory(self.root)
        received, sent = self._network_rates()
        return MachineLoad(
            cpu=self._cpu_percent(),
            memory_gb=round(memory.total_gb - memory.available_gb, 2) if memory else None,
            memory_total_gb=round(memory.total_gb, 2) if memory else None,
            net_in_gbit=received,
            net_out_gbit=sent,
            gpus=self.gpus.read_loads(),
        )

    def _cpu_percent(self) -> float | None:
        previous, self.last_cpu_ticks = self.last_cpu_ticks, self._read_cpu_ticks()
        busy, total = (now - before for now, before in zip(self.last_cpu_ticks, previous, strict=True))
        # The kernel's count of ticks spent waiting for disks may decrease, so the share is clamped.
        return round(100 * min(max(busy / total, 0.0), 1.0), 1) if total > 0 else None

    def _read_cpu_ticks(self) -> tuple[int, int]:
        """Return the busy ticks and all ticks of all cores, by proc(5). Guests' ticks are among the user's."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            ticks = [int(number) for number in (self.root / "proc/stat").read_text().splitlines()[0].split()[1:9]]
            return sum(ticks) - ticks[3] - ticks[4], sum(ticks)  # idle, and waiting for a disk
        return 0, 0

    def _network_rates(self) -> tuple[float | None, float | None]:
        previous, self.last_network_bytes = self.last_network_bytes, self._read_network_bytes()
        previous_time, self.last_network_time = self.last_network_time, self.clock()
        seconds = self.last_network_time - previous_time
        if not self.last_network_bytes or seconds <= 0:
            return None, None
        # A new interface has no rate yet, and counters that were reset count as no traffic.
        pairs = [(now, previous[name]) for name, now in self.last_network_bytes.items() if name in previous]
        received, sent = (sum(max(0, now[way] - before[way]) for now, before in pairs) for way in (0, 1))
        return round(received * 8e-9 / seconds, 4), round(sent * 8e-9 / seconds, 4)

    def _read_network_bytes(self) -> dict[str, tuple[int, int]]:
        """Return the bytes received and sent so far, by interface or by folder of a port.

        Interfaces without a device, such as bridges and bonds, would count bytes twice; a container has no other.
        """
        port_counts = {}
        for port in self.root.glob("sys/class/infiniband/*/ports/*"):
            for received_file, sent_file, bytes_per_count in (INFINIBAND_COUNTERS, EFA_COUNTERS):
                with contextlib.suppress(OSError, ValueError):
                    received, sent = (int((port / file).read_text()) for file in (received_file, sent_file))
                    port_counts[str(port)] = received * bytes_per_count, sent * bytes_per_count
        counts = host.read_interface_bytes(self.root)
        devices = {path.parent.name for path in self.root.glob("sys/class/net/*/device")}
        if port_counts:  # which have the bytes of IP over InfiniBand too
            devices = {name for name in devices if not name.startswith("ib")}
        physical_counts = {name: count for name, count in counts.items() if name in devices}
        return (physical_counts or counts) | port_counts


class Gpus:
    """The GPUs of this machine, and nvidia-smi in the background, one run at a time.

    There must be `expected` GPUs, or as many as have ever answered. Without nvidia-smi nothing is known.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.expected = 0
        self.is_installed = shutil.which("nvidia-smi") is not None
        self.process: subprocess.Popen[bytes] | None = None
        self.start_time = self.answer_time = float("-inf")
        self.loads: tuple[GpuLoad, ...] = ()  # of the last answer
        self.count = 0  # of the GPUs in the answer of the run that was started last
        self.complaint = ""  # in that answer
        self.is_checking = False  # a check is under way

    @property
    def is_check_needed(self) -> bool:
        """Whether this machine has GPUs, or may have some, so that they may have caused a failure."""
        return self.is_installed and (self.expected > 0 or self.is_checking)

    def read_loads(self) -> tuple[GpuLoad, ...]:
        """Return each GPU's newest load, by GPU index; none while nvidia-smi is missing or does not answer."""
        self._take_answer()
        if not self.process and not self.is_checking and self.clock() - self.start_time >= QUERY_SECONDS:
            self._start()
        return self.loads if self.clock() - self.answer_time < STALE_SECONDS else ()

    def start_check(self) -> None:
        """Start a check. A run that is under way is given up: its answer may be older than the failure."""
        self.is_checking = self.is_installed
        self._start()

    def poll_check(self) -> str | None:
        """Return, once, what a check found wrong with the GPUs; "" for nothing, None while it is running."""
        if not self.is_checking:
            return ""
        expected = self.expected
        self._take_answer()
        if self.process and self.clock() - self.start_time < ANSWER_SECONDS:
            return None
        if self.process:
            self.complaint = f"no answer in {ANSWER_SECONDS:.0f} s"
        self._stop()
        self.is_checking = False
        if self.count >= expected:
            return ""
        quote = f" (nvidia-smi: {self.complaint[:MAX_COMPLAINT_CHARACTERS]})" if self.complaint else ""
        return f"{self.count} of {expected} GPUs answer{quote}"

    def newest_xid(self, since: float) -> str:
        """Return the last fault of a GPU that NVIDIA's driver has written to the kernel's log; "" for none.

        `since` is in seconds of `time.monotonic`. Where only root may read the log, it is "" too.
        """
        log = ""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            argv = ["dmesg", "--facility", "kern", "--color=never"]
            log = subprocess.run(argv, capture_output=True, timeout=KERNEL_LOG_SECONDS).stdout.decode(errors="replace")
        xids = [match[2] for match in XID_PATTERN.finditer(log) if float(match[1]) >= since]
        return f"kernel: {xids[-1][:MAX_COMPLAINT_CHARACTERS]}" if xids else ""

    def close(self) -> None:
        """End nvidia-smi, and start none again."""
        self._stop()
        self.is_installed = self.is_checking = False

    def _start(self) -> None:
        self._stop()
        self.start_time, self.count, self.complaint = self.clock(), 0, ""
        if self.is_installed:
            with contextlib.suppress(OSError):
                query = host.gpu_query_command(("index", "uuid", *LOAD_FIELDS))
                self.process = process.start_process(query, None, output=subprocess.PIPE)

    def _take_answer(self) -> None:
        if self.process is None or self.process.poll() is None:
            return
        assert self.process.stdout
        os.set_blocking(self.process.stdout.fileno(), False)  # a process that it left behind may keep the pipe open
        lines = (self.process.stdout.read() or b"").decode(errors="replace").splitlines()
        self._stop()
        cells_of_lines = [host.gpu_query_cells(line) for line in lines]
        rows = [cells for cells in cells_of_lines if _is_gpu(cells)]
        messages = [line.strip() for line, cells in zip(lines, cells_of_lines, strict=True) if not _is_gpu(cells)]
        self.complaint = " ".join(messages)
        self.count, self.answer_time = len(rows), self.clock()
        self.expected = max(self.expected, self.count)
        self.loads = tuple(_parse_load(cells) for _, _, *cells in sorted(rows, key=lambda cells: int(cells[0])))

    def _stop(self) -> None:
        """Kill nvidia-smi. One that hangs in the driver is left behind after a moment."""
        if self.process and self.process.stdout:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.kill_process_groups([self.process], KILL_SECONDS)
            self.process.stdout.close()
        self.process = None


def _is_gpu(cells: list[str]) -> bool:
    """Whether a line of nvidia-smi describes a GPU, and is no message."""
    return len(cells) > 1 and cells[0].isdecimal() and cells[1].startswith("GPU-")


def _parse_load(cells: list[str]) -> GpuLoad:
    """Return the load in the cells of `LOAD_FIELDS`. What the GPU lacks ("[N/A]") is None."""
    values = {}
    for (name, factor), cell in zip(LOAD_FIELDS.values(), cells, strict=False):
        with contextlib.suppress(ValueError):
            values[name] = round(float(cell) * factor, 2)
    return GpuLoad(**values)
