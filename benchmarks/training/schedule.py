"""Goodput, where the time went and the widest gap between two epochs: the demo, and a cut-short 18-minute schedule.

    .venv/bin/python benchmarks/training/schedule.py                    # about two minutes on two quiet cores, images drawn
    .venv/bin/python benchmarks/training/schedule.py --images DIR       # photographs: DIR/train/<class>/*.JPEG and DIR/val/...

The schedule has all phases of recipes/resnet50_18min.py for one machine: 128, 224 and 288 pixels, copies of 160 and 352
pixels and full-size images, batches that shrink by its proportions, rectangles at the end; the net is a ResNet-18 and
a batch a few images, so that two processors carry it out. Jobs of the installed command, as a person starts them.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.measure import goal_verdict
from recipes import resnet50_18min
from train.data.packing.synthetic import draw_sample_set
from train.metrics.text import PART_TITLES
from train.recipe import Model, Recipe
from train.tools.filesystem import to_json_bytes

COMMAND = str(Path(sys.executable).parent / "imgnet-cluster")
GOODPUT_GOAL_PERCENT, GAP_GOAL_STEPS = 95.0, 1.0
BATCH_DIVISOR = 32  # times smaller batches than those of eight V100
MAX_STEPS = 150
DRAWN_IMAGES = (400, 80)  # training and validation images


def shortened_recipe(model: str = "resnet18", batch_divisor: int = BATCH_DIVISOR) -> Recipe:
    """Return the 18-minute recipe's rows for one machine with another net, smaller batches and rates to match."""
    whole = resnet50_18min.recipe.for_machines(1)
    rows = [
        replace(one, batch=max(4, one.batch // batch_divisor), lr=_divide_rate(one.lr, 8 * batch_divisor))
        for one in whole.phases
    ]
    made = replace(whole, name="cut-short", model=Model(name=model), phases=rows, tables={}, gpus=1)
    return made


def _divide_rate(rate: float | tuple[float, float], divisor: int) -> float | tuple[float, float]:
    """By the linear rule: the nominal batch was of eight GPUs."""
    return tuple(one / divisor for one in rate) if isinstance(rate, tuple) else rate / divisor  # type: ignore[return-value]


def run_job(folder: Path, *arguments: str) -> dict[str, Any]:
    """Run a job on this computer to its end and return its result. Raises `CalledProcessError`."""
    folder.mkdir()
    command = [COMMAND, "launch", "--local", "-y", "--procs", "1", *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder)
    return dict(json.loads((folder / "runs" / "job-1" / "result.json").read_text()))


def run_demo(work_folder: Path) -> dict[str, Any]:
    """What `make demo` runs."""
    return run_job(work_folder / "demo", str(ROOT / "recipes" / "quickstart.py"))


def run_shortened_schedule(work_folder: Path, images: Path | None) -> dict[str, Any]:
    """The cut-short schedule on these images, with copies of them beside the jobs' folder."""
    data, recipe = images or work_folder / "drawn", work_folder / "cut-short.json"
    if images is None:
        draw_sample_set(data, train=DRAWN_IMAGES[0], val=DRAWN_IMAGES[1])
    copies = work_folder / "copies"
    subprocess.run(
        [COMMAND, "data", "resize", str(data), str(copies), "--sizes", "160,352"], check=True, stdout=subprocess.DEVNULL
    )
    recipe.write_bytes(to_json_bytes(shortened_recipe().to_json()))
    return run_job(
        work_folder / "schedule",
        str(recipe),
        "--data",
        str(data),
        "--copies",
        str(copies),
        "--max-steps",
        str(MAX_STEPS),
    )


def result_rows(name: str, results: Sequence[dict[str, Any]]) -> list[str]:
    """Return the rows of one run, or of the run with the middle goodput of several."""
    found = sorted(results, key=lambda one: one["goodput"])
    one = found[len(found) // 2]
    where, goodput = one["where"], 100 * one["goodput"]
    gap = where["gap"] or {"steps": 0.0, "epoch": 0}
    runs = ", ".join(f"{100 * other['goodput']:.1f}" for other in found)
    lines = [
        f"| {name}: goodput | {goodput:.1f} % ({goal_verdict(goodput, GOODPUT_GOAL_PERCENT)}: {GOODPUT_GOAL_PERCENT:.0f}; runs: {runs}) |",
        f"| widest gap between epochs | {gap['steps']:.2f} steps, before epoch {gap['epoch']} "
        f"({goal_verdict(gap['steps'], GAP_GOAL_STEPS, at_most=True)}: {GAP_GOAL_STEPS:.0f}) |",
        f"| first step to last | {where['wall']:.1f} s, {one['steps']} steps, {len(one['epochs'])} epochs |",
    ]
    for part, title in PART_TITLES.items():
        row = where["parts"][part]
        share = 100 * row["seconds"] / where["wall"]
        lines.append(f"| {title} | {row['seconds']:.2f} s, {share:.1f} %, most in epoch {row['epoch']} |")
    lines.append(f"| in steps slower than the median of their shape | {100 * where['slower'] / where['wall']:.1f} % |")
    start = ", ".join(f"{state} {seconds:.1f}" for state, seconds in where["start"].items())
    return [*lines, f"| start, before all of it | {sum(where['start'].values()):.1f} s: {start} |"]


def markdown_rows(
    images: Path | None = None, rounds: int = 1, parts: Sequence[str] = ("demo", "schedule")
) -> list[str]:
    """Measure and return the rows of a table with two columns. Photographs where `images` is given."""
    kind = "photographs" if images else "drawn images"
    works: dict[str, tuple[str, Callable[[Path], dict[str, Any]]]] = {
        "demo": ("demo", run_demo),
        "schedule": (f"18 minutes cut short, {kind}", lambda place: run_shortened_schedule(place, images)),
    }
    lines = ["| | |", "|---|---|"]
    for name in parts:
        title, work = works[name]
        results = []
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as folder:
                results.append(work(Path(folder)))
        lines += result_rows(title, results)
    return lines


def main() -> int:
    """Print the rows."""
    parser = argparse.ArgumentParser(description="Goodput and stalls over the demo and a cut-short 18-minute schedule.")
    parser.add_argument("parts", nargs="*", metavar="PART", help="demo, schedule (default: both)")
    parser.add_argument("--images", type=Path, metavar="DIR", help="photographs: DIR/train/<class>/*.JPEG, DIR/val/...")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="runs of each; the middle one is shown")
    asked = parser.parse_args()
    images = asked.images and asked.images.resolve()
    print("\n".join(markdown_rows(images, asked.rounds, asked.parts or ("demo", "schedule"))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
