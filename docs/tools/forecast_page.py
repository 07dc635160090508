"""Writes docs/forecast.md: the forecast beside published runs.

python docs/tools/forecast_page.py docs/forecast.md
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from page_output import write_page
from published_runs import MAX_ERROR, PublishedRun, published_runs

from train.recipe.recipe_files import read_recipes

REPOSITORY_ROOT = Path(__file__).resolve().parents[2]
RECIPE_PATH = REPOSITORY_ROOT / "recipes" / "resnet50_18min.py"

PAGE_HEAD = """\
# The forecast

`imgnet-cluster plan RECIPE --machines 1,2,4,8 --type p4d.24xlarge` forecasts the training time on each number of
machines, before any of them is rented. The formulas are in `train/forecast`; each preset there names its source. This
page is written by `python docs/tools/forecast_page.py docs/forecast.md`, and a test checks that it agrees with the
code.

## Published runs

For each system, the constants of the forecast come from the runs named in the column "constants from". Rows of such
runs are marked *fitted* and prove nothing. All other rows are predictions. The forecast covers the time that was
published: training without boot and set-up.
"""


def format_signed_percent(fraction: float) -> str:
    """Return a fraction as percent with its sign, such as "+2.7 %"."""
    return f"{100 * fraction:+.1f} %"


def published_table(runs: Sequence[PublishedRun]) -> Iterator[str]:
    """Yield the lines of the table of published runs, of the notes below it, and of the summary."""
    yield "| system | run | published, min | forecast, min | error | constants from | source |"
    yield "|---|---|---|---|---|---|---|"
    notes: list[str] = []
    for run in runs:
        note_mark = ""
        if run.note:
            notes.append(f"{len(notes) + 1}. {run.system}, {run.name}: {run.note}")
            note_mark = f" ({len(notes)})"
        error = format_signed_percent(run.error)
        if run.is_fitted:
            error = "*fitted*"
        elif abs(run.error) > MAX_ERROR:
            error = f"**{error}**"
        published_minutes = format_minutes(run.minutes)
        forecast_minutes = format_minutes(run.forecast_minutes)
        yield (
            f"| {run.system} | {run.name}{note_mark} | {published_minutes} | {forecast_minutes} | {error} "
            f"| {run.constants_from} | {run.source} |"
        )
    yield ""
    yield from notes
    yield ""
    predicted = [run for run in runs if not run.is_fitted]
    within_bound = [run for run in predicted if abs(run.error) <= MAX_ERROR]
    worst = max(predicted, key=lambda run: abs(run.error))
    yield (
        f"{len(within_bound)} of {len(predicted)} predicted runs are within {100 * MAX_ERROR:.0f} %. The largest error "
        f"is that of {worst.system}, {worst.name}: {format_signed_percent(worst.error)}."
    )


def format_minutes(minutes: float) -> str:
    """Return minutes with as many digits as they were published with."""
    return f"{minutes:.3f}" if minutes < 10 else f"{minutes:.2f}"


def render_page() -> str:
    """Return the whole page."""
    (recipe,) = read_recipes(str(RECIPE_PATH))  # as a file: this code must not import recipes
    table = published_table(published_runs(dict(recipe.tables)))
    return "\n".join([PAGE_HEAD, *table, ""])


if __name__ == "__main__":
    write_page(render_page())
