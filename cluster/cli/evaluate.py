"""The commands that use a trained network: `eval` measures it, `export`, `predict` and `pull` take it out."""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cluster.display.progress_bar import ProgressBar
from cluster.errors import BadInput, ClusterError

from .inspect import refresh
from .options import (
    GroupedCommand,
    GroupedOption,
    dataclass_options,
    deferred_options,
    grouped_option,
    output_option,
    pluralize,
    print_json,
    warn,
)
from .record import OutputFile

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cluster.jobs.evaluation import RectGain
    from cluster.jobs.job import Job
    from train.evaluation.protocol import (
        AccuracyPercents,
        EvaluationBegin,
        EvaluationExamples,
        EvaluationRow,
        RatioBucket,
    )
    from train.inference.protocol import FileFormat, ParameterNames, Prediction

PLOTTED_IMAGES = 6  # images that --plot shows
WEIGHTS_SUFFIXES = (".pt", ".safetensors")
SHOWN_CLASSES = 8  # in the tables of the worst classes and of the most frequent errors

best_option = grouped_option(
    "Data", "--best", is_flag=True, help="Take the network of the best validation instead of the last one."
)
model_option = grouped_option(
    "Data",
    "--model",
    metavar="NAME",
    help="For a file whose network is made by a function: the name of the function, package.module:function.",
)


def data_options() -> list[GroupedOption]:
    """Return the options `--copies` and `--val-fraction`, which a launch has too."""
    from train.engine.options import TrainOptions

    return dataclass_options(TrainOptions, "copies", "val_fraction")


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
@deferred_options(data_options)
@grouped_option(
    "Data",
    "--workers",
    metavar="N",
    type=click.IntRange(0),
    help="Loader processes per evaluation process.  [default: from the number of CPU cores]",
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
    sizes: str | None,
    plot: Path | None,
    best: bool,
    model: str | None,
    output: str,
    **options: str | int | float | None,
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
        **_evaluation_options(job_or_checkpoint, best, model, has_own_data=bool(options["data"])),
        **{name: value for name, value in options.items() if value is not None},
        "crops": crops,
        "sizes": sizes,
        "shown": PLOTTED_IMAGES if plot else 0,
    }
    rows: list[EvaluationRow] = []
    with contextlib.ExitStack() as bars:
        bar: ProgressBar | None = None
        for message in evaluation.run_evaluation(evaluation.evaluation_command(evaluation_options)):
            if message["kind"] == "row":
                rows.append(message)
            elif message["kind"] == "begin":
                run_info = message
            elif message["kind"] == "progress":
                if bar is None or bar.title != message["what"]:
                    bars.close()
                    bar = bars.enter_context(ProgressBar(message["what"]))
                bar(message["done"], message["total"])
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


def _evaluation_options(
    job_or_checkpoint: str | None, is_best: bool, model: str | None, has_own_data: bool
) -> dict[str, object]:
    """Return the options that follow from a job, or from a file of weights. Raises `ClusterError`."""
    from cluster.jobs import evaluation

    source = _find_source(job_or_checkpoint, is_best, model)
    if isinstance(source, Path):
        return {"checkpoint": source, "model": model}
    with _download_bar(source) as progress:
        options = evaluation.job_evaluation_options(source, is_best, progress)
    if has_own_data:  # the job's copies belong to the job's own data set
        del options["copies"]
    return options


def _find_source(job_or_file: str | None, is_best: bool, model: str | None) -> "Job | Path":
    """Return the job or the file of weights that the user named; without a name, the newest job. Raises `BadInput`."""
    from cluster.jobs import store

    path = Path(job_or_file or "")
    if job_or_file is None or (store.is_job_name(job_or_file) and not path.is_file()):
        if model:
            raise BadInput("--model is for a file; the network of a job is known")
        return store.find(job_or_file)
    if path.suffix in WEIGHTS_SUFFIXES and not path.exists():
        raise BadInput(f"{job_or_file}: there is no such file")
    if not path.is_file():
        raise BadInput(f"{job_or_file}: is neither a job nor a checkpoint; to list the jobs: imgnet-cluster ls")
    if is_best:
        raise BadInput("--best is for a job; name the file of its best network instead")
    return path


