"""A saved network examined by several crops and sizes: `train.evaluation.__main__`, which knows torch, in a process of its own."""

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.connectors.local import module_command
from cluster.errors import ClusterError
from cluster.machines import checkpoint_files
from train.tools.process import die_with_parent, kill_process_groups

from . import checkpoints
from .job import Job


def job_evaluation_options(
    job: Job, progress: checkpoint_files.DownloadProgress = lambda done, total: None
) -> dict[str, Any]:
    """Return what a job's own examination takes from it: its newest checkpoint, data, and part of the images.

    Raises `ClusterError` as `checkpoints.newest` does.
    """
    spec = job.spec
    return {
        "checkpoint": checkpoints.newest_checkpoint(job, progress), "data": spec.data, "copies": spec.copies, "scale": spec.scale,
        "skip_bad": spec.skip_bad,
    }  # fmt: skip


def evaluation_command(checkpoint: Path, *, skip_bad: bool = False, **options: Any) -> list[str]:
    """Return the command that examines a checkpoint; `given` are its options by name, None left out."""
    words = [f"--{name}={value}" for name, value in options.items() if value is not None]
    return module_command("train.evaluation.__main__", *words, *["--skip-bad"] * skip_bad, "--", str(checkpoint))


def run_evaluation(argv: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Run such a command and yield what it tells, as it comes; how far it is goes to stderr.

    Raises `ClusterError` with its line when it fails. Nothing of it runs any more when the caller stops asking.
    """
    child = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True, preexec_fn=die_with_parent
    )
    assert child.stdout
    try:
        for line in child.stdout:
            said = json.loads(line)
            if said["kind"] == "error":
                raise ClusterError(said["error"])
            yield said
        if code := child.wait():
            raise ClusterError(f"train.evaluation.__main__ ended with code {code}; its last words stand above")
    finally:
        kill_process_groups([child])
        child.stdout.close()


def rect_gains(rows: Sequence[Mapping[str, Any]], buckets: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return by how many points rectangles are better than the square centre, at each size that has both, by bucket."""
    found = []
    for rect in rows:
        centres = [one for one in rows if (one["crop"], one["size"]) == ("center", rect["size"])]
        if rect["crop"] != "rect" or not centres:
            continue
        pairs = zip(buckets, centres[0]["buckets"], rect["buckets"], strict=True)
        parts = [
            {**bucket, **{top: mine[top] - square[top] for top in ("top1", "top5")}} for bucket, square, mine in pairs
        ]
        whole = {top: rect[top] - centres[0][top] for top in ("top1", "top5")}
        found.append({"size": rect["size"], **whole, "buckets": parts})
    return found
