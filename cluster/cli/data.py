"""`imgnet-cluster data`: generate, pack, resize, check, verify, list, fetch and upload data sets."""

import functools
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cluster.display.tables import ProgressBar
from cluster.errors import EXIT_ERROR, EXIT_OK, BadInput, ClusterError
from train.data.validation_split import MAX_NAMED_CLASSES

from .options import (
    CommandFunction,
    CommandGroup,
    GroupedCommand,
    NumberList,
    flag,
    grouped_option,
    launch_options,
    output_option,
    pluralize,
    print_json,
    warn,
)

if TYPE_CHECKING:
    from train.data.fetch.fetch import SetToFetch

MIN_COPY_PIXELS, MAX_COPY_PIXELS = 32, 2048  # short side of a resized copy
_log = functools.partial(click.echo, err=True)
FEW_IMAGES = 10  # `data check` names the classes with fewer training images


# As a launch has it, but without it nothing is held out.
val_fraction_option = launch_options("val_fraction", is_configurable=False, shows_default=False)
sizes_option = click.option(
    "--sizes",
    metavar="LIST",
    default="full",
    help="What to copy, comma-separated: full, or short sides of pre-resized copies, such as full,160,352. Copies lie "
    "beside the data set, under its name with -sz.",
)


class DataCommands(CommandGroup):
    """The commands about data sets, whose errors become a `ClusterError`."""

    def invoke(self, ctx: click.Context) -> object:
        """Run a command. Raises `ClusterError`."""
        try:
            return click.Group.invoke(self, ctx)  # the program's own group shows errors
        except Exception as error:
            from train.data.index.open import DataError
            from train.data.manifest import FetchError

            if not isinstance(error, DataError | FetchError | ValueError):
                raise
            raise ClusterError(str(error)) from error


@click.group(cls=DataCommands)
def data() -> None:
    """Generate, pack, resize, check and list data sets."""


@data.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--train", metavar="N", type=click.IntRange(10), default=4000, help="Number of training images.")
@click.option("--val", metavar="N", type=click.IntRange(10), default=1000, help="Number of validation images.")
def sample(folder: Path, train: int, val: int) -> None:
    """Generate the built-in data set of ten shapes in FOLDER. Its bytes are always the same."""
    from train.data.packing.synthetic import draw_sample_set

    with ProgressBar(f"drawing {folder}") as progress:
        written = draw_sample_set(folder, train=train, val=val, progress=progress)
    click.echo(f"{folder}: {train} + {val} images of 10 classes, {written} drawn now")


@data.command(cls=GroupedCommand)
@click.argument("folder", type=click.Path(path_type=Path))
@val_fraction_option
@grouped_option(
    "Data", "--out", type=click.Path(path_type=Path), metavar="DIR", help="New data set.  [default: FOLDER-split]"
)
def split(folder: Path, val_fraction: float | None, out: Path | None) -> None:
    """Make a data set with train/ and val/ of FOLDER/<class>.

    Each image stays where it is; the new set has a hard link to it, or a copy. A tenth of each class goes to val/,
    unless --val-fraction says otherwise. Without this, launch --val-fraction divides FOLDER/train/<class> alike.
    """
    from train.data.packing.split import split_folder

    fraction = 0.1 if val_fraction is None else val_fraction
    target = out or folder.absolute().with_name(f"{folder.absolute().name}-split")
    with ProgressBar(f"splitting {folder}") as progress:
        trained, validated, notes = split_folder(folder, target, fraction, progress)
    for note in notes:
        warn(note)
    click.echo(f"{target}: {trained} + {pluralize(validated, 'image')}; check it: imgnet-cluster data check {target}")


def packing_options(command: CommandFunction) -> CommandFunction:
    """Add the arguments and options that `pack` and `resize` share."""
    decorators: list[Callable[[CommandFunction], CommandFunction]] = [
        click.argument("source", type=click.Path(path_type=Path)),
        click.argument("target", type=click.Path(path_type=Path)),
        flag("Data", "--skip-bad", help="Leave out files that are not images, instead of failing."),
        val_fraction_option,
        flag("Data", "--overwrite", help="Replace a finished data set that was made of other images."),
        grouped_option(
            "Data",
            "--shard-mb",
            metavar="MB",
            type=click.IntRange(1),
            default=256,
            help="Size of each file of the packed data set, in MB.",
        ),
    ]
    for decorator in reversed(decorators):
        command = decorator(command)
    return command


