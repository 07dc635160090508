"""Compares the forecast of a run with the run itself; the forecast's constants come from a shorter run.

    .venv/bin/python benchmarks/training/forecast.py

Both runs are jobs of two processes on this computer, as `launch --local` makes them. The long run uses the sizes of the
short run in other proportions, another number of steps, and a size and a batch that the short run did not have. The
comparison covers the time from the start of the agents to the last step, and each term of it. Nothing else should run:
shared processors make both runs slower, but not equally.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from cluster.jobs import submit
from cluster.jobs.job import Job
from cluster.planning.launch_options import make_launch_options
from cluster.state.run_folder import RUNS_ENV_VAR
from train.data.packing.synthetic import draw_sample_set
from train.forecast import TermComparison, compare_with_run, forecast
from train.recipe import SAMPLE, Model, Optim, Phase, Recipe
from train.recipe.schedule import scaled_image_count

MAX_ERROR = 0.15
IMAGES = 2000  # training images of the built-in set; 500 more validate


def make_recipe(name: str, *phase_rows: tuple[int, int, int]) -> Recipe:
    """Return a recipe with phases of (epochs, size, batch), validated at the end of each phase."""
    phases = []
    first_epoch = 0
    for epochs, size, batch in phase_rows:
        span = (first_epoch, first_epoch + epochs)
        phases.append(Phase(epochs=span, size=size, batch=batch, lr=0.02, min_scale=0.35, validate="last"))
        first_epoch += epochs
    return Recipe(
        name=name,
        data=SAMPLE,
        model=Model(name="resnet10_tiny", zero_gamma=False),
        optim=Optim(),
        machines=1,
        gpus=2,
        phases=phases,
    )


SHORT_RECIPE = make_recipe("short", (2, 64, 16), (1, 64, 32), (2, 96, 32))
LONG_RECIPE = make_recipe("long", (2, 64, 16), (3, 64, 48), (2, 80, 32), (3, 96, 32))


def run_job(job_recipe: Recipe) -> Job:
    """Run a job of two processes to its end. Raises `ClusterError` or `RuntimeError` if it fails."""
    options = make_launch_options(procs=2, scale=IMAGES / SAMPLE.train, data="sample")
    job = submit.launch(submit.plan(job_recipe, options))
    state = job.wait(1800)
    if state != "done" or job.result is None:
        raise RuntimeError(f"{job.name} ended as {state}; see {job.path}")
    return job


def measure_pair() -> tuple[TermComparison, ...]:
    """Run the short and the long job. Return the long job's forecast and actual seconds, a row per term."""
    short, long = run_job(SHORT_RECIPE), run_job(LONG_RECIPE)
    assert short.result and short.result.constants and long.result and long.result.where
    long_forecast = forecast(
        long.spec.recipe_schedule,
        gpus=long.spec.procs,
        gpu="CPU",
        gbit=0.0,  # not used: the time of the network is in the measured steps
        machines=1,
        constants=short.result.constants,
        val_images=scaled_image_count(SAMPLE.val, IMAGES / SAMPLE.train),
    )
    assert long_forecast
    return compare_with_run(long_forecast, long.result.epochs, sum(long.result.where.start.values()))


def markdown_rows() -> Iterator[str]:
    """Measure, and yield the lines of the table."""
    original_runs = os.environ.get(RUNS_ENV_VAR)
    with tempfile.TemporaryDirectory(prefix="forecast-") as folder:
        os.environ[RUNS_ENV_VAR] = f"{folder}/runs"
        original_folder = Path.cwd()
        os.chdir(folder)
        try:
            # Made beforehand, so that it counts in the time of neither run.
            draw_sample_set(Path(SAMPLE.root), train=SAMPLE.train, val=SAMPLE.val)
            comparison = measure_pair()
        finally:
            os.chdir(original_folder)
            os.environ.pop(RUNS_ENV_VAR)
            os.environ.update({RUNS_ENV_VAR: original_runs} if original_runs else {})
    yield "| long run, seconds | forecast from the short run | actual | error |"
    yield "|---|---|---|---|"
    for row in comparison:
        error = f"{100 * (row.forecast / row.actual - 1):+.1f} %" if row.actual > 0.5 else ""
        bound = f" (bound: {100 * MAX_ERROR:.0f})" if row.term == "all" else ""
        yield f"| {row.term} | {row.forecast:.1f} | {row.actual:.1f} | {error}{bound} |"
    load = ", ".join(f"{average:.1f}" for average in os.getloadavg())
    yield from ("", f"The computer's load averages were {load}.")


if __name__ == "__main__":
    for line in markdown_rows():
        print(line)
