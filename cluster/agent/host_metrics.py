"""Measures the load of this machine: processors, memory, network, GPUs. A sample never blocks.

Network traffic that bypasses the kernel is counted by the driver below /sys/class/infiniband: EFA in bytes
(hw_counters), InfiniBand in words of four bytes (PortCounters of its specification).
"""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from cluster.state.heartbeats import MachineLoad
from train.tools import host

from .gpus import Gpus

# Of a port: the files that count what it received and sent, and the bytes of one count.
EFA_COUNTERS = ("hw_counters/rx_bytes", "hw_counters/tx_bytes", 1)
INFINIBAND_COUNTERS = ("counters/port_rcv_data", "counters/port_xmit_data", 4)


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
