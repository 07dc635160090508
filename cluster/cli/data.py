"""`imgnet-cluster data`: generate, pack, resize, check, verify and list data sets."""

import sys
from pathlib import Path

import click

from cluster.display.progress_bar import ProgressBar
from cluster.errors import EXIT_ERROR, EXIT_OK, BadInput

from .options import (
    CommandFunction,
    CommandGroup,
    output_option,
    pluralize,
    print_json,
    translate_data_errors,
)

MIN_COPY_PIXELS, MAX_COPY_PIXELS = 32, 2048  # short side of a resized copy


@click.group(cls=CommandGroup)
def data() -> None:
    """Generate, pack, resize, check and list data sets."""


@data.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--seed",
    metavar="N",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Random seed. The same seed gives the same bytes.",
)
@click.option(
    "--train", metavar="N", type=click.IntRange(10), default=4000, show_default=True, help="Number of training images."
)
@click.option(
    "--val", metavar="N", type=click.IntRange(10), default=1000, show_default=True, help="Number of validation images."
)
@translate_data_errors
def sample(folder: Path, seed: int, train: int, val: int) -> None:
    """Generate the built-in data set of ten shapes in FOLDER."""
    from train.data.packing.synthetic import draw_sample_set

    with ProgressBar(f"drawing {folder}") as progress:
        written = draw_sample_set(folder, seed=seed, train=train, val=val, progress=progress)
    click.echo(f"{folder}: {train} + {val} images of 10 classes, {written} drawn now")


def packing_options(command: CommandFunction) -> CommandFunction:
    """Add the arguments and options that `pack` and `resize` share."""
    decorators = [
        click.argument("source", type=click.Path(path_type=Path)),
        click.argument("target", type=click.Path(path_type=Path)),
        click.option("--skip-bad", is_flag=True, help="Leave out files that are not images, instead of failing."),
        click.option("--anew", is_flag=True, help="Replace a finished data set that was made of other images."),
        click.option(
            "--shard-mb",
            metavar="MB",
            type=click.IntRange(1),
            default=256,
            show_default=True,
            help="Size of each file of the packed data set, in MB.",
        ),
    ]
    for decorator in reversed(decorators):
        command = decorator(command)
    return command


@data.command()
@packing_options
@click.option(
    "--sizes", default="160,352", show_default=True, help="Short sides of the copies in pixels, comma-separated."
)
@translate_data_errors
def resize(source: Path, target: Path, sizes: str, skip_bad: bool, anew: bool, shard_mb: int) -> None:
    """Pack smaller copies of the images of SOURCE.

    Each size is written to a folder named by its short side, such as TARGET/160. The command can be interrupted and
    run again.
    """
    from train.data.packing.pack import copy_targets

    try:
        short_sides = [int(size) for size in sizes.split(",")]
    except ValueError:
        short_sides = []
    if min(short_sides, default=0) < MIN_COPY_PIXELS or max(short_sides) > MAX_COPY_PIXELS:
        raise BadInput(
            f"--sizes: must be whole numbers from {MIN_COPY_PIXELS} to {MAX_COPY_PIXELS}, comma-separated, such as "
            f"160,352, not {sizes!r}"
        )
    _pack("resizing", source, target, copy_targets(target, short_sides), skip_bad, anew, shard_mb)


@data.command()
@packing_options
@translate_data_errors
def pack(source: Path, target: Path, skip_bad: bool, anew: bool, shard_mb: int) -> None:
    """Pack the images of SOURCE into large files in TARGET.

    The images keep their full size. The command can be interrupted and run again.
    """
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
    """Pack a data set into each of the targets, given by short side (None: full size), and print what was done."""
    from train.data.packing.pack import pack_set

    with ProgressBar(f"{activity} {source}") as progress:
        report = pack_set(
            source, targets, skip_bad=skip_bad, overwrite=anew, shard_bytes=shard_mb * 10**6, progress=progress
        )
    for path, reason in report.skipped_files:
        click.echo(f"left out: {path}: {reason}", err=True)
    for message in report.messages:
        click.echo(message, err=True)
    left_out = pluralize(len(report.skipped_files), "file")
    click.echo(
        f"{target}: {pluralize(report.written, 'image')} packed, {report.kept} already packed, {left_out} left out"
    )


