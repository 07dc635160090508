"""The command line of all experiments: make what is missing, then show what is seen."""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import core_count
from experiments.harness import plots, table
from experiments.harness.claims import Experiment, ImageSources
from experiments.harness.confidence import RowsByArm
from experiments.harness.images import ImageSourceError
from experiments.harness.runs import ExperimentRun, read_row
from experiments.harness.sweep import RunFailed, SweepLocation, missing_runs, run_sweep
from train.tools.filesystem import one_line_error

HERE = Path(__file__).resolve().parents[1]
MIN_SEEDS = 5  # fewer are a trial: neither RESULTS.md nor a picture is written
OPTION_BY_SOURCE = {"data": "--data DIR", "photographs": "--photographs DIR|TAR"}


def main(experiments: Sequence[Experiment], argv: Sequence[str] | None = None) -> int:
    """Run experiments to their end and print their tables; of several write RESULTS.md too.

    Returns 0, 1 with one line on stderr when a run failed, 130 when it was interrupted.
    """
    asked = parse(experiments, argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _run_all(experiments, asked)
    except KeyboardInterrupt:
        print("interrupted; called again it goes on", file=sys.stderr)
        return 130
    except BlockingIOError:
        print(f"error: another sweep works in {asked.work}; wait for it, or say --work DIR", file=sys.stderr)
    except (RunFailed, ImageSourceError, OSError) as error:
        print(f"error: {one_line_error(error)}", file=sys.stderr)
    return 1


def parse(experiments: Sequence[Experiment], argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; ends the program with code 2 when it is wrong."""
    title = experiments[0].title if len(experiments) == 1 else "All experiments, and RESULTS.md."
    parser = argparse.ArgumentParser(description=title)
    needs = {one.required_source for one in experiments}
    parser.set_defaults(data=None, photographs=None)
    if "data" in needs:
        parser.add_argument("--data", type=Path, help="CIFAR-10 as JPEG files: a folder with train/ and val/, or a tar")
    if "photographs" in needs:
        parser.add_argument("--photographs", type=Path, help="photographs of any names: a folder, or a tar")
    parser.add_argument("--seeds", type=int, default=MIN_SEEDS, help=f"runs of each arm (default: {MIN_SEEDS})")
    parser.add_argument(
        "--jobs", type=int, default=core_count(), help="runs at a time, of one thread each (default: cores)"
    )
    parser.add_argument("--work", type=Path, default=HERE.parent / "runs" / "experiments", help="for what is under way")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="the rows (default: results/ here)")
    parser.add_argument("--list", action="store_true", help="say which runs are missing, and make none")
    asked = parser.parse_args(argv)
    if asked.seeds < 1 or asked.jobs < 1:
        parser.error("--seeds and --jobs must be at least 1")
    if not any(getattr(asked, need) for need in needs):
        parser.error("say " + " or ".join(OPTION_BY_SOURCE[need] for need in sorted(needs)))
    return asked


def _run_all(experiments: Sequence[Experiment], arguments: argparse.Namespace) -> int:
    sources = ImageSources(arguments.data, arguments.photographs, arguments.work.resolve())
    able = [one for one in experiments if getattr(sources, one.required_source)]
    for one in experiments:
        if one not in able:
            print(f"{one.name}: left out; it needs {OPTION_BY_SOURCE[one.required_source]}")
    runs = {one.name: planned_runs(one, sources, arguments.seeds) for one in able}
    order = sorted((run for mine in runs.values() for run in mine), key=lambda run: run.seed)
    if arguments.list:
        print(*(f"{run.key} {run.name}" for run in missing_runs(order, arguments.results)), sep="\n")
        return 0
    run_sweep(
        order, SweepLocation(arguments.results, sources.work), arguments.jobs, lambda text: print(text, flush=True)
    )
    rows = {one.name: collect_rows(one, runs[one.name], arguments.results) for one in able}
    show_results(able, rows, arguments.seeds >= MIN_SEEDS, is_complete=able == list(experiments) and len(able) > 1)
    return 0


def planned_runs(experiment: Experiment, sources: ImageSources, seeds: int) -> list[ExperimentRun]:
    """Return all runs of an experiment, seed by seed."""
    images = {seed: experiment.images(sources, seed) for seed in range(seeds * experiment.seeds_factor)}
    return [ExperimentRun(arm, seed, images[seed]) for seed in images for arm in experiment.arms]


def collect_rows(experiment: Experiment, runs: Sequence[ExperimentRun], results: Path) -> RowsByArm:
    """Return the rows that are there, by arm."""
    found: dict[str, list[Any]] = {arm.name: [] for arm in experiment.arms}
    for run in runs:
        row = read_row(run, results)
        if row is not None:
            found[run.arm.name].append(row)
    return found


def show_results(
    experiments: Sequence[Experiment], rows: dict[str, RowsByArm], has_enough_seeds: bool, is_complete: bool
) -> None:
    """Print each experiment's part; with enough seeds draw its picture, and of all of them write RESULTS.md."""
    for one in experiments:
        print("", *table.section(one, rows[one.name]), sep="\n")
        if has_enough_seeds:
            plots.draw_experiment(HERE / "pictures" / f"{one.name}.png", one, rows[one.name])
    if has_enough_seeds and is_complete:
        (HERE / "RESULTS.md").write_text(table.render_results_page(experiments, rows))
