"""A run that ends at any step and goes on from its checkpoint is, bit for bit, the run that never ended.

The whole loop, with its validations, in this process and in two; the checkpoint is what torch.save makes of the state
and what `checkpoint.load` would read. That a kill at any moment leaves a whole file: tests/train/engine/test_runs.py.
"""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from support.trainer_in_process import Pixels, feed, recipe, row
from torch import nn

from train.distributed.process_group import ProcessGroup
from train.engine import trainer
from train.engine.agent_channel import AgentChannel
from train.engine.options import parse_train_options
from train.recipe.schedule import Schedule
from train.tools import checkpoint_io

IMAGES, VAL = 12, 7
ROWS = [  # frozen, warm-up, larger batch, larger images: the last step of 4 images leaves one of two processes without
    row((0, 1), 4, 0.02, frozen=True),
    row((1, 2), 4, (0.01, 0.05)),
    row((2, 3), 8, 0.05),
    row((3, 4), 4, (0.05, 0.0), size=32, rect_val=True),
]
STEPS = 2 + 2 + 1 + 2
HISTORY = ("epoch", "size", "global_batch", "lr", "steps", "train_loss", "train_top1", "train_top5", "train_images",
           "val_loss", "val_images", "view", "top1", "top5", "top1_square", "top5_square")  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "nesterov": {"nesterov": True, "label_smoothing": 0.1},
    "lars": {"name": "lars", "trust": 0.02},
    "lamb": {"name": "lamb", "loss": "bce"},
}


class Run:
    """A run that keeps what a file would hold of every step."""

    def __init__(self, folder: Path, group: ProcessGroup, **how: Any) -> None:
        what, self.pixels = recipe(*ROWS, gpus=2, **how), Pixels(IMAGES, VAL, classes=6)
        options = parse_train_options(["rule", "--out", str(folder), "--save-seconds", "0"])
        shares = feed(Schedule(what, IMAGES, 2), self.pixels, group.rank, group.world_size)
        self.trainer = trainer.Trainer(options, what, group, shares, 6, AgentChannel())
        self.trainer.save = self.keep  # type: ignore[method-assign]
        self.kept: dict[int, bytes] = {}

    def keep(self, wait: bool = False) -> None:
        stream = io.BytesIO()
        torch.save(checkpoint_io.copy_to_cpu(self.trainer.state()), stream)
        self.kept[self.trainer.steps_done] = stream.getvalue()

    def go(self, state: bytes | None = None) -> dict[str, Any]:
        """Train to the end, from a state if one is given; return the last one, without what only a clock knows."""
        if state:
            for one in self.trainer.model.parameters():
                nn.init.normal_(one)  # nothing may come through that was not restored
            self.trainer.restore(torch.load(io.BytesIO(state), map_location="cpu", weights_only=True))
        self.trainer.train(self.pixels, workers=0)  # type: ignore[arg-type]
        if STEPS not in self.kept:
            self.keep()  # there was nothing left to do
        last = torch.load(io.BytesIO(self.kept[STEPS]), weights_only=True)
        last["history"] = [{name: row[name] for name in HISTORY} for row in last["history"]]
        return {name: last[name] for name in ("epoch", "step", "statistics", "model", "optimizer", "history", "scaler")}


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """A nest of dicts and lists as one dict; tensors as their bits."""
    if isinstance(value, torch.Tensor):
        return {name: (str(value.dtype), value.contiguous().numpy().tobytes())}
    if isinstance(value, dict | list | tuple):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return {key: one for number, part in pairs for key, one in flat(part, f"{name}/{number}").items()}
    return {name: repr(value)}


@pytest.mark.parametrize(("world", "way"), [(1, "nesterov"), (2, "nesterov"), (1, "lars"), (1, "lamb")])
def test_a_run_resumed_at_any_step_ends_with_the_same_bits(world: int, way: str, tmp_path: Path, in_group: Any) -> None:
    def work(group: ProcessGroup) -> tuple[list[int], dict[int, list[str]]]:
        trainer.MAX_STEPS_BETWEEN_SYNCS = 1  # look, and save, after each step
        whole = Run(tmp_path / f"whole-{group.rank}", group, **WAYS[way])
        expected = flat(whole.go())
        differ = {}
        for step in sorted(whole.kept):
            again = Run(tmp_path / f"{step}-{group.rank}", group, **WAYS[way])
            found = flat(again.go(whole.kept[step]))
            differ[step] = [name for name in expected.keys() | found.keys() if found.get(name) != expected.get(name)]
        return sorted(whole.kept), differ

    for steps, differ in in_group(world, work):
        assert steps == list(range(1, STEPS + 1))
        assert {step: names[:3] for step, names in differ.items() if names} == {}
