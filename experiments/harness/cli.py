"""Command line of the experiments: makes the runs that are missing, then prints tables and draws pictures."""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.harness import plots, table
from experiments.harness.claims import Experiment, ImageSources
from experiments.harness.confidence import RowsByArm
from experiments.harness.images import ImageSourceError
from experiments.harness.runs import ExperimentRun, read_row
from experiments.harness.sweep import RunFailed, SweepLocation, run_sweep
from train.tools.errors import one_line_error
from train.tools.host import usable_cpu_count

HERE = Path(__file__).resolve().parents[1]
MIN_SEEDS = 5  # with fewer it is a trial run: neither RESULTS.md nor a picture is written


def main(experiments: Sequence[Experiment], argv: Sequence[str] | None = None) -> int:
    """Run experiments to their end and print their tables; of all experiments also write RESULTS.md.

    Returns 0, 1 with one line on stderr when a run failed, or 130 when it was interrupted.
    """
    arguments = parse(experiments, argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _run_all(experiments, arguments)
    except KeyboardInterrupt:
        print("interrupted; run the same command to continue", file=sys.stderr)
        return 130
    except BlockingIOError:
        print(
            f"error: another sweep is running in {arguments.work}; wait until it ends, or pass another --work DIR",
            file=sys.stderr,
        )
    except (RunFailed, ImageSourceError, OSError) as error:
        print(f"error: {one_line_error(error)}", file=sys.stderr)
    return 1


def parse(experiments: Sequence[Experiment], argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed command line. Ends the program with exit code 2 when it is wrong."""
    parser = argparse.ArgumentParser(description="Makes the missing runs of experiments; of all, it writes RESULTS.md.")
    names = [experiment.name for experiment in experiments]
    parser.add_argument("names", nargs="*", metavar="EXPERIMENT", help=f"{', '.join(names)} (default: all)")
    parser.add_argument("--data", type=Path, metavar="DIR|TAR", help="CIFAR-10 as JPEG files, with train/ and val/")
    parser.add_argument("--photographs", type=Path, metavar="DIR|TAR", help="photographs with any names")
    parser.add_argument("--seeds", type=int, default=MIN_SEEDS, help=f"runs of each arm (default: {MIN_SEEDS})")
    parser.add_argument(
        "--jobs", type=int, default=usable_cpu_count(), help="runs at a time, of one thread each (default: cores)"
    )
    parser.add_argument(
        "--work", type=Path, default=HERE.parent / "runs" / "experiments", help="folder for images and unfinished runs"
    )
    parser.add_argument(
        "--results", type=Path, default=HERE / "results", help="folder of the rows (default: experiments/results)"
    )
    arguments = parser.parse_args(argv)
    if arguments.seeds < 1 or arguments.jobs < 1:
        parser.error("--seeds and --jobs must be at least 1")
    if unknown := set(arguments.names) - set(names):
        parser.error(f"no such experiment: {', '.join(sorted(unknown))}")
    if not (arguments.data or arguments.photographs):
        parser.error("no images: pass --data DIR|TAR or --photographs DIR|TAR")
    return arguments


def _run_all(experiments: Sequence[Experiment], arguments: argparse.Namespace) -> int:
    sources = ImageSources(arguments.data, arguments.photographs, arguments.work.resolve())
    runnable = []
    for experiment in experiments:
        if arguments.names and experiment.name not in arguments.names:
            continue
        if getattr(sources, experiment.required_source):
            runnable.append(experiment)
        else:
            print(f"{experiment.name}: left out; it needs --{experiment.required_source}")
    runs = {experiment.name: planned_runs(experiment, sources, arguments.seeds) for experiment in runnable}
    all_runs = sorted((run for runs_of_one in runs.values() for run in runs_of_one), key=lambda run: run.seed)
    location = SweepLocation(arguments.results, sources.work)
    run_sweep(all_runs, location, arguments.jobs, lambda text: print(text, flush=True))
    rows = {
        experiment.name: collect_rows(experiment, runs[experiment.name], arguments.results) for experiment in runnable
    }
    show_results(runnable, rows, arguments.seeds >= MIN_SEEDS, runnable == list(experiments))
    return 0


def planned_runs(experiment: Experiment, sources: ImageSources, seeds: int) -> list[ExperimentRun]:
    """Return all runs of an experiment, ordered by seed."""
    images = {seed: experiment.images(sources, seed) for seed in range(seeds * experiment.seeds_factor)}
    return [ExperimentRun(arm, seed, images[seed]) for seed in images for arm in experiment.arms]


def collect_rows(experiment: Experiment, runs: Sequence[ExperimentRun], results: Path) -> RowsByArm:
    """Return the rows that exist, by arm."""
    rows_by_arm: dict[str, list[Any]] = {arm.name: [] for arm in experiment.arms}
    for run in runs:
        row = read_row(run, results)
        if row is not None:
            rows_by_arm[run.arm.name].append(row)
    return rows_by_arm


def show_results(
    experiments: Sequence[Experiment], rows: dict[str, RowsByArm], has_enough_seeds: bool, is_complete: bool
) -> None:
    """Print the section of each experiment.

    With enough seeds its picture is drawn too and, when all experiments are complete, RESULTS.md is written.
    """
    for experiment in experiments:
        print("", *table.section(experiment, rows[experiment.name]), sep="\n")
        if has_enough_seeds:
            plots.draw_experiment(HERE / "pictures" / f"{experiment.name}.png", experiment, rows[experiment.name])
    if has_enough_seeds and is_complete:
        (HERE / "RESULTS.md").write_text(table.render_results_page(experiments, rows))
