"""Seconds to the same accuracy on CIFAR-10 as JPEG files: our progressive schedule compared with a plain loop.

    .venv/bin/python benchmarks/training/cifar_baseline.py --data DIR    # or a .tar.gz; 15 to 20 minutes

Writes its section of RESULTS.md. The clock runs from the first step to the end of the first validation that reaches the
target. Both sides have the same images, network, initial weights, loss and optimizer, and all cores. Each pair of runs
has its own seed, and the sides alternate. Both sides were tuned a little, by hand, on seed 0: first the fewest epochs
that reach the target with a point or two to spare, then the learning rate. The plain loop gets the OpenMP setting that
our trainer makes for itself; without it, its workers slow down its steps several times.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.measure import describe_machine, goal_verdict, median_with_range, write_section

DEFAULT_DATA = ROOT / "data" / "cifar10"
TARGET_TOP1, ROUNDS, GOAL_RATIO = 65.0, 5, 1.5
NO_DATA_MESSAGE = (
    "skipped: no CIFAR-10 as JPEG files; pass --data DIR or --data FILE.tar.gz with train/<class>/ and val/<class>/"
)
OUR_SCHEDULE = "16 px, batch 64, then 24 px, batch 64; validated after the second epoch"
PLAIN_LOOP_SCHEDULE = "32 px, batch 128, 2 epochs, one cycle; validated after each"
RECIPE = """\
from train.recipe import Data, Model, Optim, Phase, Recipe

