"""Measures the load of this machine: processors, memory, network, GPUs. Standard library only; a sample never blocks.

Sources: `train.tools.host`, and proc(5) for /proc/stat. Network traffic that bypasses the kernel is counted by the
driver below /sys/class/infiniband: EFA in bytes (hw_counters), InfiniBand in words of four bytes (PortCounters of its
specification).
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from cluster.state.heartbeats import GpuLoad, MachineLoad
from train.tools import host
from train.tools.process import die_with_parent

Clock = Callable[[], float]
INFINIBAND_TYPE = "32"  # the type of an IP-over-InfiniBand interface, whose bytes its port counts too


class HostSampler:
    """Measures what this machine did between two calls of `sample`. Close it at the end.

    Call `sample` from a thread that lives as long as the process: nvidia-smi ends with the thread that started it.
    """

    def __init__(self, root: Path = Path("/"), clock: Clock = time.monotonic) -> None:
        self.root = root
        self.clock = clock
        self.is_physical_by_name: dict[str, bool] = {}
        self.port_counters = _find_port_counters(root / "sys/class/infiniband")
        self.gpus = GpuSampler(clock)
        self.last_cpu_ticks = self._read_cpu_ticks()
        self.last_network_bytes = self._read_network_bytes()
        self.last_network_time = clock()

    def sample(self) -> MachineLoad:
        """Return the load. `gpus` is empty when nvidia-smi is missing, or has written nothing for ten seconds."""
        used_gb, total_gb = self._memory_gb()
        received, sent = self._network_rates()
        return MachineLoad(
            cpu=self._cpu_percent(),
            memory_gb=used_gb,
            memory_total_gb=total_gb,
            net_in_gbit=received,
            net_out_gbit=sent,
            gpus=self.gpus.read(),
        )

    def close(self) -> None:
        """Stop nvidia-smi."""
        self.gpus.close()

    def _cpu_percent(self) -> float | None:
        """Return the share of all cores in percent, None when it cannot be measured."""
        previous = self.last_cpu_ticks
        current = self.last_cpu_ticks = self._read_cpu_ticks()
        if previous is None or current is None or current[1] <= previous[1]:
            return None
        share = (current[0] - previous[0]) / (current[1] - previous[1])
        # The kernel's count of ticks spent waiting for disks may decrease, so the share is clamped.
        return round(100 * min(max(share, 0.0), 1.0), 1)

    def _read_cpu_ticks(self) -> tuple[int, int] | None:
        """Return the busy ticks and all ticks of all cores, None when they cannot be read.

        Waiting for a disk is not busy. The ticks of a guest system are part of the user's ticks.
        """
        with contextlib.suppress(OSError, ValueError, IndexError):
            with (self.root / "proc/stat").open() as file:
                ticks = [int(number) for number in file.readline().split()[1:9]]
            idle_ticks = ticks[3] + ticks[4]
            return sum(ticks) - idle_ticks, sum(ticks)
        return None

    def _memory_gb(self) -> tuple[float | None, float | None]:
        """Return the used and the total memory, None when they cannot be read."""
        memory = host.read_memory(self.root)
        if memory is None:
            return None, None
        return round(memory.total_gb - memory.available_gb, 2), round(memory.total_gb, 2)

    def _network_rates(self) -> tuple[float | None, float | None]:
        """Return what was received and sent in Gbit/s since the last call, None when it cannot be measured."""
        previous_bytes = self.last_network_bytes
        previous_time = self.last_network_time
        self.last_network_bytes = self._read_network_bytes()
        self.last_network_time = self.clock()
        seconds = self.last_network_time - previous_time
        if not self.last_network_bytes or seconds <= 0:
            return None, None
        received = sent = 0
        for name, (received_bytes, sent_bytes) in self.last_network_bytes.items():
            if name in previous_bytes:  # an interface that is new has no rate yet
                # Counters that were reset count as no traffic.
                received += max(0, received_bytes - previous_bytes[name][0])
                sent += max(0, sent_bytes - previous_bytes[name][1])
        return round(received * 8e-9 / seconds, 4), round(sent * 8e-9 / seconds, 4)

    def _read_network_bytes(self) -> dict[str, tuple[int, int]]:
        """Return the bytes received and sent so far, by interface or by file of a port's counter."""
        counts = host.read_interface_bytes(self.root)
        physical_counts = {name: count for name, count in counts.items() if self._is_physical_interface(name)}
        counts = physical_counts or counts  # in a container the only link to the outside is not a physical interface
        for files, bytes_per_count in self.port_counters:
            with contextlib.suppress(OSError, ValueError):
                received, sent = (int(file.read_text()) * bytes_per_count for file in files)
                counts[str(files[0])] = received, sent
        return counts

    def _is_physical_interface(self, name: str) -> bool:
        """Return whether an interface has a device. Bridges and bonds would count the bytes of others a second time."""
        if name not in self.is_physical_by_name:
            folder = self.root / "sys/class/net" / name
            interface_type = ""
            with contextlib.suppress(OSError):
                interface_type = (folder / "type").read_text().strip()
            is_counted_by_port = interface_type == INFINIBAND_TYPE and bool(self.port_counters)
            self.is_physical_by_name[name] = (folder / "device").exists() and not is_counted_by_port
        return self.is_physical_by_name[name]


def _find_port_counters(folder: Path) -> list[tuple[tuple[Path, Path], int]]:
    """Return for each port the files that count what it received and sent, and the bytes of one count."""
    port_counters = []
    for port in sorted(folder.glob("*/ports/*")):
        efa_files = port / "hw_counters/rx_bytes", port / "hw_counters/tx_bytes"
        infiniband_files = port / "counters/port_rcv_data", port / "counters/port_xmit_data"
        for files, bytes_per_count in ((efa_files, 1), (infiniband_files, 4)):
            if all(file.exists() for file in files):
                port_counters.append((files, bytes_per_count))
                break
    return port_counters


