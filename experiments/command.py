"""The command line of all experiments: make what is missing, then show what is seen."""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import cores
from train.tools.filesystem import one_line

from . import picture, table
from .arms import Experiment, Sources
from .evidence import Rows
from .images import Trouble
from .runs import Run, row_of
from .sweep import Failed, Place, missing, sweep

HERE = Path(__file__).resolve().parent
SEEDS = 5  # fewer are a trial: neither RESULTS.md nor a picture is written
NEEDS = {"data": "--data DIR", "photographs": "--photographs DIR|TAR"}


def main(experiments: Sequence[Experiment], argv: Sequence[str] | None = None) -> int:
    """Run experiments to their end and print their tables; of several write RESULTS.md too.

    Returns 0, 1 with one line on stderr when a run failed, 130 when it was interrupted.
    """
    asked = parse(experiments, argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _main(experiments, asked)
    except KeyboardInterrupt:
        print("interrupted; called again it goes on", file=sys.stderr)
        return 130
    except BlockingIOError:
        print(f"error: another sweep works in {asked.work}; wait for it, or say --work DIR", file=sys.stderr)
    except (Failed, Trouble, OSError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
    return 1


def parse(experiments: Sequence[Experiment], argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; ends the program with code 2 when it is wrong."""
    title = experiments[0].title if len(experiments) == 1 else "All experiments, and RESULTS.md."
    parser = argparse.ArgumentParser(description=title)
    needs = {one.needs for one in experiments}
    parser.set_defaults(data=None, photographs=None)
    if "data" in needs:
        parser.add_argument("--data", type=Path, help="CIFAR-10 as JPEG files: a folder with train/ and val/, or a tar")
    if "photographs" in needs:
        parser.add_argument("--photographs", type=Path, help="photographs of any names: a folder, or a tar")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"runs of each arm (default: {SEEDS})")
    parser.add_argument("--jobs", type=int, default=cores(), help="runs at a time, of one thread each (default: cores)")
    parser.add_argument("--work", type=Path, default=HERE.parent / "runs" / "experiments", help="for what is under way")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="the rows (default: results/ here)")
    parser.add_argument("--list", action="store_true", help="say which runs are missing, and make none")
    asked = parser.parse_args(argv)
    if asked.seeds < 1 or asked.jobs < 1:
        parser.error("--seeds and --jobs must be at least 1")
    if not any(getattr(asked, need) for need in needs):
        parser.error("say " + " or ".join(NEEDS[need] for need in sorted(needs)))
    return asked


def _main(experiments: Sequence[Experiment], asked: argparse.Namespace) -> int:
    sources = Sources(asked.data, asked.photographs, asked.work.resolve())
    able = [one for one in experiments if getattr(sources, one.needs)]
    for one in experiments:
        if one not in able:
            print(f"{one.name}: left out; it needs {NEEDS[one.needs]}")
    runs = {one.name: planned(one, sources, asked.seeds) for one in able}
    order = sorted((run for mine in runs.values() for run in mine), key=lambda run: run.seed)
    if asked.list:
        print(*(f"{run.key} {run.name}" for run in missing(order, asked.results)), sep="\n")
        return 0
    sweep(order, Place(asked.results, sources.work), asked.jobs, lambda text: print(text, flush=True))
    rows = {one.name: gathered(one, runs[one.name], asked.results) for one in able}
    show(able, rows, asked.seeds >= SEEDS, whole=able == list(experiments) and len(able) > 1)
    return 0


def planned(one: Experiment, sources: Sources, seeds: int) -> list[Run]:
    """Return all runs of an experiment, seed by seed."""
    images = {seed: one.images(sources, seed) for seed in range(seeds * one.repeats)}
    return [Run(arm, seed, images[seed]) for seed in images for arm in one.arms]


def gathered(one: Experiment, runs: Sequence[Run], results: Path) -> Rows:
    """Return the rows that are there, by arm."""
    found: dict[str, list[Any]] = {arm.name: [] for arm in one.arms}
    for run in runs:
        row = row_of(run, results)
        if row is not None:
            found[run.arm.name].append(row)
    return found


def show(experiments: Sequence[Experiment], rows: dict[str, Rows], enough: bool, whole: bool) -> None:
    """Print each experiment's part; with enough seeds draw its picture, and of all of them write RESULTS.md."""
    for one in experiments:
        print("", *table.section(one, rows[one.name]), sep="\n")
        if enough:
            picture.draw(HERE / "pictures" / f"{one.name}.png", one, rows[one.name])
    if enough and whole:
        (HERE / "RESULTS.md").write_text(table.page(experiments, rows))