recipe = Recipe(
    name="cifar", data=Data(name="cifar10", root="none", train=50_000, val=10_000),
    model=Model(name="resnet10_cifar", zero_gamma=False),
    optim=Optim(momentum=0.9, nesterov=True, weight_decay=5e-4, bias_decay=False, label_smoothing=0.1),
    machines=1, gpus=1,
    phases=[
        Phase(epochs=(0, 1), size=16, batch=64, lr=(0.05, 0.2), min_scale=0.75, validate="never"),
        Phase(epochs=(1, 2), size=24, batch=64, lr=(0.2, 0.0), min_scale=0.75),
    ],
)
"""


@dataclass(frozen=True)
class RunToTarget:
    """Seconds from the first step to the target, None if it was not reached, and the last top-1 in percent."""

    seconds: float | None
    top1: float


def run_to_target(start: float, validations: Sequence[tuple[float, float]]) -> RunToTarget:
    """Return the run whose first step began at `start`; `validations` are (time of the end, top-1 in percent)."""
    for end_time, top1 in validations:
        if top1 >= TARGET_TOP1:
            return RunToTarget(end_time - start, top1)
    return RunToTarget(None, validations[-1][1])


def train_ours(data: Path, seed: int) -> RunToTarget:
    """Train with `python -m train` and evaluate its metrics."""
    with tempfile.TemporaryDirectory() as folder:
        recipe_path = Path(folder) / "recipe.py"
        recipe_path.write_text(RECIPE)
        options = ["--data", str(data), "--out", folder, "--seed", str(seed)]
        run_command([sys.executable, "-m", "train", str(recipe_path), *options])
        lines = (Path(folder) / "metrics" / "000001.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    first_row = next(row for row in rows if row["kind"] == "train")  # covers the first step alone
    start = first_row["time"] - first_row["scalars"]["times/step_ms"] / 1000
    validations = [(row["time"], row["top1"]) for row in rows if row["kind"] == "epoch" and row["top1"] is not None]
    return run_to_target(start, validations)


def train_plain_loop(data: Path, seed: int) -> RunToTarget:
    """Train with baseline_loop.py and evaluate its events."""
    script = ROOT / "benchmarks" / "training" / "baseline_loop.py"
    options = ["--data", str(data), "--seed", str(seed)]
    output = run_command([sys.executable, str(script), *options])
    first_step, *epochs = [json.loads(line) for line in output.splitlines()]
    return run_to_target(first_step["time"], [(epoch["time"], epoch["top1"]) for epoch in epochs])


def run_command(argv: list[str]) -> str:
    """Run a command and return its output. Raises `RuntimeError` with its stderr if it fails."""
    environment = {"GOMP_SPINCOUNT": "2000", **os.environ, "PYTHONPATH": str(ROOT)}
    completed = subprocess.run(argv, env=environment, capture_output=True, text=True)
    if completed.returncode:
        raise RuntimeError(f"{' '.join(argv[1:4])}: {completed.stderr.strip()}")
    return completed.stdout


@contextlib.contextmanager
def unpacked(data: Path) -> Iterator[Path]:
    """Yield the folder with train/ and val/; a .tar is unpacked to a temporary folder first."""
    if data.is_dir():
        yield data
        return
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(data) as tar:
            tar.extractall(folder, filter="data")
        yield next(path.parent for path in sorted(Path(folder).rglob("train")))


def markdown_rows(data: Path = DEFAULT_DATA, rounds: int = ROUNDS) -> list[str]:
    """Run the pairs of runs, and return the section as lines of Markdown."""
    if not data.exists():
        return [NO_DATA_MESSAGE]
    our_runs: list[RunToTarget] = []
    plain_runs: list[RunToTarget] = []
    with unpacked(data) as folder:
        for seed in range(rounds):
            our_runs.append(train_ours(folder, seed))
            plain_runs.append(train_plain_loop(folder, seed))
            print(f"seed {seed}: ours {our_runs[-1]}, plain {plain_runs[-1]}", file=sys.stderr, flush=True)
    return [f"{describe_machine()}, n = {rounds}; median (min-max).", "", *table(our_runs, plain_runs)]


def table(our_runs: Sequence[RunToTarget], plain_runs: Sequence[RunToTarget]) -> Iterator[str]:
    """Yield the rows of the table."""
    yield f"| CIFAR-10 to {TARGET_TOP1:g} % top-1 | seconds from the first step | final top-1 | runs that reached it |"
    yield "|---|---|---|---|"
    for title, runs in ((f"ours: {OUR_SCHEDULE}", our_runs), (f"plain loop: {PLAIN_LOOP_SCHEDULE}", plain_runs)):
        seconds = [run.seconds for run in runs if run.seconds is not None]
        seconds_cell = median_with_range(seconds, 1) if seconds else "-"
        top1_cell = median_with_range([run.top1 for run in runs], 1)
        yield f"| {title} | {seconds_cell} | {top1_cell} | {len(seconds)} of {len(runs)} |"
    pairs = [(ours.seconds, plain.seconds) for ours, plain in zip(our_runs, plain_runs, strict=True)]
    ratios = [plain / ours for ours, plain in pairs if ours is not None and plain is not None]
    if ratios:
        verdict = goal_verdict(statistics.median(ratios), GOAL_RATIO)
        ratio_cell = f"{median_with_range(ratios, 2)}, goal {GOAL_RATIO}: {verdict}"
        yield f"| plain / ours, by pairs | {ratio_cell} | | {len(ratios)} of {len(our_runs)} |"


def main() -> int:
    """Measure and print; after at least ROUNDS pairs, write the section of RESULTS.md."""
    parser = argparse.ArgumentParser(description="Compare the seconds to an accuracy with a plain training loop.")
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA, help="CIFAR-10 as JPEG files: a folder or .tar.gz")
    parser.add_argument("--n", type=int, default=ROUNDS, help=f"pairs of runs (default: {ROUNDS})")
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    lines = markdown_rows(options.data, options.n)
    print("\n".join(lines))
    if NO_DATA_MESSAGE not in lines and options.n >= ROUNDS:
        footer = (
            f"Load {load_before:.1f} before, {os.getloadavg()[0]:.1f} after. "
            "Written by `benchmarks/training/cifar_baseline.py`."
        )
        heading = "## Time to the same accuracy, compared with a plain loop"
        write_section("training/cifar_baseline.py", [heading, "", *lines, "", footer])
    return 0


if __name__ == "__main__":
    sys.exit(main())
