"""Writes docs/recipes-beside-papers.md: each schedule as its source has it, beside our recipe.

It ends with the forecast of resnet50_2026, which follows no paper.

    python docs/tools/recipes_page.py docs/recipes-beside-papers.md
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

from page_output import write_page
from paper_schedules import PAPER_SCHEDULES, PaperPhase, PaperSchedule

from train.forecast import Forecast, forecast, longest_term
from train.metrics.text import describe_training
from train.recipe.components import IMAGENET
from train.recipe.recipe_files import read_recipes, select_recipes
from train.recipe.schedule import Schedule, ScheduledPhase
from train.recipe.schema import Recipe

RECIPE_FOLDER = Path(__file__).resolve().parents[2] / "recipes"
MACHINE_TYPES = {"p4d.24xlarge": ("A100", 400.0, 96), "p5.48xlarge": ("H100", 3200.0, 192)}  # GPU, Gbit/s, vCPUs

PAGE_HEAD = """\
# The recipes beside their sources

Each table compares a schedule of a paper, a record or its code with our recipe. The number on the left of "=" is
copied from the source (`docs/tools/paper_schedules.py`). The number on the right is computed from the recipe, as
`imgnet-cluster plan` does. A difference would be in bold, and would make a test fail. "rate" is the learning rate of
the first and the last step of a phase. The line above each table has the other settings of our recipe.

This page is written by `python docs/tools/recipes_page.py docs/recipes-beside-papers.md`, and a test checks that it
agrees with the code.

What the sources measured, and what is uncertain about them, is in the file of each recipe. None of these recipes has
been run on ImageNet by us yet.
"""
FORECAST_SECTION = """
## resnet50_2026

This recipe follows no paper exactly. [recipes/resnet50_2026.py](../recipes/resnet50_2026.py) gives the source of each
of its numbers. The table shows its forecast from the presets of [forecast.md](forecast.md), for machines that we have
not rented yet. "training" is the minutes from the start of the trainers to the last validation; "all" adds boot,
set-up and fetching the images; "largest part" is the term that takes longest. `plan --type p4d.24xlarge,p5.48xlarge`
also shows the dollars.

| recipe | machines | images a step | steps | p4d: training | all | largest part | p5: training | all | largest part |
|---|---|---|---|---|---|---|---|---|---|
"""
PAGE_FOOT = """
## Recipes without a paper

[finetune](../recipes/finetune.py), [sweeps](../recipes/sweeps.py), [quickstart](../recipes/quickstart.py) and
[cifar10](../recipes/cifar10.py) are our own.
"""


@cache
def load_recipe_file(name: str) -> tuple[Recipe, ...]:
    """Return the recipes of recipes/<name>.py. They are read as files, because this code must not import them."""
    return tuple(read_recipes(str(RECIPE_FOLDER / f"{name}.py")))


def our_schedule(paper_schedule: PaperSchedule) -> Schedule:
    """Return the schedule of our recipe on the number of machines of the source."""
    (recipe,) = select_recipes(load_recipe_file(paper_schedule.recipe_file), [paper_schedule.recipe_name])
    recipe = recipe.for_machines(paper_schedule.machines)
    return Schedule(recipe, IMAGENET.train, recipe.nominal_gpus)


def as_paper_phase(scheduled_phase: ScheduledPhase) -> PaperPhase:
    """Return a phase of our schedule in the form of a source."""
    return PaperPhase(
        scheduled_phase.epochs, scheduled_phase.size, scheduled_phase.global_batch, scheduled_phase.scaled_lr_endpoints
    )


def format_number(value: float) -> str:
    """Return a number with twelve digits, which is more than any source has."""
    return f"{value:.12g}"


def compared_cells(phase: PaperPhase) -> tuple[str, ...]:
    """Return the texts that are compared: epochs, image size, images in a step, learning rates."""
    first, last = map(format_number, phase.lr_endpoints)
    rates = first if first == last else f"{first} to {last}"
    return f"{phase.epochs[0]}-{phase.epochs[1]}", str(phase.size), f"{phase.batch:,}", rates


def format_comparison(theirs: str, ours: str) -> str:
    """Return the source's text and ours, in bold where they differ."""
    return f"{theirs} = {ours}" if theirs == ours else f"**{theirs}, ours {ours}**"


