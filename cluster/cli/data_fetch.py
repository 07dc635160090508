"""`imgnet-cluster data fetch` and `data put`: copy packed data sets to a local disk, and to S3."""

import functools
import math
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cluster.display.tables import ProgressBar
from cluster.errors import BadInput, ClusterError

from .options import CommandFunction

if TYPE_CHECKING:
    from train.data.fetch.fetch import SetToFetch

MIN_COPY_PIXELS = 32  # short side of a resized copy

sizes_option = click.option(
    "--sizes",
    metavar="LIST",
    default="full",
    show_default=True,
    help="What to copy, comma-separated: full, or short sides of pre-resized copies, such as full,160,352. Copies lie "
    "beside the data set, under its name with -sz.",
)


def translate_data_errors(command: CommandFunction) -> CommandFunction:
    """Decorate a command so that errors of a data set become `ClusterError`."""

    @functools.wraps(command)
    def wrapped(*args: object, **kwargs: object) -> object:
        from train.data.index.open import DataError
        from train.data.manifest import FetchError

        try:
            return command(*args, **kwargs)
        except (DataError, FetchError, ValueError) as error:
            raise ClusterError(str(error)) from error

    return wrapped


def _parse_sizes(text: str) -> list[int | None]:
    """Return the short sides that --sizes lists, None for the full size. Raises `BadInput`."""
    sizes = [size.strip() for size in text.split(",")]
    if not all(size == "full" or (size.isdigit() and int(size) >= MIN_COPY_PIXELS) for size in sizes):
        raise BadInput(
            f"--sizes: must be full, or whole numbers of {MIN_COPY_PIXELS} or more, comma-separated, such as full,160; "
            f"not {text!r}"
        )
    return [None if size == "full" else int(size) for size in dict.fromkeys(sizes)]


@click.command()
@click.argument("source")
@click.argument("target", type=click.Path(path_type=Path))
@sizes_option
@translate_data_errors
def fetch(source: str, target: Path, sizes: str) -> None:
    """Copy a packed data set from SOURCE to the folder TARGET.

    SOURCE is a folder or s3://bucket/prefix. The command can be interrupted and run again.
    """
    from cluster.planning.data_fetch import set_to_fetch

    target = target.expanduser().absolute()
    short_sides = sorted(_parse_sizes(sizes), key=lambda size: size or math.inf)
    _fetch_sets(source, target, [set_to_fetch(source, target, short_side) for short_side in short_sides])


@click.command(hidden=True)
@click.argument("folder", type=click.Path(path_type=Path))
@translate_data_errors
def fetch_for_job(folder: Path) -> None:
    """Copy what a job reads to this machine. FOLDER is the job's shared folder. Its agents call this."""
    from cluster.planning.data_fetch import sets_of_job
    from cluster.state.spec import JobSpec

    spec = JobSpec.parse((folder / "job.json").read_bytes(), folder)
    _fetch_sets(spec.data_source, Path(spec.train.data), sets_of_job(spec, _log))


def _fetch_sets(source: str, target: Path, sets: "list[SetToFetch]") -> None:
    """Fetch sets, with a progress bar, and print what was fetched."""
    from train.data.fetch.fetch import fetch_sets, format_bytes

    with ProgressBar(f"fetching {source}", format_bytes) as progress:
        report = fetch_sets(sets, progress=progress, log=_log)
    speed = ""
    if report.fetched_bytes:
        speed = f" in {report.seconds:.1f} s ({report.fetched_bytes / 1e6 / report.seconds:.0f} MB/s)"
    existing = format_bytes(report.existing_bytes)
    click.echo(f"{target}: {format_bytes(report.fetched_bytes)} fetched{speed}, {existing} already present")


def _log(text: str) -> None:
    click.echo(text, err=True)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("place")
@sizes_option
@translate_data_errors
def put(folder: Path, place: str, sizes: str) -> None:
    """Upload the packed data set in FOLDER to S3.

    PLACE is the destination, such as s3://my-bucket/data/imagenet. Files that are there already are not sent again.
    """
    from cluster.backends.aws.s3_source import S3Source
    from cluster.planning import data_fetch
    from train.data.fetch.fetch import format_bytes

    uploaded_count = 0
    existing_count = 0
    for short_side in _parse_sizes(sizes):
        source = str(folder)
        destination = place
        if short_side is not None:
            source = data_fetch.copies_location(source, "", short_side)
            destination = data_fetch.copies_location(destination, "", short_side)
        with ProgressBar(f"uploading {source}", format_bytes) as progress:
            uploaded, existing = S3Source(destination).upload(Path(source).expanduser(), progress)
        uploaded_count += uploaded
        existing_count += existing
    click.echo(f"{place}: {uploaded_count} files uploaded, {existing_count} already present")


COMMANDS = (fetch, put, fetch_for_job)
