"""Goodput, where the time went and the widest gap between two epochs: the demo, and a cut-short 18-minute schedule.

    .venv/bin/python benchmarks/schedule.py                    # about two minutes on two quiet cores, images drawn
    .venv/bin/python benchmarks/schedule.py --images DIR       # photographs: DIR/train/<class>/*.JPEG and DIR/val/...

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

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from measure import met  # noqa: E402

from recipes import resnet50_18min  # noqa: E402
from train.data.packing.synthetic import draw_set  # noqa: E402
from train.metrics.text import PARTS  # noqa: E402
from train.recipe import Model, Recipe  # noqa: E402
from train.tools.filesystem import as_json  # noqa: E402

COMMAND = str(Path(sys.executable).parent / "imgnet-cluster")
GOODPUT, GAP = 95.0, 1.0
SMALLER = 32  # times smaller batches than those of eight V100
STEPS = 150
DRAWN = (400, 80)  # training and validation images


def cut_short(model: str = "resnet18", smaller: int = SMALLER) -> Recipe:
    """Return the 18-minute recipe's rows for one machine with another net, smaller batches and rates to match."""
    whole = resnet50_18min.recipe.at(1)
    rows = [replace(one, batch=max(4, one.batch // smaller), lr=_divided(one.lr, 8 * smaller)) for one in whole.phases]
    made = replace(whole, name="cut-short", model=Model(name=model), phases=rows, tables={}, gpus=1)
    return made


def _divided(rate: float | tuple[float, float], by: int) -> float | tuple[float, float]:
    """By the linear rule: the nominal batch was of eight GPUs."""
    return tuple(one / by for one in rate) if isinstance(rate, tuple) else rate / by  # type: ignore[return-value]


def job(folder: Path, *words: str) -> dict[str, Any]:
    """Run a job on this computer to its end and return its result. Raises `CalledProcessError`."""
    folder.mkdir()
    command = [COMMAND, "launch", "--local", "-y", "--procs", "1", *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder)
    return dict(json.loads((folder / "runs" / "job-1" / "result.json").read_text()))


def demo(place: Path) -> dict[str, Any]:
    """What `make demo` runs."""
    return job(place / "demo", str(HERE.parent / "recipes" / "quickstart.py"))


def schedule(place: Path, images: Path | None) -> dict[str, Any]:
    """The cut-short schedule on these images, with copies of them beside the jobs' folder."""
    data, recipe = images or place / "drawn", place / "cut-short.json"
    if images is None:
        draw_set(data, train=DRAWN[0], val=DRAWN[1])
    copies = place / "copies"
    subprocess.run(
        [COMMAND, "data", "resize", str(data), str(copies), "--sizes", "160,352"], check=True, stdout=subprocess.DEVNULL
    )
    recipe.write_bytes(as_json(cut_short().to_json()))
    return job(place / "schedule", str(recipe), "--data", str(data), "--copies", str(copies), "--max-steps", str(STEPS))


def table(name: str, results: Sequence[dict[str, Any]]) -> list[str]:
    """Return the rows of one run, or of the run with the middle goodput of several."""
    found = sorted(results, key=lambda one: one["goodput"])
    one = found[len(found) // 2]
    where, goodput = one["where"], 100 * one["goodput"]
    gap = where["gap"] or {"steps": 0.0, "epoch": 0}
    runs = ", ".join(f"{100 * other['goodput']:.1f}" for other in found)
    lines = [
        f"| {name}: goodput | {goodput:.1f} % ({met(goodput, GOODPUT)}: {GOODPUT:.0f}; runs: {runs}) |",
        f"| widest gap between epochs | {gap['steps']:.2f} steps, before epoch {gap['epoch']} "
        f"({met(gap['steps'], GAP, most=True)}: {GAP:.0f}) |",
        f"| first step to last | {where['wall']:.1f} s, {one['steps']} steps, {len(one['epochs'])} epochs |",
    ]
    for part, title in PARTS.items():
        row = where["parts"][part]
        share = 100 * row["seconds"] / where["wall"]
        lines.append(f"| {title} | {row['seconds']:.2f} s, {share:.1f} %, most in epoch {row['epoch']} |")
    lines.append(f"| in steps slower than the median of their shape | {100 * where['slower'] / where['wall']:.1f} % |")
    start = ", ".join(f"{state} {seconds:.1f}" for state, seconds in where["start"].items())
    return [*lines, f"| start, before all of it | {sum(where['start'].values()):.1f} s: {start} |"]


def rows(images: Path | None = None, rounds: int = 1, parts: Sequence[str] = ("demo", "schedule")) -> list[str]:
    """Measure and return the rows of a table with two columns. Photographs where `images` is given."""
    kind = "photographs" if images else "drawn images"
    works: dict[str, tuple[str, Callable[[Path], dict[str, Any]]]] = {
        "demo": ("demo", demo),
        "schedule": (f"18 minutes cut short, {kind}", lambda place: schedule(place, images)),
    }
    lines = ["| | |", "|---|---|"]
    for name in parts:
        title, work = works[name]
        results = []
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as folder:
                results.append(work(Path(folder)))
        lines += table(title, results)
    return lines


def main() -> int:
    """Print the rows."""
    parser = argparse.ArgumentParser(description="Goodput and stalls over the demo and a cut-short 18-minute schedule.")
    parser.add_argument("parts", nargs="*", metavar="PART", help="demo, schedule (default: both)")
    parser.add_argument("--images", type=Path, metavar="DIR", help="photographs: DIR/train/<class>/*.JPEG, DIR/val/...")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="runs of each; the middle one is shown")
    asked = parser.parse_args()
    images = asked.images and asked.images.resolve()
    print("\n".join(rows(images, asked.rounds, asked.parts or ("demo", "schedule"))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
