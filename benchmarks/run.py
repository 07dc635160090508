"""Runs every benchmark that needs no GPU, each with its peer in the same run, and rewrites benchmarks/RESULTS.md.

    make bench                                            # all of them, at most 15 minutes on two quiet cores
    make bench IMAGES=photos.tar                          # with photographs (a folder or a .tar), not generated images
    .venv/bin/python benchmarks/run.py help loader        # some parts; only printed

Each part is a script that also runs by itself, and runs in a process of its own. The compared programs alternate, so
that a machine that becomes busy slows both; the numbers are medians. Nothing else should run on the machine: the load
average is written beside the numbers. Scripts that take longer write sections of their own, which are kept:
launch/local.py, launch/aws.py, elastic/recovery.py, elastic/soak.py, training/comm.py,
training/cifar_baseline.py, training/gpu.py, training/run_overhead.py.
"""

import argparse
import importlib
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from benchmarks.measure import (
    COMMAND,
    NO_PEERS_MESSAGE,
    PEERS_PYTHON,
    RESULTS_PATH,
    describe_machine,
    goal_verdict,
    median_seconds_in_turn,
    run_quietly,
)

MAX_TOTAL_SECONDS = 15 * 60
MAX_LOAD_PER_CORE = 0.5  # with a higher load average at the start, the machine does not count as quiet
MAX_HELP_MS = 100  # that `--help` may take beyond the start of Python


@dataclass(frozen=True)
class BenchmarkImages:
    """The photographs of a run: the path as given, and a folder with train/<class>/*.JPEG and val/.

    Both are None when generated images are used.
    """

    given_path: Path | None
    class_folders: Path | None


@dataclass(frozen=True)
class Part:
    """One part of the benchmark: its heading in RESULTS.md, and the function that measures it and returns its rows."""

    title: str
    measure_rows: Callable[[BenchmarkImages], Iterable[str]]


def help_rows(_: BenchmarkImages) -> Iterator[str]:
    """Yield the seconds of `--help` beside the start of Python."""
    python_seconds, help_seconds = median_seconds_in_turn(
        20, lambda: run_quietly(sys.executable, "-c", "pass"), lambda: run_quietly(COMMAND, "--help")
    )
    extra_ms = 1000 * (help_seconds - python_seconds)
    verdict = goal_verdict(extra_ms, MAX_HELP_MS, at_most=True)
    yield f"| `python -c pass` | {1000 * python_seconds:.0f} ms |"
    yield (
        f"| `imgnet-cluster --help` | {1000 * help_seconds:.0f} ms, {extra_ms:.0f} more, "
        f"goal {MAX_HELP_MS}: {verdict} |"
    )


def script(name: str) -> Any:
    """Return the module of a script, which is imported only in the process that measures it."""
    return importlib.import_module(f"benchmarks.{name}")


PARTS: dict[str, Part] = {
    "help": Part("`--help` compared with the start of Python", help_rows),
    "loader": Part(
        "Data loading on all cores, compared with FFCV and with PIL and DataLoader",
        lambda images: script("data.loader").markdown_rows(images.given_path),
    ),
    "index": Part("An index of ImageNet's size", lambda _: script("data.index_memory").markdown_rows()),
    "steps": Part(
        "Our training steps compared with a bare loop on data in memory",
        lambda images: script("training.steps").markdown_rows(images.class_folders),
    ),
    "schedule": Part(
        "Goodput of `make demo` and of a shortened 18-minute schedule",
        lambda images: script("training.schedule").markdown_rows(images.class_folders, 3),
    ),
    "forecast": Part("A real run, forecast from a shorter run", lambda _: script("training.forecast").markdown_rows()),
}


def lay_out_images(given_path: Path | None, target_folder: Path) -> BenchmarkImages:
    """Return the images of a run. A .tar or a flat folder is dealt to ten classes, every tenth to val/."""
    if given_path is None or (given_path / "train").is_dir():
        return BenchmarkImages(given_path, given_path)
    from benchmarks.data.loader import read_images

    for number, data in enumerate(read_images(given_path)):
        split = "val" if number % 10 == 9 else "train"
        folder = target_folder / split / f"class{number // 10 % 10}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:06d}.JPEG").write_bytes(data)
    return BenchmarkImages(given_path, target_folder)