@data.command(cls=GroupedCommand)
@packing_options
@grouped_option(
    "Data",
    "--sizes",
    type=NumberList(MIN_COPY_PIXELS, MAX_COPY_PIXELS, "160,352"),
    metavar="LIST",
    default="160,352",
    help="Short sides of the pre-resized copies in pixels, comma-separated.",
)
def resize(source: Path, target: Path, sizes: tuple[int, ...], **options: Any) -> None:  # Any: those of `_pack`
    """Pack pre-resized copies of the images of SOURCE.

    Each size is written to a folder named by its short side, such as TARGET/160. The command can be interrupted and
    run again.
    """
    from train.data.packing.pack import copy_targets

    _pack("resizing", source, target, copy_targets(target, sizes), **options)


@data.command(cls=GroupedCommand)
@packing_options
def pack(source: Path, target: Path, **options: Any) -> None:  # Any: those of `_pack`
    """Pack the images of SOURCE into large files in TARGET.

    The images keep their full size. The command can be interrupted and run again.
    """
    _pack("packing", source, target, {None: target}, **options)


def _pack(
    activity: str,
    source: Path,
    target: Path,
    targets: dict[int | None, Path],
    *,
    val_fraction: float | None,
    shard_mb: int,
    **options: bool,
) -> None:
    """Pack a data set into each of the targets, given by short side (None: full size), and print what was done."""
    from train.data.packing.pack import pack_set

    with ProgressBar(f"{activity} {source}") as progress:
        held_out, size = val_fraction or 0.0, shard_mb * 10**6
        report = pack_set(source, targets, val_fraction=held_out, shard_bytes=size, progress=progress, **options)
    for message in (*(f"left out: {path}: {reason}" for path, reason in report.skipped_files), *report.messages):
        _log(message)
    parts = [f"{pluralize(report.written, 'image')} packed"] if report.written or not report.kept else []
    parts += [f"{pluralize(report.kept, 'image')} already packed"] if report.kept else []
    parts += [f"{pluralize(len(report.skipped_files), 'file')} left out"] if report.skipped_files else []
    click.echo(f"{target}: {', '.join(parts)}")


@data.command(cls=GroupedCommand)
@click.argument("folder", type=click.Path(path_type=Path))
@val_fraction_option
@output_option
def check(folder: Path, val_fraction: float | None, output: str) -> None:
    """Decode every image of the data set in FOLDER once, and count.

    Every problem is listed: broken files, folders inside a class folder, images and broken links beside the class
    folders, classes without training images, classes of val/ that train/ lacks. Exit code 1 if there is any. A class
    without validation images is a warning, as is what hinders no training: an archive beside the class folders, a
    class folder that is a link to another one, names that differ in case or spaces only. The second line says how many
    images the smallest and the largest class have, and how many times larger the largest one is.
    Packed data sets are compared with their checksums, as `data verify` does.
    """
    from train.data.index.open import check_layout, doubtful_entries, images_by_class, layout_problems, load_index

    if not folder.is_dir():
        check_layout(folder)
    val_fraction = val_fraction or 0.0
    misplaced = layout_problems(folder, val_fraction)
    with ProgressBar(f"indexing {folder}") as progress:
        load = functools.partial(
            load_index, folder, val_fraction=val_fraction, skip_bad=True, skip_layout_problems=True, progress=progress
        )
        train = load("train")
        val = load("val", train.classes)
    broken = [(str(index.folder / path), reason) for index in (train, val) for path, reason in index.skipped_files]
    broken += _verify_packed_splits(folder, list(dict.fromkeys((train.folder, val.folder))))
    counts_by_split = {"train": images_by_class(train), "val": images_by_class(val)}
    unvalidated = [name for name, count in counts_by_split["val"].items() if not count]
    untrained = [
        (str(train.folder / name), "a class without training images; add some, or remove it")
        for name, count in counts_by_split["train"].items()
        if not count
    ]
    if output == "json":
        counts = {"train": len(train), "val": len(val), "classes": list(train.classes)}
        faults = {"bad": dict(misplaced + untrained + broken), "doubtful": dict(doubtful_entries(folder))}
        print_json({**counts, "images_by_class": counts_by_split, **faults, "without_validation": unvalidated})
    else:
        for place, doubt in doubtful_entries(folder):
            click.echo(f"warning: {place}: {doubt}", err=True)
        for label, problems in (("misplaced", misplaced), ("missing", untrained), ("broken", broken)):
            for path, reason in problems:
                click.echo(f"{label}: {path}: {reason}", err=True)
        if broken:
            click.echo("repair or remove the broken files, or pass --skip-bad to launch, pack and resize", err=True)
        few = {name: count for name, count in counts_by_split["train"].items() if count < FEW_IMAGES}
        if few:
            named = ", ".join(f"{name} ({count})" for name, count in list(few.items())[:MAX_NAMED_CLASSES])
            more = f" and {len(few) - MAX_NAMED_CLASSES} more" if len(few) > MAX_NAMED_CLASSES else ""
            click.echo(f"note: classes with fewer than {FEW_IMAGES} training images: {named}{more}", err=True)
        broken_count = pluralize(len(broken), "broken file")
        for name in unvalidated:
            click.echo(f"warning: {folder / 'val' / name}: a class without validation images", err=True)
        if len(train.classes) == 1:
            click.echo("warning: only one class: a network that sees no other learns nothing", err=True)
        misplaced_count = f", {len(misplaced)} misplaced" if misplaced else ""
        image_counts = f"{len(train)} + {len(val)} images"
        held_out = f" ({val_fraction:g} of each class held out)" if val.folder == train.folder else ""
        click.echo(f"{folder}: {len(train.classes)} classes, {image_counts}{held_out}, {broken_count}{misplaced_count}")
        balances = [_describe_balance(split, counts) for split, counts in counts_by_split.items()]
        click.echo(f"images of a class: {'; '.join(balances)}")
    sys.exit(EXIT_ERROR if misplaced or untrained or broken else EXIT_OK)


