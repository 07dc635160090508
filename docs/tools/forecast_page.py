"""docs/forecast.md: what the forecast says of published runs, and of the 18 minutes with our loop."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from published_runs import MAX_ERROR, PublishedRun, phases_until, published_runs

from train.forecast.constants import DEFAULT_CONSTANTS, IMAGENET18_CONSTANTS, Constants
from train.forecast.model import Forecast, forecast
from train.metrics.text import write_page
from train.recipe.components import IMAGENET, Comm
from train.recipe.files import read_recipes
from train.recipe.schedule import Schedule
from train.recipe.schema import Phase, Recipe

REPOSITORY_ROOT = Path(__file__).resolve().parents[2]
RECIPE_PATH = REPOSITORY_ROOT / "recipes" / "resnet50_18min.py"
KNOWN_MISSES: Mapping[tuple[str, str], float] = {}  # runs that are known to be beyond the bound, with their error

PAGE_HEAD = """\
# The forecast

`imgnet-cluster plan RECIPE --machines 1,2,4,8 --type p4d.24xlarge` says beforehand what a machine more is worth. How it
reckons stands in `train/forecast`; each preset has its source beside it in the code. This page is written by
`python docs/tools/forecast_page.py docs/forecast.md`, and a test holds it to the code.

## Published runs

The constants of a system come from the run that is named; those rows are marked *fitted* and prove nothing. All others
are predicted. What is forecast is the time that was published: without boot and set-up.
"""
LOOPS_SECTION = """
## The 18 minutes with our loop

The same schedules on the same V100s (835 images of 224 pixels a second, though plain PyTorch does about 1000 by now)
and 25 Gbit/s. Minutes of training; ours are presets, not measured on such machines.
"""
LOOPS_EXPLANATION = """
- **all-reduce**: the gradients travel during the backward pass, so only what it cannot hide is seen, though ours are of
  four bytes and twice as many: float32, whatever the layers compute in. With `comm="fp16"` it would be {half:.1f}
  minutes on 16 machines.
- **logging**: 2018's first process wrote to the shared file system after every fifth step, and all waited: 33 ms a
  step. Ours sums up once a second and writes to its own disk.
- **fixed**: 2018 forked its loaders anew for each epoch, and tuned and read cold files at each switch of size or batch.
  Ours lives through the run, with the next epoch's batches in flight; shapes are warmed before the first step.
- **validation**: ours makes the square crops beside the rectangles, hence more passes at the end; it is the loader that
  2018 waited for.
- **start**: assumed; of 2018 the first epoch's standstill.
"""
TERM_ORDER = ("compute", "all-reduce", "optimizer", "logging", "loader", "validation", "fixed", "start")


def phases_by_machines() -> dict[int, Sequence[Phase]]:
    """Return the phases of recipes/resnet50_18min.py by number of machines."""
    return dict(load_18min_recipe().tables)


def load_18min_recipe() -> Recipe:
    """Return recipes/resnet50_18min.py, which nobody here may import."""
    (found,) = read_recipes(str(RECIPE_PATH))
    return found


def format_signed_percent(share: float) -> str:
    """Return a share as percent with its sign, such as "+2.7 %"."""
    return f"{100 * share:+.1f} %"


def published_table(all_runs: Sequence[PublishedRun]) -> Iterator[str]:
    """Yield the table of all runs, and the notes on some."""
    yield "| system | run | published, min | forecast, min | error | constants from | source |"
    yield "|---|---|---|---|---|---|---|"
    notes: list[str] = []
    for one in all_runs:
        mark = ""
        if one.note:
            notes.append(f"{len(notes) + 1}. {one.system}, {one.name}: {one.note}")
            mark = f" ({len(notes)})"
        error = (
            "*fitted*"
            if one.is_fitted
            else f"**{format_signed_percent(one.error)}**"
            if abs(one.error) > MAX_ERROR
            else format_signed_percent(one.error)
        )
        minutes = one.forecast.training_seconds / 60
        yield (
            f"| {one.system} | {one.name}{mark} | {format_minutes(one.minutes)} | {format_minutes(minutes)} | {error} | {one.constants_from} "
            f"| {one.source} |"
        )
    yield ""
    yield from notes
    yield ""
    predicted = [one for one in all_runs if not one.is_fitted]
    beyond = [one for one in predicted if abs(one.error) > MAX_ERROR]
    worst = max(predicted, key=lambda one: abs(one.error))
    count = f"{len(predicted) - len(beyond)} of {len(predicted)} predicted runs are within {100 * MAX_ERROR:.0f} %"
    yield f"{count}; the worst is {worst.system}, {worst.name}: {format_signed_percent(worst.error)}."


def format_minutes(value: float) -> str:
    """Return minutes with as many digits as they were published with."""
    return f"{value:.3f}" if value < 10 else f"{value:.2f}"


def forecast_on_v100(machines: int, epochs: int, constants: Constants, hook: str = "none") -> Forecast:
    """Return the 18 minutes' schedule on p3.16xlarge, as 2018's trainer or ours would take it with a hook."""
    recipe = replace(load_18min_recipe(), comm=Comm(hook=hook))
    phases = phases_until(recipe.tables[machines], epochs)
    schedule = Schedule(replace(recipe, tables={}, phases=phases), IMAGENET.train, 8 * machines)
    own = replace(
        constants,
        images_per_second=IMAGENET18_CONSTANTS.images_per_second,
        boot_seconds=0.0,
        setup_seconds=0.0,
        fetch_bytes_per_second=0.0,
    )
    found = forecast(schedule, gpus=8, gpu="V100", gbit=25.0, machines=machines, vcpus=64, constants=own)
    if found is None:
        raise ValueError("no forecast for V100")
    return found


def loops_table() -> Iterator[str]:
    """Yield the two loops side by side, term by term, and why."""
    cases = [(1, 28), (4, 30), (8, 30), (16, 38)]
    pairs = [
        (forecast_on_v100(*case, IMAGENET18_CONSTANTS), forecast_on_v100(*case, DEFAULT_CONSTANTS)) for case in cases
    ]
    yield "| | " + " | ".join(f"{m} x p3.16xlarge, {e} epochs: 2018 | ours" for m, e in cases) + " |"
    yield "|---" * (1 + 2 * len(cases)) + "|"
    for name in TERM_ORDER:
        cells = [f"{one.term_seconds[name] / 60:.2f}" for pair in pairs for one in pair]
        yield f"| {name} | {' | '.join(cells)} |"
    totals = [f"**{one.training_seconds / 60:.1f}**" for pair in pairs for one in pair]
    yield f"| all | {' | '.join(totals)} |"
    half = forecast_on_v100(16, 38, DEFAULT_CONSTANTS, "fp16").term_seconds["all-reduce"] / 60
    yield LOOPS_EXPLANATION.format(half=half).rstrip()


def render_page() -> str:
    """Return the whole page."""
    return "\n".join(
        [PAGE_HEAD, *published_table(published_runs(phases_by_machines())), LOOPS_SECTION, *loops_table(), ""]
    )


if __name__ == "__main__":
    write_page(render_page())
