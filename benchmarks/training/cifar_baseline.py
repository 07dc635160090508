"""Seconds to the same accuracy on CIFAR-10 as JPEG files: ours by sizes and batches, and a plain loop.

    .venv/bin/python benchmarks/training/cifar_baseline.py --data DIR        # or a .tar.gz; 15 to 20 minutes; its part of RESULTS.md

The clock runs from the first step to the end of the first validation at the target. Same images, network, first
weights, loss and optimizer, all cores, a seed for each pair, pairs in turn. Both sides were tuned a little, by hand, on
seed 0: the fewest epochs that reach the target with a point or two to spare, then the rate. The plain loop gets the
OpenMP setting that ours makes for itself, without which its workers slow its steps several times.
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
    "skipped: no CIFAR-10 as JPEG files; say --data DIR or --data FILE.tar.gz, with train/<class>/ and val/<class>/"
)
OUR_SCHEDULE = "16 px, batch 64, then 24 px, batch 64; validated after the second epoch"
PLAIN_LOOP_ARGUMENTS = ("--epochs", "2", "--lr", "0.2", "--warm-up", "0.3")
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
    """Seconds from the first step to the target, None where it was not reached, and the last top-1 in percent."""

    seconds: float | None
    top1: float


def run_to_target(start: float, validations: Sequence[tuple[float, float]], target: float) -> RunToTarget:
    """Return the run whose validations ended at these times with these accuracies."""
    for at, top1 in validations:
        if top1 >= target:
            return RunToTarget(at - start, top1)
    return RunToTarget(None, validations[-1][1])


def train_ours(data: Path, seed: int, target: float) -> RunToTarget:
    """Train by `python -m train` and read its metrics."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "recipe.py"
        recipe.write_text(RECIPE)
        words = [str(recipe), "--data", str(data), "--out", folder, "--seed", str(seed)]
        run_command([sys.executable, "-m", "train", *words])
        lines = (Path(folder) / "metrics" / "000001.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    first = next(row for row in rows if row["kind"] == "train")  # of the first step alone
    epochs = [(row["time"], row["top1"]) for row in rows if row["kind"] == "epoch" and row["top1"] is not None]
    return run_to_target(first["time"] - first["times/step_ms"] / 1000, epochs, target)


def train_plain_loop(data: Path, seed: int, target: float) -> RunToTarget:
    """Train by peer_loop.py."""
    text = run_command(
        [
            sys.executable,
            str(ROOT / "benchmarks" / "training" / "baseline_loop.py"),
            "--data",
            str(data),
            "--seed",
            str(seed),
            *PLAIN_LOOP_ARGUMENTS,
        ]
    )
    first, *rows = [json.loads(line) for line in text.splitlines()]
    return run_to_target(first["time"], [(row["time"], row["top1"]) for row in rows], target)


def run_command(argv: list[str]) -> str:
    """Return what a command prints. Raises `RuntimeError` with its last words."""
    environment = {"GOMP_SPINCOUNT": "2000", **os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv[1:4])}: {done.stderr.strip()}")
    return done.stdout


@contextlib.contextmanager
def unpacked(data: Path) -> Iterator[Path]:
    """Yield the folder with train/ and val/, unpacked first where it is a .tar."""
    if data.is_dir():
        yield data
        return
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(data) as tar:
            tar.extractall(folder, filter="data")
        yield next(one.parent for one in sorted(Path(folder).rglob("train")))


def markdown_rows(data: Path = DEFAULT_DATA, rounds: int = ROUNDS, target: float = TARGET_TOP1) -> list[str]:
    """Measure `count` pairs; markdown lines."""
    if not data.exists():
        return [NO_DATA_MESSAGE]
    mine: list[RunToTarget] = []
    others: list[RunToTarget] = []
    with unpacked(data) as folder:
        for seed in range(rounds):
            mine.append(train_ours(folder, seed, target))
            others.append(train_plain_loop(folder, seed, target))
            print(f"seed {seed}: ours {mine[-1]}, plain {others[-1]}", file=sys.stderr, flush=True)
    return [f"{describe_machine()}, n = {rounds}; median (least-most).", "", *table(mine, others, target)]


def table(our_runs: Sequence[RunToTarget], plain_runs: Sequence[RunToTarget], target: float) -> Iterator[str]:
    """Yield the rows."""
    yield f"| CIFAR-10 to {target:g} % top-1 | seconds from the first step | top-1 there | reached |"
    yield "|---|---|---|---|"
    for name, runs in ((f"ours: {OUR_SCHEDULE}", our_runs), (f"plain loop: {PLAIN_LOOP_SCHEDULE}", plain_runs)):
        known = [one.seconds for one in runs if one.seconds is not None]
        top1 = median_with_range([one.top1 for one in runs], 1)
        yield f"| {name} | {median_with_range(known, 1) if known else '-'} | {top1} | {len(known)} of {len(runs)} |"
    pairs = [(a.seconds, b.seconds) for a, b in zip(our_runs, plain_runs, strict=True)]
    ratio = [b / a for a, b in pairs if a is not None and b is not None]
    if ratio:
        verdict = goal_verdict(statistics.median(ratio), GOAL_RATIO)
        yield f"| plain / ours, by pairs | {median_with_range(ratio, 2)}, goal {GOAL_RATIO}: {verdict} | | {len(ratio)} of {len(our_runs)} |"


def main() -> int:
    """Measure, print, and with all pairs measured write the part of RESULTS.md."""
    parser = argparse.ArgumentParser(description="Seconds to the same accuracy beside a plain training loop.")
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA, help="CIFAR-10 as JPEG files: a folder, or .tar.gz")
    parser.add_argument("--n", type=int, default=ROUNDS, help=f"pairs of runs (default: {ROUNDS})")
    parser.add_argument(
        "--target", type=float, default=TARGET_TOP1, help=f"top-1 in percent (default: {TARGET_TOP1:g})"
    )
    options = parser.parse_args()
    load = os.getloadavg()[0]
    lines = markdown_rows(options.data, options.n, options.target)
    print("\n".join(lines))
    if NO_DATA_MESSAGE not in lines and options.n >= ROUNDS:
        after = f"Load {load:.1f} before, {os.getloadavg()[0]:.1f} after. Written by `benchmarks/training/cifar_baseline.py`."
        write_section("cifar_peer.py", ["## To the same accuracy, beside a plain loop", "", *lines, "", after])
    return 0


if __name__ == "__main__":
    sys.exit(main())