def _trained_weights(
    job_or_file: str | None, is_best: bool, model: str | None
) -> tuple[Path, str | None, str, tuple[str, ...]]:
    """Find a network that the user named.

    Returns its file, the name that its model must have (None: any), a title, and the folders of the user's modules.

    Raises `ClusterError`.
    """
    from cluster.jobs import checkpoints, evaluation

    source = _find_source(job_or_file, is_best, model)
    if isinstance(source, Path):
        return source, model, source.stem, ()
    with _download_bar(source) as progress:
        path = checkpoints.trained_weights(source, is_best, progress)
    return path, source.spec.recipe.model.name, source.name, evaluation.module_folders(source)


def _download_bar(job: "Job") -> ProgressBar:
    return ProgressBar(f"downloading what {job.name} has trained", lambda done: f"{done / 1e6:.0f} MB")


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
    if rows:
        _print_classes(rows[0])
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


def _print_classes(row: "EvaluationRow") -> None:
    """Print the classes of the lowest accuracy and the most frequent errors, of one crop at one size."""
    from cluster.display import tables
    from train.metrics.confusion import Confusion
    from train.tools.records import decode

    if not row["confusion"]:
        return
    confusion = decode(Confusion, row["confusion"])
    click.echo(f"\nclasses of the lowest accuracy, {row['crop']} at {row['size']}:")
    tables.print_table(
        ("class", "images", "top-1"),
        [(entry.name, entry.images, f"{entry.top1:.1f}") for entry in confusion.worst_classes(SHOWN_CLASSES)],
    )
    if confusion.pairs:
        click.echo("\nmost frequent errors (all of them: -o json):")
        tables.print_table(
            ("class", "taken for", "images", "% of the class"),
            [
                (pair.true, pair.predicted, pair.images, f"{pair.share:.1f}")
                for pair in confusion.most_confused(SHOWN_CLASSES)
            ],
        )


@click.command(cls=GroupedCommand)
@click.argument("job_or_file", metavar="[JOB|FILE]", required=False)
@grouped_option(
    "Output",
    "--names",
    type=click.Choice(["plain", "torchvision", "timm"]),
    default="plain",
    show_default=True,
    help="Names of the parameters: those of the network's own modules, or those of a library's ResNet.",
)
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
def export(
    job_or_file: str | None, names: str, file_format: str, output: Path | None, best: bool, model: str | None
) -> None:
    """Write the trained network of JOB for other programs.

    Without JOB, the newest job is taken. FILE is a checkpoint or a file of weights. Beside the file of weights, a file
    .classes.json gets the names of the classes in the order of the scores, and the image size, crop, mean and deviation
    of the input.

    \b
    imgnet-cluster export job-3 --names torchvision
    imgnet-cluster export job-3 --best --format torch -o birds.pt
    """
    from cluster.jobs import evaluation
    from train.inference.protocol import FORMAT_SUFFIXES, ExportOptions, FileFormat, ParameterNames

    chosen_format = FileFormat(file_format)
    if chosen_format is FileFormat.ONNX and names != "plain":
        raise BadInput("--names is for files of weights; leave it out with --format onnx")
    source, model_name, title, module_folders = _trained_weights(job_or_file, best, model)
    file = output or Path(f"{title}{'-best' if best else ''}{FORMAT_SUFFIXES[chosen_format]}")
    if not file.absolute().parent.is_dir():
        raise BadInput(f"-o {file}: there is no folder {file.parent}")
    if file.exists():
        raise BadInput(f"{file}: exists already; remove it, or name another file: -o FILE")
    exported = evaluation.export(
        ExportOptions(
            source=source,
            file=file,
            names=ParameterNames(names),
            format=chosen_format,
            model=model_name,
            module_folders=module_folders,
        )
    )
    accuracy = "" if exported["top1"] is None else f", top-1 {exported['top1']:.2f} %"
    click.echo(
        f"{exported['file']}: {exported['model']} after {pluralize(exported['epoch'], 'epoch')}{accuracy}, "
        f"{_format_parameters(exported['parameters'])} in {pluralize(exported['tensors'], 'tensor')}"
    )
    click.echo(f"{exported['classes_file']}: {exported['classes']} classes, images of {exported['image_size']} pixels")
    if load_line := _load_line(exported["model"], file, exported["classes"], chosen_format, ParameterNames(names)):
        click.echo(f"load it: {load_line}")


