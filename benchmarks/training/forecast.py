"""A forecast of a real run: constants from a short job on two processes here, a longer one of other shapes forecast.

    .venv/bin/python benchmarks/training/forecast.py [--pairs 1]

Both are jobs as `launch --local` makes them. The longer one has the short one's sizes in other proportions, another
number of steps, and a size and a batch that the short one never saw. What is compared is the time from the agents'
start to the last step, and each term of it. Nothing else should run: processors that are shared make both runs slower,
but not alike.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from cluster.jobs import store, submit
from train.data.packing.synthetic import draw_sample_set
from train.forecast import Constants
from train.recipe import SAMPLE, Model, Optim, Phase, Recipe

MAX_ERROR = 0.15
IMAGES = 2000  # of the built-in set, and 500 to validate


def make_recipe(name: str, *phase_rows: tuple[int, int, int]) -> Recipe:
    """A recipe of (epochs, size, batch), validated after each phase."""
    phases, start = [], 0
    for epochs, size, batch in phase_rows:
        span = (start, start + epochs)
        phases.append(Phase(epochs=span, size=size, batch=batch, lr=0.02, min_scale=0.35, validate="last"))
        start += epochs
    return Recipe(
        name=name, data=SAMPLE, model=Model(name="resnet10_tiny", zero_gamma=False), optim=Optim(), machines=1, gpus=2,
        phases=phases,
    )  # fmt: skip


SHORT_RECIPE = make_recipe("short", (2, 64, 16), (1, 64, 32), (2, 96, 32))
LONG_RECIPE = make_recipe("long", (2, 64, 16), (3, 64, 48), (2, 80, 32), (3, 96, 32))


def run_job(job_recipe: Recipe, constants: Constants | None = None) -> dict[str, Any]:
    """Run a job on two processes to its end. Returns its result. Raises `ClusterError`, `RuntimeError`: it failed."""
    job = submit.launch(
        job_recipe, backend="local", procs=2, scale=IMAGES / SAMPLE.train, constants=constants, data="sample"
    )
    state = job.wait(1800)
    if state != "done" or job.result is None:
        raise RuntimeError(f"{job.name} is {state}; {job.path}")
    return job.result


def measure_pair() -> list[dict[str, Any]]:
    """Run the short one and the long one. Returns the long one's forecast beside what it took, term by term."""
    constants = Constants.from_json(run_job(SHORT_RECIPE)["constants"])
    found: list[dict[str, Any]] = run_job(LONG_RECIPE, constants)["against"]
    return found


def markdown_rows(rounds: int = 1) -> Iterator[str]:
    """Yield the benchmark's table."""
    kept = os.environ.get(store.RUNS_ENV_VAR)
    with tempfile.TemporaryDirectory(prefix="forecast-") as folder:
        os.environ[store.RUNS_ENV_VAR] = f"{folder}/runs"
        here = Path.cwd()
        os.chdir(folder)
        try:
            draw_sample_set(Path(SAMPLE.root), train=SAMPLE.train, val=SAMPLE.val)  # once, and of neither run's time
            found = [measure_pair() for _ in range(rounds)]
        finally:
            os.chdir(here)
            os.environ.pop(store.RUNS_ENV_VAR)
            os.environ.update({store.RUNS_ENV_VAR: kept} if kept else {})
    yield "| long run, seconds | forecast from the short one | took | error |"
    yield "|---|---|---|---|"
    for one in zip(*found, strict=True):
        told, took = (statistics.median(row[name] for row in one) for name in ("forecast", "actual"))
        error = f"{100 * (told / took - 1):+.1f} %" if took > 0.5 else ""
        bound = f" (bound: {100 * MAX_ERROR:.0f})" if one[0]["term"] == "all" else ""
        yield f"| {one[0]['term']} | {told:.1f} | {took:.1f} | {error}{bound} |"
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    errors = [row["error"] for one in found for row in one if row["term"] == "all"]
    yield ""
    yield f"All, each of {rounds}: {', '.join(f'{100 * one:+.1f} %' for one in errors)}. The computer's load was {load}."


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="A forecast of a real run from a shorter one.")
    parser.add_argument("--pairs", type=int, default=1, help="how often (default: 1)")
    for line in markdown_rows(parser.parse_args().pairs):
        print(line)


if __name__ == "__main__":
    main()
