"""The trainer's own command line, the same alone, under the agent and under torchrun."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from train.recipe.target import Target


@dataclass(frozen=True)
class TrainOptions:
    """Where and how much; how to train stands in the recipe."""

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
        """Where metrics and events are written: on a machine's own disk when the agent brings them to `out`."""
        return self.local or self.out


def fraction_type(text: str) -> float:
    """A number above 0, at most 1."""
    value = float(text)
    if not 0 < value <= 1:
        raise ValueError
    return value


def positive_int(text: str) -> int:
    """A whole number above 0."""
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def non_negative_int(text: str) -> int:
    """A whole number, 0 or more."""
    value = int(text)
    if value < 0:
        raise ValueError
    return value


def non_negative_seconds(text: str) -> float:
    """A number of seconds, 0 or more."""
    value = float(text)
    if not value >= 0:
        raise ValueError
    return value


def target_type(text: str) -> Target:
    """A target such as top5=93."""
    try:
        return Target.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse_train_options(argv: Sequence[str] | None = None) -> TrainOptions:
    """Read the command line; ends the program with code 2 when it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m train",
        description="Train a recipe with one process per GPU, or as many as --procs says.",
        epilog="Under torchrun: torchrun --nproc-per-node 8 -m train recipes/resnet50_18min.py --out DIR",
    )
    add = parser.add_argument
    add("recipe", help="recipes/x.py, recipes.x, or a resolved recipe as JSON")
    add("--only", metavar="NAME", help="which recipe, when the file yields several")
    add(
        "--data",
        type=Path,
        metavar="DIR",
        help="train/<class>/*.JPEG and val/<class>/*.JPEG (default: the recipe's)",
    )
    add(
        "--copies",
        type=Path,
        metavar="DIR",
        help="the prepared copies (default: the data folder's name with -sz)",
    )
    add(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="checkpoints, metrics, events and result.json go here",
    )
    add(
        "--attempt",
        type=positive_int,
        default=1,
        metavar="N",
        help="number of this attempt; its checkpoints are apart",
    )
    add(
        "--resume",
        default="auto",
        metavar="FILE",
        help="a checkpoint, 'none', or 'auto': the newest of the last attempt",
    )
    add(
        "--machines",
        type=positive_int,
        default=1,
        metavar="N",
        help="which table of the recipe (default: 1)",
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
        help="keep the recipe's global batch: accumulate gradients",
    )
    add(
        "--procs",
        type=positive_int,
        metavar="N",
        help="processes here (default: one per GPU, 1 without)",
    )
    add(
        "--max-steps",
        type=positive_int,
        metavar="N",
        help="so many steps in all, shared out over the phases",
    )
    add(
        "--scale",
        type=fraction_type,
        default=1.0,
        metavar="F",
        help="a rehearsal on this fraction of the images",
    )
    add(
        "--save-seconds",
        type=non_negative_seconds,
        default=60.0,
        metavar="S",
        help="a checkpoint so often, and after each epoch",
    )
    add(
        "--skip-bad",
        action="store_true",
        help="leave out files that are not images instead of ending",
    )
    add(
        "--workers",
        type=non_negative_int,
        metavar="N",
        help="loader processes for each trainer (default: by the processors)",
    )
    add(
        "--target",
        type=target_type,
        metavar="top5=93",
        help="end after the validation that reaches it: top5=93, top1=76.1",
    )
    add("--seed", type=non_negative_int, metavar="N", help="another seed than the recipe's")
    add("--local", type=Path, metavar="DIR", help="metrics and events go here (default: --out)")
    add(
        "--threads",
        type=positive_int,
        metavar="N",
        help="threads of each process on a CPU (default: the processors shared)",
    )
    add("--log-ids", action="store_true", help="write down which images each step used, in ids/ beside the metrics")
    add("--exact", action="store_true", help="the same bits on any number of processes, slowly: for tests")
    return TrainOptions(**vars(parser.parse_args(argv)))
