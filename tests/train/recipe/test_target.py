"""The target accuracy of a run: its syntax, its outcome, its clock, and training that ends at it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.train_records import make_epoch
from support.trainer_in_process import RandomImages, make_phase, make_recipe, make_trainer

from train.recipe.target import Target, TargetOutcome, describe_outcome, has_stalled, seconds_of_run, target_outcome

ROWS = [
    make_epoch(epoch=1, top1=10.0, top5=50.0, at=1060.0, clock=60.0, view="square"),
    make_epoch(epoch=2, at=1120.0, clock=120.0),
    make_epoch(epoch=3, top1=30.0, top5=93.0, at=1180.0, clock=180.0, view="square"),
    make_epoch(epoch=4, top1=40.0, top5=92.5, at=1240.0, clock=240.0, view="rectangle"),
]


@pytest.mark.parametrize(("text", "target"), [
    ("top5=93", Target("top5", 93.0)), ("top1=17.0000001", Target("top1", 17.0000001)),
])  # fmt: skip
def test_target_parse_metric_and_percent(text: str, target: Target) -> None:
    assert Target.parse(text) == target and str(target) == text


@pytest.mark.parametrize("text", ["", "93", "top5", "top5=x", "top5=0", "top5=101", "top5=nan", "top3=5", "top1=-1"])
def test_target_parse_refuses_other_texts_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="top5=93"):
        Target.parse(text)


def test_target_outcome_of_the_first_epoch_that_reaches_it() -> None:
    outcome = target_outcome(Target("top5", 93.0), ROWS)
    assert outcome == TargetOutcome(
        metric="top5", goal=93.0, stops=True, reached=True, epoch=3, at=1180.0, seconds=180.0,
        minutes=3.0, seconds_all=None, dollars=None, best=93.0, best_epoch=3, best_view="square",
    )  # fmt: skip
    assert describe_outcome(outcome) == "top-5 of 93 % reached in epoch 3, 3.00 minutes after the start of loading"
    paid = replace(outcome, seconds_all=300.0, dollars=1.5)
    assert describe_outcome(paid).endswith("loading, 5.00 after the launch, $1.50")


def test_target_outcome_not_reached_reports_the_best() -> None:
    outcome = target_outcome(Target("top1", 76.1), ROWS)
    assert outcome and outcome.reached is False
    assert (outcome.epoch, outcome.seconds, outcome.best) == (None, None, 40.0)
    assert describe_outcome(outcome) == "top-1 of 76.1 % not reached; the best was 40.00 % in epoch 4 (rectangle)"
    without_epochs = target_outcome(Target("top1", 76.1), [])
    assert without_epochs and describe_outcome(without_epochs).endswith("nothing was validated")


def test_target_from_options_recipe_target_stops_nothing(tiny: Any) -> None:
    without_target, own_recipe = tiny(), tiny(target=93.0)
    assert Target.from_options("", without_target) is None and target_outcome(None, ROWS) is None
    assert Target.from_options("", own_recipe) == Target("top5", 93.0, stops_training=False)
    assert Target.from_options("top1=50", own_recipe) == Target("top1", 50.0)
    assert Target.parse("top5=80").apply_to_recipe(own_recipe).target == 80.0
    assert Target.parse("top1=80").apply_to_recipe(own_recipe).target == 93.0


def test_seconds_of_run_is_none_when_the_clock_went_back_since_an_earlier_epoch() -> None:
    """Between two machines, or two boots of one: no time, rather than a wrong one."""
    history = [make_epoch(epoch=1, clock=50.0), make_epoch(epoch=2, clock=None)]
    assert seconds_of_run(160.0, 100.0, history) == 60.0
    assert seconds_of_run(149.0, 100.0, history) is None
    assert seconds_of_run(99.0, 100.0, []) is None


@pytest.mark.parametrize(("patience", "accuracies", "ends"), [
    (None, [9, 1, 1, 1], False), (2, [9, 1], False), (2, [9, 1, 9], True), (2, [1, 9, None, 1], False),
    (2, [1, 9, None, 1, 2], True), (2, [9, 1, 10], False), (1, [], False),
])  # fmt: skip
def test_patience_counts_validations_in_a_row_without_a_higher_top1(
    patience: int | None, accuracies: list[float | None], ends: bool
) -> None:
    assert has_stalled(patience, [make_epoch(epoch=1, top1=top1) for top1 in accuracies]) is ends


def test_patience_counts_only_validations_after_added_epochs_began() -> None:
    history = [make_epoch(epoch=number, top1=top1) for number, top1 in enumerate((9, 1, 1, 2, 3), 1)]
    assert [has_stalled(2, history[:count], since=3) for count in (3, 4, 5)] == [False, False, True]
    assert not has_stalled(2, [*history[:4], make_epoch(epoch=5, top1=10)], since=3)


def test_training_ends_after_validations_without_a_higher_top1(tmp_path: Path) -> None:
    images = RandomImages(train=16, val=12, classes=5)
    recipe = replace(make_recipe(make_phase((0, 9), 8, 0.0)), patience=2)
    trainer = make_trainer(tmp_path, recipe, images, plain=False)
    trainer.train(images, workers=0)  # type: ignore[arg-type]
    top1 = [row.top1 for row in trainer.history]
    assert 3 <= len(top1) < 9 and has_stalled(2, trainer.history) and not has_stalled(2, trainer.history[:-1])


def test_training_ends_and_saves_after_the_validation_that_reaches_the_target(tmp_path: Path) -> None:
    images = RandomImages(train=16, val=12, classes=6)
    trainer = make_trainer(tmp_path, make_recipe(make_phase((0, 4), 8, 0.001)), images, plain=False)
    trainer.options = replace(trainer.options, target="top5=5")
    trainer.train(images, workers=0)  # type: ignore[arg-type]
    (row,) = trainer.history
    assert (row.top5 or 0.0) >= 5 and row.at == pytest.approx(trainer.run_start_time + (row.clock or 0.0))
    assert [path.name for path in tmp_path.rglob("*.pt")] == ["step-00000002.pt"]
