"""Our training loop beside a bare step loop on one batch in memory: how much of the machine's steps is left.

    .venv/bin/python benchmarks/training/steps.py                       # about a minute on two quiet cores, images drawn
    .venv/bin/python benchmarks/training/steps.py --images DIR          # photographs: DIR/train/<class>/*.JPEG and DIR/val/...

Ours is the real Trainer with the real loader, sums and logs, one epoch of a few steps after the other; the bare loop
has the same net, batch, optimizer, loss and threads, and one batch of normalised floats. They take turns in one
process, so whatever else the machine does slows both. An epoch's checkpoint is left out: these epochs last a second.
The loader makes two batches ahead instead of many, so that it cannot work in the other's time. It shares the processors
with the steps, as it does not where there is a GPU: beside too small a net it would be the loader that is measured.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # as train/__main__.py

import torch
from torch.nn.functional import cross_entropy

from benchmarks.measure import goal_verdict, median_with_range
from train.data.loading import loader
from train.data.loading.dataset import Dataset, open_dataset
from train.data.order.batch_sampler import DistributedBatchSampler
from train.data.packing.synthetic import draw_sample_set
from train.distributed import process_group
from train.engine import trainer as engine_trainer
from train.engine.agent_channel import AgentChannel
from train.engine.options import parse_train_options
from train.models import registry
from train.optim import factory
from train.recipe import Data, Model, Phase, Recipe
from train.recipe.schedule import Epoch, Schedule
from train.tools import process

COMMAND = str(Path(sys.executable).parent / "imgnet-cluster")
GOAL = 0.95
CASE_BY_SIZE = {128: (160, 8, 6), 224: (352, 4, 6)}  # size: copy, batch, steps of a round
MODEL, ROUNDS = "resnet50", 5
DRAWN_IMAGES, VALIDATED_IMAGES = 60, 4  # images


class BareLoop:
    """The loop that has nothing to wait for."""

    def __init__(self, model: str, classes: int, batch: int, size: int) -> None:
        self.net = registry.build_model(Model(name=model), classes, 0)
        self.net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.optimizer = factory.build_optimizer(self.net, _recipe(model, size, 1).optim)
        self.images = torch.randn(batch, 3, size, size).to(memory_format=torch.channels_last)
        self.labels = torch.arange(batch) % classes

    def run_steps(self, count: int) -> float:
        """Seconds of so many steps."""
        start = time.perf_counter()
        for _ in range(count):
            cross_entropy(self.net(self.images), self.labels, reduction="sum").div(len(self.labels)).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - start


class AlternatingTrainer(engine_trainer.Trainer):
    """Our trainer, which lets the bare loop go before each of its epochs and takes the time of both."""

    bare_loop: BareLoop
    epoch_seconds: list[tuple[float, float]]

    def one_epoch(self, epoch: Epoch, batches: Iterator[loader.Batch]) -> None:
        """See the class."""
        self.saver.wait()  # else the last epoch's file would be written in the other's time
        theirs = self.bare_loop.run_steps(epoch.steps)
        start = time.perf_counter()
        super().run_epoch(epoch, batches)
        own = time.perf_counter() - start - self.time_breakdown.epoch_times(epoch.number + 1)["where"]["checkpoints"]
        if epoch.scheduled_phase.phase.epochs[0] and epoch.scheduled_phase is not self.schedule.scheduled_phases[-1]:
            self.epoch_seconds.append((theirs, own))


def _recipe(model: str, size: int, images: int) -> Recipe:
    """An epoch to get warm, the rounds, an epoch that is validated."""
    copy, batch, _ = CASE_BY_SIZE[size]
    row: dict[str, Any] = {"size": size, "copy": copy, "batch": batch, "lr": 0.01, "validate": "never"}
    edges = pairwise((0, 1, 1 + ROUNDS, 2 + ROUNDS))
    rows = [Phase(epochs=pair, **row) for pair in edges]
    return Recipe(
        name="steps", data=Data(name="any", root="any", train=images, val=1), model=Model(name=model), gpus=1,
        phases=rows,
    )  # fmt: skip


def prepare_images(work_folder: Path, images: Path | None) -> tuple[Path, Path]:
    """Return the folders of the images, drawn if there are none, and of their copies of 160 and 352 pixels."""
    data = images or work_folder / "drawn"
    if images is None:
        draw_sample_set(data, train=DRAWN_IMAGES, val=10)
    words = [COMMAND, "data", "resize", str(data), str(work_folder / "copies"), "--sizes", "160,352"]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return data, work_folder / "copies"


def measure_epochs(model: str, size: int, data: Path, copies: Path, output_folder: Path) -> list[tuple[float, float]]:
    """Seconds of the bare loop and of ours, round by round."""
    _, batch, steps = CASE_BY_SIZE[size]
    made = _recipe(model, size, steps * batch)
    found = open_dataset(made, data, copies, log=lambda _: None)
    part = {
        key: one.take(_first_indexes(len(one), steps * batch if key[0] == "train" else VALIDATED_IMAGES))
        for key, one in found.indexes.items()
    }
    found = Dataset(part, found.recipe)
    schedule = Schedule(found.recipe, len(found.train), 1)
    options, group = parse_train_options(["steps", "--out", str(output_folder)]), process_group.join_process_group()
    feed = DistributedBatchSampler(schedule, found.indexes, 0, 0, 1)
    trainer = AlternatingTrainer(options, found.recipe, group, feed, len(found.train.classes), AgentChannel())
    trainer.bare_loop, trainer.epoch_seconds = BareLoop(model, len(found.train.classes), batch, size), []
    trainer.train(loader.BatchDecoder(found.indexes, 0), process_group.loader_process_count(group, options.workers))
    return trainer.epoch_seconds


def _first_indexes(available: int, wanted: int) -> Any:
    import numpy as np

    return np.arange(min(available, wanted))


def markdown_rows(images: Path | None = None, model: str = MODEL) -> list[str]:
    """Measure and return the rows of a table."""
    process.disable_malloc_trim()
    torch.set_num_threads(os.cpu_count() or 1)
    loader.PREFETCH_BYTES_PER_WORKER = 0.0
    kind = "photographs" if images else "drawn images"
    lines = [f"| {model} | bare, ms a step | ours, ms a step | bare / ours | goal |", "|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nothing:  # noqa: PTH123
        data, copies = prepare_images(Path(folder), images)
        for size, (_, batch, steps) in CASE_BY_SIZE.items():
            shown, sys.stdout = sys.stdout, nothing
            try:
                found = measure_epochs(model, size, data, copies, Path(folder) / str(size))
            finally:
                sys.stdout = shown
            bare, ours = ([1000 * pair[which] / steps for pair in found] for which in (0, 1))
            ratio = statistics.median(one / other for one, other in zip(bare, ours, strict=True))
            lines.append(
                f"| {size} pixels, batch {batch}, {kind} | {median_with_range(bare)} | {median_with_range(ours)} | {ratio:.3f} | "
                f"{GOAL}: {goal_verdict(ratio, GOAL)} |"
            )
    return lines


def main() -> int:
    """Print the rows."""
    parser = argparse.ArgumentParser(description="Our training loop beside a bare step loop on data in memory.")
    parser.add_argument("--images", type=Path, metavar="DIR", help="photographs: DIR/train/<class>/*.JPEG, DIR/val/...")
    parser.add_argument("--model", default=MODEL, help=f"which net (default: {MODEL})")
    asked = parser.parse_args()
    print("\n".join(markdown_rows(asked.images and asked.images.resolve(), asked.model)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
