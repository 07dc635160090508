"""docs/recipes-beside-papers.md: each paper's own numbers beside what plan computes from our recipe, equal to the digit."""

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
OURS = {"resnet50_2026", "finetune", "sweeps", "quickstart", "cifar10"}  # follow no paper
NAMES = [f"{one.recipe_name}, {one.machines}" for one in PAPER_SCHEDULES]


def numbers(one: PaperPhase) -> tuple[Any, ...]:
    return one.epochs, one.size, one.batch, *map(format_number, one.lr_endpoints)


@pytest.mark.parametrize("claim", PAPER_SCHEDULES, ids=NAMES)
def test_epochs_pixels_batch_and_rates_are_the_papers_to_the_digit(claim: PaperSchedule) -> None:
    assert [numbers(as_paper_phase(row)) for row in our_schedule(claim).scheduled_phases] == [
        numbers(one) for one in claim.paper_phases
    ]


@pytest.mark.parametrize("claim", PAPER_SCHEDULES, ids=NAMES)
def test_steps_are_the_papers_or_one_more_in_each_epoch_at_most(claim: PaperSchedule) -> None:
    """A last step of an epoch takes what is left, where others go on into the next epoch or leave it out."""
    ours, batch = our_schedule(claim).steps, claim.paper_phases[0].batch
    if claim.step_difference and ours != claim.steps:
        epochs = claim.paper_phases[-1].epochs[1]
        assert {one.batch for one in claim.paper_phases} == {batch}
        assert claim.steps in (epochs * IMAGES // batch, IMAGES // batch * epochs)
        assert ours == -(-IMAGES // batch) * epochs and 0 < ours - claim.steps <= epochs
    else:
        assert ours == claim.steps


def test_the_hour_starts_at_a_tenth_peaks_at_3_2_and_makes_157_steps_of_156_an_epoch() -> None:
    claim = next(one for one in PAPER_SCHEDULES if one.recipe_name == "resnet50_1hour")
    schedule = our_schedule(claim)
    assert (schedule.gpus, schedule.scheduled_phases[0].global_batch, schedule.scheduled_phases[0].steps_per_epoch) == (
        256,
        8192,
        157,
    )
    assert schedule.scheduled_phases[0].scaled_lr_endpoints == pytest.approx((0.1, 3.2)) and (
        claim.steps,
        schedule.steps,
    ) == (14_075, 14_130)
    assert "156.4 an epoch and go on into the next; ours are 157" in "\n".join(schedule_section(claim))


def test_every_recipe_is_beside_its_paper_or_has_none() -> None:
    told = {(one.recipe_file, one.recipe_name, one.machines) for one in PAPER_SCHEDULES}
    for path in (ROOT / "recipes").glob("[!_]*.py"):
        if path.stem not in OURS:
            for one in load_recipe_file(path.stem):
                assert {(path.stem, one.name, count) for count in one.tables or (one.machines,)} <= told


def test_a_number_that_differs_stands_out_in_bold() -> None:
    claim = next(one for one in PAPER_SCHEDULES if one.recipe_name == "resnet50_1hour")
    wrong = replace(claim, phase_table=claim.phase_table.replace("0.032", "0.033").replace("60-80", "60-81"))
    found = "\n".join(schedule_section(wrong))
    assert "**0.033, ours 0.032**" in found and "**60-81, ours 60-80**" in found and "3.2 = 3.2" in found
    assert "**" not in render_page()


def test_the_forecast_on_the_page_is_what_plan_says() -> None:
    words = ["plan", "--machines", "1,8", "--type", ",".join(MACHINE_TYPES), "--only", "resnet50_2026", "-o", "json"]
    ran = CliRunner().invoke(cli, [*words, str(ROOT / "recipes/resnet50_2026.py")])
    told = {(one["type"], one["machines"]): one["forecast"]["minutes"] for one in json.loads(ran.output)}
    (ours, _) = load_recipe_file("resnet50_2026")
    for machines in (1, 8):
        for name, (_, found) in zip(MACHINE_TYPES, forecast_on_each_type(ours, machines), strict=True):
            assert told[name, machines] == pytest.approx(found.total_minutes)


def test_the_page_in_docs_is_what_the_code_says() -> None:
    page = ROOT / "docs" / "recipes-beside-papers.md"
    assert page.read_text() == render_page(), "python docs/tools/recipes_page.py docs/recipes-beside-papers.md"
