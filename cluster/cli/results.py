"""The commands about what jobs have trained: eval, export, predict, pull; the HTML report, and benchmark records."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from cluster.display.tables import ProgressBar
from cluster.errors import BadInput, ClusterError
from train.tools.records import MALFORMED_DATA_ERRORS

from .inspect import refresh
from .options import (
    OUTPUT_FORMATS,
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
    from cluster.jobs.job import Job
    from train.engine.options import TrainOptions
    from train.inference.protocol import Evaluation

MIN_SIZE_PIXELS, MAX_SIZE_PIXELS = 16, 4096
WEIGHTS_SUFFIXES = (".pt", ".safetensors")
RECORD_SUFFIXES = (".tsv", ".json", ".log")  # of DAWNBench's table and entry, and of MLPerf's log

best_option = flag("Data", "--best", help="Take the network of the best validation instead of the last one.")
model_option = grouped_option(
    "Data",
    "--model",
    metavar="NAME",
    help="For a file whose network is made by a function: the name of the function, package.module:function.",
)


class OutputFile(click.Path):
    """A file that a command writes. The formats that `-o` of other commands takes are refused: nobody means a file."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # Any: as click
        """Return the path. Fails as click's types do."""
        if str(value) in OUTPUT_FORMATS:
            self.fail(f"of this command -o names the file to write; a file of this name is ./{value}", param, ctx)
        return super().convert(value, param, ctx)


class TrainedSource(NamedTuple):
    """A file of weights or a checkpoint, and what is known of its network.

    `model` is the name that the network must have, None for any of this project and of libraries. `title` names the job
    or the file. Of a job, `module_folders` has the user's modules, and `job_options` what its run was started with.
    """

    path: Path
    model: str | None
    title: str
    module_folders: tuple[str, ...] = ()
    job_options: "TrainOptions | None" = None


def open_source(job_or_file: str | None, is_best: bool, model: str | None) -> TrainedSource:
    """Find the job or the file that the user named; without a name, the newest job. Raises `ClusterError`."""
    from cluster.jobs import checkpoints, store

    path = Path(job_or_file or "")
    if job_or_file is None or (store.is_job(job_or_file) and not path.is_file()):
        if model:
            raise BadInput("--model is for a file; the network of a job is known")
        job = store.find(job_or_file)
        with _download_bar(job) as progress:
            path = checkpoints.trained_weights(job, is_best, progress)
        name = job.spec.recipe.model.name
        if job_or_file is None:
            click.echo(f"network of {job.spec.title}: {path}", err=True)
        return TrainedSource(path, name, job.run.handle, checkpoints.module_folders(job), job.spec.train)
    if path.suffix in WEIGHTS_SUFFIXES and not path.exists():
        raise BadInput(f"{job_or_file}: there is no such file")
    if not path.is_file():
        raise BadInput(f"{job_or_file}: is neither a job nor a checkpoint; to list the jobs: imgnet-cluster ls")
    if is_best:
        raise BadInput("--best is for a job; name the file of its best network instead")
    return TrainedSource(path, model, path.stem)


def _download_bar(job: "Job") -> ProgressBar:
    return ProgressBar(f"downloading what {job.name} has trained", lambda done: f"{done / 1e6:.0f} MB")


