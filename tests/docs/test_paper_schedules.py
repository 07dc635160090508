"""Tests that our recipes follow their papers exactly, and of docs/recipes-beside-papers.md."""

from pathlib import Path
from typing import Any

import pytest
from paper_schedules import PAPER_SCHEDULES, PaperPhase, PaperSchedule
from recipes_page import (
    as_paper_phase,
    format_number,
    load_recipe_file,
    our_schedule,
    render_page,
)

ROOT = Path(__file__).resolve().parents[2]
RECIPES_WITHOUT_PAPER = {"resnet50_2026", "finetune", "sweeps", "quickstart", "cifar10"}
SCHEDULE_IDS = [f"{schedule.recipe_name}, {schedule.machines}" for schedule in PAPER_SCHEDULES]


def phase_numbers(phase: PaperPhase) -> tuple[Any, ...]:
    """Return the numbers of a phase, with learning rates as text of twelve digits."""
    return phase.epochs, phase.size, phase.batch, *map(format_number, phase.lr_endpoints)


@pytest.mark.parametrize("paper_schedule", PAPER_SCHEDULES, ids=SCHEDULE_IDS)
def test_our_schedule_phases_equal_the_papers(paper_schedule: PaperSchedule) -> None:
    ours = [phase_numbers(as_paper_phase(row)) for row in our_schedule(paper_schedule).scheduled_phases]
    assert ours == [phase_numbers(phase) for phase in paper_schedule.paper_phases]


def test_paper_schedules_cover_every_recipe_with_a_paper() -> None:
    covered = {(schedule.recipe_file, schedule.recipe_name, schedule.machines) for schedule in PAPER_SCHEDULES}
    for path in (ROOT / "recipes").glob("[!_]*.py"):
        if path.stem not in RECIPES_WITHOUT_PAPER:
            for recipe in load_recipe_file(path.stem):
                assert {(path.stem, recipe.name, count) for count in recipe.tables or (recipe.machines,)} <= covered


def test_render_page_equals_docs_recipes_beside_papers() -> None:
    page = ROOT / "docs" / "recipes-beside-papers.md"
    assert page.read_text() == render_page(), "python docs/tools/recipes_page.py docs/recipes-beside-papers.md"
