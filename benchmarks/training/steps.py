"""Compares our training loop with a bare loop on one batch in memory: the share of the step rate that is kept.

    .venv/bin/python benchmarks/training/steps.py                 # a minute on two quiet cores; generated images
    .venv/bin/python benchmarks/training/steps.py --images DIR    # DIR/train/<class>/*.JPEG and DIR/val/...

Our side is the real Trainer with its loader, gradient sums and logs, in short epochs of a few steps. The bare loop has
the same network, batch size, optimizer, loss and threads, and one batch of normalised floats. Both take turns in one
process, so whatever else the machine does slows both. The checkpoint of an epoch is not counted, because these epochs
last only a second. The loader prefetches two batches instead of many, so that it cannot work during the bare loop's
turn. On a CPU the loader shares the cores with the steps, which it does not where there is a GPU: with too small a
network this would measure the loader.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # as train/__main__.py does

import torch
from torch.nn.functional import cross_entropy

from benchmarks.measure import goal_verdict, median_with_range, prepare_images
from train.data.loading import loader
from train.data.loading.dataset import Dataset, open_dataset
from train.data.order.batch_sampler import DistributedBatchSampler
from train.distributed import process_group
from train.engine import trainer as engine_trainer
from train.engine.agent_channel import AgentChannel
from train.engine.options import parse_run_options
from train.models import registry
from train.optim import factory
from train.recipe import Data, Model, Phase, Recipe
from train.recipe.schedule import Epoch, Schedule
from train.tools import process

GOAL = 0.95
CASE_BY_SIZE = {128: (160, 8, 6), 224: (352, 4, 6)}  # size: (short side of the copy, batch, steps of a round)
MODEL, ROUNDS = "resnet50", 5
DRAWN_IMAGES, VALIDATED_IMAGES = 60, 4


class BareLoop:
    """Forward, backward and update on one batch in memory; it never waits for data."""

    def __init__(self, classes: int, batch: int, size: int) -> None:
        self.net = registry.build_model(Model(name=MODEL), classes, 0)
        self.net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.optimizer = factory.build_optimizer(self.net, _recipe(size, 1).optim)
        self.images = torch.randn(batch, 3, size, size).to(memory_format=torch.channels_last)
        self.labels = torch.arange(batch) % classes

    def run_steps(self, count: int) -> float:
        """Run `count` steps and return their seconds."""
        start = time.perf_counter()
        for _ in range(count):
            cross_entropy(self.net(self.images), self.labels, reduction="sum").div(len(self.labels)).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - start


class AlternatingTrainer(engine_trainer.Trainer):
    """Our trainer, which runs the bare loop before each of its epochs and times both.

    `epoch_seconds` has (bare loop, ours) for each epoch between the first phase and the last.
    """

    bare_loop: BareLoop
    epoch_seconds: list[tuple[float, float]]

    def run_epoch(self, epoch: Epoch, batches: Iterator[loader.Batch]) -> None:
        """Run the bare loop for as many steps, then the epoch."""
        self.saver.wait()  # otherwise the last epoch's checkpoint would be written during the bare loop's turn
        bare_seconds = self.bare_loop.run_steps(epoch.steps)
        start = time.perf_counter()
        super().run_epoch(epoch, batches)
        checkpoint_seconds = self.time_breakdown.epoch_times(epoch.number + 1).where["checkpoints"]
        our_seconds = time.perf_counter() - start - checkpoint_seconds
        if epoch.scheduled_phase.phase.epochs[0] and epoch.scheduled_phase is not self.schedule.scheduled_phases[-1]:
            self.epoch_seconds.append((bare_seconds, our_seconds))


def _recipe(size: int, images: int) -> Recipe:
    """Return a recipe with one epoch of warm-up, ROUNDS timed epochs, and one epoch with a validation."""
    copy, batch, _ = CASE_BY_SIZE[size]
    settings: dict[str, Any] = {"size": size, "copy": copy, "batch": batch, "lr": 0.01, "validate": "never"}
    epoch_ranges = pairwise((0, 1, 1 + ROUNDS, 2 + ROUNDS))
    return Recipe(
        name="steps",
        data=Data(name="any", root="any", train=images, val=1),
        model=Model(name=MODEL),
        gpus=1,
        phases=[Phase(epochs=epochs, **settings) for epochs in epoch_ranges],
    )


def measure_epochs(size: int, data: Path, copies: Path, output_folder: Path) -> list[tuple[float, float]]:
    """Return the seconds of the bare loop and of ours for each timed epoch."""
    _, batch, steps = CASE_BY_SIZE[size]
    full_dataset = open_dataset(_recipe(size, steps * batch), data, copies, log=lambda _: None)
    indexes = {
        key: index.take(_first_indexes(len(index), steps * batch if key[0] == "train" else VALIDATED_IMAGES))
        for key, index in full_dataset.indexes.items()
    }
    dataset = Dataset(indexes, full_dataset.recipe)
    schedule = Schedule(dataset.recipe, len(dataset.train), 1)
    options = parse_run_options(["steps", "--out", str(output_folder)])
    group = process_group.join_process_group()
    sampler = DistributedBatchSampler(schedule, dataset.indexes, 0, 0, 1)
    classes = dataset.train.classes
    trainer = AlternatingTrainer(options, dataset.recipe, group, sampler, classes, AgentChannel())
    trainer.bare_loop = BareLoop(len(classes), batch, size)
    trainer.epoch_seconds = []
    trainer.train(loader.BatchDecoder(dataset.indexes, 0), process_group.loader_process_count(group, options.workers))
    return trainer.epoch_seconds


def _first_indexes(available: int, wanted: int) -> Any:
    import numpy as np

    return np.arange(min(available, wanted))


def markdown_rows(images: Path | None = None) -> list[str]:
    """Measure, and return the table as lines of Markdown."""
    process.disable_malloc_trim()
    torch.set_num_threads(os.cpu_count() or 1)
    loader.PREFETCH_BYTES_PER_WORKER = 0.0
    source = "photographs" if images else "generated images"
    lines = [f"| {MODEL} | bare, ms per step | ours, ms per step | bare / ours | goal |", "|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as devnull:  # noqa: PTH123 - a device
        data, copies = prepare_images(Path(folder), images, DRAWN_IMAGES, 10)
        for size, (_, batch, steps) in CASE_BY_SIZE.items():
            original_stdout, sys.stdout = sys.stdout, devnull  # hides the trainer's log
            try:
                epoch_seconds = measure_epochs(size, data, copies, Path(folder) / str(size))
            finally:
                sys.stdout = original_stdout
            bare_ms = [1000 * bare / steps for bare, _ in epoch_seconds]
            our_ms = [1000 * ours / steps for _, ours in epoch_seconds]
            ratio = statistics.median(bare / ours for bare, ours in zip(bare_ms, our_ms, strict=True))
            lines.append(
                f"| {size} pixels, batch {batch}, {source} | {median_with_range(bare_ms)} | "
                f"{median_with_range(our_ms)} | {ratio:.3f} | {GOAL}: {goal_verdict(ratio, GOAL)} |"
            )
    return lines


def main() -> int:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description="Compare our training loop with a bare loop on data in memory.")
    parser.add_argument("--images", type=Path, metavar="DIR", help="photographs: DIR/train/<class>/*.JPEG, DIR/val/...")
    options = parser.parse_args()
    print("\n".join(markdown_rows(options.images and options.images.resolve())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
