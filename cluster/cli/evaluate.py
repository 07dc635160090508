"""`imgnet-cluster eval`: how good a saved network is by several crops and sizes, and where rectangles help."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cluster.errors import BadInput, ClusterError

from .options import ProgressBar, output_option, print_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    EvaluationMessage = Mapping[str, Any]


@click.command("eval")
@click.argument("what", metavar="JOB|CHECKPOINT")
@click.option("--crops", default="center,rect", show_default=True, help="Of center, rect, five, tta, with commas.")
@click.option("--sizes", help="In pixels, with commas. [default: that of the recipe's last phase]")
@click.option("--data", metavar="DIR", help="Whose val/ to take. [default: the job's, or the recipe's]")
@click.option("--copies", metavar="DIR", help="Prepared copies. [default: the data folder's name with -sz]")
@click.option("--procs", type=click.IntRange(1), help="Processes. [default: one per GPU, else 1]")
@click.option("--workers", type=click.IntRange(0), help="Loader processes of each. [default: by the processors]")
@click.option(
    "--plot",
    type=click.Path(path_type=Path),
    metavar="PNG",
    help="Draw what each crop sees of some images, at the first size.",
)
@output_option
def evaluate(
    job_or_checkpoint: str, crops: str, sizes: str | None, plot: Path | None, output: str, **options: Any
) -> None:
    """Measure the newest network of JOB, or a CHECKPOINT, on all validation images, each counted once.

    \b
    center  the middle square, as in ordinary validation
    rect    the middle rectangle, as in rectangular validation: as long as the image,
            in steps of 32 pixels, but at most 1.5 times its short side
    five    the four corners and the middle, the mean of their softmax
    tta     these five and their mirror images (Krizhevsky et al. 2012)
    """
    from cluster.jobs import evaluation
    from train.evaluation import protocol as trainer_protocol

    try:
        trainer_protocol.parse_crops(crops)
        if sizes is not None:
            trainer_protocol.parse_sizes(sizes)
    except ValueError as error:
        raise BadInput(str(error)) from error
    if plot and plot.suffix.lower() != ".png":
        raise BadInput(f"--plot {plot}: the name of a picture ends in .png")
    if plot and not plot.absolute().parent.is_dir():
        raise BadInput(f"--plot {plot}: there is no folder {plot.parent}")
    known = _evaluation_options(job_or_checkpoint, options["data"])
    words = evaluation.evaluation_command(
        **{**known, **{name: value for name, value in options.items() if value is not None}},
        crops=crops, sizes=sizes, shown=6 if plot else 0,
    )  # fmt: skip
    begin: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    seen: dict[str, Any] = {}
    for said in evaluation.run_evaluation(words):
        kind = said.pop("kind")
        if kind == "row":
            rows.append(said)
        elif kind == "begin":
            begin = said
        else:
            seen = said
    gains = evaluation.rect_gains(rows, begin["buckets"])
    if output == "json":
        print_json({**begin, "rows": rows, "gains": gains, "plot": str(plot) if plot else None})
    else:
        _print_results(begin, rows, gains)
    if plot:  # last: the numbers took longer
        _draw_crops(plot, begin, seen, has_several_sizes=len({one["size"] for one in rows}) > 1)
        if output != "json":
            click.echo(f"picture  {plot}")


def _draw_crops(
    path: Path, run_info: "EvaluationMessage", sample_images: "EvaluationMessage", has_several_sizes: bool
) -> None:
    from cluster.plots import crops as picture

    title = f"{run_info['recipe']}, {run_info['epoch']} epochs done, step {run_info['step']}"
    try:
        picture.draw_crops(path, title, sample_images["size"], sample_images["images"], has_several_sizes)
    except OSError as error:
        raise ClusterError(f"--plot {path}: {error.strerror or error}; the picture was not written") from error


def _evaluation_options(job_or_checkpoint: str, data: str | None) -> dict[str, Any]:
    """What is known of a job, or of a file."""
    from cluster.jobs import evaluation, store

    path = Path(job_or_checkpoint)
    if path.is_file() or path.suffix == ".pt" or not re.fullmatch(r"(job-)?[0-9]+", job_or_checkpoint):
        if not path.is_file():
            raise BadInput(f"{job_or_checkpoint}: is neither a job nor a checkpoint; jobs: imgnet-cluster ls")
        return {"checkpoint": path}
    job = store.find(job_or_checkpoint)
    with ProgressBar(f"bringing the newest checkpoint of {job.name}", lambda done: f"{done / 1e6:.0f} MB") as bar:
        found = evaluation.job_evaluation_options(job, bar)
    if data:  # the copies are of other images then
        del found["copies"]
    return found


def _print_results(
    run_info: "Mapping[str, Any]", rows: "Sequence[Mapping[str, Any]]", gains: "Sequence[Mapping[str, Any]]"
) -> None:
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
                one["crop"], one["size"], one["views"], f"{one['top1']:.3f}", f"{one['top5']:.3f}",
                f"{one['loss']:.4f}", f"{one['seconds']:.2f}", f"copy of {one['copy']}" if one["copy"] else "full size",
            )
            for one in rows
        ],
    )  # fmt: skip
    for gain in gains:
        click.echo(f"\nrect at {gain['size']} above center, in points, by width / height:")
        named = [
            *((_format_ratio_range(part), part) for part in gain["buckets"]),
            ("all", {"images": run_info["images"], **gain}),
        ]
        tables.print_table(
            ("w/h", "images", "top-1", "top-5"),
            [
                (name, part["images"], _format_points(part["top1"]), _format_points(part["top5"]))
                for name, part in named
            ],
        )


def _format_ratio_range(bucket: "Mapping[str, Any]") -> str:
    """Such as 0.75-0.80; one number where both ends are shown as the same."""
    return "-".join(dict.fromkeys(f"{bucket[end]:.2f}" for end in ("from", "to")))


def _format_points(gain: float) -> str:
    return f"{round(gain, 1) + 0.0:+5.1f}"  # never -0.0


COMMANDS = (evaluate,)