def schedule_section(paper_schedule: PaperSchedule) -> Iterator[str]:
    """Yield the lines of a schedule's section."""
    schedule = our_schedule(paper_schedule)
    machines = f"{paper_schedule.machines} machine{'s' * (paper_schedule.machines > 1)} of 8 GPUs"
    yield f"\n### {paper_schedule.recipe_name}, {machines}\n"
    yield f"{paper_schedule.source}. Ours: {describe_training(schedule.recipe)}.\n"
    yield "| epochs | pixels | images a step | rate | our steps |\n|---|---|---|---|---|"
    paper_phases = paper_schedule.paper_phases
    for paper_phase, scheduled_phase in zip(paper_phases, schedule.scheduled_phases, strict=True):
        cell_pairs = zip(compared_cells(paper_phase), compared_cells(as_paper_phase(scheduled_phase)), strict=True)
        cells = [format_comparison(theirs, ours) for theirs, ours in cell_pairs]
        yield f"| {' | '.join(cells)} | {scheduled_phase.steps:,} |"
    epochs = format_comparison(str(paper_phases[-1].epochs[1]), str(schedule.recipe.epochs))
    yield f"\nEpochs {epochs}. {steps_sentence(paper_schedule, schedule)}"
    if paper_schedule.note:
        yield paper_schedule.note


def steps_sentence(paper_schedule: PaperSchedule, schedule: Schedule) -> str:
    """Return a sentence that compares the number of steps, and explains a difference."""
    if paper_schedule.steps == schedule.steps:
        return f"Steps {paper_schedule.steps:,} = {schedule.steps:,}."
    reason = paper_schedule.step_difference.format(
        theirs=paper_schedule.steps / schedule.recipe.epochs, ours=schedule.scheduled_phases[0].steps_per_epoch
    )
    difference = schedule.steps - paper_schedule.steps
    return f"Steps {paper_schedule.steps:,}, ours {schedule.steps:,}, {difference:,} more. {reason}."


def forecast_on_each_type(recipe: Recipe, machines: int) -> Iterator[tuple[Schedule, Forecast]]:
    """Yield the schedule and its forecast on each of `MACHINE_TYPES`. Raises `ValueError` where there is none."""
    recipe = recipe.for_machines(machines)
    schedule = Schedule(recipe, IMAGENET.train, 8 * machines)
    for gpu, gbit, vcpus in MACHINE_TYPES.values():
        result = forecast(schedule, gpus=8, gpu=gpu, gbit=gbit, machines=machines, vcpus=vcpus)
        if result is None:
            raise ValueError(f"no forecast for {recipe.model.name} on {gpu}")
        yield schedule, result


def our_forecast_rows() -> Iterator[str]:
    """Yield the rows of the forecast of resnet50_2026."""
    for recipe in load_recipe_file("resnet50_2026"):
        for machines in recipe.tables or (recipe.machines,):
            schedules_and_forecasts = list(forecast_on_each_type(recipe, machines))
            schedule = schedules_and_forecasts[0][0]
            largest_batch = max(row.global_batch for row in schedule.scheduled_phases)
            cells = [
                f"{result.training_minutes:.1f} | {result.minutes:.1f} | {longest_term(result.terms)}"
                for _, result in schedules_and_forecasts
            ]
            yield f"| {recipe.name} | {machines} | {largest_batch:,} | {schedule.steps:,} | {' | '.join(cells)} |"


def render_page() -> str:
    """Return the whole page."""
    parts = [PAGE_HEAD]
    last_file = ""
    for paper_schedule in PAPER_SCHEDULES:
        if paper_schedule.recipe_file != last_file:
            parts.append(f"\n## [{paper_schedule.recipe_file}](../recipes/{paper_schedule.recipe_file}.py)")
        parts += schedule_section(paper_schedule)
        last_file = paper_schedule.recipe_file
    parts += [FORECAST_SECTION + "\n".join(our_forecast_rows()), PAGE_FOOT]
    return "\n".join(parts).replace("\n\n\n", "\n\n")


if __name__ == "__main__":
    write_page(render_page())
