"""Writes docs/forecast.md: the forecast beside published runs, and the 18-minute runs of 2018 with our trainer.

python docs/tools/forecast_page.py docs/forecast.md
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from page_output import write_page
from published_runs import MAX_ERROR, PublishedRun, phases_until, published_runs

from train.forecast.constants import DEFAULT_CONSTANTS, IMAGENET18_CONSTANTS, Constants
from train.forecast.model import Forecast, forecast
from train.recipe.components import IMAGENET, Comm
from train.recipe.files import read_recipes
from train.recipe.schedule import Schedule
from train.recipe.schema import Phase, Recipe

REPOSITORY_ROOT = Path(__file__).resolve().parents[2]
RECIPE_PATH = REPOSITORY_ROOT / "recipes" / "resnet50_18min.py"
# Predicted runs, by system and name, whose error is known to be above `MAX_ERROR`, and their error.
KNOWN_MISSES: Mapping[tuple[str, str], float] = {}

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
COMPARISON_SECTION = """
## The 18-minute schedules with our trainer

Minutes of training with the schedules of 2018, on the same V100s (835 images of 224 pixels per second, although plain
PyTorch reaches about 1000 by now) with 25 Gbit/s. The columns "ours" are forecasts from presets. They were not measured
on such machines.
"""
COMPARISON_NOTES = """
- **all-reduce**: our trainer sends the gradients during the backward pass, so only the part that the backward pass
  cannot hide takes time. They are float32, whatever the layers compute in, and thus twice as many bytes as in 2018.
  With `comm="fp16"` the term would be {half_precision:.1f} minutes on 16 machines.
- **logging**: in 2018, rank 0 wrote to the shared file system after every fifth step, and all ranks waited for it: 33
  ms per step. Our trainer sums up once per second and writes to its own disk.
- **fixed**: in 2018, the loader's processes were started anew for each epoch, and at each new image size or batch the
  trainer tuned its kernels and read files that were not in the page cache. Our loader lives for the whole run and reads
  the next epoch's batches ahead, and all shapes are warmed up before the first step.
- **validation**: our trainer also validates the square crops beside the rectangles, which takes more passes in the last
  epochs. In 2018, validation waited for the loader.
- **start**: assumed for our trainer; for 2018, the pause before the first step.
"""
TERM_ORDER = ("compute", "all-reduce", "optimizer", "logging", "loader", "validation", "fixed", "start")


def phases_by_machines() -> dict[int, Sequence[Phase]]:
    """Return the phases of recipes/resnet50_18min.py by number of machines."""
    return dict(load_18min_recipe().tables)


def load_18min_recipe() -> Recipe:
    """Return the recipe of recipes/resnet50_18min.py, read as a file: this code must not import recipes."""
    (recipe,) = read_recipes(str(RECIPE_PATH))
    return recipe


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
        forecast_minutes = format_minutes(run.forecast.training_seconds / 60)
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


def forecast_on_v100(machines: int, epochs: int, constants: Constants, hook: str = "none") -> Forecast:
    """Return the forecast of the 18-minute schedule on p3.16xlarge, with a trainer's constants and a comm hook.

    Boot, set-up and fetching are left out, and the speed of the card is the one measured in 2018. Raises `ValueError`.
    """
    recipe = replace(load_18min_recipe(), comm=Comm(hook=hook))
    phases = phases_until(recipe.tables[machines], epochs)
    schedule = Schedule(replace(recipe, tables={}, phases=phases), IMAGENET.train, 8 * machines)
    trainer_constants = replace(
        constants,
        images_per_second=IMAGENET18_CONSTANTS.images_per_second,
        boot_seconds=0.0,
        setup_seconds=0.0,
        fetch_bytes_per_second=0.0,
    )
    result = forecast(schedule, gpus=8, gpu="V100", gbit=25.0, machines=machines, vcpus=64, constants=trainer_constants)
    if result is None:
        raise ValueError("no forecast for V100")
    return result


def comparison_table() -> Iterator[str]:
    """Yield the lines of the table that compares both trainers term by term, and of the notes below it."""
    cases = [(1, 28), (4, 30), (8, 30), (16, 38)]  # machines, epochs
    forecasts = []
    for machines, epochs in cases:
        forecasts.append(forecast_on_v100(machines, epochs, IMAGENET18_CONSTANTS))
        forecasts.append(forecast_on_v100(machines, epochs, DEFAULT_CONSTANTS))
    headings = [f"{machines} x p3.16xlarge, {epochs} epochs: 2018 | ours" for machines, epochs in cases]
    yield f"| | {' | '.join(headings)} |"
    yield "|---" * (1 + len(forecasts)) + "|"
    for term in TERM_ORDER:
        cells = [f"{result.term_seconds[term] / 60:.2f}" for result in forecasts]
        yield f"| {term} | {' | '.join(cells)} |"
    totals = [f"**{result.training_seconds / 60:.1f}**" for result in forecasts]
    yield f"| all | {' | '.join(totals)} |"
    half_precision = forecast_on_v100(16, 38, DEFAULT_CONSTANTS, "fp16").term_seconds["all-reduce"] / 60
    yield COMPARISON_NOTES.format(half_precision=half_precision).rstrip()


def render_page() -> str:
    """Return the whole page."""
    table = published_table(published_runs(phases_by_machines()))
    return "\n".join([PAGE_HEAD, *table, COMPARISON_SECTION, *comparison_table(), ""])


if __name__ == "__main__":
    write_page(render_page())
