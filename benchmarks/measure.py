"""What the scripts here share: works in turn, medians with their spread, rows with their goal."""

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESULTS_PATH = HERE / "RESULTS.md"
PEERS_PYTHON = HERE / ".venv" / "bin" / "python"
NO_PEERS_MESSAGE = "peers not installed: sh benchmarks/peers.sh"


def seconds_of(function: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def median_seconds_in_turn(rounds: int, *functions: Callable[[], object]) -> list[float]:
    """The median seconds of each work, called in turn; the first round is not counted."""
    seconds = [[seconds_of(work) for work in functions] for _ in range(rounds + 1)][1:]
    return [statistics.median(column) for column in zip(*seconds, strict=True)]


def run_quietly(*argv: str) -> None:
    """Run a command to its end without its output. Raises `CalledProcessError`."""
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)


def median_with_range(values: Sequence[float], digits: int = 0) -> str:
    """Median (least-most)."""
    middle, least, most = (f"{one:.{digits}f}" for one in (statistics.median(values), min(values), max(values)))
    return f"{middle} ({least}-{most})"


def ratios(our_values: Sequence[float], peer_values: Sequence[float]) -> list[float]:
    """Ours over theirs, round by round: what makes a round slow slows both."""
    return [one / other for one, other in zip(our_values, peer_values, strict=True)]


def goal_verdict(value: float, goal: float, at_most: bool = False) -> str:
    """ "met" or "missed": a value must be at least its goal, or with `most` at most."""
    return "met" if (value <= goal if at_most else value >= goal) else "missed"


def cpu_name() -> str:
    """The processor's name, or its architecture where Linux does not say."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def core_count() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0))


def describe_machine() -> str:
    """Date, cores, processor, versions, and the load of the last minute: what each part of RESULTS.md begins with."""
    import numpy
    import torch

    return (
        f"{time.strftime('%Y-%m-%d')}, {core_count()} cores ({cpu_name()}), Python {platform.python_version()}, torch "
        f"{torch.__version__}, numpy {numpy.__version__}"
    )


def write_section(name: str, lines: Sequence[str]) -> None:
    """Put the lines between a script's marks in RESULTS.md, at its end when there are none yet."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    text = RESULTS_PATH.read_text() if RESULTS_PATH.exists() else "# Measured\n"
    part = "\n".join([begin, *lines, end])
    if begin in text and end in text:
        before, _, rest = text.partition(begin)
        RESULTS_PATH.write_text(before + part + rest.partition(end)[2])
    else:
        RESULTS_PATH.write_text(f"{text.rstrip()}\n\n{part}\n")