# --- GPUs ---------------------------------------------------------------------------------------------------------

NVIDIA_SMI_FIELDS = {  # nvidia-smi's name of a value: name here, factor from nvidia-smi's unit to the unit here
    "utilization.gpu": ("use", 1.0),
    "memory.used": ("memory_gb", 2**20 / 1e9),
    "temperature.gpu": ("temperature", 1.0),
    "power.draw": ("watts", 1.0),
}
STALE_SECONDS = 10.0  # older values are not shown
HUNG_SECONDS = 60.0  # after this silence nvidia-smi is killed; its first line takes long on machines with many GPUs
RESTART_DELAY_SECONDS = (1.0, 60.0)  # first and longest delay before nvidia-smi is started again
CLOSE_TIMEOUT_SECONDS = 1.0
MAX_LINE_BYTES = 1000


class GpuSampler:
    """Reads one long-running nvidia-smi, which prints a line per GPU each second.

    There is never more than one nvidia-smi, however it hangs.
    """

    def __init__(self, clock: Clock) -> None:
        self.nvidia_smi_path = shutil.which("nvidia-smi")
        self.clock = clock
        self.process: subprocess.Popen[bytes] | None = None
        self.terminal_fd = -1
        self.partial_line = b""
        self.readings: dict[int, tuple[float, GpuLoad]] = {}  # by GPU: when it was read, and its load
        self.start_time = 0.0
        self.last_output_time = 0.0
        self.next_start_time = 0.0
        self.restart_delay = RESTART_DELAY_SECONDS[0]

    def read(self) -> tuple[GpuLoad, ...]:
        """Return each GPU's newest load, by GPU index. Starts nvidia-smi where it does not run. Never blocks."""
        now = self.clock()
        if self.process is not None:
            self._update_readings(now)
        elif self.nvidia_smi_path is not None and now >= self.next_start_time:
            self._start(now)
        return tuple(load for _, (read_at, load) in sorted(self.readings.items()) if now - read_at < STALE_SECONDS)

    def _start(self, now: float) -> None:
        self.start_time = self.last_output_time = now
        fields = ["index", *NVIDIA_SMI_FIELDS]
        argv = host.gpu_query_command(fields, "-l", "1", program=str(self.nvidia_smi_path))
        parent_pid = os.getpid()

        def prepare_child() -> None:
            die_with_parent()
            if os.getppid() != parent_pid:  # the parent died before the line above
                os._exit(1)

        try:
            # A terminal passes on each line at once; in a pipe lines may wait until there are 4 kB of them.
            self.terminal_fd, child_fd = os.openpty()
            with os.fdopen(child_fd, "wb", buffering=0) as output:
                self.process = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                    preexec_fn=prepare_child,
                )
            os.set_blocking(self.terminal_fd, False)
        except (OSError, subprocess.SubprocessError):
            self._handle_exit(now)

    def _update_readings(self, now: float) -> None:
        assert self.process is not None
        has_ended = self.process.poll() is not None  # read before its output, which is complete then
        *lines, self.partial_line = (self.partial_line + self._read_output()).split(b"\n")
        self.partial_line = self.partial_line[-MAX_LINE_BYTES:]
        for index, load in filter(None, map(_parse_line, lines)):
            self.readings[index] = now, load
            self.last_output_time = now
        if has_ended:
            self._handle_exit(now)
        elif now - self.last_output_time > HUNG_SECONDS:
            self._kill()

    def _read_output(self) -> bytes:
        """Return what nvidia-smi wrote since the last call. A terminal returns at most 4 kB at once."""
        chunks = []
        with contextlib.suppress(OSError):  # there is no more output, or nvidia-smi has closed its end
            for _ in range(16):
                chunks.append(os.read(self.terminal_fd, 1 << 16))
        return b"".join(chunks)

    def _handle_exit(self, now: float) -> None:
        """Forget the ended nvidia-smi. The delay before the next start doubles, unless it ran for a minute."""
        if self.terminal_fd >= 0:
            os.close(self.terminal_fd)
        self.process = None
        self.terminal_fd = -1
        self.partial_line = b""
        first_delay, longest_delay = RESTART_DELAY_SECONDS
        if now - self.start_time > longest_delay:
            self.restart_delay = first_delay
        self.next_start_time = now + self.restart_delay
        self.restart_delay = min(2 * self.restart_delay, longest_delay)

    def _kill(self) -> None:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill nvidia-smi, and start none again. One that hangs in the driver is left behind after a second."""
        self.nvidia_smi_path = None
        if self.process is not None:
            self._kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(CLOSE_TIMEOUT_SECONDS)
            self._handle_exit(self.clock())


def _parse_line(line: bytes) -> tuple[int, GpuLoad] | None:
    """Return the GPU index and load of a line; None for a line that has another format.

    Values that the GPU does not provide ("[N/A]") are left out.
    """
    cells = host.gpu_query_cells(line.decode(errors="replace"))
    if len(cells) != 1 + len(NVIDIA_SMI_FIELDS) or not cells[0].isdecimal():
        return None
    values = {}
    for (name, factor), cell in zip(NVIDIA_SMI_FIELDS.values(), cells[1:], strict=True):
        with contextlib.suppress(ValueError):
            values[name] = round(float(cell) * factor, 2)
    return int(cells[0]), GpuLoad(**values)