def measure_part(name: str, images: BenchmarkImages) -> tuple[list[str], bool]:
    """Run a part in a process of its own. Return its section of RESULTS.md, and whether the part succeeded."""
    load_before = os.getloadavg()[0]
    start = time.monotonic()
    with tempfile.NamedTemporaryFile("r", suffix=".md") as file:
        paths_by_option = {"--images": images.given_path, "--laid": images.class_folders}
        options = [f"{option}={path}" for option, path in paths_by_option.items() if path]
        completed = subprocess.run([sys.executable, __file__, name, "--into", file.name, *options])
        rows = file.read().splitlines()
    if completed.returncode:
        rows = [
            f"Not measured: the script ended with exit code {completed.returncode}. "
            f"To see why: benchmarks/run.py {name}"
        ]
    elif rows and rows[0].startswith("|") and not rows[1].startswith("|--"):
        rows = ["| | |", "|---|---|", *rows]
    footer = f"{time.monotonic() - start:.0f} s; load {load_before:.1f} before, {os.getloadavg()[0]:.1f} after."
    return ["", f"## {PARTS[name].title}", "", *rows, "", footer], not completed.returncode


def sections_of_other_scripts(old_results: str) -> Iterator[str]:
    """Yield the sections of RESULTS.md between other scripts' marks; a note as long as no GPU was measured."""
    for section in re.finditer(r"<!-- (\S+) -->\n.*?<!-- end of \1 -->", old_results, re.DOTALL):
        yield f"\n{section[0]}"
    if "<!-- training/gpu.py -->" not in old_results:
        yield (
            "\n<!-- training/gpu.py -->\n## On a GPU\n\nNot measured yet: `make gpu-bench` measures on a machine with "
            "a GPU, and `benchmarks/training/gpu.py --report` writes this section.\n"
            "<!-- end of training/gpu.py -->"
        )


def header_lines(load_before: float) -> list[str]:
    """Return the first lines of RESULTS.md."""
    lines = [
        "# Measurements",
        "",
        f"{describe_machine()}, Linux {platform.release()}; load {load_before:.1f} before. Written by `make bench`. "
        "The compared programs alternate; numbers are medians, with minimum and maximum in brackets.",
    ]
    if load_before > MAX_LOAD_PER_CORE * (os.cpu_count() or 1):
        lines += ["", "**Other programs were running: these are not the numbers of a quiet machine.**"]
    return lines if PEERS_PYTHON.exists() else [*lines, "", f"{NO_PEERS_MESSAGE.capitalize()}."]


def main() -> int:
    """Measure and print the named parts; without names measure all and write RESULTS.md. Return 1 if a part failed."""
    parser = argparse.ArgumentParser(description="Run the benchmarks that need no GPU.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)")
    parser.add_argument(
        "--images", type=Path, metavar="DIR", help="photographs: a folder or .tar (default: generated images)"
    )
    parser.add_argument("--laid", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown_parts := set(options.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown_parts))}; parts are {', '.join(PARTS)}")
    if options.images and not options.images.exists():
        parser.error(f"--images: {options.images} does not exist")
    given_path = options.images and options.images.resolve()
    if options.into:
        rows = PARTS[options.parts[0]].measure_rows(BenchmarkImages(given_path, options.laid))
        options.into.write_text("\n".join(rows) + "\n")
        return 0
    load_before = os.getloadavg()[0]
    start = time.monotonic()
    all_succeeded = True
    lines = header_lines(load_before)
    with tempfile.TemporaryDirectory() as folder:
        images = lay_out_images(given_path, Path(folder))
        for name in options.parts or PARTS:
            section, succeeded = measure_part(name, images)
            lines += section
            all_succeeded = all_succeeded and succeeded
            print("\n".join(section), flush=True)
    seconds = time.monotonic() - start
    if not options.parts:
        verdict = goal_verdict(seconds, MAX_TOTAL_SECONDS, at_most=True)
        lines += ["", f"All of the above took {seconds / 60:.1f} minutes, goal {MAX_TOTAL_SECONDS // 60}: {verdict}."]
        old_results = RESULTS_PATH.read_text() if RESULTS_PATH.exists() else ""
        RESULTS_PATH.write_text("\n".join([*lines, *sections_of_other_scripts(old_results)]) + "\n")
        print(lines[-1])
    return 0 if all_succeeded else 1


if __name__ == "__main__":
    sys.exit(main())
