"""How busy this machine is: processors, memory, network, GPUs. Standard library only; a sample waits for nothing.

Where the numbers come from: proc(5) for stat, meminfo and net/dev. What goes past the kernel is counted by the card's
driver below /sys/class/infiniband: EFA in bytes (hw_counters), InfiniBand in words of four bytes (PortCounters of its
specification). GPUs: `nvidia-smi --help-query-gpu`.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from train.tools.process import die_with_parent

Clock = Callable[[], float]
INFINIBAND_TYPE = "32"  # what /sys/class/net/*/type says of IP over InfiniBand, whose bytes the port counts too


class HostSampler:
    """What this machine has done between one call of `sample` and the next. Close it at the end.

    Call `sample` from a thread that lives as long as the process: nvidia-smi ends with the thread that started it.
    """

    def __init__(self, root: Path = Path("/"), clock: Clock = time.monotonic) -> None:
        self.root, self.clock = root, clock
        self.is_physical_by_name: dict[str, bool] = {}
        self.port_counters = _find_port_counters(root / "sys/class/infiniband")
        self.gpus = GpuSampler(clock)
        self.last_cpu_ticks, self.last_network_bytes, self.last_network_time = (
            self._read_cpu_ticks(),
            self._read_network_bytes(),
            clock(),
        )

    def sample(self) -> dict[str, Any]:
        """Return cpu (% of all cores), memory_gb, memory_total_gb, net_in_gbit, net_out_gbit (Gbit/s), and gpus.

        A GPU has use (%), memory_gb, temperature (degrees Celsius) and watts. A GB is 1e9 bytes. What this machine does
        not tell is left out, of a GPU too. There are no gpus while nvidia-smi is missing, or silent for ten seconds.
        """
        return {**self._cpu_usage(), **self._memory_usage(), **self._network_rates(), "gpus": self.gpus.read()}

    def close(self) -> None:
        """End nvidia-smi."""
        self.gpus.close()

    def _cpu_usage(self) -> dict[str, float]:
        before, self.last_cpu_ticks = self.last_cpu_ticks, self._read_cpu_ticks()
        if before is None or self.last_cpu_ticks is None or self.last_cpu_ticks[1] <= before[1]:
            return {}
        share = (self.last_cpu_ticks[0] - before[0]) / (self.last_cpu_ticks[1] - before[1])
        return {"cpu": round(100 * min(max(share, 0.0), 1.0), 1)}  # the count of waiting for disks may go back

    def _read_cpu_ticks(self) -> tuple[int, int] | None:
        """Ticks of all cores at work, and in all. Waiting for a disk is no work; a guest's ticks are its user's too."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            with (self.root / "proc/stat").open() as file:
                ticks = [int(word) for word in file.readline().split()[1:9]]
            return sum(ticks) - ticks[3] - ticks[4], sum(ticks)
        return None

    def _memory_usage(self) -> dict[str, float]:
        with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
            lines = (self.root / "proc/meminfo").read_text().splitlines()
            kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines[:5])}
            total, free = kib["MemTotal"] * 1.024e-6, kib["MemAvailable"] * 1.024e-6
            return {"memory_gb": round(total - free, 2), "memory_total_gb": round(total, 2)}
        return {}

    def _network_rates(self) -> dict[str, float]:
        before, since, self.last_network_bytes, self.last_network_time = (
            self.last_network_bytes,
            self.last_network_time,
            self._read_network_bytes(),
            self.clock(),
        )
        seconds = self.last_network_time - since
        if not self.last_network_bytes or seconds <= 0:
            return {}
        both = [
            (before[name], now) for name, now in self.last_network_bytes.items() if name in before
        ]  # a new card has no rate yet
        rates = (sum(max(0, now[way] - then[way]) for then, now in both) * 8e-9 / seconds for way in (0, 1))
        return dict(zip(("net_in_gbit", "net_out_gbit"), (round(rate, 4) for rate in rates), strict=True))

    def _read_network_bytes(self) -> dict[str, tuple[int, int]]:
        """Bytes received and sent so far, by card."""
        found = self._read_interface_bytes()
        cards = {name: count for name, count in found.items() if self._is_physical_interface(name)}
        found = cards or found  # in a container the one link to the world is no card
        for files, factor in self.port_counters:
            with contextlib.suppress(OSError, ValueError):
                received, sent = (int(file.read_text()) * factor for file in files)
                found[str(files[0])] = received, sent
        return found

    def _read_interface_bytes(self) -> dict[str, tuple[int, int]]:
        """Bytes received and sent by every network interface but the loopback."""
        found = {}
        with contextlib.suppress(OSError, ValueError, IndexError):
            for line in (self.root / "proc/net/dev").read_text().splitlines()[2:]:
                name, _, rest = line.partition(":")
                numbers = rest.split()
                if name.strip() != "lo":
                    found[name.strip()] = int(numbers[0]), int(numbers[8])
        return found

    def _is_physical_interface(self, name: str) -> bool:
        """Whether there is a device behind an interface: bridges and bonds would count its bytes a second time."""
        if name not in self.is_physical_by_name:
            folder, kind = self.root / "sys/class/net" / name, ""
            with contextlib.suppress(OSError):
                kind = (folder / "type").read_text().strip()
            self.is_physical_by_name[name] = (folder / "device").exists() and not (
                kind == INFINIBAND_TYPE and self.port_counters
            )
        return self.is_physical_by_name[name]