def _format_parameters(number: int) -> str:
    """Return a number of parameters as text, in millions from one million on."""
    return f"{number / 1e6:.1f} million values" if number >= 1_000_000 else pluralize(number, "value")


def _load_line(model: str, file: Path, classes: int, file_format: "FileFormat", names: "ParameterNames") -> str:
    """Return Python that loads an exported network, and what to install; "" where only the user knows its builder."""
    from train.inference.protocol import FileFormat, ParameterNames

    if file_format is FileFormat.ONNX:
        return f"import onnxruntime; net = onnxruntime.InferenceSession({str(file)!r})    (pip install onnxruntime)"
    library, colon, name = model.rpartition(":")
    if names is not ParameterNames.PLAIN:
        library, colon = names, ":"
    builders = {
        "": f"train.models.registry.MODEL_BUILDERS[{model!r}]({classes})",
        "torchvision": f"torchvision.models.get_model({name!r}, num_classes={classes})",
        "timm": f"timm.create_model({name!r}, num_classes={classes})",
    }
    if library not in builders:
        return ""
    reader, state = "torch", f"torch.load({str(file)!r}, weights_only=True)"
    if colon and file_format is FileFormat.SAFETENSORS:
        reader, state = "safetensors.torch", f"safetensors.torch.load_file({str(file)!r})"
    elif file_format is FileFormat.SAFETENSORS:  # this project reads the format itself
        reader = "pathlib, train.weights.safetensors_file as weights"
        state = f"weights.read_safetensors(pathlib.Path({str(file)!r}))"
    packages = f"    (pip install {'safetensors ' if 'safetensors' in reader else ''}{library})" if colon else ""
    imports = f"import {reader}, {library or 'train.models.registry'}"
    return f"{imports}; net = {builders[library]}; net.load_state_dict({state}){packages}"


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
    from cluster.jobs import evaluation
    from train.inference.protocol import PredictOptions

    job_or_file, images = _split_images(job_or_file_and_images)
    if not images:
        raise BadInput(f"{job_or_file}: name the images after it: imgnet-cluster predict {job_or_file} IMAGE...")
    source, model_name, _, module_folders = _trained_weights(job_or_file, best, model)
    predictions: list[Prediction] = []
    options = PredictOptions(source=source, images=images, model=model_name, module_folders=module_folders)
    for prediction in evaluation.predict(options):
        predictions.append(prediction)
        if output != "json":
            _print_prediction(prediction)
    if output == "json":
        print_json([_without_kind(prediction) for prediction in predictions])
    unreadable = sum(bool(prediction["error"]) for prediction in predictions)
    if unreadable:
        raise ClusterError(f"{unreadable} of {len(predictions)} images could not be read")


def _split_images(words: "Sequence[str]") -> "tuple[str | None, tuple[Path, ...]]":
    """Split the arguments into the job or the file of weights (None: not given) and the images."""
    from cluster.jobs import store

    path = Path(words[0])
    has_source = path.suffix in WEIGHTS_SUFFIXES or (store.is_job_name(words[0]) and not path.is_file())
    return (words[0] if has_source else None), tuple(map(Path, words[has_source:]))


def _print_prediction(prediction: "Prediction") -> None:
    if prediction["error"]:
        return warn(prediction["error"])
    click.echo(prediction["file"])
    for answer in prediction["answers"]:
        click.echo(f"  {answer['percent']:6.2f} %  {answer['class']}")


@click.command(cls=GroupedCommand)
@click.argument("job", required=False)
def pull(job: str | None) -> None:
    """Bring the network or the checkpoints of JOB here.

    Without JOB, the newest job is taken. Of an unfinished job it is the newest checkpoint, of a command the newest copy
    of its checkpoint folder. Prints where the files are.
    """
    from cluster.jobs import checkpoints, store
    from cluster.state.states import JobState

    found_job = store.find(job)
    refresh(found_job)
    with _download_bar(found_job) as progress:
        paths = checkpoints.fetch_network(found_job, progress)
        if found_job.state != JobState.DONE or not paths:
            paths = [checkpoints.newest_checkpoint(found_job, progress)]
    for path in paths:
        files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
        click.echo(f"{path}  {sum(file.stat().st_size for file in files) / 1e6:.1f} MB")


COMMANDS = (evaluate, export, predict, pull)
