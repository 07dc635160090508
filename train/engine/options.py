"""The trainer's command-line options: the same by hand, under the agent and under torchrun."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from train.recipe.target import Target


@dataclass(frozen=True)
class TrainOptions:
    """Where a run reads and writes, and how much of it is done. How to train is in the recipe."""

    recipe: str
    only: str | None
    data: Path | None
    copies: Path | None
    out: Path
    attempt: int
    resume: str
    machines: int
    gpus: int | None
    keep_batch: bool
    procs: int | None
    max_steps: int | None
    scale: float
    save_seconds: float
    skip_bad: bool
    workers: int | None
    seed: int | None
    local: Path | None
    threads: int | None
    log_ids: bool
    exact: bool
    target: Target | None = None

    @property
    def log_dir(self) -> Path:
        """Folder of metrics and events: on the machine's own disk when the agent copies them to `out`."""
        return self.local or self.out


def fraction_type(text: str) -> float:
    """Parse a number above 0 and at most 1. Raises `ValueError`, which argparse reports."""
    value = float(text)
    if not 0 < value <= 1:
        raise ValueError
    return value


def positive_int(text: str) -> int:
    """Parse an integer of at least 1. Raises `ValueError`, which argparse reports."""
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def non_negative_int(text: str) -> int:
    """Parse an integer of at least 0. Raises `ValueError`, which argparse reports."""
    value = int(text)
    if value < 0:
        raise ValueError
    return value


def non_negative_seconds(text: str) -> float:
    """Parse a number of seconds of at least 0. Raises `ValueError`, which argparse reports."""
    value = float(text)
    if not value >= 0:
        raise ValueError
    return value


def target_type(text: str) -> Target:
    """Parse a target such as top5=93. Raises `argparse.ArgumentTypeError` with the reason."""
    try:
        return Target.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse_train_options(argv: Sequence[str] | None = None) -> TrainOptions:
    """Parse the command line. Exits with code 2 and a usage message when it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m train",
        description="Train a recipe on this machine, with one process per GPU or with --procs processes.",
        epilog="Under torchrun: torchrun --nproc-per-node 8 -m train recipes/resnet50_18min.py --out DIR",
    )
    add = parser.add_argument
    add("recipe", help="recipe file (recipes/x.py), module (recipes.x), or a resolved recipe as JSON")
    add("--only", metavar="NAME", help="name of the recipe to train, when the file has several")
    add(
        "--data",
        type=Path,
        metavar="DIR",
        help="data set with train/<class>/*.JPEG and val/<class>/*.JPEG, or a packed one (default: the recipe's)",
    )
    add(
        "--copies",
        type=Path,
        metavar="DIR",
        help="folder of the resized copies (default: the data folder's name with -sz appended)",
    )
    add(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder for checkpoints, metrics, events and result.json",
    )
    add(
        "--attempt",
        type=positive_int,
        default=1,
        metavar="N",
        help="number of this attempt; each attempt has its own folder of checkpoints (default: 1)",
    )
    add(
        "--resume",
        default="auto",
        metavar="FILE",
        help="checkpoint to resume from; 'none' starts from the beginning, 'auto' takes the newest (default: auto)",
    )
    add(
        "--machines",
        type=positive_int,
        default=1,
        metavar="N",
        help="use the recipe's table of phases for N machines (default: 1)",
    )
    add(
        "--gpus",
        type=positive_int,
        metavar="N",
        help="compute the schedule for N GPUs (default: one per process)",
    )
    add(
        "--keep-batch",
        action="store_true",
        help="keep the recipe's global batch on any number of GPUs, by gradient accumulation",
    )
    add(
        "--procs",
        type=positive_int,
        metavar="N",
        help="number of trainer processes to start here (default: one per GPU, or 1 without a GPU)",
    )
    add(
        "--max-steps",
        type=positive_int,
        metavar="N",
        help="train only N steps in all, divided among the phases",
    )
    add(
        "--scale",
        type=fraction_type,
        default=1.0,
        metavar="F",
        help="rehearse on this fraction of the images, above 0 and at most 1 (default: 1)",
    )
    add(
        "--save-seconds",
        type=non_negative_seconds,
        default=60.0,
        metavar="S",
        help="seconds between checkpoints; each epoch ends with one too (default: 60)",
    )
    add(
        "--skip-bad",
        action="store_true",
        help="skip files that are not valid images, instead of stopping at the first",
    )
    add(
        "--workers",
        type=non_negative_int,
        metavar="N",
        help="loader processes per trainer process (default: by the number of processors)",
    )
    add(
        "--target",
        type=target_type,
        metavar="top5=93",
        help="stop after the first validation that reaches this accuracy: top5=93 or top1=76.1",
    )
    add("--seed", type=non_negative_int, metavar="N", help="random seed (default: the recipe's)")
    add("--local", type=Path, metavar="DIR", help="folder for metrics and events (default: --out)")
    add(
        "--threads",
        type=positive_int,
        metavar="N",
        help="CPU threads per process when training without a GPU (default: an equal share of the processors)",
    )
    add("--log-ids", action="store_true", help="record which images each step used, in ids/ beside the metrics")
    add(
        "--exact",
        action="store_true",
        help="compute the same bits on any number of processes; slow, meant for tests",
    )
    return TrainOptions(**vars(parser.parse_args(argv)))
