"""Helpers that the benchmark scripts share: alternating timings, medians with their range, verdicts, RESULTS.md."""

import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from train.data.packing.synthetic import draw_sample_set
from train.tools.host import cpu_model, usable_cpu_count

COMMAND = str(Path(sys.executable).parent / "imgnet-cluster")
HERE = Path(__file__).resolve().parent
RESULTS_PATH = HERE / "RESULTS.md"
PEERS_PYTHON = HERE / ".venv" / "bin" / "python"
NO_PEERS_MESSAGE = "peers not installed: sh benchmarks/peers.sh"


def seconds_of(function: Callable[[], object]) -> float:
    """Return the seconds that one call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def median_seconds_in_turn(rounds: int, *functions: Callable[[], object]) -> list[float]:
    """Return the median seconds of each function. They are called in turn; the first round is not counted."""
    seconds_by_round = [[seconds_of(function) for function in functions] for _ in range(rounds + 1)][1:]
    return [statistics.median(column) for column in zip(*seconds_by_round, strict=True)]


def run_quietly(*argv: str) -> None:
    """Run a command to its end and discard its output. Raises `CalledProcessError`."""
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)


def median_with_range(values: Sequence[float], digits: int = 0) -> str:
    """Format values as "median (min-max)"."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def ratios(our_values: Sequence[float], peer_values: Sequence[float]) -> list[float]:
    """Return ours / peer for each round: whatever makes a round slow slows both sides."""
    return [ours / peer for ours, peer in zip(our_values, peer_values, strict=True)]


def goal_verdict(value: float, goal: float, at_most: bool = False) -> str:
    """Return "met" or "missed": a value must be at least its goal, or with `at_most` at most its goal."""
    return "met" if (value <= goal if at_most else value >= goal) else "missed"


def describe_machine() -> str:
    """Return date, cores, processor and versions: the beginning of each section of RESULTS.md."""
    import numpy
    import torch

    return (
        f"{time.strftime('%Y-%m-%d')}, {describe_processor()}, Python {platform.python_version()}, torch "
        f"{torch.__version__}, numpy {numpy.__version__}"
    )


def prepare_images(work_folder: Path, images: Path | None, train: int, val: int) -> tuple[Path, Path]:
    """Return the folder of the images, and that of their copies of 160 and 352 pixels.

    Without images, `train` and `val` images are drawn.
    """
    data = images or work_folder / "drawn"
    if images is None:
        draw_sample_set(data, train=train, val=val)
    copies = work_folder / "copies"
    run_quietly(COMMAND, "data", "resize", str(data), str(copies), "--sizes", "160,352")
    return data, copies


def describe_processor() -> str:
    """Return the cores that this process may use, and the processor's name or, where Linux has none, architecture."""
    return f"{usable_cpu_count()} cores ({cpu_model() or platform.machine()})"


def write_section(name: str, lines: Sequence[str]) -> None:
    """Put the lines between a script's marks in RESULTS.md, at the end of the file while it has no such marks."""
    begin_mark, end_mark = f"<!-- {name} -->", f"<!-- end of {name} -->"
    text = RESULTS_PATH.read_text() if RESULTS_PATH.exists() else "# Measurements\n"
    section = "\n".join([begin_mark, *lines, end_mark])
    if begin_mark in text and end_mark in text:
        before, _, rest = text.partition(begin_mark)
        RESULTS_PATH.write_text(before + section + rest.partition(end_mark)[2])
    else:
        RESULTS_PATH.write_text(f"{text.rstrip()}\n\n{section}\n")
