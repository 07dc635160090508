"""The trainer's options: on its command line, in a file that the agent writes, and in `imgnet-cluster launch`."""

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from train.tools.option_fields import OptionError, OptionSet, add_arguments, one_of, option_field

if TYPE_CHECKING:
    from train.recipe.schema import Recipe

KEEP_BEST_AND_LAST = "best,last"
TRACKERS = ("wandb", "mlflow")  # a class each in train/trackers/__main__.py
NO_TRACKER = "none"


def parse_keep(text: str) -> str:
    """Return which networks a run leaves: "best,last" or "last". Raises `ValueError` for any other text."""
    names = sorted({name.strip() for name in text.split(",")})
    if names not in (["best", "last"], ["last"]):
        raise ValueError(f"{text!r} is not one of best,last and last; the last network is always kept")
    return ",".join(names)


def parse_log(text: str) -> str:
    """Return the name of a tracker, "" for none. Raises `ValueError` for any other text."""
    if text not in (*TRACKERS, NO_TRACKER):
        raise ValueError(f"{text!r} is not one of {', '.join(TRACKERS)} and {NO_TRACKER}")
    return "" if text == NO_TRACKER else text


def parse_precision(text: str) -> str:
    """Return the name of a precision, "" for the recipe's. Raises `ValueError` for any other text."""
    from train.recipe.components import PRECISIONS  # here, because `imgnet-cluster --help` needs only the declarations

    return text and one_of(PRECISIONS)(text)


