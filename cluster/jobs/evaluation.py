"""Runs `train.evaluation`, which needs torch, in a process of its own, and reads its messages."""

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence

from cluster.connectors.local import module_command
from cluster.errors import ClusterError
from cluster.machines.checkpoint_files import DownloadProgress
from train.evaluation.protocol import AccuracyPercents, EvaluationMessage, EvaluationRow, RatioBucket
from train.tools.process import die_with_parent, kill_process_groups

from . import checkpoints
from .job import Job

EVALUATION_MODULE = "train.evaluation.__main__"


def job_evaluation_options(job: Job, progress: DownloadProgress = lambda done, total: None) -> dict[str, object]:
    """Return the options by which a job's own validation is repeated: newest checkpoint, data set, fraction of images.

    Raises `ClusterError` as `checkpoints.newest_checkpoint` does.
    """
    spec = job.spec
    return {
        "checkpoint": checkpoints.newest_checkpoint(job, progress),
        "data": spec.train.data,
        "copies": spec.train.copies,
        "scale": spec.train.scale,
        "skip_bad": spec.train.skip_bad,
    }


def evaluation_command(options: Mapping[str, object]) -> list[str]:
    """Return the command that evaluates `options["checkpoint"]` by the other options; None leaves one out."""
    valued = {name: value for name, value in options.items() if name not in ("checkpoint", "skip_bad")}
    argv = [f"--{name}={value}" for name, value in valued.items() if value is not None]
    if options.get("skip_bad"):
        argv.append("--skip-bad")
    return module_command(EVALUATION_MODULE, *argv, "--", str(options["checkpoint"]))


def run_evaluation(argv: Sequence[str]) -> Iterator[EvaluationMessage]:
    """Run an evaluation command and yield its messages as they come. Its progress goes to stderr.

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
            raise ClusterError(f"the evaluation ended with code {code}; its last lines are above")
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
