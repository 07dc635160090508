"""RESULTS.md: a table and the sentences of each experiment, all of it computed from the rows."""

import statistics
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from experiments.harness import confidence
from experiments.harness.claims import Experiment
from experiments.harness.confidence import RowsByArm, accuracies

HEAD = """\
# What the experiments show

Written by `python experiments/run.py` from the rows in results/; nothing here is typed. One row is one run: its file's
name is the hash of its whole configuration, which stands in it.

Accuracies are top-1 in percent after the last epoch, as mean ± standard deviation over seeds. Differences are those of
two means with Welch's 95 % interval in brackets: of twenty such intervals one is wrong by chance. "Seen" means that all
of the interval is on the claimed side, "within 1 point" that all of it is above -1. Claims and margins were
fixed before the runs; batches, epochs and rates were chosen on another seed, at a scale where the linear rule can hold
(goyal.py says what was tried before).
"""


def render_results_page(experiments: Sequence[Experiment], rows: Mapping[str, RowsByArm]) -> str:
    """Return RESULTS.md from the rows of each experiment by name and arm."""
    unique = {str(row["config"]): row for arms in rows.values() for mine in arms.values() for row in mine}
    lines = [HEAD, *provenance(list(unique.values())), ""]
    for one in experiments:
        if any(rows[one.name].values()):
            lines += [*section(one, rows[one.name]), ""]
    return "\n".join(lines).rstrip() + "\n"


def provenance(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield one paragraph: how many runs, when, where, how long."""
    if not rows:
        yield "No runs yet."
        return
    dates = sorted({row["made"]["date"] for row in rows})
    seconds = sum(row["seconds"] for row in rows)
    commits = sorted({str(row["made"]["commit"])[:12] for row in rows})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    yield f"{len(rows)} different runs, {when}, {seconds / 3600:.1f} hours of one thread in all. Made on"
    yield from _joined_machines(row["made"]["machine"] for row in rows)
    yield f"Commits: {', '.join(commits)}."


def _joined_machines(machines: Iterable[str]) -> Iterator[str]:
    found = sorted(set(machines))
    yield "; ".join(found) + "."


def section(experiment: Experiment, rows: RowsByArm) -> Iterator[str]:
    """Yield an experiment's part: what is held equal, the picture, the table, and what is seen."""
    yield f"## {experiment.title}"
    yield f"\n{textwrap.fill(experiment.description, 120, break_on_hyphens=False)}\n"
    yield f"![{experiment.title}](pictures/{experiment.name}.png)\n"
    yield from experiment_table(experiment, rows)
    yield ""
    yield from (f"- {confidence.claim_sentence(claim, rows)}" for claim in experiment.claims)


def experiment_table(experiment: Experiment, rows: RowsByArm) -> Iterator[str]:
    """Yield the rows of the markdown table, one for each arm; the difference is to the first arm. Seconds are told
    where something is claimed of them: those runs were made with nothing else at work.
    """
    two = any(row["top1_square"] != row["top1"] for mine in rows.values() for row in mine)
    timed = any(claim.cheaper for claim in experiment.claims)
    names = ["n", "top-1 %", "least to most", *["top-1 %, squares"] * two, "to the first", "steps", "work"]
    names += ["seconds"] * timed
    yield f"| | {' | '.join(names)} |"
    yield "|---|" + "---:|" * len(names)
    first = rows.get(experiment.arms[0].name, [])
    for arm in experiment.arms:
        mine = rows.get(arm.name, [])
        if mine:
            yield f"| {arm.name} | " + " | ".join(_cells(mine, first, two, timed)) + " |"
        else:
            yield f"| {arm.name} | 0 |" + " |" * (len(names) - 1)


def _cells(
    arm_rows: Sequence[Any], reference_rows: Sequence[Any], has_square_top1: bool, has_timing: bool
) -> Iterator[str]:
    found, whole = accuracies(arm_rows), [row for row in arm_rows if row["diverged"] is None]
    yield f"{len(arm_rows)}" + f", {len(arm_rows) - len(whole)} diverged" * (len(whole) < len(arm_rows))
    yield confidence.mean_with_deviation(found)
    yield f"{min(found):.2f} to {max(found):.2f}"
    if has_square_top1:
        yield confidence.mean_with_deviation(accuracies(arm_rows, "top1_square"))
    interval = (
        confidence.welch_interval(found, accuracies(reference_rows))
        if arm_rows is not reference_rows and reference_rows
        else None
    )
    yield f"{interval.difference:+.2f} ({interval.low:+.2f} to {interval.high:+.2f})" if interval else ""
    if not whole:
        yield from [""] * (2 + has_timing)
        return
    yield f"{whole[0]['steps']}"
    yield f"{statistics.mean(row['megapixels'] for row in whole):.0f} MP"
    if has_timing:
        yield confidence.mean_with_deviation([row["train_seconds"] for row in whole], 0)
