"""Measures the load of this machine: processors, memory, network, GPUs. A sample never blocks.

Network traffic that bypasses the kernel is counted by the driver below /sys/class/infiniband: EFA in bytes
(hw_counters), InfiniBand in words of four bytes (PortCounters of its specification).
"""

import contextlib
import os
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


class HostSampler:
    """Measures the load of this machine between two calls of `sample`. The caller closes `gpus` at the end."""

    def __init__(self, root: Path = Path("/"), clock: Callable[[], float] = time.monotonic) -> None:
        self.root = root
        self.clock = clock
        self.gpus = GpuSampler(clock)
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
            gpus=self.gpus.read(),
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

        Interfaces without a device, such as bridges and bonds, would count the bytes of others a second time; but in a
        container the only link to the outside is such an interface.
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


NVIDIA_SMI_FIELDS = {  # nvidia-smi's name of a value: name here, factor from nvidia-smi's unit to the unit here
    "utilization.gpu": ("use", 1.0),
    "memory.used": ("memory_gb", 2**20 / 1e9),
    "temperature.gpu": ("temperature", 1.0),
    "power.draw": ("watts", 1.0),
}
QUERY_SECONDS = 5  # between two measurements by nvidia-smi
STALE_SECONDS = 20.0  # older values are not shown


class GpuSampler:
    """Reads what nvidia-smi prints every few seconds. Starts it again when it has ended; one that hangs may go on."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.nvidia_smi_path = shutil.which("nvidia-smi")
        self.clock = clock
        self.process: subprocess.Popen[bytes] | None = None
        self.start_time = float("-inf")
        self.unread = b""  # the beginning of a line
        self.loads: dict[int, tuple[float, GpuLoad]] = {}  # by GPU index, with the time when it was read

    def read(self) -> tuple[GpuLoad, ...]:
        """Return each GPU's newest load, by GPU index; none while nvidia-smi is missing or does not answer."""
        now = self.clock()
        if self.process and self.process.stdout:
            has_ended = self.process.poll() is not None  # asked before the read, which then brings all
            *lines, self.unread = (self.unread + (self.process.stdout.read() or b"")).split(b"\n")
            loads = filter(None, map(_parse_line, lines))
            self.loads |= {index: (now, load) for index, load in loads}
            if has_ended:
                self.process.stdout.close()
                self.process = None
        if self.process is None and self.nvidia_smi_path and now - self.start_time >= QUERY_SECONDS:
            self._start(self.nvidia_smi_path, now)
        return tuple(load for _, (read_at, load) in sorted(self.loads.items()) if now - read_at < STALE_SECONDS)

    def _start(self, program: str, now: float) -> None:
        self.start_time, self.unread = now, b""
        argv = host.gpu_query_command(["index", *NVIDIA_SMI_FIELDS], "-l", str(QUERY_SECONDS), program=program)
        with contextlib.suppress(OSError):
            self.process = subprocess.Popen(
                argv, bufsize=0, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, preexec_fn=process.die_with_parent
            )
            if self.process.stdout:
                os.set_blocking(self.process.stdout.fileno(), False)

    def close(self) -> None:
        """Kill nvidia-smi, and start none again. One that hangs in the driver is left behind after a second."""
        self.nvidia_smi_path = None
        if self.process and self.process.stdout:
            self.process.kill()
            self.process.stdout.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1.0)
        self.process = None


def _parse_line(line: bytes) -> tuple[int, GpuLoad] | None:
    """Return GPU index and load in a line of nvidia-smi, None for others. What the GPU lacks ("[N/A]") is None."""
    index, *cells = host.gpu_query_cells(line.decode(errors="replace"))
    values = {}
    for (name, factor), cell in zip(NVIDIA_SMI_FIELDS.values(), cells, strict=False):
        with contextlib.suppress(ValueError):
            values[name] = round(float(cell) * factor, 2)
    return (int(index), GpuLoad(**values)) if index.isdecimal() and values else None