def parse_setting(text: str) -> str:
    """Return a text such as optim.weight_decay=1e-4. Raises `ValueError` for one without a field and a value."""
    field, _, value = text.partition("=")
    if not field or not value:
        raise ValueError(f"{text!r} is no FIELD=VALUE, such as optim.weight_decay=1e-4")
    return text


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
        help="Folder with train/<class>/*.JPEG and val/<class>/*.JPEG, or a packed set.",
        default_text="the recipe's",
    )
    copies: str = option_field(
        "",
        metavar="DIR",
        is_fixed=True,
        group="Data",
        help="Folder of the pre-resized copies.",
        default_text="the data folder's name with -sz",
    )
    workers: int | None = option_field(
        None,
        metavar="N",
        group="Data",
        minimum=0,
        help="Loader processes per training process.",
        default_text="from the number of CPU cores",
    )
    skip_bad: bool = option_field(
        False, is_fixed=True, group="Data", help="Leave out files that are not images, instead of failing."
    )
    max_bad: int | None = option_field(
        None,
        metavar="N",
        group="Data",
        minimum=0,
        help="End the run when more images than these turn out to be broken. Until then each is named, and replaced by "
        "the next of its class.",
        default_text="the recipe's, else 10",
    )
    val_fraction: float | None = option_field(
        None,
        is_fixed=True,
        metavar="FRACTION",
        group="Data",
        minimum=0,
        maximum=0.9,  # as `train.recipe.Data` has it
        help="For a data set without val/: hold out this fraction of each class in train/ for validation, such as 0.1.",
        default_text="as the recipe says, else 0",
    )
    log_ids: bool = option_field(
        False,
        is_fixed=True,
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
        is_fixed=True,
        group="Training",
        minimum=0,
        maximum=2**63 - 1,
        help="Replace the seed of the recipe.",
    )
    set: tuple[str, ...] = option_field(
        (),
        metavar="FIELD=VALUE",
        parse=parse_setting,
        is_fixed=True,
        group="Training",
        help="Replace a field of the recipe, such as optim.weight_decay=1e-4, model.name=resnet18 or phases.2.lr=0.1 "
        "(phases count from 1). Can be given several times.",
    )
    precision: str = option_field(
        "",
        metavar="auto|bf16|fp16|fp32",
        parse=parse_precision,
        group="Training",
        help="What GPUs compute in: bfloat16, float16 with a loss scale, or float32. 'auto' takes bfloat16 where the "
        "GPU has it.",
        default_text="the recipe's, else auto",
    )
    scale: float = option_field(
        1.0,
        metavar="FRACTION",
        is_fixed=True,
        group="Training",
        minimum=0,
        maximum=1,
        is_minimum_open=True,
        help="Train on this fraction of the images, for a rehearsal.",
    )
    max_steps: int | None = option_field(
        None,
        metavar="N",
        is_fixed=True,
        group="Training",
        minimum=1,
        help="Train at most this many steps, distributed over the phases.",
    )
    keep_batch: bool = option_field(
        False,
        is_fixed=True,
        group="Training",
        help="Keep the recipe's global batch on another number of GPUs, by gradient accumulation.",
    )
    exact: bool = option_field(
        False,
        is_fixed=True,
        group="Training",
        help="Compute the same bits on any number of processes. Slow; meant for tests.",
    )
    keep: str = option_field(
        KEEP_BEST_AND_LAST,
        metavar="best,last",
        parse=parse_keep,
        group="Training",
        help="Networks that a run leaves. 'best,last': those of the best and of the last epoch; 'last': only that "
        "of the last.",
        default_text="best,last",
    )
    log: str = option_field(
        "",
        metavar="wandb|mlflow",
        parse=parse_log,
        group="Training",
        help="Also log to Weights & Biases or to MLflow, through their library, if it is installed where the recipe "
        "is trained. Their environment variables hold there.",
    )
    save_seconds: float = option_field(
        30.0, metavar="SECONDS", group="Recovery", minimum=0, help="Seconds between checkpoints."
    )
    gpus: int | None = option_field(
        None, metavar="N", minimum=1, help="Compute the schedule for this many GPUs.", default_text="one per process"
    )
    threads: int | None = option_field(
        None,
        metavar="N",
        minimum=1,
        help="CPU threads per process when training without a GPU.",
        default_text="OMP_NUM_THREADS, or an equal share of the CPU cores",
    )
    extended_at: int = option_field(
        0, metavar="N", minimum=0, help="Epochs that were done when the run got more of them; patience starts anew."
    )

    def changed_recipe(self, recipe: "Recipe") -> "Recipe":
        """Return a recipe with what these options replace in it. Raises `ValueError` for a value out of range."""
        from train.recipe.settings import with_settings  # here, because `imgnet-cluster --help` needs none of it

        named = {"seed": self.seed, "precision": self.precision or None, "max_bad": self.max_bad}
        recipe = with_settings(recipe, self.set)
        recipe = replace(recipe, **{name: value for name, value in named.items() if value is not None})  # type: ignore[arg-type]
        if self.val_fraction is not None:
            recipe = replace(recipe, data=replace(recipe.data, val_fraction=self.val_fraction))
        return recipe


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
        help='Checkpoint to resume from; "none" starts from the beginning, "auto" takes the newest.',
        default_text="auto",
    )
    live_step: int | None = option_field(
        None,
        metavar="N",
        minimum=0,
        help="Step at which other processes of the run stand; the state comes from them. Set by the agent.",
    )
    machines: int = option_field(
        1, metavar="N", minimum=1, help="Use the recipe's table of phases for this many machines."
    )
    procs: int | None = option_field(
        None, metavar="N", minimum=1, help="Training processes to start here.", default_text="one per GPU, else 1"
    )
    local: Path | None = option_field(None, metavar="DIR", help="Folder for metrics and events.", default_text="--out")

    @property
    def keeps_best(self) -> bool:
        """Whether the weights of the best validation are kept."""
        return self.keep == KEEP_BEST_AND_LAST

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
    in_file: dict[str, object] = {}
    try:
        if path is not None:
            job_options = read_record(path, TrainOptions)
            if job_options is None:
                parser.error(f"--options {path}: there is no such file")
            in_file = {job_field.name: getattr(job_options, job_field.name) for job_field in fields(job_options)}
        return RunOptions(**{**in_file, **given})
    except OptionError as error:
        parser.error(str(error))
    except DamagedRecord as error:
        parser.error(f"--options: {error}")