def _describe_balance(split: str, counts: Mapping[str, int]) -> str:
    smallest, largest = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
    low, high = counts[smallest], counts[largest]
    if low == high:
        return f"{split} {low} in each"
    ratio = f", imbalance {high / low:.3g}" if low else ""
    return f"{split} {low} ({smallest}) to {high} ({largest}){ratio}"


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
        {
            "set": str(split.root),
            "split": split.split,
            "copy": split.copy or ("full" if split.kind == "packed" else ""),
            "images": split.images,
            "MB": None if split.bytes is None else f"{split.bytes / 1e6:.1f}",
            "classes": split.classes,
            "stored": split.kind,
        }
        for split in splits
    )


def _parse_sizes(text: str) -> list[int | None]:
    """Return the short sides that --sizes lists, None for the full size. Raises `BadInput`."""
    sizes = [size.strip() for size in text.split(",")]
    if not all(size == "full" or (size.isdigit() and int(size) >= MIN_COPY_PIXELS) for size in sizes):
        raise BadInput(
            f"--sizes: must be full, or whole numbers of {MIN_COPY_PIXELS} or more, comma-separated, such as full,160; "
            f"not {text!r}"
        )
    return [None if size == "full" else int(size) for size in dict.fromkeys(sizes)]


@data.command()
@click.argument("source")
@click.argument("target", type=click.Path(path_type=Path))
@sizes_option
def fetch(source: str, target: Path, sizes: str) -> None:
    """Copy a packed data set from SOURCE to the folder TARGET.

    SOURCE is a folder or s3://bucket/prefix. The command can be interrupted and run again.
    """
    from cluster.planning.data_fetch import set_to_fetch

    target = target.expanduser().absolute()
    short_sides = sorted(_parse_sizes(sizes), key=lambda size: size or math.inf)
    _fetch_sets(source, target, [set_to_fetch(source, target, short_side) for short_side in short_sides])


@data.command(hidden=True)
@click.argument("folder", type=click.Path(path_type=Path))
def fetch_for_job(folder: Path) -> None:
    """Copy what a job reads to this machine. FOLDER is the job's shared folder. Its agents call this."""
    from cluster.planning.data_fetch import sets_of_job
    from cluster.state.spec import JobSpec

    spec = JobSpec.parse((folder / "job.json").read_bytes(), folder)
    _fetch_sets(spec.data_source, Path(spec.train.data), sets_of_job(spec, _log))


def _fetch_sets(source: str, target: Path, sets: "list[SetToFetch]") -> None:
    from train.data.fetch.fetch import fetch_sets, format_bytes

    with ProgressBar(f"fetching {source}", format_bytes) as progress:
        report = fetch_sets(sets, progress=progress, log=_log)
    speed = ""
    if report.fetched_bytes:
        speed = f" in {report.seconds:.1f} s ({report.fetched_bytes / 1e6 / report.seconds:.0f} MB/s)"
    existing = format_bytes(report.existing_bytes)
    click.echo(f"{target}: {format_bytes(report.fetched_bytes)} fetched{speed}, {existing} already present")


@data.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("place")
@sizes_option
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
            uploaded, existing = S3Source(destination).upload_set(Path(source).expanduser(), progress)
        uploaded_count += uploaded
        existing_count += existing
    click.echo(f"{place}: {uploaded_count} files uploaded, {existing_count} already present")
