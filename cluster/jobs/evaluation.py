"""Runs evaluation, export and prediction, which need torch, in separate processes and reads their messages."""

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from cluster.connectors.local import module_command
from cluster.errors import ClusterError
from train.evaluation.protocol import AccuracyPercents, EvaluationMessage, EvaluationRow, RatioBucket
from train.inference.protocol import Exported, ExportOptions, Prediction, PredictOptions
from train.tools.process import die_with_parent, kill_process_groups
from train.tools.process_log import Progress, no_progress

from . import checkpoints
from .job import Job

EVALUATION_MODULE = "train.evaluation.__main__"
INFERENCE_MODULE = "train.inference.__main__"
OPTIONS_WITHOUT_FLAG_AND_VALUE = ("checkpoint", "module_folders", "skip_bad")


def job_evaluation_options(job: Job, is_best: bool = False, progress: Progress = no_progress) -> dict[str, object]:
    """Return the options that repeat a job's own validation: its network, data set, fraction of images.

    Raises `ClusterError` as `checkpoints.trained_weights` does.
    """
    spec = job.spec
    return {
        "checkpoint": checkpoints.trained_weights(job, is_best, progress),
        "model": spec.recipe.model.name,
        "data": spec.train.data,
        "copies": spec.train.copies,
        "scale": spec.train.scale,
        "skip_bad": spec.train.skip_bad,
        "module_folders": module_folders(job),
    }


def module_folders(job: Job) -> tuple[str, ...]:
    """Return the folders in a job's copy of the user's project in which the recipe's modules are found."""
    project = job.spec.user_project
    return project.search_folders(job.run_folder.user_project) if project else ()


def evaluation_command(options: Mapping[str, object]) -> list[str]:
    """Return the command that evaluates `options["checkpoint"]`. An option that is None is left out.

    `options["module_folders"]` are the folders with the user's modules that the network needs.
    """
    values = {name: value for name, value in options.items() if name not in OPTIONS_WITHOUT_FLAG_AND_VALUE}
    argv = [f"--{name.replace('_', '-')}={value}" for name, value in values.items() if value is not None]
    if options.get("skip_bad"):
        argv.append("--skip-bad")
    folders = cast(Sequence[str], options.get("module_folders", ()))
    return module_command(EVALUATION_MODULE, *argv, "--", str(options["checkpoint"]), module_folders=folders)


def run_evaluation(argv: Sequence[str]) -> Iterator[EvaluationMessage]:
    """Run an evaluation command and yield its messages as they come. Raises `ClusterError` as `_run` does."""
    return cast(Iterator[EvaluationMessage], _run(argv))


def export(options: ExportOptions) -> Exported:
    """Write a network for other programs, and return what was written. Raises `ClusterError`."""
    argv = [f"--names={options.names}", f"--format={options.format}", *_model_option(options.model)]
    argv += ["--", str(options.source), str(options.file)]
    command = module_command(INFERENCE_MODULE, "export", *argv, module_folders=options.module_folders)
    (message,) = _run(command)
    return cast(Exported, message)


def predict(options: PredictOptions) -> Iterator[Prediction]:
    """Classify images, and yield the answers about each. Raises `ClusterError`."""
    files = map(str, (options.source, *options.images))
    argv = ["predict", *_model_option(options.model), "--", *files]
    command = module_command(INFERENCE_MODULE, *argv, module_folders=options.module_folders)
    return cast(Iterator[Prediction], _run(command))


def _model_option(name: str | None) -> list[str]:
    return [] if name is None else [f"--model={name}"]


def _run(argv: Sequence[str]) -> Iterator[Mapping[str, object]]:
    """Run a command and yield its messages, lines of JSON, as they come. Its progress goes to stderr.

    When the caller closes the iterator, the process and its children are killed. Raises `ClusterError` with the error
    message of the process when it fails.
    """
    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True, preexec_fn=die_with_parent
    )
    assert process.stdout
    try:
        for line in process.stdout:
            message = json.loads(line)
            if message["kind"] == "error":
                raise ClusterError(message["error"])
            yield message
        if code := process.wait():
            raise ClusterError(f"the process ended with code {code}; its last lines are above")
    finally:
        kill_process_groups([process])
        process.stdout.close()


class BucketGain(RatioBucket, AccuracyPercents):
    """By how many points an accuracy is better in a bucket of aspect ratios."""


class RectGain(AccuracyPercents):
    """By how many points rectangular crops are better than square center crops at one size, also by aspect ratio."""

    size: int
    buckets: list[BucketGain]


def rect_gains(rows: Sequence[EvaluationRow], buckets: Sequence[RatioBucket]) -> list[RectGain]:
    """Return how much rectangular crops raise the accuracy, for each size that was evaluated with both crops."""
    gains: list[RectGain] = []
    for rect_row in rows:
        center_row = next((row for row in rows if (row["crop"], row["size"]) == ("center", rect_row["size"])), None)
        if rect_row["crop"] != "rect" or center_row is None:
            continue
        bucket_gains: list[BucketGain] = [
            {**bucket, **_accuracy_difference(rect_bucket, center_bucket)}
            for bucket, center_bucket, rect_bucket in zip(
                buckets, center_row["buckets"], rect_row["buckets"], strict=True
            )
        ]
        gains.append({"size": rect_row["size"], **_accuracy_difference(rect_row, center_row), "buckets": bucket_gains})
    return gains


def _accuracy_difference(row: AccuracyPercents, reference_row: AccuracyPercents) -> AccuracyPercents:
    return {"top1": row["top1"] - reference_row["top1"], "top5": row["top5"] - reference_row["top5"]}
