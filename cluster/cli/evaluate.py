"""`imgnet-cluster eval`: how good a saved network is by several crops and sizes, and where rectangles help."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cluster.errors import BadInput, ClusterError

from .options import Bar, output, print_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Said = Mapping[str, Any]


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
@output
def evaluate(what: str, crops: str, sizes: str | None, plot: Path | None, output: str, **options: Any) -> None:
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
        trainer_protocol.crops(crops)
        if sizes is not None:
            trainer_protocol.sizes(sizes)
    except ValueError as error:
        raise BadInput(str(error)) from error
    if plot and plot.suffix.lower() != ".png":
        raise BadInput(f"--plot {plot}: the name of a picture ends in .png")
    if plot and not plot.absolute().parent.is_dir():
        raise BadInput(f"--plot {plot}: there is no folder {plot.parent}")
    known = _known(what, options["data"])
    words = evaluation.command(
        **{**known, **{name: value for name, value in options.items() if value is not None}},
        crops=crops, sizes=sizes, shown=6 if plot else 0,
    )  # fmt: skip
    begin: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    seen: dict[str, Any] = {}
    for said in evaluation.examine(words):
        kind = said.pop("kind")
        if kind == "row":
            rows.append(said)
        elif kind == "begin":
            begin = said
        else:
            seen = said
    gains = evaluation.gains(rows, begin["buckets"])
    if output == "json":
        print_json({**begin, "rows": rows, "gains": gains, "plot": str(plot) if plot else None})
    else:
        _show(begin, rows, gains)
    if plot:  # last: the numbers took longer
        _draw(plot, begin, seen, several=len({one["size"] for one in rows}) > 1)
        if output != "json":
            click.echo(f"picture  {plot}")


def _draw(plot: Path, begin: "Said", seen: "Said", several: bool) -> None:
    from cluster.plots import crops as picture

    title = f"{begin['recipe']}, {begin['epoch']} epochs done, step {begin['step']}"
    try:
        picture.draw(plot, title, seen["size"], seen["images"], several)
    except OSError as error:
        raise ClusterError(f"--plot {plot}: {error.strerror or error}; the picture was not written") from error


def _known(what: str, data: str | None) -> dict[str, Any]:
    """What is known of a job, or of a file."""
    from cluster.jobs import evaluation, store

    path = Path(what)
    if path.is_file() or path.suffix == ".pt" or not re.fullmatch(r"(job-)?[0-9]+", what):
        if not path.is_file():
            raise BadInput(f"{what}: is neither a job nor a checkpoint; jobs: imgnet-cluster ls")
        return {"checkpoint": path}
    job = store.find(what)
    with Bar(f"bringing the newest checkpoint of {job.name}", lambda done: f"{done / 1e6:.0f} MB") as bar:
        found = evaluation.of_job(job, bar)
    if data:  # the copies are of other images then
        del found["copies"]
    return found


def _show(
    begin: "Mapping[str, Any]", rows: "Sequence[Mapping[str, Any]]", gains: "Sequence[Mapping[str, Any]]"
) -> None:
    from cluster.display import tables

    click.echo(
        f"{begin['recipe']}: {begin['model']}, {begin['epoch']} epochs done, step {begin['step']}; "
        f"{begin['images']} images of {begin['classes']} classes in {begin['data']}"
    )
    click.echo(f"{begin['checkpoint']}, {begin['device']}, {begin['precision']}, processes: {begin['procs']}")
    tables.table(
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
        named = [*((_ratios(part), part) for part in gain["buckets"]), ("all", {"images": begin["images"], **gain})]
        tables.table(
            ("w/h", "images", "top-1", "top-5"),
            [(name, part["images"], _points(part["top1"]), _points(part["top5"])) for name, part in named],
        )


def _ratios(bucket: "Mapping[str, Any]") -> str:
    """Such as 0.75-0.80; one number where both ends are shown as the same."""
    return "-".join(dict.fromkeys(f"{bucket[end]:.2f}" for end in ("from", "to")))


def _points(gain: float) -> str:
    return f"{round(gain, 1) + 0.0:+5.1f}"  # never -0.0


COMMANDS = (evaluate,)
