"""Rule of resuming: a run resumed from a checkpoint of any step ends with the same bits as an uninterrupted one.

Bug 2 of the trainer of 2018 was a resume that went on with new weights. The whole loop runs with its validations, in
one process and in two. A checkpoint is what torch.save makes of the state.
That a kill at any moment leaves an intact file is tested in tests/train/engine/test_runs.py.
"""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from support.trainer_in_process import RandomImages, class_names, make_phase, make_recipe, make_sampler
from torch import nn

from train.distributed.process_group import ProcessGroup
from train.engine import trainer
from train.engine.agent_channel import AgentChannel
from train.engine.options import parse_run_options
from train.engine.run import keep_last_as_best
from train.recipe.schedule import Schedule, with_more_epochs
from train.tools import checkpoint_io
from train.tools.agent_protocol import checkpoint_folder

IMAGES, VAL = 12, 7
PHASES = [  # frozen, warm-up, larger batch, larger images; a last step of 4 images leaves one of two ranks idle
    make_phase((0, 1), 4, 0.02, frozen=True),
    make_phase((1, 2), 4, (0.01, 0.05)),
    make_phase((2, 3), 8, 0.05),
    make_phase((3, 4), 4, (0.05, 0.0), size=32, rect_val=True),
]
STEPS = 2 + 2 + 1 + 2
DETERMINISTIC_COLUMNS = (
    "epoch", "size", "global_batch", "lr", "steps", "train_loss", "train_top1", "train_top5", "train_images",
    "val_loss", "val_images", "view", "top1", "top5", "top1_square", "top5_square",
)  # fmt: skip
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "nesterov": {"nesterov": True, "label_smoothing": 0.1, "ema": 0.5, "clip": 0.5, "mixup": 0.2, "cutmix": 1.0},
    "lamb": {"name": "lamb", "loss": "bce"},
}


class RecordedRun:
    """A run that keeps the checkpoint of every step in memory."""

    def __init__(self, folder: Path, group: ProcessGroup, loss_scale: float, **options_of_optim: Any) -> None:
        recipe, self.dataset = make_recipe(*PHASES, gpus=2, **options_of_optim), RandomImages(IMAGES, VAL, classes=6)
        options = parse_run_options(["rule", "--out", str(folder), "--save-seconds", "0"])
        sampler = make_sampler(Schedule(recipe, IMAGES, 2), self.dataset, group.rank, group.world_size)
        self.trainer = trainer.Trainer(options, recipe, group, sampler, class_names(6), AgentChannel())
        self.trainer.scaler = torch.amp.GradScaler("cpu", init_scale=loss_scale)  # as with float16
        self.trainer.save = self.keep_checkpoint  # type: ignore[method-assign]
        self.checkpoints: dict[int, bytes] = {}

    def keep_checkpoint(self, wait: bool = False, is_best: bool = False) -> None:
        stream = io.BytesIO()
        torch.save(checkpoint_io.copy_to_cpu(self.trainer.state()), stream)
        self.checkpoints[self.trainer.steps_done] = stream.getvalue()

    def train(self, state: bytes | None = None) -> dict[str, Any]:
        """Train to the end, from a checkpoint if given. Returns the last state without times."""
        if state:
            for parameter in self.trainer.model.parameters():
                nn.init.normal_(parameter)  # so that only restored weights can be right
            self.trainer.restore(torch.load(io.BytesIO(state), map_location="cpu", weights_only=True))
        self.trainer.train(self.dataset, workers=0)  # type: ignore[arg-type]
        if STEPS not in self.checkpoints:
            self.keep_checkpoint()  # the checkpoint was the last one
        final_state = torch.load(io.BytesIO(self.checkpoints[STEPS]), weights_only=True)
        final_state["history"] = [{name: row[name] for name in DETERMINISTIC_COLUMNS} for row in final_state["history"]]
        names = ("epoch", "step", "model", "average", "optimizer", "history", "scaler")
        return {name: final_state[name] for name in names}


def flatten(value: Any, name: str = "") -> dict[str, Any]:
    """Return nested dicts and lists as one dict by path, tensors as their dtype and bytes."""
    if isinstance(value, torch.Tensor):
        return {name: (str(value.dtype), value.contiguous().numpy().tobytes())}
    if isinstance(value, dict | list | tuple):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return {
            key: flat_value for number, part in pairs for key, flat_value in flatten(part, f"{name}/{number}").items()
        }
    return {name: repr(value)}


@pytest.mark.parametrize(("world", "optimizer"), [(2, "nesterov"), (1, "lamb")])
def test_resume_at_any_step_gives_the_same_bits(world: int, optimizer: str, tmp_path: Path, in_group: Any) -> None:
    def work(group: ProcessGroup) -> tuple[list[int], dict[int, list[str]]]:
        trainer.MAX_STEPS_BETWEEN_SYNCS = 1  # sync, and save, after each step
        uninterrupted = RecordedRun(tmp_path / f"whole-{group.rank}", group, 512.0, **OPTIMIZERS[optimizer])
        expected = flatten(uninterrupted.train())
        differences = {}
        for step in sorted(uninterrupted.checkpoints):
            resumed = RecordedRun(tmp_path / f"{step}-{group.rank}", group, 64.0, **OPTIMIZERS[optimizer])
            actual = flatten(resumed.train(uninterrupted.checkpoints[step]))
            differences[step] = [
                name for name in expected.keys() | actual.keys() if actual.get(name) != expected.get(name)
            ]
        return sorted(uninterrupted.checkpoints), differences

    for steps, differences in in_group(world, work):
        assert steps == list(range(1, STEPS + 1))
        assert {step: names[:3] for step, names in differences.items() if names} == {}


@pytest.mark.parametrize(("keep", "written"), [("best,last", ["best-00000003.safetensors"]), ("last", [])])
def test_last_network_stays_as_the_best_one_when_a_finished_run_gets_more_epochs(
    keep: str, written: list[str], tmp_path: Path, in_group: Any
) -> None:
    def work(group: ProcessGroup) -> list[str]:
        recipe, dataset = make_recipe(make_phase((0, 1), 4, 0.02)), RandomImages(IMAGES, VAL, classes=6)
        longer = with_more_epochs(Schedule(recipe, IMAGES, 1), 2)
        options = parse_run_options(["rule", "--out", str(tmp_path), "--keep", keep])
        finished, resumed = (
            trainer.Trainer(
                options, each, group, make_sampler(Schedule(each, IMAGES, 1), dataset), class_names(6), AgentChannel()
            )
            for each in (recipe, longer)
        )
        finished.train(dataset, workers=0)  # type: ignore[arg-type]
        keep_last_as_best(finished)
        folder = checkpoint_folder(tmp_path, 1)
        assert not list(folder.glob("best-*")), "it is the last one, and stays in any case"
        resumed.restore(torch.load(io.BytesIO(saved(finished)), weights_only=True))
        keep_last_as_best(resumed)
        resumed.saver.wait()
        return sorted(path.name for path in folder.glob("best-*"))

    assert in_group(1, work) == [written]


def saved(run: trainer.Trainer) -> bytes:
    """Return a run's state as torch.save writes it."""
    stream = io.BytesIO()
    torch.save(checkpoint_io.copy_to_cpu(run.state()), stream)
    return stream.getvalue()