def _find_port_counters(folder: Path) -> list[tuple[tuple[Path, Path], int]]:
    """The files that count what a port receives and sends, with the bytes in each count."""
    found = []
    for port in sorted(folder.glob("*/ports/*")):
        efa = port / "hw_counters/rx_bytes", port / "hw_counters/tx_bytes"
        words = port / "counters/port_rcv_data", port / "counters/port_xmit_data"
        for files, factor in ((efa, 1), (words, 4)):
            if all(file.exists() for file in files):
                found.append((files, factor))
                break
    return found


# --- GPUs ---------------------------------------------------------------------------------------------------------

NVIDIA_SMI_FIELDS = {  # of nvidia-smi: our name, and what one of theirs is of ours
    "utilization.gpu": ("use", 1.0),
    "memory.used": ("memory_gb", 2**20 / 1e9),
    "temperature.gpu": ("temperature", 1.0),
    "power.draw": ("watts", 1.0),
}
STALE_SECONDS = 10.0  # seconds after which a number is no longer shown
HUNG_SECONDS = 60.0  # seconds after which nvidia-smi is taken for hung; its first word takes long on many GPUs
RESTART_DELAY_SECONDS = (1.0, 60.0)  # seconds before it is started again: at first, at most


class GpuSampler:
    """What one long-running nvidia-smi says each second. There is never more than one, however it hangs."""

    def __init__(self, clock: Clock) -> None:
        self.nvidia_smi_path, self.clock = shutil.which("nvidia-smi"), clock
        self.process: subprocess.Popen[bytes] | None = None
        self.terminal_fd, self.partial_line = -1, b""
        self.readings: dict[int, tuple[float, dict[str, float]]] = {}
        self.start_time = self.last_output_time = self.next_start_time = 0.0
        self.restart_delay = RESTART_DELAY_SECONDS[0]

    def read(self) -> list[dict[str, float]]:
        """Return each GPU's newest numbers by index; start nvidia-smi where it does not run. Never waits for it."""
        now = self.clock()
        if self.process is not None:
            self._update_readings(now)
        elif self.nvidia_smi_path is not None and now >= self.next_start_time:
            self._start(now)
        return [values for _, (when, values) in sorted(self.readings.items()) if now - when < STALE_SECONDS]

    def _start(self, now: float) -> None:
        self.start_time = self.last_output_time = now
        asked = [f"--query-gpu={','.join(['index', *NVIDIA_SMI_FIELDS])}", "--format=csv,noheader,nounits", "-l", "1"]
        parent = os.getpid()

        def prepare() -> None:
            die_with_parent()
            if os.getppid() != parent:  # it died before the line above
                os._exit(1)

        try:
            # A terminal gets each line at once; in a pipe they may wait until 4 kB have come together.
            self.terminal_fd, theirs = os.openpty()
            with os.fdopen(theirs, "wb", buffering=0) as output:
                self.process = subprocess.Popen(
                    [str(self.nvidia_smi_path), *asked], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.DEVNULL,
                    start_new_session=True, preexec_fn=prepare,
                )  # fmt: skip
            os.set_blocking(self.terminal_fd, False)
        except (OSError, subprocess.SubprocessError):
            self._handle_exit(now)

    def _update_readings(self, now: float) -> None:
        assert self.process is not None
        over = self.process.poll() is not None  # asked first: what it wrote is all there then
        *lines, self.partial_line = (self.partial_line + self._read_output()).split(b"\n")
        self.partial_line = self.partial_line[-1000:]
        for index, values in filter(None, map(_parse_line, lines)):
            self.readings[index], self.last_output_time = (now, values), now
        if over:
            self._handle_exit(now)
        elif now - self.last_output_time > HUNG_SECONDS:
            self._kill()

    def _read_output(self) -> bytes:
        """What it wrote since the last time; a terminal gives at most 4 kB at once."""
        parts = []
        with contextlib.suppress(OSError):  # nothing there, or its end is closed
            for _ in range(16):
                parts.append(os.read(self.terminal_fd, 1 << 16))
        return b"".join(parts)

    def _handle_exit(self, now: float) -> None:
        """Put it away, and wait longer before the next one if it did not live long."""
        if self.terminal_fd >= 0:
            os.close(self.terminal_fd)
        self.process, self.terminal_fd, self.partial_line = None, -1, b""
        self.restart_delay = (
            RESTART_DELAY_SECONDS[0] if now - self.start_time > RESTART_DELAY_SECONDS[1] else self.restart_delay
        )
        self.next_start_time = now + self.restart_delay
        self.restart_delay = min(2 * self.restart_delay, RESTART_DELAY_SECONDS[1])

    def _kill(self) -> None:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill nvidia-smi; one that the driver holds is left behind after a second."""
        self.nvidia_smi_path = None
        if self.process is not None:
            self._kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1.0)
            self._handle_exit(self.clock())


def _parse_line(line: bytes) -> tuple[int, dict[str, float]] | None:
    """A line's GPU and its numbers without those it has not ("[N/A]"); None for a line that is none of ours."""
    words = [word.strip() for word in line.decode(errors="replace").split(",")]
    if len(words) != 1 + len(NVIDIA_SMI_FIELDS) or not words[0].isdecimal():
        return None
    values = {}
    for (name, factor), word in zip(NVIDIA_SMI_FIELDS.values(), words[1:], strict=True):
        with contextlib.suppress(ValueError):
            values[name] = round(float(word) * factor, 2)
    return int(words[0]), values
