"""Tests that our recipes follow their papers exactly, and of docs/recipes-beside-papers.md."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from paper_schedules import PAPER_SCHEDULES, PaperPhase, PaperSchedule
from recipes_page import (
    MACHINE_TYPES,
    as_paper_phase,
    forecast_on_each_type,
    format_number,
    load_recipe_file,
    our_schedule,
    render_page,
    schedule_section,
)

from cluster.cli.app import cli

ROOT = Path(__file__).resolve().parents[2]
IMAGES = 1_281_167
RECIPES_WITHOUT_PAPER = {"resnet50_2026", "finetune", "sweeps", "quickstart", "cifar10"}
SCHEDULE_IDS = [f"{schedule.recipe_name}, {schedule.machines}" for schedule in PAPER_SCHEDULES]


def phase_numbers(phase: PaperPhase) -> tuple[Any, ...]:
    """Return the numbers of a phase, with learning rates as text of twelve digits."""
    return phase.epochs, phase.size, phase.batch, *map(format_number, phase.lr_endpoints)


@pytest.mark.parametrize("paper_schedule", PAPER_SCHEDULES, ids=SCHEDULE_IDS)
def test_our_schedule_phases_equal_the_papers(paper_schedule: PaperSchedule) -> None:
    ours = [phase_numbers(as_paper_phase(row)) for row in our_schedule(paper_schedule).scheduled_phases]
    assert ours == [phase_numbers(phase) for phase in paper_schedule.paper_phases]


@pytest.mark.parametrize("paper_schedule", PAPER_SCHEDULES, ids=SCHEDULE_IDS)
def test_our_schedule_has_at_most_one_step_more_in_each_epoch(paper_schedule: PaperSchedule) -> None:
    """The last step of our epochs takes the remaining images. Others leave these out, or use them in the next epoch."""
    our_steps = our_schedule(paper_schedule).steps
    if paper_schedule.step_difference and our_steps != paper_schedule.steps:
        batch = paper_schedule.paper_phases[0].batch
        epochs = paper_schedule.paper_phases[-1].epochs[1]
        assert {phase.batch for phase in paper_schedule.paper_phases} == {batch}
        assert paper_schedule.steps in (epochs * IMAGES // batch, IMAGES // batch * epochs)
        assert our_steps == -(-IMAGES // batch) * epochs and 0 < our_steps - paper_schedule.steps <= epochs
    else:
        assert our_steps == paper_schedule.steps


def find_paper_schedule(recipe_name: str) -> PaperSchedule:
    return next(schedule for schedule in PAPER_SCHEDULES if schedule.recipe_name == recipe_name)


def test_our_schedule_of_one_hour_has_goyals_rates_and_157_steps() -> None:
    paper_schedule = find_paper_schedule("resnet50_1hour")
    schedule = our_schedule(paper_schedule)
    first_phase = schedule.scheduled_phases[0]
    assert (schedule.gpus, first_phase.global_batch, first_phase.steps_per_epoch) == (256, 8192, 157)
    assert first_phase.scaled_lr_endpoints == pytest.approx((0.1, 3.2))
    assert (paper_schedule.steps, schedule.steps) == (14_075, 14_130)
    section = "\n".join(schedule_section(paper_schedule))
    assert "156.4 steps an epoch, and a batch may continue into the next epoch; ours has 157" in section


def test_paper_schedules_cover_every_recipe_with_a_paper() -> None:
    covered = {(schedule.recipe_file, schedule.recipe_name, schedule.machines) for schedule in PAPER_SCHEDULES}
    for path in (ROOT / "recipes").glob("[!_]*.py"):
        if path.stem not in RECIPES_WITHOUT_PAPER:
            for recipe in load_recipe_file(path.stem):
                assert {(path.stem, recipe.name, count) for count in recipe.tables or (recipe.machines,)} <= covered


def test_schedule_section_different_number_is_bold() -> None:
    paper_schedule = find_paper_schedule("resnet50_1hour")
    changed_table = paper_schedule.phase_table.replace("0.032", "0.033").replace("60-80", "60-81")
    section = "\n".join(schedule_section(replace(paper_schedule, phase_table=changed_table)))
    assert "**0.033, ours 0.032**" in section and "**60-81, ours 60-80**" in section and "3.2 = 3.2" in section
    assert "**" not in render_page()


def test_forecast_on_each_type_equals_plan_command() -> None:
    options = ["--machines", "1,8", "--type", ",".join(MACHINE_TYPES), "--only", "resnet50_2026", "-o", "json"]
    completed = CliRunner().invoke(cli, ["plan", *options, str(ROOT / "recipes/resnet50_2026.py")])
    minutes = {(row["type"], row["machines"]): row["forecast"]["minutes"] for row in json.loads(completed.output)}
    recipe, _ = load_recipe_file("resnet50_2026")
    for machines in (1, 8):
        for type_name, (_, forecast) in zip(MACHINE_TYPES, forecast_on_each_type(recipe, machines), strict=True):
            assert minutes[type_name, machines] == pytest.approx(forecast.minutes)


def test_render_page_equals_docs_recipes_beside_papers() -> None:
    page = ROOT / "docs" / "recipes-beside-papers.md"
    assert page.read_text() == render_page(), "python docs/tools/recipes_page.py docs/recipes-beside-papers.md"
