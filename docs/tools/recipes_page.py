"""docs/recipes-beside-papers.md: every schedule as its source has it, and as our recipe has it; and the forecast of our own.

python docs/tools/recipes_page.py docs/recipes-beside-papers.md
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

from paper_schedules import PAPER_SCHEDULES, PaperPhase, PaperSchedule

from train.forecast import Forecast, forecast
from train.metrics.text import describe_training, write_page
from train.recipe.components import IMAGENET
from train.recipe.files import read_recipes, select_recipes
from train.recipe.schedule import Schedule, ScheduledPhase
from train.recipe.schema import Recipe

RECIPE_FOLDER = Path(__file__).resolve().parents[2] / "recipes"
MACHINE_TYPES = {"p4d.24xlarge": ("A100", 400.0, 96), "p5.48xlarge": ("H100", 3200.0, 192)}  # GPU, Gbit/s, vCPUs

PAGE_HEAD = """\
# The recipes beside their sources

What a paper, a record or its code says, and what our recipe does. Left of the "=" is typed from the source
(`docs/tools/paper_schedules.py`), right of it is what `imgnet-cluster plan` computes from the recipe; a number that differed
would stand in bold, and a test would fail. Rates are those of a row's first and last step. This page is written by
`python docs/tools/recipes_page.py docs/recipes-beside-papers.md`, and a test holds it to the code.

What the sources measured, and what is not certain of them, stands in each recipe's file. No run of ours on ImageNet
stands behind any of them yet. Beside the rows stands how our recipe trains otherwise.
"""
FORECAST_SECTION = """
## resnet50_2026

It follows no paper to the digit; whose choice each of its numbers is stands in
[recipes/resnet50_2026.py](../recipes/resnet50_2026.py). Its forecast, by the presets of [forecast.md](forecast.md), of
machines that none of us has rented yet: minutes of training, from the trainers' start to the last validation, and
minutes with boot, set-up and fetching the images.
`plan --type p4d.24xlarge,p5.48xlarge` adds the dollars.

| recipe | machines | images a step | steps | p4d: training | all | most of it | p5: training | all | most of it |
|---|---|---|---|---|---|---|---|---|---|
"""
PAGE_FOOT = """
## Without a paper

[finetune](../recipes/finetune.py), [sweeps](../recipes/sweeps.py), [quickstart](../recipes/quickstart.py) and
[cifar10](../recipes/cifar10.py) are ours alone.
"""


@cache
def load_recipe_file(file: str) -> tuple[Recipe, ...]:
    """Return the recipes of a file in recipes/, which nobody here may import."""
    return tuple(read_recipes(str(RECIPE_FOLDER / f"{file}.py")))


def our_schedule(paper_schedule: PaperSchedule) -> Schedule:
    """Return our schedule on the claim's machines."""
    (recipe,) = select_recipes(load_recipe_file(paper_schedule.recipe_file), [paper_schedule.recipe_name])
    one = recipe.for_machines(paper_schedule.machines)
    return Schedule(one, IMAGENET.train, one.nominal_gpus)


def as_paper_phase(scheduled_phase: ScheduledPhase) -> PaperPhase:
    """Return a row of ours as a source would write it."""
    return PaperPhase(
        scheduled_phase.phase.epochs,
        scheduled_phase.phase.size,
        scheduled_phase.global_batch,
        scheduled_phase.scaled_lr_endpoints,
    )


def format_number(value: float) -> str:
    """Return a number to twelve digits, which is more than any source has."""
    return f"{value:.12g}"


def compared_cells(phase: PaperPhase) -> tuple[str, ...]:
    """Return what is compared: epochs, pixels, images a step, rates."""
    first, last = map(format_number, phase.lr_endpoints)
    rates = first if first == last else f"{first} to {last}"
    return f"{phase.epochs[0]}-{phase.epochs[1]}", str(phase.size), f"{phase.batch:,}", rates


def format_comparison(theirs: str, ours: str) -> str:
    """Return both numbers, in bold where they differ."""
    return f"{theirs} = {ours}" if theirs == ours else f"**{theirs}, ours {ours}**"


def schedule_section(paper_schedule: PaperSchedule) -> Iterator[str]:
    """Yield a claim as a section of the page."""
    schedule = our_schedule(paper_schedule)
    machines = f", {paper_schedule.machines} machine{'s' * (paper_schedule.machines > 1)} of 8 GPUs"
    yield f"\n### {paper_schedule.recipe_name}{machines}\n\n{paper_schedule.source}. Ours: {describe_training(schedule.recipe)}.\n"
    yield "| epochs | pixels | images a step | rate | our steps |\n|---|---|---|---|---|"
    for theirs, row in zip(paper_schedule.paper_phases, schedule.scheduled_phases, strict=True):
        both = zip(compared_cells(theirs), compared_cells(as_paper_phase(row)), strict=True)
        yield f"| {' | '.join(format_comparison(*one) for one in both)} | {row.steps:,} |"
    yield f"\nEpochs {format_comparison(str(paper_schedule.paper_phases[-1].epochs[1]), str(schedule.recipe.epochs))}. {steps_sentence(paper_schedule, schedule)}"
    if paper_schedule.note:
        yield paper_schedule.note


def steps_sentence(paper_schedule: PaperSchedule, schedule: Schedule) -> str:
    """Return a sentence on the steps of both."""
    if paper_schedule.steps == schedule.steps:
        return f"Steps {paper_schedule.steps:,} = {schedule.steps:,}."
    more = schedule.steps - paper_schedule.steps
    why = paper_schedule.step_difference.format(
        theirs=paper_schedule.steps / schedule.recipe.epochs, ours=schedule.scheduled_phases[0].steps_per_epoch
    )
    return f"Steps {paper_schedule.steps:,}, ours {schedule.steps:,}, {more:,} more. {why}."


def forecast_on_each_type(recipe: Recipe, machines: int) -> Iterator[tuple[Schedule, Forecast]]:
    """Yield the schedule and its forecast on each of `TYPES`, with eight GPUs each."""
    one = recipe.for_machines(machines)
    schedule = Schedule(one, IMAGENET.train, 8 * machines)
    for gpu, gbit, vcpus in MACHINE_TYPES.values():
        found = forecast(schedule, gpus=8, gpu=gpu, gbit=gbit, machines=machines, vcpus=vcpus)
        if found is None:
            raise ValueError(f"no forecast for {recipe.model.name} on {gpu}")
        yield schedule, found


def our_forecast_rows() -> Iterator[str]:
    """Yield the rows of the forecast of resnet50_2026."""
    for recipe in load_recipe_file("resnet50_2026"):
        for machines in recipe.tables or (recipe.machines,):
            both = list(forecast_on_each_type(recipe, machines))
            schedule = both[0][0]
            batch = max(row.global_batch for row in schedule.scheduled_phases)
            told = [
                f"{one.training_seconds / 60:.1f} | {one.total_minutes:.1f} | {one.longest_term}" for _, one in both
            ]
            yield f"| {recipe.name} | {machines} | {batch:,} | {schedule.steps:,} | {' | '.join(told)} |"


def render_page() -> str:
    """Return the whole page."""
    found, last = [PAGE_HEAD], ""
    for claim in PAPER_SCHEDULES:
        if claim.recipe_file != last:
            found.append(f"\n## [{claim.recipe_file}](../recipes/{claim.recipe_file}.py)")
        found += schedule_section(claim)
        last = claim.recipe_file
    return "\n".join([*found, FORECAST_SECTION + "\n".join(our_forecast_rows()), PAGE_FOOT]).replace("\n\n\n", "\n\n")


if __name__ == "__main__":
    write_page(render_page())