@data.command()
@click.argument("folder", type=click.Path(path_type=Path))
@output_option
@translate_data_errors
def check(folder: Path, output: str) -> None:
    """Decode every image of the data set in FOLDER once, and count.

    Every problem is listed: broken files, folders inside a class folder, images beside the class folders, classes of
    val/ that train/ lacks. Exit code 1 if there is any. A class without validation images is a warning. Packed data
    sets are compared with their checksums, as `data verify` does.
    """
    from train.data.index.open import check_layout, layout_problems, load_index

    if not folder.is_dir():
        check_layout(folder)
    misplaced = layout_problems(folder)
    with ProgressBar(f"indexing {folder}") as progress:
        train = load_index(folder, "train", skip_bad=True, skip_layout_problems=True, progress=progress)
        val = load_index(folder, "val", train.classes, skip_bad=True, skip_layout_problems=True, progress=progress)
    broken = [(str(index.folder / path), reason) for index in (train, val) for path, reason in index.skipped_files]
    broken += _verify_packed_splits(folder, [train.folder, val.folder])
    validated_labels = set(val.labels[:].tolist())
    unvalidated = [name for label, name in enumerate(train.classes) if label not in validated_labels]
    if output == "json":
        bad = dict(misplaced + broken)
        counts = {"train": len(train), "val": len(val), "classes": list(train.classes)}
        print_json({**counts, "bad": bad, "without_validation": unvalidated})
    else:
        for path, reason in misplaced:
            click.echo(f"misplaced: {path}: {reason}", err=True)
        for path, reason in broken:
            click.echo(f"broken: {path}: {reason}", err=True)
        broken_count = pluralize(len(broken), "broken file")
        for name in unvalidated:
            click.echo(f"warning: {folder / 'val' / name}: a class without validation images", err=True)
        misplaced_count = f", {len(misplaced)} misplaced" if misplaced else ""
        image_counts = f"{len(train)} + {len(val)} images"
        click.echo(f"{folder}: {len(train.classes)} classes, {image_counts}, {broken_count}{misplaced_count}")
    sys.exit(EXIT_ERROR if misplaced or broken else EXIT_OK)


def _verify_packed_splits(folder: Path, split_folders: list[Path]) -> list[tuple[str, str]]:
    """Return (place, fault) for each fault in those splits that are packed."""
    from train.data.index.packed import is_packed
    from train.data.packing.verify import verify_packed_sets

    with ProgressBar(f"verifying {folder}") as progress:
        return [
            fault
            for split_folder in split_folders
            if is_packed(split_folder)
            for fault in verify_packed_sets(split_folder, progress).faults
        ]


@data.command()
@click.argument("folder", type=click.Path(path_type=Path))
@output_option
@translate_data_errors
def verify(folder: Path, output: str) -> None:
    """Verify the checksums of all packed data sets below FOLDER.

    Every file and every image is compared with what was written. Exit code 1 if there is a fault.
    """
    from train.data.packing.verify import verify_packed_sets

    with ProgressBar(f"verifying {folder}") as progress:
        report = verify_packed_sets(folder, progress)
    if output == "json":
        faults = [{"where": place, "what": fault} for place, fault in report.faults]
        print_json({"files": report.files, "bytes": report.bytes, "images": report.images, "faults": faults})
    else:
        for place, fault in report.faults:
            click.echo(f"damaged: {place}: {fault}", err=True)
        megabytes = f"{report.bytes / 1e6:.1f} MB"
        fault_count = pluralize(len(report.faults), "fault")
        click.echo(f"{folder}: {pluralize(report.files, 'file')}, {megabytes}, {report.images} images, {fault_count}")
        if report.faults:
            click.echo("to repair: remove the files named above, then fetch, pack or resize again", err=True)
    sys.exit(EXIT_ERROR if report.faults else EXIT_OK)


@data.command()
@click.argument("folder", type=click.Path(path_type=Path))
@output_option
@translate_data_errors
def ls(folder: Path, output: str) -> None:
    """List the data sets in FOLDER and below."""
    from dataclasses import asdict

    from cluster.display import tables
    from train.data.packing.verify import list_sets

    splits = list_sets(folder)
    if output == "json":
        print_json([{**asdict(split), "root": str(split.root)} for split in splits])
        return
    tables.print_table(
        ("set", "split", "copy", "images", "MB", "classes", "stored"),
        [
            (
                str(split.root),
                split.split,
                split.copy or ("full" if split.kind == "packed" else ""),
                split.images,
                None if split.bytes is None else f"{split.bytes / 1e6:.1f}",
                split.classes,
                split.kind,
            )
            for split in splits
        ],
    )
