"""`imgnet-cluster data`: draw, resize and check folders of images."""

import sys
from pathlib import Path

import click

from .command import Bar, Group, data_errors, output, print_json
from .errors import ERROR, OK, BadInput


@click.group(cls=Group)
def data() -> None:
    """Draw, resize and check folders of images."""


@data.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="The same seed draws the same bytes."
)
@click.option("--train", type=click.IntRange(10), default=4000, show_default=True, help="Training images.")
@click.option("--val", type=click.IntRange(10), default=1000, show_default=True, help="Validation images.")
@data_errors
def sample(folder: Path, seed: int, train: int, val: int) -> None:
    """Draw the built-in set of ten shapes into FOLDER."""
    from train.data.sample import draw_set

    with Bar(f"drawing {folder}") as progress:
        written = draw_set(folder, seed=seed, train=train, val=val, progress=progress)
    click.echo(f"{folder}: {train} + {val} images of 10 classes, {written} drawn now")


@data.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--sizes", default="160,352", show_default=True, help="Short sides in pixels, with commas.")
@click.option("--skip-bad", is_flag=True, help="Leave out files that are not images instead of ending.")
@data_errors
def resize(source: Path, target: Path, sizes: str, skip_bad: bool) -> None:
    """Make copies of SOURCE in TARGET/<short side>. May be stopped and called again."""
    from train.data.resize import resize_set

    try:
        numbers = [int(one) for one in sizes.split(",")]
    except ValueError:
        numbers = []
    if min(numbers, default=0) < 32:
        raise BadInput(f"--sizes: must be whole numbers of 32 or more with commas, such as 160,352, not {sizes!r}")
    with Bar(f"resizing {source}") as progress:
        done = resize_set(source, target, numbers, skip_bad=skip_bad, progress=progress)
    for path, why in done.bad:
        click.echo(f"left out: {path}: {why}", err=True)
    click.echo(f"{target}: {done.written} copies made, {done.kept} were there, {len(done.bad)} files left out")


@data.command()
@click.argument("folder", type=click.Path(path_type=Path))
@output
@data_errors
def check(folder: Path, output: str) -> None:
    """Decode every image of FOLDER once, count them, and name those that are broken."""
    from train.data.index import check_layout, load

    check_layout(folder)
    with Bar(f"indexing {folder}") as progress:
        train = load(folder, "train", skip_bad=True, progress=progress)
        val = load(folder, "val", train.classes, skip_bad=True, progress=progress)
    bad = [(str(index.folder / path), why) for index in (train, val) for path, why in index.bad]
    if output == "json":
        print_json({"train": len(train), "val": len(val), "classes": list(train.classes), "bad": dict(bad)})
    else:
        for path, why in bad:
            click.echo(f"broken: {path}: {why}", err=True)
        click.echo(f"{folder}: {len(train.classes)} classes, {len(train)} + {len(val)} images, {len(bad)} broken files")
    sys.exit(ERROR if bad else OK)
