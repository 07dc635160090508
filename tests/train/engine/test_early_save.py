"""A checkpoint that the agent asks for, because its machine may be taken away soon."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.trainer_in_process import RandomImages, linear_classifier, make_phase, make_recipe, make_trainer


class SyncedTrainer:
    """A trainer that synchronizes after each step. `saved_steps` are those of its checkpoints."""

    def __init__(self, folder: Path) -> None:
        images = RandomImages(train=80)
        trainer: Any = make_trainer(folder, make_recipe(make_phase((0, 1), 8, 0.1)), images, linear_classifier())
        self.trainer = trainer
        self.saved_steps: list[int] = []
        self.trainer.saver = SimpleNamespace(
            is_writing=False, save=lambda step, state, urgent, write_first: self.saved_steps.append(step)
        )
        self.trainer.progress = SimpleNamespace(report_interval=lambda *_: None)
        (self.epoch,) = self.trainer.schedule.epochs
        self.batches = map(images.decode_batch, self.trainer.sampler.train_requests(self.epoch, 0))

    def run_steps(self, count: int) -> None:
        for _ in range(count):
            self.trainer.run_step(self.epoch, self.trainer.step, self.batches)
            self.trainer.step += 1
            self.trainer.sync_metrics(self.epoch)


def test_requested_checkpoint_is_written_once_behind_the_one_that_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IMGNET_WORK", str(tmp_path))
    run = SyncedTrainer(tmp_path / "out")
    run.run_steps(2)
    run.trainer.saver.is_writing = True
    (tmp_path / "save").touch()
    run.run_steps(2)
    assert run.saved_steps == []
    run.trainer.saver.is_writing = False
    run.run_steps(4)
    assert run.saved_steps == [5], "and training goes on"
