"""docs/recipes-beside-papers.md: every schedule as its source has it, and as our recipe has it; and the forecast of our own.

python docs/tools/recipes_page.py docs/recipes-beside-papers.md
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

from paper_schedules import CLAIMS, Claim, Line

from train.forecast import Forecast, forecast
from train.metrics.text import put, settings
from train.recipe.components import IMAGENET
from train.recipe.files import load, select
from train.recipe.schedule import Row, Schedule
from train.recipe.schema import Recipe

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
TYPES = {"p4d.24xlarge": ("A100", 400.0, 96), "p5.48xlarge": ("H100", 3200.0, 192)}  # GPU, Gbit/s, vCPUs

HEAD = """\
# The recipes beside their sources

What a paper, a record or its code says, and what our recipe does. Left of the "=" is typed from the source
(`docs/tools/paper_schedules.py`), right of it is what `imgnet-cluster plan` computes from the recipe; a number that differed
would stand in bold, and a test would fail. Rates are those of a row's first and last step. This page is written by
`python docs/tools/recipes_page.py docs/recipes-beside-papers.md`, and a test holds it to the code.

What the sources measured, and what is not certain of them, stands in each recipe's file. No run of ours on ImageNet
stands behind any of them yet. Beside the rows stands how our recipe trains otherwise.
"""
FORECAST = """
## resnet50_2026

It follows no paper to the digit; whose choice each of its numbers is stands in
[recipes/resnet50_2026.py](../recipes/resnet50_2026.py). Its forecast, by the presets of [forecast.md](forecast.md), of
machines that none of us has rented yet: minutes of training, from the trainers' start to the last validation, and
minutes with boot, set-up and fetching the images.
`plan --type p4d.24xlarge,p5.48xlarge` adds the dollars.

| recipe | machines | images a step | steps | p4d: training | all | most of it | p5: training | all | most of it |
|---|---|---|---|---|---|---|---|---|---|
"""
FOOT = """
## Without a paper

[finetune](../recipes/finetune.py), [sweeps](../recipes/sweeps.py), [quickstart](../recipes/quickstart.py) and
[cifar10](../recipes/cifar10.py) are ours alone.
"""


@cache
def recipes(file: str) -> tuple[Recipe, ...]:
    """Return the recipes of a file in recipes/, which nobody here may import."""
    return tuple(load(str(RECIPES / f"{file}.py")))


def planned(claim: Claim) -> Schedule:
    """Return our schedule on the claim's machines."""
    (recipe,) = select(recipes(claim.file), [claim.name])
    one = recipe.at(claim.machines)
    return Schedule(one, IMAGENET.train, one.nominal_gpus)


def line(row: Row) -> Line:
    """Return a row of ours as a source would write it."""
    return Line(row.phase.epochs, row.phase.size, row.global_batch, row.lr)


def digits(value: float) -> str:
    """Return a number to twelve digits, which is more than any source has."""
    return f"{value:.12g}"


def cells(one: Line) -> tuple[str, ...]:
    """Return what is compared: epochs, pixels, images a step, rates."""
    first, last = map(digits, one.rates)
    rates = first if first == last else f"{first} to {last}"
    return f"{one.epochs[0]}-{one.epochs[1]}", str(one.size), f"{one.batch:,}", rates


def beside(theirs: str, ours: str) -> str:
    """Return both numbers, in bold where they differ."""
    return f"{theirs} = {ours}" if theirs == ours else f"**{theirs}, ours {ours}**"


def table(claim: Claim) -> Iterator[str]:
    """Yield a claim as a section of the page."""
    schedule = planned(claim)
    machines = f", {claim.machines} machine{'s' * (claim.machines > 1)} of 8 GPUs"
    yield f"\n### {claim.name}{machines}\n\n{claim.source}. Ours: {settings(schedule.recipe)}.\n"
    yield "| epochs | pixels | images a step | rate | our steps |\n|---|---|---|---|---|"
    for theirs, row in zip(claim.lines, schedule.rows, strict=True):
        both = zip(cells(theirs), cells(line(row)), strict=True)
        yield f"| {' | '.join(beside(*one) for one in both)} | {row.steps:,} |"
    yield f"\nEpochs {beside(str(claim.lines[-1].epochs[1]), str(schedule.recipe.epochs))}. {steps(claim, schedule)}"
    if claim.note:
        yield claim.note


def steps(claim: Claim, schedule: Schedule) -> str:
    """Return a sentence on the steps of both."""
    if claim.steps == schedule.steps:
        return f"Steps {claim.steps:,} = {schedule.steps:,}."
    more = schedule.steps - claim.steps
    why = claim.why.format(theirs=claim.steps / schedule.recipe.epochs, ours=schedule.rows[0].steps_per_epoch)
    return f"Steps {claim.steps:,}, ours {schedule.steps:,}, {more:,} more. {why}."


def forecasts(recipe: Recipe, machines: int) -> Iterator[tuple[Schedule, Forecast]]:
    """Yield the schedule and its forecast on each of `TYPES`, with eight GPUs each."""
    one = recipe.at(machines)
    schedule = Schedule(one, IMAGENET.train, 8 * machines)
    for gpu, gbit, vcpus in TYPES.values():
        found = forecast(schedule, gpus=8, gpu=gpu, gbit=gbit, machines=machines, vcpus=vcpus)
        if found is None:
            raise ValueError(f"no forecast for {recipe.model.name} on {gpu}")
        yield schedule, found


def our_own() -> Iterator[str]:
    """Yield the rows of the forecast of resnet50_2026."""
    for recipe in recipes("resnet50_2026"):
        for machines in recipe.tables or (recipe.machines,):
            both = list(forecasts(recipe, machines))
            schedule = both[0][0]
            batch = max(row.global_batch for row in schedule.rows)
            told = [f"{one.training / 60:.1f} | {one.minutes:.1f} | {one.most}" for _, one in both]
            yield f"| {recipe.name} | {machines} | {batch:,} | {schedule.steps:,} | {' | '.join(told)} |"


def text() -> str:
    """Return the whole page."""
    found, last = [HEAD], ""
    for claim in CLAIMS:
        if claim.file != last:
            found.append(f"\n## [{claim.file}](../recipes/{claim.file}.py)")
        found += table(claim)
        last = claim.file
    return "\n".join([*found, FORECAST + "\n".join(our_own()), FOOT]).replace("\n\n\n", "\n\n")


if __name__ == "__main__":
    put(text())
