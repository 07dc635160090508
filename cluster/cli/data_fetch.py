"""`imgnet-cluster data fetch` and `data put`: packed sets to this machine's disk, and to S3."""

from pathlib import Path

import click

from cluster.errors import BadInput, ClusterError

from .options import ProgressBar, translate_data_errors

sizes_option = click.option(
    "--sizes", metavar="LIST", help="full, or short sides of the copies beside it (its name with -sz): full,160,352."
)


def _parse_sizes(text: str | None) -> list[int | None] | None:
    """Read --sizes; None in it is the full size."""
    if text is None:
        return None
    words = [one.strip() for one in text.split(",")]
    if not all(one == "full" or (one.isdigit() and int(one) >= 32) for one in words):
        raise BadInput(f"--sizes: must be full, or whole numbers of 32 or more, with commas: full,160; not {text!r}")
    return [None if one == "full" else int(one) for one in dict.fromkeys(words)]


@click.command()
@click.argument("source")
@click.argument("target", type=click.Path(path_type=Path))
@sizes_option
@click.option("--index-only", is_flag=True, help="Of the full-size images only index and names: no phase reads them.")
@click.option("--copies", default="", metavar="PLACE", help="Where the copies are. [default: SOURCE's name with -sz]")
@click.option("--else-full", is_flag=True, help="Fetch the full-size images in place of a copy that is not there.")
@translate_data_errors
def fetch(source: str, target: Path, sizes: str | None, index_only: bool, copies: str, else_full: bool) -> None:
    """Fetch a packed set from SOURCE, a folder or s3://bucket/prefix, to TARGET. May be stopped and called again."""
    from cluster.planning import data_fetch
    from train.data.fetch.fetch import fetch_sets as fetch_sets
    from train.data.fetch.fetch import format_bytes
    from train.data.manifest import FetchError

    asked, target = _parse_sizes(sizes), target.expanduser().absolute()

    def say(text: str) -> None:
        click.echo(text, err=True)

    try:
        found = data_fetch.list_parts(
            source, target, [None] if asked is None else asked, index_only=index_only, copies=copies,
            full_if_missing=else_full, say=say,
        )  # fmt: skip
        with ProgressBar(f"fetching {source}", format_bytes) as progress:
            done = fetch_sets(found, progress=progress, log=say)
    except FetchError as error:
        raise ClusterError(str(error)) from error
    rate = (
        f" in {done.seconds:.1f} s ({done.fetched_bytes / 1e6 / done.seconds:.0f} MB/s)" if done.fetched_bytes else ""
    )
    click.echo(
        f"{target}: {format_bytes(done.fetched_bytes)} fetched{rate}, {format_bytes(done.existing_bytes)} were there"
    )


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("place")
@sizes_option
@translate_data_errors
def put(folder: Path, place: str, sizes: str | None) -> None:
    """Put a packed set into S3, at PLACE such as s3://my-bucket/data/imagenet. What is there already stays."""
    from cluster.backends.aws.s3_source import upload_dataset
    from cluster.planning import data_fetch
    from train.data.fetch.fetch import format_bytes
    from train.data.manifest import FetchError

    counts = [0, 0]
    for short in _parse_sizes(sizes) or [None]:
        mine, its = str(folder), place
        if short is not None:
            mine, its = data_fetch.copies_location(str(folder), "", short), data_fetch.copies_location(place, "", short)
        try:
            with ProgressBar(f"putting {mine}", format_bytes) as progress:
                done = upload_dataset(Path(mine).expanduser(), its, progress)
        except FetchError as error:
            raise ClusterError(str(error)) from error
        counts = [one + more for one, more in zip(counts, done, strict=True)]
    click.echo(f"{place}: {counts[0]} files put there, {counts[1]} were there")


COMMANDS = (fetch, put)
