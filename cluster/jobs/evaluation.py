"""Runs `train.evaluation`, which needs torch, in a process of its own, and reads its messages."""

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.connectors.local import module_command
from cluster.errors import ClusterError
from cluster.machines.checkpoint_files import DownloadProgress
from train.tools.process import die_with_parent, kill_process_groups

from . import checkpoints
from .job import Job

EVALUATION_MODULE = "train.evaluation.__main__"


def job_evaluation_options(job: Job, progress: DownloadProgress = lambda done, total: None) -> dict[str, Any]:
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


def evaluation_command(checkpoint: Path, *, skip_bad: bool = False, **options: Any) -> list[str]:
    """Return the command that evaluates a checkpoint. `options` are its options by name; None leaves one out."""
    argv = [f"--{name}={value}" for name, value in options.items() if value is not None]
    if skip_bad:
        argv.append("--skip-bad")
    return module_command(EVALUATION_MODULE, *argv, "--", str(checkpoint))


def run_evaluation(argv: Sequence[str]) -> Iterator[dict[str, Any]]:
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


def rect_gains(rows: Sequence[Mapping[str, Any]], buckets: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return by how many percentage points rectangular crops are better than square center crops.

    One dict for each size that has both: "size", "top1", "top5", and "buckets" with the gains by aspect ratio.
    """
    gains = []
    for rect_row in rows:
        center_row = next((row for row in rows if (row["crop"], row["size"]) == ("center", rect_row["size"])), None)
        if rect_row["crop"] != "rect" or center_row is None:
            continue
        bucket_gains = [
            {**bucket, **_accuracy_difference(rect_bucket, center_bucket)}
            for bucket, center_bucket, rect_bucket in zip(
                buckets, center_row["buckets"], rect_row["buckets"], strict=True
            )
        ]
        gains.append({"size": rect_row["size"], **_accuracy_difference(rect_row, center_row), "buckets": bucket_gains})
    return gains


def _accuracy_difference(row: Mapping[str, Any], reference_row: Mapping[str, Any]) -> dict[str, float]:
    return {metric: row[metric] - reference_row[metric] for metric in ("top1", "top5")}
