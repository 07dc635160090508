"""A checkpoint, and the run that goes on from it: whose it is, and what of it another machine can use."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from train.data.order.batch_sampler import DistributedBatchSampler
from train.distributed.process_group import ProcessGroup
from train.engine import resume_check
from train.engine.agent_channel import AgentChannel
from train.engine.options import parse_train_options
from train.engine.trainer import Trainer
from train.recipe.schedule import Schedule
from train.tools.errors import TrainingError


def with_copies(recipe: Any, copy: int | None) -> Any:
    return replace(recipe, phases=[replace(one, copy=copy) for one in recipe.phases])


def test_copies_that_were_made_meanwhile_and_a_target_make_no_other_run(tiny: Any) -> None:
    recipe = tiny()
    plan = Schedule(recipe, 50, 2)
    saved = resume_check.run_fingerprint(with_copies(recipe, 160), plan)
    assert saved["recipe"]["phases"][0]["copy"] == 160  # which is kept, for whoever examines it
    for one in (recipe, with_copies(recipe, 352), replace(recipe, target=90.0)):
        resume_check.check_same_run(saved, resume_check.run_fingerprint(one, plan))


@pytest.mark.parametrize("changes, what", [({"seed": 3}, "seed"), ({"name": "other"}, "recipe")])
def test_another_run_is_named_by_what_differs(changes: dict[str, Any], what: str, tiny: Any) -> None:
    plan = Schedule(tiny(), 50, 2)
    with pytest.raises(TrainingError, match=f"belongs to a run with another {what}; resume with"):
        resume_check.check_same_run(
            resume_check.run_fingerprint(tiny(), plan), resume_check.run_fingerprint(tiny(**changes), plan)
        )
    with pytest.raises(TrainingError, match="another images"):
        resume_check.check_same_run(
            resume_check.run_fingerprint(tiny(), Schedule(tiny(), 49, 2)), resume_check.run_fingerprint(tiny(), plan)
        )


def test_a_gpu_that_scales_its_loss_goes_on_from_a_checkpoint_of_one_that_did_not(tiny: Any, tmp_path: Path) -> None:
    """From bfloat16 to float16, as when a job moves from an A100 to a V100."""
    recipe, alone = tiny(), ProcessGroup(0, 0, 1, 1, torch.device("cpu"))
    feed = DistributedBatchSampler(Schedule(recipe, 50, 2), {}, 0, 0, 1)
    options = parse_train_options(["x.py", "--out", str(tmp_path)])
    one, other = (Trainer(options, recipe, alone, feed, 10, AgentChannel()) for _ in range(2))
    one.epoch_index = 2
    other.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    other.restore(one.state())
    assert other.epoch_index == 2 and other.scaler.get_scale() == 64.0
    one.restore(other.state())
    assert not one.scaler.is_enabled()
