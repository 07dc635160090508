"""The generated pages and pictures are what the code says; what they say is right and complete."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cli_page
import forecast_page
import pytest
import recipes_page
from paper_schedules import PAPER_SCHEDULES, PaperPhase, PaperSchedule
from published_runs import MAX_ERROR, PublishedRun, published_runs
from recipes_page import as_paper_phase, format_number, load_recipe_file, our_schedule
from screenshots import draw_pictures

from cluster.cli.app import cli
from recipes.resnet50_18min import recipe as resnet50

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("tool", "page", "render"), [
    ("cli_page", "cli", cli_page.render_page),
    ("forecast_page", "forecast", forecast_page.render_page),
    ("recipes_page", "recipes-beside-papers", recipes_page.render_page),
])  # fmt: skip
def test_page_is_what_the_code_says(tool: str, page: str, render: Callable[[], str]) -> None:
    assert (ROOT / f"docs/{page}.md").read_text() == render(), f"python docs/tools/{tool}.py docs/{page}.md"


def test_pictures_are_what_the_commands_print() -> None:
    folder, pictures = ROOT / "docs/screenshots", dict(draw_pictures())
    assert {path.name for path in folder.iterdir()} == {*pictures}
    for name, svg in pictures.items():
        assert (folder / name).read_text() == svg, f"{name}: python docs/tools/screenshots.py docs/screenshots"
        assert "…" not in svg and not re.search(r"/root|/work|/tmp|/home/(?!you)", svg), name


def test_help_lists_every_command_under_a_heading() -> None:
    sections = cli.commands_by_section(cli_page.make_context(cli))
    assert sorted(name for names in sections.values() for name in names) == sorted(cli.commands)
    lines = cli.get_help(cli_page.make_context(cli)).splitlines()
    for title, names in sections.items():
        first = lines.index(f"{title}:") + 1
        assert [line.split()[0] for line in lines[first : first + len(names)]] == names, "a sentence is wrapped"


RECIPES_WITHOUT_PAPER = {"resnet50_2026", "finetune", "sweeps", "quickstart", "cifar10"}
SCHEDULE_IDS = [f"{schedule.recipe_name}, {schedule.machines}" for schedule in PAPER_SCHEDULES]


def phase_numbers(phase: PaperPhase) -> tuple[Any, ...]:
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


RUNS = published_runs(dict(resnet50.tables))


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.system}, {run.name}")
def test_forecast_is_near_the_published_time_and_nearer_where_fitted(run: PublishedRun) -> None:
    assert abs(run.error) <= (0.02 if run.is_fitted else MAX_ERROR)