@click.command("eval", cls=GroupedCommand)
@click.argument("job_or_checkpoint", metavar="[JOB|CHECKPOINT]", required=False)
@grouped_option(
    "Machines",
    "--procs",
    metavar="N",
    type=click.IntRange(1),
    help="Number of processes on this computer.  [default: one per GPU, else 1]",
)
@grouped_option(
    "Data", "--crops", default="center,rect", show_default=True, help="Crops, comma-separated: center, rect, five, tta."
)
@grouped_option(
    "Data",
    "--sizes",
    type=NumberList(MIN_SIZE_PIXELS, MAX_SIZE_PIXELS, "224,256"),
    metavar="LIST",
    help="Image sizes in pixels, comma-separated.  [default: the size of the recipe's last phase]",
)
@grouped_option(
    "Data", "--data", metavar="DIR", help="Data set whose val/ is used.  [default: that of the job or of the recipe]"
)
@launch_options("copies", "val_fraction", is_configurable=False)
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
@best_option
@model_option
@output_option
def evaluate(
    job_or_checkpoint: str | None,
    crops: str,
    sizes: tuple[int, ...] | None,
    data: str | None,
    copies: str | None,
    plot: Path | None,
    best: bool,
    model: str | None,
    output: str,
    **options: Any,  # Any: further ones of `EvalOptions`
) -> None:
    """Measure the validation accuracy of a network.

    The network is what JOB (default: the newest job) has left, or its newest checkpoint, or the file CHECKPOINT. All
    validation images are used, each once. The accuracy is shown by class too.

    \b
    center  the middle square, as in ordinary validation
    rect    the middle rectangle, as in rectangular validation: as long as the image,
            in steps of 32 pixels, but at most 1.5 times its short side
    five    the four corners and the middle, the mean of their softmax
    tta     these five and their mirror images (Krizhevsky et al. 2012)
    """
    from cluster.jobs import checkpoints
    from train.engine.options import TrainOptions
    from train.inference.protocol import EvalOptions, Evaluation
    from train.tools.records import decode, encode

    crop_names = parse_crops(crops)
    if plot and plot.suffix.lower() != ".png":
        raise BadInput(f"--plot {plot}: the name of the picture must be one that ends in .png")
    if plot and not plot.absolute().parent.is_dir():
        raise BadInput(f"--plot {plot}: there is no folder {plot.parent}")
    source = open_source(job_or_checkpoint, best, model)
    job_options = source.job_options or TrainOptions()
    eval_options = EvalOptions(
        checkpoint=str(source.path),
        crops=crop_names,
        sizes=sizes or (),
        data=data or job_options.data,
        copies=copies or ("" if data else job_options.copies),  # the job's copies belong to the job's own data set
        scale=job_options.scale,
        skip_bad=job_options.skip_bad,
        with_examples=plot is not None,
        model=source.model,
        **options,
    )
    with ProgressBar("images, over all crops and sizes") as bar:
        for message in checkpoints.run_task("evaluate", eval_options, source.module_folders):
            if message["kind"] == "progress":
                bar(message["done"], message["total"])
    result = decode(Evaluation, message["evaluation"])
    if output == "json":
        facts = encode(result)
        del facts["examples"]
        print_json({**facts, "plot": str(plot) if plot else None})
    else:
        _print_results(result)
    if plot:  # after the numbers: they took longer, and must not be lost when the picture cannot be written
        from cluster.plots.crops import draw_crops

        try:
            draw_crops(plot, result)
        except OSError as error:
            raise ClusterError(f"--plot {plot}: {error.strerror or error}; the picture was not written") from error
        if output != "json":
            click.echo(f"picture: {plot}")


def parse_crops(text: str) -> tuple[str, ...]:
    """Parse names of crops, separated by commas. Raises `BadInput`."""
    from train.inference.protocol import CROP_VIEWS

    crops = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if unknown := [crop for crop in crops if crop not in CROP_VIEWS]:
        raise BadInput(f"--crops: {unknown[0]!r} is unknown; choose from {', '.join(CROP_VIEWS)}")
    return crops


def _print_results(result: "Evaluation") -> None:
    from cluster.display import tables
    from cluster.report.tables import classes_tables

    click.echo(
        f"{result.recipe}: {result.model}, {result.epoch} epochs done, step {result.step}; {result.images} images of "
        f"{result.classes} classes in {result.data}"
    )
    click.echo(f"{result.checkpoint}, {result.device}, {result.precision}, processes: {result.procs}")
    tables.print_table(
        {
            "crop": row.crop,
            "size": row.size,
            "views": row.views,
            "top-1": f"{row.top1:.3f}",
            **({} if row.top5 is None else {"top-5": f"{row.top5:.3f}"}),
            "loss": f"{row.loss:.4f}",
            "seconds": f"{row.seconds:.2f}",
            "read from": f"copy of {row.copy}" if row.copy else "full size",
        }
        for row in result.rows
    )
    first_row = result.rows[0]
    for classes in classes_tables(first_row.confusion):
        click.echo(f"\n{classes.caption.lower()}, {first_row.crop} at {first_row.size}:")
        tables.print_table(classes.rows)
    if first_row.confusion:
        click.echo("all classes and errors: -o json")
    for size in dict.fromkeys(row.size for row in result.rows):
        rows = [row for row in result.rows if row.size == size]
        click.echo(f"\ntop-1 at {size} pixels, by width / height:")
        tables.print_table(
            {
                # A range such as 0.75-0.80, or one number when both ends are rounded to the same.
                "w/h": "-".join(dict.fromkeys(f"{end:.2f}" for end in (buckets[0].lowest, buckets[0].highest))),
                "images": buckets[0].images,
                **{row.crop: f"{bucket.top1:.1f}" for row, bucket in zip(rows, buckets, strict=True)},
            }
            for buckets in zip(*(row.buckets for row in rows), strict=True)
        )


