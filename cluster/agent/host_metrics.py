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
INFINIBAND = "32"  # what /sys/class/net/*/type says of IP over InfiniBand, whose bytes the port counts too


class Sampler:
    """What this machine has done between one call of `sample` and the next. Close it at the end.

    Call `sample` from a thread that lives as long as the process: nvidia-smi ends with the thread that started it.
    """

    def __init__(self, root: Path = Path("/"), clock: Clock = time.monotonic) -> None:
        self.root, self.clock = root, clock
        self.cards: dict[str, bool] = {}
        self.ports = _ports(root / "sys/class/infiniband")
        self.gpus = Gpus(clock)
        self.ticks, self.bytes, self.time = self._ticks(), self._bytes(), clock()

    def sample(self) -> dict[str, Any]:
        """Return cpu (% of all cores), memory_gb, memory_total_gb, net_in_gbit, net_out_gbit (Gbit/s), and gpus.

        A GPU has use (%), memory_gb, temperature (degrees Celsius) and watts. A GB is 1e9 bytes. What this machine does
        not tell is left out, of a GPU too. There are no gpus while nvidia-smi is missing, or silent for ten seconds.
        """
        return {**self._processors(), **self._memory(), **self._network(), "gpus": self.gpus.read()}

    def close(self) -> None:
        """End nvidia-smi."""
        self.gpus.close()

    def _processors(self) -> dict[str, float]:
        before, self.ticks = self.ticks, self._ticks()
        if before is None or self.ticks is None or self.ticks[1] <= before[1]:
            return {}
        share = (self.ticks[0] - before[0]) / (self.ticks[1] - before[1])
        return {"cpu": round(100 * min(max(share, 0.0), 1.0), 1)}  # the count of waiting for disks may go back

    def _ticks(self) -> tuple[int, int] | None:
        """Ticks of all cores at work, and in all. Waiting for a disk is no work; a guest's ticks are its user's too."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            with (self.root / "proc/stat").open() as file:
                ticks = [int(word) for word in file.readline().split()[1:9]]
            return sum(ticks) - ticks[3] - ticks[4], sum(ticks)
        return None

    def _memory(self) -> dict[str, float]:
        with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
            lines = (self.root / "proc/meminfo").read_text().splitlines()
            kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines[:5])}
            total, free = kib["MemTotal"] * 1.024e-6, kib["MemAvailable"] * 1.024e-6
            return {"memory_gb": round(total - free, 2), "memory_total_gb": round(total, 2)}
        return {}

    def _network(self) -> dict[str, float]:
        before, since, self.bytes, self.time = self.bytes, self.time, self._bytes(), self.clock()
        seconds = self.time - since
        if not self.bytes or seconds <= 0:
            return {}
        both = [(before[name], now) for name, now in self.bytes.items() if name in before]  # a new card has no rate yet
        rates = (sum(max(0, now[way] - then[way]) for then, now in both) * 8e-9 / seconds for way in (0, 1))
        return dict(zip(("net_in_gbit", "net_out_gbit"), (round(rate, 4) for rate in rates), strict=True))

    def _bytes(self) -> dict[str, tuple[int, int]]:
        """Bytes received and sent so far, by card."""
        found = self._lines()
        cards = {name: count for name, count in found.items() if self._is_card(name)}
        found = cards or found  # in a container the one link to the world is no card
        for files, factor in self.ports:
            with contextlib.suppress(OSError, ValueError):
                received, sent = (int(file.read_text()) * factor for file in files)
                found[str(files[0])] = received, sent
        return found

    def _lines(self) -> dict[str, tuple[int, int]]:
        """Bytes received and sent by every network interface but the loopback."""
        found = {}
        with contextlib.suppress(OSError, ValueError, IndexError):
            for line in (self.root / "proc/net/dev").read_text().splitlines()[2:]:
                name, _, rest = line.partition(":")
                numbers = rest.split()
                if name.strip() != "lo":
                    found[name.strip()] = int(numbers[0]), int(numbers[8])
        return found

    def _is_card(self, name: str) -> bool:
        """Whether there is a device behind an interface: bridges and bonds would count its bytes a second time."""
        if name not in self.cards:
            folder, kind = self.root / "sys/class/net" / name, ""
            with contextlib.suppress(OSError):
                kind = (folder / "type").read_text().strip()
            self.cards[name] = (folder / "device").exists() and not (kind == INFINIBAND and self.ports)
        return self.cards[name]


def _ports(folder: Path) -> list[tuple[tuple[Path, Path], int]]:
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

FIELDS = {  # of nvidia-smi: our name, and what one of theirs is of ours
    "utilization.gpu": ("use", 1.0),
    "memory.used": ("memory_gb", 2**20 / 1e9),
    "temperature.gpu": ("temperature", 1.0),
    "power.draw": ("watts", 1.0),
}
STALE = 10.0  # seconds after which a number is no longer shown
SILENT = 60.0  # seconds after which nvidia-smi is taken for hung; its first word takes long on many GPUs
PAUSES = (1.0, 60.0)  # seconds before it is started again: at first, at most


class Gpus:
    """What one long-running nvidia-smi says each second. There is never more than one, however it hangs."""

    def __init__(self, clock: Clock) -> None:
        self.program, self.clock = shutil.which("nvidia-smi"), clock
        self.process: subprocess.Popen[bytes] | None = None
        self.terminal, self.rest = -1, b""
        self.known: dict[int, tuple[float, dict[str, float]]] = {}
        self.started = self.heard = self.next_start = 0.0
        self.pause = PAUSES[0]

    def read(self) -> list[dict[str, float]]:
        """Return each GPU's newest numbers by index; start nvidia-smi where it does not run. Never waits for it."""
        now = self.clock()
        if self.process is not None:
            self._hear(now)
        elif self.program is not None and now >= self.next_start:
            self._start(now)
        return [values for _, (when, values) in sorted(self.known.items()) if now - when < STALE]

    def _start(self, now: float) -> None:
        self.started = self.heard = now
        asked = [f"--query-gpu={','.join(['index', *FIELDS])}", "--format=csv,noheader,nounits", "-l", "1"]
        parent = os.getpid()

        def prepare() -> None:
            die_with_parent()
            if os.getppid() != parent:  # it died before the line above
                os._exit(1)

        try:
            # A terminal gets each line at once; in a pipe they may wait until 4 kB have come together.
            self.terminal, theirs = os.openpty()
            with os.fdopen(theirs, "wb", buffering=0) as output:
                self.process = subprocess.Popen(
                    [str(self.program), *asked], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.DEVNULL,
                    start_new_session=True, preexec_fn=prepare,
                )  # fmt: skip
            os.set_blocking(self.terminal, False)
        except (OSError, subprocess.SubprocessError):
            self._ended(now)

    def _hear(self, now: float) -> None:
        assert self.process is not None
        over = self.process.poll() is not None  # asked first: what it wrote is all there then
        *lines, self.rest = (self.rest + self._output()).split(b"\n")
        self.rest = self.rest[-1000:]
        for index, values in filter(None, map(_numbers, lines)):
            self.known[index], self.heard = (now, values), now
        if over:
            self._ended(now)
        elif now - self.heard > SILENT:
            self._kill()

    def _output(self) -> bytes:
        """What it wrote since the last time; a terminal gives at most 4 kB at once."""
        parts = []
        with contextlib.suppress(OSError):  # nothing there, or its end is closed
            for _ in range(16):
                parts.append(os.read(self.terminal, 1 << 16))
        return b"".join(parts)

    def _ended(self, now: float) -> None:
        """Put it away, and wait longer before the next one if it did not live long."""
        if self.terminal >= 0:
            os.close(self.terminal)
        self.process, self.terminal, self.rest = None, -1, b""
        self.pause = PAUSES[0] if now - self.started > PAUSES[1] else self.pause
        self.next_start = now + self.pause
        self.pause = min(2 * self.pause, PAUSES[1])

    def _kill(self) -> None:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill nvidia-smi; one that the driver holds is left behind after a second."""
        self.program = None
        if self.process is not None:
            self._kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1.0)
            self._ended(self.clock())


def _numbers(line: bytes) -> tuple[int, dict[str, float]] | None:
    """A line's GPU and its numbers without those it has not ("[N/A]"); None for a line that is none of ours."""
    words = [word.strip() for word in line.decode(errors="replace").split(",")]
    if len(words) != 1 + len(FIELDS) or not words[0].isdecimal():
        return None
    values = {}
    for (name, factor), word in zip(FIELDS.values(), words[1:], strict=True):
        with contextlib.suppress(ValueError):
            values[name] = round(float(word) * factor, 2)
    return int(words[0]), values
