"""`imgnet-cluster eval`: accuracy of a trained network by crop and image size, and where rectangular crops help."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cluster.display.progress_bar import ProgressBar
from cluster.errors import BadInput, ClusterError

from .options import (
    GroupedCommand,
    GroupedOption,
    dataclass_options,
    deferred_options,
    grouped_option,
    output_option,
    print_json,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cluster.jobs.evaluation import RectGain
    from train.evaluation.protocol import (
        AccuracyPercents,
        EvaluationBegin,
        EvaluationExamples,
        EvaluationRow,
        RatioBucket,
    )

PLOTTED_IMAGES = 6  # images that --plot shows


def copies_option() -> list[GroupedOption]:
    """Return the option `--copies`, which a launch has too."""
    from train.engine.options import TrainOptions

    return dataclass_options(TrainOptions, "copies")


@click.command("eval", cls=GroupedCommand)
@click.argument("job_or_checkpoint", metavar="JOB|CHECKPOINT")
@grouped_option(
    "Machines",
    "--procs",
    metavar="N",
    type=click.IntRange(1),
    help="Number of processes on this computer.  [default: one per GPU, else 1]",
)
@grouped_option(
    "Data",
    "--crops",
    default="center,rect",
    show_default=True,
    help="Crops to evaluate, comma-separated: center, rect, five, tta.",
)
@grouped_option(
    "Data",
    "--sizes",
    help="Image sizes in pixels, comma-separated.  [default: the size of the recipe's last phase]",
)
@grouped_option(
    "Data",
    "--data",
    metavar="DIR",
    help="Data set whose val/ split is used.  [default: the data set of the job or of the recipe]",
)
@deferred_options(copies_option)
@grouped_option(
    "Data",
    "--workers",
    metavar="N",
    type=click.IntRange(0),
    help="Loader processes per process.  [default: from the number of CPU cores]",
)
@grouped_option(
    "Output",
    "--plot",
    type=click.Path(path_type=Path),
    metavar="PNG",
    help="Draw what each crop shows of some images, at the first of the sizes.",
)
@output_option
def evaluate(
    job_or_checkpoint: str, crops: str, sizes: str | None, plot: Path | None, output: str, **options: str | int | None
) -> None:
    """Measure the validation accuracy of a trained network.

    The network is the newest checkpoint of JOB, or the file CHECKPOINT. All validation images are used, each once.

    \b
    center  the middle square, as in ordinary validation
    rect    the middle rectangle, as in rectangular validation: as long as the image,
            in steps of 32 pixels, but at most 1.5 times its short side
    five    the four corners and the middle, the mean of their softmax
    tta     these five and their mirror images (Krizhevsky et al. 2012)
    """
    from cluster.jobs import evaluation
    from train.evaluation import protocol

    try:
        protocol.parse_crops(crops)
        if sizes is not None:
            protocol.parse_sizes(sizes)
    except ValueError as error:
        raise BadInput(str(error)) from error
    if plot and plot.suffix.lower() != ".png":
        raise BadInput(f"--plot {plot}: the name of the picture must be one that ends in .png")
    if plot and not plot.absolute().parent.is_dir():
        raise BadInput(f"--plot {plot}: there is no folder {plot.parent}")
    evaluation_options = {
        **_evaluation_options(job_or_checkpoint, has_own_data=bool(options["data"])),
        **{name: value for name, value in options.items() if value is not None},
        "crops": crops,
        "sizes": sizes,
        "shown": PLOTTED_IMAGES if plot else 0,
    }
    rows: list[EvaluationRow] = []
    for message in evaluation.run_evaluation(evaluation.evaluation_command(evaluation_options)):
        if message["kind"] == "row":
            rows.append(message)
        elif message["kind"] == "begin":
            run_info = message
        else:
            examples = message
    gains = evaluation.rect_gains(rows, run_info["buckets"])
    if output == "json":
        rows_json = [_without_kind(row) for row in rows]
        plot_json = str(plot) if plot else None
        print_json({**_without_kind(run_info), "rows": rows_json, "gains": gains, "plot": plot_json})
    else:
        _print_results(run_info, rows, gains)
    if plot:  # after the numbers: they took longer, and must not be lost when the picture cannot be written
        _draw_crops(plot, run_info, examples, has_several_sizes=len({row["size"] for row in rows}) > 1)
        if output != "json":
            click.echo(f"picture: {plot}")


def _without_kind(message: "Mapping[str, object]") -> dict[str, object]:
    return {name: value for name, value in message.items() if name != "kind"}


def _draw_crops(
    path: Path, run_info: "EvaluationBegin", examples: "EvaluationExamples", has_several_sizes: bool
) -> None:
    from cluster.plots import crops

    title = f"{run_info['recipe']}, {run_info['epoch']} epochs done, step {run_info['step']}"
    try:
        crops.draw_crops(path, title, examples["size"], examples["images"], has_several_sizes)
    except OSError as error:
        raise ClusterError(f"--plot {path}: {error.strerror or error}; the picture was not written") from error


def _evaluation_options(job_or_checkpoint: str, has_own_data: bool) -> dict[str, object]:
    """Return the options that follow from a job, or from a checkpoint file. Raises `ClusterError`."""
    from cluster.jobs import evaluation, store

    path = Path(job_or_checkpoint)
    if path.is_file() or path.suffix == ".pt" or not re.fullmatch(r"(job-)?[0-9]+", job_or_checkpoint):
        if not path.is_file():
            raise BadInput(
                f"{job_or_checkpoint}: is neither a job nor a checkpoint; to list the jobs: imgnet-cluster ls"
            )
        return {"checkpoint": path}
    job = store.find(job_or_checkpoint)
    with ProgressBar(
        f"downloading the newest checkpoint of {job.name}", lambda done: f"{done / 1e6:.0f} MB"
    ) as progress:
        options = evaluation.job_evaluation_options(job, progress)
    if has_own_data:  # the job's copies belong to the job's own data set
        del options["copies"]
    return options


def _print_results(run_info: "EvaluationBegin", rows: "Sequence[EvaluationRow]", gains: "Sequence[RectGain]") -> None:
    from cluster.display import tables

    click.echo(
        f"{run_info['recipe']}: {run_info['model']}, {run_info['epoch']} epochs done, step {run_info['step']}; "
        f"{run_info['images']} images of {run_info['classes']} classes in {run_info['data']}"
    )
    click.echo(
        f"{run_info['checkpoint']}, {run_info['device']}, {run_info['precision']}, processes: {run_info['procs']}"
    )
    tables.print_table(
        ("crop", "size", "views", "top-1", "top-5", "loss", "seconds", "read from"),
        [
            (
                row["crop"],
                row["size"],
                row["views"],
                f"{row['top1']:.3f}",
                f"{row['top5']:.3f}",
                f"{row['loss']:.4f}",
                f"{row['seconds']:.2f}",
                f"copy of {row['copy']}" if row["copy"] else "full size",
            )
            for row in rows
        ],
    )
    for gain in gains:
        click.echo(f"\nrect at {gain['size']} above center, in points, by width / height:")
        tables.print_table(
            ("w/h", "images", "top-1", "top-5"),
            [
                *((_format_ratio_range(bucket), bucket["images"], *_format_gain(bucket)) for bucket in gain["buckets"]),
                ("all", run_info["images"], *_format_gain(gain)),
            ],
        )


def _format_ratio_range(bucket: "RatioBucket") -> str:
    """Return a range of aspect ratios such as 0.75-0.80, or one number when both ends are rounded to the same."""
    return "-".join(dict.fromkeys((f"{bucket['from']:.2f}", f"{bucket['to']:.2f}")))


def _format_gain(gain: "AccuracyPercents") -> tuple[str, str]:
    """Return percentage points with a sign and one decimal. Adding 0.0 turns -0.0 into 0.0."""
    return f"{round(gain['top1'], 1) + 0.0:+5.1f}", f"{round(gain['top5'], 1) + 0.0:+5.1f}"


COMMANDS = (evaluate,)
