"""The trainer's options: on its command line, in a file that the agent writes, and in `imgnet-cluster launch`."""

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path

from train.tools.option_fields import OptionSet, add_arguments, option_field


def parse_target(text: str) -> str:
    """Return the text of a target in its shortest form, such as top5=93. Raises `ValueError` for any other text."""
    from train.recipe.target import Target  # here, because `imgnet-cluster --help` needs only the declarations

    return str(Target.parse(text))


@dataclass(frozen=True, kw_only=True)
class TrainOptions(OptionSet):
    """Options of the trainers, beside the recipe. Those with a group are also options of `imgnet-cluster launch`."""

    data: str = option_field(
        "",
        metavar="DIR",
        help="Folder with train/<class>/*.JPEG and val/<class>/*.JPEG, or a packed set.  [default: the recipe's]",
    )
    copies: str = option_field(
        "",
        metavar="DIR",
        group="Data",
        help="Folder of the resized copies.  [default: the data folder's name with -sz]",
    )
    workers: int | None = option_field(
        None,
        metavar="N",
        group="Data",
        minimum=0,
        help="Loader processes per training process.  [default: from the number of CPU cores]",
    )
    skip_bad: bool = option_field(False, group="Data", help="Leave out files that are not images, instead of failing.")
    log_ids: bool = option_field(
        False,
        group="Data",
        help="Log the IDs of the images of each step, to check that each is used once per epoch.",
    )
    target: str = option_field(
        "",
        metavar="top5=93",
        parse=parse_target,
        group="Training",
        help="Stop after the first validation that reaches this accuracy in percent, such as top5=93 or top1=76.1.",
    )
    seed: int | None = option_field(
        None,
        metavar="N",
        group="Training",
        minimum=0,
        maximum=2**63 - 1,
        help="Replace the seed of the recipe.",
    )
    scale: float = option_field(
        1.0,
        metavar="FRACTION",
        group="Training",
        minimum=0,
        maximum=1,
        is_minimum_open=True,
        help="Train on this fraction of the images, for a rehearsal.",
    )
    max_steps: int | None = option_field(
        None,
        metavar="N",
        group="Training",
        minimum=1,
        help="Train at most this many steps, distributed over the phases.",
    )
    keep_batch: bool = option_field(
        False,
        group="Training",
        help="Keep the recipe's global batch on another number of GPUs, by gradient accumulation.",
    )
    exact: bool = option_field(
        False,
        group="Training",
        help="Compute the same bits on any number of processes. Slow; meant for tests.",
    )
    save_seconds: float = option_field(
        30.0,
        metavar="SECONDS",
        group="Recovery",
        minimum=0,
        help="Seconds between checkpoints.",
    )
    gpus: int | None = option_field(
        None, metavar="N", minimum=1, help="Compute the schedule for this many GPUs.  [default: one per process]"
    )
    threads: int | None = option_field(
        None,
        metavar="N",
        minimum=1,
        help="CPU threads per process when training without a GPU.  [default: an equal share of the CPU cores]",
    )


@dataclass(frozen=True, kw_only=True)
class RunOptions(TrainOptions):
    """The options of one run of the trainer: also what it trains, and where it reads and writes."""

    recipe: str = option_field(
        MISSING, "recipe", help="Recipe file (recipes/x.py), module (recipes.x), or a resolved recipe as JSON."
    )
    only: str = option_field("", metavar="NAME", help="Recipe to train, if the file has several.")
    out: Path = option_field(MISSING, metavar="DIR", help="Folder for checkpoints, metrics, events and result.json.")
    attempt: int = option_field(
        1, metavar="N", minimum=1, help="Number of this attempt; each has its own folder of checkpoints."
    )
    resume: str = option_field(
        "auto",
        metavar="FILE",
        help='Checkpoint to resume from; "none" starts from the beginning, "auto" takes the newest.  [default: auto]',
    )
    machines: int = option_field(
        1, metavar="N", minimum=1, help="Use the recipe's table of phases for this many machines."
    )
    procs: int | None = option_field(
        None,
        metavar="N",
        minimum=1,
        help="Training processes to start here.  [default: one per GPU, else 1]",
    )
    local: Path | None = option_field(None, metavar="DIR", help="Folder for metrics and events.  [default: --out]")

    @property
    def log_dir(self) -> Path:
        """Folder of metrics and events: on the machine's own disk when the agent copies them to `out`."""
        return self.local or self.out


def parse_run_options(argv: Sequence[str] | None = None) -> RunOptions:
    """Parse the command line. Exits with code 2 and a usage message when it is wrong."""
    import argparse  # here, because `imgnet-cluster --help` needs only the declarations above

    from train.tools.records import DamagedRecord, read_record

    parser = argparse.ArgumentParser(
        prog="python -m train",
        description="Train a recipe on this machine, with one process per GPU or with --procs processes.",
        epilog="Under torchrun: torchrun --nproc-per-node 8 -m train recipes/resnet50_18min.py --out DIR",
        argument_default=argparse.SUPPRESS,
    )
    add_arguments(parser, RunOptions)
    parser.add_argument(
        "--options",
        type=Path,
        metavar="FILE",
        help="JSON file with options; those of the command line take precedence.",
    )
    given = vars(parser.parse_args(argv))
    path: Path | None = given.pop("options", None)
    if path is None:
        return RunOptions(**given)
    try:
        job_options = read_record(path, TrainOptions)
    except DamagedRecord as error:
        parser.error(f"--options: {error}")
    if job_options is None:
        parser.error(f"--options {path}: there is no such file")
    in_file = {job_field.name: getattr(job_options, job_field.name) for job_field in fields(job_options)}
    return RunOptions(**{**in_file, **given})
