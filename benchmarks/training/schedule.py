"""Goodput, time of each part and widest gap between two epochs, of the demo and of a shortened 18-minute schedule.

    .venv/bin/python benchmarks/training/schedule.py                 # two minutes on two quiet cores; generated images
    .venv/bin/python benchmarks/training/schedule.py --images DIR    # DIR/train/<class>/*.JPEG and DIR/val/...

The schedule has all phases of recipes/resnet50_18min.py for one machine: 128, 224 and 288 pixels, copies of 160 and 352
pixels and full-size images, batches in its proportions, rectangular crops at the end. So that two cores can run it, the
network is a ResNet-18 and a batch has only a few images. The jobs are started by the installed command, as a user
starts them.
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

from benchmarks.measure import COMMAND, goal_verdict, prepare_images
from recipes import resnet50_18min
from train.metrics.text import PART_TITLES
from train.recipe import Model, Recipe
from train.tools.text_files import to_json_bytes

GOODPUT_GOAL_PERCENT, GAP_GOAL_STEPS = 95.0, 1.0
BATCH_DIVISOR = 32  # batches are this many times smaller than those of eight V100
MAX_STEPS = 150
DRAWN_IMAGES = (400, 80)  # generated images for training and for validation


def shortened_recipe(model: str = "resnet18", batch_divisor: int = BATCH_DIVISOR) -> Recipe:
    """Return the 18-minute recipe for one machine with another network, smaller batches and matching learning rates."""
    full_recipe = resnet50_18min.recipe.for_machines(1)
    phases = [
        replace(
            phase, batch=max(4, phase.batch // batch_divisor), lr=_divide_learning_rate(phase.lr, 8 * batch_divisor)
        )
        for phase in full_recipe.phases
    ]
    return replace(full_recipe, name="cut-short", model=Model(name=model), phases=phases, tables={}, gpus=1)


def _divide_learning_rate(lr: float | tuple[float, float], divisor: int) -> float | tuple[float, float]:
    """Scale a learning rate by the linear rule; the nominal batch was that of eight GPUs."""
    return tuple(rate / divisor for rate in lr) if isinstance(lr, tuple) else lr / divisor  # type: ignore[return-value]


def run_job(folder: Path, *arguments: str) -> dict[str, Any]:
    """Run a job on this computer and return its result. Raises `CalledProcessError` if it fails."""
    folder.mkdir()
    command = [COMMAND, "launch", "--local", "-y", "--procs", "1", *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder)
    return dict(json.loads((folder / "runs" / "job-1" / "result.json").read_text()))


def run_demo(work_folder: Path) -> dict[str, Any]:
    """Run the job of `make demo` and return its result."""
    return run_job(work_folder / "demo", str(ROOT / "recipes" / "quickstart.py"))


def run_shortened_schedule(work_folder: Path, images: Path | None) -> dict[str, Any]:
    """Run the shortened schedule on these images, or on generated ones, and return its result."""
    data, copies = prepare_images(work_folder, images, *DRAWN_IMAGES)
    recipe_path = work_folder / "cut-short.json"
    recipe_path.write_bytes(to_json_bytes(shortened_recipe().to_json()))
    options = ["--data", str(data), "--copies", str(copies), "--max-steps", str(MAX_STEPS)]
    return run_job(work_folder / "schedule", str(recipe_path), *options)


def result_rows(title: str, results: Sequence[dict[str, Any]]) -> list[str]:
    """Return the rows of a run; of several runs, those of the run with the median goodput."""
    results_by_goodput = sorted(results, key=lambda result: result["goodput"])
    result = results_by_goodput[len(results_by_goodput) // 2]
    where = result["where"]
    goodput = 100 * result["goodput"]
    goodput_verdict = goal_verdict(goodput, GOODPUT_GOAL_PERCENT)
    gap = where["gap"] or {"steps": 0.0, "epoch": 0}
    gap_verdict = goal_verdict(gap["steps"], GAP_GOAL_STEPS, at_most=True)
    all_goodputs = ", ".join(f"{100 * other['goodput']:.1f}" for other in results_by_goodput)
    lines = [
        f"| {title}: goodput | {goodput:.1f} % (goal {GOODPUT_GOAL_PERCENT:.0f}: {goodput_verdict}; all runs: "
        f"{all_goodputs}) |",
        f"| widest gap between epochs | {gap['steps']:.2f} steps, before epoch {gap['epoch']} "
        f"(goal {GAP_GOAL_STEPS:.0f}: {gap_verdict}) |",
        f"| first step to last | {where['wall']:.1f} s, {result['steps']} steps, {len(result['epochs'])} epochs |",
    ]
    for part, part_title in PART_TITLES.items():
        row = where["parts"][part]
        share = 100 * row["seconds"] / where["wall"]
        lines.append(f"| {part_title} | {row['seconds']:.2f} s, {share:.1f} %, most in epoch {row['epoch']} |")
    slower_share = 100 * where["slower"] / where["wall"]
    lines.append(f"| in steps and batches slower than the median of their shape | {slower_share:.1f} % |")
    seconds_by_state = where["start"]
    states = ", ".join(f"{state} {seconds:.1f}" for state, seconds in seconds_by_state.items())
    lines.append(f"| start, before the first step | {sum(seconds_by_state.values()):.1f} s: {states} |")
    return lines


def markdown_rows(
    images: Path | None = None, rounds: int = 1, parts: Sequence[str] = ("demo", "schedule")
) -> list[str]:
    """Run the parts `rounds` times, and return the table as lines of Markdown. Without `images` they are generated."""
    source = "photographs" if images else "generated images"
    runs_by_part: dict[str, tuple[str, Callable[[Path], dict[str, Any]]]] = {
        "demo": ("demo", run_demo),
        "schedule": (f"shortened 18 minutes, {source}", lambda folder: run_shortened_schedule(folder, images)),
    }
    lines = ["| | |", "|---|---|"]
    for part in parts:
        title, run = runs_by_part[part]
        results = []
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as folder:
                results.append(run(Path(folder)))
        lines += result_rows(title, results)
    return lines


def main() -> int:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(
        description="Goodput and stalls of the demo and of a shortened 18-minute schedule."
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="demo, schedule (default: both)")
    parser.add_argument("--images", type=Path, metavar="DIR", help="photographs: DIR/train/<class>/*.JPEG, DIR/val/...")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="runs of each part; the median run is shown")
    options = parser.parse_args()
    images = options.images and options.images.resolve()
    print("\n".join(markdown_rows(images, options.rounds, options.parts or ("demo", "schedule"))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
