"""Writes RESULTS.md: a table and the sentences of each experiment, all computed from the rows."""

import statistics
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from experiments.harness import confidence
from experiments.harness.claims import Experiment
from experiments.harness.confidence import ResultRows, RowsByArm, accuracies

HEAD = """\
# Results of the experiments

`python experiments/run.py` writes this page from the rows in results/; nothing in it is typed by hand. A row is one
run. The name of its file is the hash of its whole configuration, which is in the file.

Accuracies are top-1 in percent after the last epoch, as mean ± standard deviation over seeds. A difference is that of
two means, with Welch's 95 % confidence interval in parentheses; one of twenty such intervals is wrong by chance.
"Seen" means that the whole interval is on the claimed side, "within 1 point" that the whole interval is above -1.
Claims and margins were fixed before the runs. Batches, epochs and learning rates were chosen on another seed, at a
scale where the linear rule can hold; goyal.py says what was tried before.
"""


def render_results_page(experiments: Sequence[Experiment], rows: Mapping[str, RowsByArm]) -> str:
    """Return RESULTS.md. `rows` has the rows of each experiment by its name and the name of the arm."""
    all_rows = [row for arms in rows.values() for arm_rows in arms.values() for row in arm_rows]
    different_rows = list({str(row["config"]): row for row in all_rows}.values())  # experiments share runs
    lines = [HEAD, *provenance(different_rows), ""]
    for experiment in experiments:
        if any(rows[experiment.name].values()):
            lines += [*section(experiment, rows[experiment.name]), ""]
    return "\n".join(lines).rstrip() + "\n"


def provenance(rows: ResultRows) -> Iterator[str]:
    """Yield one paragraph: how many runs, when, where, how long."""
    if not rows:
        yield "No runs yet."
        return
    dates = sorted({row["made"]["date"] for row in rows})
    machines = sorted({row["made"]["machine"] for row in rows})
    commits = sorted({str(row["made"]["commit"])[:12] for row in rows})
    hours = sum(row["seconds"] for row in rows) / 3600
    period = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    yield f"{len(rows)} different runs, {period}, {hours:.1f} hours of one thread in total. Made on"
    yield "; ".join(machines) + "."
    yield f"Commits: {', '.join(commits)}."


def section(experiment: Experiment, rows: RowsByArm) -> Iterator[str]:
    """Yield an experiment's section: what is held equal, the picture, the table, and the outcome of its claims."""
    yield f"## {experiment.title}"
    yield f"\n{textwrap.fill(experiment.description, 120, break_on_hyphens=False)}\n"
    yield f"![{experiment.title}](pictures/{experiment.name}.png)\n"
    yield from experiment_table(experiment, rows)
    yield ""
    yield from (f"- {confidence.claim_sentence(claim, rows)}" for claim in experiment.claims)


def experiment_table(experiment: Experiment, rows: RowsByArm) -> Iterator[str]:
    """Yield the lines of the markdown table, one for each arm. Differences are to the first arm.

    Seconds have a column only where a claim is about them: those runs were made with nothing else running.
    """
    has_square_top1 = any(row["top1_square"] != row["top1"] for arm_rows in rows.values() for row in arm_rows)
    has_timing = any(claim.cheaper for claim in experiment.claims)
    columns = [
        "n",
        "top-1 %",
        "min to max",
        *(["top-1 %, squares"] if has_square_top1 else []),
        "difference to the first",
        "steps",
        "work",
        *(["seconds"] if has_timing else []),
    ]
    yield f"| | {' | '.join(columns)} |"
    yield "|---|" + "---:|" * len(columns)
    reference_rows = rows.get(experiment.arms[0].name, [])
    for arm in experiment.arms:
        arm_rows = rows.get(arm.name, [])
        if arm_rows:
            cells = _cells(arm_rows, reference_rows, has_square_top1, has_timing)
            yield f"| {arm.name} | " + " | ".join(cells) + " |"
        else:
            yield f"| {arm.name} | 0 |" + " |" * (len(columns) - 1)


def _cells(arm_rows: ResultRows, reference_rows: ResultRows, has_square_top1: bool, has_timing: bool) -> Iterator[str]:
    values = accuracies(arm_rows)
    finished_rows = [row for row in arm_rows if row["diverged"] is None]
    diverged_count = len(arm_rows) - len(finished_rows)
    yield f"{len(arm_rows)}" + (f", {diverged_count} diverged" if diverged_count else "")
    yield confidence.mean_with_deviation(values)
    yield f"{min(values):.2f} to {max(values):.2f}"
    if has_square_top1:
        yield confidence.mean_with_deviation(accuracies(arm_rows, "top1_square"))
    interval = None
    if reference_rows and arm_rows is not reference_rows:
        interval = confidence.welch_interval(values, accuracies(reference_rows))
    yield f"{interval.difference:+.2f} ({interval.low:+.2f} to {interval.high:+.2f})" if interval else ""
    if not finished_rows:
        yield from [""] * (2 + has_timing)
        return
    yield f"{finished_rows[0]['steps']}"
    yield f"{statistics.mean(row['megapixels'] for row in finished_rows):.0f} MP"
    if has_timing:
        yield confidence.mean_with_deviation([row["train_seconds"] for row in finished_rows], 0)
