"""Resuming: which checkpoint belongs to a run, and what another machine can use of it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from train.data.order.batch_sampler import DistributedBatchSampler
from train.distributed.process_group import ProcessGroup
from train.engine import resume_check
from train.engine.agent_channel import AgentChannel
from train.engine.options import parse_run_options
from train.engine.trainer import Trainer
from train.recipe.schedule import Schedule, with_more_epochs
from train.tools.errors import TrainingError


def with_copies(recipe: Any, copy: int | None) -> Any:
    return replace(recipe, phases=[replace(phase, copy=copy) for phase in recipe.phases])


def test_check_same_run_ignores_what_changes_no_training(tiny: Any) -> None:
    recipe = tiny()
    schedule = Schedule(recipe, 50, 2)
    saved = resume_check.run_fingerprint(with_copies(recipe, 160), schedule)
    assert saved["recipe"]["phases"][0]["copy"] == 160  # kept in the checkpoint, for evaluations
    changes: list[dict[str, Any]] = [
        {"target": 90.0},
        {"precision": "fp16"},
        {"patience": 3},
        {"kernel_search": True},
        {"graphs": "on"},
    ]
    for other_recipe in (recipe, with_copies(recipe, 352), *(replace(recipe, **change) for change in changes)):
        resume_check.check_same_run(saved, resume_check.run_fingerprint(other_recipe, schedule))


@pytest.mark.parametrize(("changes", "images", "difference"), [
    ({"seed": 3}, 50, "seed"), ({"name": "other"}, 50, "recipe"), ({}, 49, "images"),
])  # fmt: skip
def test_check_same_run_names_what_differs(changes: dict[str, Any], images: int, difference: str, tiny: Any) -> None:
    saved = resume_check.run_fingerprint(tiny(), Schedule(tiny(), 50, 2))
    expected = resume_check.run_fingerprint(tiny(**changes), Schedule(tiny(), images, 2))
    with pytest.raises(TrainingError, match=f"belongs to a run with another {difference}; resume with"):
        resume_check.check_same_run(saved, expected)


def test_phases_may_be_added_after_those_of_the_checkpoint(tiny: Any) -> None:
    recipe = tiny()
    longer = with_more_epochs(Schedule(recipe, 50, 2), 3)
    fingerprints = [resume_check.run_fingerprint(each, Schedule(each, 50, 2)) for each in (recipe, longer)]
    resume_check.check_same_run(*fingerprints)
    other = replace(longer, phases=[replace(longer.phases[0], lr=0.5), *longer.phases[1:]])
    shortened = [resume_check.run_fingerprint(each, Schedule(each, 50, 2, max_steps=5)) for each in (recipe, longer)]
    for saved, expected in (
        (fingerprints[0], resume_check.run_fingerprint(other, Schedule(other, 50, 2))),
        (fingerprints[1], fingerprints[0]),
        shortened,
    ):
        with pytest.raises(TrainingError, match="belongs to a run with another recipe"):
            resume_check.check_same_run(saved, expected)


def test_trainer_restore_with_and_without_loss_scale(tiny: Any, tmp_path: Path) -> None:
    """A job may move from an A100 (bfloat16, no loss scale) to a V100 (float16, loss scale) and back."""
    recipe, group = tiny(), ProcessGroup(0, 0, 1, 1, torch.device("cpu"))
    sampler = DistributedBatchSampler(Schedule(recipe, 50, 2), {}, 0, 0, 1)
    options = parse_run_options(["x.py", "--out", str(tmp_path)])
    bfloat16_trainer, float16_trainer = (
        Trainer(options, recipe, group, sampler, tuple("abcdefghij"), AgentChannel()) for _ in range(2)
    )
    bfloat16_trainer.epoch_index = 2
    float16_trainer.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    float16_trainer.restore(bfloat16_trainer.state())
    assert float16_trainer.epoch_index == 2 and float16_trainer.scaler.get_scale() == 64.0
    bfloat16_trainer.restore(float16_trainer.state())
    assert not bfloat16_trainer.scaler.is_enabled()


@pytest.mark.parametrize(("other", "difference"), [
    (nn.Sequential(nn.Linear(4, 3)), "0.weight is [2, 4] there and [3, 4] here"),
    (nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2)), "1.weight is missing there and [2, 2] here"),
    (nn.Sequential(), "0.weight is [2, 4] there and missing here"),
])  # fmt: skip
def test_changed_model_is_told_in_one_line_with_both_shapes(other: nn.Module, difference: str) -> None:
    saved = nn.Sequential(nn.Linear(4, 2))
    with pytest.raises(TrainingError, match="the model has changed since the checkpoint: ") as caught:
        resume_check.load_weights(other, saved.state_dict())
    assert difference in str(caught.value)
    resume_check.load_weights(same := nn.Sequential(nn.Linear(4, 2)), saved.state_dict())
    assert same.state_dict()["0.weight"].equal(saved.state_dict()["0.weight"])
