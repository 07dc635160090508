"""Our training loop beside a bare step loop on one batch in memory: how much of the machine's steps is left.

    .venv/bin/python benchmarks/steps.py                       # about a minute on two quiet cores, images drawn
    .venv/bin/python benchmarks/steps.py --images DIR          # photographs: DIR/train/<class>/*.JPEG and DIR/val/...

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

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # as train/__main__.py

import torch  # noqa: E402
from measure import met, spread  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402

from train.data.loading import loader  # noqa: E402
from train.data.loading.dataset import Dataset, open_dataset  # noqa: E402
from train.data.order.batch_sampler import Feed  # noqa: E402
from train.data.packing.synthetic import draw_set  # noqa: E402
from train.distributed import process_group
from train.engine import trainer as engine_trainer
from train.engine.agent_channel import Report  # noqa: E402
from train.engine.options import parse  # noqa: E402
from train.models import registry
from train.optim import factory
from train.recipe import Data, Model, Phase, Recipe  # noqa: E402
from train.recipe.schedule import Epoch, Schedule  # noqa: E402
from train.tools import process

COMMAND = str(Path(sys.executable).parent / "imgnet-cluster")
GOAL = 0.95
SIZES = {128: (160, 8, 6), 224: (352, 4, 6)}  # size: copy, batch, steps of a round
MODEL, ROUNDS = "resnet50", 5
DRAWN, VALIDATED = 60, 4  # images


class Bare:
    """The loop that has nothing to wait for."""

    def __init__(self, model: str, classes: int, batch: int, size: int) -> None:
        self.net = registry.build(Model(name=model), classes, 0)
        self.net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.optimizer = factory.build(self.net, _recipe(model, size, 1).optim)
        self.images = torch.randn(batch, 3, size, size).to(memory_format=torch.channels_last)
        self.labels = torch.arange(batch) % classes

    def steps(self, count: int) -> float:
        """Seconds of so many steps."""
        start = time.perf_counter()
        for _ in range(count):
            cross_entropy(self.net(self.images), self.labels, reduction="sum").div(len(self.labels)).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - start


class InTurn(engine_trainer.Trainer):
    """Our trainer, which lets the bare loop go before each of its epochs and takes the time of both."""

    bare: Bare
    pairs: list[tuple[float, float]]

    def one_epoch(self, epoch: Epoch, batches: Iterator[loader.Batch]) -> None:
        """See the class."""
        self.saver.wait()  # else the last epoch's file would be written in the other's time
        theirs = self.bare.steps(epoch.steps)
        start = time.perf_counter()
        super().one_epoch(epoch, batches)
        own = time.perf_counter() - start - self.times.row(epoch.number + 1)["where"]["checkpoints"]
        if epoch.row.phase.epochs[0] and epoch.row is not self.schedule.rows[-1]:
            self.pairs.append((theirs, own))


def _recipe(model: str, size: int, images: int) -> Recipe:
    """An epoch to get warm, the rounds, an epoch that is validated."""
    copy, batch, _ = SIZES[size]
    row: dict[str, Any] = {"size": size, "copy": copy, "batch": batch, "lr": 0.01, "validate": "never"}
    edges = pairwise((0, 1, 1 + ROUNDS, 2 + ROUNDS))
    rows = [Phase(epochs=pair, **row) for pair in edges]
    return Recipe(
        name="steps", data=Data(name="any", root="any", train=images, val=1), model=Model(name=model), gpus=1,
        phases=rows,
    )  # fmt: skip


def prepared(place: Path, images: Path | None) -> tuple[Path, Path]:
    """Return the folders of the images, drawn if there are none, and of their copies of 160 and 352 pixels."""
    data = images or place / "drawn"
    if images is None:
        draw_set(data, train=DRAWN, val=10)
    words = [COMMAND, "data", "resize", str(data), str(place / "copies"), "--sizes", "160,352"]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return data, place / "copies"


def pairs(model: str, size: int, data: Path, copies: Path, out: Path) -> list[tuple[float, float]]:
    """Seconds of the bare loop and of ours, round by round."""
    _, batch, steps = SIZES[size]
    made = _recipe(model, size, steps * batch)
    found = open_dataset(made, data, copies, say=lambda _: None)
    part = {
        key: one.take(_first(len(one), steps * batch if key[0] == "train" else VALIDATED))
        for key, one in found.indexes.items()
    }
    found = Dataset(part, found.recipe)
    schedule = Schedule(found.recipe, len(found.train), 1)
    options, group = parse(["steps", "--out", str(out)]), process_group.join()
    feed = Feed(schedule, found.indexes, 0, 0, 1)
    trainer = InTurn(options, found.recipe, group, feed, len(found.train.classes), Report())
    trainer.bare, trainer.pairs = Bare(model, len(found.train.classes), batch, size), []
    trainer.train(loader.Images(found.indexes, 0), process_group.workers(group, options.workers))
    return trainer.pairs


def _first(have: int, want: int) -> Any:
    import numpy as np

    return np.arange(min(have, want))


def rows(images: Path | None = None, model: str = MODEL) -> list[str]:
    """Measure and return the rows of a table."""
    process.keep_memory()
    torch.set_num_threads(os.cpu_count() or 1)
    loader.AHEAD_BYTES = 0.0
    kind = "photographs" if images else "drawn images"
    lines = [f"| {model} | bare, ms a step | ours, ms a step | bare / ours | goal |", "|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nothing:  # noqa: PTH123
        data, copies = prepared(Path(folder), images)
        for size, (_, batch, steps) in SIZES.items():
            shown, sys.stdout = sys.stdout, nothing
            try:
                found = pairs(model, size, data, copies, Path(folder) / str(size))
            finally:
                sys.stdout = shown
            bare, ours = ([1000 * pair[which] / steps for pair in found] for which in (0, 1))
            ratio = statistics.median(one / other for one, other in zip(bare, ours, strict=True))
            lines.append(
                f"| {size} pixels, batch {batch}, {kind} | {spread(bare)} | {spread(ours)} | {ratio:.3f} | "
                f"{GOAL}: {met(ratio, GOAL)} |"
            )
    return lines


def main() -> int:
    """Print the rows."""
    parser = argparse.ArgumentParser(description="Our training loop beside a bare step loop on data in memory.")
    parser.add_argument("--images", type=Path, metavar="DIR", help="photographs: DIR/train/<class>/*.JPEG, DIR/val/...")
    parser.add_argument("--model", default=MODEL, help=f"which net (default: {MODEL})")
    asked = parser.parse_args()
    print("\n".join(rows(asked.images and asked.images.resolve(), asked.model)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
