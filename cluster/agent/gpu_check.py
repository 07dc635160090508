"""Whether the GPUs of this machine still answer: nvidia-smi lists them in time. The caller never waits for that.

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
from collections.abc import Callable
from pathlib import Path

from train.tools import host

ANSWER_SECONDS = 60.0  # nvidia-smi takes long on machines with many GPUs, and a wrong answer costs a machine
QUERY_FIELDS = ("index", "uuid")
KERNEL_LOG_SECONDS = 1.0  # for dmesg, which asks no driver
# "[ 1234.5] NVRM: Xid (PCI:0000:3b:00): 79, pid=12, name=python, GPU has fallen off the bus." (NVIDIA, "Xid Errors").
# The kernel's seconds since the boot are those of CLOCK_MONOTONIC.
XID_PATTERN = re.compile(r"^\[ *(\d+\.\d+)\] NVRM: (Xid \(.+)$", re.MULTILINE)
MAX_COMPLAINT_CHARACTERS = 200
KILL_SECONDS = 0.5  # for a killed nvidia-smi to end; one that hangs in the driver is left behind


class GpuCheck:
    """Counts the GPUs that answer, and compares them with those that there must be.

    These are at least `expected`, and as many as answered the first check. Without nvidia-smi nothing is known.
    """

    def __init__(self, work: Path, expected: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.output_path = work / "gpus.out"
        self.expected = expected
        self.clock = clock
        self.nvidia_smi_path = shutil.which("nvidia-smi")
        self.process: subprocess.Popen[bytes] | None = None
        self.start_time = 0.0
        self.is_under_way = False

    @property
    def is_needed(self) -> bool:
        """Whether there are GPUs, as far as it is known, so that a failure may be theirs."""
        return self.nvidia_smi_path is not None and (self.expected > 0 or self.is_under_way)

    def start(self) -> None:
        """Start a check. One that is under way is given up: its answer may be older than the failure."""
        self.close()
        if self.nvidia_smi_path is None:
            return
        self.start_time = self.clock()
        self.is_under_way = True
        argv = host.gpu_query_command(QUERY_FIELDS, program=self.nvidia_smi_path)
        with contextlib.suppress(OSError), self.output_path.open("wb") as output:
            self.process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def poll(self) -> str | None:
        """Return what is wrong with the GPUs, "" when nothing is known to be wrong; None while the check is under way.

        The problem of a finished check is returned once.
        """
        if not self.is_under_way:
            return ""
        has_ended = self.process is None or self.process.poll() is not None
        if not has_ended and self.clock() - self.start_time < ANSWER_SECONDS:
            return None
        count, complaint = self._read_answer() if has_ended else (0, f"no answer in {ANSWER_SECONDS:.0f} s")
        self.close()
        expected = self.expected
        self.expected = max(expected, count)
        if count >= expected:
            return ""
        quote = f" (nvidia-smi: {complaint})" if complaint else ""
        return f"{count} of {expected} GPUs answer{quote}"

    def _read_answer(self) -> tuple[int, str]:
        """Return the number of GPUs that nvidia-smi listed, and what else it said."""
        lines: list[str] = []
        if self.process is not None:
            with contextlib.suppress(OSError):
                lines = self.output_path.read_text(errors="replace").splitlines()
        gpu_lines = [line for line in lines if _is_gpu_line(line)]
        complaint = " ".join(line.strip() for line in lines if line not in gpu_lines)
        return len(gpu_lines), complaint[:MAX_COMPLAINT_CHARACTERS]

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
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(KILL_SECONDS)
        with contextlib.suppress(OSError):
            self.output_path.unlink(missing_ok=True)
        self.process = None
        self.is_under_way = False


def _is_gpu_line(line: str) -> bool:
    """Whether a line of nvidia-smi describes a GPU, and is no message."""
    cells = host.gpu_query_cells(line)
    return len(cells) == len(QUERY_FIELDS) and cells[0].isdecimal() and cells[1].startswith("GPU-")
