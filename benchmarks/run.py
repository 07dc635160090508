"""Everything that needs no GPU, each claim beside its peer in the same run; rewrites benchmarks/RESULTS.md.

    make bench                                            # all, at most 15 minutes on two quiet cores
    make bench IMAGES=photos.tar                          # with photographs instead of drawn images: a folder or .tar
    .venv/bin/python benchmarks/run.py help loader        # some parts, only printed

Each part is a script that can be called by itself, and runs in a process of its own. Pairs alternate, so that a machine
that grows busy slows both; the numbers are medians. Nothing else should run: the load is written down beside them.
Scripts that take longer write parts of their own, which are kept: launch.py, launch_rented.py, recovery.py,
cifar_peer.py, gpu.py.
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

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
COMMAND = str(Path(sys.executable).parent / "imgnet-cluster")

from benchmarks.measure import (
    NO_PEERS_MESSAGE,
    PEERS_PYTHON,
    RESULTS_PATH,
    describe_machine,
    goal_verdict,
    median_seconds_in_turn,
    run_quietly,
)

MAX_TOTAL_SECONDS = 15 * 60  # seconds for all
MAX_LOAD_PER_CORE = 0.5  # load of a core before, above which the numbers are not of a quiet machine


@dataclass(frozen=True)
class BenchmarkImages:
    """The images of a run: as they were named, and laid out as train/<class>/*.JPEG and val/; None for drawn ones."""

    given_path: Path | None
    class_folders: Path | None


def help_rows(_: BenchmarkImages) -> Iterator[str]:
    """Yield `--help` beside Python's own start."""
    bare, ours = median_seconds_in_turn(
        20, lambda: run_quietly(sys.executable, "-c", "pass"), lambda: run_quietly(COMMAND, "--help")
    )
    more = 1000 * (ours - bare)
    yield f"| `python -c pass` | {1000 * bare:.0f} ms |"
    yield f"| `imgnet-cluster --help` | {1000 * ours:.0f} ms, {more:.0f} more, goal 100: {goal_verdict(more, 100, at_most=True)} |"


def rows_of_script(script: str, *arguments: object) -> Callable[[BenchmarkImages], Iterable[str]]:
    """The rows of a script, with fixed words or, given "given_path" or "laid", the images."""

    def rows(photos: BenchmarkImages) -> Iterable[str]:
        module = importlib.import_module(f"benchmarks.{script}")
        given = [getattr(photos, one) if isinstance(one, str) else one for one in arguments]
        found: Iterable[str] = module.markdown_rows(*given)
        return found

    return rows


PARTS: dict[str, tuple[str, Callable[[BenchmarkImages], Iterable[str]]]] = {
    "help": ("`--help` beside Python's own start", help_rows),
    "loader": (
        "The whole feed, all cores, beside FFCV and the classic pipeline",
        rows_of_script("data.loader", "given_path"),
    ),
    "pixels": ("Decode, crop and resize, one core", rows_of_script("data.pixels", "given_path")),
    "index": ("An index of ImageNet's size", rows_of_script("data.index_memory")),
    "steps": ("Our steps beside a bare loop on data in memory", rows_of_script("training.steps", "class_folders")),
    "schedule": (
        "Goodput: `make demo` and a cut-short 18-minute schedule",
        rows_of_script("training.schedule", "class_folders", 3),
    ),
    "forecast": ("A real run, forecast from a shorter one", rows_of_script("training.forecast")),
}


def lay_out_images(given_path: Path | None, target_folder: Path) -> BenchmarkImages:
    """Return the images, those of a .tar or a flat folder laid out by turns in ten classes, every tenth for val/."""
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
    """Run a part in a process of its own. Returns its section, and whether it came to its end."""
    before, start = os.getloadavg()[0], time.monotonic()
    with tempfile.NamedTemporaryFile("r", suffix=".md") as file:
        words = [
            f"--{key}={path}" for key, path in (("images", images.given_path), ("laid", images.class_folders)) if path
        ]
        child = subprocess.run([sys.executable, __file__, name, "--into", file.name, *words])
        rows = file.read().splitlines()
    if child.returncode:
        rows = [f"Not measured: the script ended with {child.returncode}; see what it said: benchmarks/run.py {name}"]
    elif rows and rows[0].startswith("|") and not rows[1].startswith("|--"):
        rows = ["| | |", "|---|---|", *rows]
    load = f"{time.monotonic() - start:.0f} s; load {before:.1f} before, {os.getloadavg()[0]:.1f} after."
    return ["", f"## {PARTS[name][0]}", "", *rows, "", load], not child.returncode


def sections_of_other_scripts(old_results: str) -> Iterator[str]:
    """Yield the parts of RESULTS.md that other scripts wrote between their marks; a word where no GPU was measured."""
    for one in re.finditer(r"<!-- (\S+) -->\n.*?<!-- end of \1 -->", old_results, re.DOTALL):
        yield f"\n{one[0]}"
    if "<!-- gpu.py -->" not in old_results:
        yield (
            "\n<!-- gpu.py -->\n## On a GPU\n\nNot measured: no machine with a GPU could be had yet. "
            "`.venv/bin/python benchmarks/training/gpu.py` measures there and writes this part.\n<!-- end of gpu.py -->"
        )


def header_lines(load_before: float) -> list[str]:
    """The first lines of RESULTS.md."""
    lines = [
        "# Measured",
        "",
        f"{describe_machine()}, Linux {platform.release()}; load {load_before:.1f} before. Written by `make bench`; pairs in turn, "
        "medians, least and most in brackets.",
    ]
    if load_before > MAX_LOAD_PER_CORE * (os.cpu_count() or 1):
        lines += ["", "**Other things were running: these are not the numbers of a quiet machine.**"]
    return lines if PEERS_PYTHON.exists() else [*lines, "", f"{NO_PEERS_MESSAGE.capitalize()}."]


def measure_in_child(name: str, images: BenchmarkImages, output_path: Path) -> int:
    """Measure a part and write its rows down."""
    output_path.write_text("\n".join(PARTS[name][1](images)) + "\n")
    return 0


def main() -> int:
    """Measure what is asked for and print it; with all of it, write RESULTS.md. Returns 1 when a part failed."""
    parser = argparse.ArgumentParser(description="Measure all that needs no GPU.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)")
    parser.add_argument("--images", type=Path, metavar="DIR", help="photographs: a folder or .tar (else drawn ones)")
    parser.add_argument("--laid", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    if options.images and not options.images.exists():
        parser.error(f"--images: {options.images} does not exist")
    images = options.images and options.images.resolve()
    if options.into:
        return measure_in_child(options.parts[0], BenchmarkImages(images, options.laid), options.into)
    before, start, good = os.getloadavg()[0], time.monotonic(), True
    lines = header_lines(before)
    with tempfile.TemporaryDirectory() as folder:
        photos = lay_out_images(images, Path(folder))
        for name in options.parts or PARTS:
            part, ended = measure_part(name, photos)
            lines, good = [*lines, *part], good and ended
            print("\n".join(part), flush=True)
    seconds = time.monotonic() - start
    if not options.parts:
        verdict = goal_verdict(seconds, MAX_TOTAL_SECONDS, at_most=True)
        lines += ["", f"All of the above took {seconds / 60:.1f} minutes, goal {MAX_TOTAL_SECONDS // 60}: {verdict}."]
        old = RESULTS_PATH.read_text() if RESULTS_PATH.exists() else ""
        RESULTS_PATH.write_text("\n".join([*lines, *sections_of_other_scripts(old)]) + "\n")
        print(lines[-1])
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