@click.command(cls=GroupedCommand)
@click.argument("job_or_file", metavar="[JOB|FILE]", required=False)
@grouped_option(
    "Output",
    "--format",
    "file_format",
    type=click.Choice(["safetensors", "torch", "onnx"]),
    default="safetensors",
    show_default=True,
    help="Format of the file: safetensors, a state dict for torch.load, or ONNX.",
)
@grouped_option(
    "Output",
    "-o",
    "--output",
    type=OutputFile(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="File to write.  [default: the job's name, in the current folder]",
)
@best_option
@model_option
def export(job_or_file: str | None, file_format: str, output: Path | None, best: bool, model: str | None) -> None:
    """Write the trained network of JOB for other programs.

    Without JOB, the newest job is taken. FILE is a checkpoint or a file of weights. Beside the file of weights, a file
    .classes.json gets the names of the classes in the order of the scores, and the image size, crop, mean and deviation
    of the input. The built-in ResNets have torchvision's and timm's names of parameters.

    \b
    imgnet-cluster export job-3 --format onnx
    imgnet-cluster export job-3 --best --format torch -o birds.pt
    """
    from cluster.jobs import checkpoints
    from train.inference.protocol import FORMAT_SUFFIXES, ExportOptions, FileFormat

    chosen_format = FileFormat(file_format)
    source = open_source(job_or_file, best, model)
    file = output or Path(f"{source.title}{'-best' if best else ''}{FORMAT_SUFFIXES[chosen_format]}")
    if not file.absolute().parent.is_dir():
        raise BadInput(f"-o {file}: there is no folder {file.parent}")
    if file.exists():
        raise BadInput(f"{file}: exists already; remove it, or name another file: -o FILE")
    options = ExportOptions(source=str(source.path), file=str(file), format=chosen_format, model=source.model)
    (exported,) = checkpoints.run_task("export", options, source.module_folders)
    number = exported["parameters"]
    values = f"{number / 1e6:.1f} million values" if number >= 1_000_000 else pluralize(number, "value")
    accuracy = "" if exported["top1"] is None else f", top-1 {exported['top1']:.2f} %"
    click.echo(
        f"{exported['file']}: {exported['model']} after {pluralize(exported['epoch'], 'epoch')}{accuracy}, "
        f"{values} in {pluralize(exported['tensors'], 'tensor')}"
    )
    click.echo(f"{exported['classes_file']}: {exported['classes']} classes, images of {exported['image_size']} pixels")
    if exported["load_line"]:
        click.echo(f"load it: {exported['load_line']}")


@click.command(cls=GroupedCommand)
@click.argument("job_or_file_and_images", nargs=-1, required=True, metavar="[JOB|FILE] IMAGE...")
@best_option
@model_option
@output_option
def predict(job_or_file_and_images: tuple[str, ...], best: bool, model: str | None, output: str) -> None:
    """Classify IMAGE files with the trained network of JOB.

    Without JOB, the newest job is taken. Prints the five most likely classes of each image. FILE is a checkpoint or a
    file of weights. An image is resized and cropped as in validation.
    """
    from cluster.jobs import checkpoints, store
    from train.inference.protocol import PredictOptions

    first, path = job_or_file_and_images[0], Path(job_or_file_and_images[0])
    has_source = path.suffix in WEIGHTS_SUFFIXES or (store.is_job(first) and not path.is_file())
    job_or_file, images = first if has_source else None, job_or_file_and_images[has_source:]
    if not has_source and not path.exists():  # of the newest job, these would be the answers of another network
        raise BadInput(f"{first}: is neither a job nor a file; to list the jobs: imgnet-cluster ls")
    if not images:
        raise BadInput(f"{job_or_file}: name the images after it: imgnet-cluster predict {job_or_file} IMAGE...")
    if missing := next((image for image in images if not Path(image).exists()), None):  # before a network is downloaded
        raise BadInput(f"{missing}: there is no such file")
    source = open_source(job_or_file, best, model)
    predictions = []
    options = PredictOptions(source=str(source.path), images=images, model=source.model)
    for prediction in checkpoints.run_task("predict", options, source.module_folders):
        predictions.append(prediction)
        if output == "json":
            continue
        if prediction["error"]:
            warn(prediction["error"])
            continue
        click.echo(prediction["file"])
        for answer in prediction["answers"]:
            click.echo(f"  {answer['percent']:6.2f} %  {answer['class']}")
    if output == "json":
        print_json([{key: value for key, value in prediction.items() if key != "kind"} for prediction in predictions])
    unreadable = sum(bool(prediction["error"]) for prediction in predictions)
    if unreadable:
        raise ClusterError(f"{unreadable} of {len(predictions)} images could not be read")


@click.command(cls=GroupedCommand)
@click.argument("job", required=False)
def pull(job: str | None) -> None:
    """Bring the network or the checkpoints of JOB here.

    Without JOB, the newest job is taken. Of an unfinished job it is the newest checkpoint, of a command the newest copy
    of its checkpoint folder. Prints where the files are.
    """
    from cluster.jobs import checkpoints, store
    from cluster.state.states import JobState
    from train.data.fetch.fetch import format_bytes

    found_job = store.find(job)
    refresh(found_job)
    with _download_bar(found_job) as progress:
        paths = checkpoints.fetch_network(found_job, progress)
        if found_job.state != JobState.DONE or not paths:
            paths = [checkpoints.newest_checkpoint(found_job, progress)]
    for path in paths:
        files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
        click.echo(f"{path}  {format_bytes(sum(file.stat().st_size for file in files))}")


@click.command()
@click.argument("job", nargs=-1)
@click.option(
    "-o",
    "--output",
    type=OutputFile(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="File to write.  [default: report.html in the run folder; for several jobs, in the folder of all runs]",
)
@flag("Options", "--open", "open_browser", help="Open the report in the browser.")
def report(job: tuple[str, ...], output: Path | None, open_browser: bool) -> None:
    """Write an HTML report about JOB (default: the newest job).

    Several jobs are shown side by side. The report is one file and needs no network. Jobs that are running, failed or
    were stopped have one too, of the data that exists so far.
    """
    from cluster.jobs import store
    from cluster.report import page

    named_jobs = [store.find(name) for name in job] or [store.find()]
    jobs = list({found_job.name: found_job for found_job in named_jobs}.values())
    for found_job in jobs:
        refresh(found_job)
    folder = jobs[0].path if len(jobs) == 1 else store.runs_folder()
    path = page.write_report(jobs, output or folder / page.REPORT_FILENAME)
    click.echo(path)
    # Without a display, xdg-open tries all it knows, and fails with noise.
    has_display = sys.platform == "darwin" or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")))
    if open_browser and not (has_display and click.launch(str(path)) == 0):
        warn(f"no browser could be started here; copy the file to a computer with one: {path}")


@click.command()
@click.argument("job", required=False)
@click.option(
    "-o",
    "--output",
    "output_path",
    type=OutputFile(path_type=Path),
    metavar="FILE",
    help="File to write: x.tsv, x.json or x.log. A name without these endings writes all three.  [default: the first, "
    "to stdout]",
)
@click.option(
    "--author", metavar="NAME", help="Author of the record, written into the JSON record and into MLPerf's log."
)
def record(job: str | None, output_path: Path | None, author: str | None) -> None:
    """Write a benchmark record of JOB (default: the newest job).

    It contains hours, accuracies, hardware, price, the recipe, and what each epoch did. Hours count from the start of
    loading the images. Unknown values are null. Only the run folder is read, so it works after the machines are gone.
    """
    from cluster import records
    from cluster.jobs import store
    from train.tools.files import write_atomic
    from train.tools.text_files import to_json_bytes

    paths = _output_files(output_path) if output_path else []
    recorded_job = store.find(job)
    refresh(recorded_job)
    try:
        with recorded_job.report_damaged_files():
            run = records.collect_run_data(recorded_job)
        entry = records.dawnbench_entry(run, author, paths[-1].name if len(paths) > 1 else None)
        texts = (records.render_tsv(run), to_json_bytes(entry).decode(), records.render_mlperf_log(run, org=author))
    except MALFORMED_DATA_ERRORS as error:
        problem = f"{type(error).__name__}: {error}"
        raise ClusterError(f"{recorded_job.name}: a file of its run folder is damaged ({problem})") from error
    if not paths:
        click.echo(texts[0], nl=False)
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, texts[RECORD_SUFFIXES.index(path.suffix)].encode())
        click.echo(f"written: {path}")


def _output_files(output_path: Path) -> list[Path]:
    """Return the files to write. Raises `BadInput` when `output_path` is not the name of a file."""
    if output_path.name in ("", ".."):
        raise BadInput(f"-o {output_path}: is not a file name; give one, such as {output_path / 'mine'}")
    paths = [output_path.with_name(output_path.name + suffix) for suffix in RECORD_SUFFIXES]
    paths = [output_path] if output_path.suffix in RECORD_SUFFIXES else paths
    for path in paths:
        if path.is_dir():
            raise BadInput(f"-o {output_path}: {path} is a folder; name a file, such as {path / 'mine'}")
    return paths


COMMANDS = (evaluate, export, predict, pull, record, report)
