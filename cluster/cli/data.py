"""`imgnet-cluster data`: draw, pack, resize, check and list sets of images."""

import sys
from pathlib import Path

import click

from cluster.errors import EXIT_ERROR, EXIT_OK, BadInput

from .options import (
    CommandFunction,
    CommandGroup,
    ProgressBar,
    output_option,
    pluralize,
    print_json,
    translate_data_errors,
)


@click.group(cls=CommandGroup)
def data() -> None:
    """Draw, pack, resize, check and list sets of images."""


@data.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="The same seed draws the same bytes."
)
@click.option("--train", type=click.IntRange(10), default=4000, show_default=True, help="Training images.")
@click.option("--val", type=click.IntRange(10), default=1000, show_default=True, help="Validation images.")
@translate_data_errors
def sample(folder: Path, seed: int, train: int, val: int) -> None:
    """Draw the built-in set of ten shapes into FOLDER."""
    from train.data.packing.synthetic import draw_sample_set

    with ProgressBar(f"drawing {folder}") as progress:
        written = draw_sample_set(folder, seed=seed, train=train, val=val, progress=progress)
    click.echo(f"{folder}: {train} + {val} images of 10 classes, {written} drawn now")


def packing_options(command: CommandFunction) -> CommandFunction:
    """What `pack` and `resize` share."""
    for option in reversed(
        [
            click.argument("source", type=click.Path(path_type=Path)),
            click.argument("target", type=click.Path(path_type=Path)),
            click.option("--skip-bad", is_flag=True, help="Leave out files that are not images instead of ending."),
            click.option("--anew", is_flag=True, help="Replace a finished set that is of other images."),
            click.option(
                "--shard-mb", type=click.IntRange(1), default=256, show_default=True, help="The size of a file."
            ),
        ]
    ):
        command = option(command)
    return command


@data.command()
@packing_options
@click.option("--sizes", default="160,352", show_default=True, help="Short sides in pixels, with commas.")
@translate_data_errors
def resize(source: Path, target: Path, sizes: str, skip_bad: bool, anew: bool, shard_mb: int) -> None:
    """Pack smaller copies of SOURCE into TARGET/<short side>. May be stopped and called again."""
    from train.data.packing.pack import copy_targets

    try:
        numbers = [int(one) for one in sizes.split(",")]
    except ValueError:
        numbers = []
    if min(numbers, default=0) < 32 or max(numbers) > 2048:
        raise BadInput(f"--sizes: must be whole numbers from 32 to 2048 with commas, such as 160,352, not {sizes!r}")
    _pack("resizing", source, target, copy_targets(target, numbers), skip_bad, anew, shard_mb)


@data.command()
@packing_options
@translate_data_errors
def pack(source: Path, target: Path, skip_bad: bool, anew: bool, shard_mb: int) -> None:
    """Pack the full-size images of SOURCE into TARGET. May be stopped and called again."""
    _pack("packing", source, target, {None: target}, skip_bad, anew, shard_mb)


def _pack(
    activity: str,
    source: Path,
    target: Path,
    targets: dict[int | None, Path],
    skip_bad: bool,
    anew: bool,
    shard_mb: int,
) -> None:
    from train.data.packing.pack import pack_set

    with ProgressBar(f"{activity} {source}") as progress:
        done = pack_set(
            source, targets, skip_bad=skip_bad, overwrite=anew, shard_bytes=shard_mb * 10**6, progress=progress
        )
    for path, why in done.skipped_files:
        click.echo(f"left out: {path}: {why}", err=True)
    for line in done.messages:
        click.echo(line, err=True)
    left_out = pluralize(len(done.skipped_files), "file")
    click.echo(f"{target}: {pluralize(done.written, 'image')} packed, {done.kept} were there, {left_out} left out")


@data.command()
@click.argument("folder", type=click.Path(path_type=Path))
@output_option
@translate_data_errors
def check(folder: Path, output: str) -> None:
    """Decode every image of FOLDER once, count them, and name those that are broken. Packed sets: see verify."""
    from train.data.index.open import check_layout, load_index

    check_layout(folder)
    with ProgressBar(f"indexing {folder}") as progress:
        train = load_index(folder, "train", skip_bad=True, progress=progress)
        val = load_index(folder, "val", train.classes, skip_bad=True, progress=progress)
    bad = [(str(index.folder / path), why) for index in (train, val) for path, why in index.skipped_files]
    bad += _verify_packed_splits(folder, [train.folder, val.folder])
    if output == "json":
        print_json({"train": len(train), "val": len(val), "classes": list(train.classes), "bad": dict(bad)})
    else:
        for path, why in bad:
            click.echo(f"broken: {path}: {why}", err=True)
        broken = pluralize(len(bad), "broken file")
        click.echo(f"{folder}: {len(train.classes)} classes, {len(train)} + {len(val)} images, {broken}")
    sys.exit(EXIT_ERROR if bad else EXIT_OK)


def _verify_packed_splits(folder: Path, split_folders: list[Path]) -> list[tuple[str, str]]:
    """What is wrong with the packed ones of these splits."""
    from train.data.index.packed import is_packed
    from train.data.packing.verify import verify_packed_sets as verify_set

    with ProgressBar(f"verifying {folder}") as progress:
        return [fault for one in split_folders if is_packed(one) for fault in verify_set(one, progress).faults]


@data.command()
@click.argument("folder", type=click.Path(path_type=Path))
@output_option
@translate_data_errors
def verify(folder: Path, output: str) -> None:
    """Compare every file and every image of the packed sets below FOLDER with what was written, and name each fault."""
    from train.data.packing.verify import verify_packed_sets as verify_set

    with ProgressBar(f"verifying {folder}") as progress:
        done = verify_set(folder, progress)
    if output == "json":
        faults = [{"where": where, "what": what} for where, what in done.faults]
        print_json({"files": done.files, "bytes": done.bytes, "images": done.images, "faults": faults})
    else:
        for where, what in done.faults:
            click.echo(f"damaged: {where}: {what}", err=True)
        size = f"{done.bytes / 1e6:.1f} MB"
        faulty = pluralize(len(done.faults), "fault")
        click.echo(f"{folder}: {pluralize(done.files, 'file')}, {size}, {done.images} images, {faulty}")
        if done.faults:
            click.echo("to mend it: remove the files that are named, then fetch, pack or resize again", err=True)
    sys.exit(EXIT_ERROR if done.faults else EXIT_OK)


@data.command()
@click.argument("folder", type=click.Path(path_type=Path))
@output_option
@translate_data_errors
def ls(folder: Path, output: str) -> None:
    """List the sets of images below FOLDER: a set, or a folder of sets."""
    from dataclasses import asdict

    from cluster.display import tables
    from train.data.packing.verify import list_sets

    found = list_sets(folder)
    if output == "json":
        print_json([{**asdict(one), "root": str(one.root)} for one in found])
        return
    tables.print_table(
        ("set", "split", "copy", "images", "MB", "classes", "stored"),
        [
            (
                str(one.root), one.split, one.copy or ("full" if one.kind == "packed" else ""), one.images,
                None if one.bytes is None else f"{one.bytes / 1e6:.1f}", one.classes, one.kind,
            )
            for one in found
        ],
    )  # fmt: skip
